"""What a decoder layer is made of, by the native core: arrays of the model's dtype in, arrays of it out.

Sums are fp32 and every result is rounded to the model's dtype. Packed weights are widened for prompts; in decoding
they are multiplied by inputs in codes (csrc/kernels/row_codecs.h). No result depends on the rows computed beside it or
on the number of threads, so a sequence gets the same answer in every batch. bfloat16 is held as its bits (uint16).
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashllm import _core
from flashllm.arch.spec import BlockSpec
from flashllm.base.dtypes import WEIGHT_DTYPES
from flashllm.offload.runtime.ops import Matrix, Norm

Array = NDArray[Any]
_DECODING_INPUTS = "int16"  # of packed weights of 8 bits; those of 4 then take 8


class NativeOps:
    """Operations of one model on the CPU: an `Ops`, whose methods it describes."""

    def __init__(self, block: BlockSpec, dtype: str, pool: _core.ThreadPool, *, simd: str = "auto") -> None:
        self.dtype = dtype
        self.storage = WEIGHT_DTYPES[dtype].storage
        self._block, self._pool, self._simd = block, pool, simd
        self._elementwise = _core.Elementwise(dtype, pool, simd)
        self._frequencies = [np.array(rotary.inverse_frequency, np.float32) for rotary in block.rotary]

    def task(self) -> AbstractContextManager[None]:
        return nullcontext()

    def empty(self, rows: int, width: int) -> Array:
        return np.empty((rows, width), self.storage)

    def linear(self, matrix: Matrix, x: Array, *, decoding: bool = False) -> Array:
        out, packing = self.empty(len(x), matrix.rows), matrix.packing
        if packing is None:
            _core.Linear(matrix.array, matrix.bias, self.dtype, self._pool, self._simd).forward_many(x, out)
            return out
        count, length = packing.vectors(matrix.rows, matrix.columns)
        native = _core.Linear(
            matrix.array.reshape(count, -1),
            matrix.bias,
            self.dtype,
            self._pool,
            self._simd,
            packing.encoding,
            length,
            _DECODING_INPUTS,
            packing.by_inputs,
        )
        if decoding:
            native.forward(x, out)
        else:
            native.forward_many(x, out)
        return out

    def logits(self, matrix: Matrix, x: Array) -> NDArray[np.float32]:
        out = np.empty((len(x), matrix.rows), np.float32)
        _core.Linear(matrix.array, matrix.bias, self.dtype, self._pool, self._simd).forward_many(x, out)
        return out

    def norm(self, norm: Norm, x: Array) -> Array:
        out = np.empty_like(x)
        self._elementwise.normalize(x, out, self._block.norm, self._block.norm_epsilon, norm.weight, norm.bias)
        return out

    def norm_heads(self, norm: Norm, x: Array, heads: int) -> None:
        block = self._block

        def normalize(states: Array, of_head: Norm) -> Array:
            return self.norm(of_head, np.ascontiguousarray(states))

        match block.query_key_norm:
            case "projection":
                x[...] = normalize(x, norm)
            case "head":
                x[...] = normalize(x.reshape(-1, block.head_dim), norm).reshape(x.shape)
            case "heads":
                for head in range(heads):
                    columns = slice(head * block.head_dim, (head + 1) * block.head_dim)
                    own = Norm(*(part if part is None else part[columns] for part in (norm.weight, norm.bias)))
                    x[:, columns] = normalize(x[:, columns], own)

    def rotate(self, x: Array, heads: int, positions: NDArray[np.int64], rotary: int, factor: float = 1.0) -> None:
        block, chosen = self._block, self._block.rotary[rotary]
        self._elementwise.rotate(
            x, heads, positions, self._frequencies[rotary], chosen.dims, block.rotary_style, chosen.scaling, factor
        )

    def activate(self, x: Array, gate: Array | None, threshold: float) -> None:
        self._elementwise.activate(x, gate, self._block.activation, threshold)

    def rounded(self, value: float) -> float:
        bits, out = self.empty(1, 1), np.full((1, 1), value, np.float32)
        self._elementwise.narrow(out, bits)
        self._elementwise.widen(bits, out)
        return float(out.item())

    def add(self, x: Array, y: Array) -> None:
        self._elementwise.add(x, y)

    def scale(self, x: Array, factor: float) -> None:
        self._elementwise.scale(x, factor)

    def from_host(self, values: Array) -> Array:
        return np.ascontiguousarray(values)

    def to_host(self, x: Array, out: Array | None = None) -> Array:
        if out is None:
            return x.copy()
        out[...] = x
        return out

    def use(self, x: Array) -> Array:
        return x

    def copy(self, x: Array) -> Array:
        return x.copy()

    def join(self, parts: Sequence[Array]) -> Array:
        return np.concatenate(parts)

    def rows(self, x: Array, index: NDArray[np.int64]) -> Array:
        return np.ascontiguousarray(x[index])
