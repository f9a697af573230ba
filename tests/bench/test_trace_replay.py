"""A token's activity by a trace: what the caches of a plan would miss, and what is worth prefetching."""

import core_testing  # noqa: F401
import numpy as np
import pytest
from activity_trace import Trace, TraceInfo
from planned import memory_plan, with_rows
from trace_replay import count_requests, from_trace
from traces import write_masks

from flashllm import _core
from flashllm.format.model_dir import ModelDir


@pytest.fixture(scope="module")
def model(tiny):
    opened = ModelDir.open(tiny("float16").path("random"))
    return opened, memory_plan(opened)


def write_trace(path, masks, **changes):
    info = TraceInfo(
        num_tokens=len(masks), num_layers=3, num_neurons=512, synthetic=True, description="a test", **changes
    )
    write_masks(path, info, masks)
    return Trace(path)


def test_a_replay_counts_what_the_cache_misses(model, tmp_path):
    masks = np.zeros((20, 3, 3, 512), bool)
    for token in range(20):
        masks[token, :, 0, [token % 7, 100, 200]] = True  # one neuron comes again after 7 tokens
        masks[token, 0, 1, 100] = True
    window = with_rows(model[1], (512, 9, 4), bypass_rows=0, window=7, cache_policy="window")
    frequency = with_rows(window, (512, 9, 3), bypass_rows=3, cache_policy="frequency")
    with write_trace(tmp_path / "t", masks) as trace:
        seen = from_trace(trace, window, None, 0).layers
        frequent = from_trace(trace, frequency, None, 0).layers
    assert [layer.active for layer in seen] == [3, 3, 3]
    assert [layer.firing for layer in seen] == [1, 0, 0]
    assert [layer.misses for layer in seen] == [0, 0, 1]  # four rows hold two tokens' neurons
    assert [layer.misses for layer in frequent] == [0, 0, pytest.approx(1, abs=0.2)]  # the two of every token stay
    assert seen[2].requests == seen[2].rows_read == 1


def test_a_replay_knows_neighbours_and_what_can_be_prefetched(model, tmp_path):
    masks = np.zeros((20, 3, 3, 512), bool)
    scattered = np.random.default_rng(0).permutation(512).reshape(64, 8)  # eight fire together
    for token in range(20):
        masks[token, 0, 0, scattered[token]] = True
        masks[token, 1:, 0, 8 * token : 8 * token + 8] = True
        masks[token, 1:, 2, 8 * token : 8 * token + 6] = True
    small = with_rows(model[1], (8, 8, 8), bypass_rows=0, window=1, cache_policy="window")
    with write_trace(tmp_path / "t", masks) as trace:
        layers = from_trace(trace, small, None, 0).layers
    assert [layer.misses for layer in layers] == [8, 8, 8]
    assert [layer.requests for layer in layers[1:]] == [1, 1]
    assert layers[0].requests > 6
    assert [(layer.prefetched, layer.useful) for layer in layers] == [(0, 0), (6, 6), (6, 6)]


def test_a_replay_prefetches_what_is_worth_it(model, tmp_path):
    """Of 56 rows named the 16 that are likely are needed: the others are not read."""
    masks = np.zeros((20, 3, 3, 512), bool)
    masks[:, :, 0, 100:124] = masks[:, :, 2, 100:164] = True
    popularity = np.zeros((3, 512), np.float32)
    popularity[:, 100:124] = 0.5
    small = with_rows(model[1], (8, 8, 8), bypass_rows=16, cache_policy="frequency")
    with write_trace(tmp_path / "t", masks) as trace:
        layers = from_trace(trace, small, popularity, 0).layers
    assert [layer.prefetched for layer in layers] == [layer.useful for layer in layers]
    assert [layer.useful for layer in layers] == [layer.misses for layer in layers]
    assert [layer.misses for layer in layers] == [16, 16, 16]


def test_a_replay_refuses_ids_out_of_order():
    replay = _core.CacheReplay(cache_policy="window", num_units=8, capacity=4, bypass=0, window=2, popularity=None)
    assert replay.token(np.array([1, 5], np.int32)) == [1, 5]
    assert replay.token(np.array([1, 6], np.int32)) == [6]
    for wrong in ([5, 1], [1, 1], [8], [-1]):
        with pytest.raises(ValueError, match="ascending"):
            replay.token(np.array(wrong, np.int32))


@pytest.mark.parametrize("max_gap_rows", [0, 1, 3])
def test_requests_of_rows_are_counted(max_gap_rows):
    random = np.random.default_rng(0)
    for _ in range(300):
        rows = np.flatnonzero(random.random(4000) < 0.05)
        gaps = np.diff(rows) - 1
        expected = 1 + np.count_nonzero(gaps > max_gap_rows), len(rows) + gaps[gaps <= max_gap_rows].sum()
        assert count_requests(rows, 512, max_gap_rows * 512) == expected
    assert count_requests(np.arange(100), 1 << 18, 0) == (50, 100)
    assert count_requests(np.arange(0), 512, 0) == (0, 0)
