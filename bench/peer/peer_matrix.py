"""One matrix times one vector, in 4 and in 8 bits: ggml's kernels (llama.cpp) and ours, in turn.

    pip install --no-binary llama-cpp-python llama-cpp-python==0.3.36   # built for this CPU
    python bench/peer/peer_matrix.py [--threads N] [--rounds N]

ggml's 4-bit weights are packed anew for this processor, as llama.cpp does where they are in its own memory (8-bit ones
stay as they are, as there), and multiplied by inputs of 8 bits; ours as they are stored, by inputs of 8 bits too. Each
has as many copies of the matrix as are well beyond the caches, one after the other, and ggml's results are checked
against the values that its codes stand for. Prints bytes and weights a second; the last line is one JSON document.
"""

import argparse
import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashllm import _core
from flashllm.base.dtypes import WEIGHT_DTYPES
from flashllm.base.machine import num_cores
from flashllm.format.rows import ROW_ENCODINGS

ROWS = COLUMNS = 4096
NBYTES = 512 << 20  # of all copies: well beyond the caches
GROUP = 32
F32, Q4_0, Q8_0 = 0, 2, 8  # ggml's types
MOST_OFF = 0.02  # of a result, as a share of the results' spread: inputs are rounded to 8 bits


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class Ggml:
    """As much of ggml's interface as a product takes. Every call gives or takes pointers."""

    def __init__(self) -> None:
        found = find_spec("llama_cpp")
        if found is None or found.origin is None:
            raise SystemExit("peer_matrix: llama-cpp-python is not installed; the docstring says how")
        folder = Path(found.origin).parent / "lib"
        self._libraries = [
            ctypes.CDLL(str(folder / f"lib{name}.so"), mode=ctypes.RTLD_GLOBAL) for name in ("ggml-base", "ggml-cpu")
        ]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        for library in self._libraries:
            try:
                function = getattr(library, f"ggml_{name}")
            except AttributeError:
                continue
            function.restype = ctypes.c_void_p
            return function
        raise AttributeError(name)

    def context(self) -> ctypes.c_void_p:
        """Room for tensors and a graph, without their data."""
        self.init.argtypes = [_InitParams]
        return ctypes.c_void_p(self.init(_InitParams(16 << 20, None, True)))

    def repacking(self, backend: ctypes.c_void_p) -> ctypes.c_void_p:
        """The buffers whose weights are packed for this processor."""
        device = ctypes.c_void_p(self.backend_get_device(backend))
        registry = ctypes.c_void_p(self.backend_dev_backend_reg(device))
        address = self.backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
        kinds = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(address)(device)
        at = 0
        while kinds[at]:
            kind = ctypes.c_void_p(kinds[at])
            if b"REPACK" in ctypes.string_at(self.backend_buft_name(kind)):
                return kind
            at += 1
        raise SystemExit("peer_matrix: this ggml packs no weights for this processor")


def ggml_codes(kind: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """(a matrix in ggml's own layout, its values): fp16 scales, each followed by its group's codes."""
    random = np.random.default_rng(0)
    groups = COLUMNS // GROUP
    scales = random.uniform(0.5, 1.5, (ROWS, groups, 1)).astype(np.float16)
    if kind == Q4_0:
        codes = random.integers(0, 256, (ROWS, groups, GROUP // 2), np.uint8)
        values = np.concatenate([codes & 15, codes >> 4], -1).astype(np.float32) - 8
    else:
        codes = random.integers(-127, 128, (ROWS, groups, GROUP), np.int8).view(np.uint8)
        values = codes.view(np.int8).astype(np.float32)
    packed = np.concatenate([scales.view(np.uint8).reshape(ROWS, groups, 2), codes], -1)
    return np.ascontiguousarray(packed.reshape(ROWS, -1)), (values * scales).reshape(ROWS, COLUMNS)


def ggml_products(kind: int, threads: int) -> tuple[int, Callable[[], None]]:
    """(bytes of weights, a pass over all copies)."""
    ggml = Ggml()
    packed, values = ggml_codes(kind)
    copies = NBYTES // packed.nbytes
    backend = ctypes.c_void_p(ggml.backend_cpu_init())
    ggml.backend_cpu_set_n_threads(backend, ctypes.c_int(threads))
    size = [ctypes.c_int64(COLUMNS), ctypes.c_int64(ROWS)]
    held = ggml.context()
    weights = [ctypes.c_void_p(ggml.new_tensor_2d(held, ctypes.c_int(kind), *size)) for _ in range(copies)]
    ordinary = ctypes.c_void_p(ggml.backend_get_default_buffer_type(backend))
    if not ggml.backend_alloc_ctx_tensors_from_buft(held, ggml.repacking(backend) if kind == Q4_0 else ordinary):
        raise SystemExit("peer_matrix: ggml has no memory for the weights")
    for weight in weights:
        data = ctypes.c_void_p(packed.ctypes.data)
        ggml.backend_tensor_set(weight, data, ctypes.c_size_t(0), ctypes.c_size_t(packed.nbytes))
    used = ggml.context()
    inputs = ctypes.c_void_p(ggml.new_tensor_2d(used, ctypes.c_int(F32), size[0], ctypes.c_int64(1)))
    results = [ctypes.c_void_p(ggml.mul_mat(used, weight, inputs)) for weight in weights]
    graph = ctypes.c_void_p(ggml.new_graph(used))
    for result in results:
        ggml.build_forward_expand(graph, result)
    ggml.backend_alloc_ctx_tensors_from_buft(used, ordinary)
    x = np.random.default_rng(1).standard_normal(COLUMNS).astype(np.float32)
    ggml.backend_tensor_set(inputs, ctypes.c_void_p(x.ctypes.data), ctypes.c_size_t(0), ctypes.c_size_t(x.nbytes))

    def run() -> None:
        ggml.backend_graph_compute(backend, graph)

    run()
    y = np.empty(ROWS, np.float32)
    out = ctypes.c_void_p(y.ctypes.data)
    ggml.backend_tensor_get(results[-1], out, ctypes.c_size_t(0), ctypes.c_size_t(y.nbytes))
    expected = values @ x
    if np.abs(y - expected).max() > MOST_OFF * np.abs(expected).max():
        raise SystemExit("peer_matrix: ggml's results are not those of its codes")
    return packed.nbytes * copies, run


def our_products(encoding: str, pool: _core.ThreadPool) -> tuple[int, Callable[[], None]]:
    """The same of ours."""
    values = np.random.default_rng(0).standard_normal((512, COLUMNS), np.float32)
    codes = ROW_ENCODINGS[encoding].stored(values, WEIGHT_DTYPES["float32"]).view(np.uint8).reshape(512, -1)
    nbytes = ROWS * codes.shape[1]
    copies = NBYTES // nbytes
    memory = _core.allocate(copies * nbytes).reshape(copies, ROWS, -1)
    memory[:] = np.tile(codes, (ROWS // 512, 1))
    linears = [_core.Linear(weight, None, "float32", pool, "auto", encoding, COLUMNS, "int8") for weight in memory]
    x, out = np.random.default_rng(1).standard_normal((1, COLUMNS), np.float32), np.empty((1, ROWS), np.float32)

    def run() -> None:
        for linear in linears:
            linear.forward(x, out)

    run()
    return copies * nbytes, run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--threads", type=int, default=num_cores())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each figure in a round")
    args = parser.parse_args()
    pool = _core.ThreadPool(args.threads)
    measured = {
        "ggml Q4_0": ggml_products(Q4_0, args.threads),
        "int4_32": our_products("int4_32", pool),
        "ggml Q8_0": ggml_products(Q8_0, args.threads),
        "int8_32": our_products("int8_32", pool),
    }
    rates: dict[str, list[float]] = {name: [] for name in measured}
    roofs: list[float] = []
    for _ in range(args.rounds):
        roofs.append(statistics.median(_core.read_bandwidth(pool, NBYTES, args.seconds / 2)))
        for name, (nbytes, run) in measured.items():
            times: list[float] = []
            while sum(times) < args.seconds:
                started = time.perf_counter()
                run()
                times.append(time.perf_counter() - started)
            rates[name].append(nbytes / statistics.median(times))
    table = [
        {"name": name, "gb_per_s": statistics.median(of), "range": [min(of) / 1e9, max(of) / 1e9]}
        for name, of in rates.items()
    ]
    for row in table:
        row["gb_per_s"] /= 1e9
        print(f"{row['name']:<10} {row['gb_per_s']:5.1f} GB/s ({row['range'][0]:.1f} to {row['range'][1]:.1f})")
    ratios = {
        f"{ours} / {theirs}": statistics.median(a / b for a, b in zip(rates[ours], rates[theirs], strict=True))
        for ours, theirs in (("int4_32", "ggml Q4_0"), ("int8_32", "ggml Q8_0"))
    }
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.2f}")
    roof = statistics.median(roofs) / 1e9
    print(f"reading memory: {roof:.1f} GB/s")
    document = {"benchmark": "peer_matrix", "rows": ROWS, "columns": COLUMNS, "threads": args.threads, "roof": roof}
    document |= {"load_average": os.getloadavg()[0], "table": table, "ratios": ratios}
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
