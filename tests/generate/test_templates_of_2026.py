"""Families of 2026 with tools and reasoning: rendered as transformers does, and what a template writes of an answer is
read back as that answer."""

import json

import pytest
from chat_templates import OF_2026

from flashllm.api.fields import BadRequest
from flashllm.api.prompts import PromptEncoder
from flashllm.api.requests import parse_body
from flashllm.generate.sampling import SamplingOptions
from flashllm.generate.templates.chat_template import ChatTemplate
from flashllm.replies.formats import GENERIC, find
from flashllm.replies.parser import Parser

CALLS = [("look", {"city": "Köln", "days": 3, "of": ["sun"], "on": True}), ("now", {})]
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "It.", "parameters": {"type": "object", **more}}}
    for name, more in (
        ("look", {"properties": {"city": {"type": "string"}, "on": {"type": "boolean"}}}),
        ("now", {"properties": {}}),
    )
]
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Rain?"}]
WRITTEN = [
    {"id": str(index), "type": "function", "function": {"name": name, "arguments": arguments}}
    for index, (name, arguments) in enumerate(CALLS)
]
CALLED = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": WRITTEN}
RESULTS = [
    {"role": "tool", "name": "look", "tool_call_id": "0", "content": 'wet & "cold"'},
    {"role": "tool", "name": "now", "tool_call_id": "1", "content": "noon"},
]
ANSWERED = [{"role": "assistant", "content": "It rains."}, {"role": "user", "content": "Oh."}]
SILENT = {**CALLED, "content": ""}  # in text


def one_turn(call):
    """As Gemma 4's first template has the call, its results and the answer."""
    responses = [{"name": each["name"], "response": each["content"]} for each in RESULTS]
    turn = {**call, "content": ANSWERED[0]["content"], "tool_responses": responses}
    before = [{"role": "assistant", "content": call["content"]}] if call["content"] else []
    return [*ASKED, *before, turn, ANSWERED[1]]


# format; what is before an answer; how a prompt ends where nothing is said of thinking, where it is on, and off
_CHATML, _EMPTY = "<|im_start|>assistant\n", "<think>\n\n</think>\n\n"
FAMILIES = {
    "qwen-3.5": ("qwen-coder", _CHATML, "<think>\n", "<think>\n", _EMPTY),
    "gemma-4": ("gemma4", "<|turn>model\n", *("<|channel>thought\n<channel|>", "", "<|channel>thought\n<channel|>")),
    "lfm-2.5": ("lfm2", _CHATML, "", None, None),
    "ling-2": ("hermes", "<role>ASSISTANT</role>", "", "\n<think>\n", ""),
    "ernie-4.5-thinking": ("ernie", _CHATML, "<think>\n", None, None),
    "exaone-moe": ("hermes", "<|assistant|>\n", "<think>\n", "<think>\n", _EMPTY),
    "laguna": ("glm", "<assistant>\n", "</think>", "<think>", "</think>"),
    "afmoe": ("hermes", _CHATML, "<think>\n", None, None),
    "youtu": ("hermes", "<|Assistant|>", "", "", _EMPTY),
}


@pytest.mark.parametrize("family", OF_2026)
@pytest.mark.parametrize("call", [CALLED, SILENT], ids=["beside text", "alone"])
def test_conversations_with_tools_render_as_transformers_renders_them(theirs, warm, family, call):
    ours = ChatTemplate(OF_2026[family], "here", theirs.special_tokens_map, renderer=warm)
    messages = [*ASKED, call, *RESULTS, *ANSWERED]
    given = one_turn(call) if family == "gemma-4" else messages
    for values in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
        asked = {"tokenize": False, "chat_template": OF_2026[family], "add_generation_prompt": True, **values}
        expected = theirs.apply_chat_template(given, tools=TOOLS, **asked)
        assert ours.render(messages, tools=TOOLS, values=values) == expected


def encoder(family, theirs, warm, **options):
    template = ChatTemplate(OF_2026[family], "here", theirs.special_tokens_map, renderer=warm)
    options = {"answers": find(OF_2026[family]), "context": 1000, "vocab": 300, **options}
    return PromptEncoder(tokenizer=None, template=template, **options)


def request(messages, **fields):
    written = json.loads(json.dumps(messages))
    for call in (call for message in written for call in message.get("tool_calls", ())):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    body = {"messages": written, "tools": TOOLS, **fields}
    return parse_body(body, "chat", custom_id="", defaults=SamplingOptions())


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_family_writes_of_an_answer_is_read_back(theirs, warm, family):
    name, header, *_ = FAMILIES[family]
    prompts = encoder(family, theirs, warm)
    assert prompts.answers.name == name
    text = prompts.conversation(request([*ASKED, SILENT, *RESULTS]))
    assert all(text.count(part) == 1 for part in ("Be brief.", "Rain?", 'wet & "cold"', "noon"))
    answer = text[text.index(header, text.index("Rain?")) + len(header) : text.index("wet")]
    parser = Parser(prompts.answers, {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS})
    events = [*parser.feed(answer), *parser.finish()]
    calls = [event for event in events if event.kind == "call"]
    arguments = ["".join(e.text for e in events if (e.kind, e.index) == ("arguments", c.index)) for c in calls]
    assert [(c.text, json.loads(each)) for c, each in zip(calls, arguments, strict=True)] == CALLS
    thought = "".join(event.text for event in events if event.kind == "reasoning")
    assert thought == ("" if family == "gemma-4" else "Hm.")
    again = prompts.conversation(request([*ASKED, CALLED, *RESULTS]))
    assert again.count("I look.") == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_opens_reasoning_as_the_family_does(theirs, warm, family):
    _, header, *ends = FAMILIES[family]
    prompts = encoder(family, theirs, warm)
    for thinks, end in zip((None, True, False), ends, strict=True):
        asked = request(ASKED, **({} if thinks is None else {"chat_template_kwargs": {"enable_thinking": thinks}}))
        if end is None:
            with pytest.raises(BadRequest, match="chat template has no enable_thinking"):
                prompts.conversation(asked)
        else:
            assert prompts.conversation(asked).endswith(header + end)


def test_a_family_without_tools_says_so_and_has_them_in_text(theirs, warm):
    with pytest.raises(BadRequest, match="takes no tools; `serve --tool-format generic`"):
        encoder("ernie-4.5", theirs, warm).conversation(request(ASKED))
    text = encoder("ernie-4.5", theirs, warm, answers=GENERIC).conversation(request([*ASKED, CALLED, *RESULTS]))
    assert '<tool_call>\n{"name": "now", "arguments": {}}' in text
    assert text.endswith("</tool_response>\nAssistant: ")


def test_results_are_folded_for_a_template_without_messages_of_tools_alone(warm):
    """Two rounds of calls, and a result without a call."""
    lost, call = {"role": "tool", "content": "lost"}, {"role": "assistant", "content": "", "tool_calls": WRITTEN[:1]}
    messages = [lost, call, RESULTS[0], call, RESULTS[1], ANSWERED[0], ANSWERED[0]]

    def shown(source):
        source += "{{ messages | tojson }}{# tool_responses #}"
        return json.loads(ChatTemplate(source, "here", renderer=warm).render(messages))

    assert shown("{% if messages[0].role == 'tool' %}{% endif %}") == messages
    folded = [{"tool_responses": [{"name": each["name"], "response": each["content"]}]} for each in RESULTS]
    first, second = call | folded[0], call | folded[1] | {"content": "It rains."}
    assert shown("{% set kind = 'tool' %}") == [lost, first, second, ANSWERED[0]]


@pytest.mark.parametrize(("mark", "beside_text"), [("", "Hm."), ("<|channel|>", None)])
def test_reasoning_goes_by_its_other_name_too(warm, mark, beside_text):
    """But not beside text and calls where there are channels: gpt-oss refuses both."""
    source = mark + "{% for m in messages %}{% if m.thinking %}{% endif %}{% endfor %}{{ messages | tojson }}"
    text = ChatTemplate(source, "here", renderer=warm).render([CALLED, SILENT, ANSWERED[0]])
    assert [m.get("thinking") for m in json.loads(text.removeprefix(mark))] == [beside_text, "Hm.", None]
