"""OpenAI's /v1/responses, by its own client; a model that says what it is told to."""

import json

import openai
import pytest
from test_offered_tools import CALL, SHORT, Weather

TOOL = {"type": "function", "name": "get_weather", "parameters": SHORT["function"]["parameters"], "strict": True}
SAID = f"<think>\nHm.\n</think>\n\nI look.\n{CALL}"


@pytest.fixture(scope="module")
def responses(hermes):
    with openai.OpenAI(base_url=f"{hermes[0]}/v1", api_key="secret", max_retries=0, timeout=60) as client:
        yield client.responses


def ask(responses, given="Rain?", **fields):
    return responses.create(**{"model": "tiny", "input": given, "temperature": 0, "max_output_tokens": 200, **fields})


def plain(item):
    return {name: value for name, value in item.model_dump().items() if name not in ("id", "call_id")}


def test_an_answer_whole(responses, say):
    say(SAID)
    answer = ask(responses, tools=[TOOL])
    reasoning, message, call = answer.output
    assert reasoning.content[0].text == "Hm."
    assert (message.content[0].text, answer.output_text) == ("I look.", "I look.")
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Köln", "days": 3})
    assert (answer.status, answer.object, answer.store) == ("completed", "response", False)
    assert answer.usage.output_tokens_details.reasoning_tokens > 0
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


def test_the_same_streamed(responses, say):
    say(SAID)
    whole = ask(responses, tools=[TOOL])
    events = list(ask(responses, tools=[TOOL], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    last = events[-1].response
    assert [plain(each) for each in last.output] == [plain(each) for each in whole.output]
    assert last.usage.input_tokens_details.cached_tokens > 0
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == last.output
    added = [event for event in events if event.type == "response.output_item.added"]
    assert [event.output_index for event in added] == [0, 1, 2]
    for kind, expected in (("output_text", "I look."), ("reasoning_text", "Hm.")):
        assert "".join(event.delta for event in events if event.type == f"response.{kind}.delta") == expected
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert len(pieces) > 3
    assert "".join(pieces) == last.output[2].arguments


def test_a_conversation_goes_on(responses, say, seen):
    say("It rains.")
    given = [
        {"role": "developer", "content": "Help."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Rain?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Köln"}'},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
    ]
    answer = ask(responses, given, instructions="Be kind.", tools=[TOOL, {"type": "web_search"}], store=True)
    assert answer.output_text == "It rains."
    assert (
        ";system:Be kind.;system:Help.;user:Rain?;assistant:<think>Hm.</think><tool_call>[('city', 'Köln')]" in seen[-1]
    )
    assert ";tool:<get_weather/c1>rain;assistant:" in seen[-1]
    assert "web_search" not in seen[-1]


def test_a_custom_tool(responses, say, seen):
    say('<tool_call>\n{"name": "patch", "arguments": {"input": "a\\nb"}}\n</tool_call>')
    tool = {"type": "custom", "name": "patch", "description": "Patch"}
    (call,) = ask(responses, tools=[tool]).output
    assert (call.type, call.name, call.input) == ("custom_tool_call", "patch", "a\nb")
    events = list(ask(responses, tools=[tool], stream=True))
    assert [event.input for event in events if event.type == "response.custom_tool_call_input.done"] == ["a\nb"]
    back = [
        {"role": "user", "content": "Do."},
        {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "a"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
    ]
    ask(responses, back, tools=[tool])
    assert "tool:<patch/c>done" in seen[-1]


def test_forms_and_ends(responses, say):
    say("{No.")
    shape = {"format": {"type": "json_schema", "name": "a", "schema": TOOL["parameters"], "strict": True}}
    assert json.loads(ask(responses, text=shape).output_text)["days"] in (1, 2)
    parsed = responses.parse(model="tiny", input="Rain?", text_format=Weather, temperature=0)
    assert parsed.output_parsed.city in ("Köln", "Bonn")
    say("<tool_call>No.")
    (call,) = ask(responses, tools=[TOOL], tool_choice="required", parallel_tool_calls=False).output
    assert json.loads(call.arguments)["city"] in ("Köln", "Bonn")
    say("One two three")
    answer = ask(responses, max_output_tokens=2)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id: nothing is stored here"),
        ({"background": True}, "background: True is not supported"),
        ({"input": []}, "input must be a text or a list"),
        ({"input": [5]}, "input[0] must be an object"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "a part of type 'input_image'"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format must be an object with the type"),
        ({"max_output_tokens": 0}, "max_output_tokens must be an integer"),
    ],
)
def test_what_is_wrong_is_said(responses, fields, says):
    with pytest.raises(openai.BadRequestError) as error:
        ask(responses, **{"given": fields.pop("input", "Rain?"), **fields})
    assert says in str(error.value)
