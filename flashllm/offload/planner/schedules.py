"""Compute schedules as generated sequences of steps (paper B, section 4.2): zig-zag block, and a pipeline's stage.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """The computational graph of figure 2: how many batches (rows), new tokens and layers."""

    batches: int
    tokens: int
    layers: int

    def __post_init__(self) -> None:
        for field in ("batches", "tokens", "layers"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be positive, not {getattr(self, field)!r}")


def _groups(count: int, size: int) -> list[range]:
    if size < 1:
        raise ValueError(f"a block or group holds at least one batch, not {size!r}")
    return [range(first, min(first + size, count)) for first in range(0, count, size)]


def _square(batch: int, token: int, layer: int) -> Iterator[Step]:
    if token > 0:
        yield Step(Action.LOAD_CACHE, batch, token, layer)
    yield Step(Action.LOAD_ACTIVATION, batch, token, layer)
    yield Step(Action.COMPUTE, batch, token, layer)
    yield Step(Action.STORE_CACHE, batch, token, layer)
    yield Step(Action.STORE_ACTIVATION, batch, token, layer)


def zigzag_block(graph: Graph, *, block: int) -> Iterator[Step]:
    """Column by column within blocks of `block` batches (figure 3b): each column loads its weights once a block."""
    for rows in _groups(graph.batches, block):
        for token in range(graph.tokens):
            for layer in range(graph.layers):
                yield Step(Action.LOAD_WEIGHTS, rows[0], token, layer)
                for batch in rows:
                    yield from _square(batch, token, layer)


def pipeline_stage(graph: Graph, *, group: int) -> Iterator[Step]:
    """Token by token, groups of `group` batches one after the other through all layers of one stage of a pipeline.

    A group is a micro-batch (section 4.4): while it is in this stage others are in the other stages, so it must leave
    before the next begins. Each group loads each layer's weights, once a token. Layers are the stage's own.
    """
    groups = _groups(graph.batches, group)
    for token in range(graph.tokens):
        for rows in groups:
            for layer in range(graph.layers):
                yield Step(Action.LOAD_WEIGHTS, rows[0], token, layer)
                for batch in rows:
                    yield from _square(batch, token, layer)
