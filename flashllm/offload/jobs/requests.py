"""One line of a batch file to one request: its name, its body, and the form of its answer.

Lines are OpenAI batch lines for `/v1/chat/completions` and `/v1/completions`, objects with a "prompt", or plain text.
What a body means is in `flashllm.api.requests`. Knows no model and no file.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

from flashllm.api.fields import BadRequest, json_object
from flashllm.api.fields import text as checked_text
from flashllm.api.requests import ENDPOINTS, SEED_MASK, Kind, Request, parse_body
from flashllm.base.checks import short
from flashllm.generate.sampling import SamplingOptions

MAX_CUSTOM_ID_CHARS = 512


def parse_request(raw: bytes, number: int, *, text: bool, max_new_tokens: int) -> Request:
    """The request in the line `raw` (without its line end), line `number` of its file. BadRequest for anything else.

    `max_new_tokens` are those of a line that does not say; fewer where the context is shorter. With `text` the line is
    a prompt as it stands. A line without a custom_id has "line-NUMBER"; one without a temperature gets the likeliest
    tokens, where OpenAI's service would draw at temperature 1.
    """
    if text:
        try:
            prompt = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadRequest(f"is not UTF-8 at byte {error.start}") from None
        return _request({"prompt": prompt}, "prompt", f"line-{number}", max_new_tokens)
    try:
        value = json_object(raw, "the line")
    except BadRequest as error:
        raise BadRequest(str(error).removeprefix("the line").lstrip(": ")) from None
    custom_id = _custom_id(value, number)
    if any(name in value for name in ("body", "url", "method")):
        return _of_batch_line(value, custom_id, max_new_tokens)
    if "prompt" in value:
        return _request(value, "prompt", custom_id, max_new_tokens)
    raise BadRequest('has neither a "prompt" nor a "body"')


def _of_batch_line(value: Mapping[str, Any], custom_id: str, max_new_tokens: int) -> Request:
    for name in value:
        if name not in ("custom_id", "method", "url", "body"):
            raise BadRequest(f"the field {name[:80]!r} is unknown besides custom_id, method, url and body")
    if "custom_id" not in value:
        raise BadRequest("custom_id is missing")
    if value.get("method", "POST") != "POST":
        raise BadRequest(f"method must be POST, not {short(value['method'])}")
    url = value.get("url")
    kind = ENDPOINTS.get(url) if isinstance(url, str) else None
    if kind is None:
        raise BadRequest(f"url must be {' or '.join(ENDPOINTS)}, not {short(url)}")
    body = value.get("body")
    if not isinstance(body, dict):
        raise BadRequest("body must be an object")
    return _request(body, kind, custom_id, max_new_tokens)


def _request(body: Mapping[str, Any], kind: Kind, custom_id: str, max_new_tokens: int) -> Request:
    options = SamplingOptions(max_new_tokens=max_new_tokens, temperature=0.0, seed=own_seed(0, custom_id))
    return parse_body(body, kind, custom_id=custom_id, defaults=options)


def own_seed(seed: int, custom_id: str) -> int:
    """A line's own random seed: the same in every run and on every machine, whatever lines are around it."""
    return int.from_bytes(hashlib.sha256(f"{seed}\0{custom_id}".encode()).digest()[:8], "little") & SEED_MASK


def _custom_id(value: Mapping[str, Any], number: int) -> str:
    custom_id = value.get("custom_id")
    if custom_id is None:
        return f"line-{number}"
    if checked_text("custom_id", custom_id) == "" or len(custom_id) > MAX_CUSTOM_ID_CHARS:
        raise BadRequest(f"custom_id must have from 1 to {MAX_CUSTOM_ID_CHARS} characters")
    return str(custom_id)
