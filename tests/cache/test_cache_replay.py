"""Cache replay: the optimum is one, the replayed policies are the engine's, and the script runs on a trace."""

import itertools
import json

import numpy as np
import pytest
from ffn_rows import Ffn, random_input, write_ffn
from replay import ALL_POLICIES, Activity, misses_of, replay_window
from scripts import document_of, run_script
from traces import write_trace

NEURONS = 16


def random_activity(seed, tokens=40, neurons=NEURONS, share=0.3):
    random = np.random.default_rng(seed)
    popularity = random.random(neurons) * 2 * share
    known = np.round(popularity, 2).clip(0, 1)
    return Activity([np.flatnonzero(random.random(neurons) < popularity) for _ in range(tokens)], neurons, known)


def least_misses(activity, capacity):
    """Over every choice of what to hold, by exhaustion."""
    start = frozenset(np.argsort(-next_uses(activity, -1), kind="stable")[:capacity].tolist())
    best = {start: 0}
    for ids in activity.tokens:
        active, following = frozenset(ids.tolist()), {}
        for held, cost in best.items():
            missed = cost + len(active - held)
            for kept in itertools.combinations(sorted(held | active), min(capacity, len(held | active))):
                key = frozenset(kept)
                following[key] = min(missed, following.get(key, 10**9))
        best = following
    return min(best.values())


def next_uses(activity, after):
    first = np.full(activity.num_neurons, -(1 << 30))
    for token in range(len(activity.tokens) - 1, after, -1):
        first[activity.tokens[token]] = -token
    return first


@pytest.mark.parametrize("seed", range(8))
def test_min_is_the_least(seed):
    activity = random_activity(seed, tokens=8, neurons=6, share=0.4)
    for capacity in (1, 2, 4):
        assert sum(map(len, misses_of("MIN", activity, capacity)[0])) == least_misses(activity, capacity)


@pytest.mark.parametrize("capacity", [3, 6, 12])
def test_nothing_beats_min_and_everything_is_counted(capacity):
    activity = random_activity(1, tokens=200)
    found = {name: [len(ids) for ids in misses_of(name, activity, capacity)[0]] for name in ALL_POLICIES}
    best = sum(found["MIN"])
    for name, misses in found.items():
        assert len(misses) == 200
        assert sum(misses) >= best - capacity, name  # they begin with other contents
        assert all(count <= len(ids) for count, ids in zip(misses, activity.tokens, strict=True)), name
    assert sum(found["frequency"]) < sum(found["window"])


@pytest.mark.parametrize(("capacity", "window"), [(5, 2), (9, 3), (14, 6)])
def test_replay_reads_what_the_engine_reads(tmp_path, capacity, window):
    ffn = write_ffn(tmp_path / "ffn", num_neurons=NEURONS)
    x, free = random_input(ffn), random_activity(3, share=0.2)
    activity = Activity([ids[:capacity] for ids in free.tokens], NEURONS, free.known)  # no token in parts
    popularity = activity.known.astype(np.float32)
    by_frequency = {"cache_policy": "frequency", "bypass": NEURONS, "popularity": popularity}
    for layer, expected in (
        (Ffn(ffn, capacity=capacity, window=window), replay_window(activity, capacity, window)),
        (Ffn(ffn, capacity=capacity, **by_frequency).fill(), misses_of("frequency", activity, capacity)[0]),
    ):
        counts = []
        for ids in activity.tokens:
            layer.counters.take()
            layer(x, ids.tolist())
            counts.append(layer.counters.take()["misses"])
        assert counts == [len(ids) for ids in expected]


def test_the_script_ends_with_one_json_document(tmp_path):
    random = np.random.default_rng(0)
    active = random.random((60, 2, 256)) < random.beta(0.2, 1.5, (2, 256))
    trace = write_trace(tmp_path / "trace", active)
    arguments = [trace, "--capacities", "40", "60", "--split", "popularity", "--shuffle", "--out", tmp_path / "table"]
    document = document_of(run_script("bench/cache/cache_replay.py", *arguments))
    assert document == json.loads((tmp_path / "table.json").read_text())
    assert document["conditions"]["synthetic"] is True
    found = document["capacities"]["40"]["policies"]
    assert set(found) == set(ALL_POLICIES)
    assert found["MIN"]["misses"] <= found["frequency"]["misses"] <= found["window"]["misses"]
    assert "| frequency |" in (tmp_path / "table.md").read_text()
    assert (tmp_path / "table.png").stat().st_size > 1000
