"""OpenAI's answers, whole and in chunks, from the events of a job. Knows no connection and no thread."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flashllm.api.answers import TokenText, chat_delta, chat_logprobs, chat_message, completion_logprobs, finish_reason
from flashllm.generate.logprobs import TokenLogprobs
from flashllm.generate.session import PrefillRecord, TokenRecord
from flashllm.replies.parser import Event as Said
from flashllm.serve.bodies import Asked
from flashllm.serve.worker import Began, Chosen, Ended

Memory = Callable[[], Mapping[str, int]]  # bytes: "used" now, and the "limit"


@dataclass(slots=True)
class _Choice:
    """A choice as far as it is known."""

    said: list[Said] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    first_id: int | None = None  # the echoed prompt's first token, where the prompt is scored
    new_tokens: int = 0
    shown_chars: int = 0  # text before the next chunk's log probabilities
    finish: str | None = None


class Form:
    """The answer to one request, of a job's events."""

    def __init__(
        self,
        asked: Asked,
        *,
        answer_id: str,
        model: str,
        prompts: list[list[int]],
        decode: Callable[[list[int]], str],
        token_text: TokenText,
        memory: Memory,
    ) -> None:
        """`prompts` are the token ids of each choice; `decode` makes text of ids, `token_text` of one id."""
        self._asked, self._prompts = asked, prompts
        self._decode, self._token_text, self._memory = decode, token_text, memory
        chat = asked.kind == "chat"
        self._head = {
            "id": answer_id,
            "object": ("chat.completion.chunk" if asked.stream else "chat.completion") if chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._choices = [_Choice() for _ in prompts]
        self._cached_tokens = 0

    def take(self, event: Began | Chosen | Ended) -> dict[str, Any] | None:
        """Count an event; the chunk that it makes in a stream, if any."""
        choice = self._choices[event.index]
        match event:
            case Began(index, record):
                return self._begin(index, choice, record)
            case Chosen(index, record, said):
                return self._token(index, choice, record, said)
            case Ended(index, reason, said):
                choice.said += said
                choice.finish = finish_reason(reason, any(each.kind == "call" for each in choice.said))
                return self._chunk(index, choice, chat_delta(said) if self._asked.kind == "chat" else "", [])

    def whole(self) -> dict[str, Any]:
        """The answer of a request that is not a stream."""
        choices = []
        for index, choice in enumerate(self._choices):
            logprobs = self._logprobs(choice, choice.logprobs, choice.first_id)
            answer: dict[str, Any] = {"index": index}
            if self._asked.kind == "chat":
                answer["message"] = chat_message(choice.said)
            else:
                answer["text"] = "".join(each.text for each in choice.said)
            choices.append({**answer, "logprobs": logprobs, "finish_reason": choice.finish})
        return {**self._head, "choices": choices, "usage": self.usage()}

    def waiting(self) -> dict[str, Any] | None:
        """A chunk that says nothing, where the request asks for the prompt's progress."""
        if not self._asked.return_progress:
            return None
        return self._chunk(0, self._choices[0], {} if self._asked.kind == "chat" else "", [])

    def last(self) -> dict[str, Any] | None:
        """The chunk with the usage, where the request asks for it. No other chunk has one: clients rely on that."""
        return {**self._head, "choices": [], "usage": self.usage()} if self._asked.include_usage else None

    def usage(self) -> dict[str, Any]:
        prompt = sum(map(len, self._prompts))
        new = sum(choice.new_tokens for choice in self._choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
        }

    def _begin(self, index: int, choice: _Choice, record: PrefillRecord) -> dict[str, Any] | None:
        self._cached_tokens += record.reused_tokens
        text, scores = "", list(record.logprobs or ())
        if self._asked.echo:
            text = self._echoed(index)
            choice.said.append(Said("text", text))
            if record.logprobs is not None:
                choice.first_id = self._prompts[index][0]
                choice.logprobs += scores
        if self._asked.kind == "chat":
            return self._chunk(index, choice, {"role": "assistant", "content": ""}, [], record)
        if not text and not self._asked.include_timings:
            return None
        return self._chunk(index, choice, text, scores, record, first_id=choice.first_id)

    def _token(self, index: int, choice: _Choice, record: TokenRecord, said: tuple[Said, ...]) -> dict[str, Any] | None:
        choice.new_tokens += 1
        choice.said += said
        scores = [] if record.logprobs is None else [record.logprobs]
        choice.logprobs += scores
        content: Any = chat_delta(said) if self._asked.kind == "chat" else record.text
        if not content and not scores and not self._asked.include_timings:
            return None  # in the middle of a character, or of a mark
        return self._chunk(index, choice, content, scores, record)

    def _chunk(
        self,
        index: int,
        choice: _Choice,
        content: Any,
        scores: list[TokenLogprobs],
        record: PrefillRecord | TokenRecord | None = None,
        *,
        first_id: int | None = None,
    ) -> dict[str, Any]:
        name = "delta" if self._asked.kind == "chat" else "text"
        logprobs = self._logprobs(choice, scores, first_id) if scores or first_id is not None else None
        if isinstance(content, str):
            choice.shown_chars += len(content)
        one = {"index": index, name: content, "logprobs": logprobs, "finish_reason": choice.finish}
        chunk: dict[str, Any] = {**self._head, "choices": [one]}
        if self._asked.include_timings and record is not None:
            chunk["timings"] = self._timings(record)
        return chunk

    def _logprobs(self, choice: _Choice, scores: list[TokenLogprobs], first_id: int | None) -> Any:
        if self._asked.requests[0].logprobs is None:
            return None
        if self._asked.kind == "chat":
            return chat_logprobs(scores, self._token_text)
        offset = choice.shown_chars if self._asked.stream else 0
        return completion_logprobs(scores, self._token_text, first_id=first_id, offset=offset)

    def _echoed(self, index: int) -> str:
        prompt = self._asked.requests[index].prompt
        return prompt if isinstance(prompt, str) else self._decode(self._prompts[index])

    def _timings(self, record: PrefillRecord | TokenRecord) -> dict[str, Any]:
        """Parts of the record's time, in ms; bytes; neurons; and the memory now."""
        timings: dict[str, Any] = dataclasses.asdict(record.times)
        if isinstance(record, PrefillRecord):
            timings["prompt_tokens"], timings["cached_tokens"] = record.tokens, record.reused_tokens
        memory = self._memory()
        return {**timings, "memory_bytes": memory["used"], "memory_limit_bytes": memory["limit"]}
