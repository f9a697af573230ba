"""A store of what requests leave behind, and what of it a new one may reuse. Knows no connection and no text.

The rule (design contract 2 makes a prompt's bits depend on the prompt alone):

- A prompt of more than K0 tokens is computed densely, whatever of it is reused. Any request may so reuse the tokens
  that its prompt shares with another one, as far as those were computed densely after nothing but such tokens: that
  changes no bit of its answer.
- An answer's own tokens were computed sparsely. They are reused only where the same conversation goes on: its earlier
  messages are those of the kept request and its answer, or the prompt begins with all the tokens of both. This is what
  `flashllm chat` does from turn to turn. A conversation that is no longer kept is computed again as a prompt, so the
  last bits of what follows may differ.
- What is parked on disk comes back with its bits, so the rule is the same for it.

Kept are each conversation's end, and the one before, as a request may be made again; and beginnings of whole pages that
several prompts have, or may have. They share pages, which cost memory once. Where memory is wanted, that one goes first
whose bytes spare the least: tokens to compute again, for each byte, times how often they were of use, and times its
length, as short ones are soon computed again and there are many. What is not used ages by what goes meanwhile
(GreedyDual-Size-Frequency).
"""

import hashlib
import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashllm._core import PAGE_TOKENS
from flashllm.engine.model import Model
from flashllm.generate.session import Session
from flashllm.parked.folder import Entry, ParkingFolder
from flashllm.parked.tokens import Tokens
from flashllm.replies.written import load

MIN_SHARED_TOKENS = 8  # fewer are not worth a copy
MIN_PARKED_TOKENS = 32  # that parking spares, more than memory does: fewer are not worth reading it
_TOKEN_NBYTES = 16  # of a kept token's id
_MOST_USES = 8  # that count: what was of use often is forgotten too


@dataclass(slots=True, kw_only=True, eq=False)
class _Kept:
    session: Session
    tokens: Tokens  # of its prompt, until it has ended
    after: bytes | None = None  # digest of the conversation so far, its last answer included
    is_beginning: bool = False
    uses: int = 0
    clock: float = 0.0  # of the store, when it was of use last


@dataclass(slots=True, kw_only=True)
class Place:
    """A session with a prompt's reusable tokens in it: where the answer is generated."""

    session: Session
    keep: int  # tokens of the prompt that the session holds
    made: _Kept | None = None  # what is kept of it
    source: _Kept | None = None  # the conversation that it goes on from
    marks: Sequence[int] = ()  # tokens that other prompts begin with, or may


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """A prompt, and what it may reuse."""

    prompt: Tokens
    turns: Sequence[bytes]
    dense: bool

    def goes_on(self, tokens: Tokens, after: bytes | None) -> bool:
        """True where it is the next turn of a conversation of these tokens."""
        whole = tokens.shared_with(self.prompt) == len(tokens) < len(self.prompt)
        return whole or (after is not None and after in self.turns)

    def reusable(self, tokens: Tokens, computed: int, pure: int, *, goes_on: bool) -> int:
        """How many of so many computed tokens it may reuse, the `pure` ones a prompt's after nothing but such."""
        # Its last token is computed always: its logits are wanted.
        most = min(tokens.shared_with(self.prompt), computed, len(self.prompt) - 1)
        if goes_on:
            return most if self.dense or pure < most else 0
        return min(pure, most) if self.dense and min(pure, most) >= MIN_SHARED_TOKENS else 0


class Conversations:
    """The store. One thread at a time; several places may be out at once."""

    def __init__(
        self, new_session: Callable[[], Session], model: Model, *, budget: int, parking: ParkingFolder | None = None
    ) -> None:
        """`new_session` makes an empty one of `model`. What is kept holds at most `budget` bytes; what leaves memory is
        written to `parking`."""
        self._new_session, self._model, self._budget, self._parking = new_session, model, budget, parking
        self._kept: list[_Kept] = []
        self._out: list[_Kept] = []
        self._links: Counter[bytes] = Counter()  # how many of those kept begin so
        self._clock = 0.0

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, ids: Sequence[int], turns: Sequence[bytes] = (), marks: Sequence[int] = ()) -> Place:
        """A place to generate after the prompt `ids`.

        `turns` are the digests of the conversations it goes on from, `marks` the lengths of what other prompts may
        begin with.
        """
        wanted = _Wanted(prompt=Tokens.of(ids), turns=turns, dense=self._model.is_prompt(len(ids)))
        self._recall(wanted)
        best = max(self._kept, key=lambda one: self._spared(wanted, one), default=None)
        keep = 0 if best is None else self._spared(wanted, best)
        session = self._new_session()
        source = None
        if best is not None and keep:
            session.copy_prefix(best.session, keep)
            source = best if self._goes_on(wanted, best) else None
        for one in self._kept:
            if one is source or (one.is_beginning and one.tokens.shared_with(wanted.prompt) == len(one.tokens)):
                one.uses, one.clock = one.uses + 1, self._clock
        # Where it parts from another prompt, a third one may.
        begun = [one.tokens.shared_with(wanted.prompt) for one in self._kept if wanted.dense and source is None]
        marks = sorted({*marks, max(begun, default=0)})
        session.mark([mark for mark in marks if keep < mark < len(ids)])
        made = _Kept(session=session, tokens=wanted.prompt, uses=0 if source is None else source.uses)
        self._out.append(made)
        return Place(session=session, keep=session.computed, made=made, source=source, marks=marks)

    def lend(self, place: Place) -> None:
        """From now on others may begin with what the prompt at `place`, which is computed, begins with."""
        if place.made is not None and self._budget:
            for mark in place.marks:
                self._keep_beginning(place.made, mark // PAGE_TOKENS)

    def give_back(self, place: Place, after: bytes | None = None) -> None:
        """Keep the session of a request that ended, however it ended. `after`: digest of its conversation, if any."""
        session, made = place.session, place.made
        if made is not None:
            self._out.remove(made)
        if made is None or session.computed == 0 or self._budget == 0:
            session.close()
            return
        self.lend(place)
        made.tokens, made.after, made.clock = Tokens.of(session.tokens), after, self._clock
        if after is None and any(_covers(one, made) for one in self._kept):
            session.close()
        else:
            for one in [one for one in self._kept if _covers(made, one)]:
                if not one.is_beginning and one is not place.source:
                    self._drop(one)
            self._add(made)
        while self._kept_nbytes > self._budget and self.make_room():
            pass

    def make_room(self) -> bool:
        """Give back the memory that is worth least, or some of it; whether there was any."""
        if not self._kept:
            return False
        least = min(self._kept, key=self._worth)
        self._clock = max(self._clock, self._worth(least)[1])
        self._let_go(least)
        return True

    def close(self) -> None:
        for one in sorted(self._kept, key=lambda one: -len(one.tokens)):
            self._let_go(one)

    @property
    def _kept_nbytes(self) -> int:
        tokens = sum(len(one.tokens) for one in self._kept)
        return self._model.state_nbytes - sum(one.session.nbytes_alone for one in self._out) + _TOKEN_NBYTES * tokens

    def _goes_on(self, wanted: _Wanted, one: _Kept) -> bool:
        return not one.is_beginning and wanted.goes_on(one.tokens, one.after)

    def _spared(self, wanted: _Wanted, one: _Kept) -> int:
        """Tokens that `one` spares the prompt."""
        session, goes_on = one.session, self._goes_on(wanted, one)
        return session.can_keep(wanted.reusable(one.tokens, session.computed, session.prompted, goes_on=goes_on))

    def _worth(self, one: _Kept) -> tuple[bool, float]:
        """The one of least worth goes first; those that give memory back go before all others."""
        links, freed = one.tokens.links, one.session.nbytes_alone
        # Others have its first pages too.
        pages = bisect_left(range(len(links)), True, key=lambda at: self._links[links[at]] == 1)
        spares = (len(one.tokens) - pages * PAGE_TOKENS) / max(freed, 1)
        return freed == 0, one.clock + (1 + min(one.uses, _MOST_USES)) * len(one.tokens) * spares

    def _keep_beginning(self, made: _Kept, pages: int) -> None:
        """Keep the first pages of `made`, a prompt's, beside it: they stay when it goes."""
        length = pages * PAGE_TOKENS
        if not 0 < length <= made.session.prompted:
            return
        tokens = Tokens(made.tokens.ids[:length], made.tokens.links[:pages])
        if any(one.is_beginning and one.tokens.links == tokens.links for one in self._kept):
            return
        session = self._new_session()
        session.copy_prefix(made.session, length)
        if session.computed == length:
            self._add(_Kept(session=session, tokens=tokens, is_beginning=True, clock=self._clock))
        else:
            session.close()

    def _add(self, one: _Kept) -> None:
        self._kept.append(one)
        self._links.update(one.tokens.links)

    def _drop(self, one: _Kept) -> None:
        self._kept.remove(one)
        self._links -= Counter(one.tokens.links)
        one.session.close()

    def _let_go(self, one: _Kept) -> None:
        """Drop it from memory; what nothing else has goes to disk."""
        covered = any(_covers(other, one) for other in self._kept if other is not one)
        if self._parking is not None and not covered:
            self._parking.park(one.session, after=one.after)
        self._drop(one)

    def _recall(self, wanted: _Wanted) -> None:
        """Bring back from disk what spares the request more than anything in memory does."""
        if self._parking is None or self._budget == 0:
            return

        def spared(entry: Entry) -> int:
            if entry.computed > self._model.context:  # of a server that had more
                return 0
            goes_on = wanted.goes_on(entry.tokens, entry.after)
            tokens = wanted.reusable(entry.tokens, entry.computed, entry.pure, goes_on=goes_on)
            return tokens if entry.in_parts or tokens == entry.computed else 0

        best = max((self._spared(wanted, one) for one in self._kept), default=0)
        found = max(self._parking.entries, key=spared, default=None)
        if found is None or spared(found) < best + MIN_PARKED_TOKENS:
            return
        session = self._new_session()
        while not self._parking.load(found, session):
            if found not in self._parking.entries or not self.make_room():
                session.close()
                return
        one = _Kept(session=session, tokens=found.tokens, after=found.after, clock=self._clock)
        one.is_beginning = found.after is None and found.pure == found.computed
        if not wanted.goes_on(found.tokens, found.after):  # its other tokens are on disk
            one.session, one.is_beginning, one.after = self._new_session(), True, None
            one.session.copy_prefix(session, spared(found))
            one.tokens = Tokens.of(one.session.tokens)
            session.close()
        self._add(one)


def _covers(one: _Kept, other: _Kept) -> bool:
    """True where `one` spares what the other does, but for a conversation that is taken up again."""
    computed = other.session.computed
    if one.tokens.shared_with(other.tokens) < computed or one.session.prompted < other.session.prompted:
        return False
    return not other.is_beginning or one.session.can_keep(computed) == computed


def turns_of(messages: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Digests of the conversations that `messages` may go on from: those that end with an answer. White space around a
    message does not count: clients cut it; nor does reasoning."""
    said, found = hashlib.sha256(), []
    for each in messages:
        calls = _calls(each.get("tool_calls", ()))
        plain = (each["role"], (each["content"] or "").strip(), each.get("name", ""), calls)
        said.update(json.dumps(plain).encode())
        if each["role"] == "assistant":
            found.append(said.digest())
    return found


def _calls(calls: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Name and arguments of each, which requests have as values and answers as texts."""
    functions = [call["function"] for call in calls]
    texts = [each if isinstance(each := one["arguments"], str) else json.dumps(each) for one in functions]
    return [(one["name"], _same(text)) for one, text in zip(functions, texts, strict=True)]


def _same(arguments: str) -> str:
    try:
        return json.dumps(load(arguments), sort_keys=True)
    except ValueError:
        return arguments
