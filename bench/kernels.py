"""How fast the kernels read weights, against how fast this machine reads memory at all.

    python bench/kernels.py [--threads N] [--seconds S] [--tiny]

Prints GB/s of resident products (one token) and of the sparse FFN with every active neuron cached, by dtype and
shape, beside the roof: all threads summing memory well beyond the caches (`_core.read_bandwidth`), taken in turn with
the figures because the machine's bandwidth moves with its neighbours. Says the load average it ran under: on a busy
machine the percentages hold better than the figures. The last line is one JSON document. Knows no model.
"""

import argparse
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

from flashllm import _core

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
LINEARS = [(4096, 4096), (8192, 2048)]  # rows, columns: attention of OPT-6.7B, the up projection of OPT-1.3B
SPARSE = [(4096, 8192, 0.10), (2048, 8192, 0.10)]  # d_model, d_ff, share active
ROOF_NBYTES = 512 << 20  # well beyond the caches
ROUNDS = 5


class Rounds:
    """Figures and the roof taken in turn, because the machine's bandwidth moves with its neighbours."""

    def __init__(self, pool: _core.ThreadPool, seconds: float, nbytes: int = ROOF_NBYTES):
        self.pool, self.seconds, self.nbytes = pool, seconds, nbytes

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


def as_loaded(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in memory of the kind that resident weights are read into: huge pages where there are any."""
    memory = torch.from_numpy(_core.allocate(tensor.nbytes)).view(tensor.dtype).reshape(tensor.shape)
    return memory.copy_(tensor)


def bench_linear(dtype: str, shape: tuple[int, int], rounds: Rounds):
    """A resident linear at one token; several copies in turn, so that none stays in the processor's cache."""
    rows, columns = shape
    element = torch.empty(0, dtype=DTYPES[dtype]).element_size()
    nbytes = rows * columns * element
    copies = max(2, rounds.nbytes // nbytes)
    weight = torch.randn(rows, columns).to(DTYPES[dtype])
    linears = [_core.Linear(as_loaded(weight), None, rounds.pool, _core.Counters()) for _ in range(copies)]
    x, out = torch.randn(columns).to(DTYPES[dtype]), torch.empty(rows, dtype=DTYPES[dtype])

    def run() -> None:
        for linear in linears:
            linear.forward(x.data_ptr(), 1, out.data_ptr())

    return rounds.figure("linear", nbytes * copies, run, dtype=dtype, rows=rows, columns=columns)


def bench_sparse(dtype: str, shape: tuple[int, int, float], rounds: Rounds):
    """The FFN layer over random active sets that are all cached: up products, activation, down sum."""
    d_model, d_ff, share = shape
    element = torch.empty(0, dtype=DTYPES[dtype]).element_size()
    stride = -(-2 * d_model * element // 512) * 512
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows"
        weights = (torch.randn(d_ff, stride // element) * 0.02).to(DTYPES[dtype])
        rows = weights.view(torch.uint8).numpy()
        rows.tofile(path)
        counters = _core.Counters()
        layer = _core.FfnLayer(
            layer=0,
            dtype=dtype,
            stride=stride,
            d_model=d_model,
            num_neurons=d_ff,
            up=0,
            gate=-1,
            down=d_model,
            activation="relu",
            window=2**30,
            file_offset=0,
            up_bias=np.full(d_ff, 10.0, np.float32),  # every active neuron fires: its down column is read
            down_bias=None,
            checksums=_core.xxh3_64_rows(rows),
            rows=_core.allocate(d_ff * stride),
            reader=_core.Reader(threads=8),
            file=_core.DirectFile(str(path)),
            pool=rounds.pool,
            counters=counters,
        )
        x, y = torch.randn(d_model).to(DTYPES[dtype]), torch.empty(d_model, dtype=DTYPES[dtype])
        layer.forward_active(x.data_ptr(), np.arange(d_ff, dtype=np.int32), y.data_ptr())
    random = np.random.default_rng(0)
    count = int(share * d_ff)
    sets = [np.sort(random.choice(d_ff, count, replace=False)).astype(np.int32) for _ in range(8)]

    def run() -> None:
        for active in sets:
            layer.forward_active(x.data_ptr(), active, y.data_ptr())

    counters.take()
    result = rounds.figure(
        "sparse_ffn",
        len(sets) * count * 2 * d_model * element,
        run,
        dtype=dtype,
        d_model=d_model,
        d_ff=d_ff,
        active=count,
    )
    values = counters.take()
    spent = values["memory_ns"] + values["compute_ns"] + values["io_ns"]
    result["percent_bookkeeping"] = round(100 * (spent - values["compute_ns"]) / spent, 1)
    return result


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="compute threads")
    parser.add_argument("--seconds", type=float, default=0.1, help="measuring time of each round, of five")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to see that it runs")
    args = parser.parse_args(argv)
    rounds = Rounds(_core.ThreadPool(args.threads), args.seconds, 1 << 20 if args.tiny else ROOF_NBYTES)
    print(
        f"roof: {rounds.roof() / 1e9:.1f} GB/s reading memory with {args.threads} threads; "
        f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; {_core.best_simd_level()}"
    )
    linears = [(64, 48)] if args.tiny else LINEARS
    sparse = [(64, 256, 0.1)] if args.tiny else SPARSE
    results = []
    for dtype in DTYPES:
        for shape in linears:
            results.append(bench_linear(dtype, shape, rounds))
        for ffn in sparse:
            results.append(bench_sparse(dtype, ffn, rounds))
        for result in results[-len(linears) - len(sparse) :]:
            size = " x ".join(str(result[key]) for key in ("rows", "columns", "d_model", "d_ff") if key in result)
            low, high = result["gb_per_s_range"]
            print(
                f"{result['name']:<11} {dtype:<9} {size:<13} {result['gb_per_s']:6.1f} GB/s ({low} to {high}), "
                f"{result['percent_of_roof']} % of {result['roof_gb_per_s']} GB/s"
            )
    document = {
        "benchmark": "kernels",
        "threads": args.threads,
        "simd": _core.best_simd_level(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "results": results,
    }
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
