"""Ollama's dialect, as far as its clients need it: /api/version, tags, ps, show, chat and generate.

The same job, the same worker, the same checks; only the names differ.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import flashllm
from flashllm.api.answers import chat_delta
from flashllm.api.fields import BadRequest, flag, mapping, naming_fields, text
from flashllm.api.requests import parse_body
from flashllm.generate.sampling import SamplingOptions
from flashllm.replies import written
from flashllm.replies.formats import GENERIC
from flashllm.replies.parser import Event as Said
from flashllm.serve.app import Api, rfc3339
from flashllm.serve.bodies import Asked, Kind, model_of, parse_object
from flashllm.serve.http import ApiError, DocumentStream
from flashllm.serve.worker import Began, Chosen, Ended

_OPTIONS = {  # Ollama's name -> OpenAI's
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
    "seed": "seed",
    "stop": "stop",
    "num_predict": "max_tokens",
}
_NAMES = {ours: theirs for theirs, ours in _OPTIONS.items()} | {"response_format": "format"}
_IGNORED = frozenset(("keep_alive", "num_ctx", "num_thread", "use_mmap", "num_gpu"))  # they change no answer here
_PROMPT = frozenset(("model", "options", "stream", "think", "format", *_IGNORED))  # of a body of /api/generate
Tell = Callable[[Sequence[Said]], dict[str, Any]]  # fields of a line that tell what is said
_LATEST = ":latest"  # clients add it to a name without a tag


class Ollama:
    """The endpoints, over OpenAI's."""

    def __init__(self, api: Api) -> None:
        self._api = api

    def routes(self) -> list[Route]:
        return [
            Route("/api/version", self.version),
            Route("/api/tags", self.tags),
            Route("/api/ps", self.tags),
            Route("/api/show", self.show, methods=["POST"]),
            Route("/api/chat", self.chat, methods=["POST"]),
            Route("/api/generate", self.generate, methods=["POST"]),
        ]

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": flashllm.__version__})

    async def tags(self, request: Request) -> Response:
        """The list of models: the one there is."""
        served = self._api.served
        model = {
            **dict.fromkeys(("name", "model"), served.name),
            "modified_at": rfc3339(served.created),
            "size": served.nbytes,
            "digest": "",
            "details": self._details(),
            "context_length": served.encoder.context,
        }
        return JSONResponse({"models": [model]})

    async def show(self, request: Request) -> Response:
        try:
            async with self._api.bodies.read(request) as sent:
                body = parse_object(sent.raw)
                self._api.bodies.let_go(sent)
            self._api.check_name(_model(body))
        except BadRequest as error:
            raise ApiError(400, str(error), param=error.param) from None
        encoder = self._api.served.encoder
        facts = {"general.architecture": "flashllm", "flashllm.context_length": encoder.context}
        template, answers = encoder.template, encoder.answers
        tools = template is not None and answers is not None and (answers is GENERIC or template.takes("tools"))
        capabilities = ["completion", "tools"] if tools else ["completion"]
        return JSONResponse({"details": self._details(), "model_info": facts, "capabilities": capabilities})

    async def chat(self, request: Request) -> Response:
        """A chat: by default a stream of JSON lines."""
        return await self._answer(request, _understand, _message)

    async def generate(self, request: Request) -> Response:
        """A chat of one turn, or a completion of a raw prompt: by default a stream of JSON lines."""
        return await self._answer(request, _understand_prompt, _response)

    async def _answer(
        self, request: Request, understand: Callable[[bytes, SamplingOptions], Asked], tell: "Tell"
    ) -> Response:
        answering = await self._api.begin(request, "chat", understand)
        form = _Form(self._api.served.name, tell)
        return await answering.respond(request, form, DocumentStream)

    def _details(self) -> dict[str, Any]:
        return {"format": "flashllm", "family": "flashllm", "families": ["flashllm"], "quantization_level": ""}


class _Form:
    """Ollama's answer, of a job's events."""

    def __init__(self, model: str, tell: Tell) -> None:
        self._said: list[Said] = []
        self._tell = tell
        self._call: list[Said] = []  # that is not whole
        self._model, self._started = model, time.perf_counter_ns()
        self._prompt_tokens, self._prompt_ns = 0, 0
        self._new_tokens, self._new_ns = 0, 0
        self._reason = "stop"

    def take(self, event: Began | Chosen | Ended) -> dict[str, Any] | None:
        if isinstance(event, Ended):
            self._reason = "stop" if event.reason in ("eos", "stop") else "length"
            return self._say(event.said)
        nanoseconds = round(event.record.times.total_ms * 1e6)
        if isinstance(event, Began):
            self._prompt_tokens = event.record.tokens + event.record.reused_tokens
            self._prompt_ns = nanoseconds
            return None
        self._new_tokens += 1
        self._new_ns += nanoseconds
        return self._say(event.said)

    def _say(self, said: Sequence[Said]) -> dict[str, Any] | None:
        """The line of what is said; a call comes in one when it is whole."""
        self._said += said
        told: list[Said] = []
        for each in said:
            if each.kind in ("text", "reasoning"):
                told.append(each)
            else:
                self._call.append(each)
            if each.kind == "end":
                told += self._call
                self._call = []
        return self._line(told, done=False) if told else None

    def waiting(self) -> dict[str, Any]:
        return self._line((), done=False)

    def last(self) -> dict[str, Any]:
        return {
            **self._line((), done=True),
            "done_reason": self._reason,
            "total_duration": time.perf_counter_ns() - self._started,
            "load_duration": 0,
            "prompt_eval_count": self._prompt_tokens,
            "prompt_eval_duration": self._prompt_ns,
            "eval_count": self._new_tokens,
            "eval_duration": self._new_ns,
        }

    def whole(self) -> dict[str, Any]:
        return {**self.last(), **self._tell(self._said)}

    def _line(self, said: Sequence[Said], *, done: bool) -> dict[str, Any]:
        return {"model": self._model, "created_at": rfc3339(time.time()), **self._tell(said), "done": done}


def _response(said: Sequence[Said]) -> dict[str, Any]:
    message = _message(said)["message"]
    del message["role"]
    return {"response": message.pop("content"), **message}


def _message(said: Sequence[Said]) -> dict[str, Any]:
    delta = chat_delta(said)
    thinking = {"thinking": delta["reasoning_content"]} if "reasoning_content" in delta else {}
    functions = [call["function"] for call in delta.get("tool_calls", ())]
    calls = [{"function": {**each, "arguments": written.arguments_of(each["arguments"])}} for each in functions]
    message = {"role": "assistant", "content": delta.get("content", ""), **thinking}
    return {"message": {**message, "tool_calls": calls} if calls else message}


def _understand(raw: bytes, defaults: SamplingOptions) -> Asked:
    """A body of /api/chat. BadRequest names the field, by Ollama's name where it has one."""
    return _asked(parse_object(raw), "chat", defaults)


def _understand_prompt(raw: bytes, defaults: SamplingOptions) -> Asked:
    """A body of /api/generate. A raw prompt goes to the model as it is, any other through its chat template."""
    given = parse_object(raw)
    body = {name: value for name, value in given.items() if name in _PROMPT}
    for name, value in given.items():
        if name not in _PROMPT and name not in ("prompt", "system", "raw") and value not in ("", []):
            raise BadRequest(f"the field {name[:80]!r} is unknown", param=name[:80])
    prompt = text("prompt", given.get("prompt"))
    if flag(given, "raw"):
        return _asked({**body, "prompt": prompt}, "completion", defaults)
    system = [{"role": "system", "content": given["system"]}] if given.get("system") else []
    return _asked({**body, "messages": [*system, {"role": "user", "content": prompt}]}, "chat", defaults)


def _asked(body: dict[str, Any], kind: Kind, defaults: SamplingOptions) -> Asked:
    options = mapping("options", body.pop("options", {}))
    ours: dict[str, Any] = {}
    for name, value in options.items():
        if name in _OPTIONS:
            ours[_OPTIONS[name]] = value
        elif name not in _IGNORED and value is not None:
            raise BadRequest(f"options: {name[:80]!r} is not supported", param=f"options.{name[:80]}")
    if ours.get("max_tokens") in (-1, -2):  # as many as there is room for
        del ours["max_tokens"]
    stream = flag(body, "stream", True)
    thinks = body.pop("think", None)
    if kind == "chat" and isinstance(thinks, str):
        ours["reasoning_effort"] = thinks
    elif kind == "chat" and thinks is not None:
        ours["chat_template_kwargs"] = {"enable_thinking": thinks}
    if isinstance(body.get("messages"), list):
        body["messages"] = _messages(body["messages"])
    if (form := body.pop("format", "")) != "":
        json_schema = {"type": "json_schema", "json_schema": {"schema": form}}
        ours["response_format"] = {"type": "json_object"} if form == "json" else json_schema
    rest = {name: value for name, value in body.items() if name not in ("stream", *_IGNORED)}
    with naming_fields(_NAMES):
        request = parse_body({**rest, **ours}, kind, custom_id="ollama", defaults=defaults)
    return Asked.chat(request, stream=stream, model=_model(body))


def _messages(messages: Sequence[Any]) -> list[Any]:
    """Messages as OpenAI's interface has them: calls with ids, which their results name in turn."""
    result: list[Any] = []
    waiting: list[str] = []
    for given in messages:
        message = dict(given) if isinstance(given, dict) else given
        if isinstance(message, dict) and "thinking" in message:
            message["reasoning_content"] = message.pop("thinking")
        if isinstance(message, dict) and isinstance(calls := message.get("tool_calls"), list):
            made = [_call(call, f"call_{len(result)}_{place}") for place, call in enumerate(calls)]
            message["tool_calls"], waiting = made, [f"call_{len(result)}_{place}" for place in range(len(made))]
        if isinstance(message, dict) and message.get("role") == "tool":
            message.setdefault("tool_call_id", waiting.pop(0) if waiting else "call")
            if "tool_name" in message:
                message["name"] = message.pop("tool_name")
        result.append(message)
    return result


def _call(call: Any, call_id: str) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments", {}), dict):
        raise BadRequest("tool_calls: each needs a function with a name and arguments, an object", param="messages")
    arguments = written.dump(function.get("arguments", {}))
    return {"id": call_id, "type": "function", "function": {"name": function.get("name"), "arguments": arguments}}


def _model(body: Mapping[str, Any]) -> str | None:
    name = model_of({"model": body["name"], **body} if "name" in body else body)
    return None if name is None else name.removesuffix(_LATEST)
