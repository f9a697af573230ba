"""Write a model directory of any OPT shape with dummy weights, streamed straight into our format, and a made-up trace.

    python tools/make_synthetic_model.py OUT --shape opt-6.7b

For measurements at sizes for which no trained model is at hand: sizes, limits, reads and arithmetic are real, the
weights mean nothing. Dummy weights have no natural sparsity, so the directory carries a trace whose answers take the
place of the predictor's, which still runs at full cost; every record of such a model says *synthetic weights,
synthetic trace*. Memory: one layer's down projection and a pool of random numbers, a few hundred megabytes whatever
the shape.
"""

import argparse
import dataclasses
import json
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from activity_trace import TRACE, Trace
from install_popularity import install_popularity
from numpy.typing import NDArray
from synthetic.opt_shapes import CONTEXT, SHAPES, VOCAB, opt_config
from synthetic.trace import FIRING_SHARE, add_prefetch_arguments, write_synthetic_trace

from flashllm.arch.registry import source_shapes
from flashllm.base.dtypes import WEIGHT_DTYPES, WeightDtype, cast
from flashllm.base.files import HashingWriter, iterate_chunks
from flashllm.base.progress import ProgressBar
from flashllm.convert.checkpoint.source import Checkpoint, companion_files
from flashllm.convert.choices import Choices
from flashllm.convert.run import convert_checkpoint
from flashllm.format.install import install_files, install_predictors
from flashllm.format.manifest import Manifest
from flashllm.format.model_files import FFN, PREDICTOR_METADATA
from flashllm.format.predictors import FACTOR_CODES, PREFETCH, predictor_entries
from flashllm.format.rows import CODED_ENCODINGS
from flashllm.format.safetensors import ITEMSIZES, TensorInfo, encode_header

POOL_SIZE = 16_777_213  # values; a prime, so that no two rows of a matrix repeat the same stretch of the pool
NAME = "synthetic weights (seed {seed})"


class Numbers:
    """Normal deviates of one dtype, endlessly: any stretch of any tensor, always the same."""

    def __init__(self, dtype: WeightDtype, seed: int) -> None:
        self._dtype = dtype
        self._normal = np.random.default_rng(seed).standard_normal(POOL_SIZE, np.float32)
        self._scaled: dict[float, NDArray[Any]] = {}

    def fill(self, name: str, scale: float, first: int, out: NDArray[Any]) -> None:
        """`out` gets the values of tensor `name` from its element `first` on."""
        if scale not in self._scaled:
            self._scaled[scale] = cast(self._normal * np.float32(scale), WEIGHT_DTYPES["float32"], self._dtype)
        pool, at, done = self._scaled[scale], (zlib.crc32(name.encode()) * 7919 + first) % POOL_SIZE, 0
        while done < len(out):
            count = min(len(out) - done, POOL_SIZE - at)
            out[done : done + count] = pool[at : at + count]
            done, at = done + count, 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DummyCheckpoint(Checkpoint):
    """A checkpoint that lies in no file: its tensors are made up when they are read."""

    numbers: Numbers
    dtype: WeightDtype
    seed: int

    def read(self, name: str, start: int, out: NDArray[Any]) -> None:
        """As `Checkpoint.read`: norms are ones, biases zeros, matrices normal with variance 1 / columns."""
        flat, shape = out.reshape(-1).view(self.dtype.storage), self.tensors[name].shape
        if len(shape) == 1:
            flat[:] = cast(np.full(1, float(name.endswith("weight")), np.float32), WEIGHT_DTYPES["float32"], self.dtype)
        else:
            self.numbers.fill(name, shape[-1] ** -0.5, start // self.dtype.itemsize, flat)

    def where(self, name: str) -> str:
        return f"dummy tensor {name}"

    def identity(self) -> list[list[object]]:
        return [[str(self.path.resolve())], ["dummy weights", self.seed, self.dtype.name]]


def dummy_checkpoint(folder: Path, config: dict[str, Any], dtype: WeightDtype, seed: int) -> DummyCheckpoint:
    """The checkpoint that `config`, which lies in `folder` beside a tokenizer, describes."""
    tensors = {name: TensorInfo.made(name, dtype.code, shape) for name, shape in source_shapes(config).items()}
    return DummyCheckpoint(
        path=folder,
        config=config,
        tensors=tensors,
        companions=tuple(companion_files(folder)),
        _files={},
        numbers=Numbers(dtype, seed),
        dtype=dtype,
        seed=seed,
    )


def convert_dummy(
    folder: Path, config: dict[str, Any], out: Path, *, seed: int, tokenizer: Path, **choices: Unpack[Choices]
) -> Manifest:
    """The model directory `out` with the dummy weights of `config`, whose files are put into `folder`."""
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    for path in tokenizer_files(tokenizer):
        shutil.copy(path, folder)
    checkpoint = dummy_checkpoint(folder, config, WEIGHT_DTYPES[config["dtype"]], seed)
    with ProgressBar("model") as bar:
        return convert_checkpoint(checkpoint, out, source_name=NAME.format(seed=seed), progress=bar, **choices)


def paper_ranks(num_layers: int, d_model: int) -> list[int]:
    """Paper A, appendix C.1, scaled by the width: rank 128 of 4096, 1024 in the last four layers."""
    return [max(4, d_model // (4 if layer >= num_layers - 4 else 32)) for layer in range(num_layers)]


def write_predictors(path: Path, manifest: Manifest, seed: int, bits: int, *, prefetch: bool) -> None:
    """Predictors of the paper's ranks, of 8 or 4 bits: random, with the arithmetic of trained ones."""
    architecture, random = manifest.architecture, np.random.default_rng(seed)
    d_model, d_ff = architecture.d_model, architecture.d_ff
    entries = []
    for layer, rank in enumerate(paper_ranks(architecture.num_layers, d_model)):
        for kind in ("", PREFETCH) if prefetch and layer > 0 else ("",):
            entries += predictor_entries(f"layers.{layer}.{kind}", rank, d_model, d_ff, bits)
    entries.sort(key=lambda entry: -ITEMSIZES[entry[1]])  # wider elements first, so that all are aligned
    metadata = {**PREDICTOR_METADATA, "made_by": f"synthetic, seed {seed}"}
    with HashingWriter(path) as writer:
        writer.write(memoryview(encode_header(entries, {**metadata, "model_sha256": manifest.files[FFN].sha256})))
        for name, dtype, shape in entries:
            values = {
                "U8": lambda: random_factor(random, 4, shape),  # noqa: B023
                "I8": lambda: random_factor(random, 8, shape),  # noqa: B023
                "F16": lambda: np.full(shape, 2.0**-7, "<f2"),  # noqa: B023
                "F32": lambda: np.full(shape, float(name.endswith("threshold")), "<f4"),  # noqa: B023
            }[dtype]()
            writer.write(values.reshape(-1).view(np.uint8).data)
        writer.finish()


def random_factor(random: np.random.Generator, bits: int, shape: tuple[int, int]) -> NDArray[np.uint8]:
    """A factor of 4 or 8 bits, of `shape` in bytes."""
    rows, nbytes = shape
    code = FACTOR_CODES[bits]
    columns = nbytes // code.vector_nbytes(code.group) * code.group
    return code.encode(random.standard_normal((rows, columns), np.float32))


def tokenizer_files(folder: Path) -> Iterator[Path]:
    yield from sorted(folder.glob("token*.json"))


def install_traces(out: Path, layers: int, neurons: int, args: argparse.Namespace, firing: float) -> None:
    """The trace to run by, and what is known of the neurons from another one of the same popularity and groups."""
    with tempfile.TemporaryDirectory() as name:
        for part, tokens in (("judge", args.tokens), ("learn", args.learn_tokens)):
            write_synthetic_trace(
                Path(name) / part, layers=layers, neurons=neurons, tokens=tokens, part=part,
                recall=args.early_recall, precision=args.early_precision, seed=args.seed, firing=firing,
            )  # fmt: skip
        install_files(out, {TRACE: iterate_chunks(Path(name) / "judge")})
        with Trace(Path(name) / "learn") as learn:
            install_popularity(out, learn)


def add_model_arguments(parser: argparse.ArgumentParser, shapes: Iterable[str], shape: str) -> None:
    """Add the options of a dummy model: its directory, sizes, dtype, tokenizer and seed. `shape` is the default."""
    parser.add_argument("out", type=Path, help="directory to write; must not exist")
    parser.add_argument("--shape", choices=shapes, default=shape)
    parser.add_argument("--layers", type=int, help="another number of layers than the shape has")
    parser.add_argument("--dtype", choices=WEIGHT_DTYPES, default="bfloat16")
    parser.add_argument("--tokenizer", type=Path, default=Path(__file__).parents[1] / "flashllm" / "demo")
    parser.add_argument("--seed", type=int, default=0)


def add_neuron_arguments(parser: argparse.ArgumentParser) -> None:
    """How neurons are stored, and the two traces of them."""
    parser.add_argument("--encoding", choices=CODED_ENCODINGS, help="of the neurons; by default the dtype as it is")
    parser.add_argument("--resident-encoding", choices=CODED_ENCODINGS, help="of what stays in memory")
    parser.add_argument("--tokens", type=int, default=1200, help="tokens of the trace, after which it begins again")
    parser.add_argument("--learn-tokens", type=int, default=1000, help="tokens that popularity is learned from")
    add_prefetch_arguments(parser)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_model_arguments(parser, SHAPES, "opt-6.7b")
    add_neuron_arguments(parser)
    parser.add_argument("--hidden", type=int, help="another width (a multiple of the number of heads)")
    parser.add_argument("--vocab", type=int, default=VOCAB)
    parser.add_argument("--predictor-bits", type=int, choices=(8, 4), default=8)
    parser.add_argument("--no-early", action="store_true", help="make no predictors to prefetch by")
    args = parser.parse_args(argv)

    layers, hidden, heads = SHAPES[args.shape]
    layers, hidden = args.layers or layers, args.hidden or hidden
    dtype = WEIGHT_DTYPES[args.dtype]
    config = opt_config(layers, hidden, heads, dtype=dtype.name, vocab=args.vocab, context=CONTEXT)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        manifest = convert_dummy(
            folder,
            config,
            args.out,
            seed=args.seed,
            tokenizer=args.tokenizer,
            encoding=args.encoding,
            resident_encoding=args.resident_encoding,
        )
        write_predictors(folder / "predictors", manifest, args.seed, args.predictor_bits, prefetch=not args.no_early)
        install_predictors(args.out, folder / "predictors")
    install_traces(args.out, layers, 4 * hidden, args, FIRING_SHARE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
