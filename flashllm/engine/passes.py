"""A pass of new tokens through a loaded model, which can wait between a part of a prompt and the next while other
passes go on: nothing is read again for it, and no bit is another one."""

import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypedDict

import numpy as np
from numpy.typing import NDArray

from flashllm import _core
from flashllm.base.files import Closing
from flashllm.engine.state import SequenceState, StateMemory
from flashllm.errors import UsageError

Ids = Sequence[int]
Entry = tuple[SequenceState, Ids]
Logits = NDArray[np.float32]
Group = tuple[str, list[int]]  # a kind of pass, and which entries it takes


class Observer(Protocol):
    """Sees the FFNs of a prompt's pass, a layer after the other. The arrays are valid during the call."""

    def input(self, layer: int, x: NDArray[np.float32]) -> None:
        """x: the FFN's input [tokens, d_model], of all entries one after the other."""

    def activations(self, layer: int, first: int, h: NDArray[np.float32]) -> None:
        """h: the activations [neurons, tokens] of the neurons from `first` on; what is written into it counts."""


class StepOptions(TypedDict, total=False):
    """Options of a pass, as `Model.step` says; by default none of them."""

    all_logits: bool
    as_prompt: bool
    observer: Observer | None
    drafted: int


class Pass(Closing):
    """New tokens on their way. Until it has ended, or is closed, its sequences are its own; a context manager."""

    def __init__(
        self,
        entries: Sequence[Entry],
        groups: Sequence[Group],
        begin: Callable[[str, Sequence[Entry]], _core.Pass],
        *,
        memory: StateMemory,
        claimed: int,
        all_logits: bool,
    ) -> None:
        """`begin` makes a group's native pass. `claimed`: bytes of `memory` that are the pass's own until it ends."""
        self._entries, self._groups, self._begin = entries, list(groups), begin
        self._memory, self._all_logits = memory, all_logits
        self._lengths = [sequence.length for sequence, _ in entries]
        self._results: dict[int, Logits] = {}  # of each entry; where a group has all of them, in the place of them all
        self._native: _core.Pass | None = None  # of the first group
        self._over = False
        memory.hold(self, claimed)
        for sequence, _ in entries:
            sequence.in_pass = True

    def advance(self, seconds: float = float("inf")) -> Logits | None:
        """Go on for about so long, at least a step: the logits, or None where the pass has not ended yet.

        Where it raises (as `Model.step`), every sequence holds what it held before, and the pass is closed.
        """
        memory, until = self._memory, time.perf_counter() + seconds
        if self._over:
            raise UsageError("the pass is over")
        with memory.lock:
            try:
                memory.check_open()
                before = memory.pool.nbytes
                while self._groups:
                    if not self._advance_group(until - time.perf_counter()):
                        memory.taken(self, memory.pool.nbytes - before)
                        return None
            except BaseException:
                self.close()
                raise
            self._end()
        rows = [self._results[index] for index in sorted(self._results)]
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    def _advance_group(self, seconds: float) -> bool:
        kind, indices = self._groups[0]
        mine = [self._entries[index] for index in indices]
        if self._native is None:
            self._native = self._begin(kind, mine)
        logits = self._native.advance(seconds)
        if logits is None:
            return False
        self._native = None
        del self._groups[0]
        if len(indices) == len(self._entries):
            self._results[0] = logits
            return True
        counts = [len(ids) if self._all_logits else 1 for _, ids in mine]
        self._results.update(zip(indices, np.split(logits, np.cumsum(counts)[:-1]), strict=True))
        return True

    def _end(self) -> None:
        self._over, self._native = True, None
        for sequence, _ in self._entries:
            sequence.in_pass = False
        self._memory.release(self)

    def close(self) -> None:
        """Let the sequences hold what they held before, unless the pass has ended."""
        if self._over or self._memory.in_child:
            return
        with self._memory.lock:
            if self._native is not None:
                self._native.close()
            self._end()
            for (sequence, _), length in zip(self._entries, self._lengths, strict=True):
                if not sequence.closed:
                    sequence.keep(length)
