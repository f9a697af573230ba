"""The weights of a planned conversion as they will be stored, a few rows at a time.

Between the checkpoint's tensors and the writer: which tensor, in which part, cast to the result's dtype, encoded.
Memory holds one layer's down projection, or an expert's, as columns cannot be read one by one.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashllm.arch.registry import Claim
from flashllm.arch.tensors import is_wide
from flashllm.base.dtypes import WEIGHT_DTYPES, WeightDtype, cast
from flashllm.base.files import CHUNK_NBYTES
from flashllm.convert.checkpoint.coded import Vectors
from flashllm.convert.checkpoint.pieces import read_rows
from flashllm.convert.plan import ConversionPlan
from flashllm.convert.storage import ResidentEntry
from flashllm.errors import UnsupportedModelError
from flashllm.format.rows import RowEncoding, RowLayout, pack_rows

Rows = Callable[[int, int], NDArray[Any]]  # (first, count) -> those rows


class Weights:
    """Reads of one conversion, in the order in which it writes. UnsupportedModelError where a cast overflows."""

    def __init__(self, plan: ConversionPlan) -> None:
        self._plan = plan
        self._down = np.empty((plan.layout.d_model, 0), plan.dtype.storage)  # of all neurons of a layer, or an expert
        self._planes: dict[str, NDArray[Any]] = {}  # of the layer at hand

    def bundle(
        self, bundle: Mapping[str, Claim], layout: RowLayout, buffer: NDArray[np.uint8]
    ) -> Iterator[NDArray[np.uint8]]:
        """The rows of the neurons of these matrices, of all of a layer or of an expert, uint8 [n, stride] at a time in
        `buffer`."""
        neurons = bundle["up"].rows
        sources = {matrix: self._vectors_of(layout.encoding_of(matrix), bundle[matrix]) for matrix in layout.matrices}
        for first in range(0, neurons, len(buffer)):
            rows = buffer[: neurons - first]
            pack_rows(layout, {matrix: source(first, len(rows)) for matrix, source in sources.items()}, rows)
            yield rows

    def resident(self, entry: ResidentEntry) -> Iterator[memoryview]:
        """The bytes of a resident tensor other than checksums."""
        if entry.plane:
            yield self._plane(entry).reshape(-1).view(np.uint8).data
            return
        if entry.encoding is None:
            raise AssertionError("weights have an encoding")
        for stored in self.vectors(self._plan.claims[entry.name], entry.encoding):
            yield stored.reshape(-1).data

    def vectors(self, claim: Claim, encoding: RowEncoding) -> Iterator[NDArray[np.uint8]]:
        """The rows of a tensor as they are stored, uint8 [n, bytes of a row] at a time."""
        row_nbytes = encoding.vector_items(claim.shape[-1]) * int(encoding.storage.itemsize)
        row_nbytes *= math.prod(claim.shape[1:-1])
        if (vectors := self._coded(claim)) is not None:
            together = max(1, CHUNK_NBYTES // row_nbytes)
            for first in range(0, claim.rows, together):
                yield np.ascontiguousarray(vectors(first, min(together, claim.rows - first)))
            return
        for _, values in self._parts(claim):
            stored = np.ascontiguousarray(self._stored(claim, encoding, values))
            yield stored.reshape(-1).view(np.uint8).reshape(len(values), -1)

    def rows_of(self, claim: Claim) -> Rows:
        """Rows of a tensor in the result's dtype. A transposed one is read whole, once."""
        if not claim.part.transposed:
            return lambda first, count: self._read(claim, first, count)
        whole = self._read(claim, 0, claim.rows)
        return lambda first, count: whole[first : first + count]

    def vector(self, name: str) -> NDArray[np.float32] | None:
        """A resident vector in fp32, by its canonical name; None where the model has none of that name."""
        if name not in self._plan.claims:
            return None
        parts = [
            cast(part, self._plan.dtype, WEIGHT_DTYPES["float32"]) for _, part in self._parts(self._plan.claims[name])
        ]
        return np.concatenate(parts)

    def _vectors_of(self, encoding: RowEncoding, claim: Claim) -> Rows:
        """A matrix's part of neurons' rows, as it is stored."""
        if (vectors := self._coded(claim)) is not None:
            return vectors
        if not claim.name.endswith(".down.weight"):
            rows_of = self.rows_of(claim)
            return lambda first, count: self._stored(claim, encoding, rows_of(first, count))
        if self._down.shape[1] != claim.shape[1]:
            self._down = np.empty(claim.shape, self._plan.dtype.storage)
        for start, part in self._parts(claim):
            self._down[start : start + len(part)] = part
        return lambda first, count: self._stored(claim, encoding, self._down[:, first : first + count].T)

    def _coded(self, claim: Claim) -> Vectors | None:
        return None if self._plan.coded is None else self._plan.coded.vectors(claim.name)

    def _plane(self, entry: ResidentEntry) -> NDArray[Any]:
        """A tensor of scales of down columns. Those of a layer are read together."""
        if entry.name not in self._planes:
            assert self._plan.kept is not None
            assert entry.layer is not None
            self._planes = self._plan.kept.plane(entry.layer)
        return self._planes[entry.name]

    def _parts(self, claim: Claim) -> Iterator[tuple[int, NDArray[Any]]]:
        """(first row, rows in the result's dtype) of a whole tensor, a chunk at a time."""
        row_nbytes = math.prod(claim.shape[1:]) * self._plan.dtype_of(self._plan.names[claim.source]).itemsize
        together = claim.rows if claim.part.transposed else max(1, CHUNK_NBYTES // row_nbytes)
        for first in range(0, claim.rows, together):
            yield first, self._read(claim, first, min(together, claim.rows - first))

    def _read(self, claim: Claim, first: int, count: int) -> NDArray[Any]:
        """Rows of a tensor in the result's dtype."""
        name = self._plan.names[claim.source]
        source = self._plan.dtype_of(name)
        values = np.empty((count, *claim.shape[1:]), source.storage)
        read_rows(self._plan.checkpoint, name, claim, first, values)
        return self._cast(name, values, source, self._dtype_of(claim))

    def _stored(self, claim: Claim, encoding: RowEncoding, values: NDArray[Any]) -> NDArray[Any]:
        """Vectors in the result's dtype as `encoding` stores them."""
        try:
            return encoding.stored(values, self._dtype_of(claim))
        except OverflowError as error:
            where = self._plan.checkpoint.where(self._plan.names[claim.source])
            raise UnsupportedModelError(f"{where}: {error}; leave these weights at 16 bits") from error

    def _dtype_of(self, claim: Claim) -> WeightDtype:
        """The dtype that its values are read in."""
        return WEIGHT_DTYPES["float32"] if is_wide(claim.name) else self._plan.dtype

    def _cast(self, name: str, values: NDArray[Any], source: WeightDtype, target: WeightDtype) -> NDArray[Any]:
        try:
            return cast(values, source, target)
        except OverflowError as error:
            raise UnsupportedModelError(
                f"{self._plan.checkpoint.where(name)}: {error}; choose another dtype"
            ) from error
