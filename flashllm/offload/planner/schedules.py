"""Compute schedules as generated sequences of steps (paper B, section 4.2 and appendix A.2), and what they move.

A square is one GPU batch in one layer for one token. Orders of squares are generated, row by row, zig-zag block,
diagonal block and that of a pipeline's stage, and `account` walks any such sequence: it checks that the order is
possible and adds up bytes. As in A.2 no weights or cache live on the device and attention is the device's. It knows no
times and no machine.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from flashllm.offload.shape import ModelShape


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


def row_by_row(graph: Graph) -> Iterator[Step]:
    """Each batch to its end before the next begins (figure 3a): every square loads its weights."""
    return zigzag_block(graph, block=1)


def zigzag_block(graph: Graph, *, block: int) -> Iterator[Step]:
    """Column by column within blocks of `block` batches (figure 3b): each column loads its weights once a block."""
    for rows in _groups(graph.batches, block):
        for token in range(graph.tokens):
            for layer in range(graph.layers):
                yield Step(Action.LOAD_WEIGHTS, rows[0], token, layer)
                for batch in rows:
                    yield from _square(batch, token, layer)


def diagonal_block(graph: Graph, *, group: int) -> Iterator[Step]:
    """Groups of `group` batches, each one token behind the group before it (figure 6).

    A round passes once over the layers and loads each layer's weights once for up to `tokens` groups, all at different
    tokens; so caches of every length are held at the same time, and their sum stays level.
    """
    groups = _groups(graph.batches, group)
    for round_ in range(len(groups) + graph.tokens - 1):
        active = [(rows, round_ - g) for g, rows in enumerate(groups) if 0 <= round_ - g < graph.tokens]
        for layer in range(graph.layers):
            yield Step(Action.LOAD_WEIGHTS, active[0][0][0], active[0][1], layer)
            for rows, token in active:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """What a sequence of steps moves and holds. Bytes, except where said."""

    weights: int
    cache: int
    activations: int
    weight_loads: int  # of one layer each
    squares: int
    peak_cache: int  # most cache held at once, all tiers

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.activations


def account(steps: Iterable[Step], graph: Graph, shape: ModelShape, *, prompt_len: int, gpu_batch: int) -> Volume:
    """Adds up the bytes of `steps`. `shape` gives the sizes of a layer; the number of layers is the graph's.

    Raises ValueError where the order is impossible: a square before its left neighbour, without its layer's weights,
    its cache or its activations, twice, or not at all.
    """
    token_cache = gpu_batch * shape.kv_token_bytes
    token_activation = gpu_batch * shape.activation_token_bytes
    done = [0] * graph.batches  # squares computed of each row
    loaded: set[tuple[Action, int, int, int]] = set()
    held: dict[tuple[int, int], int] = {}  # (batch, layer) -> cached tokens
    weights_of: int | None = None
    weights = cache = activations = weight_loads = cached = peak = 0
    for step in steps:
        square = (step.batch, step.token, step.layer)
        fresh = prompt_len if step.token == 0 else 1  # tokens a square computes
        match step.action:
            case Action.LOAD_WEIGHTS:
                weights_of, weight_loads = step.layer, weight_loads + 1
                weights += shape.layer_bytes
            case Action.LOAD_CACHE:
                cache += held.get((step.batch, step.layer), 0) * token_cache
                loaded.add((step.action, *square))
            case Action.LOAD_ACTIVATION | Action.STORE_ACTIVATION:
                activations += fresh * token_activation
                loaded.add((step.action, *square))
            case Action.COMPUTE:
                needs = {Action.LOAD_ACTIVATION} | ({Action.LOAD_CACHE} if step.token else set())
                if weights_of != step.layer or any((need, *square) not in loaded for need in needs):
                    raise ValueError(f"{step}: its weights, cache or activations are not on the device")
                if done[step.batch] != step.token * graph.layers + step.layer:
                    raise ValueError(f"{step}: computed out of order or twice")
                done[step.batch] += 1
            case Action.STORE_CACHE:
                cache += fresh * token_cache
                held[step.batch, step.layer] = held.get((step.batch, step.layer), 0) + fresh
                cached += fresh
                peak = max(peak, cached)
                if step.token == graph.tokens - 1:  # nothing to the right of it will read this layer's cache
                    cached -= held.pop((step.batch, step.layer))
    if any(count != graph.tokens * graph.layers for count in done):
        raise ValueError("some squares were never computed")
    return Volume(
        weights=weights,
        cache=cache,
        activations=activations,
        weight_loads=weight_loads,
        squares=sum(done),
        peak_cache=peak * token_cache,
    )


def zigzag_sequences(shape: ModelShape, *, prompt_len: int, gen_len: int, memory: float) -> float:
    """Largest block of the zig-zag schedule that `memory` bytes hold: bls_1 of A.2.1, in sequences."""
    per_sequence = shape.activation_token_bytes + shape.kv_token_bytes * shape.layers * (prompt_len + gen_len)
    return (memory - shape.layer_bytes) / per_sequence


def diagonal_sequences(shape: ModelShape, *, prompt_len: int, gen_len: int, memory: float) -> float:
    """Largest block of the diagonal schedule that `memory` bytes hold: bls_2 of A.2.1, in sequences."""
    s, n = prompt_len, gen_len
    per_sequence = n * shape.activation_token_bytes + shape.kv_token_bytes * shape.layers * (2 * s + n) * (n - 1) / 2
    return n * (memory - shape.layer_bytes) / per_sequence


def diagonal_gain(*, prompt_len: int, gen_len: int) -> float:
    """What the diagonal block gains over the zig-zag block in sequences, up to O(1/n): (2s + 2n)/(2s + n), A.2.1."""
    return (2 * prompt_len + 2 * gen_len) / (2 * prompt_len + gen_len)


def least_weight_loads(graph: Graph, *, prompt_len: int, capacity: float) -> float:
    """No order loads weights less often than this, with cache for `capacity` tokens of whole rows (proof of A.3).

    A square of token i (from 0) holds its row's cache of prompt_len + i tokens in every layer. One load serves squares
    of different rows, whose caches are held together: so loads are at least all squares' memory over the capacity.
    """
    n = graph.tokens
    row = n * prompt_len + n * (n - 1) / 2
    return graph.batches * graph.layers * row * graph.layers / capacity
