"""The compute schedule as a generated sequence of steps (paper B, section 4.2): a zig-zag block, or a pipeline's stage.

A square is one GPU batch in one layer for one token. It knows no times and no machine.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class Action(StrEnum):
    LOAD_WEIGHTS = "load weights"
    LOAD_CACHE = "load cache"
    LOAD_ACTIVATION = "load activation"
    COMPUTE = "compute"
    STORE_CACHE = "store cache"
    STORE_ACTIVATION = "store activation"


@dataclass(frozen=True, slots=True)
class Step:
    """One action for one square; `batch` of a weight load is the first that will use it."""

    action: Action
    batch: int
    token: int  # 0 is the prefill
    layer: int


def schedule(*, batches: int, tokens: int, layers: int, group: int) -> Iterator[Step]:
    """Token by token, groups of `group` batches one after the other through all layers: each group loads each layer's
    weights, once a token.

    With all batches in one group it is the zig-zag block of figure 3b. In a pipeline a group is a micro-batch (section
    4.4): while it is in this stage others are in the other stages, so it must leave before the next begins; layers are
    the stage's own.
    """
    for token in range(tokens):
        for first in range(0, batches, group):
            for layer in range(layers):
                yield Step(Action.LOAD_WEIGHTS, first, token, layer)
                for batch in range(first, min(first + group, batches)):
                    if token > 0:
                        yield Step(Action.LOAD_CACHE, batch, token, layer)
                    yield Step(Action.LOAD_ACTIVATION, batch, token, layer)
                    yield Step(Action.COMPUTE, batch, token, layer)
                    yield Step(Action.STORE_CACHE, batch, token, layer)
                    yield Step(Action.STORE_ACTIVATION, batch, token, layer)
