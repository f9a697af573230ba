"""The grammar (Lark, as llguidance reads it) of an answer that calls tools in its family's form, or is JSON."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from flashllm.replies.formats import Format, Held
from flashllm.replies.written import dump

_PLACES = re.compile("NAME|ARGUMENTS|NUMBER|TEXT")


def held_by(form: Format | None, special: Mapping[str, int]) -> Held | None:
    """How calls are written where an answer is held to them; None: this form's cannot be."""
    ways = () if form is None else form.held
    return next((each for each in ways if all(mark in special for mark in each.needs)), None)


def grammar_of(
    form: Format | None,
    special: Mapping[str, int],
    *,
    written: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] = (),
    one_call: bool = False,
    schema: Mapping[str, Any] | None = None,
) -> str:
    """The grammar of an answer that calls one of `tools`, or several; or that is JSON by `schema`, where there is one.

    `special` are the tokens that no text is made of, `written` says how JSON is. ValueError where calls cannot be held.
    """
    way = held_by(form, special)
    rules, starts = [f"REASONING: /(.|\\n)*/\nNUMBER: /{0 if one_call else '[0-9]{1,2}'}/"], []
    if schema is not None:
        rules.append(f"answer: {_text(form.answer if form else '', special)} {_json(schema, written)}")
        starts.append("answer")
    if tools:
        if way is None:
            raise ValueError("calls of this form cannot be held")
        for number, tool in enumerate(tools):
            name, schema_of = tool["function"]["name"], tool["function"]["parameters"]
            rules.append(f"call_{number}: {_text(way.call, special, name=name, arguments=f'arguments_{number}')}")
            rules.append(f"arguments_{number}: {_json({'type': 'object', **schema_of}, written)}")
        rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(tools))))
        many = "" if one_call or way.between is None else f"({_text(way.between, special)} call)*"
        rules.append(f"calls: {_text(way.before, special)} call {many} {_text(way.behind, special)}")
        starts.append("calls")
    lead = "" if form is None or not form.lead else f"({_text(form.lead, special)})? "
    return "\n".join((f"start: {lead}({' | '.join(starts)})", *rules))


def _json(schema: Mapping[str, Any], written: Mapping[str, Any]) -> str:
    return f"%json {dump({**schema, 'x-guidance': dict(written)})}"


def _text(text: str, special: Mapping[str, int], *, name: str = "", arguments: str = "") -> str:
    """A text as Lark: what stands for others filled in, special tokens by their ids."""
    marks = sorted((mark for mark in special if mark in text), key=len, reverse=True)
    parts = re.split("(" + "|".join([_PLACES.pattern, *map(re.escape, marks)]) + ")", text)
    made, plain = [], ""
    for part in [*parts, None]:
        if part is not None and part not in special and part not in ("ARGUMENTS", "NUMBER", "TEXT"):
            plain += name if part == "NAME" else part
            continue
        if plain:
            made.append(dump(plain))
            plain = ""
        if part is not None:
            made.append(
                f"<[{special[part]}]>"
                if part in special
                else {"ARGUMENTS": arguments, "TEXT": "REASONING"}.get(part, part)
            )
    return " ".join(made)
