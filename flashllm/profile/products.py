"""Times products of one token over weights that no processor's cache holds: resident ones, and rows gathered from the
neuron cache; and what puts a file's blocks into such rows.
"""

import itertools
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from flashllm import _core
from flashllm.base.dtypes import WEIGHT_DTYPES
from flashllm.base.dtypes import cast as cast_dtype
from flashllm.base.group_codes import usual_activations
from flashllm.format.rows import MATRICES, ROW_ENCODINGS, RowLayout, pack_rows
from flashllm.profile.rates import seconds_of

_D_MODEL = 4096  # a row of two 16-bit vectors is 16 KiB
_EXPERT = 512  # neurons
_ACTIVE_SHARE = 0.1  # of the rows cached (paper A, section 3.1)
_INPUT = 0.01


class ResidentProducts:
    """Products of a resident weight in slices, one after the other; all slices together are in no cache."""

    def __init__(self, encoding: str, nbytes: int, pool: _core.ThreadPool, slices: int = 1) -> None:
        """Make about `nbytes` of weights of one of ROW_ENCODINGS: whole rows of a model's width, whole slices."""
        vector, dtype = _vector(encoding), _dtype_beside(encoding)
        rows = max(1, nbytes // (slices * vector.nbytes))
        memory = _core.allocate(slices * rows * vector.nbytes)
        weights = memory.view(vector.dtype).reshape(slices, rows, -1)
        weights[:] = vector
        self.nbytes = memory.nbytes
        self.pool = pool
        coded: tuple[Any, ...] = () if encoding == dtype else ("auto", encoding, _D_MODEL, _inputs(encoding))
        self._linears = [_core.Linear(weight, None, cast(Any, dtype), pool, *coded) for weight in weights]
        x = np.full((1, _D_MODEL), _INPUT, np.float32)  # one small value everywhere, as `dtype` is stored
        self._x = np.ascontiguousarray(cast_dtype(x, WEIGHT_DTYPES["float32"], WEIGHT_DTYPES[dtype]))
        self._out = np.empty((1, rows), WEIGHT_DTYPES[dtype].storage)
        self._turn = itertools.cycle(self._linears)

    def __len__(self) -> int:
        return len(self._linears)

    def slice(self) -> None:
        next(self._turn).forward(self._x, self._out)

    def all(self) -> None:
        for _ in self._linears:
            self.slice()


def resident_bps(encoding: str, *, nbytes: int, pool: _core.ThreadPool, seconds: float) -> float:
    """Bytes of resident weights a second, of one of ROW_ENCODINGS."""
    products = ResidentProducts(encoding, nbytes, pool)
    return products.nbytes / seconds_of(products.all, at_least_s=seconds)


def gathered_bps(encoding: str, *, nbytes: int, pool: _core.ThreadPool, file: Path, seconds: float) -> float:
    """Bytes of rows a second in an FFN layer's products of one token, over neurons that are all cached and all fire.

    `encoding` is of ROW_ENCODINGS. Nothing is read from `file`: a layer must have one.
    """
    layout = RowLayout(encoding=encoding, d_model=_D_MODEL, d_ff=1)
    neurons = max(1, nbytes // layout.stride)
    vector = _vector(encoding)[None]
    row = np.empty((1, layout.stride), np.uint8)
    pack_rows(layout, {"up": vector, "down": vector}, row)
    products = _core.GatheredProducts(layout.native(_inputs(encoding)), row, neurons, str(file), pool)
    random, count = np.random.default_rng(0), max(1, int(_ACTIVE_SHARE * neurons))
    active = [np.sort(random.choice(neurons, count, replace=False)).astype(np.int32) for _ in range(10)]
    turn = itertools.cycle(active)
    return count * layout.stride / seconds_of(lambda: products.run(next(turn)), at_least_s=seconds)


def blocks_wps(*, nbytes: int, seconds: float) -> float:
    """Weights a second that one thread puts into about `nbytes` of rows, of experts that are used where they lie. They
    are in the kinds that most such files have: up and gate in Q4_K, down in Q6_K."""
    layout = RowLayout(encoding="q4_k", d_model=_D_MODEL, d_ff=_EXPERT, matrices=MATRICES[1], down_encoding="codes6")
    fmt, weights = layout.native("float32", _EXPERT), _D_MODEL * _EXPERT
    parts = [
        (_core.BlockRows(kind, length, fmt, matrix), np.zeros(weights // 256 * block, np.uint8))
        for kind, block, length, matrix in (
            ("Q4_K", 144, _D_MODEL, "up"), ("Q4_K", 144, _D_MODEL, "gate"), ("Q6_K", 210, _EXPERT, "down"),
        )
    ]  # fmt: skip
    experts = max(1, nbytes // (_EXPERT * layout.stride))
    rows = _core.allocate(experts * _EXPERT * layout.stride).reshape(experts, _EXPERT, layout.stride)
    turn = itertools.cycle(rows)

    def unpack() -> None:
        expert = next(turn)
        for blocks, stored in parts:
            blocks.unpack(stored, 0, expert)

    return len(parts) * weights / seconds_of(unpack, at_least_s=seconds)


def _dtype_beside(encoding: str) -> str:
    """The dtype of what weights of this encoding are multiplied by: their own, or one that a model of them may have."""
    if encoding in WEIGHT_DTYPES:
        return encoding
    return "bfloat16" if encoding == "bf12" else "float16"


def _inputs(encoding: str) -> str:
    """Inputs that a model of this encoding alone multiplies its weights by."""
    return usual_activations([encoding]) or "float32"


def _vector(encoding: str) -> NDArray[Any]:
    """A row of random weights as the encoding stores it."""
    values = np.random.default_rng(0).standard_normal((1, _D_MODEL), np.float32)
    return np.ascontiguousarray(ROW_ENCODINGS[encoding].stored(values, WEIGHT_DTYPES["float32"])[0])
