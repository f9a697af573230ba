"""Expected finds of a token in each layer's cache: active neurons, misses, requests.

From an activity trace, by replaying the cache's policy over it; else from how often each neuron is active, or from the
manifest's activity statistics, as if neurons and tokens were independent of each other. Reads nothing but the trace.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from flashllm import _core
from flashllm.arch.spec import Architecture
from flashllm.format.manifest import Manifest
from flashllm.format.trace import Stream, Trace, unpack_bits
from flashllm.plan.memory import ASSUMED_SHARE, MAX_REQUEST
from flashllm.plan.memory_plan import MemoryPlan
from flashllm.plan.shares import Shares

REPLAYED_TOKENS = 300  # at most
_WARM_UP = 100  # of them not counted: the cache fills
# Of the list of rows to prefetch, the likeliest first, as many are read as csrc/ffn/prefetch.h (PrefetchDepth) finds
# worth it: up to the place where most is gained, if one that is not needed costs half of what a needed one gains.
_PLACES, _WORTH = 16, 0.5
_USEFUL_PREFETCHES = 0.7  # of them, where no trace tells: bench/log, "What a read costs beside products"
# How unequal neurons are, where only their mean activity m is known: shares of tokens p ~ Beta(c m, c (1 - m)). With
# c = 1.5, m = 0.1 gives the figures of paper A (24 % active in 5 tokens, 2.4 % new at a window of 4).
_CONCENTRATION = 1.5
# The same of experts, more alike: with c = 5 the most frequent take the share of a token's experts that was measured on
# Qwen3-30B-A3B (8 of 128 experts: 38 %).
_EXPERT_CONCENTRATION = 5.0
_SAMPLED_RANKS = 512  # of them; the others lie between
_ASSUMED_RECALL = 0.9  # of predictors for prefetching (the demo's; bench/cache/results/early_prediction.json)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerActivity:
    """Expected numbers of one layer a token."""

    active: float
    firing: float  # of the active: only their down columns are read from memory
    misses: float
    requests: float  # misses near each other are read together
    rows_read: float  # with those in the gaps
    prefetched: float  # rows that are worth reading before the layer's turn, where there is a predictor for that
    useful: float  # of them: misses


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedActivity:
    """Expected activity by layer, and where it comes from."""

    layers: tuple[LayerActivity, ...]
    source: str


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
        _core.CacheReplay(
            cache_policy=cast(Any, plan.cache_policy),  # the core checks the name
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


def from_shares(
    manifest: Manifest, plan: MemoryPlan, popularity: Sequence[Shares] | None, gap: int
) -> ExpectedActivity:
    """By each neuron's share of tokens; where unknown, by the manifest's activity statistics and an assumption about
    how unequal neurons are; without those, by paper A's mean."""
    widths, calibration, experts = (
        manifest.architecture.every_width,
        manifest.calibration,
        manifest.architecture.experts,
    )
    if popularity is not None:
        shares, source = list(popularity), "popularity of neurons"
    elif calibration is not None:
        means = zip(calibration.mean_active, widths, strict=True)
        shares = [assumed_shares(mean / neurons, neurons) for mean, neurons in means]
        source = f"mean activity on {calibration.text}"
    elif manifest.sparsity is not None:
        mean = 1 - manifest.sparsity.zeros
        shares = [assumed_shares(mean, neurons) for neurons in widths]
        source = f"{mean:.0%} of the neurons above their layer's threshold on {manifest.sparsity.text}"
    elif experts:
        of_mixture, mixtures = assumed_expert_shares(manifest.architecture), manifest.architecture.mixtures
        shares = [of_mixture if i in mixtures else np.ones(width, np.float32) for i, width in enumerate(widths)]
        source = f"assumed: {manifest.architecture.chosen_experts} of {experts} experts a token, some more often"
    else:
        shares = [assumed_shares(ASSUMED_SHARE, neurons) for neurons in widths]
        source = f"assumed: {ASSUMED_SHARE:.0%} of the neurons a token"
    layers = []
    for share, rows in zip(shares, plan.cache_rows, strict=True):
        active, neurons = float(share.sum()), len(share)
        if plan.cache_policy == "window":
            misses = window_misses(share, rows, plan.window)
        else:
            misses = float(np.sort(share)[: max(0, neurons - rows)].sum())  # the rarest are not cached
        if experts:
            requests, rows_read = merge_experts(misses, manifest, plan.row_nbytes), misses
        else:
            requests, rows_read = merge(misses, neurons, plan.row_nbytes, gap)
        layers.append(
            LayerActivity(
                active=active,
                firing=active,
                misses=misses,
                requests=requests,
                rows_read=rows_read,
                prefetched=_ASSUMED_RECALL * misses / _USEFUL_PREFETCHES,
                useful=_ASSUMED_RECALL * misses,
            )
        )
    return ExpectedActivity(layers=tuple(layers), source=source)


def assumed_expert_shares(architecture: Architecture) -> Shares:
    """Shares of tokens of the neurons of a mixture of experts: those of an expert have its share, shared ones all."""
    mean = architecture.chosen_experts / architecture.experts
    of_experts = assumed_shares(mean, architecture.experts, _EXPERT_CONCENTRATION)
    shared = np.ones(architecture.shared_neurons, np.float32)
    return np.concatenate([np.repeat(of_experts, architecture.expert_size), shared])


def assumed_shares(mean: float, neurons: int, concentration: float = _CONCENTRATION) -> Shares:
    """Shares of tokens of as many neurons, ~ Beta(c m, c (1 - m)): by rank, from a sample that is always the same."""
    if not 0 < mean < 1:  # none is ever active, or all always are
        return np.full(neurons, mean, np.float32)
    ranks = min(neurons, _SAMPLED_RANKS)
    random = np.random.default_rng(0)
    sample = np.sort(random.beta(concentration * mean, concentration * (1 - mean), size=16 * ranks))
    ranked = sample.reshape(ranks, 16).mean(axis=1)
    places = (np.arange(neurons) + 0.5) / neurons
    shares: Shares = np.interp(places, (np.arange(ranks) + 0.5) / ranks, ranked).astype(np.float32)
    scaled: Shares = np.minimum(shares * np.float32(mean / max(float(shares.mean()), 1e-9)), np.float32(1))
    return scaled


def window_misses(shares: Shares, rows: int, window: int) -> float:
    """Misses a token under the window policy: neurons active now and in none of the last tokens of the longest window
    whose neurons, on average, have room."""
    new, held = shares.astype(np.float64), 0.0
    for _ in range(window):
        held += float(new.sum())  # a window longer by one holds what is new to the shorter one
        if held > rows:
            break
        new *= 1 - shares
    return float(new.sum())


def merge_experts(misses: float, manifest: Manifest, row_nbytes: int) -> float:
    """Requests of `misses` rows that are whole experts, neighbours on flash: each of whole checksums."""
    longest = max(manifest.checksum_rows, MAX_REQUEST // row_nbytes)
    return misses / min(manifest.architecture.expert_size, longest)


def merge(misses: float, neurons: int, row_nbytes: int, gap: int) -> tuple[float, float]:
    """(requests, rows read) of `misses` rows scattered over `neurons`, when rows up to `gap` bytes apart are read
    together. The next miss is j + 1 rows on with probability d (1 - d)^j, d the share that misses."""
    density = min(1.0, misses / neurons)
    gap_rows = gap // row_nbytes
    longest = max(1, MAX_REQUEST // row_nbytes)  # rows of a request
    apart = (1 - density) ** (gap_rows + 1)
    requests = max(misses * apart, misses / longest, min(misses, 1.0))
    between = sum(j * density * (1 - density) ** j for j in range(gap_rows + 1))
    return requests, misses + (misses - requests) * between / max(1 - apart, 1e-9)
