"""A model's chat template: a conversation rendered as the text it was trained on. Knows no token ids.

Templates are Jinja programs that come with the weights, so they run as untrusted code: in Jinja's sandbox
(`environment.py`), in a process of their own with limits (`renderer.py`).
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

from flashllm.base.files import Closing
from flashllm.errors import FormatError, UsageError
from flashllm.generate.templates.frames import Kind
from flashllm.generate.templates.renderer import Exceeded, Renderer
from flashllm.generate.tokenizer import Tokenizer

MAX_TEMPLATE_CHARS = 1_000_000
# A template that goes through a message's parts (text, pictures) without a look at their type takes no plain text.
_OF_PARTS = re.compile(r"for\s+\w+\s+in\s+\w+(\.content\b|\[['\"]content['\"]\])")
_OF_EITHER = re.compile(r"content(['\"]\])?\s+is\s+(not\s+)?(string|iterable|sequence|mapping)\b")
_OF_RESULTS = re.compile(r"[=!]=\s*['\"]tool['\"]")  # it has messages of tools
_OF_THINKING = re.compile(r"""\.thinking\b|\[['"]thinking['"]\]""")


class ChatTemplate(Closing):
    """One template. Used from any thread; closed it ends its process."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self | None:
        """A tokenizer's template; None where it has none. FormatError where it has several and none is "default"."""
        templates = tokenizer.chat_templates
        if not templates:
            return None
        if "default" not in templates:
            raise FormatError(
                f"{tokenizer.where}: has chat templates for {', '.join(sorted(templates))}, and no default one; "
                'rename one of them to "default" in tokenizer_config.json'
            )
        return cls(templates["default"], tokenizer.where, tokenizer.special, for_tools=templates.get("tool_use"))

    def __init__(
        self,
        source: str,
        where: str,
        tokens: Mapping[str, str] | None = None,
        *,
        for_tools: str | None = None,
        renderer: Renderer | None = None,
    ) -> None:
        """`where` names the template's file in messages; `tokens` are named special tokens, like "bos_token".

        `for_tools` is another template, for conversations with tools; None: there is none. The process of the
        `renderer` begins here, and compiles the template meanwhile.
        """
        self.for_tools = source if for_tools is None else for_tools
        if (chars := max(len(source), len(self.for_tools))) > MAX_TEMPLATE_CHARS:
            raise FormatError(f"{where}: the chat template has {chars} characters; {MAX_TEMPLATE_CHARS} at most")
        self._source, self._where, self._tokens = source, where, dict(tokens or {})
        self._renderer = Renderer() if renderer is None else renderer
        self._renderer.start(self._request(None))

    def check(self) -> None:
        """FormatError where the template is not one, or takes too long to compile."""
        self._ask(None)

    def takes(self, name: str) -> bool:
        """True where the template reads "tools", a message's "tool_calls", or one of the `values` of `render`."""
        source = self.for_tools if name in ("tools", "tool_calls") else self._source
        return re.search(rf"\b{name}\b", source) is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        values: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of `messages` ({"role": …, "content": …} each), up to where the answer begins.

        With `tools` that the model may call; `values` are other variables of the template. UsageError where the
        template refuses the conversation, FormatError where it fails or takes too much, FlashError where its process
        does not answer.
        """
        given = [dict(message) for message in messages]
        if tools and re.search(r"""\[['"]tools['"]\]""", self.for_tools):  # it reads them from the first message
            if given[0]["role"] != "system":
                given.insert(0, {"role": "system", "content": ""})
            given[0]["tools"] = json.dumps([each["function"] for each in tools], ensure_ascii=False)
        values = {"add_generation_prompt": True, "tools": list(tools) or None, **(values or {})}
        return self._ask(given, values)

    def _ask(self, messages: list[dict[str, Any]] | None, values: Mapping[str, Any] | None = None) -> str:
        try:
            kind, text = self._renderer.ask(self._request(messages, values))
        except Exceeded as error:
            kind, text = Kind.FAILED, str(error)
        if kind == Kind.REFUSED:
            raise UsageError(f"the model's chat template refuses this conversation: {text}")
        if kind == Kind.FAILED:
            raise FormatError(f"{self._where}: the chat template failed: {text}")
        if kind == Kind.INVALID:
            raise FormatError(f"{self._where}: the chat template is not valid: {text}")
        return text

    def _request(
        self, messages: list[dict[str, Any]] | None, values: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        values = {**self._tokens, "documents": None, **(values or {})}
        source = self.for_tools if values.get("tools") else self._source
        if messages is not None and _OF_PARTS.search(source) and not _OF_EITHER.search(source):
            messages = [_with_parts(message) for message in messages]
        if messages is not None and "tool_responses" in source and not _OF_RESULTS.search(source):
            messages = _with_results(messages)
        if messages is not None and _OF_THINKING.search(source):
            refused = "<|channel|>" in source  # gpt-oss takes no reasoning beside text and calls
            messages = [_with_thinking(message, refused) for message in messages]
        return {"source": source, "values": values, "messages": messages}

    def close(self) -> None:
        self._renderer.close()


def _with_parts(message: dict[str, Any]) -> dict[str, Any]:
    text = message.get("content")
    return {**message, "content": [{"type": "text", "text": text}]} if isinstance(text, str) else message


def _with_results(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools' results in the message with their calls, and the answer behind them too, as in one turn of the model's."""
    found: list[dict[str, Any]] = []
    for message in messages:
        turn = found[-1] if found and "tool_responses" in found[-1] and not found[-1]["content"] else None
        if turn and message["role"] == "tool":
            turn["tool_responses"].append({"name": message.get("name", ""), "response": message["content"]})
        elif turn and turn["tool_responses"] and message["role"] == "assistant" and not message.get("tool_calls"):
            turn["content"] = message["content"]
        elif message.get("tool_calls"):
            if message["content"]:  # it is before the calls, where the template has it behind them
                found.append({"role": "assistant", "content": message["content"]})
            found.append({**message, "content": "", "tool_responses": []})
        else:
            found.append(message)
    return found


def _with_thinking(message: dict[str, Any], refused: bool) -> dict[str, Any]:
    """Reasoning under its other name too; not where it is `refused`, beside text and calls."""
    if "reasoning_content" not in message or (refused and message.get("content") and message.get("tool_calls")):
        return message
    return {"thinking": message["reasoning_content"], **message}


@contextmanager
def opened_template(tokenizer: Tokenizer) -> Iterator[ChatTemplate | None]:
    """A tokenizer's template, closed at the end; None where it has none."""
    template = ChatTemplate.of(tokenizer)
    try:
        yield template
    finally:
        if template is not None:
            template.close()
