"""Writes a GGUF file of a known model's shape, with dummy weights in the kinds that llama.cpp's quantiser would choose.

    pip install gguf
    python bench/peer/dummy_gguf.py qwen3.6-35b-a3b FILE.gguf [--layers N] [--type q4_k_m]

The models are those of `flashllm models` (flashllm/convert/models.json) and of `SHAPES`, or a config.json. Names of
tensors and metadata are those of the tests' writer (tests/gguf_files.py, by llama.cpp's converter). Quantised blocks
are written as such: random codes, whose scales give a matrix about the spread that a trained one has. 20 GB take as
long as the drive takes to write them. The text means nothing, so there is no vocabulary: tokens go in as ids 0, 1, 2.

Routers are fp32 and real, and llama.cpp routes by its router, so the locality of the routing is built into the
embedding. Row t is a walk, row t = memory * row t-1 + noise, and beside it a vector that all rows share; what attention
and experts add is small, so that every layer's router sees about that. Fed with ids 0, 1, 2 ..., a token goes to as
many of the last token's experts, and as often to the most frequent ones, as in published traces (43 and 38 % on
Qwen3-30B-A3B: BigMoeOnEdge). What comes of it, by these routers on these rows, is printed. A guess of the next layer's
experts comes true more often than a trained model's: the residual stream says little new from layer to layer.
"""

import argparse
import itertools
import json
import math
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from flashllm.arch.registry import source_shapes
from flashllm.base.units import format_size
from flashllm.convert.outline import find_well_known

SMALL = 0.02  # of what attention and experts add
# Share of the experts that a token has, at least -> of the embedding's variance what the vector that all rows have
# makes; memory of the walk: together about 40 and 36 to 40 %, by simulation.
WALKS = ((1 / 12, 0.3, 0.4), (1 / 24, 0.4, 0.5), (0.0, 0.55, 0.5))
POOL_NBYTES = 16 << 20  # blocks, used again and again from random places
BLOCK_ROWS = 4096
SLACK_NBYTES = 1 << 30  # left on the drive
SHAPES: dict[str, dict[str, Any]] = {
    "llama-2-7b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    }
}
FELL_BACK = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}  # where a row is no multiple of 256
_WIDE = re.compile(r"_norm|\.bias$|ffn_gate_inp|ssm_conv1d|ssm_a$|ssm_d$|ssm_dt|sinks|per_layer_model_proj|_scale")


def config_of(name: str, layers: int | None = None, **changed: Any) -> dict[str, Any]:
    """The whole config.json of a model by name, or of a file; with `layers` alone of its layers, and `changed` keys."""
    from transformers import AutoConfig

    known = find_well_known(name)
    if name in SHAPES:
        sizes = SHAPES[name]
    else:
        sizes = dict(known.config) if known is not None else json.loads(Path(name).read_text(encoding="utf-8"))
    sizes = {**sizes, **changed}
    pattern, shared = "hybrid_override_pattern", "num_kv_shared_layers"  # Nemotron's kinds of layers; Gemma's share
    if layers is not None and pattern in sizes:
        sizes |= {pattern: sizes[pattern][:layers]}
    elif layers is not None:
        if shared in sizes:  # llama.cpp wants a full layer last of those with keys of their own, one in six
            own = layers * (1 - sizes[shared] / sizes["num_hidden_layers"])
            sizes[shared] = layers - 6 * max(1, round(own / 6))
        sizes["num_hidden_layers"] = layers
    config: dict[str, Any] = AutoConfig.for_model(**sizes).to_dict()
    config.setdefault("num_hidden_layers", len(config.get("layers_block_type", ())))
    return config


def tensors(config: Mapping[str, Any]) -> dict[str, Any]:
    """Name in the file -> torch's tensor, without data but where the config says it."""
    import torch
    from gguf_files import file_tensors

    named = {
        re.sub(r"experts\.(up|gate)_bias", r"experts.\1_proj.bias", name): size
        for name, size in source_shapes(config).items()
    }
    for name, shape in named.items():
        if ".experts." in name and name.endswith("bias"):  # a file has a row an expert
            named[name] = (config["num_local_experts"], math.prod(shape) // config["num_local_experts"])
    state = {name: torch.empty(shape, device="meta") for name, shape in named.items()}
    return file_tensors(state, dict(config))


# Of the choices whose experts are not in the kind of the rest: the rest's, theirs, and that of their down matrices.
_APART = {"mxfp4": ("Q8_0", "MXFP4", "MXFP4"), "q2_k": ("Q4_K", "Q2_K", "Q3_K")}


def kinds(shapes: Mapping[str, tuple[int, ...]], layers: int, choice: str) -> dict[str, str]:
    """Name -> ggml's name of how the tensor is stored: of Q4_K_M and TQ2_0 by llama.cpp's rules (llama-quant.cpp)."""
    head = "output.weight" if "output.weight" in shapes else "token_embd.weight"
    if choice != "q4_k_m":
        rest, experts, down = _APART.get(choice, (choice.upper(),) * 3)

        ends = {"token_embd.weight": "Q4_K", head: "Q6_K"} if choice == "tq2_0" else {}

        def kind_of(name: str) -> str:
            if name in ends:
                return ends[name]
            return rest if "_exps" not in name else down if "down" in name else experts

        return {name: "F32" if _is_wide(name, shape) else kind_of(name) for name, shape in shapes.items()}
    result: dict[str, str] = {}
    values = [name for name in shapes if re.search(r"attn_(v|qkv|kv_b)\.weight", name)]

    def has_more(turn: int, count: int) -> bool:
        return turn < count // 8 or turn >= 7 * count // 8 or (turn - count // 8) % 3 == 2

    for name, shape in shapes.items():
        layer = re.match(r"blk\.(\d+)\.", name)
        if _is_wide(name, shape):
            result[name] = "F32"
            continue
        kind = "Q4_K"
        if name == head:
            kind = "Q6_K"
        elif name in values:
            kind = "Q6_K" if has_more(values.index(name), len(values)) else kind
        elif "ffn_down" in name and layer is not None:
            kind = "Q6_K" if has_more(int(layer[1]), layers) else kind
        result[name] = kind if shape[-1] % 256 == 0 else FELL_BACK[kind]
    return result


def _is_wide(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 1 or _WIDE.search(name) is not None


def stored_nbytes(shape: tuple[int, ...], kind: str) -> int:
    """Bytes of a tensor in the file."""
    import gguf

    block, each = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return math.prod(shape) // block * each


def embedding_walk(vocab: int, hidden: int, share: float, random: np.random.Generator) -> Iterator[NDArray[np.float32]]:
    """Rows of the embedding, a block after the other; `share`: of the experts, that a token has."""
    shared, memory = next((shared, memory) for least, shared, memory in WALKS if share >= least)
    common = random.standard_normal(hidden, np.float32) * np.float32(shared**0.5)
    row = random.standard_normal(hidden, np.float32)
    fresh = np.float32((1 - memory**2) ** 0.5)
    for first in range(0, vocab, BLOCK_ROWS):
        block = random.standard_normal((min(BLOCK_ROWS, vocab - first), hidden), np.float32) * fresh
        for i in range(len(block)):
            row = block[i] = block[i] + np.float32(memory) * row
        yield common + np.float32((1 - shared) ** 0.5) * block


def coded(rows: NDArray[np.float32], kind: str) -> NDArray[np.uint8]:
    """The rows in this kind. In K-quants each group has its largest value's scale."""
    import gguf

    if kind == "Q6_K":
        return _coded_q6(rows)
    if kind != "Q4_K":
        return gguf.quantize(rows, gguf.GGMLQuantizationType[kind]).view(np.uint8).reshape(len(rows), -1)
    groups = rows.reshape(-1, 8, 32)
    largest = np.abs(groups).max(2)
    scale = largest.max(1) / np.float32(63 * 7.5)
    steps = np.ceil(largest / np.maximum(scale[:, None] * 7.5, 1e-30)).clip(1, 63).astype(np.uint8)
    codes = np.rint(groups / (scale[:, None] * steps)[:, :, None] + 7.5).clip(0, 15).astype(np.uint8)
    packed = codes.reshape(-1, 4, 2, 32)
    halves = np.stack([scale, scale * np.float32(7.5)], 1).astype("<f2").view(np.uint8)
    parts = [halves, _scales_of_k(steps), (packed[:, :, 0] | packed[:, :, 1] << 4).reshape(-1, 128)]
    return np.concatenate(parts, 1).reshape(len(rows), -1)


def _coded_q6(rows: NDArray[np.float32]) -> NDArray[np.uint8]:
    groups = rows.reshape(-1, 16, 16)
    largest = np.abs(groups).max(2)
    scale = largest.max(1) / np.float32(127 * 31)
    steps = np.ceil(largest / np.maximum(scale[:, None] * 31, 1e-30)).clip(1, 127)
    codes = (np.rint(groups / (scale[:, None] * steps)[:, :, None]).clip(-32, 31) + 32).astype(np.uint8)
    quarters = codes.reshape(-1, 2, 4, 32)  # of each half: those of codes 0, 32, 64 and 96 on share bytes
    low = np.stack([quarters[:, :, i] & 15 | (quarters[:, :, i + 2] & 15) << 4 for i in (0, 1)], 2)
    high = sum(quarters[:, :, i] >> 4 << 2 * i for i in range(4))
    halves = scale.astype("<f2")[:, None].view(np.uint8)
    parts = [low.reshape(-1, 128), high.reshape(-1, 64), steps.astype(np.int8).view(np.uint8), halves]
    return np.concatenate(parts, 1).reshape(len(rows), -1)


def _scales_of_k(steps: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Eight scales of 6 bits, [blocks, 8], and as many minimums that equal them, as K-quants pack them."""
    low = steps[:, :4] | steps[:, 4:] >> 4 << 6
    return np.concatenate([low, low, steps[:, 4:] & 15 | steps[:, 4:] << 4], 1)


def blocks(kind: str, spread: float, random: np.random.Generator) -> NDArray[np.uint8]:
    """Random blocks of this kind, [blocks, bytes], of weights around 0 with this standard deviation."""
    import gguf

    nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    count = POOL_NBYTES // nbytes
    if kind in ("F32", "F16", "BF16"):
        values = random.standard_normal(count, np.float32) * np.float32(spread)
        return gguf.quantize(values.reshape(1, -1), gguf.GGMLQuantizationType[kind]).view(np.uint8).reshape(-1, nbytes)
    result = random.integers(0, 256, (count, nbytes), np.uint8)

    def half(at: int, value: float) -> None:
        result[:, at : at + 2] = np.array([value], "<f2").view(np.uint8)

    if kind in ("Q4_K", "Q5_K"):
        steps, levels = random.integers(24, 64, (count, 8), np.uint8), {"Q4_K": 16, "Q5_K": 32}[kind]
        scale = spread / _deviation(levels) / np.sqrt((steps.astype(float) ** 2).mean())
        half(0, scale)
        half(2, scale * (levels - 1) / 2)
        result[:, 4:16] = _scales_of_k(steps)
    elif kind == "Q6_K":
        steps = random.integers(16, 64, (count, 16), np.uint8)
        result[:, 192:208] = steps
        half(208, spread / _deviation(64) / np.sqrt((steps.astype(float) ** 2).mean()))
    elif kind == "Q2_K":
        factors, minimums = random.integers(8, 16, (2, count, 16), np.uint8)
        result[:, :16] = factors | minimums << 4
        scale = spread / _deviation(4) / np.sqrt((factors.astype(float) ** 2).mean())
        half(80, scale)
        half(82, scale * 1.5)
    elif kind == "Q3_K":
        result[:, 104:108] = (result[:, 104:108] & 0x55) * 3  # factors are 16 to 31 or -32 to -17; codes -4 to 3
        half(108, spread / 24.4 / math.sqrt(5.5))
    elif kind == "TQ2_0":  # a byte has four codes, 0, 1 or 2
        fours = np.array(
            [a | b << 2 | c << 4 | d << 6 for a, b, c, d in itertools.product(range(3), repeat=4)], np.uint8
        )
        result[:, :64] = fours[random.integers(len(fours), size=(count, 64))]
        half(64, spread / _deviation(3))
    elif kind == "MXFP4":  # codes whose root mean square is 2.9
        result[:, 0] = 127 + round(math.log2(spread / 2.9))
    else:
        levels = {"Q4_0": 16, "Q5_0": 32, "Q5_1": 32, "Q8_0": 256}[kind]
        half(0, spread / _deviation(levels))
        if kind == "Q5_1":
            half(2, -spread / _deviation(levels) * (levels - 1) / 2)
    return result


def _deviation(levels: int) -> float:
    """Of codes that are equally likely."""
    return math.sqrt((levels**2 - 1) / 12)


class Writer:
    """Tensors' bytes, as they are asked for."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._random = np.random.default_rng(0)
        self._pools: dict[tuple[str, float], NDArray[np.uint8]] = {}
        self.first_rows: NDArray[np.float32] | None = None  # of the embedding
        self.routers: list[NDArray[np.float32]] = []

    def parts(self, name: str, shape: tuple[int, ...], kind: str) -> Iterator[NDArray[Any]]:
        """The tensor's bytes, one part after the other."""
        if name == "token_embd.weight":
            for rows in embedding_walk(shape[0], shape[1], self._share, self._random):
                self.first_rows = rows if self.first_rows is None else self.first_rows
                yield coded(rows, kind)
        elif kind == "F32":
            yield self._small(name, shape)
        else:
            spread = shape[-1] ** -0.5 * (SMALL if re.search(r"output|down|ssm_out|out_proj", name) else 1.0)
            pool = self._pools.get((kind, spread))
            if pool is None:
                pool = self._pools[kind, spread] = blocks(kind, spread, self._random)
            left = stored_nbytes(shape, kind) // pool.shape[1]
            while left:
                count = min(left, len(pool) // 2)
                start = int(self._random.integers(len(pool) - count + 1))
                yield pool[start : start + count]
                left -= count

    def _small(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Values of a tensor that is no matrix, or that the file has in fp32."""
        if "ffn_gate_inp" in name or "conv1d" in name or "model_proj" in name:
            values = self._random.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)
            if "ffn_gate_inp.weight" in name:
                self.routers.append(values)
            return values
        if "ssm_dt" in name and name.endswith(".bias"):
            return np.full(shape, -4.0, np.float32)  # steps of 0.02
        if name.endswith("ssm_a"):
            return -self._random.uniform(1, 16, shape).astype(np.float32)
        if name.endswith((".bias", "sinks.weight")):
            return np.zeros(shape, np.float32)
        return np.ones(shape, np.float32)

    def locality(self, chosen: int) -> tuple[float, float] | None:
        """How many of a token's experts the last one had, and how often the most frequent are used, over all layers."""
        from make_synthetic_experts import locality

        if not self.routers or self.first_rows is None:
            return None
        rows = self.first_rows[:512]
        routes = [np.sort(np.argsort(-(rows @ router.T), axis=1)[:, :chosen], axis=1) for router in self.routers]
        return locality(routes, len(self.routers[0]))


def make(path: Path, config: Mapping[str, Any], choice: str = "q4_k_m") -> tuple[float, float] | None:
    """Write the model; the locality of its routing, None of a dense one. OSError where the drive has no room."""
    import gguf
    from gguf_files import name_of, write_config

    architecture = name_of(dict(config))
    stored = tensors(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    kind_of = kinds(shapes, config["num_hidden_layers"], choice)
    total = sum(stored_nbytes(shape, kind_of[name]) for name, shape in shapes.items())
    if shutil.disk_usage(path.parent).free < total + SLACK_NBYTES:
        raise OSError(f"{path}: {format_size(total)} do not fit on this drive")
    writer = gguf.GGUFWriter(path, architecture)
    write_config(writer, architecture, dict(config))
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    for name, shape in shapes.items():
        kind = gguf.GGMLQuantizationType[kind_of[name]]
        nbytes = stored_nbytes(shape, kind_of[name])
        writer.add_tensor_info(name, shape, np.dtype(np.float32), nbytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    chosen = next((count for key in ("num_experts_per_tok", "moe_k", "moe_topk") if (count := config.get(key))), 0)
    experts = next((shape[0] for name, shape in shapes.items() if "ffn_gate_inp.weight" in name), 1)
    data = Writer(chosen / experts)
    file = writer.fout[0]
    file.write(bytes(-file.tell() % writer.data_alignment))
    for name, shape in shapes.items():
        given = stored[name]
        for part in data.parts(name, shape, kind_of[name]) if given.is_meta else [given.float().numpy()]:
            file.write(memoryview(np.ascontiguousarray(part)).cast("B"))
        file.write(bytes(-file.tell() % writer.data_alignment))
    writer.close()
    return data.locality(chosen)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a name of `flashllm models`, one of " + ", ".join(SHAPES) + ", or a config.json")
    parser.add_argument("file", type=Path)
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    types = ("q4_k_m", "q2_k", "tq2_0", "q4_0", "q8_0", "mxfp4", "bf16", "f16")
    parser.add_argument("--type", choices=types, default="q4_k_m")
    args = parser.parse_args(argv)
    try:
        found = make(args.file, config_of(args.model, args.layers), args.type)
    except ImportError as error:
        print(f"dummy_gguf: {error}; pip install gguf 'flashllm[hf]'", file=sys.stderr)
    except OSError as error:
        print(f"dummy_gguf: {error}", file=sys.stderr)
    else:
        again, hottest = found or (None, None)
        said = {"model": args.model, "bytes": args.file.stat().st_size, "again": again, "most_frequent": hottest}
        if found is not None:
            print(f"of a token's experts the last one had {again:.0%}; the most frequent are {hottest:.0%} of all uses")
        print(json.dumps(said))
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
