"""Times products of one token over weights that no processor's cache holds: resident ones, and rows gathered from the
neuron cache.
"""

import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from flashllm import _core
from flashllm.engine.dense import TORCH_DTYPES

_D_MODEL = 4096  # a row of two 16-bit vectors is 16 KiB
_ACTIVE_SHARE = 0.1  # of the rows cached (paper A, section 3.1)


class ResidentProducts:
    """Products of a resident weight in slices, one after the other; all slices together are in no cache."""

    def __init__(self, dtype: str, nbytes: int, pool: _core.ThreadPool, slices: int = 1) -> None:
        """Of `nbytes` of weights, in rows of a model's width; less than that by what does not divide."""
        torch_dtype = TORCH_DTYPES[dtype]
        rows = max(1, nbytes // (slices * _D_MODEL * torch_dtype.itemsize))
        memory = _core.allocate(slices * rows * _D_MODEL * torch_dtype.itemsize)
        weights = torch.from_numpy(memory).view(torch_dtype).reshape(slices, rows, _D_MODEL)
        weights.copy_(torch.randn(_D_MODEL))
        self.nbytes = memory.nbytes
        self.pool = pool
        self._linears = [_core.Linear(weight, None, pool, _core.Counters()) for weight in weights]
        self._x = torch.full((1, _D_MODEL), 0.01, dtype=torch_dtype)
        self._out = torch.empty((1, rows), dtype=torch_dtype)
        self._turn = itertools.cycle(self._linears)

    def __len__(self) -> int:
        """Of its slices."""
        return len(self._linears)

    def slice(self) -> None:
        """The next slice's product."""
        next(self._turn).forward(self._x.data_ptr(), 1, self._out.data_ptr())

    def all(self) -> None:
        """Every slice's product."""
        for _ in self._linears:
            self.slice()


def resident_bps(dtype: str, *, nbytes: int, pool: _core.ThreadPool, seconds: float) -> float:
    """Bytes of resident weights a second."""
    products = ResidentProducts(dtype, nbytes, pool)
    return products.nbytes / _median_s(products.all, seconds)


def gathered_bps(dtype: str, *, nbytes: int, pool: _core.ThreadPool, file: Path, seconds: float) -> float:
    """Bytes of rows a second in an FFN layer's products of one token, over neurons that are all cached and all fire.

    Nothing is read from `file`: a layer must have one.
    """
    torch_dtype = TORCH_DTYPES[dtype]
    stride = 2 * _D_MODEL * torch_dtype.itemsize
    neurons = max(1, nbytes // stride)
    layer = _core.FfnLayer(
        layer=0,
        dtype=cast(Any, dtype),
        stride=stride,
        d_model=_D_MODEL,
        num_neurons=neurons,
        up=0,
        gate=-1,
        down=_D_MODEL,
        activation="relu",
        cache_policy="window",
        window=2**30,  # nothing leaves
        popularity=None,
        file_offset=0,
        up_bias=None,
        down_bias=None,
        checksums=np.zeros(neurons, np.uint64),
        rows=_core.allocate(neurons * stride),
        bypass_rows=None,
        reader=_core.Reader(1),
        file=_core.DirectFile(str(file)),
        pool=pool,
        counters=_core.Counters(),
    )
    # A predictor that names every neuron, so that all rows are taken over into the cache.
    a, b = torch.zeros((1, _D_MODEL), dtype=torch.float16), torch.zeros((neurons, 1), dtype=torch.float16)
    layer.set_predictor(a, b, np.ones(neurons, np.float32), 0.0)
    x, y = torch.full((_D_MODEL,), 0.01, dtype=torch_dtype), torch.empty(_D_MODEL, dtype=torch_dtype)
    block = torch.full((min(neurons, 256), 2 * _D_MODEL), 0.01, dtype=torch_dtype).view(torch.uint8).numpy()
    layer.begin_fill(x.data_ptr(), 1)
    for first in range(0, neurons, len(block)):
        count = min(len(block), neurons - first)
        layer.fill_from(block[:count], first, count)
    random, count = np.random.default_rng(0), max(1, int(_ACTIVE_SHARE * neurons))
    active = [np.sort(random.choice(neurons, count, replace=False)).astype(np.int32) for _ in range(10)]
    turn = itertools.cycle(active)
    return count * stride / _median_s(lambda: layer.forward_active(x.data_ptr(), next(turn), y.data_ptr()), seconds)


def _median_s(run: Callable[[], object], seconds: float) -> float:
    """Median time of `run`, called three times at least and until `seconds` are over."""
    times: list[float] = []
    while len(times) < 3 or sum(times) < seconds:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
