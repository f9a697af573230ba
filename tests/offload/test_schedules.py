"""Schedules: volumes against A.2's formulas, theorem 4.1 against a brute-force optimum, the diagonal's gain."""

import itertools
import random
from functools import cache

import pytest

from flashllm.offload.planner.schedules import (
    Action,
    Graph,
    Step,
    account,
    diagonal_block,
    diagonal_gain,
    diagonal_sequences,
    least_weight_loads,
    row_by_row,
    zigzag_block,
    zigzag_sequences,
)
from flashllm.offload.shape import BUILTIN, ModelShape

H1 = 8
LOADS = 24
SHAPE = ModelShape(name="m", layers=3, hidden=H1, ffn=4 * H1, heads=2, kv_heads=2, head_dim=4, vocab=1)


def volume(steps, graph, *, prompt_len=5, gpu_batch=2):
    return account(steps, graph, SHAPE, prompt_len=prompt_len, gpu_batch=gpu_batch)


def test_zigzag_volumes_are_those_of_a2():
    graph, s, gbs = Graph(batches=4, tokens=6, layers=3), 5, 2
    got = volume(zigzag_block(graph, block=4), graph)
    bls, n, layers = 4 * gbs, 6, 3
    assert got.weight_loads == n * layers
    assert got.weights == n * layers * SHAPE.layer_bytes  # "load n times the whole model weights"
    assert got.activations == 2 * (2 * H1 * s * bls * layers + 2 * H1 * bls * layers * (n - 1))
    assert got.cache == 4 * H1 * bls * layers * (s * n + n * (n - 1) // 2)
    assert got.squares == 4 * n * layers


@pytest.mark.parametrize(("batches", "tokens", "layers", "block"), [(1, 1, 1, 1), (5, 3, 2, 2), (3, 4, 1, 8)])
def test_orders_differ_in_weights_only(batches, tokens, layers, block):
    graph = Graph(batches=batches, tokens=tokens, layers=layers)
    rows, zigzag, diagonal = (
        volume(steps, graph)
        for steps in (row_by_row(graph), zigzag_block(graph, block=block), diagonal_block(graph, group=block))
    )
    assert rows.cache == zigzag.cache == diagonal.cache
    assert rows.activations == zigzag.activations == diagonal.activations
    assert rows.weight_loads == batches * tokens * layers
    assert zigzag.weight_loads == -(-batches // block) * tokens * layers
    assert diagonal.weight_loads == (-(-batches // block) + tokens - 1) * layers


def test_row_by_row_holds_one_row_zigzag_a_block_and_the_diagonal_a_level_sum():
    graph, s, n, layers = Graph(batches=40, tokens=8, layers=3), 5, 8, 3
    token = 2 * SHAPE.kv_token_bytes
    rows = volume(row_by_row(graph), graph).peak_cache
    zigzag = volume(zigzag_block(graph, block=8), graph).peak_cache
    diagonal = volume(diagonal_block(graph, group=1), graph).peak_cache
    # The last token's cache of a layer is dropped as soon as it was used, so s + n - 1 tokens are held in one layer.
    assert rows == (layers * (s + n - 2) + 1) * token
    assert zigzag == (8 * layers * (s + n - 2) + 1) * token
    level = layers * sum(s + i for i in range(n - 1))  # every length from s to s + n - 2, at the end of a round
    assert level * token < diagonal <= (level + layers * (s + n)) * token
    assert diagonal < zigzag


@pytest.mark.parametrize("seed", range(12))
def test_diagonal_gain_follows_the_formula(seed):
    """As many rows as fit the same memory, by walking both schedules; the ratio is A.2.1's up to O(1/n)."""
    rng = random.Random(seed)
    s, n, layers, group = rng.randint(1, 60), rng.randint(12, 40), rng.randint(1, 3), rng.randint(1, 2)
    graph = Graph(batches=3 * n * group, tokens=n, layers=layers)
    memory = volume(diagonal_block(graph, group=group), graph, prompt_len=s).peak_cache
    one = volume(row_by_row(Graph(batches=1, tokens=n, layers=layers)), Graph(batches=1, tokens=n, layers=layers), prompt_len=s)  # fmt: skip  # noqa: E501
    gain = n * group / (memory / one.peak_cache)
    assert gain == pytest.approx(diagonal_gain(prompt_len=s, gen_len=n), rel=3 / n)


def test_block_sizes_of_a21():
    shape = BUILTIN["opt-30b"]
    for s, n in ((512, 32), (32, 2048), (1, 4096)):
        memory = 200e9
        zigzag = zigzag_sequences(shape, prompt_len=s, gen_len=n, memory=memory)
        diagonal = diagonal_sequences(shape, prompt_len=s, gen_len=n, memory=memory)
        cache = 4 * shape.hidden * shape.layers
        assert zigzag == pytest.approx((memory - shape.layer_bytes) / (2 * shape.hidden + cache * (s + n)))
        assert diagonal / zigzag == pytest.approx(diagonal_gain(prompt_len=s, gen_len=n) * n / (n - 1), rel=0.01)
    assert diagonal_gain(prompt_len=1, gen_len=10**6) == pytest.approx(2, abs=1e-4)
    assert diagonal_gain(prompt_len=10**6, gen_len=1) == pytest.approx(1, abs=1e-4)


def optimal_squares_per_load(s: int, n: int, layers: int, capacity: int, loads: int) -> float:
    """Most squares a weight load any order computes once it runs, by exhaustive search: what 2·`loads` loads compute
    from nothing beyond what `loads` do, so that the start, when no row holds a long cache yet, does not count.

    A state is how many rows stand before each column. A row in token i holds s + i tokens in each of `layers` layers,
    from its first square of that token on; finished rows hold nothing.
    """
    columns = n * layers

    def size(column: int) -> int:
        return (s + column // layers) * layers

    @cache
    def moves(state: tuple[int, ...]) -> tuple[tuple[tuple[int, ...], int], ...]:
        """Every (next state, squares) one load allows. state[c]: rows whose last square was column c - 1, c from 1."""
        found = []
        for layer in range(layers):
            sources = [c for c in range(columns) if c % layers == layer]
            ranges = [range((capacity // size(0) if c == 0 else state[c - 1]) + 1) for c in sources]
            for chosen in itertools.product(*ranges):
                if not any(chosen):
                    continue
                rows = list(state)
                for c, count in zip(sources, chosen, strict=True):
                    if c > 0:
                        rows[c - 1] -= count
                # While the load is used, rows that wait hold the cache of their last square, rows computed of theirs.
                held = sum(count * size(c) for c, count in zip(range(columns - 1), rows, strict=True))
                held += sum(count * size(c) for c, count in zip(sources, chosen, strict=True))
                if held > capacity:
                    continue
                for c, count in zip(sources, chosen, strict=True):
                    if c < columns - 1:
                        rows[c] += count
                found.append((tuple(rows), sum(chosen)))
        return tuple(found)

    best = {(0,) * (columns - 1): 0}
    most = [0]
    for _ in range(2 * loads):
        following: dict[tuple[int, ...], int] = {}
        for state, squares in best.items():
            for after, more in moves(state):
                following[after] = max(following.get(after, 0), squares + more)
        best = following
        most.append(max(best.values()))
    return (most[2 * loads] - most[loads]) / loads


@pytest.mark.parametrize("seed", range(10))
def test_theorem_4_1_on_random_small_cases(seed):
    """The zig-zag block loads weights at most twice as often as the best order found by exhaustive search."""
    rng = random.Random(seed)
    n, layers = rng.choice([(2, 1), (3, 1), (4, 1), (2, 2)])
    s, block = rng.randint(1, 4), rng.randint(1, 3)
    capacity = block * (s + n - 1) * layers  # what the zig-zag block needs at its last token
    optimum = optimal_squares_per_load(s, n, layers, capacity, loads=LOADS)
    graph = Graph(batches=block, tokens=n, layers=layers)
    got = volume(zigzag_block(graph, block=block), graph, prompt_len=s)
    zigzag = got.squares / got.weight_loads
    rest = n * block / LOADS  # a cycle of the best order need not divide LOADS
    assert zigzag <= optimum + rest
    assert optimum <= 2 * zigzag + rest
    bound = got.squares / least_weight_loads(graph, prompt_len=s, capacity=capacity)
    assert bound <= 2 * zigzag
    assert optimum <= bound + rest


def test_the_exhaustive_search_finds_more_than_zigzag_where_there_is_more():
    """At n = 4, s = 1 the diagonal computes more squares a load than the zig-zag block, and brute force sees it."""
    assert optimal_squares_per_load(1, 4, 1, 10, loads=40) > 10 // 4 + 0.5


def test_the_diagonal_meets_the_lower_bound():
    n, layers, s, groups = 4, 2, 3, 200
    graph = Graph(batches=groups, tokens=n, layers=layers)
    capacity = layers * sum(s + i for i in range(n))
    loads = volume(diagonal_block(graph, group=1), graph, prompt_len=s).weight_loads
    least = least_weight_loads(graph, prompt_len=s, capacity=capacity)
    assert least <= loads <= least * 1.05  # a warm-up of n - 1 rounds in 200


@pytest.mark.parametrize(
    "steps",
    [
        [],
        [Step(Action.LOAD_ACTIVATION, 0, 0, 0), Step(Action.COMPUTE, 0, 0, 0)],
        [Step(Action.LOAD_WEIGHTS, 0, 0, 0), Step(Action.COMPUTE, 0, 0, 0)],
    ],
)
def test_impossible_orders_are_refused(steps):
    with pytest.raises(ValueError):
        volume(steps, Graph(batches=1, tokens=1, layers=1))


def test_out_of_order_and_double_squares_are_refused():
    graph = Graph(batches=1, tokens=2, layers=2)
    good = list(zigzag_block(graph, block=1))
    assert volume(good, graph).squares == 4
    with pytest.raises(ValueError, match="order"):
        volume([*good, *good], graph)
    with pytest.raises(ValueError, match="order"):
        volume(sorted(good, key=lambda step: -step.token), graph)


def test_graphs_are_checked():
    with pytest.raises(ValueError, match="layers"):
        Graph(batches=1, tokens=1, layers=0)
