"""Generation as a stream of typed records: one for the prefill, one for each token, with times and bytes.

Chat, the command line, benchmarks and tests consume the same stream. A `Session` keeps its KV cache across turns: a new
turn computes only what is new. Whatever ends a stream early (an error, ctrl-C, a closed iterator) leaves the session as
it was after the last record.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from flashllm.attention import ContextFull
from flashllm.errors import UsageError
from flashllm.meter import StepTimes

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

    def __post_init__(self) -> None:
        checks = {
            "max_new_tokens": self.max_new_tokens >= 1,
            "temperature": 0 <= self.temperature < float("inf"),
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


class Detokenizer:
    """Token ids to text as they come; a piece is given out once no later token can change it."""

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._ids: list[int] = []
        self._start, self._shown_until = 0, 0  # ids from _start on are decoded; before _shown_until they are shown
        self._held = ""  # text that may be the beginning of a stop string
        self.stopped = False

    def push(self, token_id: int) -> str:
        """The text that became certain with this token."""
        self._ids.append(token_id)
        shown = self._decode(self._start, self._shown_until)
        whole = self._decode(self._start, len(self._ids))
        if whole.endswith("\ufffd") or len(whole) < len(shown):  # in the middle of a character
            return ""
        piece = whole[len(shown) :]
        self._start, self._shown_until = self._shown_until, len(self._ids)
        return self._release(piece)

    def finish(self) -> str:
        """What was held back, when no more tokens come."""
        shown = self._decode(self._start, self._shown_until)
        rest = self._held + self._decode(self._start, len(self._ids))[len(shown) :]
        self._held, self._shown_until = "", len(self._ids)
        return "" if self.stopped else rest

    def _decode(self, start: int, end: int) -> str:
        text: str = self._tokenizer.decode(self._ids[start:end], skip_special_tokens=True)
        return text

    def _release(self, piece: str) -> str:
        text, self._held = self._held + piece, ""
        ends = [text.index(stop) for stop in self._stop if stop in text]
        if ends:
            self.stopped = True
            return text[: min(ends)]
        keep = max((n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        if keep:
            text, self._held = text[:-keep], text[-keep:]
        return text


class Session:
    """One conversation with a loaded model: its tokens, its KV cache, and the streams that extend them."""

    def __init__(self, model: Any, tokenizer: Any, options: SamplingOptions | None = None) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.options = options if options is not None else SamplingOptions()
        self.stopped: Stopped | None = None
        self.messages: list[dict[str, str]] = []  # with a chat template: the conversation as it is rendered
        self.system: str | None = None
        self._cache = model.new_cache()
        self._tokens: list[int] = []  # in the context; the KV cache holds the first `_computed` of them
        self._computed = 0
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
        self._cache.reset()

    def stream(self, text: str, *, add_special: bool = True) -> Iterator[PrefillRecord | TokenRecord]:
        """Append `text` to the context and generate. Raises ContextFull, FlashIOError, ChecksumError."""
        ids = self.tokenizer(text, add_special_tokens=add_special)["input_ids"]
        yield from self._extend(ids)

    def stream_chat(self, user_text: str) -> Iterator[PrefillRecord | TokenRecord]:
        """One user turn: through the chat template where there is one, else as a continuation of the text so far."""
        if not self.has_chat_template:
            first = not self._tokens
            system = f"{self.system}\n" if first and self.system else ""
            yield from self.stream(system + user_text if first else "\n" + user_text, add_special=first)
            return
        before = list(self.messages)
        self.messages.append({"role": "user", "content": user_text})
        answer: list[str] = []
        try:
            yield from self._answer(answer)
        except ContextFull:
            self.messages = before
            raise
        finally:
            if answer or len(self.messages) > len(before):
                self.messages.append({"role": "assistant", "content": "".join(answer)})

    def _answer(self, answer: list[str]) -> Iterator[PrefillRecord | TokenRecord]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        ids = self.tokenizer.apply_chat_template(
            system + self.messages, add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]
        # What the rendered conversation shares with the context is kept; the rest is computed again.
        shared = 0
        while shared < min(len(ids) - 1, len(self._tokens)) and ids[shared] == self._tokens[shared]:
            shared += 1
        self._truncate(shared)
        for record in self._extend(ids[shared:]):
            if isinstance(record, TokenRecord):
                answer.append(record.text)
            yield record

    def _extend(self, new_ids: list[int]) -> Iterator[PrefillRecord | TokenRecord]:
        meter = self.model.engine.meter
        self.stopped = None
        pending = self._tokens[self._computed :] + list(new_ids)
        if not pending:
            raise UsageError("there is nothing to continue: the prompt has no tokens")
        if self._computed + len(pending) > self.context_limit:
            raise ContextFull(
                f"the context limit of {self.context_limit} tokens is reached: {self._computed} are in use and this turn "
                f"adds {len(pending)}; start a new conversation (/reset) or shorten the text"
            )
        meter.restart()
        reused = self._computed
        logits = self._forward(pending)
        self._tokens += new_ids
        yield PrefillRecord(
            tokens=len(pending),
            reused_tokens=reused,
            dense=len(pending) > self.model.engine.manifest.sparse_prefill_tokens,
            times=meter.take(),
        )
        detokenizer = Detokenizer(self.tokenizer, self.options.stop)
        processors = self._processors()
        ends = self._end_ids()
        for count in range(1, self.options.max_new_tokens + 1):
            token_id = self._choose(logits, processors)
            self._tokens.append(token_id)
            text = detokenizer.push(token_id)
            if token_id in ends:
                self.stopped = "eos"
            elif detokenizer.stopped:
                self.stopped = "stop"
            elif count == self.options.max_new_tokens:
                self.stopped = "length"
            elif self._computed == self.context_limit:
                self.stopped = "context"
            if self.stopped is not None:
                text += detokenizer.finish()
            yield TokenRecord(token_id=token_id, text=text, times=meter.take())
            if self.stopped is not None:
                return
            logits = self._forward([token_id])

    def _forward(self, ids: list[int]) -> torch.Tensor:
        """Logits [vocab] (fp32) after `ids`; they are in the KV cache afterwards, or nothing has changed."""
        try:
            output = self.model(torch.tensor([ids]), past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        except BaseException:
            self.model.engine.interrupt()
            self._truncate_cache(self._computed)
            raise
        self._computed += len(ids)
        logits: torch.Tensor = output.logits[0, -1].float()
        return logits

    def _truncate(self, length: int) -> None:
        self._tokens = self._tokens[:length]
        self._computed = min(self._computed, length)
        self._truncate_cache(self._computed)

    def _truncate_cache(self, length: int) -> None:
        """Layers may differ in length after an interrupted pass; afterwards none does."""
        for layer in self._cache.layers:
            layer.crop(min(0, length - layer.get_seq_length()))

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
        scores = processors(torch.tensor([self._tokens]), logits[None])[0]
        if self.options.temperature == 0:
            return int(scores.argmax())
        return int(torch.multinomial(scores.softmax(-1), 1, generator=self._generator))

    def _end_ids(self) -> set[int]:
        ends = self.model.generation_config.eos_token_id
        if ends is None:
            ends = self.tokenizer.eos_token_id
        return set(ends) if isinstance(ends, list) else {ends} - {None}
