"""A model that several threads use at once, each as if it were its own: their passes are joined, and a long prompt
waits between its parts so that no answer stands still (`flashllm.engine.turns`).

Prompts that wait when the pass of one begins, or come soon after, share it where the model reads: each streamed
layer, and each expert that they want, is read once for all of them. They are about as long, so that none waits long for
another. Who is cancelled in a pass that is others' too stays in it until its end.

No thread computes but those that ask: one of them takes the turns, its own and the others', until it has what it wants.
"""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from flashllm.config import MOST_TOGETHER
from flashllm.engine.meter import COUNTS, StepTimes
from flashllm.engine.model import Model
from flashllm.engine.passes import Pass, StepOptions
from flashllm.engine.turns import JOINED_SLICES, MOST_LONGER, PATIENCE_S, SLICE_S, Turn, Turns
from flashllm.errors import BudgetError, Cancelled, ContextFull

_EXPOSED = ("io_ms", "memory_ms", "compute_ms")

Entries = Sequence[tuple[Any, Sequence[int]]]
Logits = NDArray[np.float32]


class ShareMeter:
    """A member's own meter: between two calls, the whole time of its passes and its part of their counts."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._started = time.perf_counter()

    def add(self, times: StepTimes, part: int, of: int) -> None:
        """A pass of `of` members, of which this is number `part`."""
        for name in (*_EXPOSED, "io_busy_ms"):
            self._sums[name] = self._sums.get(name, 0.0) + getattr(times, name)
        for name in COUNTS:
            count = getattr(times, name)
            self._sums[name] = self._sums.get(name, 0) + count * (part + 1) // of - count * part // of

    def restart(self) -> None:
        self.take()

    def take(self) -> StepTimes:
        """As `Meter.take`. The time of others' passes is `other`."""
        sums, self._sums = self._sums, {}
        now = time.perf_counter()
        total, self._started = 1e3 * (now - self._started), now
        spent: dict[str, Any] = {name: sums.get(name, 0.0) for name in (*_EXPOSED, "io_busy_ms")}
        spent |= {name: int(sums.get(name, 0)) for name in COUNTS}
        spent["other_ms"] = max(0.0, total - sum(spent[name] for name in _EXPOSED))
        return StepTimes(**spent, total_ms=total)


@dataclass(slots=True, eq=False)
class _Member:
    """Who uses the model, and what it waits for."""

    cancelled: threading.Event
    meter: ShareMeter
    entries: Entries = ()
    options: StepOptions = field(default_factory=StepOptions)  # of its step
    length: int = 0  # of its prompt, where others' may share its pass
    running: "_Prompts | None" = None
    watch: Callable[[int, int], None] | None = None  # of its prompts
    logits: Logits | None = None
    error: Exception | None = None

    @property
    def has_answer(self) -> bool:
        return self.logits is not None or self.error is not None

    @property
    def together(self) -> "tuple[_Member, ...]":
        """The members of its pass, itself among them."""
        return (self,) if self.running is None else self.running.members

    @property
    def may_share(self) -> bool:
        """True where others' prompts may come into its pass."""
        return self.length > 0 and not self.cancelled.is_set() and (self.running is None or self.running.grows > 0)


@dataclass(slots=True, eq=False)
class _Prompts:
    """A pass of prompts under way."""

    members: tuple[_Member, ...]
    work: Pass
    grows: int  # slices before which others may still come in; then it begins again, but once


class SharedModel:
    """The model for each thread that is a `member`, as if it were alone. What is not here is the model's own."""

    def __init__(self, model: Model, make_room: Callable[[], bool]) -> None:
        """`make_room` gives memory of sequences back, if it can: what it returns."""
        self._model, self._make_room = model, make_room
        self._changed = threading.Condition()
        self._turns: Turns[_Member] = Turns()
        self._turn: Turn[_Member] | None = None  # being computed
        self._here = threading.local()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    @contextlib.contextmanager
    def member(self, cancelled: threading.Event) -> Iterator[None]:
        """This thread uses the model. Once `cancelled` is set, and `wake` was called, its step raises Cancelled."""
        self._here.member = member = _Member(cancelled, ShareMeter())
        with self._changed:
            self._turns.join(member)
        try:
            yield
        finally:
            with self._changed:
                self._turns.leave(member)
                self._changed.notify_all()
            del self._here.member

    @property
    def meter(self) -> ShareMeter:
        """This thread's."""
        meter: ShareMeter = self._here.member.meter
        return meter

    @property
    def most_drafted(self) -> int:
        """As the model's; none beside others: their tokens make better use of a pass than guesses do."""
        return 0 if len(self._turns) > 1 else self._model.most_drafted

    def watch(self, progress: Callable[[int, int], None] | None) -> None:
        """As `Model.watch`, of this thread's prompts, whoever computes them."""
        self._here.member.watch = progress

    def wake(self) -> None:
        """Somebody was cancelled: a pass that is nobody else's ends at once."""
        with self._changed:
            if self._turn is not None and all(each.cancelled.is_set() for each in self._turn.members):
                self._model.cancel()
            self._changed.notify_all()

    def step(self, entries: Entries, **options: Unpack[StepOptions]) -> Logits:
        """As `Model.step`; others' tokens may share the pass, or be computed before its end."""
        member: _Member = self._here.member
        tokens = sum(len(ids) for _, ids in entries)  # others join few of them; more go by slices, as a prompt's do
        prompt = bool(options.get("as_prompt")) or self._model.is_prompt(tokens) or tokens > MOST_TOGETHER
        member.entries, member.options, member.logits, member.error = entries, options, None, None
        member.length = tokens if options == {"as_prompt": True} else 0
        patience_ends = time.perf_counter() + PATIENCE_S
        with self._changed:
            self._turns.ask(member, prompt=prompt)
            self._changed.notify_all()
            # A turn has its members until it is over, also those that have their answer; a prompt's pass, until it ends
            # or nobody wants it.
            while (is_computed := self._turn is not None and member in self._turn.members) or not member.has_answer:
                if not is_computed and all(each.cancelled.is_set() for each in member.together):
                    member.error = Cancelled("the computation was ended by another thread")
                    break
                left = patience_ends - time.perf_counter()
                turn = None if self._turn is not None else self._turns.next(patient=left > 0)
                if turn is None:
                    self._changed.wait(left if self._turn is None and self._turns.are_awaited and left > 0 else None)
                    continue
                self._take(Turn(self._with(turn.members[0]), is_slice=True) if turn.is_slice else turn)
            self._turns.drop(member)
            running, member.running = member.running, None
        if running is not None:
            running.work.close()
        if member.error is not None:
            raise member.error
        assert member.logits is not None
        logits, member.logits, member.entries = member.logits, None, ()
        return logits

    def _take(self, turn: Turn[_Member]) -> None:
        """Compute it, by this thread, while others may ask."""
        self._turn = turn
        if all(each.cancelled.is_set() for each in turn.members):
            self._model.cancel()
        self._changed.release()
        try:
            members = turn.members
            if turn.is_slice:
                members = self._go_on(members)
            else:
                self._share(members)
            times = self._model.meter.take()
            for part, each in enumerate(members):
                each.meter.add(times, part, len(members))
        finally:
            self._changed.acquire()
            self._turn = None
            self._model.cancel(False)
            for each in turn.members:
                if each.has_answer:
                    self._turns.drop(each)
            self._changed.notify_all()

    def _share(self, members: Sequence[_Member]) -> None:
        """Few tokens of each. Where the pass fails each has one of its own, so that none fails for another."""
        together = [each for each in members if not each.options]
        if len(together) > 1:
            with contextlib.suppress(Exception):
                _give(together, self._model.step([entry for each in together for entry in each.entries]))
        for each in members:
            if not each.has_answer:
                self._attempt(each, functools.partial(self._model.step, each.entries, **each.options))

    def _with(self, first: _Member) -> tuple[_Member, ...]:
        """The members of one pass: those of `first`'s and, where it can grow, others whose prompts wait."""
        first = next((each for each in first.together if each.may_share), first)
        if not first.may_share or not self._model.reads_prompts:
            return first.together
        members = first.together
        for each in self._turns.prompts:
            if each not in members and each.may_share:
                lengths = [one.length for one in (*members, *each.together)]
                if max(lengths) <= MOST_LONGER * min(lengths):
                    members += each.together
        return tuple(each for each in members if not each.cancelled.is_set()) or first.together

    def _go_on(self, members: tuple[_Member, ...]) -> tuple[_Member, ...]:
        """A slice of their prompts, and whose it was."""
        first = members[0]
        if set(members) != set(first.together):
            self._begin_together(members)
        elif first.running is not None:
            first.running.grows -= 1
        together, running = first.together, first.running
        if running is not None and len(together) > 1:
            try:
                rows = running.work.advance(SLICE_S)
            except Exception:  # each has a pass of its own, so that none fails for another
                running.work.close()
                for each in together:
                    each.running, each.length = None, 0
            else:
                if rows is not None:
                    _give(together, rows)
        else:
            self._attempt(first, functools.partial(self._advance, first))
        return together

    def _begin_together(self, members: tuple[_Member, ...]) -> None:
        """One pass for as many of them as have room, in the place of those they had; the others' are apart."""
        begun = {each.running for each in members if each.running is not None}
        for old in begun:
            old.work.close()
            for each in old.members:
                each.running = None
        while len(members) > 1:
            try:
                self._begin(members, grows=0 if begun else JOINED_SLICES)
                break
            except Exception as error:
                if not isinstance(error, (ContextFull, BudgetError)) or not self._make_room():
                    members[-1].length = 0
                    members = members[:-1]

    def _begin(self, members: tuple[_Member, ...], *, grows: int = JOINED_SLICES) -> None:
        def told(done: int, total: int) -> None:
            for each in members:
                if each.watch is not None:
                    each.watch(done, total)

        self._model.watch(told)
        work = self._model.begin([entry for each in members for entry in each.entries], **members[0].options)
        running = _Prompts(members, work, grows)
        for each in members:
            each.running = running

    def _advance(self, member: _Member) -> Logits | None:
        """A slice of a prompt that is alone."""
        if member.running is None:
            self._begin((member,))
        assert member.running is not None
        return member.running.work.advance(SLICE_S)

    def _attempt(self, member: _Member, compute: Callable[[], Logits | None]) -> None:
        while True:
            try:
                member.logits = compute()
            except (ContextFull, BudgetError) as error:  # it does not fit, or no longer: the limit was lowered
                if member.options.get("drafted") and isinstance(error, ContextFull):
                    member.error = error
                elif self._make_room():
                    continue
                else:
                    with self._changed:
                        member.error = None if self._turns.block(member) else error
            except Exception as error:
                member.error = error
            return


def _give(members: Sequence[_Member], rows: Logits) -> None:
    """To each the logits of its entries."""
    for each in members:
        each.logits, rows = rows[: len(each.entries)], rows[len(each.entries) :]
