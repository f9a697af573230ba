"""The parts of OpenAI's answers that files and connections share: log probabilities and reasons for an end."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from flashllm.generate.logprobs import TokenLogprobs
from flashllm.replies.parser import Event

FINISH = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}  # ours -> OpenAI's

TokenText = Callable[[int], str]  # a token's own text, special tokens too; U+FFFD for a part of a character


def chat_message(events: Iterable[Event]) -> dict[str, Any]:
    """The message of an assistant that said all of `events`."""
    whole = chat_delta(events)
    calls = whole.get("tool_calls", [])
    for call in calls:
        del call["index"]
    content = whole.get("content", None if calls else "")
    return {"role": "assistant", **whole, "content": content, "refusal": None}


def chat_delta(events: Iterable[Event]) -> dict[str, Any]:
    """The parts that `events` add to a message: text, reasoning, calls, each where there is any."""
    delta: dict[str, Any] = {}
    calls: list[dict[str, Any]] = delta.setdefault("tool_calls", [])
    for event in events:
        match event.kind:
            case "text" | "reasoning":
                name = "content" if event.kind == "text" else "reasoning_content"
                delta[name] = delta.get(name, "") + event.text
            case "call":
                function = {"name": event.text, "arguments": ""}
                calls.append({"index": event.index, "id": event.id, "type": "function", "function": function})
            case "arguments":
                if not calls or calls[-1]["index"] != event.index:
                    calls.append({"index": event.index, "function": {"arguments": ""}})
                calls[-1]["function"]["arguments"] += event.text
    if not calls:
        del delta["tool_calls"]
    return delta


def finish_reason(reason: str, called: bool) -> str:
    """OpenAI's name for why an answer ended, which has `called` a tool or not."""
    return "tool_calls" if called and FINISH[reason] == "stop" else FINISH[reason]


def chat_logprobs(tokens: Sequence[TokenLogprobs] | None, text: TokenText) -> Any:
    if tokens is None:
        return None
    return {"content": [token_entry(token, text) for token in tokens], "refusal": None}


def token_entry(token: TokenLogprobs, text: TokenText) -> dict[str, Any]:
    """One token, with the likeliest ones at its place."""
    return {
        **_one(token.token_id, token.logprob, text),
        "top_logprobs": [_one(each, logprob, text) for each, logprob in token.top],
    }


def _one(token_id: int, logprob: float, text: TokenText) -> dict[str, Any]:
    token = text(token_id)
    # Of a token that is a part of a character the text is U+FFFD, and its bytes are not known here.
    return {"token": token, "logprob": _finite(logprob), "bytes": None if "\ufffd" in token else list(token.encode())}


def completion_logprobs(
    tokens: Sequence[TokenLogprobs] | None, text: TokenText, *, first_id: int | None = None, offset: int = 0
) -> Any:
    """Log probabilities of a completion's tokens. `first_id`: an echoed prompt's first token, which has none.

    `offset` characters of the answer's text stand before these tokens.
    """
    if tokens is None:
        return None
    texts = [text(token.token_id) for token in tokens]
    values: list[float | None] = [_finite(token.logprob) for token in tokens]
    # Of tokens with the same text the likeliest stays: it comes last here.
    tops: list[dict[str, float] | None] = [
        {text(each): _finite(logprob) for each, logprob in reversed(token.top)} for token in tokens
    ]
    if first_id is not None:
        texts, values, tops = [text(first_id), *texts], [None, *values], [None, *tops]
    offsets = [offset]
    for each in texts:
        offsets.append(offsets[-1] + len(each))
    return {"tokens": texts, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets[:-1]}


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes -9999 for a token that cannot come."""
    return max(logprob, -9999.0)
