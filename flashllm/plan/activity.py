"""Expected finds of a token in each layer's cache: active neurons, misses, requests.

From how often each neuron is active, or from the manifest's activity statistics, as if neurons and tokens were
independent of each other. Reads nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flashllm.arch.spec import Architecture
from flashllm.format.manifest import Manifest
from flashllm.plan.memory import ASSUMED_SHARE, MAX_REQUEST
from flashllm.plan.memory_plan import MemoryPlan
from flashllm.plan.shares import Shares

_USEFUL_PREFETCHES = 0.7  # of the rows that are worth prefetching: bench/log, "What a read costs beside products"
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
