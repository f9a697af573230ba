"""A plan of the memory: the bytes of every part, and the rows of each layer at every length of the KV cache."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import mul
from typing import Any

import numpy as np

from flashllm._core import PAGE_TOKENS
from flashllm.plan.shares import Rows

LENT_SHARE = 3  # bytes of the neuron caches, at least, for each that a prompt may borrow of them
KEPT_CONTEXTS = 4  # of memory that nothing else wants: more is asked for, `serve --keep`
# Of a plan's figures, those that `as_dict` has under their own names, sizes as `_bytes`.
_SIZES = (
    *("limit_nbytes", "total_nbytes", "minimum_nbytes", "kept_nbytes", "page_nbytes", "neuron_cache"),
    *("process", "resident", "staging", "workspace", "bookkeeping"),
)
_COUNTS = (
    *("limit_is_given", "max_pages", "shared_tokens", "cache_policy", "bypass_rows", "prefetch_rows"),
    *("prompt_tokens", "stretch_tokens", "read_ahead", "context", "window"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes by purpose, and the rows of each layer's neuron cache for every size of the KV cache."""

    limit_nbytes: int
    limit_is_given: bool
    process: int  # interpreter and libraries
    page_tables: int
    resident: int
    checksums: int  # of the rows
    gates: int  # those that are resident
    planes: int  # scales of down columns that are resident
    predictors: int
    table_of: str  # what a token's id names a row of, where rows may be read from flash
    table_rows: int  # of it, that stay in memory
    min_table_rows: int
    table_row_nbytes: int
    table_bookkeeping: int
    requests: int  # texts that become tokens; of a server, all that clients may send at once
    staging: int
    workspace: int
    bookkeeping: int  # of the units, and of their caches' slots
    bookkeeping_extra: int  # of it, what a smaller limit would do without
    prompt_tokens: int  # of a prompt that go through a layer together, a part
    stretch_nbytes: (
        int  # of each token of a prompt's stretch, for which each layer is read once; of a part, in workspace
    )
    expanded_heads: int  # of latent attention, 0 where there is none: a prompt makes keys and values of all positions,
    expanded_nbytes: int  # so many bytes of each and of a head; of one head at a time, in workspace
    read_ahead: int  # blocks of rows in flight while a prompt is computed
    work_extra: int  # bytes of staging and workspace that a smaller limit would do without
    page_nbytes: int  # of a page of every kind of layer: keys and values of PAGE_TOKENS positions
    context: int  # tokens a sequence may have
    context_pages: int  # pages' memory of a sequence that fills its context, or is about to
    row_nbytes: int  # of the longest; of bypass rows and prefetched ones
    layer_row_nbytes: tuple[int, ...]  # of each layer
    unit_rows: int  # what the caches hold comes in whole units of so many rows, those of an expert, or one
    cache_policy: str
    min_cache_rows: tuple[int, ...]  # per layer
    bypass_rows: int
    min_bypass_rows: int
    prefetch_rows: int  # of each of the two buffers for prefetched rows
    window: int
    dense_layers: tuple[int, ...]  # of which every token reads every neuron: they hold their first rows
    # [levels, layers]: rows of each layer's cache; level 0 is for `level_pages` pages and fewer, each one more is
    # for one page more. Never rising from level to level, so that a layer only ever gives rows up.
    levels: Rows = field(repr=False, compare=False)
    level_pages: int

    @property
    def fixed_nbytes(self) -> int:
        """All but the KV cache and the neuron cache."""
        weights = self.resident + self.checksums + self.gates + self.planes + self.predictors + self.table
        work = self.requests + self.staging + self.workspace + self.bookkeeping
        return self.process + self.page_tables + weights + work

    @property
    def table(self) -> int:
        """Bytes of the rows by token's id that stay in memory."""
        return self.table_rows * self.table_row_nbytes + self.table_bookkeeping

    @property
    def max_pages(self) -> int:
        """Pages that fit when every layer is at its minimum, over all sequences together."""
        return self.level_pages + len(self.levels) - 1

    @property
    def kept_nbytes(self) -> int:
        """Bytes that a server keeps between requests: a full context's, or up to KEPT_CONTEXTS of memory that no neuron
        wants."""
        free = min(self.level_pages, (1 + KEPT_CONTEXTS) * self.context_pages) - self.context_pages
        return max(self.context_pages, free) * self.page_nbytes

    def least_limit_nbytes(self, pages: int) -> int:
        """The lowest limit that the loaded model keeps to while `pages` are in use."""
        return self._levels_nbytes - (self.max_pages - pages) * self.page_nbytes

    def pages_withheld(self, limit_nbytes: int) -> int:
        """Pages whose memory must stay unused, so that the process keeps to a lower limit than the plan's."""
        return max(0, -((limit_nbytes - self._levels_nbytes) // self.page_nbytes))

    @property
    def _levels_nbytes(self) -> int:
        """The limit that the levels were made for, or less than a page more: the machine may have had less left."""
        rows = self.rows_nbytes(self.min_cache_rows) + self.bypass_rows * self.row_nbytes
        last = self.fixed_nbytes + self.max_pages * self.page_nbytes + rows
        return min(self.limit_nbytes, last + self.page_nbytes)

    def cache_rows_at(self, pages: int) -> tuple[int, ...]:
        """Rows of each layer's cache while `pages` are in use. ValueError beyond `max_pages`."""
        if not 0 <= pages <= self.max_pages:
            raise ValueError(f"the plan holds 0 to {self.max_pages} pages, not {pages}")
        return tuple(self.levels[max(0, pages - self.level_pages)].tolist())

    @property
    def cache_rows(self) -> tuple[int, ...]:
        """Rows of each layer's cache at the start of a conversation, with one page in use: the most there are."""
        return self.cache_rows_at(1)

    @property
    def full_cache_rows(self) -> tuple[int, ...]:
        """Rows of each layer's cache when one sequence has `context` tokens."""
        return self.cache_rows_at(self.context_pages)

    @property
    def stretch_tokens(self) -> int:
        """Tokens of a prompt for which each layer is read once, where it is the only one."""
        return min(self.context, self.prompt_tokens + self.neuron_cache // LENT_SHARE // self.stretch_nbytes)

    def longest_stretch(self, tokens: int, stretches: int) -> int:
        """Tokens of the longest of so many stretches of a prompt (csrc/model/model.cpp), at most."""
        parts = -(-tokens // self.prompt_tokens)
        return -(-parts // stretches) * -(-tokens // parts)

    def lent_nbytes(self, stretch: int, *, alone: bool = True) -> int:
        """Bytes that a stretch of so many tokens keeps beyond the workspace: the neuron caches lend them. Beside other
        passes under way all of its bytes."""
        return max(0, stretch - alone * min(self.prompt_tokens, self.context)) * self.stretch_nbytes

    def expansion_nbytes(self, positions: int, heads: int) -> int:
        """Bytes of so many heads' keys and values; where pages are packed, those of a part's own pages come twice."""
        pages = -(-(positions + self.prompt_tokens) // PAGE_TOKENS) + 1
        return pages * PAGE_TOKENS * heads * self.expanded_nbytes

    def rows_nbytes(self, rows: Sequence[int]) -> int:
        """Bytes of so many rows of each layer."""
        return sum(map(mul, rows, self.layer_row_nbytes))

    def neuron_cache_nbytes(self, pages: int) -> int:
        """Bytes of all layers' caches and of the bypass rows while `pages` are in use."""
        return self.rows_nbytes(self.cache_rows_at(pages)) + self.bypass_rows * self.row_nbytes

    @property
    def shared_tokens(self) -> int:
        """Tokens that all of a server's requests may have together while the neurons keep half of their memory."""
        half = self.neuron_cache_nbytes(1) // 2
        held = self.levels.astype(np.int64) @ self.layer_row_nbytes + self.bypass_rows * self.row_nbytes
        return PAGE_TOKENS * (self.level_pages - 1 + int((held >= half).sum()))

    @property
    def neuron_cache(self) -> int:
        """As `neuron_cache_nbytes` at the start."""
        return self.neuron_cache_nbytes(1)

    @property
    def total_nbytes(self) -> int:
        """The most the process holds, whatever the context."""
        ends = {1, self.context_pages}
        return self.fixed_nbytes + max(n * self.page_nbytes + self.neuron_cache_nbytes(n) for n in ends)

    @property
    def minimum_nbytes(self) -> int:
        """The smallest limit this configuration runs under, its context full."""
        rows = self.rows_nbytes(self.min_cache_rows) + self.min_bypass_rows * self.row_nbytes
        table_extra = (self.table_rows - self.min_table_rows) * self.table_row_nbytes
        fixed = self.fixed_nbytes - self.work_extra - self.bookkeeping_extra - table_extra
        return fixed + self.context_pages * self.page_nbytes + rows

    def rows(self) -> list[tuple[str, int, int]]:
        """(purpose, bytes at the start, bytes with a full context), in the order of a printed table."""
        fixed = [
            ("interpreter and libraries", self.process),
            ("resident weights", self.resident),
            ("checksums of rows", self.checksums),
            *([("gates", self.gates)] if self.gates else []),
            *([("scales of down columns", self.planes)] if self.planes else []),
            ("predictors", self.predictors),
            *([(self.table_of, self.table)] if self.table else []),
            ("requests", self.requests),
            ("staging for reads", self.staging),
            ("workspace", self.workspace),
            ("bookkeeping", self.bookkeeping),
            ("page tables", self.page_tables),
        ]
        first, full = self.page_nbytes, self.context_pages * self.page_nbytes
        return [
            *((purpose, nbytes, nbytes) for purpose, nbytes in fixed),
            ("KV cache", first, full),
            ("neuron cache", self.neuron_cache, self.neuron_cache_nbytes(self.context_pages)),
        ]

    def as_dict(self) -> dict[str, Any]:
        """For `--json`. `_full` is with a full context, its counterpart at the start."""
        return {
            **{f"{name.removesuffix('_nbytes')}_bytes": getattr(self, name) for name in _SIZES},
            **{name: getattr(self, name) for name in _COUNTS},
            "page_table_bytes": self.page_tables,
            "checksum_bytes": self.checksums,
            "gate_bytes": self.gates,
            "down_scale_bytes": self.planes,
            "predictor_bytes": self.predictors,
            "token_row_bytes": self.table,
            "token_rows": self.table_rows,
            "request_bytes": self.requests,
            "page_tokens": PAGE_TOKENS,
            "kv_cache_bytes": self.page_nbytes,
            "kv_cache_bytes_full": self.context_pages * self.page_nbytes,
            "neuron_cache_bytes_full": self.neuron_cache_nbytes(self.context_pages),
            "cache_rows": list(self.cache_rows),
            "cache_rows_full": list(self.full_cache_rows),
            "stretch_token_bytes": self.stretch_nbytes,
            "expanded_token_bytes": self.expanded_heads * self.expanded_nbytes,
        }
