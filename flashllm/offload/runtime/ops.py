"""What a layer asks of whatever computes it: operations over arrays of an implementation's own, and ways in and out.

There are two: the native core's over numpy arrays (`native_ops.py`), and torch's over tensors of a device
(`torch_ops.py`). Arrays are [rows, width] of the model's dtype; beside the device they are numpy's, bfloat16 as its
bits (uint16).
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Array = Any  # of the implementation
HostArray = NDArray[Any]
GroupsAlong = Literal["inputs", "outputs"]
WeightGroups = Literal["mixed", "inputs", "outputs"]

# Packed weights in `mixed` groups: a sequence's first token takes most of the attention of all others, so an error of
# its value goes into every token, and values have at least so many bits. A few inputs of a down projection are a
# hundred times the others; along the outputs each has scales of its own.
VALUE_BITS = 8
_VALUE, _ALONG_OUTPUTS = "value", "down"


@dataclass(frozen=True, slots=True)
class Packing:
    """How a packed matrix lies: csrc/offload/packed_weights.h."""

    bits: int
    along: GroupsAlong  # where the 64 weights lie that share a scale and a minimum

    @classmethod
    def of(cls, matrix: str, bits: int, groups: WeightGroups) -> "Packing":
        """Of a layer's matrix, by name."""
        if groups != "mixed":
            return cls(bits, groups)
        wider = max(bits, VALUE_BITS) if matrix == _VALUE else bits
        return cls(wider, "outputs" if matrix == _ALONG_OUTPUTS else "inputs")


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix where it is computed with."""

    array: Array  # [rows, columns] of the dtype's storage, or packed bytes
    rows: int  # outputs
    columns: int  # inputs
    packing: Packing | None  # None: as it is
    bias: Array | None  # [rows] fp32


@dataclass(frozen=True, slots=True)
class Norm:
    """Weight and bias of a norm, fp32, one dimension; None where it has none."""

    weight: Array | None
    bias: Array | None


class Ops(Protocol):
    """Operations of one model on one device. Those that return nothing work in place."""

    @property
    def storage(self) -> np.dtype[Any]:
        """numpy's type for the model's dtype."""

    def task(self) -> AbstractContextManager[None]:
        """Around what a worker does; leaving it, the device has done it."""

    def empty(self, rows: int, width: int) -> Array: ...

    def linear(self, matrix: Matrix, x: Array) -> Array:
        """x [rows, columns] times the transpose of `matrix`, plus its bias."""

    def logits(self, matrix: Matrix, x: Array) -> NDArray[np.float32]:
        """As `linear`, beside the device, and not rounded to the model's dtype."""

    def norm(self, norm: Norm, x: Array) -> Array: ...

    def norm_heads(self, norm: Norm, x: Array, heads: int) -> None:
        """Normalize the heads of x [rows, heads * head_dim], as `BlockSpec.query_key_norm` says."""

    def rotate(self, x: Array, heads: int, positions: NDArray[np.int64], rotary: int, factor: float = 1.0) -> None:
        """Turn the heads of x [rows, heads * head_dim] by that rotary embedding of the block's, and multiply them by
        `factor`, rounded once."""

    def activate(self, x: Array, gate: Array | None, threshold: float) -> None:
        """x = activation(x), or activation(gate) * x. `threshold`: of fatrelu."""

    def rounded(self, value: float) -> float:
        """The value in the model's dtype."""

    def add(self, x: Array, y: Array) -> None:
        """x += y."""

    def scale(self, x: Array, factor: float) -> None:
        """x *= factor."""

    def from_host(self, values: HostArray) -> Array:
        """To the device. What comes of it may share the memory of `values`, and must not outlive what it holds."""

    def to_host(self, x: Array, out: HostArray | None = None) -> HostArray:
        """A copy beside the device, in `out` where it is given."""

    def use(self, x: Array) -> Array:
        """x, perhaps made by another worker: its memory is given to no other before this worker has done its task."""

    def copy(self, x: Array) -> Array: ...

    def join(self, parts: Sequence[Array]) -> Array:
        """One array of the rows of all parts."""

    def rows(self, x: Array, index: NDArray[np.int64]) -> Array:
        """A copy of some rows."""
