"""Anthropic's dialect: /v1/messages, whole and streamed, and /v1/messages/count_tokens, for any name of a model.

A body becomes that of a chat completion; its events become content blocks. Tools that Anthropic's servers run are left
out, as are headers of clients that change with every request: they would end every reuse of a prompt's beginning.
"""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from flashllm.api.fields import BadRequest, check_names, flag, mapping, naming_fields, objects, text
from flashllm.api.messages import UNSEEN_IMAGE
from flashllm.api.requests import parse_body
from flashllm.base.checks import short
from flashllm.generate.sampling import SamplingOptions
from flashllm.replies import written
from flashllm.replies.parser import Event as Said
from flashllm.serve.app import Api
from flashllm.serve.bodies import Asked, parse_object
from flashllm.serve.http import NamedEventStream
from flashllm.serve.worker import Began, Chosen, Ended

_SAME = ("max_tokens", "temperature", "top_p", "top_k")
_IGNORED = frozenset(
    (
        *("model", "stream", "metadata", "service_tier", "container", "context_management", "betas", "cache_control"),
        *("inference_geo", "speed", "mcp_servers", "diagnostics"),
    )
)
_KNOWN = _IGNORED | {
    *_SAME,
    "system",
    "messages",
    "tools",
    "tool_choice",
    "stop_sequences",
    "thinking",
    "output_config",
}
_NAMES = {  # OpenAI's name -> Anthropic's
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "thinking_token_budget": "thinking.budget_tokens",
}
_BILLING = "x-anthropic-billing-header:"
_CHOICES = {"auto": "auto", "none": "none", "any": "required"}
_BLOCKS = {"text": "text", "reasoning": "thinking", "call": "tool_use"}
Document = dict[str, Any]


class Anthropic:
    """The endpoints, over OpenAI's."""

    def __init__(self, api: Api) -> None:
        self._api = api

    def routes(self) -> list[Route]:
        return [
            Route("/v1/messages", self.messages, methods=["POST"]),
            Route("/v1/messages/count_tokens", self.count_tokens, methods=["POST"]),
        ]

    async def messages(self, request: Request) -> Response:
        answering = await self._api.begin(request, "chat", self._understand)
        form = _Form(self._api.served.name, answering.asked)
        return await answering.respond(request, form, NamedEventStream)

    async def count_tokens(self, request: Request) -> Response:
        _, prompts, _ = await self._api.understood(request, "chat", self._understand)
        return JSONResponse({"input_tokens": len(prompts[0][1])})

    def _understand(self, raw: bytes, defaults: SamplingOptions) -> Asked:
        body = parse_object(raw)
        check_names(body, _KNOWN)
        chat = {name: body[name] for name in _SAME if name in body}
        chat["messages"] = [*_system(body.get("system")), *_messages(body.get("messages"))]
        chat |= _tools(body) | self._thinking(body.get("thinking", {}))
        if "stop_sequences" in body:
            chat["stop"] = body["stop_sequences"]
        shape = mapping("output_config", body.get("output_config", {})).get("format")
        if shape is not None:
            schema = mapping("output_config.format", shape).get("schema")
            chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
        with naming_fields(_NAMES):
            request = parse_body(chat, "chat", custom_id=f"msg_{secrets.token_hex(12)}", defaults=defaults)
        return Asked.chat(request, stream=flag(body, "stream"))

    def _thinking(self, given: Any) -> Document:
        """Fields of a chat: a budget and, for a template that knows it, whether the model reasons at all."""
        kind = mapping("thinking", given).get("type")
        values: Document = {}
        if "budget_tokens" in given and kind == "enabled":
            values["thinking_token_budget"] = given["budget_tokens"]
        template = self._api.served.encoder.template
        if kind is not None and template is not None and template.takes("enable_thinking"):
            values["chat_template_kwargs"] = {"enable_thinking": kind != "disabled"}
        return values


def _system(value: Any) -> list[Document]:
    texts = [each for each in _texts("system", value or [], ("text",)) if not each.startswith(_BILLING)]
    return [{"role": "system", "content": "\n".join(texts)}] if texts else []


def _blocks(where: str, value: Any) -> list[Mapping[str, Any]]:
    """Content as a list of blocks."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise BadRequest(f"{where}: content must be a text or a list of blocks, not {short(value)}", param=where)
    return [mapping(f"{where}[{place}]", block) for place, block in enumerate(value)]


def _texts(where: str, value: Any, kinds: Sequence[str]) -> list[str]:
    """The texts of content that has nothing but these kinds of blocks."""
    texts = []
    for block in _blocks(where, value):
        if block.get("type") not in kinds:
            raise BadRequest(f"{where}: a block of type {short(block.get('type'))} is not supported", param=where)
        seen = block["type"] != "image"
        texts.append(text(f"{where}: text", block.get("text")) if seen else UNSEEN_IMAGE)
    return texts


def _messages(value: Any) -> list[Document]:
    """Messages of a chat completion. Results of tools come before the text beside them."""
    if not isinstance(value, list):
        raise BadRequest("messages must be a list of at least one message", param="messages")
    messages: list[Document] = []
    for place, given in enumerate(value):
        where = f"messages[{place}]"
        role = mapping(where, given).get("role")
        said: list[str] = []
        calls: list[Document] = []
        thought = ""
        for block in _blocks(where, given.get("content")):
            match role, block.get("type"):
                case _, "text":
                    said.append(text(f"{where}: text", block.get("text")))
                case "user", "tool_result":
                    result = "\n".join(_texts(where, block.get("content") or "", ("text", "image")))
                    messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
                case "assistant", "tool_use":
                    function = {"name": block.get("name"), "arguments": written.dump(block.get("input", {}))}
                    calls.append({"type": "function", "id": block.get("id"), "function": function})
                case "assistant", "thinking":
                    thought += text(f"{where}: thinking", block.get("thinking"))
                case "assistant", "redacted_thinking":
                    pass
                case _, kind:
                    raise BadRequest(f"{where}: a block of type {short(kind)} is not supported", param=where)
        if said or calls or role != "user":
            message = {"role": role, "content": "\n".join(said)}
            messages.append(message | ({"tool_calls": calls} if calls else {}))
            if thought:
                messages[-1]["reasoning_content"] = thought
    return messages


def _tools(body: Mapping[str, Any]) -> Document:
    tools = []
    for tool in objects("tools", body.get("tools", [])):
        if tool.get("type", "custom") == "custom":
            function = {"name": tool.get("name"), "description": tool.get("description")}
            tools.append({"type": "function", "function": function | {"parameters": tool.get("input_schema")}})
    choice = mapping("tool_choice", body.get("tool_choice", {"type": "auto"}))
    values: Document = {"tools": tools} if tools else {}
    kind = choice.get("type")
    if kind == "tool":
        values["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif isinstance(kind, str) and kind in _CHOICES:
        values["tool_choice"] = _CHOICES[kind]
    else:
        raise BadRequest(f"tool_choice: the type {short(kind)} is unknown", param="tool_choice")
    if choice.get("disable_parallel_tool_use") is True:
        values["parallel_tool_calls"] = False
    return values


class _Form:
    """Anthropic's answer, of a job's events."""

    def __init__(self, model: str, asked: Asked) -> None:
        self._model, self._request = model, asked.requests[0]
        self._content: list[Document] = []
        self._open = ""  # the kind of the block that is open
        self._input = self._cached = self._new = 0
        self._reason: str | None = None

    def take(self, event: Began | Chosen | Ended) -> list[Document]:
        match event:
            case Began(_, record):
                self._input, self._cached = record.tokens, record.reused_tokens
                return [{"type": "message_start", "message": self._message()}]
            case Chosen(_, _, said):
                self._new += 1
                return [document for each in said for document in self._say(each)]
            case Ended(_, reason, said):
                documents = [document for each in said for document in self._say(each)] + self._close()
                self._reason = self._why(reason)
                return documents

    def waiting(self) -> Document:
        return {"type": "ping"}

    def last(self) -> list[Document]:
        message = self._message()
        delta = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        return [{"type": "message_delta", "delta": delta, "usage": message["usage"]}, {"type": "message_stop"}]

    def whole(self) -> Document:
        for block in self._content:
            if block["type"] == "tool_use":
                block["input"] = written.arguments_of(block["input"])
        return {**self._message(), "content": self._content}

    def _message(self) -> Document:
        stops = self._request.options.stop
        return {
            "id": self._request.custom_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": self._reason,
            "stop_sequence": stops[0] if self._reason == "stop_sequence" and len(stops) == 1 else None,
            "usage": {
                "input_tokens": self._input,
                "cache_read_input_tokens": self._cached,
                "cache_creation_input_tokens": 0,
                "output_tokens": self._new,
            },
        }

    def _why(self, reason: str) -> str:
        if reason not in ("eos", "stop"):
            return "max_tokens"
        if any(block["type"] == "tool_use" for block in self._content):
            return "tool_use"
        held = self._request.constraint is not None  # an answer whose form is complete ends so too
        return "stop_sequence" if reason == "stop" and self._request.options.stop and not held else "end_turn"

    def _say(self, said: Said) -> list[Document]:
        documents: list[Document] = []
        if said.kind == "end":
            return self._close()
        if said.kind != "arguments" and (said.kind == "call" or self._open != said.kind):
            documents += self._close()
            kind, self._open = _BLOCKS[said.kind], said.kind
            block: Document = {"type": kind}
            block |= {"id": said.id, "name": said.text, "input": {}} if kind == "tool_use" else {kind: ""}
            block |= {"signature": ""} if kind == "thinking" else {}
            documents.append({"type": "content_block_start", "index": len(self._content), "content_block": {**block}})
            self._content.append(block | ({"input": ""} if kind == "tool_use" else {}))
        if said.kind == "call":
            return documents
        name = {"text": "text", "reasoning": "thinking", "arguments": "input"}[said.kind]
        self._content[-1][name] += said.text
        kind = "input_json_delta" if name == "input" else f"{name}_delta"
        delta = {"type": kind, "partial_json" if name == "input" else name: said.text}
        documents.append({"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta})
        return documents

    def _close(self) -> list[Document]:
        if not self._open:
            return []
        self._open = ""
        return [{"type": "content_block_stop", "index": len(self._content) - 1}]
