"""A request's body to what it asks for: prompts, and the form of the answer. Knows no model and no connection."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from flashllm.api.fields import BadRequest, flag, json_object, mapping, text
from flashllm.api.requests import Request, parse_body
from flashllm.generate.sampling import SamplingOptions

Kind = Literal["chat", "completion"]

MAX_PROMPTS = 128
_STREAM_OPTIONS = ("include_usage", "include_timings")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A checked body."""

    kind: Kind
    model: str | None  # None: it names none
    requests: tuple[Request, ...]  # one a prompt
    stream: bool
    include_usage: bool = False  # a last chunk with the usage
    include_timings: bool = False  # each chunk says where its token's time went (an addition to OpenAI's interface)
    return_progress: bool = False  # while the prompt is computed chunks say how far, as llama-server's do
    echo: bool = False  # the text begins with the prompt

    @classmethod
    def chat(cls, request: Request, *, stream: bool, model: str | None = None) -> "Asked":
        """A conversation of another dialect."""
        return cls(kind="chat", model=model, requests=(request,), stream=stream)


def parse(raw: bytes, kind: Kind, *, custom_id: str, defaults: SamplingOptions) -> Asked:
    """Understand the body `raw`. BadRequest where it asks for nothing we can answer; it names the field."""
    body = parse_object(raw)
    stream = flag(body, "stream")
    options = _stream_options(body, stream=stream)
    echo = kind == "completion" and flag(body, "echo")
    if (return_progress := flag(body, "return_progress")) and not stream:
        raise BadRequest("return_progress needs stream: true", param="return_progress")
    outer = ("stream", "stream_options", "return_progress")
    rest = {name: each for name, each in body.items() if name not in outer}
    if kind == "completion":
        rest.pop("echo", None)
    return Asked(
        kind=kind,
        model=model_of(body),
        requests=tuple(
            parse_body(one, kind, custom_id=custom_id, defaults=defaults)
            for one in (_by_prompt(rest) if kind == "completion" else [rest])
        ),
        stream=stream,
        **options,
        return_progress=return_progress,
        echo=echo,
    )


def parse_object(raw: bytes) -> dict[str, Any]:
    """The JSON object `raw`, without what is null in it: that is not given, as upstream. BadRequest."""
    return {name: each for name, each in json_object(raw, "the body").items() if each is not None}


def model_of(body: Mapping[str, Any]) -> str | None:
    """The name of the model that a body asks for; None: it names none."""
    return None if "model" not in body else text("model", body["model"])


def _stream_options(body: Mapping[str, Any], *, stream: bool) -> dict[str, bool]:
    given = mapping("stream_options", body.get("stream_options", {}))
    if given and not stream:
        raise BadRequest("stream_options needs stream: true", param="stream_options")
    for name in given:
        if name not in _STREAM_OPTIONS:
            raise BadRequest(f"stream_options: the field {name[:80]!r} is unknown", param="stream_options")
    return {name: given.get(name) is not None and flag(given, name) for name in _STREAM_OPTIONS}


def _by_prompt(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A body for each of its prompts, where it has a list of them."""
    prompts = body.get("prompt")
    if not isinstance(prompts, list) or not any(isinstance(each, str | list) for each in prompts):
        return [dict(body)]
    if not all(isinstance(each, str) or _is_ids(each) for each in prompts):
        raise BadRequest("prompt must be a text, a list of token ids, or a list of such prompts", param="prompt")
    if len(prompts) > MAX_PROMPTS:
        raise BadRequest(f"prompt: {len(prompts)} prompts are more than {MAX_PROMPTS}", param="prompt")
    return [{**body, "prompt": each} for each in prompts]


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int for each in value)
