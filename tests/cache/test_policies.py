"""The cache's policies, each driven through a layer over a real file, against a plain statement of it."""

import numpy as np
import pytest
import torch
from ffn_rows import Ffn, random_input, write_ffn
from hypothesis import given, settings
from hypothesis import strategies as st

from flashllm import _core

NEURONS = 16
HALF_LIFE, LONG_RUN_TOKENS, KNOWN_TOKENS, NEWCOMER = 16, 12, 256, 0.8
TOKENS = st.lists(st.sets(st.integers(0, NEURONS - 1)), min_size=1, max_size=20)


class Neurons:
    """A layer's file, threads that read it, and a layer that has all of it cached."""

    def __init__(self, path):
        self.file = write_ffn(path, num_neurons=NEURONS)
        self.reader = _core.Reader(threads=2)
        self.whole = Ffn(self.file, reader=self.reader)


@pytest.fixture(scope="module")
def ffn(tmp_path_factory):
    return Neurons(tmp_path_factory.mktemp("policy") / "ffn.bin")


def check_that_it_follows(ffn, model, tokens, **options):
    """The cache holds what `model` says after every token, in the file's bytes; it has read what the model misses, and
    no result depends on it."""
    narrow = Ffn(ffn.file, capacity=model.capacity, reader=ffn.reader, **options)
    for number, token in enumerate(tokens):
        active, x = sorted(token), random_input(ffn.file, number)
        y = narrow(x, active)
        misses, counters = model.token(active), narrow.counters.take()
        assert (counters["misses"], counters["hits"]) == (misses, len(active) - misses)
        assert counters["bytes_read"] == misses * ffn.file.stride
        assert set(narrow.layer.cached()) == model.cached
        assert len(model.cached) <= model.capacity
        assert narrow.wrong_rows() == []
        assert torch.equal(y, ffn.whole(x, active))


class WindowModel:
    """Paper A's window: neurons of the last k tokens stay; when they do not fit, the oldest tokens are forgotten."""

    def __init__(self, capacity: int, window: int):
        self.capacity, self.window = capacity, window
        self.recent: list[set[int]] = []  # the newest token last
        self.cached: set[int] = set()

    def token(self, active: list[int]) -> int:
        """Neurons that were missing."""
        misses = 0
        self.recent = [*self.recent, set(active)][-self.window :]
        for start in range(0, len(active), self.capacity):
            part = set(active[start : start + self.capacity])
            self.cached &= set().union(*self.recent)
            while len(self.cached | part) > self.capacity and len(self.recent) > 1:
                self.recent.pop(0)
                self.cached &= set().union(*self.recent)
            misses += len(part - self.cached)
            for other in sorted(self.cached - part)[: max(0, len(self.cached | part) - self.capacity)]:
                self.cached.discard(other)
            self.cached |= part
        return misses


@settings(max_examples=120, deadline=None)
@given(capacity=st.integers(1, NEURONS), window=st.integers(1, 6), tokens=TOKENS)
def test_cache_follows_the_window(ffn, capacity, window, tokens):
    check_that_it_follows(ffn, WindowModel(capacity, window), tokens, window=window)


class FrequencyModel:
    """Estimates in float64. Neurons equally frequent have the same history, so rounding makes no difference to them."""

    def __init__(self, capacity: int, bypass: int, popularity: np.ndarray | None):
        self.capacity, self.bypass = capacity, bypass
        known = np.zeros(NEURONS) if popularity is None else popularity.astype(np.float64)
        self.recent = known / (1 - 2 ** (-1 / HALF_LIFE))
        self.total, self.tokens = known * KNOWN_TOKENS, 0 if popularity is None else KNOWN_TOKENS
        self.cached: set[int] = set()

    def token(self, active: list[int]) -> int:
        """Neurons that were missing."""
        missed = 0
        self.recent *= 2 ** (-1 / HALF_LIFE)
        self.recent[active] += 1
        self.total[active] += 1
        self.tokens += 1
        estimate = self.recent + LONG_RUN_TOKENS * self.total / self.tokens
        for start in range(0, len(active), self.capacity + self.bypass):
            part = set(active[start : start + self.capacity + self.bypass])
            misses = part - self.cached
            missed += len(misses)
            if not misses:
                continue
            hits = part & self.cached
            weight = np.where(np.isin(np.arange(NEURONS), list(misses)), NEWCOMER, 1.0)
            score = np.round(weight * estimate, 4) - np.arange(NEURONS) * 1e-6  # of equals the lower id is kept
            ranking = sorted((self.cached | part) - hits, key=lambda neuron: -score[neuron])
            room = self.capacity - len(hits)
            kept, passing = set(ranking[:room]), [neuron for neuron in ranking[room:] if neuron in misses]
            excess = max(0, len(passing) - self.bypass)
            kept -= set([neuron for neuron in ranking[:room] if neuron in self.cached][::-1][:excess])
            self.cached = hits | kept | set(passing[:excess])
        return missed


@settings(max_examples=120, deadline=None)
@given(
    capacity=st.integers(1, NEURONS),
    bypass=st.integers(0, 6),
    popularity=st.none() | st.lists(st.integers(0, 8), min_size=NEURONS, max_size=NEURONS),
    tokens=TOKENS,
)
def test_cache_follows_the_estimates(ffn, capacity, bypass, popularity, tokens):
    shares = None if popularity is None else np.array(popularity, np.float32) / 8
    model = FrequencyModel(capacity, bypass, shares)
    check_that_it_follows(ffn, model, tokens, cache_policy="frequency", bypass=bypass, popularity=shares)


def test_known_popularity_fills_the_cache_after_a_prefill(ffn):
    popularity = np.linspace(0, 1, NEURONS, dtype=np.float32)
    layer = Ffn(ffn.file, capacity=5, cache_policy="frequency", popularity=popularity).fill()
    assert sorted(layer.layer.cached()) == [11, 12, 13, 14, 15]
    assert layer.wrong_rows() == []
