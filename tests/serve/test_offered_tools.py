"""Tools and reasoning in chat completions: real templates, tokens and parsers; a model that says what it is told to."""

import json
from typing import Literal

import openai
import pytest
from pydantic import BaseModel

from flashllm.errors import UsageError
from flashllm.serve.opening import ServerOptions

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
GIVEN = {"name": "now", "arguments": '{"zone": "CET"}'}
NOW = {"type": "function", "function": {"name": "now"}}
ASK = [{"role": "user", "content": "Rain?"}]
CALLED = [*ASK, {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": GIVEN}]}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln", "days": 3}}\n</tool_call>'
GOES_ON = """{% for m in messages %}{{ m.role }}:{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}</s>{% endfor %}{% if tools %}{% endif %}{% if add_generation_prompt %}assistant:{% endif %}"""
MISTRAL = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}[TOOL_CALLS]{% endfor %}"
DEEPSEEK = (
    "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% for call in m.tool_calls %}"
    "{{ '<｜tool▁call▁begin｜>' + call['function']['name'] + call['function']['arguments'] }}{% endfor %}{% endfor %}"
)


@pytest.fixture
def client(hermes):
    with openai.OpenAI(base_url=f"{hermes[0]}/v1", api_key="secret", max_retries=0, timeout=60) as client:
        yield client


def ask(client, messages=ASK, *, tools=(WEATHER, NOW), **options):
    return client.chat.completions.create(
        model="tiny", messages=messages, tools=tools or openai.omit, temperature=0, **options
    )


def streamed(chunks):
    """(content, reasoning, calls, finish) as clients add them up, and that names and ids come once."""
    content, reasoning, calls, finish = "", "", {}, None
    for chunk in chunks:
        (choice,) = chunk.choices
        delta = choice.delta
        content += delta.content or ""
        reasoning += getattr(delta, "reasoning_content", None) or ""
        for call in delta.tool_calls or ():
            if call.index not in calls:
                calls[call.index] = [call.id, call.function.name, ""]
                assert call.type == "function"
            else:
                assert call.id is None
                assert call.function.name is None
            calls[call.index][2] += call.function.arguments
        finish = choice.finish_reason or finish
    return content, reasoning, list(calls.values()), finish


def test_a_call_whole_and_streamed(client, say, seen):
    say(f"<think>\nHm.\n</think>\n\nI look.\n{CALL}\n{CALL.replace('Köln', 'Bonn')}")
    (choice,) = ask(client).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
    assert choice.message.reasoning_content == "Hm."
    found = [(call.type, call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
    assert found == [("function", "get_weather", {"city": city, "days": 3}) for city in ("Köln", "Bonn")]
    assert len({call.id for call in choice.message.tool_calls}) == 2
    assert '"name": "now", "parameters": {"type": "object", "properties": {}}' in seen[0]
    chunks = list(ask(client, stream=True))
    content, reasoning, calls, finish = streamed(chunks)
    assert len([chunk for chunk in chunks if chunk.choices[0].delta.tool_calls]) > 20  # pieces of arguments
    assert (content, reasoning, finish) == ("I look.", "Hm.", "tool_calls")
    assert [(call[1], json.loads(call[2])) for call in calls] == [each[1:] for each in found]


def post(http, *, messages=ASK, path="/v1/chat/completions", **fields):
    """The answer's document."""
    return http.post(path, json={"messages": messages, "temperature": 0, **fields}).json()


def message_of(http, **fields):
    return post(http, **fields)["choices"][0]["message"]


class Weather(BaseModel):
    """Where it rains."""

    city: Literal["Köln", "Bonn"]
    rains: bool


def test_what_the_client_parses(client, say):
    """Answers and arguments as pydantic models."""
    say("{No.")
    asked = {"model": "tiny", "messages": ASK, "temperature": 0}
    message = client.chat.completions.parse(**asked, response_format=Weather).choices[0].message
    assert message.parsed.city in ("Köln", "Bonn")
    say(CALL.replace("get_weather", "Weather").replace("days", "rains").replace("3", "true"))
    (call,) = (
        client.chat.completions.parse(**asked, tools=[openai.pydantic_function_tool(Weather)])
        .choices[0]
        .message.tool_calls
    )
    assert call.function.parsed_arguments == Weather(city="Köln", rains=True)


def test_without_text_the_content_is_null_and_a_malformed_call_is_text(client, say):
    say(CALL)
    assert ask(client).choices[0].message.content is None
    say("No rain.")
    message = ask(client).choices[0].message
    assert (message.content, message.tool_calls) == ("No rain.", None)
    malformed = "<tool_call>\nnothing\n</tool_call>"
    say(malformed)
    message = ask(client).choices[0].message
    assert (message.content, message.tool_calls) == (malformed, None)


def test_the_conversation_goes_on(client, say, seen, hermes):
    """The call's result: the template gets objects, names and ids; the answer's own tokens are not computed again."""
    say(f"<think>\nHm.\n</think>\n{CALL}")
    first = ask(client)
    message = first.choices[0].message
    say("It rains.")
    messages = [
        {"role": "developer", "content": "Help."},
        *ASK,
        {**message.model_dump(exclude_none=True), "content": None},
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": [{"type": "text", "text": "rain"}]},
    ]
    choice = ask(client, messages).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("It rains.", "stop")
    text = seen[-1]
    assert text.startswith("T{")
    assert ";system:Help.;user:Rain?;assistant:<think>Hm.</think><tool_call>[('city', 'Köln'), ('days', 3)]" in text
    assert f";tool:<get_weather/{message.tool_calls[0].id}>rain;assistant:" in text


def test_the_next_turn_of_a_conversation_with_calls_reuses_the_answer(say, with_template):
    with with_template(GOES_ON) as http:
        say(CALL)
        first = post(http, tools=[WEATHER])
        message = first["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "rain"}
        say("It rains.")
        second = post(http, tools=[WEATHER], messages=[*ASK, message, result])
    assert second["choices"][0]["message"]["content"] == "It rains."
    spoken = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= spoken - 1


def test_no_call_is_read_where_none_may_be_made(client, say, seen):
    say(CALL)
    for options in ({"tools": ()}, {"tool_choice": "none"}):
        message = ask(client, **options).choices[0].message
        assert (message.content, message.tool_calls) == (CALL, None)
        assert not seen[-1].startswith("T{")


def test_one_call_at_a_time(client, say):
    say(f"{CALL}\n{CALL}")
    done = ask(client, parallel_tool_calls=False)
    assert len(done.choices[0].message.tool_calls) == 1
    assert done.choices[0].finish_reason == "tool_calls"
    assert len(streamed(ask(client, parallel_tool_calls=False, stream=True))[2]) == 1
    assert len(ask(client).choices[0].message.tool_calls) == 2


def test_a_call_cut_off_by_its_length_says_so(client, say):
    say(CALL)
    done = ask(client, max_tokens=60).choices[0]
    assert done.finish_reason == "length"
    assert done.message.tool_calls[0].function.arguments.startswith('{"city"')


def test_thinking_is_the_templates(client, say, seen):
    say("Hm.\n</think>\n\nYes.")
    message = ask(client, extra_body={"chat_template_kwargs": {"enable_thinking": True}}).choices[0].message
    assert (message.reasoning_content, message.content) == ("Hm.", "Yes.")
    assert seen[-1].endswith("assistant:<think>\n")
    say("Yes.")
    for options in ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, {"reasoning_effort": "none"}):
        message = ask(client, tools=(), **options).choices[0].message
        assert message.content == "Yes."
        assert seen[-1].endswith("<think></think>")
    ask(client, reasoning_effort="high")
    assert seen[-1].endswith("<think>\n")


def test_an_answer_that_is_begun_is_continued(client, say, seen):
    say(" rains.")
    begun = [*ASK, {"role": "assistant", "content": "It"}]
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert ask(client, begun, tools=(), extra_body=off).choices[0].message.content == " rains."
    ask(client, ASK, tools=(), extra_body=off)
    assert seen[-2] == f"{seen[-1]}It"
    with pytest.raises(openai.BadRequestError, match="cannot be continued where the model reasons first; set enable"):
        ask(client, begun, extra_body={"chat_template_kwargs": {"enable_thinking": True}})


def test_log_probabilities_are_of_every_token(client, say):
    say(CALL)
    chunks = list(ask(client, stream=True, logprobs=True))
    tokens = [token for chunk in chunks if chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.content]
    whole = ask(client, logprobs=True)
    assert tokens == whole.choices[0].logprobs.content
    assert len(tokens) == whole.usage.completion_tokens


def test_marks_that_are_special_tokens_are_read(with_template, say):
    say('[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{"city": "Köln"}<|im_end|>')
    with with_template(MISTRAL) as http:
        message = message_of(http, tools=[NOW])
    function = {"name": "now", "arguments": '{"city": "Köln"}'}
    assert message["tool_calls"] == [{"id": "abcdefghi", "type": "function", "function": function}]


def test_a_template_that_writes_arguments_as_text(with_template, say, seen):
    say("Yes.")
    with with_template(DEEPSEEK) as http:
        result = {"role": "tool", "tool_call_id": "1", "content": "x"}
        assert message_of(http, messages=[*CALLED, result], tools=[NOW])["content"] == "Yes."
    assert f"now{GIVEN['arguments']}" in seen[-1]


def test_a_template_of_its_own_for_tools(with_template, say, seen):
    say("Yes.")
    templates = {"default": "plain{{ messages[0].content }}", "tool_use": "<tool_call>{{ tools | length }}tools"}
    with with_template(templates) as http:
        for tools in ([NOW, WEATHER], []):
            assert message_of(http, tools=tools)["content"] == "Yes."
    assert seen == ["<tool_call>2tools", "plainRain?"]


def test_a_template_that_reads_tools_from_the_first_message(with_template, say, seen):
    say('functools[{"name": "now", "arguments": {}}]')
    template = "{% for m in messages %}{{ m.role }}{% if 'tools' in m %}<|tool|>{{ m['tools'] }}{% endif %}{% endfor %}"
    with with_template(template) as http:
        message = message_of(http, tools=[NOW])
    assert message["tool_calls"][0]["function"]["name"] == "now"
    assert seen[0].startswith('system<|tool|>[{"name": "now"')
    assert seen[0].endswith("user")


@pytest.mark.parametrize(
    ("template", "form", "says"),
    [
        ("{{ tools }}", None, "the form in which this model writes calls is not known; `serve --tool-format` names"),
        ("{{ tools }}<think>", None, "the form in which this model writes calls is not known"),
        ("{{ tools }}", "hermes", None),
        (None, None, "the model has no chat template"),
    ],
)
def test_tools_that_a_model_cannot_have(with_template, say, template, form, says):
    say("Yes.")
    with with_template(template, tool_format=form) as http:
        answer = post(http, tools=[NOW], max_tokens=3)
    assert ("choices" in answer) == (says is None)
    assert says is None or says in answer["error"]["message"]


def test_a_format_that_there_is_not_is_refused_before_the_model_is_loaded():
    with pytest.raises(UsageError, match="--tool-format: there is no format 'own'; the formats are harmony"):
        ServerOptions(tool_format="own")


SHORT = {
    "type": "function",
    "function": {
        "name": "set",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Köln", "Bonn"]}, "days": {"enum": [1, 2]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
ADDRESS = {"type": "json_schema", "json_schema": {"name": "a", "schema": SHORT["function"]["parameters"]}}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "set"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_held_to_a_call(client, say, choice, stream):
    say("<tool_call>I would rather talk.")
    # A tool by name is called once.
    offered = {"tools": (SHORT,), "parallel_tool_calls": False} if choice == "required" else {"tools": (WEATHER, SHORT)}
    answer = ask(client, **offered, tool_choice=choice, stream=stream)
    if stream:
        content, _, [[_, name, arguments]], finish = streamed(answer)
    else:
        message, finish = answer.choices[0].message, answer.choices[0].finish_reason
        [call], content = message.tool_calls, message.content
        name, arguments = call.function.name, call.function.arguments
    assert (name, content or "", finish) == ("set", "", "tool_calls")
    assert json.loads(arguments)["city"] in ("Köln", "Bonn")


def test_reasoning_comes_before_a_call_that_must_be(client, say):
    say("<think>I think.</think>And talk on and on.")
    message = ask(client, tools=(SHORT,), tool_choice="required", parallel_tool_calls=False).choices[0].message
    assert message.reasoning_content == "I think."
    assert json.loads(message.tool_calls[0].function.arguments)["days"] in (1, 2)


def test_an_answer_held_to_a_schema(client, say):
    say("{Let me talk.}")
    choice = ask(client, tools=(), response_format=ADDRESS).choices[0]
    assert choice.finish_reason == "stop"
    assert json.loads(choice.message.content)["city"] in ("Köln", "Bonn")
    content, _, calls, _ = streamed(ask(client, tools=(), response_format=ADDRESS, stream=True))
    assert (content, calls) == (choice.message.content, [])
    say(CALL.replace("get_weather", "set").replace("3}", "2}"))
    choice = ask(client, tools=(SHORT,), response_format=ADDRESS).choices[0]  # the one or the other
    assert choice.finish_reason == "tool_calls"


def test_a_completion_held_to_a_regular_expression(client, say):
    say("No.")
    body = {"response_format": {"type": "regex", "regex": "(yes|maybe), [a-c]{3}"}}
    answer = client.completions.create(model="tiny", prompt="Yes?", temperature=0, max_tokens=60, extra_body=body)
    assert answer.choices[0].text in {
        f"{one}, {x}{y}{z}" for one in ("yes", "maybe") for x in "abc" for y in "abc" for z in "abc"
    }


def test_calls_between_marks_of_their_own(say, with_template):
    """An answer is held to them; what their way of writing cannot be held to is a 400."""
    template = "{% if tools %}<function=<parameter={% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    say("<tool_call>I would rather talk.")
    parameters = {"properties": {"city": {"type": "string", "pattern": "^K"}}}
    pattern = {"type": "function", "function": {"name": "set", "parameters": parameters}}
    with with_template(template) as http:
        (call,) = message_of(http, tools=[SHORT], tool_choice="required", parallel_tool_calls=False)["tool_calls"]
        assert json.loads(call["function"]["arguments"])["city"] in ("Köln", "Bonn")
        error = post(http, tools=[pattern], tool_choice="required")["error"]
    assert error["param"] == "tool_choice"
    assert "cannot be held to this model's form of calls (set: its schema has 'pattern'" in error["message"]


def test_a_template_without_tools_is_told_of_them_in_text(with_template, say, seen):
    """Asked for, the generic form: tools in the system message, calls and results as text, in turns."""
    plain = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}assistant:"
    messages = [
        {"role": "system", "content": "Help."},
        *CALLED,
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
        {"role": "user", "content": "And now?"},
    ]
    say(CALL)
    with with_template(plain, tool_format="generic") as http:
        assert post(http, path="/api/show", model="tiny")["capabilities"] == ["completion", "tools"]
        (call,) = message_of(http, messages=messages, tools=[WEATHER, NOW])["tool_calls"]
        assert call["function"]["name"] == "get_weather"
        post(http)
    with with_template(plain) as http:
        assert post(http, path="/api/show", model="tiny")["capabilities"] == ["completion"]
        for tools in ([NOW], []):
            error = post(http, messages=messages, tools=tools)["error"]
            assert "takes no tools; `serve --tool-format generic`" in error["message"]
    assert '{"name": "get_weather"' in seen[0]
    written = '<tool_call>\n{"name": "now", "arguments": {"zone": "CET"}}\n</tool_call>'
    assert seen[0].startswith("system:Help.\n\nYou may call")
    told = f"user:Rain?;assistant:{written};user:<tool_response>\nrain\n</tool_response>\nAnd now?;assistant:"
    assert seen[0].endswith(told)
    assert seen[1] == "user:Rain?;assistant:"


@pytest.mark.parametrize(
    ("mark", "written"),
    [
        ("<|tool|>", '<|tool_call|>[{"name": "now", "arguments": {"zone": "CET"}}]<|/tool_call|>'),  # Phi-4-mini
        ("<|tool_call|>", '<|tool_call|>[{"name": "now", "arguments": {"zone": "CET"}}]'),  # Granite
        ("<|nothing that is known|>", None),
        ("<function=<parameter=", None),  # each argument by itself
    ],
)
def test_a_template_that_writes_no_calls_has_them_in_the_answers_text(with_template, mark, written):
    template = "{% if tools %}{% endif %}{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    with with_template(mark + template) as http:
        answer = http.post("/apply-template", json={"messages": [*CALLED, *RESULT[1:]]})
    if written is None:
        assert answer.status_code == 400
        assert "messages: this model's chat template leaves such calls out" in answer.text
    else:
        assert answer.json()["prompt"].endswith(f"user:Rain?;assistant:{written};tool: rain\n;")


RESULT = [*ASK, {"role": "tool", "tool_call_id": "1", "content": " rain\n"}]


@pytest.mark.parametrize(
    ("template", "messages", "is_lost"),
    [
        ("{{ messages | length }}", CALLED, True),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", CALLED, True),
        ("{{ messages[1].tool_calls }}", CALLED, False),
        ("{{ messages | length }}", RESULT, True),
        ("{% for m in messages %}{{ m.role }}{{ m.content | trim }}{% endfor %}", RESULT, False),
        ("{% if tools %}{% endif %}{{ messages | length }}", RESULT, False),
        (None, CALLED, True),
    ],
)
def test_no_call_or_result_is_lost(with_template, template, messages, is_lost):
    """Also without tools in the request, which a client may leave out of a later turn."""
    with with_template(template) as http:
        answer = http.post("/apply-template", json={"messages": messages})
    assert answer.status_code == (400 if is_lost else 200)
    assert not is_lost or template is None or "messages: this model's chat template takes no tools" in answer.text
