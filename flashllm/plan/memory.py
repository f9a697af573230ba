"""The memory plan: every byte the process will hold, decided before anything is loaded (design contract 3).

Plain arithmetic over the manifest and the config; imports no torch. `plan_memory` either returns a plan that fits its
limit or raises BudgetError with the numbers. What is left after everything fixed goes to the neuron caches: to the most
popular neurons of all layers where popularity is known, else in even shares. Under the paper's window a layer's share
is no larger than its calibrated need (paper A, section 3.3: Req_i).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashllm.arch.registry import attention_shape
from flashllm.base.units import format_size
from flashllm.errors import BudgetError, UsageError
from flashllm.format.manifest import Manifest
from flashllm.format.model_files import PREDICTORS, RESIDENT
from flashllm.format.rows import PAGE_NBYTES

CACHE_POLICIES = ("frequency", "window")  # of flashllm/csrc/cache/cache_policy.h; the first is the default

DEFAULT_WINDOW = 5  # tokens (paper A, section 3.1)
MAX_REQUEST = 1 << 19  # bytes of one read request: several are in flight for one streaming block
# What the process grows by at its first forward passes besides the planned buffers: lazily loaded library pages,
# OpenMP and oneDNN workspaces, the allocator's slack, page tables. Measured as the peak RSS of a 2,000-token prefill
# minus all other parts of the plan: 20 MB at d_model 64, 3 to 19 MB at 768, 22 to 38 MB at 2048; the rest is margin.
LIBRARY_GROWTH = 64_000_000
READ_AHEAD = 6  # streaming blocks in flight while one is used: they last through a layer's attention (bench/LOG.md)
STREAM_THREADS = 8  # at most, of reads in file order
_MIN_CACHE_ROWS = 64  # a layer computes any active set in parts of this many rows, slowly
_EARLY_SHARE = 32  # neurons of a layer for each row read ahead: about what a device reads while a layer computes
_BYPASS_SHARE = 16  # neurons of a layer for each bypass row (of misses that are not kept); layers share the rows


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes by purpose, and the rows of each layer's neuron cache."""

    limit_nbytes: int
    limit_is_given: bool
    process: int  # interpreter and libraries
    resident: int
    predictors: int
    kv_cache: int
    staging: int
    workspace: int
    row_nbytes: int
    cache_policy: str
    cache_rows: tuple[int, ...]  # per layer
    min_cache_rows: tuple[int, ...]
    bypass_rows: int
    min_bypass_rows: int
    early_rows: int  # of each of the two buffers for rows read ahead
    context: int  # tokens of KV cache
    window: int

    @property
    def neuron_cache(self) -> int:
        return (sum(self.cache_rows) + self.bypass_rows) * self.row_nbytes

    @property
    def fixed_nbytes(self) -> int:
        return self.process + self.resident + self.predictors + self.kv_cache + self.staging + self.workspace

    @property
    def total_nbytes(self) -> int:
        return self.fixed_nbytes + self.neuron_cache

    @property
    def minimum_nbytes(self) -> int:
        """The smallest limit this configuration runs under."""
        return self.fixed_nbytes + (sum(self.min_cache_rows) + self.min_bypass_rows) * self.row_nbytes

    def rows(self) -> list[tuple[str, int]]:
        """(purpose, bytes), in the order of a printed table."""
        return [
            ("interpreter and libraries", self.process),
            ("resident weights", self.resident),
            ("predictors", self.predictors),
            (f"KV cache, {self.context} tokens", self.kv_cache),
            ("staging for reads", self.staging),
            ("workspace", self.workspace),
            ("neuron cache", self.neuron_cache),
        ]

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "limit_bytes": self.limit_nbytes,
            "limit_is_given": self.limit_is_given,
            "total_bytes": self.total_nbytes,
            "minimum_bytes": self.minimum_nbytes,
            "process_bytes": self.process,
            "resident_bytes": self.resident,
            "predictor_bytes": self.predictors,
            "kv_cache_bytes": self.kv_cache,
            "staging_bytes": self.staging,
            "workspace_bytes": self.workspace,
            "neuron_cache_bytes": self.neuron_cache,
            "cache_policy": self.cache_policy,
            "cache_rows": list(self.cache_rows),
            "bypass_rows": self.bypass_rows,
            "early_rows": self.early_rows,
            "context": self.context,
            "window": self.window,
        }


def share_rows(available: int, needs: Sequence[int]) -> tuple[int, ...]:
    """Rows for each layer: at most its need, the rest shared evenly among the layers that can use more."""
    rows = [0] * len(needs)
    hungry = sorted(range(len(needs)), key=lambda layer: needs[layer])
    for position, layer in enumerate(hungry):
        rows[layer] = min(needs[layer], available // (len(hungry) - position))
        available -= rows[layer]
    return tuple(rows)


def share_by_popularity(available: int, minimum: Sequence[int], popularity: NDArray[np.float32]) -> tuple[int, ...]:
    """Rows for each layer: its minimum, and the rest where they save most reads.

    A layer's n-th row saves the n-th highest of its neurons' shares of tokens (`popularity`, [layers, d_ff]) in reads a
    token, so all rows go to the highest shares of all layers. Equals, like neurons never seen, are shared out evenly.
    """
    gains = np.sort(popularity, axis=1)[:, ::-1]
    layers = np.broadcast_to(np.arange(gains.shape[0])[:, None], gains.shape)
    ranks = np.broadcast_to(np.arange(gains.shape[1]), gains.shape)
    free = ranks >= np.asarray(minimum)[:, None]
    order = np.lexsort((ranks[free], -gains[free]))[: max(0, available - sum(minimum))]
    extra = np.bincount(layers[free][order], minlength=len(gains))
    return tuple(int(rows) for rows in np.asarray(minimum) + extra)


def plan_memory(
    manifest: Manifest,
    config: Mapping[str, Any],
    *,
    limit: int | None,
    available: int,
    process: int,
    context: int | None = None,
    window: int | None = None,
    cache_policy: str = CACHE_POLICIES[0],
    popularity: NDArray[np.float32] | None = None,
    io_threads: int = 32,
    max_gap: int = 0,
    batch: int = 1,
    early: bool = False,
) -> MemoryPlan:
    """The plan for one loaded model.

    Args:
        config: the model's config.json.
        limit: bytes for everything the process holds; None: four fifths of what is there now.
        available: bytes the process could still take.
        process: bytes it holds with its libraries loaded and no model.
        context: tokens of KV cache; None: the model's own limit.
        popularity: as in flashllm/format/popularity.py, where it is known.
        max_gap: bytes between rows that a reader thread reads through, into memory of its own.
        batch: sequences computed together.
        early: the model has predictors of the next layer, on whose word rows are read ahead.

    Raises:
        BudgetError: the limit is below the minimum, or above what the machine has left.
        UsageError: a context, window, cache policy, number of threads or batch that cannot be.
    """
    shape, rows, layers = attention_shape(config), manifest.rows, manifest.architecture.num_layers
    context = shape.context if context is None else context
    if not 1 <= context <= shape.context:
        raise UsageError(f"--context must be 1 to {shape.context} tokens for this model, not {context}")
    window = window if window is not None else DEFAULT_WINDOW
    for name, value in (("--window", window), ("--io-threads", io_threads), ("batch", batch)):
        if value < 1:
            raise UsageError(f"{name} must be at least 1, not {value}")
    if cache_policy not in CACHE_POLICIES:
        raise UsageError(f"--cache-policy must be one of {', '.join(CACHE_POLICIES)}, not {cache_policy!r}")
    windowed = cache_policy == "window"
    itemsize = 4 if manifest.dtype == "float32" else 2
    vocab = int(config.get("vocab_size", 50272))

    needs = [manifest.architecture.d_ff] * layers
    if windowed and manifest.calibration is not None and manifest.calibration.window >= window:
        needs = [min(max(need, 1), manifest.architecture.d_ff) for need in manifest.calibration.req]
    minimum = tuple(min(need, _MIN_CACHE_ROWS) for need in needs)
    min_bypass = 0 if windowed else min(manifest.architecture.d_ff, _MIN_CACHE_ROWS)
    block = manifest.stream_block_rows
    early_rows = max(1, manifest.architecture.d_ff // _EARLY_SHARE) if early else 0
    plan = MemoryPlan(
        limit_nbytes=limit if limit is not None else (process + available) * 4 // 5,
        limit_is_given=limit is not None,
        process=process + LIBRARY_GROWTH,
        resident=manifest.files[RESIDENT].nbytes + _places_nbytes(manifest),
        predictors=manifest.files[PREDICTORS].nbytes if PREDICTORS in manifest.files else 0,
        kv_cache=batch * context * shape.kv_nbytes_per_token(itemsize),
        staging=((1 + READ_AHEAD) * block + 2 * early_rows) * rows.stride
        + _bounce_nbytes(rows.stride, io_threads + min(io_threads, STREAM_THREADS))
        + io_threads * max_gap,
        workspace=batch * _workspace_per_sequence(context, rows.d_model, vocab, itemsize)
        + 2 * block * (batch * context + 16) * 4,  # products of a block of rows
        row_nbytes=rows.stride,
        cache_policy=cache_policy,
        cache_rows=minimum,
        min_cache_rows=minimum,
        bypass_rows=min_bypass,
        min_bypass_rows=min_bypass,
        early_rows=early_rows,
        context=context,
        window=window,
    )
    if plan.limit_nbytes < plan.minimum_nbytes:
        raise BudgetError(_refusal(plan, available))
    spare = (plan.limit_nbytes - plan.fixed_nbytes) // rows.stride
    if not windowed:
        plan = replace(plan, bypass_rows=max(min_bypass, min(manifest.architecture.d_ff // _BYPASS_SHARE, spare // 10)))
    if windowed or popularity is None:
        plan = replace(plan, cache_rows=share_rows(spare - plan.bypass_rows, needs))
    else:
        plan = replace(plan, cache_rows=share_by_popularity(spare - plan.bypass_rows, minimum, popularity))
    if plan.total_nbytes - process > available:
        raise BudgetError(
            f"the plan of {format_size(plan.total_nbytes)} needs {format_size(plan.total_nbytes - process)} more, but "
            f"the machine (or its control group) has {format_size(available)} left; lower --memory to at most "
            f"{format_size(available + process)}, or close other programs"
        )
    return plan


def _places_nbytes(manifest: Manifest) -> int:
    """Where each neuron lies, in models whose neurons are reordered."""
    return 0 if manifest.permutation is None else 4 * manifest.architecture.num_layers * manifest.rows.d_ff


def _bounce_nbytes(stride: int, io_threads: int) -> int:
    """Aligned copies: a request's worth a thread where rows are no whole pages (drives with 4 KiB sectors), else the
    last bytes of a file."""
    return MAX_REQUEST if stride % PAGE_NBYTES == 0 else io_threads * (MAX_REQUEST // 4)


def _workspace_per_sequence(context: int, d_model: int, vocab: int, itemsize: int) -> int:
    """Activations of the longest prefill: about ten of the model's width, three in fp32, a mask, and the logits."""
    return context * d_model * (10 * itemsize + 12) + context * context + 4 * 4 * vocab


def _refusal(plan: MemoryPlan, available: int) -> str:
    missing = plan.minimum_nbytes - plan.limit_nbytes
    table = ", ".join(f"{name} {format_size(nbytes)}" for name, nbytes in plan.rows())
    if plan.limit_is_given:
        advice = f"use --memory {-(-plan.minimum_nbytes // 10**6)}MB or more"
    else:
        advice = f"this machine has {format_size(available)} left; close other programs"
    return (
        f"{format_size(plan.limit_nbytes)} cannot hold this model: it needs at least {format_size(plan.minimum_nbytes)}"
        f", {format_size(missing)} more ({table}); {advice}, or shorten --context (now {plan.context} tokens)"
    )
