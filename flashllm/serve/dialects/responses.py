"""OpenAI's newer dialect, /v1/responses, without state: each request has the whole conversation.

A body becomes that of a chat completion; its events become output items. Items and tools of kinds that run on OpenAI's
servers are left out, as clients expect. A custom tool is a function with one text, `input`.
"""

import secrets
import time
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from flashllm.api.fields import BadRequest, check_names, flag, mapping, naming_fields, objects, text
from flashllm.api.messages import UNSEEN_IMAGE
from flashllm.api.requests import parse_body
from flashllm.base.checks import short
from flashllm.generate.sampling import SamplingOptions
from flashllm.replies import written
from flashllm.replies.parser import Event as Said
from flashllm.serve.app import Api
from flashllm.serve.bodies import Asked, model_of, parse_object
from flashllm.serve.http import ApiError, NamedEventStream
from flashllm.serve.worker import Began, Chosen, Ended

_SAME = ("temperature", "top_p", "parallel_tool_calls")
_KNOWN = {
    *("model", "stream", "store", "include", "prompt_cache_key", "prompt_cache_retention", "client_metadata", "user"),
    *("metadata", "service_tier", "safety_identifier", "stream_options", "truncation", "max_tool_calls", *_SAME),
    *("instructions", "input", "tools", "tool_choice", "reasoning", "text", "max_output_tokens"),
}
_UNSUPPORTED = {"background": False, "top_logprobs": 0}  # values that ask for nothing
_TEXTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")
_PARTS = {"text": "output_text", "reasoning": "reasoning_text"}  # of items, by the kind of what is said
_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
Document = dict[str, Any]


class Responses:
    """The endpoint, over that of chat completions."""

    def __init__(self, api: Api) -> None:
        self._api = api

    def routes(self) -> list[Route]:
        return [Route("/v1/responses", self.create, methods=["POST"])]

    async def create(self, request: Request) -> Response:
        answering = await self._api.begin(request, "chat", self._understand)
        form = _Form(self._api.served.name, answering.asked)
        return await answering.respond(request, form, NamedEventStream, failed=form.failed)

    def _understand(self, raw: bytes, defaults: SamplingOptions) -> Asked:
        body = parse_object(raw)
        for name in ("previous_response_id", "conversation", "prompt"):
            if name in body:
                raise BadRequest(f"{name}: nothing is stored here; send the whole conversation as input", param=name)
        for name, value in body.items():
            if name in _UNSUPPORTED and value != _UNSUPPORTED[name]:
                raise BadRequest(f"{name}: {short(value)} is not supported", param=name)
        check_names(body, _KNOWN | _UNSUPPORTED.keys())
        chat = {name: body[name] for name in _SAME if name in body}
        system = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
        chat["messages"] = [*system, *_messages(body.get("input"))]
        chat |= _tools(body)
        if "max_output_tokens" in body:
            chat["max_tokens"] = body["max_output_tokens"]
        shape = mapping("text", body.get("text", {})).get("format") or {"type": "text"}
        if mapping("text.format", shape).get("type") == "json_schema":
            shape = {"type": "json_schema", "json_schema": {"schema": shape.get("schema")}}
        chat["response_format"] = shape
        effort = mapping("reasoning", body.get("reasoning", {})).get("effort")
        template = self._api.served.encoder.template
        takes = template is not None and any(map(template.takes, ("reasoning_effort", "enable_thinking")))
        if effort is not None and takes:
            chat["reasoning_effort"] = effort
        with naming_fields({"max_tokens": "max_output_tokens", "response_format": "text.format"}):
            request = parse_body(chat, "chat", custom_id=f"resp_{secrets.token_hex(12)}", defaults=defaults)
        return Asked.chat(request, stream=flag(body, "stream"), model=model_of(body))


def _text_of(where: str, value: Any, *, of_tool: bool = False) -> str:
    """Content as one text; that of a tool may have images."""
    if not isinstance(value, list):
        return text(where, value)
    texts = []
    for part in value:
        kind = mapping(where, part).get("type")
        if of_tool and kind == "input_image":
            texts.append(UNSEEN_IMAGE)
            continue
        if kind not in _TEXTS:
            raise BadRequest(f"{where}: a part of type {short(kind)} is not supported; only text is", param="input")
        texts.append(text(where, part.get("refusal" if kind == "refusal" else "text")))
    return "\n".join(texts)


def _messages(given: Any) -> list[Document]:
    """Messages of a chat completion. An answer's reasoning, text and calls are items here, and one message there."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise BadRequest("input must be a text or a list of at least one item", param="input")
    messages: list[Document] = []

    def answer() -> Document:
        """The message of the answer that goes on."""
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        return messages[-1]

    for place, item in enumerate(given):
        where = f"input[{place}]"
        match mapping(where, item).get("type", "message"):
            case "message" if item.get("role") == "assistant":
                if answer()["content"] or "tool_calls" in answer():
                    messages.append({"role": "assistant", "content": ""})
                answer()["content"] = _text_of(where, item.get("content"))
            case "message":
                messages.append({"role": item.get("role"), "content": _text_of(where, item.get("content"))})
            case "reasoning" if thought := _text_of(where, item.get("content") or item.get("summary") or []):
                messages.append({"role": "assistant", "content": "", "reasoning_content": thought})
            case "function_call" | "custom_tool_call" as kind:
                custom = kind == "custom_tool_call"
                arguments = written.dump({"input": item.get("input")}) if custom else item.get("arguments")
                function = {"name": item.get("name"), "arguments": arguments}
                call = {"type": "function", "id": item.get("call_id"), "function": function}
                answer().setdefault("tool_calls", []).append(call)
            case "function_call_output" | "custom_tool_call_output":
                result = _text_of(where, item.get("output"), of_tool=True)
                messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": result})
    return messages


def _tools(body: Mapping[str, Any]) -> Document:
    tools = []
    for tool in objects("tools", body.get("tools", [])):
        kind = tool.get("type")
        if kind in ("function", "custom"):
            function = {name: tool[name] for name in ("name", "description", "parameters", "strict") if name in tool}
            if kind == "custom":
                function["parameters"] = _INPUT
            tools.append({"type": "function", "function": function})
    values: Document = {"tools": tools} if tools else {}
    choice = body.get("tool_choice", "auto")
    if isinstance(choice, dict) and choice.get("type") in ("function", "custom"):
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    return values | {"tool_choice": choice}


class _Form:
    """The answer as a response object, of a job's events."""

    def __init__(self, model: str, asked: Asked) -> None:
        self._request = asked.requests[0]
        functions = [tool["function"] for tool in self._request.tools]
        self._customs = {each["name"] for each in functions if each["parameters"] == _INPUT}
        self._output: list[Document] = []
        self._open = ""  # the kind of the item that is open
        self._number = 0
        self._input = self._cached = self._new = self._thought = 0
        self._head: Document = {
            "id": self._request.custom_id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "parallel_tool_calls": not self._request.one_call,
            "tool_choice": "auto",
            "tools": [],
            "store": False,
        }
        self._status, self._error = "in_progress", dict[str, str]()

    def take(self, event: Began | Chosen | Ended) -> list[Document]:
        match event:
            case Began(_, record):
                self._input, self._cached = record.tokens + record.reused_tokens, record.reused_tokens
                return [self.waiting(), *([self.waiting()] if self._number == 1 else [])]
            case Chosen(_, _, said):
                self._new += 1
                self._thought += any(each.kind == "reasoning" for each in said)
                return [document for each in said for document in self._say(each)]
            case Ended(_, reason, said):
                documents = [document for each in said for document in self._say(each)]
                self._status = "completed" if reason in ("eos", "stop") else "incomplete"
                return documents + self._close()

    def waiting(self) -> Document:
        """The document that says that there will be more. Clients give up a stream in which they see none for long."""
        return self._event(f"response.{'in_progress' if self._number else 'created'}", response=self.whole())

    def last(self) -> list[Document]:
        return [self._event(f"response.{self._status}", response=self.whole())]

    def failed(self, error: ApiError) -> Document:
        self._status, self._error = "failed", {"code": error.code or "server_error", "message": str(error)}
        return self._event("response.failed", response=self.whole())

    def whole(self) -> Document:
        ended = self._status != "in_progress"
        usage = {
            "input_tokens": self._input,
            "input_tokens_details": {"cached_tokens": self._cached},
            "output_tokens": self._new,
            "output_tokens_details": {"reasoning_tokens": self._thought},
            "total_tokens": self._input + self._new,
        }
        return {
            **self._head,
            "status": self._status,
            "error": self._error or None,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "output": [*self._output] if ended else [],
            "usage": usage if ended else None,
        }

    def _event(self, kind: str, **fields: Any) -> Document:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _piece(self, kind: str, **fields: Any) -> Document:
        """An event of the item that is open."""
        place: Document = {} if "call" in kind else {"content_index": 0}
        place |= {"logprobs": []} if kind.startswith("output_text") else {}
        item = self._output[-1]
        return self._event(
            f"response.{kind}", item_id=item["id"], output_index=len(self._output) - 1, **place, **fields
        )

    def _say(self, said: Said) -> list[Document]:
        if said.kind == "end":
            return self._close()
        documents: list[Document] = []
        if said.kind != "arguments" and (said.kind == "call" or self._open != said.kind):
            documents = self._close() + self._begin(said)
        item = self._output[-1]
        match said.kind:
            case "text" | "reasoning":
                item["content"][0]["text"] += said.text
                documents.append(self._piece(f"{_PARTS[said.kind]}.delta", delta=said.text))
            case "arguments":
                item["arguments"] += said.text
                if item["type"] == "function_call":
                    documents.append(self._piece("function_call_arguments.delta", delta=said.text))
        return documents

    def _begin(self, said: Said) -> list[Document]:
        self._open = said.kind
        item: Document = {"id": f"item_{secrets.token_hex(12)}", "status": "in_progress"}
        match said.kind:
            case "text":
                part: Document = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                item |= {"type": "message", "role": "assistant", "content": [part]}
            case "reasoning":
                part = {"type": "reasoning_text", "text": ""}
                item |= {"type": "reasoning", "summary": [], "content": [part]}
            case _:
                kind = "custom_tool_call" if said.text in self._customs else "function_call"
                item |= {"type": kind, "call_id": said.id, "name": said.text, "arguments": ""}
        self._output.append(item)
        bare = {**item, "content": []} if "content" in item else _called(item)
        added = self._event("response.output_item.added", output_index=len(self._output) - 1, item=bare)
        return [added, self._piece("content_part.added", part={**part})] if "content" in item else [added]

    def _close(self) -> list[Document]:
        if not self._open:
            return []
        kind, self._open = self._open, ""
        item = self._output[-1]
        item["status"] = "completed"
        if kind in _PARTS:
            part = item["content"][0]
            documents = [self._piece(f"{_PARTS[kind]}.done", text=part["text"])]
            documents.append(self._piece("content_part.done", part=part))
        elif item["type"] == "function_call":
            documents = [self._piece("function_call_arguments.done", name=item["name"], arguments=item["arguments"])]
        else:
            self._output[-1] = item = _called(item)
            documents = [self._piece("custom_tool_call_input.done", input=item["input"])]
        return [*documents, self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)]


def _called(item: Document) -> Document:
    """A call as it is told: a custom tool's has its input in the place of arguments."""
    if item["type"] == "function_call":
        return {**item}
    arguments = item["arguments"]
    value = written.load(arguments).get("input") if written.is_object(arguments) else arguments
    rest = {name: each for name, each in item.items() if name != "arguments"}
    return {**rest, "input": value if isinstance(value, str) else arguments}
