"""The forms in which families of models write reasoning and calls of tools: one table, and which of them a model has.

A form is data. A mark in the text opens reasoning, or a call, which is written in one of these ways:

- "objects": JSON objects that hold a name and arguments, one after the other or in a list;
- "json": a head with the name, then the arguments as a JSON object;
- "bare": as "json", with names that are not quoted and strings between marks of their own;
- "parameters": a head with the name, then each argument between marks of its own;
- "python": calls of functions, one after the other or in a list, or a program;
- "message": a head with the name, then text up to a mark. A head without a name opens reasoning, or the answer's text.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from flashllm.errors import UsageError

Body = Literal["objects", "json", "bare", "parameters", "python", "message"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A way of writing calls."""

    open: str  # "": no mark, but one of `starts` as the answer's first character; then only tools that were offered
    body: Body
    starts: str = "{["
    head: str = ""  # a pattern of what stands before the arguments, with groups "name", "id", "thinking"
    until: tuple[str, ...] = ()  # where the head ends
    close: tuple[str, ...] = ()
    parameter: tuple[str, str, str] = ("", "", "")  # marks before an argument, between its name and value, behind it
    quote: str = ""  # around the strings of a "bare" body
    whole: bool = False  # an object is told when it is complete: its id comes last


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """How calls are written where an answer is held to them: NAME, ARGUMENTS and NUMBER stand for others.

    Arguments are JSON; or each is a `parameter`, in which KEY and VALUE stand for others, and all are `joined`.
    """

    call: str
    before: str = ""
    between: str | None = None  # None: there is one call
    behind: str = ""
    parameter: str = ""
    joined: str = ""
    needs: tuple[str, ...] = ()  # special tokens without which calls are written in another way

    def text_of(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls, each a name and its arguments in JSON, as they are written. ValueError for more than one where there
        is one, and for arguments that are written one by one."""
        if self.parameter or (self.between is None and len(calls) > 1):
            raise ValueError("such calls have no text of their own")
        written = (
            self._filled({"NAME": name, "ARGUMENTS": arguments, "NUMBER": str(number)})
            for number, (name, arguments) in enumerate(calls)
        )
        return f"{self.before}{(self.between or '').join(written)}{self.behind}"

    def _filled(self, places: Mapping[str, str]) -> str:
        return re.sub("|".join(places), lambda place: places[place[0]], self.call)


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A family's form of reasoning and calls."""

    name: str
    written: tuple[str, ...]  # a chat template with all of these is the family's
    calls: tuple[Call, ...] = ()  # those with the same mark are tried in turn
    section: tuple[str, ...] = ()  # marks before and behind several calls
    thinking: tuple[tuple[str, str], ...] = (("<think>", "</think>"),)
    dropped: tuple[str, ...] = ()  # marks around the answer's text
    held: tuple[Held, ...] = ()  # none: no answer can be held to a call
    lead: str = ""  # what may stand before an answer that is held to a form; TEXT stands for reasoning
    answer: str = ""  # what stands before an answer's text

    def holds(self, token: str) -> bool:
        """True for a special token that is a mark, or a part of one, so that it must stay in the text."""
        parts = [*self.section, *self.dropped, *(mark for pair in self.thinking for mark in pair)]
        for call in self.calls:
            parts += (call.open, call.head.replace("\\", ""), *call.until, *call.close, *call.parameter, call.quote)
        return any(token in part for part in parts)


def _objects(open_: str, close: str = "", *, whole: bool = False) -> Call:
    return Call(open=open_, body="objects", close=(close,), whole=whole)


def _json(open_: str, head: str, *close: str) -> Call:
    return Call(open=open_, body="json", head=head, until=("{",), close=close)


def _bare(open_: str, close: str, quote: str) -> dict[str, Any]:
    """The fields `calls` and `held` of a format with such bodies."""
    call = Call(open=open_, body="bare", head=r"call:(?P<name>[\w.:-]+)", until=("{",), close=(close,), quote=quote)
    held = Held(call=f"{open_}call:NAME{{ARGUMENTS}}{close}", parameter="KEY:VALUE", joined=",", between="")
    return {"calls": (call,), "held": (held,)}


def _section(open_: str, close: str, line: str = "", **held: Any) -> dict[str, Any]:
    """The fields `section` and `held` of a format whose calls stand between two marks, perhaps on own lines."""
    return {"section": (open_, close), "held": (Held(before=open_ + line, behind=line + close, **held),)}


def _parameters(open_: str, head: str, close: str, *parameter: str) -> Call:
    before, middle, after = parameter
    until = (before, close)
    return Call(
        open=open_, body="parameters", head=head, until=until, close=(close,), parameter=(before, middle, after)
    )


def _llama(start: str, end: str) -> tuple[Call, ...]:
    lists = Call(open="", body="python", head=r"\[\s*(?P<name>[\w.]+)", until=("(",))
    marked = Call(open=start, body="python", close=(end,))
    return Call(open="", body="objects"), lists, _objects(start, end), marked


def _held(name: str, arguments: str, before: str = "", behind: str = "", between: str | None = None) -> Held:
    call = f'{{"{name}": "NAME", "{arguments}": ARGUMENTS}}'
    return Held(call=call, before=before, between=between, behind=behind)


def _harmony(mark: str) -> Call:
    return Call(
        open=mark,
        starts="t",
        body="message",
        head=r"(?=.*\bto=(?:functions\.)?(?P<name>[^\s<]+))?(?:(?P<thinking>[^<]*(?:<\|channel\|>)?analysis)|).*",
        until=("<|message|>",),
        close=("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>"),
    )


_NAMED = r'"?(?P<name>[^">\n]+)"?>'
_WORD = r"(?P<name>[\w.:-]+)"
_KIMI = r"(?P<id>(?:functions\.)?(?P<name>[\w.-]+)(?::\d+)?)\s*<\|tool_call_argument_begin\|>"
_DEEPSEEK = r"(?:function<｜tool▁sep｜>)?(?P<name>[^\s<]+)(?:<｜tool▁sep｜>|\s*```json)"
_FENCED = r"(?P<name>[^\s<]+)\s*(?:```json)?"
_MISTRAL = r"(?P<name>[\w.-]+)(?:\[CALL_ID\](?P<id>[^\s\[]+))?(?:\[ARGS\])?"

# The first whose marks a template has is the model's.
FORMATS = (
    Format(
        name="harmony",
        written=("<|channel|>", "<|message|>"),
        calls=(_harmony("<|channel|>"), _harmony("<|start|>"), _harmony("")),
        thinking=(),
        dropped=("<|end|>", "<|call|>", "<|return|>"),
        held=(Held(call="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS<|call|>"),),
        lead="<|channel|>analysis<|message|>TEXT<|end|><|start|>assistant",
        answer="<|channel|>final<|message|>",
    ),
    Format(
        name="kimi",
        written=("<|im_middle|>",),
        calls=(_json("<|tool_call_begin|>", _KIMI, "<|tool_call_end|>"),),
        **_section(
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            call="<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>",
            between="",
        ),
    ),
    Format(
        name="deepseek",
        written=("<｜tool▁call▁begin｜>",),
        calls=(_json("<｜tool▁call▁begin｜>", _DEEPSEEK, "```<｜tool▁call▁end｜>", "<｜tool▁call▁end｜>"),),
        **_section(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            call="<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>",
            between="",
        ),
    ),
    Format(
        name="mistral",
        written=("[TOOL_CALLS]",),
        thinking=(("[THINK]", "[/THINK]"), ("<think>", "</think>")),
        calls=(_objects("[TOOL_CALLS]", whole=True), _json("[TOOL_CALLS]", _MISTRAL)),
        held=(
            Held(call="[TOOL_CALLS]NAME[ARGS]ARGUMENTS", between="", needs=("[ARGS]",)),
            _held("name", "arguments", "[TOOL_CALLS][", "]", ", "),
        ),
    ),
    Format(
        name="minimax",
        written=("<minimax:tool_call>",),
        calls=(_parameters("<invoke name=", _NAMED, "</invoke>", "<parameter name=", ">", "</parameter>"),),
        **_section(
            *("<minimax:tool_call>", "</minimax:tool_call>", "\n"),
            call='<invoke name="NAME">\nARGUMENTS</invoke>',
            parameter='<parameter name="KEY">VALUE</parameter>\n',
            between="\n",
        ),
    ),
    Format(
        name="gemma4",
        written=("<|tool_call>",),
        thinking=(("<|channel>thought", "<channel|>"),),
        **_bare("<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    Format(
        name="functiongemma",
        written=("<start_function_call>",),
        **_bare("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
    Format(
        name="cohere",
        written=("<|START_ACTION|>",),
        calls=(_objects("<|START_ACTION|>", "<|END_ACTION|>"),),
        held=(_held("tool_name", "parameters", "<|START_ACTION|>[", "]<|END_ACTION|>", ", "),),
        thinking=(("<|START_THINKING|>", "<|END_THINKING|>"),),
        dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    Format(
        name="qwen-coder",
        written=("<function=", "<parameter="),
        section=("<tool_call>", "</tool_call>"),
        calls=(_parameters("<function=", _NAMED, "</function>", "<parameter=", ">", "</parameter>"),),
        held=(
            Held(
                call="<tool_call>\n<function=NAME>\nARGUMENTS</function>\n</tool_call>",
                parameter="<parameter=KEY>\nVALUE\n</parameter>\n",
                between="\n",
            ),
        ),
    ),
    Format(
        name="glm",
        written=("<arg_key>",),
        calls=(_parameters("<tool_call>", _WORD, "</tool_call>", "<arg_key>", "<arg_value>", "</arg_value>"),),
        held=(
            Held(
                call="<tool_call>NAME\nARGUMENTS</tool_call>",
                parameter="<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n",
                between="\n",
            ),
        ),
    ),
    Format(
        name="hy3",  # its marks have a name behind them
        written=("<arg_key{}>", ":opensource"),
        thinking=(("<think:opensource>", "</think:opensource>"),),
        calls=(
            _parameters(
                *("<tool_call:opensource>", rf"{_WORD}<tool_sep:opensource>", "</tool_call:opensource>"),
                *("<arg_key:opensource>", "<arg_value:opensource>", "</arg_value:opensource>"),
            ),
        ),
        **_section(
            *("<tool_calls:opensource>", "</tool_calls:opensource>", "\n"),
            call="<tool_call:opensource>NAME<tool_sep:opensource>\nARGUMENTS</tool_call:opensource>",
            parameter="<arg_key:opensource>KEY</arg_key:opensource>\n"
            "<arg_value:opensource>VALUE</arg_value:opensource>\n",
            between="\n",
        ),
    ),
    Format(
        name="hunyuan",
        written=("<tool_calls>", "```json"),
        calls=(_json("<tool_call>", _FENCED, "```</tool_call>", "</tool_call>"),),
        **_section(
            *("<tool_calls>", "</tool_calls>", "\n"),
            call="<tool_call>NAME\n```json\nARGUMENTS\n```</tool_call>",
            between="\n",
        ),
        dropped=("<answer>", "</answer>"),
    ),
    Format(
        name="lfm2",
        written=("List of tools: ", "<|im_start|>"),
        calls=(
            _objects("<|tool_call_start|>", "<|tool_call_end|>"),
            Call(open="<|tool_call_start|>", body="python", close=("<|tool_call_end|>",)),
        ),
        held=(_held("name", "arguments", "<|tool_call_start|>[", "]<|tool_call_end|>", ", "),),
    ),
    Format(
        name="nemotron",
        written=("<TOOLCALL>",),
        calls=(_objects("<TOOLCALL>", "</TOOLCALL>"),),
        held=(_held("name", "arguments", "<TOOLCALL>[", "]</TOOLCALL>", ", "),),
    ),
    Format(
        name="ernie",
        written=("<tool_call>", "<response>", "<|im_start|>"),
        calls=(_objects("<tool_call>", "</tool_call>"),),
        held=(Held(call='<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>', between="\n"),),
        dropped=("<response>", "</response>"),
    ),
    Format(
        name="hermes",
        written=("<tool_call>",),
        calls=(_objects("<tool_call>", "</tool_call>"),),
        held=(Held(call='<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>', between="\n"),),
    ),
    Format(
        name="phi4",
        written=("<|tool|>",),
        calls=(_objects("<|tool_call|>", "<|/tool_call|>"), _objects("functools")),
        held=(_held("name", "arguments", "<|tool_call|>[", "]<|/tool_call|>", ", "),),
    ),
    Format(
        name="granite",
        written=("<|tool_call|>",),
        calls=(_objects("<|tool_call|>"),),
        held=(_held("name", "arguments", "<|tool_call|>[", "]", ", "),),
        dropped=("<response>", "</response>"),
    ),
    Format(
        name="llama4",
        written=("<|header_start|>", "tool"),
        calls=_llama("<|python_start|>", "<|python_end|>"),
        held=(_held("name", "parameters"),),
    ),
    Format(
        name="llama3",
        written=("<|start_header_id|>", "tool"),
        calls=_llama("<|python_tag|>", "<|eom_id|>"),
        held=(_held("name", "parameters"),),
    ),
    Format(name="thinking", written=("think>",)),
)
# For models whose template takes no tools: they are told of them, and call them, in text. No template says so.
GENERIC = replace(next(each for each in FORMATS if each.name == "hermes"), name="generic", written=())


def find(template: str, name: str | None = None) -> Format | None:
    """The format called `name`, else the one whose marks stand in `template`; None: answers are plain text.

    UsageError where there is none of that name. `template` is all that the model's files say of its answers.
    """
    if name is None:
        return next((each for each in FORMATS if all(mark in template for mark in each.written)), None)
    known = (*FORMATS, GENERIC)
    for each in known:
        if each.name == name:
            return each
    names = ", ".join(each.name for each in known)
    raise UsageError(f"--tool-format: there is no format {name!r}; the formats are {names}")
