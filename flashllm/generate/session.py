"""Generation as a stream of typed records: one for the prefill, one for each token, with times and bytes.

Chat, the command line, benchmarks and tests consume the same stream. A `Session` keeps its KV cache across turns: a new
turn computes only what is new. Whatever ends a stream early (an error, ctrl-C, a closed iterator) leaves the session as
it was after the last record.
"""

from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flashllm.base.files import Closing
from flashllm.engine.meter import StepTimes
from flashllm.engine.model import Model
from flashllm.engine.state import SequenceState
from flashllm.errors import ContextFull, UsageError
from flashllm.generate.answer import Answer, Stopped
from flashllm.generate.detokenizer import Decoder
from flashllm.generate.grammar import Matcher
from flashllm.generate.logprobs import TokenLogprobs, logprobs_of
from flashllm.generate.sampling import Sampler, SamplingOptions
from flashllm.generate.speculation import Decoding, Speculation
from flashllm.generate.templates.chat_template import ChatTemplate
from flashllm.generate.tokenizer import Tokenizer

_SCORED_NBYTES = 32 << 20  # of the logits that a scored prompt has in memory at once


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRecord:
    """The new tokens of a turn, computed together."""

    tokens: int  # new
    reused_tokens: int  # already in the KV cache
    dense: bool  # more than K0 new tokens: every neuron was computed
    times: StepTimes
    logprobs: tuple[TokenLogprobs, ...] | None = None  # of a scored prompt's tokens, its first excepted


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRecord:
    """One generated token. Its time runs from the record before it; the first one's pass is the prefill's."""

    token_id: int
    text: str  # what can be printed now; may be empty while a character or a stop string is incomplete
    times: StepTimes
    logprobs: TokenLogprobs | None = None  # where the session lists them
    pass_tokens: int = 0  # of the pass in its time: 1, and those drafted; 0: an earlier pass foresaw it


def common_prefix(one: Sequence[object], other: Sequence[object], most: int) -> int:
    """How many of the first `most` items, tokens or characters, are alike."""
    return next((at for at in range(most) if one[at] != other[at]), most)


class Session(Closing):
    """One conversation with a loaded model: its tokens, its KV cache, and the streams that extend them.

    Several sessions of one model may be open; each pays for the tokens it has. With a `template` the turns of
    `stream_chat` are rendered as a conversation; without one the model continues the text. With `speculation` some
    tokens are computed ahead, which changes when they come and not which.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        options: SamplingOptions | None = None,
        *,
        template: ChatTemplate | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.options = options if options is not None else SamplingOptions()
        self.logprobs: int | None = None  # likeliest tokens listed with each chosen one; None: no log probabilities
        self.matcher: Matcher | None = None  # of the form that the next stream's answer must have
        self.stopped: Stopped | None = None
        self.messages: list[dict[str, str]] = []  # with a chat template: the conversation as it is rendered
        self.system: str | None = None
        self.speculation = speculation
        self._template = template
        self._decoder: Decoder = tokenizer
        self._tokens = array("q")  # in the context; the KV cache holds at least the first `_computed` of them
        self._computed = 0
        self._turn = 0  # which stream may extend the context
        self._sampler = Sampler(self.options.seed)
        self._sequence: SequenceState | None = model.new_sequence()

    @property
    def tokens(self) -> list[int]:
        """Ids of everything said so far."""
        return list(self._tokens)

    @property
    def computed(self) -> int:
        """Tokens whose keys and values are held: all of `tokens`, or all but the last."""
        return self._computed

    @property
    def prompted(self) -> int:
        """Tokens, from the first, that were computed as a prompt's after nothing but such tokens."""
        return min(self._open_sequence().prompted, self._computed)

    @property
    def context_limit(self) -> int:
        """Tokens the KV cache may grow to."""
        return self.model.context

    @property
    def has_chat_template(self) -> bool:
        """True where turns are rendered as a conversation; otherwise the model continues the text."""
        return self._template is not None

    @property
    def nbytes_alone(self) -> int:
        """Bytes that `close` gives back: those that no other session shares."""
        return 0 if self._sequence is None else self._sequence.nbytes_alone

    def mark(self, positions: Sequence[int]) -> None:
        """Let the next prompt leave what sliding windows hold there, to go back to."""
        self._open_sequence().mark(positions)

    def choose_by(
        self,
        options: SamplingOptions,
        *,
        logprobs: int | None = None,
        decoder: Decoder | None = None,
        matcher: Matcher | None = None,
    ) -> None:
        """From the next stream on: other options, a random state as of a new session, texts by `decoder`. `matcher` is
        the next stream's alone."""
        self.options, self.logprobs, self._decoder = options, logprobs, decoder or self.tokenizer
        self.matcher = matcher
        self._sampler = Sampler(options.seed)

    def can_keep(self, length: int) -> int:
        """How many of the first `length` computed tokens could be kept: fewer where a sliding window's are gone."""
        return self._open_sequence().can_keep(min(length, self._computed))

    def copy_prefix(self, other: "Session", length: int) -> None:
        """Become a copy of the first `length` computed tokens of `other`, a session of the same model, or of fewer.

        It takes no memory until one of the two goes on.
        """
        self.reset()
        sequence = self._open_sequence()
        sequence.copy_from(other._open_sequence())
        self._computed = sequence.keep(length)
        self._tokens = other._tokens[: self._computed]

    def save(self) -> list[list[NDArray[np.uint8]]]:
        """The bytes that the `computed` tokens left behind, to be kept elsewhere; valid until the next call."""
        sequence = self._open_sequence()
        if sequence.length > self._computed:
            self._computed = sequence.keep(self._computed)
        return sequence.save()

    def restore(
        self,
        tokens: Sequence[int],
        computed: int,
        pages: Sequence[int],
        fill: Callable[[list[list[NDArray[np.uint8]]]], None],
        *,
        prompted: int = 0,
    ) -> None:
        """Become a session that had these `tokens`, the first `computed` of them with the bytes that `fill` writes.
        `pages`: how many arrays each list of `save` had; `prompted`: as of the session that was saved. Raises
        ContextFull, UsageError where this model's sequences have no such pages, and what `fill` raises; this session is
        then empty."""
        self.reset()
        self._open_sequence().restore(computed, pages, fill, prompted=prompted)
        self._tokens, self._computed = array("q", tokens), computed

    def reset(self) -> None:
        """Forget the conversation; the system text stays."""
        self._tokens, self._computed, self.messages, self.stopped = array("q"), 0, [], None
        self._turn += 1
        if self._sequence is not None:
            self._sequence.keep(0)

    def close(self) -> None:
        """Free the KV cache. The tokens and messages stay readable."""
        sequence, self._sequence = self._sequence, None
        self._turn += 1
        if sequence is not None:
            sequence.close()

    def stream(self, text: str, *, add_special: bool = True) -> Iterator[PrefillRecord | TokenRecord]:
        """Append `text` to the context and generate. Raises ContextFull, FlashIOError, ChecksumError."""
        yield from self.stream_ids(self.tokenizer.encode(text, add_special=add_special))

    def stream_ids(self, ids: Sequence[int]) -> Iterator[PrefillRecord | TokenRecord]:
        """As `stream`, of text that is tokens already."""
        yield from self._extend(list(ids))

    def stream_prompt(
        self, ids: Sequence[int], *, keep: int = 0, scored: bool = False
    ) -> Generator[PrefillRecord | TokenRecord, None, None]:
        """Generate after the prompt `ids`, whose first `keep` tokens are the first of this session. What follows those
        is forgotten. Where they were all computed as a prompt's, the answer is that of `ids` alone: the others are
        computed as a prompt's, however few they are, if `ids` is one, and else all of them anew. With `scored` the
        prefill's record has the log probabilities of the prompt; nothing may be kept then."""
        if self._tokens[:keep].tolist() != list(ids[:keep]) or (scored and keep):
            raise UsageError("the prompt does not begin with the tokens that are to be kept, or is scored")
        alone, prompt = keep <= self.prompted, self.model.is_prompt(len(ids))
        if alone and not prompt:
            keep = 0
        yield from self._extend(list(ids[keep:]), keep=keep, dense=alone and prompt, scored=scored)

    def stream_chat(self, user_text: str) -> Generator[PrefillRecord | TokenRecord, None, None]:
        """One user turn: through the chat template where there is one, else as a continuation of the text so far."""
        if self._template is None:
            first = not self._tokens
            system = f"{self.system}\n" if first and self.system else ""
            yield from self.stream(system + user_text if first else "\n" + user_text, add_special=first)
            return
        before = self.messages
        self.messages = [*before, {"role": "user", "content": user_text}]
        answer: list[str] | None = None  # none before the prompt is computed: until then nothing has changed
        try:
            for record in self._answer(self._template):
                answer = [] if answer is None else answer
                if isinstance(record, TokenRecord):
                    answer.append(record.text)
                yield record
        finally:
            if answer is None:
                self.messages = before
            else:
                self.messages.append({"role": "assistant", "content": "".join(answer)})

    def _answer(self, template: ChatTemplate) -> Iterator[PrefillRecord | TokenRecord]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        # The template writes the special tokens itself.
        ids = self.tokenizer.encode(template.render(system + self.messages), add_special=False)
        # What the rendered conversation shares with the context is kept; the rest is computed again.
        shared = common_prefix(self._tokens, ids, min(len(ids) - 1, len(self._tokens)))
        yield from self._extend(ids[shared:], keep=shared)

    def _extend(
        self, new_ids: list[int], *, keep: int | None = None, dense: bool = False, scored: bool = False
    ) -> Iterator[PrefillRecord | TokenRecord]:
        """Generate after the first `keep` tokens of the context (None: all of it) and `new_ids`, which are computed as
        a prompt's if they are many, or `dense`."""
        sequence = self._open_sequence()
        meter, limit = self.model.meter, self.context_limit
        context = self._tokens[:keep]
        reused = min(self._computed, len(context))
        total = len(context) + len(new_ids)
        if total == reused:
            raise UsageError("there is nothing to continue: the prompt has no tokens")
        if total > limit:
            raise ContextFull(
                f"the context limit of {limit} tokens is reached: {reused} are in use and this turn "
                f"adds {total - reused}; shorten the text, or begin a new conversation"
            )
        # 1. The prompt. The sequence first drops what the new context does not share; nothing is said before the pass.
        self.stopped = None
        self._turn = turn = self._turn + 1
        meter.restart()
        self._computed = reused = sequence.keep(reused)
        pending = [*context[reused:], *new_ids]
        dense = dense or self.model.is_prompt(len(pending))
        logits, scores = self._compute_prompt(sequence, pending, scored=scored, dense=dense)
        self._tokens = context + array("q", new_ids)
        self._computed = len(self._tokens)  # last: after an interrupt in between it is too small, which costs only time
        yield PrefillRecord(
            tokens=total - reused, reused_tokens=reused, dense=dense, times=meter.take(), logprobs=scores
        )
        # 2. The answer, a token a step. The last token does not go through the model.
        decoding = Decoding(self.model, sequence, self._tokens, self.speculation)
        try:
            yield from self._answer_ids(decoding, logits, turn)
        finally:
            if self._turn == turn:
                decoding.settle()

    def _answer_ids(self, decoding: Decoding, logits: NDArray[np.float32], turn: int) -> Iterator[TokenRecord]:
        """The answer's tokens, the first by `logits`."""
        matcher, self.matcher = self.matcher, None
        answer = Answer(self.options, decoder=self._decoder, end_ids=self.tokenizer.end_ids, matcher=matcher)
        while True:
            self._check_turn(turn)
            token_id = self._sampler.choose(logits, self._tokens, self.options, matcher)
            listed = None if self.logprobs is None else logprobs_of(logits, token_id, self.logprobs)
            self._tokens.append(token_id)
            text = answer.push(token_id, is_full=self._computed == self.context_limit)
            self.stopped = answer.stopped
            yield TokenRecord(
                token_id=token_id,
                text=text,
                times=self.model.meter.take(),
                logprobs=listed,
                pass_tokens=decoding.take_width(),
            )
            if answer.stopped is not None:
                return
            self._check_turn(turn)
            logits = decoding.after(token_id, answer.left - 1, certain=() if matcher is None else matcher.forced)
            self._computed += 1

    def _compute_prompt(
        self, sequence: SequenceState, ids: list[int], *, scored: bool, dense: bool
    ) -> tuple[NDArray[np.float32], tuple[TokenLogprobs, ...] | None]:
        """Logits [vocab] after `ids`, and where they are scored the log probabilities of all but the first."""
        if not scored:
            return self.model.step([(sequence, ids)], as_prompt=dense)[0], None
        # In pieces, so that the logits stay few; computed alike, the pieces have the bits of the whole.
        size = max(1, _SCORED_NBYTES // (4 * self.model.vocab_size))
        scores: list[TokenLogprobs] = []
        for start in range(0, len(ids), size):
            piece = ids[start : start + size]
            rows = self.model.step([(sequence, piece)], all_logits=True, as_prompt=dense)
            for row, token_id in zip(rows, ids[start + 1 : start + 1 + len(piece)], strict=False):
                scores.append(logprobs_of(row, token_id, self.logprobs or 0))
            logits = rows[-1]
        return logits, tuple(scores)

    def _open_sequence(self) -> SequenceState:
        if self._sequence is None:
            raise UsageError("the session is closed")
        return self._sequence

    def _check_turn(self, turn: int) -> None:
        if self._turn != turn:
            raise UsageError("this answer was ended by a newer turn, a reset or the session's end")
