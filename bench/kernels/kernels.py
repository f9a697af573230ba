"""How fast the kernels read weights, against how fast this machine reads memory at all.

    python bench/kernels/kernels.py [--threads N] [--seconds S] [--simd LEVEL] [--tiny]

Prints GB/s of resident products and attention at one token and of the sparse FFN with every active neuron cached, by
dtype and shape, and of products with coded weights, resident ones by what they are multiplied by and rows gathered from
a cache (a token's whole products, its up rows alone, its down columns alone), beside the roof: all threads summing
memory well beyond the caches (`_core.read_bandwidth`), taken in turn with the figures because the machine's bandwidth
moves with its neighbours. Then Gflop/s of coded products of a pass's and a prompt's tokens, by processor time, beside
the format's own inner loop over what the first cache holds, and torch's products of int8 and of fp32. Says the load
average it ran under: on a busy machine the percentages hold better than the figures. The last line is one JSON
document. Knows no model.
"""

import argparse
import functools
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import core_testing  # noqa: F401 - the core's test build, which has attention by itself
from engine_runs import add_simd

from flashllm import _core
from flashllm.base.dtypes import WEIGHT_DTYPES
from flashllm.format.rows import CARRIED_ENCODINGS, ROW_ENCODINGS, RowLayout

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Rows, columns at OPT-6.7B's shape: attention projections, head, predictors of rank 128 and 1024.
LINEARS = [(4096, 4096), (50272, 4096), (128, 4096), (16384, 128), (1024, 4096), (16384, 1024)]
CODED = [
    ("bf12", "float32"),
    *[(encoding, inputs) for encoding in ("int8_32", "int8_64") for inputs in ("float32", "int16", "int8")],
    *[(encoding, inputs) for encoding in ("int4_32", "int4_64", "int4_32_min") for inputs in ("float32", "int8")],
    *[(encoding, inputs) for encoding in CARRIED_ENCODINGS for inputs in ("float32", "int8")],  # of quantised files
]
CODED_SHAPE, TINY_CODED_SHAPE = (4096, 4096), (64, 256)
SPARSE = (4096, 16384, 0.10, 4)  # d_model, d_ff, share active, layers cached
ATTENTION = [(32, 32, 128, n) for n in (128, 512, 2048)] + [(32, 4, 128, 4096)]  # heads, of keys; width; positions
PROMPT = (128, 16384, 4096)  # tokens, rows, columns
PASS_TOKENS, PROMPT_TOKENS = (1, 2, 4, 8), (32, 128, 256)
# (encoding, inputs): codes that share a scale, minimums of a unit of 32, whether a prompt's inputs are bytes
TOKENS = {
    ("int4_32", "int8"): (32, 0, True),
    ("int4_32_min", "int8"): (32, 1, True),
    ("int8_32", "int16"): (32, 0, False),
    ("q4_k", "int8"): (32, 1, True),
    ("q6_k", "int8"): (16, 0, False),
    ("mxfp4", "int8"): (32, 0, True),
    ("q2_k", "int8"): (32, 2, True),
}
TILES = 2000  # products of what the first cache holds: some 10 ms
TINY_PROMPT = (9, 64, 48)
TINY_LINEARS = [(64, 48)]
TINY_SPARSE = (64, 256, 0.10, 2)
TINY_ATTENTION = [(2, 2, 16, 8), (8, 2, 16, 8)]
ROOF_NBYTES = 512 << 20  # well beyond the caches
ROUNDS = 5


class Rounds:
    """Figures and the roof taken in turn, because the machine's bandwidth moves with its neighbours."""

    def __init__(self, pool: _core.ThreadPool, seconds: float, nbytes: int, simd: str):
        self.pool, self.seconds, self.nbytes, self.simd = pool, seconds, nbytes, simd

    def roof(self) -> float:
        """Bytes per second of the median pass over memory."""
        return statistics.median(_core.read_bandwidth(self.pool, self.nbytes, self.seconds / 2))

    def figure(self, name: str, nbytes: int, run: Callable[[], None], **conditions: Any) -> dict[str, Any]:
        """One result: GB/s over single calls, and the share of the roof, both medians over the rounds."""
        run()
        rates: list[float] = []
        roofs: list[float] = []
        calls = 0
        for _ in range(ROUNDS):
            roofs.append(self.roof())
            times: list[float] = []
            while not times or sum(times) < self.seconds:
                started = time.perf_counter()
                run()
                times.append(time.perf_counter() - started)
            rates.append(nbytes / statistics.median(times))
            calls += len(times)
        return {
            "name": name,
            **conditions,
            "nbytes": nbytes,
            "calls": calls,
            "gb_per_s": round(statistics.median(rates) / 1e9, 2),
            "gb_per_s_range": [round(min(rates) / 1e9, 2), round(max(rates) / 1e9, 2)],
            "roof_gb_per_s": round(statistics.median(roofs) / 1e9, 2),
            "percent_of_roof": round(100 * statistics.median(r / t for r, t in zip(rates, roofs, strict=True))),
        }


def used(simd: str) -> str:
    """The level that computes."""
    return _core.best_simd_level() if simd == "auto" else simd


def as_loaded(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in memory of the kind that resident weights are read into: huge pages where there are any."""
    memory = torch.from_numpy(_core.allocate(tensor.nbytes)).view(tensor.dtype).reshape(tensor.shape)
    return memory.copy_(tensor)


def stored(tensor: torch.Tensor, dtype: str) -> NDArray[Any]:
    """As numpy holds the dtype: bfloat16 as its bits, which cost less to hand over than a tensor."""
    return tensor.to(DTYPES[dtype]).contiguous().view(torch.uint8).numpy().view(WEIGHT_DTYPES[dtype].storage)


def bench_linear(dtype: str, shape: tuple[int, int], rounds: Rounds):
    """A resident linear at one token; several copies in turn, so that none stays in the processor's cache."""
    rows, columns = shape
    element = torch.empty(0, dtype=DTYPES[dtype]).element_size()
    nbytes = rows * columns * element
    copies = max(2, rounds.nbytes // nbytes)
    weight = torch.randn(rows, columns).to(DTYPES[dtype])
    linears = [_core.Linear(as_loaded(weight), None, dtype, rounds.pool, rounds.simd) for _ in range(copies)]
    x, out = stored(torch.randn(1, columns), dtype), stored(torch.zeros(1, rows), dtype)

    def run() -> None:
        for linear in linears:
            linear.forward(x, out)

    return rounds.figure("linear", nbytes * copies, run, dtype=dtype, rows=rows, columns=columns)


def random_codes(encoding: str, shape: tuple[int, int]) -> NDArray[Any]:
    """Weights in this encoding. Into those of quantised checkpoints nothing is rounded: they are random bytes, of a
    range in which no scale is infinite, and none so small that products are subnormal numbers, which some processors
    multiply much more slowly."""
    random = np.random.default_rng(0)
    if encoding in CARRIED_ENCODINGS:
        of = (120, 128) if encoding == "mxfp4" else (48, 64)
        return random.integers(*of, (shape[0], ROW_ENCODINGS[encoding].vector_items(shape[1])), np.uint8)
    return ROW_ENCODINGS[encoding].stored(random.standard_normal(shape, np.float32), WEIGHT_DTYPES["float32"])


def bench_coded(encoding: str, inputs: str, shape: tuple[int, int], rounds: Rounds):
    """A resident linear of coded weights at one token, as `bench_linear`; bytes are those of the codes."""
    rows, columns = shape
    encoded = random_codes(encoding, (min(rows, 512), columns))
    codes = torch.from_numpy(np.tile(encoded.view(np.uint8).reshape(len(encoded), -1), (rows // len(encoded), 1)))
    copies = max(2, rounds.nbytes // codes.nbytes)
    weights = [as_loaded(codes).numpy() for _ in range(copies)]
    linears = [
        _core.Linear(weight, None, "float32", rounds.pool, rounds.simd, encoding, columns, inputs) for weight in weights
    ]
    x, out = np.random.default_rng(1).standard_normal((1, columns), np.float32), np.empty((1, rows), np.float32)

    def run() -> None:
        for linear in linears:
            linear.forward(x, out)

    nbytes = codes.nbytes * copies
    result = rounds.figure("coded", nbytes, run, dtype=f"{encoding} x {inputs}", rows=rows, columns=columns)
    result["gweights_per_s"] = round(result["gb_per_s"] * rows * columns / codes.nbytes, 1)
    return result


def bench_gathered(encoding: str, inputs: str, shape: tuple[int, int, float, int], rounds: Rounds):
    """An FFN layer over random active sets of coded rows that are all cached, as `bench_sparse`: all of a token's
    products, those of up rows, those of down columns."""
    d_model, d_ff, share, layers = shape
    layout = RowLayout(encoding=encoding, d_model=d_model, d_ff=1)
    row = np.zeros((1, layout.stride), np.uint8)
    for matrix in ("up", "down"):
        first = layout.byte_offset(matrix)
        row[0, first : first + layout.vector_nbytes(matrix)] = random_codes(encoding, (1, d_model)).view(np.uint8)
    neurons = max(d_ff * layers, rounds.nbytes // layout.stride)
    count = int(share * neurons)
    apart = np.random.default_rng(0).permutation(neurons)[: neurons // count * count].reshape(-1, count)
    active = [np.sort(each).astype(np.int32) for each in apart]  # in turn: the same rows again would be in a cache
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(layout.stride))
        file.flush()
        products = _core.GatheredProducts(layout.native(inputs), row, neurons, file.name, rounds.pool, rounds.simd)
        up, down = (count * layout.vector_nbytes(matrix) for matrix in ("up", "down"))
        sizes = {"dtype": f"{encoding} x {inputs}", "d_model": d_model, "d_ff": neurons, "active": count}
        ways = (
            ("gathered", up + down, products.run),
            ("up rows", up, products.up),
            ("down columns", down, products.down),
        )
        figures = []
        for name, nbytes, run in ways:
            turn = itertools.cycle(active)
            figures.append(rounds.figure(name, nbytes, lambda run=run, turn=turn: run(next(turn)), **sizes))
        return figures


def bench_sparse(dtype: str, shape: tuple[int, int, float, int], rounds: Rounds):
    """FFN layers in turn over random active sets that are all cached: up products, activation, down sum."""
    d_model, d_ff, share, num_layers = shape
    element = torch.empty(0, dtype=DTYPES[dtype]).element_size()
    stride = -(-2 * d_model * element // 512) * 512
    counters = _core.Counters()
    x, y = torch.randn(d_model).to(DTYPES[dtype]), torch.empty(d_model, dtype=DTYPES[dtype])
    random = np.random.default_rng(0)
    layers = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows"
        rows = (torch.randn(d_ff, stride // element) * 0.02).to(DTYPES[dtype]).view(torch.uint8).numpy()
        rows.tofile(path)
        for index in range(num_layers):
            # With such biases every active neuron fires: its down column is read.
            bias = {f"layers.{index}.ffn.up_bias": stored(torch.full((d_ff,), 10.0), dtype)}
            layer = _core.FfnLayer(
                layer=index,
                tensors=_core.ResidentTensors(
                    bias, dtype=dtype, encoding=dtype, other_encodings={}, inputs="float32", simd=rounds.simd
                ),
                row_format=_core.RowFormat(
                    encoding=dtype,
                    down_encoding=dtype,
                    stride=stride,
                    d_model=d_model,
                    up=0,
                    gate=-1,
                    down=d_model * element,
                    inputs="float32",
                ),
                neurons=d_ff,
                activation="relu",
                source=_core.NeuronSource(
                    reader=_core.Reader(threads=8),
                    file=_core.DirectFile(str(path)),
                    cache_policy="window",
                    window=2**30,
                ),
                rows=_core.FileRows(offset=0, count=d_ff, checksums=_core.xxh3_64_rows(rows)),
                cache=_core.LayerCache(_core.allocate(d_ff * stride)),
                pool=rounds.pool,
                counters=counters,
            )
            # Cached in many steps, so that neighbours by id lie apart, as after some tokens.
            for ids in np.array_split(random.permutation(d_ff).astype(np.int32), 16):
                layer.forward_active(x.data_ptr(), np.sort(ids), y.data_ptr())
            layers.append(layer)
    count = int(share * d_ff)
    sets = [np.sort(random.choice(d_ff, count, replace=False)).astype(np.int32) for _ in layers]

    def run() -> None:
        for layer, active in zip(layers, sets, strict=True):
            layer.forward_active(x.data_ptr(), active, y.data_ptr())

    counters.take()
    nbytes = num_layers * count * 2 * d_model * element
    result = rounds.figure("sparse_ffn", nbytes, run, dtype=dtype, d_model=d_model, d_ff=d_ff, active=count)
    values = counters.take()
    spent = values["memory_ns"] + values["compute_ns"] + values["io_ns"]
    result["percent_bookkeeping"] = round(100 * (spent - values["compute_ns"]) / spent, 1)
    return result


def bench_attention(dtype: str, shape: tuple[int, int, int, int], rounds: Rounds):
    """Attention of one token over `positions` cached ones, in as many layers as exceed the processor's cache."""
    heads, kv_heads, head_dim, positions = shape
    nbytes_each = 2 * kv_heads * positions * head_dim * WEIGHT_DTYPES[dtype].itemsize
    keys, values = (torch.randn(positions, kv_heads, head_dim).numpy() for _ in range(2))
    layers = []
    for _ in range(max(2, rounds.nbytes // nbytes_each)):
        layer = _core.KvAttention(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            context=positions,
            dtype=dtype,
            pool=rounds.pool,
            simd=rounds.simd,
        )
        layer.append(keys, values)
        layers.append(layer)
    q, out = (torch.randn(1, heads, head_dim) * head_dim**-0.5).numpy(), np.empty((1, heads, head_dim), np.float32)

    def run() -> None:
        for layer in layers:
            layer.attend_each(q, out)

    nbytes = len(layers) * nbytes_each
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "positions": positions}
    return rounds.figure("attention", nbytes, run, dtype=dtype, **sizes)


def bench_prompt(dtype: str, shape: tuple[int, int, int], rounds: Rounds) -> dict[str, Any]:
    """A matrix times a prompt's tokens, in GFLOP/s: ours (fp32 sums over widened weights) and torch's, in turn."""
    tokens, rows, columns = shape
    weight, x = torch.randn(rows, columns).to(DTYPES[dtype]), torch.randn(tokens, columns).to(DTYPES[dtype])
    inputs, out = stored(x, dtype), stored(torch.zeros(tokens, rows), dtype)
    native = _core.Linear(as_loaded(weight), None, dtype, rounds.pool, rounds.simd)
    ways: dict[str, Callable[[], Any]] = {
        "native": lambda: native.forward(inputs, out, many=True),
        "torch": lambda: x @ weight.T,
        "torch_widened": lambda: x.float() @ weight.float().T,
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way, run in ways.items():
            started = time.perf_counter()
            run()
            times[way].append(time.perf_counter() - started)
    flop = 2 * tokens * rows * columns
    result = {f"{way}_gflop_per_s": round(flop / statistics.median(spent) / 1e9, 1) for way, spent in times.items()}
    return {"name": "prompt", "dtype": dtype, "tokens": tokens, "rows": rows, "columns": columns, **result}


def bench_tokens(
    encoding: str, inputs: str, shape: tuple[int, int], scales: tuple[int, int, bool], rounds: Rounds
) -> dict[str, Any]:
    """A coded matrix times the tokens of a pass or a prompt, in GFLOP/s, the counts of tokens in turn: the best of the
    rounds, by processor time, so that neighbours matter less. Roofs of the last count: the format's inner loop in the
    first cache, where the level has one, and torch's products of int8, without scales, and of fp32."""
    rows, columns = shape
    codes = random_codes(encoding, shape).view(np.uint8).reshape(rows, -1)
    linear = _core.Linear(
        as_loaded(torch.from_numpy(codes)).numpy(), None, "float32", rounds.pool, rounds.simd, encoding, columns, inputs
    )
    weight = torch.randn(rows, columns)
    ways: dict[str, tuple[int, Callable[[], Any]]] = {}
    for tokens in (*PASS_TOKENS, *PROMPT_TOKENS):
        x = np.random.default_rng(tokens).standard_normal((tokens, columns), np.float32)
        out, many = np.empty((tokens, rows), np.float32), tokens not in PASS_TOKENS
        ways[str(tokens)] = tokens, functools.partial(linear.forward, x, out, many)
    ways["torch_fp32"] = tokens, functools.partial(torch.matmul, torch.from_numpy(x), weight.T)
    codes8 = torch.randint(-127, 128, (columns, rows), dtype=torch.int8)
    inputs8 = torch.randint(-127, 128, (max(tokens, 32), columns), dtype=torch.int8)
    ways["torch_int8"] = len(inputs8), functools.partial(torch._int_mm, inputs8, codes8)
    spent = dict.fromkeys(ways, float("inf"))
    for _ in range(2 * ROUNDS):
        for way, (_, run) in ways.items():
            started = time.process_time()
            run()
            spent[way] = min(spent[way], max(time.process_time() - started, 1e-9))
    flop = {way: 2 * tokens * rows * columns for way, (tokens, _) in ways.items()}
    rates = {way: round(flop[way] / seconds / 1e9, 1) for way, seconds in spent.items()}
    if used(rounds.simd).startswith("avx"):
        for _ in range(2 * ROUNDS):
            started = time.process_time()
            operations = _core.multiply_in_cache(*scales, TILES, rounds.simd)
            rate = operations * TILES / max(time.process_time() - started, 1e-9) / 1e9
            rates["inner_loop"] = max(rates.get("inner_loop", 0.0), round(rate, 1))
    return {
        "name": "tokens",
        "dtype": f"{encoding} x {inputs}",
        "rows": rows,
        "columns": columns,
        "gflop_per_cpu_s": rates,
        "of_roofs": {
            roof: round(rates[str(PROMPT_TOKENS[-1])] / rates[roof], 2)
            for roof in ("inner_loop", "torch_int8")
            if roof in rates
        },
        "times_of_one": {str(n): round(spent[str(n)] / spent["1"], 2) for n in PASS_TOKENS},
    }


def call_microseconds(pool: _core.ThreadPool, seconds: float) -> float:
    """What a native call costs from Python when there is next to nothing to compute, the pool's threads included."""
    linear = _core.Linear(np.zeros((64, 64), np.float32), None, "float32", pool)
    x, out = np.zeros((1, 64), np.float32), np.empty((1, 64), np.float32)
    times: list[float] = []
    while sum(times) < seconds:
        started = time.perf_counter()
        for _ in range(100):
            linear.forward(x, out)
        times.append(time.perf_counter() - started)
    return statistics.median(times) / 100 * 1e6


def as_markdown(document: dict[str, Any]) -> str:
    """The figures as a table."""
    lines = [
        f"{document['threads']} threads on {document['cores']} cores, {used(document['used'])}, load average "
        f"{document['load_average']:.1f}; a native call costs {document['call_us']:.1f} µs.",
        "",
        "| what | dtype | shape | GB/s (range of the rounds) | reading memory, GB/s | % of it |",
        "|---|---|---|---|---|---|",
    ]
    for result in document["results"]:
        low, high = result["gb_per_s_range"]
        lines.append(
            f"| {result['name']} | {result['dtype']} | {size_of(result)} | {result['gb_per_s']} ({low}–{high}) | "
            f"{result['roof_gb_per_s']} | {result['percent_of_roof']} |"
        )
    lines += [
        "",
        "| prompt | dtype | native | torch | torch, weights widened to fp32 | unit |",
        "|---|---|---|---|---|---|",
    ]
    for prompt in document["prompts"]:
        shape = f"{prompt['tokens']} tokens x {prompt['rows']} x {prompt['columns']}"
        figures = " | ".join(str(prompt[f"{way}_gflop_per_s"]) for way in ("native", "torch", "torch_widened"))
        lines.append(f"| {shape} | {prompt['dtype']} | {figures} | GFLOP/s |")
    return "\n".join(lines) + "\n"


def size_of(result: dict[str, Any]) -> str:
    """The shape of a figure in a few characters."""
    keys = ("rows", "columns", "d_model", "d_ff", "heads", "kv_heads", "head_dim", "positions")
    return " x ".join(str(result[key]) for key in keys if key in result)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="compute threads")
    parser.add_argument("--seconds", type=float, default=0.1, help="measuring time of each round, of five")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to see that it runs")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="which of them, with commas; empty: none")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the figures as a table, too")
    add_simd(parser)
    args = parser.parse_args(argv)
    rounds = Rounds(_core.ThreadPool(args.threads), args.seconds, 1 << 20 if args.tiny else ROOF_NBYTES, args.simd)
    print(
        f"roof: {rounds.roof() / 1e9:.1f} GB/s reading memory with {args.threads} threads; "
        f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; {used(args.simd)}"
    )
    linears = TINY_LINEARS if args.tiny else LINEARS
    sparse = TINY_SPARSE if args.tiny else SPARSE
    results, prompts = [], []

    def take(*found: dict[str, Any]) -> None:
        results.extend(found)
        for result in found:
            low, high = result["gb_per_s_range"]
            print(
                f"{result['name']:<12} {result['dtype']:<19} {size_of(result):<19} {result['gb_per_s']:6.1f} GB/s "
                f"({low} to {high}), {result['percent_of_roof']} % of {result['roof_gb_per_s']} GB/s",
                flush=True,
            )

    for dtype in filter(None, args.dtypes.split(",")):
        for shape in linears:
            take(bench_linear(dtype, shape, rounds))
        take(bench_sparse(dtype, sparse, rounds))
        for shape in TINY_ATTENTION if args.tiny else ATTENTION:
            take(bench_attention(dtype, shape, rounds))
        prompts.append(bench_prompt(dtype, TINY_PROMPT if args.tiny else PROMPT, rounds))
        print(json.dumps(prompts[-1]), flush=True)
    for encoding, inputs in CODED:
        take(bench_coded(encoding, inputs, TINY_CODED_SHAPE if args.tiny else CODED_SHAPE, rounds))
    for encoding, inputs in TOKENS:
        take(*bench_gathered(encoding, inputs, sparse, rounds))
    tokens = []
    for (encoding, inputs), scales in TOKENS.items():
        shape = TINY_CODED_SHAPE if args.tiny else CODED_SHAPE
        tokens.append(bench_tokens(encoding, inputs, shape, scales, rounds))
        print(json.dumps(tokens[-1]), flush=True)
    document = {
        "benchmark": "kernels",
        "threads": args.threads,
        "simd": _core.best_simd_level(),
        "used": args.simd,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "call_us": round(call_microseconds(rounds.pool, args.seconds), 2),
        "results": results,
        "prompts": prompts,
        "tokens": tokens,
    }
    if args.markdown is not None:
        args.markdown.write_text(as_markdown(document), encoding="utf-8")
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
