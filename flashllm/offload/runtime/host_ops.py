"""A model's layers by the native core, over numpy arrays of its dtype. `Ops` (ops.py) says what the methods do.

Sums are fp32 and every result is rounded to the model's dtype. Packed weights are widened for prompts; in decoding
they are multiplied by inputs in codes (csrc/kernels/row_codecs.h). No result depends on the rows computed with it or
on the number of threads, so a sequence gets the same answer in every batch. bfloat16 is held as its bits (uint16).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashllm import _core
from flashllm.arch.spec import BlockSpec
from flashllm.base.dtypes import WEIGHT_DTYPES
from flashllm.offload.runtime.ops import ROWS_TOGETHER, Attend, Positions, Projected, Tensors
from flashllm.offload.runtime.tiers.states import LentStates

Array = NDArray[Any]
Watch = Callable[[NDArray[np.float32], int], None]  # (x [tokens, width], first neuron)


class HostOps:
    def __init__(self, block: BlockSpec, dtype: str, pool: _core.ThreadPool) -> None:
        self.storage = WEIGHT_DTYPES[dtype].storage
        self._block = block
        self._native = _core.BatchModel(block=block, dtype=dtype, pool=pool, rows_together=ROWS_TOGETHER)

    def embed(self, ends: Tensors, rows: Array, positions: Positions) -> Array:
        states = np.empty((len(rows), self._block.d_model), self.storage)
        self._native.embed(self._ends(ends), rows, positions, states)
        return states

    def layer(
        self,
        number: int,
        tensors: Tensors,
        x: Array,
        positions: Positions,
        attend: Attend,
        *,
        decoding: bool = False,
        states: LentStates | None = None,
        watch: Watch | None = None,
    ) -> Array:
        """`watch` sees the inputs of the layer's products, in fp32: those of query, key and value, then of out, both
        with -1; those of up and gate, then of down, with the first of their neurons: of each expert that any row goes
        to. And so on for each part of the rows."""
        if tensors.lent is None:
            encodings = {
                f"{name}.weight": matrix.packing.encoding
                for name, matrix in tensors.matrices.items()
                if matrix.packing is not None
            }
            down = tensors.matrices.get("down")
            by_inputs = down is not None and down.packing is not None and down.packing.by_inputs
            tensors.lent = self._native.lend_layer(number, tensors.arrays(), encodings, by_inputs)

        def attend_to(first: int, queries: Array, keys: Array, values: Array, out: Array) -> None:
            attend(first, Projected(queries, keys, values), out)

        self._native.run(tensors.lent, x, positions, attend_to, decoding, watch, *(states or ()))
        return x

    def logits(self, ends: Tensors, x: Array) -> NDArray[np.float32]:
        out = np.empty((len(x), self._block.vocab_size), np.float32)
        self._native.head(self._ends(ends), x, out)
        return out

    def _ends(self, ends: Tensors) -> _core.LentEnds:
        if ends.lent is None:
            ends.lent = self._native.lend_ends(ends.arrays())
        made: _core.LentEnds = ends.lent
        return made

    def task(self) -> AbstractContextManager[None]:
        return nullcontext()

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
