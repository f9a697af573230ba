"""One line of a batch file to one request: its prompt, how its tokens are chosen, and the form of its answer.

Lines are OpenAI batch lines for `/v1/chat/completions` and `/v1/completions`, objects with a "prompt", or plain text. A
field that is known but not supported is refused by name unless its value asks for nothing. Knows no model and no file.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from flashllm.base.files import parse_json
from flashllm.errors import FormatError, UsageError
from flashllm.generate.sampling import SamplingOptions
from flashllm.offload.jobs.sequences import MAX_LOGPROBS

Kind = Literal["chat", "completion", "prompt"]
Message = dict[str, str]

MAX_DEPTH = 32  # of objects and lists in a line
MAX_CUSTOM_ID_CHARS = 512
MAX_STOPS = 16
MAX_STOP_CHARS = 1000
_ENDPOINTS: dict[str, Kind] = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_MESSAGE_KEYS = {"role", "content", "name"}
_SEED_MASK = 2**63 - 1  # OpenAI's seeds are signed, numpy's are not

# Fields that choose tokens, the same in every kind of line.
_SAMPLING = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop", "ignore_eos"),
    "logprobs",
)
_FIELDS: dict[Kind, frozenset[str]] = {
    "chat": frozenset((*_SAMPLING, "messages", "max_completion_tokens", "top_logprobs")),
    "completion": frozenset((*_SAMPLING, "prompt")),
    "prompt": frozenset((*_SAMPLING, "prompt", "custom_id")),
}
# Fields that change no answer.
_IGNORED = frozenset(
    ("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "stream_options")
)
# Fields of the interface that are not supported, with the values that ask for nothing. Absent and null are always such.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (False, True),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}


class BadRequest(Exception):
    """A line that is no request; the message says why.

    `custom_id` is the line's, where it could be read; `is_prompt` says that it is not a line of an OpenAI batch.
    """

    def __init__(self, message: str, custom_id: str | None = None, *, is_prompt: bool = False) -> None:
        super().__init__(message)
        self.custom_id, self.is_prompt = custom_id, is_prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What holds for lines that do not say. UsageError for a value that cannot be."""

    max_new_tokens: int = 256  # less where the context is shorter
    temperature: float = 0.0  # the likeliest token, where OpenAI's service would draw at temperature 1
    seed: int = 0  # of the job: every line has a seed of its own, made of this one and its custom_id

    def __post_init__(self) -> None:
        SamplingOptions(max_new_tokens=self.max_new_tokens, temperature=self.temperature, seed=self.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a line asks for. `prompt` is text, token ids, or the messages of a conversation."""

    custom_id: str
    kind: Kind
    prompt: str | tuple[int, ...] | tuple[Message, ...]
    options: SamplingOptions  # max_new_tokens is the default's where `max_new_given` is false
    max_new_given: bool
    logprobs: int | None


def parse_request(raw: bytes, number: int, *, text: bool, defaults: Defaults) -> Request:
    """The request in the line `raw` (without its line end), line `number` of its file. BadRequest for anything else.

    With `text` the line is a prompt as it stands. A line without a custom_id has "line-NUMBER".
    """
    if text:
        try:
            prompt = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadRequest(f"is not UTF-8 at byte {error.start}", is_prompt=True) from None
        return _request({"prompt": prompt}, "prompt", f"line-{number}", defaults)
    try:
        value = parse_json(raw, "the line")
    except FormatError as error:
        raise BadRequest(str(error).removeprefix("the line: ")) from None
    if _depth(value) > MAX_DEPTH:
        raise BadRequest(f"is nested more than {MAX_DEPTH} deep")
    if not isinstance(value, dict):
        raise BadRequest(f"must be a JSON object, not {type(value).__name__}")
    is_batch = any(name in value for name in ("body", "url", "method"))
    custom_id: str | None = None
    try:
        custom_id = _custom_id(value, number)
        if is_batch:
            return _of_batch_line(value, custom_id, defaults)
        if "prompt" in value:
            return _request(value, "prompt", custom_id, defaults)
        raise BadRequest('has neither a "prompt" nor a "body"')
    except BadRequest as error:
        raise BadRequest(str(error), custom_id, is_prompt=not is_batch) from None


def _of_batch_line(value: Mapping[str, Any], custom_id: str, defaults: Defaults) -> Request:
    for name in value:
        if name not in ("custom_id", "method", "url", "body"):
            raise BadRequest(f"the field {name[:80]!r} is unknown beside custom_id, method, url and body")
    if "custom_id" not in value:
        raise BadRequest("custom_id is missing")
    if value.get("method", "POST") != "POST":
        raise BadRequest(f"method must be POST, not {_short(value['method'])}")
    url = value.get("url")
    kind = _ENDPOINTS.get(url) if isinstance(url, str) else None
    if kind is None:
        raise BadRequest(f"url must be {' or '.join(_ENDPOINTS)}, not {_short(url)}")
    body = value.get("body")
    if not isinstance(body, dict):
        raise BadRequest("body must be an object")
    return _request(body, kind, custom_id, defaults)


def _request(body: Mapping[str, Any], kind: Kind, custom_id: str, defaults: Defaults) -> Request:
    body = {name: value for name, value in body.items() if value is not None}  # null is "not given", as upstream
    for name, value in body.items():
        if name in _UNSUPPORTED:
            if not any(type(value) is type(neutral) and value == neutral for neutral in _UNSUPPORTED[name]):
                raise BadRequest(f"{name}: {_short(value)} is not supported")
        elif name not in _FIELDS[kind] and name not in _IGNORED:
            raise BadRequest(f"the field {name[:80]!r} is unknown")
    options = _options(body, custom_id, defaults)
    prompt = _messages(body.get("messages")) if kind == "chat" else _prompt(body.get("prompt"))
    return Request(
        custom_id=custom_id,
        kind=kind,
        prompt=prompt,
        options=options,
        max_new_given="max_tokens" in body or "max_completion_tokens" in body,
        logprobs=_logprobs(body, kind),
    )


def _options(body: Mapping[str, Any], custom_id: str, defaults: Defaults) -> SamplingOptions:
    given: dict[str, Any] = {
        "max_new_tokens": defaults.max_new_tokens,
        "temperature": defaults.temperature,
        "seed": own_seed(defaults.seed, custom_id),
    }
    if len({body[name] for name in ("max_tokens", "max_completion_tokens") if type(body.get(name)) is int}) > 1:
        raise BadRequest("max_tokens and max_completion_tokens differ; give one of them")
    for name, field in (("max_tokens", "max_new_tokens"), ("max_completion_tokens", "max_new_tokens")):
        if name in body:
            given[field] = _integer(body, name, 1)
    for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
        if name in body:
            given[name] = _number(body, name)
    if "top_k" in body:
        given["top_k"] = max(_integer(body, "top_k", -1), 0)  # -1: all, as vLLM writes it
    if "seed" in body:
        given["seed"] = _integer(body, "seed", -(2**63)) & _SEED_MASK
    if "ignore_eos" in body:
        given["ignore_eos"] = _flag(body, "ignore_eos")
    if "stop" in body:
        given["stop"] = _stops(body["stop"])
    try:
        return SamplingOptions(**given)
    except UsageError as error:
        option, rest = str(error).split(" ", 1)  # "--top-p cannot be …", of the command line
        raise BadRequest(f"{option.removeprefix('--').replace('-', '_')} {rest}") from None


def own_seed(seed: int, custom_id: str) -> int:
    """A line's own random seed: the same in every run and on every machine, whatever lines are beside it."""
    return int.from_bytes(hashlib.sha256(f"{seed}\0{custom_id}".encode()).digest()[:8], "little") & _SEED_MASK


def _logprobs(body: Mapping[str, Any], kind: Kind) -> int | None:
    if kind != "chat":
        return _integer(body, "logprobs", 0, MAX_LOGPROBS) if "logprobs" in body else None
    wanted = "logprobs" in body and _flag(body, "logprobs")
    if "top_logprobs" in body:
        count = _integer(body, "top_logprobs", 0, MAX_LOGPROBS)
        if not wanted:
            raise BadRequest("top_logprobs needs logprobs: true")
        return count
    return 0 if wanted else None


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise BadRequest(f"stop must be a text or a list of at most {MAX_STOPS} texts")
    for stop in stops:
        if not _text("stop", stop) or len(stop) > MAX_STOP_CHARS:
            raise BadRequest(f"stop: a text must have from 1 to {MAX_STOP_CHARS} characters")
    return tuple(stops)


def _prompt(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        _text("prompt", value)
        if not value:
            raise BadRequest("prompt is empty")
        return value
    if isinstance(value, list) and value and all(isinstance(each, str | list) for each in value):
        raise BadRequest(f"prompt: {len(value)} prompts in a line are not supported; give each a line of its own")
    if not isinstance(value, list) or not value or not all(type(each) is int and each >= 0 for each in value):
        raise BadRequest("prompt must be a text or a list of token ids")
    return tuple(value)


def _messages(value: Any) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise BadRequest("messages must be a list of at least one message")
    return tuple(_message(message, f"messages[{place}]") for place, message in enumerate(value))


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise BadRequest(f"{where} must be an object")
    for name, value in message.items():
        if name not in _MESSAGE_KEYS and value is not None and value != []:
            raise BadRequest(f"{where}: {name[:80]!r} is not supported")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise BadRequest(f"{where}: role must be one of {', '.join(_ROLES)}, not {_short(role)}")
    result = {"role": _ROLES[role], "content": _content(message.get("content"), where)}
    if message.get("name") is not None:
        result["name"] = _text(f"{where}: name", message["name"])
    return result


def _content(content: Any, where: str) -> str:
    """A message's text. Parts are joined by line ends, as vLLM does for templates that expect one text."""
    if not isinstance(content, list):
        return _text(f"{where}: content", content)
    texts = []
    for part in content:
        if not isinstance(part, dict) or set(part) != {"type", "text"} or part["type"] != "text":
            kind = part.get("type") if isinstance(part, dict) else part
            raise BadRequest(f"{where}: a content part of type {_short(kind)} is not supported; only text is")
        texts.append(_text(f"{where}: text", part["text"]))
    return "\n".join(texts)


def _custom_id(value: Mapping[str, Any], number: int) -> str:
    custom_id = value.get("custom_id")
    if custom_id is None:
        return f"line-{number}"
    if _text("custom_id", custom_id) == "" or len(custom_id) > MAX_CUSTOM_ID_CHARS:
        raise BadRequest(f"custom_id must have from 1 to {MAX_CUSTOM_ID_CHARS} characters")
    return str(custom_id)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise BadRequest(f"{name} must be a text, not {_short(value)}")
    if any(0xD800 <= ord(character) <= 0xDFFF for character in value):
        raise BadRequest(f"{name} holds half a character (a lone surrogate)")
    return value


def _integer(body: Mapping[str, Any], name: str, low: int, high: int = 2**63 - 1) -> int:
    value = body[name]
    if type(value) is not int or not low <= value <= high:
        bounds = f"from {low} to {high}" if high < 2**62 else f"of at least {low}"
        raise BadRequest(f"{name} must be an integer {bounds}, not {_short(value)}")
    return value


def _number(body: Mapping[str, Any], name: str) -> float:
    value = body[name]
    if type(value) not in (int, float) or not -1e9 <= value <= 1e9:
        raise BadRequest(f"{name} must be a number, not {_short(value)}")
    return float(value)


def _flag(body: Mapping[str, Any], name: str) -> bool:
    if not isinstance(body[name], bool):
        raise BadRequest(f"{name} must be true or false, not {_short(body[name])}")
    return bool(body[name])


def _depth(value: Any) -> int:
    """How deep objects and lists are nested; a bare value has depth 0."""
    depth, level = 0, [value]
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        if depth > MAX_DEPTH:
            break
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return depth


def _short(value: Any) -> str:
    text = ascii(value) if not isinstance(value, int) or abs(value) < 2**64 else "a huge integer"
    return text if len(text) <= 80 else text[:77] + "..."
