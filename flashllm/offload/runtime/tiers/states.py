"""The recurrent states of a run's sequences: they stay in memory, as every token reads and writes all of one."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flashllm import _core
from flashllm.arch.spec import LayerSpec
from flashllm.offload.runtime.tiers.arrangement import Arrangement

_FLOAT = 4


class LentStates(NamedTuple):
    """Those of a layer, lent for a computation, which changes them in place."""

    array: NDArray[np.float32]  # [sequences of the run, floats]
    rows: NDArray[np.int32]  # of it, of each sequence that takes part


class RecurrentStates:
    def __init__(self, layers: Sequence[LayerSpec], arrangement: Arrangement) -> None:
        sizes, batches = floats(layers), [len(batch) for batch in arrangement.batches]
        self._first = np.cumsum([0, *batches])  # row of each batch's first sequence
        memory = _core.allocate(self.nbytes(layers, sum(batches))).view(np.float32)
        parts = np.split(memory, np.cumsum(sizes)[:-1] * sum(batches))
        self._layers = [part.reshape(sum(batches), -1) if part.size else None for part in parts]

    @staticmethod
    def nbytes(layers: Sequence[LayerSpec], sequences: int) -> int:
        return sequences * _FLOAT * sum(floats(layers))

    def lend(self, layer: int, batch: int, active: Sequence[int]) -> LentStates | None:
        """States of a batch's `active` places, at a layer; None where it keeps none."""
        array = self._layers[layer]
        if array is None:
            return None
        return LentStates(array, np.array(active, np.int32) + np.int32(self._first[batch]))


def floats(layers: Sequence[LayerSpec]) -> list[int]:
    """Numbers of a sequence's state at each layer; 0: it keeps none."""
    return [0 if layer.recurrent is None else layer.recurrent.state_floats for layer in layers]
