"""PowerInfer's predictors, `blk.N.fc1` and `blk.N.fc2` of its GGUF files, as a model directory's file of predictors.

Codes are kept, floats stay what they are; nothing is trained and nothing rounded. Where the file says no threshold, it
is 0, PowerInfer's own (llama.cpp: LLAMA_SPARSE_PRED_THRESHOLD).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flashllm.base.codes.carried import CarriedCode
from flashllm.convert.checkpoint.gguf.file import GgufContent, StoredTensor
from flashllm.convert.kept.blocks import KINDS
from flashllm.errors import FormatError
from flashllm.format.predictors import relu_header

THRESHOLD = "powerinfer.sparse_threshold"
_DEFAULT_THRESHOLD = 0.0
_ROWS_TOGETHER = 1024


@dataclass(frozen=True, slots=True)
class _Factor:
    name: str  # in our file
    stored: StoredTensor

    @property
    def code(self) -> CarriedCode | None:
        """How it is stored; None: as floats."""
        kind = KINDS.get(self.stored.kind)
        return None if kind is None else kind.packed_as

    @property
    def entry(self) -> tuple[str, str, tuple[int, ...]]:
        """(name, dtype, shape) in our file."""
        rows, columns = self.stored.shape
        if self.code is not None:
            return self.name, "U8", (rows, self.code.vector_nbytes(columns))
        return self.name, "F16" if self.stored.kind == "F16" else "F32", (rows, columns)

    @property
    def nbytes(self) -> int:
        """Bytes in our file."""
        _, dtype, (rows, items) = self.entry
        return rows * items * {"U8": 1, "F16": 2, "F32": 4}[dtype]

    def arrays(self) -> Iterator[NDArray[np.uint8]]:
        for first in range(0, self.stored.shape[0], _ROWS_TOGETHER):
            count = min(_ROWS_TOGETHER, self.stored.shape[0] - first)
            if self.code is not None:
                try:
                    part = self.code.pack(KINDS[self.stored.kind].quantised(self.stored.raw(first, count)))
                except OverflowError as error:
                    raise FormatError(
                        f"{self.stored.path}: {self.name}: {error}: damaged; get the file again"
                    ) from error
            else:
                read = self.stored.rows if self.stored.kind == "F16" else self.stored.numbers
                part = np.ascontiguousarray(read(first, count)).view(np.uint8)
            yield part.reshape(-1)


@dataclass(frozen=True, slots=True)
class GgufPredictors:
    """`OwnPredictors` of a GGUF file."""

    threshold: float
    layers: int
    factors: tuple[_Factor, ...]  # wide items first

    @property
    def nbytes(self) -> int:
        return 4 * self.layers + sum(factor.nbytes for factor in self.factors)

    def header(self, model_sha256: str) -> bytes:
        encodings = {factor.name: factor.code.name for factor in self.factors if factor.code is not None}
        return relu_header(self.layers, [factor.entry for factor in self.factors], encodings, model_sha256)

    def arrays(self) -> Iterator[NDArray[np.uint8]]:
        yield np.full(self.layers, self.threshold, "<f4").view(np.uint8)
        for factor in self.factors:
            yield from factor.arrays()


def own_predictors(content: GgufContent, layers: int) -> GgufPredictors:
    """The predictors of PowerInfer's file `content`. FormatError where one is missing or has another shape."""
    factors = []
    for layer in range(layers):
        first, second = (content.tensors.get(f"blk.{layer}.{part}.weight") for part in ("fc1", "fc2"))
        if first is None or second is None:
            raise FormatError(f"{content.path}: has no predictor (fc1, fc2) of layer {layer}; get the file again")
        if len(first.shape) != 2 or len(second.shape) != 2 or second.shape[1] != first.shape[0]:
            raise FormatError(f"{content.path}: blk.{layer}.fc1 {first.shape} and fc2 {second.shape} do not fit")
        factors += [_Factor(f"layers.{layer}.a", first), _Factor(f"layers.{layer}.b", second)]
    factors.sort(key=lambda factor: ("F32", "F16", "U8").index(factor.entry[1]))
    threshold = content.metadata.number(THRESHOLD, _DEFAULT_THRESHOLD)
    return GgufPredictors(threshold, layers, tuple(factors))
