"""The server by typed clients of other dialects, which check what they read: `pytest -m clients tests/serve`.

They come with the extra `clients`. OpenAI's client is that of other tests.
"""

import pytest
from test_offered_tools import CALL, SHORT, WEATHER, Weather

pytestmark = pytest.mark.clients

SAID = f"<think>\nHm.\n</think>\n\nI look.\n{CALL}"
ARGUMENTS = {"city": "Köln", "days": 3}
TOOL = {"name": "get_weather", "description": "The weather", "input_schema": SHORT["function"]["parameters"]}
ASK = [{"role": "user", "content": "Rain?"}]


@pytest.fixture(scope="module")
def anthropic(hermes):
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=hermes[0], api_key="secret", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def ollama(hermes):
    ollama = pytest.importorskip("ollama")
    with ollama.Client(host=hermes[0], headers={"Authorization": "Bearer secret"}, timeout=60) as client:
        yield client


def asked(**fields):
    return {"model": "claude-any", "max_tokens": 200, "messages": ASK, "extra_body": {"temperature": 0}, **fields}


def test_anthropics_models(anthropic):
    (model,) = anthropic.models.list()
    assert (model.id, model.display_name, model.type) == ("tiny", "tiny", "model")
    assert model.created_at.tzinfo is not None
    assert anthropic.models.retrieve("tiny") == model


def test_anthropics_messages(anthropic, say):
    say(SAID)
    answer = anthropic.messages.create(**asked(tools=[TOOL]))
    thinking, text, call = answer.content
    assert (thinking.type, thinking.thinking, text.text) == ("thinking", "Hm.", "I look.")
    assert (call.type, call.name, call.input, answer.stop_reason) == ("tool_use", "get_weather", ARGUMENTS, "tool_use")
    count = anthropic.messages.count_tokens(model="claude-any", messages=ASK, tools=[TOOL])
    assert count.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    with anthropic.messages.stream(**asked(tools=[TOOL])) as stream:
        kinds = [event.type for event in stream]
        whole = stream.get_final_message()
    assert {"text", "thinking", "input_json"} <= set(kinds)
    assert [block.model_dump(exclude={"id"}) for block in whole.content] == [
        block.model_dump(exclude={"id"}) for block in answer.content
    ]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    say("It rains.")
    turns = [*ASK, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    last = anthropic.messages.create(**asked(messages=turns, tools=[TOOL]))
    assert (last.content[0].text, last.stop_reason) == ("It rains.", "end_turn")


def test_a_coding_agents_requests(anthropic, say):
    """As Claude Code's: beta headers, cache marks, tools that Anthropic runs, and a header that changes every time."""
    say(SAID)
    tools = [{**TOOL, "cache_control": {"type": "ephemeral"}}, {"type": "web_search_20250305", "name": "web_search"}]

    def ask(changes, messages):
        system = [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2; cch={changes};"},
            {"type": "text", "text": "You write code.", "cache_control": {"type": "ephemeral"}},
        ]
        body = asked(system=system, messages=messages, tools=tools, metadata={"user_id": "one"})
        with anthropic.beta.messages.stream(**body, betas=["interleaved-thinking-2025-05-14"]) as stream:
            started = next(event for event in stream if event.type == "message_start").message.usage
            usage = (started.input_tokens, started.cache_read_input_tokens)
            return stream.get_final_message(), usage

    first, (new, cached) = ask("a1b2c", ASK)
    assert (first.stop_reason, first.content[-1].input) == ("tool_use", ARGUMENTS)
    assert ask("9f8e7", ASK)[1] == (1, new + cached - 1)
    result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": [{"type": "text", "text": "rain"}]}
    turns = [*ASK, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    assert ask("00000", turns)[1][1] >= new + cached - 1


def test_anthropics_form_and_errors(anthropic, say):
    import anthropic as module

    say("{No.")
    answer = anthropic.messages.parse(**asked(output_format=Weather))
    assert answer.parsed_output.city in ("Köln", "Bonn")
    with pytest.raises(module.BadRequestError, match="max_tokens"):
        anthropic.messages.create(**asked(max_tokens=0))
    with pytest.raises(module.AuthenticationError):
        anthropic.with_options(api_key="wrong").messages.create(**asked())


def test_ollamas_lists(ollama):
    (model,) = ollama.list().models
    assert (model.model, model.size > 0) == ("tiny", True)
    (running,) = ollama.ps().models
    assert (running.model, running.context_length) == ("tiny", 1024)
    shown = ollama.show("tiny")
    assert "tools" in shown.capabilities
    assert shown.modelinfo["flashllm.context_length"] == 1024


def test_ollamas_chats(ollama, say):
    import ollama as module

    say(SAID)
    body = {"model": "tiny", "messages": ASK, "tools": [WEATHER], "options": {"temperature": 0}}
    whole = ollama.chat(**body)
    (call,) = whole.message.tool_calls
    assert (whole.message.thinking, whole.message.content) == ("Hm.", "I look.")
    assert (call.function.name, call.function.arguments, whole.done) == ("get_weather", ARGUMENTS, True)
    pieces = list(ollama.chat(**body, stream=True))
    assert "".join(each.message.content for each in pieces) == "I look."
    assert [each.message.tool_calls for each in pieces if each.message.tool_calls] == [[call]]
    say("It rains.")
    turns = [*ASK, whole.message, {"role": "tool", "content": "rain", "tool_name": "get_weather"}]
    assert ollama.chat(**{**body, "messages": turns}).message.content == "It rains."
    say("{No.")
    closed = Weather.model_json_schema() | {"additionalProperties": False}
    answer = ollama.chat("tiny", ASK, format=closed, options={"temperature": 0})
    assert Weather.model_validate_json(answer.message.content).city in ("Köln", "Bonn")
    say("It rains.")
    assert ollama.generate("tiny", "Rain?", options={"temperature": 0}).response == "It rains."
    pieces = list(ollama.generate("tiny", "Rain?", options={"temperature": 0}, stream=True))
    assert "".join(each.response for each in pieces) == "It rains."
    with pytest.raises(module.ResponseError, match="no model 'other'"):
        ollama.chat("other", ASK)
