"""A request's prompt as token ids: chat templates rendered, text encoded, ids checked, lengths kept to the context.

Knows the model's tokenizer and sizes, not its weights.
"""

import json
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

from flashllm.api.fields import BadRequest
from flashllm.api.messages import Message
from flashllm.api.pieces import PIECE_CHARS, Pieces, TooLong
from flashllm.api.requests import Request
from flashllm.errors import BudgetError, FlashError, FormatError, UsageError
from flashllm.generate.detokenizer import Decoder
from flashllm.generate.grammar import WRITTEN, Constraint, Grammars, Matcher, Reasoning
from flashllm.generate.session import common_prefix
from flashllm.generate.templates.chat_template import ChatTemplate
from flashllm.generate.tokenizer import Tokenizer
from flashllm.replies.formats import GENERIC, Format
from flashllm.replies.parser import Parser
from flashllm.replies.required import grammar_of, held_by
from flashllm.replies.written import dump

_END_TOKENS = 16  # of a prompt, that may open reasoning
_NO_TOOLS = "this model's chat template takes no tools; `serve --tool-format generic` writes them as text"


class Unanswerable(Exception):
    """A well-formed request that this model cannot answer: its prompt is too long, or the template refuses it."""

    def __init__(self, message: str, *, code: str = "invalid_prompt") -> None:
        super().__init__(message)
        self.code = code  # as OpenAI's interface names it


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How one answer is read: its tokens to text with the format's marks, and that to what it says."""

    decoder: Decoder
    parser: Parser


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptEncoder:
    """Turns requests into sequences of one model. `tokenizer` and `template` are None where the model has none."""

    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    pieces: Pieces | None = None  # of the tokenizer; None: it takes every text whole
    context: int  # positions the model knows
    vocab: int
    end_ids: frozenset[int] = frozenset()  # where there is no tokenizer to say them
    answers: Format | None = None  # the form of the model's reasoning and calls; None: answers are plain text
    grammars: Grammars | None = None  # None: no answer is held to a form
    shares: bool = True  # what a prompt begins with may be kept for others
    plain_chat: bool = False  # without a template, the messages of a conversation are one text to continue

    def encode(self, request: Request) -> list[int]:
        """The prompt's token ids.

        BadRequest where it cannot be tokens of this model at all, or its answer cannot have the form that it must;
        Unanswerable where the template refuses it or the context cannot hold it with its new tokens.
        """
        steps = self.steps(request)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                ids: list[int] = end.value
                self.matcher(request, ids)
                return ids

    def steps(self, request: Request) -> Generator[None, None, list[int]]:
        """As `encode`, in steps, but for the form: a text longer than the context is given up in the midst of it."""
        ids = yield from self._ids(request)
        new = request.options.max_new_tokens if request.max_new_given else 1
        if len(ids) + new > self.context:
            wanted = f"{new} new tokens" if request.max_new_given else "a new token"
            raise self._too_long(f"has {len(ids)} tokens; with {wanted} that is more than")
        return ids

    def _too_long(self, what: str) -> Unanswerable:
        message = f"the prompt {what} the model's {self.context} positions"
        return Unanswerable(message, code="context_length_exceeded")

    def marks(self, request: Request, ids: Sequence[int]) -> Generator[None, None, tuple[int, ...]]:
        """How many of the prompt's tokens other requests may begin with too, in steps: up to the first message of the
        user's, and up to the last. None for what is no conversation, or where nothing is kept for them."""
        if not self.shares:
            return ()
        messages = [message for message in request.prompt if isinstance(message, dict)]
        asked = [at for at, message in enumerate(messages) if message["role"] == "user"]
        if request.kind != "chat" or self.template is None or self.tokenizer is None or not asked:
            return ()
        marks = []
        try:
            text = self._text(request, messages)
        except FlashError:  # it took too long this time
            return ()
        for at in sorted({asked[0], asked[-1]}):
            said = str(messages[at]["content"] or "").strip()
            other = {**messages[at], "content": "b" if said.startswith("a") else "a"}
            try:
                changed = self._render(request, [*messages[:at], other])
                alike = common_prefix(text, changed, min(len(text), len(changed)))
                # The shorter side is encoded again; a token may be on both.
                begins = alike <= len(text) // 2
                shorter = text[:alike] if begins else text[alike:]
                part = yield from self._encode(shorter, add_special=False)
            except (FlashError, Unanswerable):  # the template refuses what ends there, or there is nothing before
                continue
            if begins:
                marks.append(len(part) - (list(ids[: len(part)]) != part))
            else:
                marks.append(len(ids) - len(part) - (list(ids[-len(part) :]) != part))
        return tuple(mark for mark in marks if mark > 0)

    def max_new_tokens(self, request: Request, prompt_tokens: int) -> int:
        """The new tokens allowed: as many as it says, or the default as far as the context has room."""
        wanted = request.options.max_new_tokens
        return wanted if request.max_new_given else min(wanted, self.context - prompt_tokens)

    def reading(self, request: Request, ids: Sequence[int]) -> "Reading | None":
        """Decoder and parser for the answer to the prompt `ids`; None: it is plain text."""
        if request.kind != "chat" or self.answers is None or self.tokenizer is None or self.template is None:
            return None
        decoder = self.tokenizer.showing(self.answers.holds)
        thinking = self._opened(decoder, ids) is not None
        tools = {tool["function"]["name"]: tool["function"]["parameters"] for tool in request.tools}
        parser = Parser(self.answers, tools, thinking=thinking, one_call=request.one_call)
        return Reading(decoder=decoder, parser=parser)

    def matcher(self, request: Request, ids: Sequence[int]) -> Matcher | None:
        """The matcher of the form that the answer to the prompt `ids` must have; None: it may have any.

        BadRequest where there is no such form, Unanswerable where there is no memory for it.
        """
        if request.constraint is None and not request.must_call:
            reasoning = None if request.thinking_tokens is None else self._reasoning(request, ids)
            return None if reasoning is None else Matcher(None, self.vocab, (), reasoning)
        param = "tool_choice" if request.must_call else "response_format"
        if self.grammars is None:
            raise BadRequest(f"{param} needs the model's tokenizer, which is missing", param=param)
        try:
            return self.grammars.start(self._constraint(self.grammars, request, param), self._reasoning(request, ids))
        except UsageError as error:
            raise BadRequest(f"{param}: {error}", param=param) from None
        except BudgetError as error:
            raise Unanswerable(f"{param}: {error}") from None

    def _constraint(self, grammars: Grammars, request: Request, param: str) -> Constraint:
        """The form of the whole answer: of its text, or calls, in the model's way of writing."""
        constraint, form = request.constraint, self.answers
        if constraint is not None and not request.must_call:
            if not request.tools and not (request.kind == "chat" and form is not None and form.answer):
                return constraint
            if constraint.kind != "json":
                asked = f"{constraint.kind} goes neither with tools nor with this model's form of answers"
                raise BadRequest(f"{param}: {asked}", param=param)
        marks = grammars.marks()
        tools = [
            each for each in request.tools if each["function"]["name"] in request.must_call or not request.must_call
        ]
        schema = None if constraint is None or request.must_call else json.loads(constraint.text)
        try:
            text = grammar_of(form, marks, written=WRITTEN, tools=tools, one_call=request.one_call, schema=schema)
        except ValueError as error:
            asked = f"{param}: an answer cannot be held to this model's form of calls ({error})"
            raise BadRequest(f'{asked}; use tool_choice "auto" alone', param=param) from None
        return Constraint("lark", text)

    def _opened(self, decoder: Decoder, ids: Sequence[int]) -> tuple[str, str] | None:
        """The marks of the reasoning that the prompt `ids` has opened, if it has."""
        end = decoder.decode(ids[-_END_TOKENS:]).rstrip()
        return next((pair for pair in self.answers.thinking if end.endswith(pair[0])), None) if self.answers else None

    def _reasoning(self, request: Request, ids: Sequence[int]) -> Reasoning | None:
        """How the model reasons before its answer, where it may."""
        if request.kind != "chat" or self.answers is None or self.tokenizer is None or not self.answers.thinking:
            return None
        decoder = self.tokenizer.showing(self.answers.holds)
        opened = self._opened(decoder, ids)
        open_, close = opened or self.answers.thinking[0]
        first = self.tokenizer.encode(open_, add_special=False)
        return Reasoning(
            decoder=decoder,
            close=close,
            close_ids=tuple(self.tokenizer.encode(f"\n{close}\n\n", add_special=False)),
            opened=opened is not None,
            open_id=first[0] if len(first) == 1 else None,
            most=request.thinking_tokens,
        )

    def conversation(self, request: Request) -> str:
        """A conversation's text. BadRequest for what the model's template cannot be told, else as its render."""
        messages = [message for message in request.prompt if isinstance(message, dict)]
        more = request.tools or request.template_values or any("tool_calls" in message for message in messages)
        if self.template is None and self.plain_chat and not more:
            return plain_text(messages)
        text = self._text(request, messages)
        if any(self._loses(message, text) for message in messages):
            raise BadRequest(f"messages: {_NO_TOOLS}", param="messages")
        return text

    def _loses(self, message: Message, text: str) -> bool:
        """True where the message is a tool's call or result and the conversation's `text` is without it."""
        template = self.template
        if self.answers is GENERIC or template is None or template.takes("tools") or template.takes("tool_calls"):
            return False
        return "tool_calls" in message or (message["role"] == "tool" and message["content"].strip() not in text)

    def _text(self, request: Request, messages: Sequence[Message]) -> str:
        """The conversation's text, which ends in the last message where that is the assistant's: it is continued."""
        begun = messages[-1]
        if begun["role"] != "assistant" or begun.get("tool_calls") or not begun["content"]:
            return self._render(request, messages)
        text = self._render(request, messages[:-1])
        if self.answers is not None and any(text.rstrip().endswith(opened) for opened, _ in self.answers.thinking):
            asked = "messages: an answer that is begun cannot be continued where the model reasons first"
            raise BadRequest(f"{asked}; set enable_thinking to false", param="messages")
        return text + str(begun["content"])

    def _render(self, request: Request, messages: Sequence[Message]) -> str:
        """The conversation's text. BadRequest for what this model's template cannot be told, else as `render`."""
        template, values = self.template, dict(request.template_values)
        if template is None:
            raise BadRequest("the model has no chat template; use /v1/completions")
        tools = request.tools
        if self.answers is GENERIC and not template.takes("tools"):
            messages, tools = _in_text(messages, tools), ()
        if template.takes("tools") and not template.takes("tool_calls"):
            messages = [self._with_calls(message) for message in messages]
        if tools and not template.takes("tools"):
            raise BadRequest(f"tools: {_NO_TOOLS}", param="tools")
        if tools and (self.answers is None or not self.answers.calls):
            message = "tools: the form in which this model writes calls is not known; `serve --tool-format` names one"
            raise BadRequest(message, param="tools")
        if "reasoning_effort" in values and not template.takes("reasoning_effort"):
            values.setdefault("enable_thinking", values.pop("reasoning_effort") != "none")
        silent = self.answers in (None, GENERIC) and not template.takes("enable_thinking")
        if silent and values.get("enable_thinking") is False:
            del values["enable_thinking"]  # no reasoning is what such a model gives
        for name in values:
            if not template.takes(name):
                asked = "reasoning_effort" if "reasoning_effort" in request.template_values else "chat_template_kwargs"
                raise BadRequest(f"{asked}: this model's chat template has no {name}", param=asked)
        try:
            return template.render(messages, tools=tools, values=values)
        except FormatError:
            # Some templates write a call's arguments as the text that they are in a request.
            texts = [_with_texts(message) for message in messages]
            if texts == list(messages):
                raise
            return template.render(texts, tools=tools, values=values)

    def _with_calls(self, message: Message) -> Message:
        """The message with its calls in its text, as the model writes them: its template writes none."""
        if not message.get("tool_calls"):
            return message
        way = held_by(self.answers, {} if self.grammars is None else self.grammars.marks())
        try:
            if way is None:
                raise ValueError
            return {**message, "content": message["content"] + way.text_of(_calls(message))}
        except ValueError:
            raise BadRequest("messages: this model's chat template leaves such calls out", param="messages") from None

    def _ids(self, request: Request) -> Generator[None, None, list[int]]:
        prompt = request.prompt
        if request.options.stop and self.tokenizer is None:
            raise BadRequest("stop needs the model's tokenizer, which is missing", param="stop")
        if request.kind == "chat":
            try:
                text = self.conversation(request)
            except FlashError as error:  # the template refuses this conversation, or fails over it
                raise Unanswerable(str(error)) from error
            # A template writes the special tokens.
            plain = self.template is None
            return (yield from self._encode(text, add_special=plain))
        if isinstance(prompt, str):
            return (yield from self._encode(prompt, add_special=True))
        ids = [each for each in prompt if isinstance(each, int)]
        if max(ids) >= self.vocab:
            message = f"prompt: token id {max(ids)} is not below the model's vocabulary of {self.vocab}"
            raise BadRequest(message, param="prompt")
        return ids

    def _encode(self, text: str, *, add_special: bool) -> Generator[None, None, list[int]]:
        if self.tokenizer is None:
            raise BadRequest("the model has no tokenizer; give the prompt as token ids", param="prompt")
        if self.pieces is None:
            ids = self.tokenizer.encode(text, add_special=add_special)
        else:
            least = self.pieces.least(text)
            if least >= self.context:
                raise self._too_long(f"has {least} tokens or more; with a new token that is more than")
            try:
                ids = yield from self.pieces.encode(text, add_special=add_special, most=self.context)
            except TooLong as error:
                raise Unanswerable(str(error), code="context_length_exceeded") from None
            if len(ids) > self.context and len(text) > PIECE_CHARS:  # not all of them, perhaps
                raise self._too_long("has more tokens than")
        if not ids:
            raise Unanswerable("the prompt has no tokens")
        if max(ids) >= self.vocab:
            raise FlashError(f"the tokenizer gives id {max(ids)}, and the model's vocabulary has {self.vocab}")
        return ids


def _calls(message: Message) -> list[tuple[str, str]]:
    """The name and the arguments, in JSON, of each call of a message."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return [(call["name"], dump(call["arguments"])) for call in calls]


def _with_texts(message: Message) -> Message:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    texts = [each if isinstance(each := call["arguments"], str) else dump(each) for call in calls]
    pairs = zip(message.get("tool_calls", ()), texts, strict=True)
    written = [{**call, "function": {**call["function"], "arguments": text}} for call, text in pairs]
    return {**message, "tool_calls": written} if written else message


_TOOLS = """You may call functions. Each has a line here, as JSON:
<tools>
{}
</tools>
To call one, write its name and its arguments so, and then wait for the result:
<tool_call>
{{"name": "NAME", "arguments": {{"ARGUMENT": "VALUE"}}}}
</tool_call>"""


def _in_text(messages: Sequence[Message], tools: Sequence[Message]) -> list[Message]:
    """The conversation for a template without tools: they are told at its beginning, calls and results are text."""
    told: list[Message] = []
    for message in messages:
        text, role = message["content"], message["role"]
        if calls := _calls(message):
            text += "\n" + GENERIC.held[0].text_of(calls)
        if role == "tool":
            text = f"<tool_response>\n{text}\n</tool_response>"
            role = "user"
        if told and told[-1]["role"] == role == "user":  # templates expect turns
            told[-1]["content"] += f"\n{text}"
        else:
            told.append({"role": role, "content": text.strip() if role == "assistant" else text})
    if tools:
        said = _TOOLS.format("\n".join(dump(tool["function"]) for tool in tools))
        if told[0]["role"] == "system":
            told[0]["content"] += f"\n\n{said}"
        else:
            told.insert(0, {"role": "system", "content": said})
    return told


def plain_text(messages: Sequence[Mapping[str, str]]) -> str:
    """A conversation as one text: an answer stands right after what it continued, as in `flashllm chat`."""
    text = ""
    for message in messages:
        text += message["content"] if message["role"] == "assistant" or not text else f"\n{message['content']}"
    return text
