"""Caches smaller than what one token of a mixture of experts reads: they must not thrash to nothing.

Each layer has a cache of its own, so that no layer's experts push out another's; what one token reads in a layer is its
cycle there.
"""

import numpy as np
import pytest
from make_synthetic_experts import locality, made_up_routes
from replay import Activity, misses_of

from flashllm import _core

EXPERTS, CHOSEN, SIZE, TOKENS = 64, 8, 4, 400  # neurons of an expert: as few as show that whole experts go in and out
NEURONS, CYCLE = EXPERTS * SIZE, CHOSEN * SIZE


@pytest.fixture(scope="module")
def tokens():
    """Active neurons of each token of a layer."""
    routes = made_up_routes(EXPERTS, CHOSEN, TOKENS, stay=0.25, random=np.random.default_rng(1))
    again, hottest = locality([routes], EXPERTS)
    assert 0.3 < again < 0.6
    assert 0.25 < hottest < 0.6
    return [(one[:, None] * SIZE + np.arange(SIZE)).reshape(-1).astype(np.int32) for one in routes]


def hit_rate(policy, tokens, capacity, bypass):
    cache = _core.CacheReplay(
        cache_policy=policy, num_units=NEURONS, capacity=capacity, bypass=bypass, window=4, popularity=None
    )
    missed = [len(cache.token(active)) for active in tokens]
    return 1 - sum(missed[100:]) / (CYCLE * len(missed[100:]))


def best_rate(tokens, capacity):
    """Belady's, which may let what it reads pass by."""
    activity = Activity([ids.astype(np.int64) for ids in tokens], NEURONS, np.zeros(NEURONS))
    missed, _ = misses_of("MIN", activity, capacity)
    return 1 - sum(map(len, missed[100:])) / (CYCLE * len(missed[100:]))


@pytest.mark.parametrize("experts", [2, 4, 7])
def test_a_cache_below_a_tokens_cycle_still_hits(tokens, experts):
    rate, best = hit_rate("frequency", tokens, experts * SIZE, CYCLE), best_rate(tokens, experts * SIZE)
    assert best > rate > 0.4 * best
    assert rate > 0.04 * experts


def test_a_larger_cache_hits_more(tokens):
    rates = [hit_rate("frequency", tokens, experts * SIZE, CYCLE) for experts in (2, 4, 8, 16, 32, 48)]
    assert rates == sorted(rates)
    assert rates[-1] > 0.9
