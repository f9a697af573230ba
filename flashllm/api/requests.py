"""The body of a completion or chat completion, as OpenAI's interface has it, to one request.

A field that is known but not supported is refused by name unless its value asks for nothing. Knows no model, no
file and no connection: batch files and the server share this.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from flashllm.api.fields import BadRequest, check_names, flag, integer, number, text
from flashllm.api.messages import Message, messages_of, template_values, tools_of
from flashllm.base.checks import short
from flashllm.errors import UsageError
from flashllm.generate.grammar import Constraint
from flashllm.generate.logprobs import MAX_LOGPROBS
from flashllm.generate.sampling import SamplingOptions

Kind = Literal["chat", "completion", "prompt"]  # the last is a line of a batch file that is no OpenAI request

MAX_STOPS = 16
MAX_STOP_CHARS = 1000
ENDPOINTS: dict[str, Kind] = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}
SEED_MASK = 2**63 - 1  # OpenAI's seeds are signed, numpy's are not

# Fields that choose tokens, the same in every kind of line.
_SAMPLING = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop", "ignore_eos"),
    *("logprobs", "response_format"),
)
CHAT_ALONE = (
    *("tools", "tool_choice", "parallel_tool_calls", "reasoning_effort", "chat_template_kwargs"),
    "thinking_token_budget",
)
_FIELDS: dict[Kind, frozenset[str]] = {
    "chat": frozenset((*_SAMPLING, *CHAT_ALONE, "messages", "max_completion_tokens", "top_logprobs")),
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
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "verbosity": (),
    "web_search_options": (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request's meaning. `prompt` is text, token ids, or the messages of a conversation."""

    custom_id: str  # the caller's name for it
    kind: Kind
    prompt: str | tuple[int, ...] | tuple[Message, ...]
    options: SamplingOptions  # max_new_tokens is the default's where `max_new_given` is false
    max_new_given: bool
    logprobs: int | None  # likeliest tokens listed with each chosen one; None: no log probabilities
    tools: tuple[Message, ...] = ()  # that the model may call
    must_call: tuple[str, ...] = ()  # the tools of which the answer must call one; none: it need not
    one_call: bool = False  # the answer ends with its first call
    constraint: Constraint | None = None  # the form of the answer's text; None: any
    thinking_tokens: int | None = None  # of reasoning, after which it is ended; None: any number
    template_values: Mapping[str, Any] = field(default_factory=dict)  # what else the chat template is told
    marks: tuple[int, ...] = ()  # how many of the prompt's tokens others may begin with too, where that is known


def parse_body(body: Mapping[str, Any], kind: Kind, *, custom_id: str, defaults: SamplingOptions) -> Request:
    """The request in the JSON object `body`. `defaults` hold for what it does not say. BadRequest names a field."""
    body = {name: value for name, value in body.items() if value is not None}  # null is "not given", as upstream
    check_names(body, _FIELDS[kind] | _IGNORED | _UNSUPPORTED.keys())
    for name in body.keys() & _UNSUPPORTED.keys():
        value = body[name]
        if not any(type(value) is type(neutral) and value == neutral for neutral in _UNSUPPORTED[name]):
            raise BadRequest(f"{name}: {short(value)} is not supported", param=name)
    options = _options(body, defaults)
    chat = kind == "chat"
    prompt = messages_of(body.get("messages")) if chat else prompt_of(body.get("prompt"))
    tools, must_call = tools_of(body) if chat else ((), ())
    return Request(
        custom_id=custom_id,
        kind=kind,
        prompt=prompt,
        options=options,
        max_new_given="max_tokens" in body or "max_completion_tokens" in body,
        logprobs=_logprobs(body, kind),
        tools=tools,
        must_call=must_call,
        one_call=body.get("parallel_tool_calls") is False or isinstance(body.get("tool_choice"), dict),
        constraint=_constraint(body.get("response_format", {"type": "text"})),
        thinking_tokens=integer(body, "thinking_token_budget", 0) if "thinking_token_budget" in body else None,
        template_values=template_values(body) if chat else {},
    )


def _options(body: Mapping[str, Any], defaults: SamplingOptions) -> SamplingOptions:
    given: dict[str, Any] = {}
    if len({body[name] for name in ("max_tokens", "max_completion_tokens") if type(body.get(name)) is int}) > 1:
        raise BadRequest("max_tokens and max_completion_tokens differ; give one of them", param="max_tokens")
    for name in ("max_tokens", "max_completion_tokens"):
        if name in body:
            given["max_new_tokens"] = integer(body, name, 1)
    for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
        if name in body:
            given[name] = number(body, name)
    if "top_k" in body:
        given["top_k"] = max(integer(body, "top_k", -1), 0)  # -1: all, as vLLM writes it
    if "seed" in body:
        given["seed"] = integer(body, "seed", -(2**63)) & SEED_MASK
    if "ignore_eos" in body:
        given["ignore_eos"] = flag(body, "ignore_eos")
    if "stop" in body:
        given["stop"] = _stops(body["stop"])
    try:
        return replace(defaults, **given)
    except UsageError as error:
        option, rest = str(error).split(" ", 1)  # "--top-p cannot be …", of the command line
        name = option.removeprefix("--").replace("-", "_")
        raise BadRequest(f"{name} {rest}", param=name) from None


def _constraint(given: Any) -> Constraint | None:
    """The field `response_format`: OpenAI's forms; a regular expression or a Lark grammar, under the type's name."""
    kind = given.get("type") if isinstance(given, dict) else given
    inner = given.get(kind) if isinstance(given, dict) and isinstance(kind, str) else None
    try:
        match kind:
            case "text":
                return None
            case "json_object":
                return Constraint.of_schema({"type": "object"})
            case "json_schema" if isinstance(inner, dict):
                return Constraint.of_schema(inner.get("schema"))
            case "regex":
                return Constraint("regex", text("response_format: regex", inner))
            case "grammar":
                return Constraint("lark", text("response_format: grammar", inner))
    except UsageError as error:
        raise BadRequest(f"response_format: {error}", param="response_format") from None
    raise BadRequest(
        "response_format must be an object with the type text, json_object, json_schema (with an object json_schema), "
        f"regex or grammar (with a text of that name), not {short(given)}",
        param="response_format",
    )


def _logprobs(body: Mapping[str, Any], kind: Kind) -> int | None:
    if kind != "chat":
        return integer(body, "logprobs", 0, MAX_LOGPROBS) if "logprobs" in body else None
    wanted = flag(body, "logprobs")
    if "top_logprobs" in body:
        count = integer(body, "top_logprobs", 0, MAX_LOGPROBS)
        if not wanted:
            raise BadRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        return count
    return 0 if wanted else None


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise BadRequest(f"stop must be a text or a list of at most {MAX_STOPS} texts", param="stop")
    for stop in stops:
        if not text("stop", stop) or len(stop) > MAX_STOP_CHARS:
            raise BadRequest(f"stop: a text must have from 1 to {MAX_STOP_CHARS} characters", param="stop")
    return tuple(stops)


def prompt_of(value: Any) -> str | tuple[int, ...]:
    """The field `prompt` of one request."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        text("prompt", value)
        if not value:
            raise BadRequest("prompt is empty", param="prompt")
        return value
    if isinstance(value, list) and value and all(isinstance(each, str | list) for each in value):
        raise BadRequest(
            f"prompt: {len(value)} prompts in a line are not supported; give each a line of its own", param="prompt"
        )
    if not isinstance(value, list) or not value or not all(type(each) is int and each >= 0 for each in value):
        raise BadRequest("prompt must be a text or a list of token ids", param="prompt")
    return tuple(value)
