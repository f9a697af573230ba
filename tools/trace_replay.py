"""A token's expected finds by an activity trace, replayed through the cache's policy: of models of dummy weights.

What `flashllm.plan.activity` makes of shares where there is no trace. The replay is in the core's test build alone.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from activity_trace import Stream, Trace, unpack_bits
from numpy.typing import NDArray

from flashllm import _core
from flashllm.plan.activity import ExpectedActivity, LayerActivity
from flashllm.plan.memory import MAX_REQUEST
from flashllm.plan.memory_plan import MemoryPlan
from flashllm.plan.shares import Shares

REPLAYED_TOKENS = 300  # at most
_WARM_UP = 100  # of them not counted: the cache fills
# Of the list of rows to prefetch, the likeliest first, as many are read as csrc/ffn/prefetch.h (PrefetchDepth) finds
# worth it: up to the place where most is gained, if one that is not needed costs half of what a needed one gains.
_PLACES, _WORTH = 16, 0.5

CacheReplay: Any = _core.CacheReplay  # type: ignore[attr-defined]


def from_trace(trace: Trace, plan: MemoryPlan, popularity: Sequence[Shares] | None, gap: int) -> ExpectedActivity:
    """Means over the last of the trace's first tokens, replayed through caches of the plan's size.

    Args:
        popularity: what the policy starts from in this model, by layer; None where it starts from nothing.
        gap: bytes between two rows that are read through.
    """
    info = trace.info
    tokens = min(info.num_tokens, REPLAYED_TOKENS)
    skipped, unit = min(_WARM_UP, tokens // 2), plan.unit_rows
    caches = [
        CacheReplay(
            cache_policy=plan.cache_policy,
            num_units=-(-info.num_neurons // unit),
            capacity=rows // unit,
            bypass=plan.bypass_rows // unit,
            window=plan.window,
            popularity=None if popularity is None else np.ascontiguousarray(popularity[layer][::unit]),
        )
        for layer, rows in enumerate(plan.cache_rows)
    ]
    sums = np.zeros((info.num_layers, 5))
    lists = [_PrefetchLists(info.num_neurons) for _ in caches]
    for token in range(tokens):
        masks = unpack_bits(trace.token(token), info.num_neurons)
        for layer, cache in enumerate(caches):
            active = masks[layer, Stream.ACTIVE]
            named = cache.missing(np.flatnonzero(masks[layer, Stream.PREFETCH, ::unit]).astype(np.int32))
            missed = np.array(cache.token(np.flatnonzero(active[::unit]).astype(np.int32)), np.int64)
            misses = (missed[:, None] * unit + np.arange(unit)).reshape(-1)
            misses = misses[misses < info.num_neurons]
            if token >= skipped:
                firing = np.count_nonzero(active & masks[layer, Stream.FIRING])
                requests = count_requests(misses, plan.row_nbytes, gap)
                sums[layer] += (np.count_nonzero(active), firing, len(misses), *requests)
                lists[layer].add(active[::unit][named])
    counted = tokens - skipped
    names = tuple(LayerActivity.__dataclass_fields__)
    means = [(*row, *one.worth_reading(counted)) for row, one in zip((sums / counted).tolist(), lists, strict=True)]
    layers = tuple(LayerActivity(**dict(zip(names, row, strict=True))) for row in means)
    return ExpectedActivity(layers=layers, source=f"trace: {info.description}")


class _PrefetchLists:
    """The fate of a layer's lists of rows to prefetch, by place."""

    def __init__(self, neurons: int) -> None:
        self._listed, self._active = np.zeros((2, -(-neurons // _PLACES)))

    def add(self, active: NDArray[np.bool_]) -> None:
        """A list, the likeliest first: which of it turned out active."""
        starts = np.arange(0, len(active), _PLACES)
        if len(starts):
            self._active[: len(starts)] += np.add.reduceat(active.astype(np.int64), starts)
            self._listed[: len(starts)] += np.diff([*starts, len(active)])

    def worth_reading(self, tokens: int) -> tuple[float, float]:
        """(rows worth reading, those of them that are needed), a token."""
        gains = np.cumsum(self._active - _WORTH * self._listed)
        end = int(gains.argmax()) + 1 if gains.max() > 0 else 0
        return float(self._listed[:end].sum()) / tokens, float(self._active[:end].sum()) / tokens


def count_requests(misses: NDArray[np.int64], row_nbytes: int, gap: int) -> tuple[int, int]:
    """(requests, rows read) for rows that lie in the order of their ids: those up to `gap` bytes apart are read
    together, up to the longest request."""
    if len(misses) == 0:
        return 0, 0
    requests, rows, first = 1, 1, misses[0]
    for before, row in zip(misses[:-1].tolist(), misses[1:].tolist(), strict=True):
        if (row - before - 1) * row_nbytes <= gap and (row + 1 - first) * row_nbytes <= MAX_REQUEST:
            rows += row - before
        else:
            requests, rows, first = requests + 1, rows + 1, row
    return requests, rows
