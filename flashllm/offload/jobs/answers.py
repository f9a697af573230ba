"""The form of answers: OpenAI batch output lines for batch lines, a plain object for prompt lines. Knows no file."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from flashllm.offload.jobs.lines import Line
from flashllm.offload.jobs.requests import Request
from flashllm.offload.jobs.sequences import Sequence as TokenSequence
from flashllm.offload.jobs.sequences import TokenLogprobs

ID_PREFIX = "batch_req_"
BAD_REQUEST, FAILED = 400, 500
_FINISH = {"eos": "stop", "stop": "stop", "length": "length"}  # ours -> OpenAI's
_ERRORS = {BAD_REQUEST: ("invalid_request_error", "invalid_request"), FAILED: ("server_error", "generation_failed")}

TokenText = Callable[[int], str]


def answer(line: Line, request: Request, sequence: TokenSequence, *, model: str, token_text: TokenText) -> Any:
    """The output object of a finished sequence. `token_text` gives a token's own text, for log probabilities."""
    if sequence.finish_reason is None:
        raise ValueError("the sequence is not finished")
    if sequence.finish_reason == "error":
        return failure(line, FAILED, sequence.error or "the sequence failed")
    finish = _FINISH[sequence.finish_reason]
    counts = {"prompt_tokens": len(sequence.prompt), "completion_tokens": len(sequence.output)}
    if not line.is_batch:
        plain: dict[str, Any] = {"id": ID_PREFIX + line.identity, "custom_id": line.custom_id, "text": sequence.text}
        plain |= {"finish_reason": finish, **counts}
        if sequence.logprobs is not None:
            plain["logprobs"] = [_token(each, token_text) for each in sequence.logprobs]
        return plain
    choice: dict[str, Any] = {"index": 0}
    if request.kind == "chat":
        choice["message"] = {"role": "assistant", "content": sequence.text, "refusal": None}
        choice["logprobs"] = _chat_logprobs(sequence.logprobs, token_text)
    else:
        choice["text"] = sequence.text
        choice["logprobs"] = _completion_logprobs(sequence.logprobs, token_text)
    choice["finish_reason"] = finish
    chat = request.kind == "chat"
    body = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{line.identity}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": {**counts, "total_tokens": sequence.length},
    }
    return _output(line, 200, body, None)


def failure(line: Line, status: int, message: str) -> Any:
    """The output object of a line that has no answer: `status` 400 where the request is at fault, else 500."""
    kind, code = _ERRORS[status]
    error = {"code": code, "message": message}
    if not line.is_batch:
        return {"id": ID_PREFIX + line.identity, "custom_id": line.custom_id, "error": {"status_code": status, **error}}
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return _output(line, status, body, error)


def _output(line: Line, status: int, body: Any, error: Any) -> Any:
    return {
        "id": ID_PREFIX + line.identity,
        "custom_id": line.custom_id,
        "response": {"status_code": status, "request_id": f"req_{line.identity}", "body": body},
        "error": error,
    }


def _chat_logprobs(tokens: Sequence[TokenLogprobs] | None, text: TokenText) -> Any:
    if tokens is None:
        return None
    return {"content": [_token(token, text) for token in tokens], "refusal": None}


def _token(token: TokenLogprobs, text: TokenText) -> dict[str, Any]:
    return {
        **_one(token.token_id, token.logprob, text),
        "top_logprobs": [_one(each, logprob, text) for each, logprob in token.top],
    }


def _one(token_id: int, logprob: float, text: TokenText) -> dict[str, Any]:
    token = text(token_id)
    # Of a token that is a part of a character the text is U+FFFD, and its bytes are not known here.
    return {"token": token, "logprob": _finite(logprob), "bytes": None if "\ufffd" in token else list(token.encode())}


def _completion_logprobs(tokens: Sequence[TokenLogprobs] | None, text: TokenText) -> Any:
    if tokens is None:
        return None
    texts = [text(token.token_id) for token in tokens]
    offsets = [0]
    for each in texts:
        offsets.append(offsets[-1] + len(each))
    return {
        "tokens": texts,
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": [
            # Of tokens with the same text the likeliest stays: it comes last here.
            {text(each): _finite(logprob) for each, logprob in reversed(token.top)}
            for token in tokens
        ],
        "text_offset": offsets[:-1],
    }


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes -9999 for a token that cannot come."""
    return max(logprob, -9999.0)
