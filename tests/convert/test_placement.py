"""Placement: an order is a permutation, what fires together lies together, and the script counts requests."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import write_trace

from flashllm.convert.placement import place

BENCH = Path(__file__).parents[2] / "bench" / "cache"
sys.path.insert(0, str(BENCH))
from cache_replay import WARM_UP  # noqa: E402
from placement_replay import requests_of, requests_with_friends, unit_misses  # noqa: E402


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.integers(1, 30), st.floats(0, 1), st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_every_neuron_has_one_place(neurons, tokens, share, hot, seed):
    active = np.random.default_rng(seed).random((tokens, neurons)) < share
    order = place(active, hot_share=hot)
    assert order.dtype == np.int32
    assert sorted(order.tolist()) == list(range(neurons))
    counts = active.sum(axis=0)[order]
    num_hot = int(hot * neurons)
    assert (np.diff(counts[:num_hot]) <= 0).all()  # the hot set comes first, the most popular before the others
    if 0 < num_hot < neurons:
        assert counts[num_hot - 1] >= counts[num_hot:].max()


def test_groups_that_fire_together_lie_together():
    random = np.random.default_rng(0)
    group_of = random.permutation(np.repeat(np.arange(20), 10))
    active = (random.random((300, 20)) < 0.1)[:, group_of]
    order = place(active, hot_share=0.0)
    assert (np.diff(group_of[order]) != 0).sum() == 19  # one piece a group


def test_requests_are_counted_as_the_reader_merges():
    order = np.array([3, 1, 4, 0, 2])
    misses = np.array([0, 1, 3])  # in rows 3, 1 and 0
    assert requests_of(order, misses, 0) == (2, 3)
    assert requests_of(order, misses, 1) == (1, 4)
    assert requests_of(order, misses[:0], 1) == (0, 0)
    friends = np.array([1, 0, 0, 4, 3])
    assert requests_with_friends(friends, misses, np.array([0.1, 0.2, 0.3, 0.4, 0.5])) == (2, 4)


def test_neurons_of_a_unit_come_and_stay_together():
    """Two units have room for one: the unit that is used always is held, the other is read whenever it is used."""
    order = np.array([0, 2, 1, 3])
    tokens = [np.array([0]), np.array([1, 2])] * WARM_UP
    active = np.array([[True, False, True, False], [False, False, True, False], [True, True, False, False]])
    misses = unit_misses(order, 2, active, tokens, 2)
    assert [ids.tolist() for ids in misses] == [[], [1]] * (WARM_UP // 2)


@pytest.mark.parametrize("learn", [False, True])
def test_the_script_ends_with_one_json_document(tmp_path, learn):
    random = np.random.default_rng(0)
    group_of = random.permutation(np.repeat(np.arange(32), 8))
    active = (random.random((80, 2, 32)) < 0.15)[:, :, group_of]
    trace = write_trace(tmp_path / "trace", active)
    arguments = [trace, "--capacity", "30", "--out", tmp_path / "table", *(["--learn", trace] if learn else [])]
    done = subprocess.run(
        [sys.executable, BENCH / "placement_replay.py", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert document == json.loads((tmp_path / "table.json").read_text())
    requests = {(row["order"], row["gap_rows"]): row["requests"] for row in document["orders"]}
    assert requests["path", 0] < 0.5 * requests["random", 0]
    assert requests["random", 2] < requests["random", 0]
    assert requests["units of 2", 0] < requests["random", 0]  # groups of 8 fire together
    assert "| hot set, then path |" in (tmp_path / "table.md").read_text()
