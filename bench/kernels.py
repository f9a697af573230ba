"""How fast the kernels read weights, against how fast this machine reads memory at all.

    python bench/kernels.py [--threads N] [--seconds S] [--tiny]

Prints GB/s of resident products (one token) and of the sparse FFN with every active neuron cached, by dtype and
shape, beside the roof: the best of a plain summing loop over the same amount of memory with the same number of threads,
measured before and after each figure because the machine's bandwidth moves with its neighbours. Says the load
average it ran under: on a busy machine the percentages hold better than the figures. The last line is one
JSON document. Knows no model.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
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
ROOF_NBYTES = 128 << 20  # well beyond the caches


class Roof:
    """Memory read bandwidth: each thread sums its part of one array (numpy releases the lock)."""

    def __init__(self, threads: int, nbytes: int = ROOF_NBYTES):
        self.nbytes = nbytes
        self._parts = np.array_split(np.ones(nbytes // 8), threads)

    def measure(self) -> float:
        """Bytes per second of one pass."""
        workers = [threading.Thread(target=part.sum) for part in self._parts[1:]]
        started = time.perf_counter()
        for worker in workers:
            worker.start()
        self._parts[0].sum()
        for worker in workers:
            worker.join()
        return self.nbytes / (time.perf_counter() - started)


def repeat(run: Callable[[], None], seconds: float) -> list[float]:
    """Times of single calls, in seconds, for about `seconds` in all and at least five."""
    run()
    times: list[float] = []
    while len(times) < 5 or sum(times) < seconds:
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return times


def figure(name: str, nbytes: int, times: list[float], roof: float, **conditions: Any) -> dict[str, Any]:
    """One result: GB/s at the median call with its quartiles, and its share of the roof."""
    low, median, high = statistics.quantiles(times, n=4)
    return {
        "name": name,
        **conditions,
        "nbytes": nbytes,
        "calls": len(times),
        "gb_per_s": round(nbytes / median / 1e9, 2),
        "gb_per_s_quartiles": [round(nbytes / high / 1e9, 2), round(nbytes / low / 1e9, 2)],
        "roof_gb_per_s": round(roof / 1e9, 2),
        "percent_of_roof": round(100 * nbytes / median / roof),
    }


def bench_linear(dtype: str, shape: tuple[int, int], pool: _core.ThreadPool, seconds: float, roof: Roof):
    """A resident linear at one token; several copies in turn, so that none stays in the processor's cache."""
    rows, columns = shape
    element = torch.empty(0, dtype=DTYPES[dtype]).element_size()
    nbytes = rows * columns * element
    copies = max(2, roof.nbytes // nbytes)
    weights = [torch.randn(rows, columns).to(DTYPES[dtype]) for _ in range(copies)]
    linears = [_core.Linear(weight, None, pool, _core.Counters()) for weight in weights]
    x, out = torch.randn(columns).to(DTYPES[dtype]), torch.empty(rows, dtype=DTYPES[dtype])

    def run() -> None:
        for linear in linears:
            linear.forward(x.data_ptr(), 1, out.data_ptr())

    before = roof.measure()
    times = repeat(run, seconds)
    best = max(before, roof.measure())
    return figure("linear", nbytes * copies, times, best, dtype=dtype, rows=rows, columns=columns)


def bench_sparse(dtype: str, shape: tuple[int, int, float], pool: _core.ThreadPool, seconds: float, roof: Roof):
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
            pool=pool,
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

    before = roof.measure()
    counters.take()
    times = repeat(run, seconds)
    values = counters.take()
    best = max(before, roof.measure())
    spent = values["memory_ns"] + values["compute_ns"] + values["io_ns"]
    return figure(
        "sparse_ffn",
        len(sets) * count * 2 * d_model * element,
        times,
        best,
        dtype=dtype,
        d_model=d_model,
        d_ff=d_ff,
        active=count,
        percent_bookkeeping=round(100 * (spent - values["compute_ns"]) / spent, 1),
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="compute threads")
    parser.add_argument("--seconds", type=float, default=0.5, help="measuring time of each figure")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to see that it runs")
    args = parser.parse_args(argv)
    pool, roof = _core.ThreadPool(args.threads), Roof(args.threads, 1 << 20 if args.tiny else ROOF_NBYTES)
    roofs = [roof.measure() for _ in range(5)]
    print(
        f"roof: {max(roofs) / 1e9:.1f} GB/s reading memory with {args.threads} threads (best of 5); "
        f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; {_core.best_simd_level()}"
    )
    linears = [(64, 48)] if args.tiny else LINEARS
    sparse = [(64, 256, 0.1)] if args.tiny else SPARSE
    results = []
    for dtype in DTYPES:
        for shape in linears:
            results.append(bench_linear(dtype, shape, pool, args.seconds, roof))
        for ffn in sparse:
            results.append(bench_sparse(dtype, ffn, pool, args.seconds, roof))
        for result in results[-len(linears) - len(sparse) :]:
            size = " x ".join(str(result[key]) for key in ("rows", "columns", "d_model", "d_ff") if key in result)
            low, high = result["gb_per_s_quartiles"]
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
