"""Sequences of a loaded model, and their memory: they take pages of it, and the neuron caches give way (paper A,
appendix C.3).

Every page in use comes out of the neuron caches by the plan's table, so that the process keeps to its limit however
many sequences there are and however long they get; a page that sequences share counts once. Bookkeeping alone; the
bytes are the native core's.
"""

import itertools
import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from flashllm import _core
from flashllm._core import PAGE_TOKENS
from flashllm.base.files import Closing
from flashllm.base.machine import return_heaps
from flashllm.base.processes import OneProcess
from flashllm.base.units import format_size
from flashllm.errors import BudgetError, ContextFull, UsageError
from flashllm.plan.memory_plan import LENT_SHARE, MemoryPlan

Spans = list[list[NDArray[np.uint8]]]  # pages of each kind of layer

_numbers = itertools.count()


class KeptRows:
    """A layer's rows that a stream keeps: memory that gives way like a neuron cache's."""

    def __init__(self, stream: _core.RowStream, layer: int) -> None:
        self._stream, self._layer = stream, layer

    @property
    def capacity(self) -> int:
        return self._stream.kept(self._layer)

    def set_capacity(self, rows: int) -> None:
        self._stream.set_kept(self._layer, rows)


NeuronCache = _core.FfnLayer | KeptRows  # of a layer: gives memory away and gets it back


class StateMemory(OneProcess):
    """How much memory sequences hold, and the rows that this leaves the neuron caches.

    `lock` is held by whoever computes, or changes what the caches hold.
    """

    def __init__(self, plan: MemoryPlan, caches: Sequence[NeuronCache], pool: _core.StatePool) -> None:
        super().__init__()
        self.lock = threading.RLock()
        self.pool = pool
        self._plan, self._caches = plan, caches
        self._withheld = 0  # pages whose memory a lowered limit leaves unused
        self._total: int | None = None  # pages that the caches' rows allow for, those withheld included
        self._held: dict[object, int] = {}  # bytes that passes under way have claimed and not taken
        self._closed = False

    @property
    def pages(self) -> int:
        """Pages in use, over all sequences, and the memory of as many that passes under way have claimed."""
        return self._pages_with(0)

    def _pages_with(self, nbytes: int) -> int:
        return -(-(self.pool.nbytes + sum(self._held.values()) + nbytes) // self._plan.page_nbytes)

    @property
    def passes(self) -> int:
        return len(self._held)

    def hold(self, holder: object, nbytes: int) -> None:
        """Set aside so many of the bytes claimed for a pass under way, which takes them as it goes."""
        with self.lock:
            self._held[holder] = nbytes

    def taken(self, holder: object, nbytes: int) -> None:
        """It took so many of them."""
        with self.lock:
            self._held[holder] = max(0, self._held[holder] - nbytes)

    def release(self, holder: object) -> None:
        """It is over: what it claimed and has not taken goes back."""
        with self.lock:
            self._held.pop(holder, None)
            if not self._closed:
                self.claim(0)

    def check_open(self) -> None:
        """UsageError where the model is closed, or this is a forked child."""
        self.check_process()
        if self._closed:
            raise UsageError("the model is closed; load it again")

    def can_lend(self, nbytes: int, added: int, *, rows: bool) -> bool:
        """True where a pass can borrow so much, while sequences take `added` more bytes: of memory that holds no rows,
        or with `rows` a third of the neuron caches' at most."""
        before, total = (self._pages_with(n) + self._withheld for n in (added, added + nbytes))
        if total > self._plan.max_pages:
            return False
        held = self._plan.neuron_cache_nbytes(before)
        return self._plan.neuron_cache_nbytes(total) == held or (rows and nbytes * LENT_SHARE <= held)

    def claim(self, nbytes: int) -> None:
        """Before memory is touched: sequences will take so much more of the pool, or a pass beside it.

        Raises ContextFull where the neuron caches cannot give so much; nothing has changed then.
        """
        with self.lock:
            self.check_open()
            total = self._pages_with(nbytes)
            most = self._plan.max_pages - self._withheld
            if total > most:
                raise ContextFull(
                    f"the memory is full: {format_size(total * self._plan.page_nbytes)} of context over all "
                    f"sequences are more than the {format_size(most * self._plan.page_nbytes)} that fit; use fewer "
                    "or shorter sequences, or give --memory more"
                )
            if total + self._withheld != self._total:
                self._share_out(total + self._withheld)

    def least_limit(self, tokens: Sequence[int]) -> int:
        """The least limit, in bytes, that holds the sequences there are and so many new tokens of some of them; at most
        the plan's."""
        new = sum(each // PAGE_TOKENS + 2 for each in tokens)
        pages = min(self._plan.max_pages, max(1, self.pages) + new)
        return min(self._plan.limit_nbytes, self._plan.least_limit_nbytes(pages))

    def keep_to(self, limit_nbytes: int) -> None:
        """From now on the process holds no more than this, and never more than the plan's limit.

        Raises BudgetError where that cannot hold the model and the sequences as they are; nothing has changed then.
        """
        with self.lock:
            self.check_open()
            pages, withheld = max(1, self.pages), self._plan.pages_withheld(limit_nbytes)
            if pages + withheld > self._plan.max_pages:
                least = self._plan.least_limit_nbytes(pages)
                raise BudgetError(
                    f"{format_size(limit_nbytes)} cannot hold this model and the "
                    f"{format_size(pages * self._plan.page_nbytes)} of context that are in use: that needs at "
                    f"least {-(-least // 10**6)} MB; begin a new conversation, or load the model again with a shorter "
                    "--context"
                )
            self._withheld = withheld
            self._share_out(pages + withheld)

    def _share_out(self, total: int) -> None:
        """The neuron caches get what `total` pages leave."""
        rows = self._plan.cache_rows_at(total)
        # Those that shrink come first, so that the sum never exceeds the plan's.
        changes = sorted(zip(self._caches, rows, strict=True), key=lambda change: change[1] - change[0].capacity)
        if self._total is not None and total < self._total:  # a pass is over, whose buffers had this memory
            return_heaps()
        for cache, count in changes:
            if cache.capacity != count:
                cache.set_capacity(count)
        self._total = total

    def close(self) -> None:
        """Let go of the caches: the model is closed."""
        with self.lock:
            self._closed, self._caches = True, ()


class SequenceState(Closing):
    """The state of a sequence's tokens; a context manager. Its memory goes back when it is closed or forgotten."""

    def __init__(self, memory: StateMemory) -> None:
        self.native, self._memory = _core.SequenceState(memory.pool), memory
        self.number = next(_numbers)
        self.in_pass = False  # until that ends nobody else may change it
        self.closed = False

    @property
    def length(self) -> int:
        """Tokens that are held."""
        return 0 if self.closed else self.native.length

    @property
    def prompted(self) -> int:
        """Tokens, from the first, that were computed as a prompt's after nothing but such tokens."""
        return self.native.prompted

    def nbytes_to_add(self, new: int, together: int = 0) -> int:
        """Bytes that `new` more tokens take, `together` at a time, or as few as a part.

        UsageError where it is closed, ContextFull beyond its context.
        """
        self._check_open()
        if self.length + new > self.native.context:
            raise ContextFull(
                f"the context is full: {self.length} tokens are held, {new} more exceed its limit of "
                f"{self.native.context}; start a new conversation, shorten the prompt, or load with a larger --context "
                "if the model allows it"
            )
        return self.native.nbytes_to_add(self.length + new, together)

    @property
    def nbytes_alone(self) -> int:
        """Bytes that closing it gives back: those of pages that no other sequence shares."""
        with self._memory.lock:
            return 0 if self.closed else self.native.nbytes_alone

    def mark(self, positions: Sequence[int]) -> None:
        """Let passes that go beyond these positions leave, of whole pages before them, what `keep` can go back to."""
        self._check_open()
        self.native.mark(list(positions))

    def can_keep(self, length: int) -> int:
        """How many of the first `length` tokens `keep` would keep: all, or fewer where a sliding window's are gone.
        UsageError where there are fewer, or it is closed."""
        self._check_open()
        if not 0 <= length <= self.length:
            raise UsageError(f"a sequence of {self.length} tokens cannot be cut to {length}")
        return self.native.can_keep(length)

    def keep(self, length: int) -> int:
        """Keep the first `can_keep(length)` tokens, and say how many they are."""
        with self._memory.lock:
            self.check_free()
            return self.native.keep(self.can_keep(length))

    def copy_from(self, other: "SequenceState") -> None:
        """Become a copy of `other`, a sequence of the same model. It takes no memory until one of the two goes on."""
        self._check_open()
        other._check_open()
        with self._memory.lock:
            self.check_free()
            self.native.copy_from(other.native)

    def save(self) -> Spans:
        """The bytes that are held, to be kept elsewhere; valid until the sequence changes."""
        self._check_open()
        return self.native.save()

    def restore(self, length: int, pages: Sequence[int], fill: Callable[[Spans], None], *, prompted: int = 0) -> None:
        """Hold `length` tokens whose bytes, as `save` gave them, `fill` writes into the spans it gets.

        `pages`: how many spans of each list there were; `prompted`: as of the sequence that was saved. Raises
        ContextFull, UsageError where this model's sequences have no such pages, and what `fill` raises; the sequence is
        then empty. While `fill` goes on others may compute, and nobody may close the sequence.
        """
        self._check_open()
        with self._memory.lock:
            self.keep(0)
            self._memory.claim(self.nbytes_to_add(length))
            try:
                spans = self.native.restore(length, pages, prompted)
            except BaseException as error:
                self.keep(0)
                if isinstance(error, ValueError):
                    raise UsageError(str(error)) from error
                raise
            self.in_pass = True
        filled = False
        try:
            fill(spans)  # others pass meanwhile
            filled = True
        finally:
            with self._memory.lock:
                self.in_pass = False
                if filled:
                    self.native.commit(length)
                else:
                    self.keep(0)

    def close(self) -> None:
        """Give the memory back. Once more is harmless."""
        if self.closed or self._memory.in_child:
            return
        with self._memory.lock:
            self.closed = True
            self.native.keep(0)

    def check_free(self) -> None:
        """UsageError where a pass under way has the sequence."""
        if self.in_pass:
            raise UsageError("a pass under way has this sequence; end or close that first")

    def _check_open(self) -> None:
        self._memory.check_process()
        if self.closed:
            raise UsageError("this sequence is closed and its memory given back; take a new one")
