"""The parser of answers: each family's forms, cut anywhere; what is malformed; anything else."""

import json
import random
from collections import Counter
from importlib.resources import files

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutated import check, mutated, parsed
from recorded import ANSWERS, BROKEN, MALFORMED, TEMPLATES, TOOLS
from tokenizers import Tokenizer

from flashllm.errors import UsageError
from flashllm.replies.formats import FORMATS, find
from flashllm.replies.parser import Parser, new_id

_DEMO = Tokenizer.from_file(str(files("flashllm") / "demo" / "tokenizer.json"))
# What stands for a byte in a token of GPT-2's.
_PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PLAIN]
_BYTES = {chr(byte): byte for byte in _PLAIN} | {chr(256 + at): byte for at, byte in enumerate(_OTHERS)}


def cuts(text):
    """The whole, each cut in two at a byte, all bytes apart, all characters apart, all tokens apart."""
    raw = text.encode()
    yield from ([raw[:at], raw[at:]] for at in range(len(raw)))
    yield [raw[at : at + 1] for at in range(len(raw))]
    yield list(text)
    tokens = [bytes(_BYTES[char] for char in token) for token in _DEMO.encode(text, add_special_tokens=False).tokens]
    assert b"".join(tokens) == raw
    yield tokens


@pytest.mark.parametrize("recorded", ANSWERS, ids=lambda recorded: recorded[0])
def test_what_each_family_writes(recorded):
    source, name, answer, reasoning, text, calls = recorded
    expected = reasoning, text, calls
    for pieces in cuts(answer):
        found = parsed(name, pieces)
        made = [(call[0], json.loads(call[2]), *([call[1]] if len(wish) > 2 else []))
                for call, wish in zip(found[2], calls, strict=True)]  # fmt: skip
        assert (*found[:2], made) == expected, (source, pieces)
        assert all(call[3] for call in found[2])


@pytest.mark.parametrize("recorded", ANSWERS, ids=lambda recorded: recorded[0])
def test_a_call_that_broke_off_is_no_text(recorded):
    _, name, answer, _, text, calls = recorded
    for at in range(len(answer) if not calls or answer[0] not in "{[ " else 0):  # those begin without a mark
        parser = Parser(find("", name), TOOLS)
        events = parser.feed(answer[:at]) + parser.finish(cut=True)
        assert text.startswith("".join(event.text for event in events if event.kind == "text").rstrip()), at


@pytest.mark.parametrize(("name", "answer"), MALFORMED)
def test_what_is_malformed_is_text(name, answer):
    for pieces in cuts(answer):
        assert parsed(name, pieces) == ("", answer, []), pieces


@pytest.mark.parametrize(("name", "answer", "tool", "arguments"), BROKEN)
def test_broken_arguments_are_told_and_said_to_be(name, answer, tool, arguments):
    for pieces in cuts(answer):
        *_, ((called, _, told, valid),) = parsed(name, pieces)
        assert (called, told, valid) == (tool, arguments, False), pieces


def test_arguments_come_before_they_are_complete():
    for name, before, begin in (
        ("hermes", '<tool_call>\n{"name": "write", "arguments": {"text": "one', '{"text": "one'),
        ("qwen-coder", "<function=write>\n<parameter=text>\none", '{"text": "one'),
        ("kimi", '<|tool_call_begin|>functions.write:0<|tool_call_argument_begin|>{"text": "one', '{"text": "one'),
    ):
        parser = Parser(find("", name), TOOLS)
        call, *pieces = parser.feed(before)
        assert (call.kind, call.text, "".join(piece.text for piece in pieces)) == ("call", "write", begin)
        assert {piece.kind for piece in pieces} == {"arguments"}


def test_text_comes_at_once_but_for_what_may_be_a_mark():
    parser = Parser(find("", "hermes"), TOOLS)
    told = ["".join(event.text for event in parser.feed(piece)) for piece in ("Hi ", "you <", "b> <tool", "s> ", "x")]
    assert told == ["Hi", " you", " <b>", " <tools>", " x"]


def test_without_tools_there_are_no_calls():
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert parsed("hermes", [f"<think>a</think>{call}"], tools={}) == ("a", call, [])
    assert parsed("llama3", ['{"name": "now", "parameters": {}}'], tools=None)[2] == []


def test_a_prompt_that_opened_reasoning():
    for pieces in cuts("Rain?\n</think>\n\nIt rains."):
        assert parsed("hermes", pieces, thinking=True) == ("Rain?", "It rains.", [])
    assert parsed("hermes", ["Rain? "], thinking=True) == ("Rain?", "", [])


def test_an_answer_of_one_call_is_done_with_it():
    for name, answer in (("llama4", "[now(), now()]"), ("hermes", 2 * '<tool_call>{"name": "now"}</tool_call>')):
        parser = Parser(find("", name), TOOLS, one_call=True)
        events = parser.feed(answer) + parser.finish()
        assert [event.kind for event in events] == ["call", "arguments", "end"]
        assert parser.done


def test_a_program_goes_to_the_tool_that_takes_one():
    tools = {**TOOLS, "python": {}}
    code = "x = now(a=1)\nprint(x)"
    assert parsed("llama3", [f"<|python_tag|>{code}"], tools=tools)[2] == [
        ["python", "made0", json.dumps({"code": code}), True]
    ]


@pytest.mark.parametrize(("template", "name"), TEMPLATES)
def test_the_format_is_found_in_the_template(template, name):
    found = find(template)
    assert (found and found.name) == name


def test_a_format_by_name():
    assert [find("<tool_call>", form.name) for form in FORMATS] == list(FORMATS)
    with pytest.raises(UsageError, match="no format 'nothing'; the formats are harmony, kimi"):
        find("<tool_call>", "nothing")


def test_every_format_is_recorded_and_its_special_tokens_stay():
    assert {name for _, name, *_ in ANSWERS} == {form.name for form in FORMATS}
    held = ("<|channel|>", "[CALL_ID]", "<｜tool▁sep｜>", "<|tool_call_argument_begin|>", '<|"|>')
    found = Counter(token for form in FORMATS for token in held if form.holds(token))
    assert found == {**dict.fromkeys(held, 1)}
    assert not any(form.holds("<|im_end|>") or form.holds("<|eot_id|>") for form in FORMATS)


def test_ids_are_as_mistrals_templates_demand():
    ids = {new_id() for _ in range(50)}
    assert len(ids) == 50
    assert all(len(each) == 9 and each.isascii() and each.isalnum() for each in ids)


texts = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="<>|[]{}｜"), min_size=1, max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)
WRITERS = {  # of arguments that are any JSON
    "hermes": '<tool_call>\n{{"name": "now", "arguments": {0}}}\n</tool_call>',
    "mistral": '[TOOL_CALLS] [{{"name": "now", "arguments": {0}, "id": "abcdefghi"}}]',
    "kimi": "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{0}<|tool_call_end|>",
    "deepseek": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{0}\n```<｜tool▁call▁end｜>",
    "granite": '<|tool_call|>[{{"name": "now", "arguments": {0}}}]',
    "cohere": '<|START_ACTION|>[{{"tool_name": "now", "parameters": {0}}}]<|END_ACTION|>',
    "llama3": '<|python_tag|>{{"name": "now", "parameters": {0}}}',
    "harmony": "<|channel|>commentary to=functions.now<|message|>{0}<|call|>",
}


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_any_arguments_come_as_they_are(name, data):
    arguments = json.dumps(data.draw(st.dictionaries(st.text(max_size=5), values, max_size=4)), ensure_ascii=False)
    size = data.draw(st.integers(1, 9))
    answer = WRITERS[name].format(arguments)
    _, text, ((called, _, told, valid),) = parsed(name, [answer[at : at + size] for at in range(0, len(answer), size)])
    assert (text, called, valid) == ("", "now", True)
    assert json.loads(told) == json.loads(arguments)


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(
    st.lists(texts, min_size=1, max_size=6), st.sampled_from([form.name for form in FORMATS if form.name != "harmony"])
)
def test_plain_text_comes_as_it_is(pieces, name):
    assert parsed(name, pieces) == ("", "".join(pieces), [])


def test_mutated_answers_are_the_same_however_they_are_cut():
    """A thousand of them, whose words are all told; `python tests/replies/mutated.py` tries a million."""
    rng = random.Random(7)
    for _ in range(1000):
        check(*mutated(rng), rng.randint(1, 7))
