"""Generation as a stream of typed records: one for the prefill, one for each token, with times and bytes.

Chat, the command line, benchmarks and tests consume the same stream. A `Session` keeps its KV cache across turns: a new
turn computes only what is new. Whatever ends a stream early (an error, ctrl-C, a closed iterator) leaves the session as
it was after the last record.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import torch
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from flashllm.engine.attention import ContextFull
from flashllm.engine.meter import StepTimes
from flashllm.errors import UsageError
from flashllm.generate.detokenizer import Detokenizer

Stopped = Literal["eos", "length", "stop", "context"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How the next token is chosen. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 leave the distribution whole."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False  # go on after an end token: for measurements of a given length

    def __post_init__(self) -> None:
        checks = {
            "max_new_tokens": self.max_new_tokens >= 1,
            "temperature": self.temperature == 0 or 1e-6 <= self.temperature < float("inf"),  # below, fp32 overflows
            "top_k": self.top_k >= 0,
            "top_p": 0 < self.top_p <= 1,
            "repetition_penalty": 0 < self.repetition_penalty < float("inf"),
            "stop": all(self.stop),
        }
        for name, good in checks.items():
            if not good:
                raise UsageError(f"--{name.replace('_', '-')} cannot be {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRecord:
    """The new tokens of a turn, computed together."""

    tokens: int  # new
    reused_tokens: int  # already in the KV cache
    dense: bool  # more than K0 new tokens: every neuron was computed
    times: StepTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRecord:
    """One generated token. Its time runs from the record before it; the first one's pass is the prefill's."""

    token_id: int
    text: str  # what can be printed now; may be empty while a character or a stop string is incomplete
    times: StepTimes


class Session:
    """One conversation with a loaded model: its tokens, its KV cache, and the streams that extend them."""

    def __init__(self, model: Any, tokenizer: Any, options: SamplingOptions | None = None) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.options = options if options is not None else SamplingOptions()
        self.stopped: Stopped | None = None
        self.messages: list[dict[str, str]] = []  # with a chat template: the conversation as it is rendered
        self.system: str | None = None
        self._cache: Any = model.new_cache()
        self._tokens: list[int] = []  # in the context; the KV cache holds the first `_computed` of them
        self._computed = 0
        self._turn = 0  # which stream may extend the context
        self._generator = torch.Generator()
        if self.options.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(self.options.seed)

    @property
    def tokens(self) -> list[int]:
        """Ids of everything said so far."""
        return list(self._tokens)

    @property
    def context_limit(self) -> int:
        """Tokens the KV cache was planned for."""
        return int(self.model.engine.plan.context)

    @property
    def has_chat_template(self) -> bool:
        """Whether turns are rendered as a conversation; otherwise the model continues the text."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    def reset(self) -> None:
        """Forget the conversation; the system text stays."""
        self._tokens, self._computed, self.messages, self.stopped = [], 0, [], None
        self._turn += 1
        if self._cache is not None:
            self._truncate_cache()

    def close(self) -> None:
        """Free the KV cache for another session. The tokens and messages stay readable."""
        cache, self._cache = self._cache, None
        self._turn += 1
        if cache is not None:
            self.model.release_cache(cache)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def stream(self, text: str, *, add_special: bool = True) -> Iterator[PrefillRecord | TokenRecord]:
        """Append `text` to the context and generate. Raises ContextFull, FlashIOError, ChecksumError."""
        yield from self.stream_ids(self.tokenizer(text, add_special_tokens=add_special)["input_ids"])

    def stream_ids(self, ids: Sequence[int]) -> Iterator[PrefillRecord | TokenRecord]:
        """As `stream`, of text that is tokens already."""
        yield from self._extend(list(ids))

    def stream_chat(self, user_text: str) -> Iterator[PrefillRecord | TokenRecord]:
        """One user turn: through the chat template where there is one, else as a continuation of the text so far."""
        if not self.has_chat_template:
            first = not self._tokens
            system = f"{self.system}\n" if first and self.system else ""
            yield from self.stream(system + user_text if first else "\n" + user_text, add_special=first)
            return
        before = self.messages
        self.messages = [*before, {"role": "user", "content": user_text}]
        answer: list[str] | None = None  # none before the prompt is computed: until then nothing has changed
        try:
            for record in self._answer():
                answer = [] if answer is None else answer
                if isinstance(record, TokenRecord):
                    answer.append(record.text)
                yield record
        finally:
            if answer is None:
                self.messages = before
            else:
                self.messages.append({"role": "assistant", "content": "".join(answer)})

    def _answer(self) -> Iterator[PrefillRecord | TokenRecord]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        ids = self.tokenizer.apply_chat_template(
            system + self.messages, add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]
        # What the rendered conversation shares with the context is kept; the rest is computed again.
        shared = 0
        while shared < min(len(ids) - 1, len(self._tokens)) and ids[shared] == self._tokens[shared]:
            shared += 1
        yield from self._extend(ids[shared:], keep=shared)

    def _extend(self, new_ids: list[int], *, keep: int | None = None) -> Iterator[PrefillRecord | TokenRecord]:
        """Generate after the first `keep` tokens of the context (None: all of it) and `new_ids`."""
        if self._cache is None:
            raise UsageError("the session is closed")
        meter = self.model.engine.meter
        context = self._tokens[:keep]
        reused = min(self._computed, len(context))
        pending = context[reused:] + list(new_ids)
        if not pending:
            raise UsageError("there is nothing to continue: the prompt has no tokens")
        if reused + len(pending) > self.context_limit:
            raise ContextFull(
                f"the context limit of {self.context_limit} tokens is reached: {reused} are in use and this turn "
                f"adds {len(pending)}; start a new conversation (/reset) or shorten the text"
            )
        self.stopped = None
        self._turn = turn = self._turn + 1
        meter.restart()
        self._computed = reused
        self._truncate_cache()
        logits = self._forward(pending)
        self._tokens = context + list(new_ids)
        yield PrefillRecord(
            tokens=len(pending),
            reused_tokens=reused,
            dense=len(pending) > self.model.engine.manifest.sparse_prefill_tokens,
            times=meter.take(),
        )
        detokenizer = Detokenizer(self.tokenizer, self.options.stop)
        processors = self._processors()
        ends = set() if self.options.ignore_eos else self._end_ids()
        for count in range(1, self.options.max_new_tokens + 1):
            self._check_turn(turn)
            token_id = self._choose(logits, processors)
            self._tokens.append(token_id)
            text = detokenizer.push(token_id)
            stopped: Stopped | None = None
            if token_id in ends:
                stopped = "eos"
            elif detokenizer.stopped:
                stopped = "stop"
            elif count == self.options.max_new_tokens:
                stopped = "length"
            elif self._computed == self.context_limit:
                stopped = "context"
            if stopped is not None:
                text += detokenizer.finish()
                if detokenizer.stopped:
                    stopped = "stop"  # a stop string in front of a character that stayed incomplete
            self.stopped = stopped
            yield TokenRecord(token_id=token_id, text=text, times=meter.take())
            if stopped is not None:
                return
            self._check_turn(turn)
            logits = self._forward([token_id])

    def _check_turn(self, turn: int) -> None:
        if self._turn != turn:
            raise UsageError("this answer was ended by a newer turn, a reset or the session's end")

    def _forward(self, ids: list[int]) -> torch.Tensor:
        """Logits [vocab] (fp32) after `ids`; they are in the KV cache afterwards, or nothing has changed."""
        try:
            output = self.model(torch.tensor([ids]), past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        except BaseException:
            self._truncate_cache()
            raise
        self._computed += len(ids)
        logits: torch.Tensor = output.logits[0, -1].float()
        return logits

    def _truncate_cache(self) -> None:
        """Layers may differ in length after an interrupted pass; afterwards none does."""
        for layer in self._cache.layers:
            layer.crop(min(0, self._computed - layer.get_seq_length()))

    def _processors(self) -> LogitsProcessorList:
        """In the order of transformers' `generate`."""
        options, processors = self.options, LogitsProcessorList()
        if options.repetition_penalty != 1.0:
            processors.append(RepetitionPenaltyLogitsProcessor(options.repetition_penalty))
        if options.temperature > 0:
            processors.append(TemperatureLogitsWarper(options.temperature))
            if options.top_k > 0:
                processors.append(TopKLogitsWarper(options.top_k))
            if options.top_p < 1:
                processors.append(TopPLogitsWarper(options.top_p))
        return processors

    def _choose(self, logits: torch.Tensor, processors: LogitsProcessorList) -> int:
        context: Any = torch.tensor([self._tokens])
        scores = processors(context, logits[None])[0]
        if self.options.temperature == 0:
            return int(scores.argmax())
        return int(torch.multinomial(scores.softmax(-1), 1, generator=self._generator))

    def _end_ids(self) -> set[int]:
        ends = self.model.generation_config.eos_token_id
        if ends is None:
            ends = self.tokenizer.eos_token_id
        return set(ends) if isinstance(ends, list) else {ends} - {None}
