"""The KV cache's memory: sequences take blocks of it, and the neuron caches give way (paper A, appendix C.3).

Every block in use comes out of the neuron caches by the plan's table, so that the process keeps to its limit however
many sequences there are and however long they get. Bookkeeping alone; the bytes are the native core's.
"""

import itertools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from flashllm import _core
from flashllm.base.processes import OneProcess
from flashllm.base.units import format_size
from flashllm.errors import BudgetError, ContextFull, UsageError
from flashllm.plan.memory import KV_BLOCK_TOKENS, MemoryPlan

_numbers = itertools.count()


class NeuronCache(Protocol):
    """A layer's cache, which gives memory away and gets it back."""

    @property
    def capacity(self) -> int: ...

    def set_capacity(self, rows: int) -> None: ...


class KvMemory(OneProcess):
    """Which sequence holds how many KV blocks, and the rows that this leaves the neuron caches.

    `lock` is held by whoever computes, or changes what the caches hold.
    """

    def __init__(self, plan: MemoryPlan, caches: Sequence[NeuronCache]) -> None:
        super().__init__()
        self.lock = threading.RLock()
        self._plan, self._caches = plan, caches
        self._blocks: dict[int, int] = {}  # by sequence number
        self._withheld = 0  # blocks whose memory a lowered limit leaves unused
        self._total: int | None = None  # blocks that the caches' rows allow for, those withheld included
        self._closed = False

    @property
    def blocks(self) -> int:
        """Blocks in use, over all sequences."""
        return sum(self._blocks.values())

    def claim(self, wanted: Mapping[int, int]) -> None:
        """Before memory is touched: the sequences (by number) that will hold so many blocks each.

        Raises ContextFull where the neuron caches cannot give so much; nothing has changed then.
        """
        with self.lock:
            if self._closed:
                raise UsageError("the model is closed; load it again")
            total = sum({**self._blocks, **wanted}.values())
            most = self._plan.max_kv_blocks - self._withheld
            if total > most:
                raise ContextFull(
                    f"the memory is full: {total * KV_BLOCK_TOKENS} tokens of context over all sequences are more than "
                    f"the {most * KV_BLOCK_TOKENS} that fit; use fewer or shorter sequences, or "
                    "give --memory more"
                )
            self._blocks.update(wanted)
            if total + self._withheld != self._total:
                self._share_out(total + self._withheld)

    def keep_to(self, limit_nbytes: int) -> None:
        """From now on the process holds no more than this, and never more than the plan's limit.

        Raises BudgetError where that cannot hold the model and the sequences as they are; nothing has changed then.
        """
        with self.lock:
            if self._closed:
                raise UsageError("the model is closed; load it again")
            blocks, withheld = max(1, self.blocks), self._plan.blocks_withheld(limit_nbytes)
            if blocks + withheld > self._plan.max_kv_blocks:
                least = self._plan.least_limit_nbytes(blocks)
                raise BudgetError(
                    f"{format_size(limit_nbytes)} cannot hold this model and the {blocks * KV_BLOCK_TOKENS} tokens of "
                    f"context that are in use: that needs at least {-(-least // 10**6)} MB; begin a new conversation, "
                    "or load the model again with a shorter --context"
                )
            self._withheld = withheld
            self._share_out(blocks + withheld)

    def _share_out(self, total: int) -> None:
        """The neuron caches get what `total` blocks leave."""
        rows = self._plan.cache_rows_at(total)
        # Those that shrink come first, so that the sum never exceeds the plan's.
        changes = sorted(zip(self._caches, rows, strict=True), key=lambda change: change[1] - change[0].capacity)
        for cache, count in changes:
            if cache.capacity != count:
                cache.set_capacity(count)
        self._total = total

    def release(self, number: int, blocks: int = 0) -> None:
        """The sequence holds `blocks` only. The caches grow at the next claim: this may come from any thread."""
        if blocks:
            self._blocks[number] = blocks
        else:
            self._blocks.pop(number, None)

    def close(self) -> None:
        """Let go of the caches: the model is closed."""
        with self.lock:
            self._closed, self._caches = True, ()


class KvSequence:
    """Keys and values of one sequence; a context manager. Its memory goes back when it is closed or forgotten."""

    def __init__(self, native: _core.KvSequence, memory: KvMemory) -> None:
        self.native, self._memory = native, memory
        self.number = next(_numbers)
        self.closed = False
        self._forget = weakref.finalize(self, memory.release, self.number)

    @property
    def length(self) -> int:
        """Tokens whose keys and values are held."""
        return 0 if self.closed else self.native.length

    def blocks_with(self, new: int) -> int:
        """KV blocks once `new` more tokens are held. UsageError where it is closed, ContextFull beyond its context."""
        self._check_open()
        if self.length + new > self.native.context:
            raise ContextFull(
                f"the context is full: {self.length} tokens are held, {new} more exceed its limit of "
                f"{self.native.context}; start a new conversation, shorten the prompt, or load with a larger --context "
                "if the model allows it"
            )
        return self.native.blocks + self.native.blocks_to_add(self.length + new)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens. UsageError where there are fewer, or it is closed."""
        self._check_open()
        if not 0 <= length <= self.length:
            raise UsageError(f"a sequence of {self.length} tokens cannot be cut to {length}")
        with self._memory.lock:
            self.native.truncate(length)
            self._memory.release(self.number, self.native.blocks)

    def copy_from(self, other: "KvSequence") -> None:
        """Become a copy of `other`, a sequence of the same model. Raises ContextFull."""
        self._check_open()
        other._check_open()
        with self._memory.lock:
            self.truncate(0)
            self._memory.claim({self.number: other.native.blocks})
            self.native.copy_from(other.native)

    def memory(self) -> NDArray[np.uint8]:
        """The bytes of keys and values as they lie, to be kept elsewhere; valid until the sequence changes."""
        self._check_open()
        return self.native.memory()

    def restore(self, length: int, fill: Callable[[NDArray[np.uint8]], None]) -> None:
        """Hold `length` tokens whose bytes, as `memory` gave them, `fill` writes into the array it gets.

        Raises ContextFull, and what `fill` raises; the sequence is then empty.
        """
        self._check_open()
        with self._memory.lock:
            self.truncate(0)
            self._memory.claim({self.number: self.blocks_with(length)})
            try:
                self.native.reserve(length)
                fill(self.native.memory())
                self.native.commit(length)
            except BaseException:
                self.truncate(0)
                raise

    def close(self) -> None:
        """Give the memory back. Once more is harmless."""
        if self.closed or self._memory.in_child:
            return
        with self._memory.lock:
            self.closed = True
            self.native.truncate(0)
            self._forget()

    def _check_open(self) -> None:
        self._memory.check_process()
        if self.closed:
            raise UsageError("this sequence is closed and its memory given back; take a new one")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
