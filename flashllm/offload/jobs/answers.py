"""The form of answers: OpenAI batch output lines for batch lines, a plain object for prompt lines. Knows no file."""

import time
from typing import Any

from flashllm.api.answers import (
    FINISH,
    TokenText,
    chat_logprobs,
    chat_message,
    completion_logprobs,
    finish_reason,
    token_entry,
)
from flashllm.offload.jobs.lines import BatchFile, Line
from flashllm.offload.jobs.sequences import Sequence as TokenSequence

ID_PREFIX = "batch_req_"
BAD_REQUEST, FAILED = 400, 500
_ERRORS = {BAD_REQUEST: ("invalid_request_error", "invalid_request"), FAILED: ("server_error", "generation_failed")}


def answer(batch: BatchFile, sequence: TokenSequence, *, model: str, token_text: TokenText) -> Any:
    """The output object of a line's finished sequence. `token_text` gives a token's own text, for log probabilities."""
    line, request = batch.lines[sequence.key], batch.request(sequence.key)
    if sequence.finish_reason is None:
        raise ValueError("the sequence is not finished")
    if sequence.finish_reason == "error":
        return failure(line, FAILED, sequence.error or "the sequence failed")
    counts = {"prompt_tokens": len(sequence.prompt), "completion_tokens": len(sequence.output)}
    content: dict[str, Any] = {"text": sequence.text}
    if isinstance(next(iter(request.prompt), None), int):  # without a tokenizer they are the whole answer
        content["token_ids"] = list(sequence.output)
    if not line.is_batch:
        plain: dict[str, Any] = {"id": ID_PREFIX + line.identity, "custom_id": line.custom_id, **content}
        plain |= {"finish_reason": FINISH[sequence.finish_reason], **counts}
        if sequence.logprobs is not None:
            plain["logprobs"] = [token_entry(each, token_text) for each in sequence.logprobs]
        return plain
    chat = request.kind == "chat"
    said = sequence.said()
    if chat:
        content = {"message": chat_message(said)}
    logprobs = (chat_logprobs if chat else completion_logprobs)(sequence.logprobs, token_text)
    finish = finish_reason(sequence.finish_reason, any(event.kind == "call" for event in said))
    body = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{line.identity}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, **content, "logprobs": logprobs, "finish_reason": finish}],
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
