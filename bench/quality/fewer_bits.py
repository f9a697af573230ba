"""Perplexity of a model whose weights are in fewer bits: neurons alone, resident matrices alone, both, parts apart.

    python bench/quality/fewer_bits.py HF_FOLDER TEXT --variants wide int8_32 int4_32+int8_32 int4_32:down

A variant is `wide` (the folder as it is, in its own dtype), a dtype (`bfloat16`), NEURONS+RESIDENT+TABLES (each may be
empty: `+int4_32` is resident matrices alone; tables are embedding and head, otherwise as RESIDENT; `bf12` codes the
weights in bfloat16), the same with a `*` behind it, whose codes are chosen on the text of `--calibrate`, or
ENCODING:MATRICES, where only those of a neuron's matrices (down, or up,gate) are rounded; that rounding is done on the
folder's weights. Everything else is converted and run by the engine, densely. Text: windows of `--length` tokens spread
evenly, every token but a window's first predicted. The last line of stdout is one JSON document. No timings.
"""

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[2] / "predictors"))

from evaluate import read_text

from flashllm.arch.registry import claims
from flashllm.base.bf12 import BF12
from flashllm.base.dtypes import WEIGHT_DTYPE_BY_CODE, WEIGHT_DTYPES, cast
from flashllm.base.group_codes import GROUP_CODES
from flashllm.config import RunConfig
from flashllm.convert.checkpoint.opened import open_checkpoint
from flashllm.convert.checkpoint.source import Checkpoint
from flashllm.convert.run import convert_checkpoint
from flashllm.engine.model import Model
from flashllm.format.report.inspect import inspect
from flashllm.format.rows import CODED_ENCODINGS
from flashllm.generate.tokenizer import Tokenizer
from flashllm.pack.calibrated import convert_calibrated


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What is in fewer bits: names of CODED_ENCODINGS, None for `dtype`."""

    name: str
    dtype: str | None = None  # None: the checkpoint's own
    neurons: str | None = None
    resident: str | None = None
    tables: str | None = None  # embedding and head, where they differ from `resident`
    calibrated: bool = False
    rounded: tuple[str, ...] = ()  # matrices of neurons that `rounding` is applied to, before the conversion
    rounding: str | None = None

    @classmethod
    def of(cls, text: str) -> "Variant":
        """ValueError for what is no variant."""
        encoding, colon, matrices = text.partition(":")
        if colon:
            found = cls(name=text, rounding=encoding, rounded=tuple(matrices.split(",")))
        else:
            dtype = text if text in WEIGHT_DTYPES else None
            parts = text.removeprefix("wide" if dtype is None else dtype).removesuffix("*").split("+")
            if len(parts) > 3:
                raise ValueError(f"{text}: is more than NEURONS+RESIDENT+TABLES")
            neurons, resident, tables = (part or None for part in (*parts, "", "")[:3])
            found = cls(
                name=text,
                dtype="bfloat16" if BF12.name in parts else dtype,
                neurons=neurons,
                resident=resident,
                tables=tables,
                calibrated=text.endswith("*"),
            )
        for encoding in (found.neurons, found.resident, found.tables):
            if encoding is not None and encoding not in CODED_ENCODINGS:
                raise ValueError(f"{text}: {encoding} is not one of {', '.join(CODED_ENCODINGS)}")
        if found.rounding is not None and found.rounding not in GROUP_CODES:
            raise ValueError(f"{text}: {found.rounding} is not one of {', '.join(GROUP_CODES)}")
        return found

    def convert(self, folder: Path, directory: Path, *, text: Path | None = None, threads: int | None = None) -> None:
        """The Hugging Face folder as the new model directory `directory`; codes are chosen on `text`."""
        options: dict[str, Any] = {
            "dtype": self.dtype,
            "encoding": self.neurons,
            "resident_encoding": self.resident,
            "table_encoding": self.tables,
            "source_name": folder.name,
        }
        if self.calibrated:
            if text is None:
                raise ValueError(f"{self.name}: needs a text")
            convert_calibrated(folder, directory, text, **options, threads=threads)
            return
        with open_checkpoint(folder) as opened:
            rounded = self.rounding is not None
            checkpoint: Any = RoundedCheckpoint(opened, self.rounded, self.rounding) if rounded else opened
            convert_checkpoint(checkpoint, directory, **options)


class RoundedCheckpoint:
    """A checkpoint some of whose neurons' matrices are rounded to an encoding, along d_model, when they are read."""

    def __init__(self, checkpoint: Checkpoint, matrices: tuple[str, ...], encoding: str) -> None:
        self._checkpoint, self._code = checkpoint, GROUP_CODES[encoding]
        names = [f".{matrix}.weight" for matrix in matrices]
        found = {c.source: c for c in claims(checkpoint.config).values() if c.name.endswith(tuple(names))}
        if not found or any(claim.part.transposed or claim.part.count for claim in found.values()):
            raise ValueError(f"{checkpoint.path}: its {', '.join(matrices)} cannot be rounded apart")
        self._down = {source: claim.name.split(".")[2] == "down" for source, claim in found.items()}
        self._whole: dict[str, NDArray[Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._checkpoint, name)

    def read(self, name: str, start: int, out: NDArray[Any]) -> None:
        if name not in self._down:
            self._checkpoint.read(name, start, out)
            return
        if name not in self._whole:
            info = self._checkpoint.tensors[name]
            dtype = WEIGHT_DTYPE_BY_CODE[info.dtype]
            values = np.empty(info.shape, dtype.storage)
            self._checkpoint.read(name, 0, values)
            wide = cast(values, dtype, WEIGHT_DTYPES["float32"])
            wide = np.ascontiguousarray(wide.T) if self._down[name] else wide
            rounded = self._code.decode(self._code.encode(wide), wide.shape[1])
            rounded = np.ascontiguousarray(rounded.T) if self._down[name] else rounded
            self._whole = {name: cast(rounded, WEIGHT_DTYPES["float32"], dtype).reshape(-1).view(np.uint8)}
        flat = out.reshape(-1).view(np.uint8)
        flat[:] = self._whole[name][start : start + len(flat)]


def spread_windows(ids: list[int], count: int, length: int) -> Iterator[list[int]]:
    """`count` windows of `length` tokens, evenly spread over the text."""
    last = max(0, len(ids) - length)
    for i in range(count):
        first = last * i // max(1, count - 1)
        yield ids[first : first + length]


def perplexity(directory: Path, windows: list[list[int]], threads: int | None) -> float:
    """Of the next tokens of all windows."""
    nll, tokens = 0.0, 0
    with Model.open(directory, RunConfig(mode="dense", threads=threads, context=len(windows[0]))) as model:
        for window in windows:
            sequence = model.new_sequence()
            for first in range(0, len(window), 256):  # few logits at a time
                part = window[first : first + 256]
                logits = np.asarray(model.step([(sequence, part)], all_logits=True), np.float64)
                wanted = window[first + 1 : first + 1 + len(part)]
                rows = logits[: len(wanted)]
                largest = rows.max(axis=1)
                norms = largest + np.log(np.exp(rows - largest[:, None]).sum(axis=1))
                nll += float((norms - rows[np.arange(len(wanted)), wanted]).sum())
                tokens += len(wanted)
            sequence.close()
    return math.exp(nll / tokens)


def measure(folder: Path, variant: Variant, windows: list[list[int]], args: argparse.Namespace) -> dict[str, Any]:
    """One variant, converted into a temporary directory."""
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        directory = Path(scratch) / "model"
        variant.convert(folder, directory, text=args.calibrate, threads=args.threads)
        facts = inspect(directory)
        return {
            "variant": variant.name,
            "perplexity": perplexity(directory, windows, args.threads),
            "neurons_nbytes": facts["ffn_nbytes"],
            "resident_nbytes": facts["resident_nbytes"],
        }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="a Hugging Face folder with a tokenizer")
    parser.add_argument("text", type=Path, help="plain, .gz, or .jsonl(.gz) with `text`")
    parser.add_argument("--variants", nargs="+", default=["wide", "int8_32+int8_32", "int4_32+int4_32"])
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a window")
    parser.add_argument("--calibrate", type=Path, help="plain text in UTF-8 for variants with a *")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--scratch", type=Path, help="where models are converted to (default: the system's)")
    args = parser.parse_args(argv)
    variants = [Variant.of(text) for text in args.variants]
    if args.calibrate is None and any(variant.calibrated for variant in variants):
        parser.error("variants with a * need --calibrate")
    ids = Tokenizer.load(args.folder).encode(read_text(args.text))
    windows = list(spread_windows(list(ids), args.windows, args.length))
    results: list[dict[str, Any]] = []
    for variant in variants:
        result = measure(args.folder, variant, windows, args)
        results.append({**result, "change": result["perplexity"] / (results or [result])[0]["perplexity"] - 1})
        print("{variant:28} {perplexity:9.4f} {change:+8.2%}".format(**results[-1]), flush=True)
    print(json.dumps({"text": args.text.name, "windows": len(windows), "length": args.length, "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
