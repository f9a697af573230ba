"""The runtime's interface to whatever computes a model: its layers, what comes before and after, ways in and out.

There are two: the native core's over numpy arrays (`host_ops.py`), and torch's over tensors of a device
(`accelerator/torch_ops.py`). Arrays are [rows, width] of the model's dtype; beside the device they are numpy's,
bfloat16 as its bits (uint16). Rows are tokens of any sequences; attention, which alone looks at other rows, is the
caller's.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from flashllm.offload.planner.packing import Packing
from flashllm.offload.runtime.tiers.states import LentStates

Array = Any  # of the implementation
HostArray = NDArray[Any]
Positions = NDArray[np.int64]
ROWS_TOGETHER = 512  # of a batch that go through a layer together on the CPU: the working memory does not grow with it


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix where it is computed with."""

    array: Array  # [rows, columns] of the dtype's storage, or packed bytes
    rows: int  # outputs
    columns: int  # inputs
    packing: Packing | None = None  # None: as it is
    bias: Array | None = None  # [rows] fp32

    @classmethod
    def of(cls, array: Array) -> "Matrix":
        """A matrix that is not packed and has no bias."""
        return cls(array, array.shape[0], array.shape[1])


@dataclass(slots=True)
class Tensors:
    """Tensors of a layer, or of what comes before the first and after the last, by canonical name without the layer's.

    Matrices are query, key, value, out, up, (gate,) down and others; or positions, project_in, project_out, and the
    head, called embedding where it is tied to it.
    """

    matrices: Mapping[str, Matrix]
    vectors: Mapping[str, Array]  # fp32; norms' weights with their shift
    lent: Any = field(default=None, compare=False)  # what the native core has of them, once it has

    def arrays(self) -> dict[str, Array]:
        """All of them, as the native core takes them."""
        return {f"{name}.weight": matrix.array for name, matrix in self.matrices.items()} | dict(self.vectors)


class Projected(NamedTuple):
    """A layer's queries [rows, heads * head_dim], keys and values [rows, kv_heads * head_dim]."""

    queries: Array
    keys: Array
    values: Array


# Keeps keys and values of the rows from that number on, and fills [rows, heads * head_dim].
Attend = Callable[[int, Projected, Array], None]


class Ops(Protocol):
    """Operations of one model on one device."""

    @property
    def storage(self) -> np.dtype[Any]:
        """numpy's type for the model's dtype."""

    def task(self) -> AbstractContextManager[None]:
        """Around what a worker does; leaving it, the device has done it."""

    def embed(self, ends: Tensors, rows: Array, positions: Positions) -> Array:
        """Hidden states [rows, d_model] of the embedding's rows, which may be changed."""

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
    ) -> Array:
        """x [rows, d_model], changed, through the model's layer of that number. `attend` is called for some rows after
        the others, until it was called for all; of a layer that keeps a state, its sequences' `states` go on.
        `decoding`: of one token a sequence, where packed weights may be multiplied by x rounded to 8 or 16 bits."""

    def logits(self, ends: Tensors, x: Array) -> NDArray[np.float32]:
        """Logits [rows, vocab] after states x, beside the device, and not rounded to the model's dtype."""

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
