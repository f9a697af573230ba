"""Sessions kept between requests, and what of them a new request may reuse. Knows no connection and no text.

The rule (design contract 2 makes a prompt's bits depend on the prompt alone):

- A prompt of more than K0 tokens is computed densely, whatever of it is reused. Any request may so reuse the tokens
  that its prompt shares with another one, as far as those were computed densely after nothing but such tokens: that
  changes no bit of its answer.
- An answer's own tokens were computed sparsely. They are reused only where the same conversation goes on: its earlier
  messages are those of the kept request and its answer, or the prompt begins with all the tokens of both. This is what
  `flashllm chat` does from turn to turn. A conversation that is no longer kept is computed again as a prompt, so the
  last bits of what follows may differ.
- What is parked on disk comes back with its bits, so the rule is the same for it.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashllm.generate.session import Session, common_prefix
from flashllm.parked.folder import Entry, ParkingFolder
from flashllm.replies.written import load

MIN_SHARED_TOKENS = 8  # fewer are not worth a copy
MIN_PARKED_TOKENS = 32  # that parking spares, more than memory does: fewer are not worth reading it


@dataclass(slots=True, kw_only=True)
class Place:
    """A session with a prompt's reusable tokens in it: where the answer is generated."""

    session: Session
    keep: int  # tokens of the prompt that the session holds
    pause: int = 0  # tokens of it that other prompts begin with too


@dataclass(slots=True, kw_only=True)
class _Kept:
    session: Session
    after: bytes | None  # digest of the conversation so far, its last answer included


class Conversations:
    """At most `limit` sessions, those used last; together they hold at most `max_tokens`. For one thread."""

    def __init__(
        self,
        new_session: Callable[[], Session],
        *,
        limit: int,
        max_tokens: int,
        is_prompt: Callable[[int], bool],
        parking: ParkingFolder | None = None,
    ) -> None:
        """`new_session` makes an empty one. `is_prompt`: the model's. What leaves memory goes to `parking`."""
        self._parking = parking
        self._new_session, self._limit, self._max_tokens = new_session, limit, max_tokens
        self._is_prompt = is_prompt
        self._kept: list[_Kept] = []  # that used last is last

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, ids: Sequence[int], turns: Sequence[bytes] = ()) -> Place:
        """A place to generate after the prompt `ids`. `turns` are the digests of the conversations it goes on from."""
        dense = self._is_prompt(len(ids))
        longest = len(ids) - 1  # the last token is computed always: its logits are wanted
        self._recall(ids, turns, dense=dense, longest=longest)
        # 1. The same conversation, going on.
        goes_on = [one for one in self._kept if one.after in turns or _begins_with(ids, one.session.tokens)]
        if goes_on:
            shared, one = max(
                ((one.session.shared_with(ids, longest), one) for one in goes_on), key=lambda pair: pair[0]
            )
            self._kept.remove(one)
            return Place(session=one.session, keep=shared)
        # 2. Another one that begins alike. Where its sliding windows have left more behind than can be copied, they
        # are left a state to go back to.
        session, kept = self._new_session(), [one.session for one in self._kept]
        alike = [(one.shared_with(ids, min(one.prompted, longest)), at) for at, one in enumerate(kept)]
        shared, best = max(alike, default=(0, 0))
        begun = max((common_prefix(one.tokens, ids, min(one.prompted, longest)) for one in kept), default=0)
        if not dense or begun < MIN_SHARED_TOKENS:
            return Place(session=session, keep=0)
        if shared >= MIN_SHARED_TOKENS:
            self._kept.append(self._kept.pop(best))
            session.copy_prefix(self._kept[-1].session, shared)
        return Place(session=session, keep=session.computed, pause=begun)

    def give_back(self, place: Place, after: bytes | None = None) -> None:
        """Keep the session of a request that ended, however it ended. `after`: digest of its conversation, if any."""
        session = place.session
        if session.computed == 0 or self._limit == 0:
            session.close()
            return
        self._kept.append(_Kept(session=session, after=after))
        while len(self._kept) > self._limit or self._held() > self._max_tokens:
            if not self.forget_oldest():
                return

    def forget_oldest(self) -> bool:
        """Free the memory of the session used longest ago; whether there was one."""
        if not self._kept:
            return False
        oldest = self._kept.pop(0)
        if self._parking is not None:
            self._parking.park(oldest.session, after=oldest.after)
        oldest.session.close()
        return True

    def _recall(self, ids: Sequence[int], turns: Sequence[bytes], *, dense: bool, longest: int) -> None:
        """Bring back from disk what spares the request more than anything in memory does."""
        if self._parking is None or self._limit == 0:
            return

        def spared(tokens: Sequence[int], shared: int, pure: int, after: bytes | None) -> int:
            if after in turns or _begins_with(ids, tokens):
                return shared if dense or pure < shared else 0
            return min(pure, shared) if dense else 0

        best = max(
            (
                spared(one.session.tokens, one.session.shared_with(ids, longest), one.session.prompted, one.after)
                for one in self._kept
            ),
            default=0,
        )

        def parked(entry: Entry) -> int:
            shared = common_prefix(entry.tokens, ids, min(entry.computed, longest))
            whole = entry.in_parts or shared == entry.computed
            return spared(entry.tokens, shared if whole else 0, entry.pure, entry.after)

        found = max(self._parking.entries, key=parked, default=None)
        if found is None or parked(found) < best + MIN_PARKED_TOKENS:
            return
        session = self._new_session()
        if self._parking.load(found, session):
            self._kept.append(_Kept(session=session, after=found.after))
        else:
            session.close()

    def close(self) -> None:
        """Forget all."""
        while self.forget_oldest():
            pass

    def _held(self) -> int:
        return sum(one.session.computed for one in self._kept)


def _begins_with(ids: Sequence[int], tokens: Sequence[int]) -> bool:
    return 0 < len(tokens) < len(ids) and list(ids[: len(tokens)]) == list(tokens)


def digest(messages: Sequence[Mapping[str, Any]]) -> bytes:
    """A conversation's identity. White space around a message does not count: clients cut it; nor does reasoning."""
    plain = [
        (each["role"], (each["content"] or "").strip(), each.get("name", ""), _calls(each.get("tool_calls", ())))
        for each in messages
    ]
    return hashlib.sha256(json.dumps(plain).encode()).digest()


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


def turns_of(messages: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Digests of the conversations that `messages` may go on from: those that end with an answer."""
    ends = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    return [digest(messages[: at + 1]) for at in ends]
