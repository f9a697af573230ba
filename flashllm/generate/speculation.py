"""Passes over several tokens of an answer: drafts, which the pass verifies (paper A, section 5.2), or certain tokens.

The tokens are those of decoding alone, greedy or sampled: the same draws choose among the same logits, and a draft only
says which logits to compute ahead. What turns out wrong is cut from the KV cache, and the neuron caches never learn of
it. How many tokens are drafted is `flashllm.generate.depth`'s; who drafts, a `Drafter`'s.
"""

import contextlib
import time
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from flashllm.config import RunConfig
from flashllm.engine.model import Model
from flashllm.engine.state import SequenceState
from flashllm.errors import ContextFull
from flashllm.generate.depth import DepthGate
from flashllm.generate.lookup import PromptLookup


class Drafter(Protocol):
    """Guesses what comes next."""

    @property
    def priors(self) -> Sequence[float]:
        """For each kind of its drafts, the share of tokens expected to be right."""

    @property
    def prompt_s(self) -> float:
        """Seconds of the last draft that went into a prompt, and will not be spent again."""

    def look(self, tokens: "array[int]", most: int) -> tuple[int, int]:
        """(kind, tokens) of the draft that could be made after `tokens`, of at most `most` tokens."""

    def draft(self, tokens: "array[int]", count: int) -> list[int]:
        """The first `count` of them, after `look`. Fewer where there are no more."""


@dataclass(slots=True)
class SpeculationStats:
    """The worth of drafts since the model was loaded."""

    passes: int = 0  # after prompts
    drafts: int = 0  # passes with drafted tokens
    declined: int = 0  # drafts that could have been made and would not have paid
    judged_by_place: list[int] = field(default_factory=list)  # in a draft: tokens that a choice was compared with
    right_by_place: list[int] = field(default_factory=list)  # those of them that were chosen

    def count(self, accepted: int, rejected: bool) -> None:
        """A draft of which so many tokens were right, before one that was wrong where `rejected`."""
        for place in range(accepted + rejected):
            if place == len(self.judged_by_place):
                self.judged_by_place.append(0)
                self.right_by_place.append(0)
            self.judged_by_place[place] += 1
            self.right_by_place[place] += place < accepted


class Speculation:
    """Who drafts for a model, and what that was worth. All sessions of the model may share it, one at a time."""

    def __init__(self, drafter: Drafter, most: int) -> None:
        """`most`: drafted tokens of a pass (`Model.most_drafted`)."""
        self._drafter = drafter
        self.gate = DepthGate(most, drafter.priors)
        self.stats = SpeculationStats()

    def draft(self, tokens: "array[int]", most: int) -> tuple[int, list[int], float]:
        """(kind, ids, seconds) of what to verify behind the last of `tokens`; no ids where none pay."""
        began = time.perf_counter()
        kind, available = self._drafter.look(tokens, min(most, self.gate.most)) if most > 0 else (0, 0)
        depth = self.gate.choose(kind, available)
        if not depth:
            self.stats.declined += available > 0
            return kind, [], 0.0
        drafted = self._drafter.draft(tokens, depth)
        return kind, drafted, max(0.0, time.perf_counter() - began - self._drafter.prompt_s)

    def passed(self, width: int, seconds: float, drafting_s: float) -> None:
        """A pass over `width` tokens, all but one drafted."""
        self.stats.passes += 1
        self.stats.drafts += width > 1
        self.gate.passed(width, seconds, drafting_s)

    def judged(self, kind: int, accepted: int, rejected: bool) -> None:
        """Count what became of the last draft."""
        self.stats.count(accepted, rejected)
        self.gate.judged(kind, accepted, rejected)


def speculation_of(config: RunConfig, model: Model, draft: Drafter | None = None) -> Speculation | None:
    """The speculation that `config` asks for, with the draft model if there is one; None where nothing is drafted."""
    if config.speculate == "off" or model.most_drafted < 1:
        return None
    return Speculation(PromptLookup() if draft is None else draft, model.most_drafted)


class Decoding:
    """The logits after each token of an answer, some of them computed ahead.

    `tokens` is the context, which the caller appends chosen tokens to. Until `settle` the sequence may hold drafted
    tokens beyond those.
    """

    def __init__(
        self, model: Model, sequence: SequenceState, tokens: "array[int]", speculation: Speculation | None
    ) -> None:
        self._model, self._sequence, self._tokens, self._speculation = model, sequence, tokens, speculation
        self._ahead: deque[tuple[int, NDArray[np.float32]]] = deque()  # a drafted token and the logits after it
        self._kind, self._accepted, self._drafted = 0, 0, 0  # of the last draft
        self._certain = False  # the last draft was no guess
        self._width = 0

    def take_width(self) -> int:
        """Tokens of the pass since the last call; 0 where there was none."""
        width, self._width = self._width, 0
        return width

    def after(self, token_id: int, more: int, *, certain: Iterable[int] = ()) -> NDArray[np.float32]:
        """Logits [vocab] after `token_id`, the last of the tokens; at most `more` tokens will be asked for after it.

        `certain` are tokens that will be chosen next.
        """
        if self._ahead and self._ahead[0][0] == token_id:
            self._accepted += 1
            return self._ahead.popleft()[1]
        self.settle(rejected=bool(self._ahead))
        foreseen = list(certain)
        if (self._speculation is None and not foreseen) or self._model.most_drafted < 1:
            self._width = 1
            logits: NDArray[np.float32] = self._model.step([(self._sequence, [token_id])])[0]
            return logits
        most = min(more, self._model.context - self._sequence.length - 1, self._model.most_drafted)
        self._certain = bool(foreseen)
        if foreseen:
            return self._compute(token_id, foreseen[: max(most, 0)])
        assert self._speculation is not None
        return self._verify(self._speculation, token_id, most)

    def settle(self, *, rejected: bool = False) -> None:
        """Drop what was drafted and not chosen. `rejected`: another token was; else the answer ended before."""
        if not self._drafted:
            return
        wrong, accepted = len(self._ahead), self._accepted
        self._ahead.clear()
        self._drafted = self._accepted = 0
        self._model.accept(self._sequence, accepted)
        if wrong:
            self._sequence.keep(self._sequence.length - wrong)
        if self._speculation is not None and not self._certain:
            self._speculation.judged(self._kind, accepted, rejected)

    def _verify(self, speculation: Speculation, token_id: int, most: int) -> NDArray[np.float32]:
        kind, drafted, drafting_s = speculation.draft(self._tokens, most)
        self._kind, began = kind, time.perf_counter()
        logits = self._compute(token_id, drafted)
        speculation.passed(self._width, time.perf_counter() - began, drafting_s)
        return logits

    def _compute(self, token_id: int, drafted: list[int]) -> NDArray[np.float32]:
        rows = None
        if drafted:
            # Where other sequences have the memory that drafted tokens would take, none are.
            with contextlib.suppress(ContextFull):
                rows = self._model.step([(self._sequence, [token_id, *drafted])], all_logits=True, drafted=len(drafted))
        if rows is None:
            drafted, rows = [], self._model.step([(self._sequence, [token_id])])
        self._width, self._drafted = 1 + len(drafted), len(drafted)
        self._ahead.extend(zip(drafted, rows[1:], strict=True))
        return np.asarray(rows[0])
