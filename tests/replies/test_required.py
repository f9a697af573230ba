"""Answers held to calls, in every family's form: whatever the model prefers, the parser finds calls that are valid."""

import json

import numpy as np
import pytest
from tiny_models import make_tokenizer

from flashllm.generate.grammar import WRITTEN, Constraint, Grammars
from flashllm.replies.formats import FORMATS, find
from flashllm.replies.parser import Parser
from flashllm.replies.required import grammar_of

WRITE = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "description": "where"},
        "mode": {"type": "string", "enum": ["new", "over"]},
        "lines": {"type": "integer"},
        "tags": {},
        "at": {
            "type": "object",
            "properties": {"x": {"type": "boolean"}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
    "required": ["path", "lines", "at"],
    "additionalProperties": False,
}
NONE = {"type": "object", "properties": {}, "additionalProperties": False}
HELD = [each for each in FORMATS if each.held]


def marks_of(form):
    """Marks that are special tokens of some models."""
    call = form.calls[0]
    marks = {call.open, *call.close, *form.section, *call.parameter, call.quote, *form.dropped}
    return {mark for mark in marks if mark[:1] in "<[" and mark[-1:] in ">]"}


def grammars(special):
    tokenizer = make_tokenizer(300)
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(special)})
    return tokenizer, Grammars(tokenizer.backend_tokenizer, {2}, len(tokenizer))


def answer(tokenizer, matcher, mark, rng):
    """A random answer of the grammar, which ends soon: what goes on with the mark behind a value is likely."""
    text, ids = "", []
    texts = [tokenizer.decode([each]) for each in range(len(tokenizer))]
    for _ in range(3000):
        if matcher.ended:
            break
        if matcher.forced:
            token = matcher.forced[0]
        else:
            logits = matcher.masked(rng.standard_normal(len(texts)).astype(np.float32))
            begun = next(length for length in range(len(mark) - 1, -1, -1) if text.endswith(mark[:length]))
            for each in np.flatnonzero(np.isfinite(logits)):
                if texts[each] and mark.startswith(texts[each], begun):
                    logits[each] += 4 + 2 * begun
            logits[2] += 9
            token = int(logits.argmax())
        matcher.accept(token)
        ids.append(token)
        text = tokenizer.decode(ids).removesuffix("</s>")
    assert matcher.ended, text[-200:]
    return text


@pytest.mark.parametrize(
    ("form", "special"),
    [(form, special) for form in HELD for special in (False, True) if special or form.name != "harmony"],
    ids=lambda value: getattr(value, "name", value),
)
def test_calls_are_valid(form, special):
    """`special`: the form's marks are special tokens, and the answer has one call."""
    rng = np.random.default_rng(5)
    needs = {mark for held in form.held for mark in held.needs}
    marks = {"<|channel|>", "<|message|>", "<|constrain|>"} | marks_of(form)
    tokenizer, compiled = grammars(marks | needs if special else needs or {"<none>"})
    # A text inside JSON that holds the mark behind it would end it: no model has reason to write one.
    kind = "integer" if form.calls[0].body == "parameters" else "string"
    write = {**WRITE, "properties": {**WRITE["properties"], "tags": {"type": "array", "items": {"type": kind}}}}
    schemas = {"write": write, "now": NONE}
    tools = [{"type": "function", "function": {"name": name, "parameters": schemas[name]}} for name in schemas]
    behind = form.held[0].parameter.partition("VALUE")[2].strip(" ").removesuffix("\n") or form.calls[0].quote or '"'
    text = grammar_of(form, compiled.marks(), written=WRITTEN, tools=tools, one_call=special)
    found = set()
    for _ in range(6):
        said = answer(tokenizer, compiled.start(Constraint("lark", text)), behind, rng)
        parser = Parser(form, schemas)
        events = [*parser.feed(said), *parser.finish()]
        calls = {event.index: event.text for event in events if event.kind == "call"}
        assert calls, said
        assert "".join(event.text for event in events if event.kind == "text").strip() == "", said
        for index, name in calls.items():
            told = "".join(each.text for each in events if each.kind == "arguments" and each.index == index)
            arguments = json.loads(told or "{}")
            found.add(name)
            if name == "write":
                assert {"path", "lines", "at"} <= set(arguments) <= set(WRITE["properties"]), said
                assert isinstance(arguments["path"], str)
                assert isinstance(arguments["lines"], int), said
                assert arguments.get("mode", "new") in ("new", "over")
                assert all(isinstance(each, int if kind == "integer" else str) for each in arguments.get("tags", []))
                assert isinstance(arguments["at"]["x"], bool)
            else:
                assert arguments == {}
    assert "write" in found


@pytest.mark.parametrize(
    ("form", "schema", "says"),
    [
        ("glm", {"type": "string", "pattern": "^a"}, "write: its schema has 'pattern'"),
        ("gemma4", {"anyOf": [{"type": "object"}]}, "may be of any kind"),
        ("harmony", None, None),
    ],
)
def test_what_cannot_be_held_is_said(form, schema, says):
    properties = {} if schema is None else {"path": schema}
    tool = {"type": "function", "function": {"name": "write", "parameters": {"properties": properties}}}
    if says is None:
        assert "commentary to=functions.write" in grammar_of(find("", form), {}, written=WRITTEN, tools=[tool])
        return
    with pytest.raises(ValueError, match=says):
        grammar_of(find("", form), {}, written=WRITTEN, tools=[tool])
