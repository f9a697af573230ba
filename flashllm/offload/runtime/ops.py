"""What a layer asks of whatever computes it: operations over arrays of an implementation's own, and ways in and out.

There are two: the native core's over numpy arrays (`native_ops.py`), and torch's over tensors of a device
(`torch_ops.py`). Arrays are [rows, width] of the model's dtype; beside the device they are numpy's, bfloat16 as its
bits (uint16).
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from flashllm.offload.planner.packing import Packing

Array = Any  # of the implementation
HostArray = NDArray[Any]


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

    def linear(self, matrix: Matrix, x: Array, *, decoding: bool = False) -> Array:
        """x [rows, columns] times the transpose of `matrix`, plus its bias.

        `decoding`: of one token a sequence, where packed weights may be multiplied by x rounded to 8 or 16 bits.
        """

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
