"""A conversation's messages and the tools that it offers, checked, as chat templates take them. Knows no model."""

import re
from collections.abc import Mapping
from typing import Any

from flashllm.api.fields import MAX_DEPTH, BadRequest, check_names, depth, flag, text
from flashllm.base.checks import short
from flashllm.replies.written import dump, load

Message = dict[str, Any]

MAX_TOOLS = 256
# Stands for an image in a tool's result: a client sends the conversation again with every turn, and could not go on.
UNSEEN_IMAGE = "[an image, which this model cannot see]"
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_KEYS = {  # beside the role
    "assistant": {"content", "name", "tool_calls", "reasoning_content"},
    "tool": {"content", "name", "tool_call_id"},
}
_NAME = re.compile(r"[\w.:/-]{1,128}", re.ASCII)


def messages_of(value: Any) -> tuple[Message, ...]:
    """The field `messages`. A tool's result has the name of the call that it answers."""
    if not isinstance(value, list) or not value:
        raise BadRequest("messages must be a list of at least one message", param="messages")
    messages = tuple(_message(message, f"messages[{place}]") for place, message in enumerate(value))
    names: dict[str, str] = {}
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        if message["role"] == "tool" and message["tool_call_id"] in names:
            message.setdefault("name", names[message["tool_call_id"]])
    return messages


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise BadRequest(f"{where} must be an object", param=where)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise BadRequest(f"{where}: role must be one of {', '.join(_ROLES)}, not {short(role)}", param=where)
    given = {name: value for name, value in message.items() if name != "role" and value not in (None, [])}
    for name in given:
        if name not in _KEYS.get(role, {"content", "name"}):
            raise BadRequest(f"{where}: {name[:80]!r} is not supported", param=where)
    calls = given.pop("tool_calls", None)
    result: Message = {"role": _ROLES[role]}
    # Beside calls there may be no text; templates expect one.
    result["content"] = "" if calls and "content" not in given else _content(message.get("content"), where)
    for name, value in given.items():
        if name != "content":
            result[name] = text(f"{where}: {name}", value)
    if role == "tool" and "tool_call_id" not in given:
        raise BadRequest(f"{where}: a tool's message needs the tool_call_id that it answers", param=where)
    if calls is not None:
        if not isinstance(calls, list):
            raise BadRequest(f"{where}: tool_calls must be a list", param=where)
        result["tool_calls"] = [_call(call, f"{where}.tool_calls[{place}]") for place, call in enumerate(calls)]
    return result


def _call(call: Any, where: str) -> Message:
    function = _function(call, where)
    arguments = text(f"{where}: arguments", function.get("arguments", ""))
    try:
        value = load(arguments or "{}")
        dump(value).encode()
    except ValueError:  # as an answer that was cut off left them
        value = arguments
    value = arguments if depth(value) > MAX_DEPTH else value
    call_id = text(f"{where}: id", call.get("id"))
    return {"id": call_id, "type": "function", "function": {"name": function["name"], "arguments": value}}


def _function(value: Any, where: str) -> Mapping[str, Any]:
    """The function of a tool or of a call."""
    kind = value.get("type") if isinstance(value, dict) else value
    if not isinstance(value, dict) or kind != "function":
        raise BadRequest(f'{where}: its type must be "function", not {short(kind)}', param=where)
    function = value.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BadRequest(f"{where}: function needs a name of letters, digits and _ . : / -", param=where)
    return function


def tools_of(body: Mapping[str, Any]) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    """The tools that the model may call by the fields `tools` and `tool_choice`, and the names of which it must call
    one, if it must."""
    given = body.get("tools", [])
    if not isinstance(given, list) or len(given) > MAX_TOOLS:
        raise BadRequest(f"tools: must be a list of at most {MAX_TOOLS} tools", param="tools")
    tools: list[Message] = []
    for place, tool in enumerate(given):
        where = f"tools[{place}]"
        function = dict(_function(tool, where))
        parameters = function.get("parameters")
        if parameters is None:
            function["parameters"] = {"type": "object", "properties": {}}
        elif not isinstance(parameters, dict):
            raise BadRequest(f"{where}: parameters must be an object", param="tools")
        function["description"] = text(f"{where}: description", function.get("description") or "")
        tools.append({"type": "function", "function": function})
    try:
        dump(tools).encode()
    except ValueError:
        raise BadRequest(
            "tools: hold half a character (a lone surrogate), or a number that is none", param="tools"
        ) from None
    flag(body, "parallel_tool_calls")
    choice: Any = body.get("tool_choice", "auto")
    if choice == "none":
        return (), ()
    if choice == "auto":
        return tuple(tools), ()
    named = None if choice == "required" else _function(choice, "tool_choice")["name"]
    names = tuple(tool["function"]["name"] for tool in tools if named in (None, tool["function"]["name"]))
    if not names:
        asked = "needs tools" if named is None else f"there is no tool {named!r} in tools"
        raise BadRequest(f"tool_choice: {asked}", param="tool_choice")
    return tuple(tools), names


def template_values(body: Mapping[str, Any]) -> dict[str, Any]:
    """Values that the fields `reasoning_effort` and `chat_template_kwargs` give the chat template."""
    values: dict[str, Any] = {}
    if "reasoning_effort" in body:
        values["reasoning_effort"] = text("reasoning_effort", body["reasoning_effort"])
    given = body.get("chat_template_kwargs", {})
    if not isinstance(given, dict) or set(given) - {"enable_thinking"}:
        raise BadRequest(
            f"chat_template_kwargs must be an object with nothing but enable_thinking, not {short(given)}",
            param="chat_template_kwargs",
        )
    return values | {name: flag(given, name) for name in given}


def _content(content: Any, where: str) -> str:
    """A message's text. Parts are joined by line ends, as vLLM does for templates that expect one text."""
    if not isinstance(content, list):
        return text(f"{where}: content", content)
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else part
            raise BadRequest(
                f"{where}: a content part of type {short(kind)} is not supported; only text is", param=where
            )
        check_names(part, ("type", "text"))
        texts.append(text(f"{where}: text", part.get("text")))
    return "\n".join(texts)
