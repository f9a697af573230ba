"""The memory plan: every byte the process will hold, decided before anything is loaded (design contract 3).

What is left after everything fixed is shared by the KV cache and the neuron caches. The KV cache grows in pages of
`PAGE_TOKENS` positions, each out of the neuron caches' memory (paper A, appendix C.3: a dynamic window under a
fixed limit), so the plan has two ends: an empty context, and a full one, where every layer still has its minimum.

The neuron caches hold the most popular neurons of all layers where popularity is known, else even shares. Under the
paper's window a layer's share is no larger than its calibrated need (paper A, section 3.3: Req_i). Plain arithmetic
over the manifest and the `BlockSpec`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import mul
from typing import Any, Self

import numpy as np

from flashllm import _core
from flashllm._core import PAGE_TOKENS
from flashllm.arch.spec import BlockSpec
from flashllm.base.machine import default_limit
from flashllm.base.units import format_size
from flashllm.config import DEFAULT_WINDOW, MOST_TOGETHER, RunConfig
from flashllm.errors import BudgetError, UsageError
from flashllm.format.in_place import slice_rows
from flashllm.format.manifest import Manifest
from flashllm.format.model_files import PREDICTORS, RESIDENT
from flashllm.format.rows import PAGE_NBYTES, TableLayout
from flashllm.plan.memory_plan import MemoryPlan
from flashllm.plan.prompts import Expansion, PromptShape, prompt_shapes
from flashllm.plan.requests import PROMPT_NBYTES, requests_nbytes
from flashllm.plan.shares import Shares, levels_beside, levels_by_need, levels_by_popularity

MAX_REQUEST = 1 << 19  # bytes of one read request: several are in flight for one streaming block
_THROUGH_NBYTES = 64 << 10  # of a request that reads through gaps: kMaxThrough (csrc/io/request_plan.h)
# Growth of the process besides the planned buffers: pages of libraries at their first use, the interpreter's own
# objects, the allocator's slack. Measured as the peak RSS less all other parts of the plan: bench/log, "The limit
# did not hold". A process that has loaded torch grows by TORCH_GROWTH more.
LIBRARY_GROWTH = 16_000_000
# Bytes of a layer's bookkeeping (csrc/cache/, csrc/ffn/): for each unit, a neuron or an expert, slot, counts, last
# request, the token that wants it; for each of a token's units places, of MOST_TOGETHER tokens; for each slot its unit,
# its candidate, its hole; for each unit that few tokens want together lists and reads. Of one layer at a time: for each
# of a token's neurons, where these are units, values, of MOST_TOGETHER tokens.
_UNIT_NBYTES, _TOKEN_NBYTES, _SLOT_NBYTES, _WANTED_NBYTES, _VALUES_NBYTES = 17, 48, 20, 120, 32
_CHUNK, _MOST_CHUNKS = 256, 8  # neurons, at least; of an expert (csrc/ffn/expert_products.h)
_WANTED_TOKENS = 2.5  # times a token's neurons: what few tokens want together (paper A: 24 % in five, of 10 % in one)
ASSUMED_SHARE = 0.1  # of the neurons active where nothing is known (paper A, section 3.1)
TORCH_GROWTH = 40_000_000
_PAGE_TABLES = 512  # bytes for each of the kernel's page tables: eight bytes a page of 4 KiB
_MOST_PAGE_TABLES = 40_000_000  # planned: those of 20 GB
# Rows by token's id: those that stay in memory; bytes of bookkeeping for each of them, and for each there is.
_TABLE_ROWS, _TABLE_SLOT_NBYTES, _TABLE_UNIT_NBYTES = 1024, 24, 16
_CHECKSUM_NBYTES = 8  # of a row of the embedding, made when the model is loaded
_PROMPT_SHARE = 16  # bytes for neurons, at least, for each that only prompts use; else these are as few as can be
STREAM_THREADS = 8  # at most, of reads in file order
# States that a server's prompt leaves besides the one at its end: behind the tools, before the last message, and where
# it parts from another.
_MARKS = 3
_MIN_CACHE_ROWS = 64  # a layer computes any active set in parts of this many rows, or of an expert's, slowly
_PREFETCH_SHARE = 32  # neurons of a layer for each row prefetched: about what a device reads while a layer computes
# Experts of the next layer that are read before its turn: about what a drive reads while a layer computes
_GUESSED_EXPERTS = 2  # a token
_GUESSED_BY_SEVERAL = 6  # tokens of conversations that share a pass
_GUESSED_SHARE = 16  # both buffers of theirs are no more than this part of the experts' memory
_BYPASS_SHARE = 16  # neurons of a layer for each bypass row (of misses that are not kept); layers share the rows
_LOGITS_ROWS = 4  # [vocab] rows held at a time: the head's result, the caller's copy, the sampler's two


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The machine's memory, and the choices of `resolve` that a memory plan depends on."""

    available: int  # bytes the process could still take
    process: int  # bytes it holds with its libraries loaded and no model
    dense: bool = False  # every token reads every neuron: caches hold each layer's first rows, there are no predictors
    popularity: Sequence[Shares] | None = None  # as in flashllm/format/popularity.py, by layer, where it is known
    io_threads: int = 32  # reads at a time
    max_gap: int = 0  # bytes between rows that are read through: such requests are read into memory of their own
    # Rows of the next layer are read before its turn; experts where there is room for that, and not for all of them.
    prefetch: bool = False

    @property
    def could_hold(self) -> int:
        """Bytes the process could hold."""
        return self.process + self.available


def plan_memory(manifest: Manifest, block: BlockSpec, config: RunConfig, conditions: Conditions) -> MemoryPlan:
    """The plan for one loaded model.

    Raises:
        BudgetError: the limit is below the minimum, or above what the machine has left.
        UsageError: a context longer than the model's own limit.
    """
    if config.context is not None and config.context > block.context:
        raise UsageError(f"--context must be 1 to {block.context} tokens for this model, not {config.context}")
    # 1. The least that the model needs.
    window = (config.window or DEFAULT_WINDOW) if config.cache_policy == "window" else None
    caches = _Caches.of(manifest, dense=conditions.dense, window=window)
    table, table_of = _token_table(manifest, block)
    parts = {
        **_weights(manifest, table, dense=caches.dense),
        **_table_parts(table, table_of),
        **_run_parts(manifest, block, config, conditions, table),
    }
    least = caches.least(parts, prompt_shapes(manifest, block, parts["context"], dense=caches.dense))
    if least.limit_nbytes < least.minimum_nbytes:
        raise BudgetError(_refusal(least, conditions.available))
    # 2. What the limit has room for.
    accounted = caches.accounted(least)
    if conditions.prefetch and manifest.architecture.unit_rows > 1:
        accounted = caches.with_guesses(accounted, _GUESSED_BY_SEVERAL if config.serves else _GUESSED_EXPERTS)
    plan = caches.filled(accounted, least.limit_nbytes, conditions.popularity)
    if table is not None:  # whole where no neuron and no position wants its memory
        whole = replace(accounted, table_rows=table.rows)
        if plan.total_nbytes + whole.table - plan.table <= min(plan.limit_nbytes, conditions.could_hold):
            plan = caches.filled(whole, plan.limit_nbytes, conditions.popularity)
    # 3. What the machine has room for.
    if plan.total_nbytes > conditions.could_hold:
        needs = plan.total_nbytes - conditions.process
        raise BudgetError(
            f"the plan of {format_size(plan.total_nbytes)} needs {format_size(needs)} more, but the machine (or its "
            f"control group) has {format_size(conditions.available)} left; lower --memory to at most "
            f"{format_size(conditions.could_hold)}, or close other programs"
        )
    if plan.limit_nbytes > conditions.could_hold:  # one conversation fits; several must not outgrow the machine
        plan = caches.filled(plan, conditions.could_hold, conditions.popularity)
    return plan


@dataclass(frozen=True, slots=True)
class _Caches:
    """The rows that the layers' caches need, whatever the limit, and what they make of a limit."""

    manifest: Manifest
    dense: bool  # every token reads every neuron of every layer; of mixtures experts are cached in every mode
    windowed: bool  # by the paper's policy
    dense_layers: tuple[int, ...]
    needs: list[int]  # the most that a layer has a use for
    minimum: tuple[int, ...]
    min_bypass: int

    @classmethod
    def of(cls, manifest: Manifest, *, dense: bool, window: int | None) -> Self:
        """Those of a model; `window`: tokens of the paper's policy, None under another one."""
        architecture, calibration = manifest.architecture, manifest.calibration
        unit, widths = architecture.unit_rows, architecture.every_width
        dense = dense and not architecture.experts
        without = tuple(i for i, width in enumerate(widths) if not width)  # neurons: there is nothing to cache
        dense_layers = tuple(range(architecture.num_layers)) if dense else architecture.dense_layers or without
        windowed = window is not None and not dense
        needs = [
            layout.num_rows if layer in dense_layers else _whole(layout.d_ff, unit)
            for layer, layout in enumerate(manifest.layouts)
        ]
        if windowed and calibration is not None and calibration.window >= (window or 0):
            needs = [min(max(need, 1), width) for need, width in zip(calibration.req, widths, strict=True)]
        # An expert may pass by in bypass rows; under the paper's window every one is kept for its token.
        least = max(_MIN_CACHE_ROWS // unit * unit, unit if windowed else 0)
        minimum = tuple(0 if layer in dense_layers else min(need, least) for layer, need in enumerate(needs))
        bypass = 0 if windowed or dense else min(_whole(max(widths), unit), max(least, unit))
        return cls(manifest, dense, windowed, dense_layers, needs, minimum, bypass)

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes of a row of each layer."""
        return tuple(layout.stride for layout in self.manifest.layouts)

    def least(self, parts: dict[str, Any], shapes: list[PromptShape]) -> MemoryPlan:
        """The plan of `parts` with the least rows, for the fastest shape of prompts that leaves enough to neurons."""
        strides, unit = self.strides, self.manifest.architecture.unit_rows
        weights = sum(parts[name] for name in ("process", "resident", "checksums", "gates", "planes", "predictors"))
        most = weights + sum(map(mul, self.needs, strides)) + parts["context_pages"] * parts["page_nbytes"]
        slots = (sum(self.minimum) + self.min_bypass) // unit
        caches = {
            "page_tables": min(most // _PAGE_TABLES, _MOST_PAGE_TABLES),
            "bookkeeping": 0 if self.dense else _bookkeeping_nbytes(self.manifest, slots),
            "bookkeeping_extra": 0,
            "row_nbytes": self.manifest.rows.stride,
            "layer_row_nbytes": strides,
            "unit_rows": unit,
            "min_cache_rows": self.minimum,
            "bypass_rows": self.min_bypass,
            "min_bypass_rows": self.min_bypass,
            "dense_layers": self.dense_layers,
            "levels": np.array([self.minimum], np.int32),
            "level_pages": parts["context_pages"],
        }
        return _with_prompts({**parts, **caches}, shapes)

    def accounted(self, least: MemoryPlan) -> MemoryPlan:
        """With the bookkeeping of the rows that the limit has room for, and bypass rows, which stay, by what a full
        context leaves."""
        if self.dense:
            return least
        unit, architecture = least.unit_rows, self.manifest.architecture
        slots = (sum(self.minimum) + self.min_bypass) // unit
        of_slot = unit * min(self.strides) + _SLOT_NBYTES + _WANTED_NBYTES
        more = (least.limit_nbytes - least.minimum_nbytes) // of_slot
        bookkeeping = _bookkeeping_nbytes(self.manifest, min(slots + more, sum(self.needs) // unit))
        plan = replace(least, bookkeeping=bookkeeping, bookkeeping_extra=bookkeeping - least.bookkeeping)
        if self.windowed:
            return plan
        spare = _spare_nbytes(plan) // plan.row_nbytes
        # A token's experts may all be missing at once; of other models' neurons a few are.
        wanted = _whole(architecture.cycle, unit) or max(architecture.every_width) // _BYPASS_SHARE
        bypass = max(self.min_bypass, min(wanted, spare // 10, spare - sum(self.minimum)) // unit * unit)
        return replace(plan, bypass_rows=bypass)

    def with_guesses(self, plan: MemoryPlan, experts: int) -> MemoryPlan:
        """With two buffers for as many experts, where there is room, that the next layer's router probably chooses."""
        cached = _spare_nbytes(plan) - plan.bypass_rows * plan.row_nbytes
        both = 2 * plan.unit_rows * plan.row_nbytes  # of an expert in each buffer
        experts = min(experts, (cached - plan.rows_nbytes(self.minimum)) // (_GUESSED_SHARE * both))
        if cached >= plan.rows_nbytes(self.needs) or experts < _GUESSED_EXPERTS:
            return plan
        rows, nbytes = experts * plan.unit_rows, experts * both
        return replace(plan, prefetch_rows=rows, staging=plan.staging + nbytes, work_extra=plan.work_extra + nbytes)

    def filled(self, plan: MemoryPlan, limit_nbytes: int, popularity: Sequence[Shares] | None) -> MemoryPlan:
        """With the rows of every level under this limit."""
        page, unit, sizes = plan.page_nbytes, plan.unit_rows, self.strides
        left = limit_nbytes - plan.fixed_nbytes - plan.bypass_rows * plan.row_nbytes
        most = (left - plan.rows_nbytes(self.minimum)) // page
        first = min(max((left - plan.rows_nbytes(self.needs)) // page, 1), most)  # up to here every useful row fits
        free = [left - pages * page for pages in range(first, most + 1)]
        if self.dense_layers:
            rows = self.manifest.stream_block_rows
            levels = levels_beside(free, self.needs, self.minimum, self.dense_layers, sizes, block_rows=rows, unit=unit)
        elif self.windowed or popularity is None:
            levels = levels_by_need(free, self.needs, sizes, unit)
        else:
            levels = levels_by_popularity(free, self.minimum, popularity, sizes, unit)
        return replace(plan, levels=levels, level_pages=first)


def _spare_nbytes(plan: MemoryPlan) -> int:
    """Bytes that the limit has room for beside a full context."""
    return plan.limit_nbytes - plan.fixed_nbytes - plan.context_pages * plan.page_nbytes


def _whole(neurons: int, unit: int) -> int:
    """Rows of the units that hold so many."""
    return -(-neurons // unit) * unit


def _token_table(manifest: Manifest, block: BlockSpec) -> tuple[TableLayout | None, str]:
    """The table of rows by token's id of which only some stay in memory, and its name for people."""
    embedding = manifest.embedding_layout(block)
    if embedding is not None and embedding.rows > _TABLE_ROWS:
        return embedding, "input embedding"
    return manifest.table_layout(block), "per-layer embeddings"


def _table_parts(table: TableLayout | None, table_of: str) -> dict[str, Any]:
    """The fields of `MemoryPlan` that describe the table."""
    of_unit = _TABLE_UNIT_NBYTES + (0 if table is None or table.apart else _CHECKSUM_NBYTES)
    return {
        "table_of": table_of,
        **dict.fromkeys(("table_rows", "min_table_rows"), 0 if table is None else min(_TABLE_ROWS, table.rows)),
        "table_row_nbytes": 0 if table is None else table.stride + _TABLE_SLOT_NBYTES,
        "table_bookkeeping": 0 if table is None else of_unit * table.rows,
    }


def _run_parts(
    manifest: Manifest, block: BlockSpec, config: RunConfig, conditions: Conditions, table: TableLayout | None
) -> dict[str, Any]:
    """The fields of `MemoryPlan` that describe the run and its sequences."""
    context = block.context if config.context is None else config.context
    state, io_threads = state_shape(manifest, block, context, config.cache_bits), conditions.io_threads
    marked = _MARKS * block.state_nbytes if config.serves else 0
    alone = config.speculate == "off" and not config.has_form
    verified = 1 if alone else max(1, min(manifest.sparse_prefill_tokens, MOST_TOGETHER))
    expansion = Expansion.of(manifest, block)
    of_head = (context + manifest.prefill_block_tokens + 2 * PAGE_TOKENS) * expansion.head_nbytes
    named_rows = 0
    if conditions.prefetch and manifest.architecture.unit_rows == 1:
        named_rows = max(1, max(manifest.architecture.every_width) // _PREFETCH_SHARE)
    return {
        "limit_nbytes": config.memory if config.memory is not None else default_limit(conditions.could_hold),
        "limit_is_given": config.memory is not None,
        "process": conditions.process + LIBRARY_GROWTH,
        "page_nbytes": state.page_nbytes,
        "requests": PROMPT_NBYTES + (requests_nbytes(context) if config.serves else 0),
        "staging": 2 * named_rows * manifest.rows.stride
        + _bounce_nbytes(manifest, io_threads + min(io_threads, STREAM_THREADS))
        + (io_threads * _THROUGH_NBYTES if conditions.max_gap else 0)
        + (0 if table is None else io_threads * (table.stride + 2 * PAGE_NBYTES)),
        "workspace": _workspace_nbytes(block, context, max(verified, MOST_TOGETHER if config.serves else 1))
        + _sums_nbytes(manifest)
        + expansion.fixed_nbytes
        + of_head,
        "expanded_heads": expansion.heads,
        "expanded_nbytes": expansion.head_nbytes,
        "context": context,
        "context_pages": -(-(state.nbytes(context) + marked) // state.page_nbytes),
        "cache_policy": config.cache_policy,
        "prefetch_rows": named_rows,
        "window": config.window or DEFAULT_WINDOW,
    }


def _weights(manifest: Manifest, table: TableLayout | None, *, dense: bool) -> dict[str, int]:
    """Bytes of what stays in memory but for the table, by the names of `MemoryPlan`."""
    checksums = 8 * sum(manifest.checksums)
    apart = manifest.resident_gate_nbytes + manifest.planes_nbytes + checksums
    apart += 0 if table is None or table.apart else table.nbytes
    return {
        "resident": manifest.files[RESIDENT].nbytes - apart,
        "checksums": checksums,
        "gates": manifest.resident_gate_nbytes,
        "planes": manifest.planes_nbytes,
        "predictors": manifest.files[PREDICTORS].nbytes if PREDICTORS in manifest.files and not dense else 0,
    }


def state_shape(manifest: Manifest, block: BlockSpec, context: int, bits: int | None) -> _core.StateShape:
    """The state that a sequence of at most `context` tokens leaves behind, and its pages."""
    return _core.StateShape(block, context, manifest.prefill_block_tokens, manifest.dtype, bits or 0)


def max_request(manifest: Manifest) -> int:
    """Bytes of one read request, at most: more than usual where pieces of experts that lie elsewhere are longer."""
    if manifest.in_place is None:
        return MAX_REQUEST
    longest = manifest.in_place.longest_piece(slice_rows(manifest.architecture, manifest.rows))
    return max(MAX_REQUEST, -(-longest // PAGE_NBYTES) * PAGE_NBYTES)


def _bounce_nbytes(manifest: Manifest, io_threads: int) -> int:
    """Memory for aligned copies: a request's worth a thread where what is read is no whole pages (drives with 4 KiB
    sectors), or comes out of another file, else for the last bytes of a file."""
    if manifest.in_place is not None:
        return io_threads * (max_request(manifest) + 2 * PAGE_NBYTES)
    in_pages = manifest.rows.packed or all(layout.stride % PAGE_NBYTES == 0 for layout in manifest.layouts)
    return MAX_REQUEST if in_pages else io_threads * (MAX_REQUEST // 4)


def _with_prompts(parts: dict[str, Any], shapes: list[PromptShape]) -> MemoryPlan:
    """The plan of `parts`, and of the fastest shape that leaves the neurons `_PROMPT_SHARE` times its bytes."""
    for shape in shapes:
        plan = MemoryPlan(
            **{**parts, "staging": parts["staging"] + shape.staging, "workspace": parts["workspace"] + shape.workspace},
            prompt_tokens=shape.tokens,
            stretch_nbytes=shape.stretch_nbytes,
            read_ahead=shape.ahead,
            work_extra=shape.nbytes - shapes[-1].nbytes,
        )
        if plan.limit_nbytes - plan.minimum_nbytes >= shape.nbytes - shapes[-1].nbytes + _PROMPT_SHARE * shape.nbytes:
            break
    return plan


def _bookkeeping_nbytes(manifest: Manifest, slots: int) -> int:
    """Bytes of what the layers know of their units and of `slots` slots in all caches, at most: of experts, all that
    few tokens go to may be missing at once."""
    architecture, share = manifest.architecture, manifest.active_share or ASSUMED_SHARE
    unit, layers = architecture.unit_rows, len(architecture.mixtures) or architecture.num_layers
    units = -(-architecture.d_ff // unit)  # of the widest layer that has a cache
    cycle = -(-architecture.cycle // unit)
    of_token = cycle or int(share * units)
    wanted = min(units, MOST_TOGETHER * cycle or int(_WANTED_TOKENS * of_token))
    own = slots + layers * (cycle or units // _BYPASS_SHARE)  # every layer may use the bypass slots
    layer = _UNIT_NBYTES * units + _TOKEN_NBYTES * of_token
    values = _VALUES_NBYTES * of_token if unit == 1 else 0
    return layers * layer + values + _SLOT_NBYTES * own + _WANTED_NBYTES * min(own, layers * wanted)


def _workspace_nbytes(block: BlockSpec, context: int, verified: int) -> int:
    """Attention scores of a token; logits."""
    scores = block.heads * context
    logits = (_LOGITS_ROWS + 2 * (verified - 1)) * block.vocab_size  # the pass's, and those of the one before
    return 4 * (scores + logits)


def _sums_nbytes(manifest: Manifest) -> int:
    """Bytes of the sums that few tokens' experts have, a sum for each chunk; one layer has them at a time."""
    architecture = manifest.architecture
    if (unit := architecture.unit_rows) == 1:
        return 0
    chunks = min(-(-unit // _CHUNK), _MOST_CHUNKS) * -(-architecture.cycle // unit)
    return 4 * MOST_TOGETHER * architecture.d_model * chunks


def _refusal(plan: MemoryPlan, available: int) -> str:
    missing = plan.minimum_nbytes - plan.limit_nbytes
    table = ", ".join(f"{name} {format_size(nbytes)}" for name, _, nbytes in plan.rows())
    if plan.limit_is_given:
        advice = f"use --memory {plan.minimum_nbytes // 10**6 + 2}MB or more"  # libraries vary by some 0.5 MB a start
    else:
        advice = f"this machine has {format_size(available)} left; close other programs"
    return (
        f"{format_size(plan.limit_nbytes)} cannot hold this model: it needs at least {format_size(plan.minimum_nbytes)}"
        f", {format_size(missing)} more ({table}); {advice}, or shorten --context (now {plan.context} tokens)"
    )
