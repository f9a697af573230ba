"""The window policy, driven through a layer over a real file, against a statement of it with sets."""

import pytest
import torch
from ffn_rows import Ffn, random_input, write_ffn
from hypothesis import given, settings
from hypothesis import strategies as st

NEURONS = 16


class WindowModel:
    """Paper A's window: neurons of the last k tokens stay; when they do not fit, the oldest tokens are forgotten."""

    def __init__(self, capacity: int, window: int):
        self.capacity, self.window = capacity, window
        self.recent: list[set[int]] = []  # the newest token last
        self.cached: set[int] = set()

    def token(self, active: list[int]) -> None:
        self.recent = [*self.recent, set(active)][-self.window :]
        for start in range(0, len(active), self.capacity):
            part = set(active[start : start + self.capacity])
            self.cached &= set().union(*self.recent)
            while len(self.cached | part) > self.capacity and len(self.recent) > 1:
                self.recent.pop(0)
                self.cached &= set().union(*self.recent)
            for other in sorted(self.cached - part)[: max(0, len(self.cached | part) - self.capacity)]:
                self.cached.discard(other)
            self.cached |= part


@pytest.fixture(scope="module")
def ffn(tmp_path_factory):
    return write_ffn(tmp_path_factory.mktemp("window") / "ffn.bin", num_neurons=NEURONS)


@settings(max_examples=120, deadline=None)
@given(
    capacity=st.integers(1, NEURONS),
    window=st.integers(1, 6),
    tokens=st.lists(st.sets(st.integers(0, NEURONS - 1)), min_size=1, max_size=20),
)
def test_cache_follows_the_window(ffn, capacity, window, tokens):
    narrow = Ffn(ffn, capacity=capacity, window=window, io_threads=2)
    whole = Ffn(ffn, window=window, io_threads=1)
    model = WindowModel(capacity, window)
    for number, token in enumerate(tokens):
        active = sorted(token)
        x = random_input(ffn, number)
        y = narrow(x, active)
        model.token(active)
        assert set(narrow.layer.cached()) == model.cached
        assert len(model.cached) <= capacity
        assert narrow.wrong_rows() == []
        assert torch.equal(y, whole(x, active))


def test_rows_read_are_what_was_missing(ffn):
    layer = Ffn(ffn, capacity=6, window=2)
    x = random_input(ffn)
    expected = [([0, 1, 2], 0, 3), ([1, 2, 3], 2, 1), ([4, 5], 0, 2), ([0, 4], 1, 1), ([], 0, 0), ([4], 1, 0)]
    for active, hits, misses in expected:
        layer(x, active)
        counters = layer.counters.take()
        assert (counters["hits"], counters["misses"]) == (hits, misses)
        assert counters["bytes_read"] == misses * ffn.stride
    assert sorted(layer.layer.cached()) == [4]  # the empty token pushed [0, 4] out of the window of two


def test_the_window_shrinks_and_grows_again(ffn):
    layer = Ffn(ffn, capacity=4, window=3)
    x = random_input(ffn)
    for active, cached in [([0, 1], {0, 1}), ([2, 3], {0, 1, 2, 3}), ([4, 5, 6], {4, 5, 6}), ([7], {4, 5, 6, 7})]:
        layer(x, active)
        assert set(layer.layer.cached()) == cached
