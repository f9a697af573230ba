"""Anthropic's dialect and Ollama's over real templates, tokens and parsers; a model that says what it is told to."""

import json

import httpx
import pytest
from test_offered_tools import CALL, SHORT, WEATHER

from flashllm.generate.tokenizer import Tokenizer

TOOL = {"name": "get_weather", "description": "The weather", "input_schema": SHORT["function"]["parameters"]}
BEARER = {"Authorization": "Bearer secret"}
ASK = [{"role": "user", "content": "Rain?"}]


@pytest.fixture(scope="module")
def http(hermes):
    with httpx.Client(base_url=hermes[0], timeout=60, headers={"x-api-key": "secret"}) as http:
        yield http


def ask(http, messages=ASK, **fields):
    body = {"model": "claude-any", "max_tokens": 200, "temperature": 0, "messages": messages, **fields}
    return http.post("/v1/messages?beta=true", json=body, headers={"anthropic-version": "2023-06-01"})


def events_of(response):
    """The stream's documents, each named by its event."""
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for part in response.text.split("\n\n")[:-1]:
        name, data = (line.split(": ", 1)[1] for line in part.split("\n") if not line.startswith(":"))
        events.append(json.loads(data))
        assert events[-1]["type"] == name
    return events


def test_an_answer_with_thinking_text_and_a_call(http, say):
    say(f"<think>\nHm.\n</think>\n\nI look.\n{CALL}")
    answer = ask(http, tools=[TOOL]).json()
    thinking, text, call = answer["content"]
    assert thinking == {"type": "thinking", "thinking": "Hm.", "signature": ""}
    assert text == {"type": "text", "text": "I look."}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "get_weather", {"city": "Köln", "days": 3})
    assert (answer["stop_reason"], answer["type"], answer["role"]) == ("tool_use", "message", "assistant")
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] > 20
    assert usage["output_tokens"] > 20


def test_the_same_streamed(http, say):
    say(f"<think>\nHm.\n</think>\n\nI look.\n{CALL}")
    whole = ask(http, tools=[TOOL]).json()
    events = events_of(ask(http, tools=[TOOL], stream=True))
    assert events[0]["type"] == "message_start"
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["usage"]["cache_read_input_tokens"] > 0
    blocks, opened = [], None
    for event in events[1:-2]:
        match event["type"]:
            case "content_block_start":
                assert opened is None
                opened = event["index"]
                assert opened == len(blocks)
                blocks.append(dict(event["content_block"]))
                json_text = ""
            case "content_block_delta":
                assert event["index"] == opened
                delta = event["delta"]
                if delta["type"] == "input_json_delta":
                    json_text += delta["partial_json"]
                else:
                    name = delta["type"].removesuffix("_delta")
                    blocks[-1][name] += delta[name]
            case "content_block_stop":
                assert event["index"] == opened
                opened = None
                if blocks[-1]["type"] == "tool_use":
                    blocks[-1]["input"] = json.loads(json_text)
    for one, other in zip(blocks, whole["content"], strict=True):
        assert {**one, "id": None} == {**other, "id": None}
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_a_conversation_goes_on(http, say, seen):
    say("It rains.")
    messages = [
        *ASK,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Köln"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [{"type": "text", "text": "rain"}, {"type": "image"}],
                },
                {"type": "text", "text": "So?", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    server_tool = {"type": "web_search_20250305", "name": "web_search"}
    system = [{"type": "text", "text": f"x-anthropic-billing-header: cch={n};"} for n in range(1)]
    answer = ask(http, messages, tools=[TOOL, server_tool], system=[*system, {"type": "text", "text": "Help."}])
    assert answer.json()["stop_reason"] == "end_turn"
    assert "web_search" not in seen[-1]
    assert "billing" not in seen[-1]
    assert ";system:Help.;user:Rain?;assistant:<think>Hm.</think><tool_call>[('city', 'Köln')]" in seen[-1]
    assert ";tool:<get_weather/toolu_1>rain\n[an image, which this model cannot see];user:So?;assistant:" in seen[-1]


def test_the_end_of_an_answer_is_named(http, say):
    say("One two three")
    assert ask(http, max_tokens=2).json()["stop_reason"] == "max_tokens"
    answer = ask(http, stop_sequences=["two"]).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "two")


def test_a_tool_that_must_be_called_and_a_schema(http, say):
    say("<tool_call>No.")
    choice = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    answer = ask(http, tools=[TOOL], tool_choice=choice).json()
    assert answer["content"][0]["input"]["city"] in ("Köln", "Bonn")
    say("{No.")
    shape = {"format": {"type": "json_schema", "schema": TOOL["input_schema"]}}
    answer = ask(http, output_config=shape).json()
    assert json.loads(answer["content"][0]["text"])["days"] in (1, 2)
    assert answer["stop_reason"] == "end_turn"


def test_thinking_has_a_budget(http, say, seen):
    say("I think and think and think and think and think and never come to any end of it all.")
    answer = ask(http, thinking={"type": "enabled", "budget_tokens": 5}, max_tokens=60).json()
    assert seen[-1].endswith("<think>\n")
    thinking, text = answer["content"]
    assert len(thinking["thinking"]) < 20
    assert text["text"]
    ask(http, thinking={"type": "disabled"}, max_tokens=1)
    assert seen[-1].endswith("<think></think>")


def test_tokens_are_counted(http, say):
    say("Yes.")
    count = http.post("/v1/messages/count_tokens", json={"model": "x", "messages": ASK, "tools": [TOOL]}).json()
    usage = ask(http, tools=[TOOL]).json()["usage"]
    assert count == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "block of type 'image'"),
        ({"messages": 5}, "messages must be a list"),
        ({"messages": ["x"]}, "messages[0] must be an object"),
        ({"messages": [{"role": "system", "content": [{"type": "tool_use"}]}]}, "block of type 'tool_use'"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "function needs a name"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_call_id"),
        ({"tools": [{"name": "a b"}]}, "needs a name"),
        ({"tool_choice": {"type": "other"}}, "tool_choice: the type 'other' is unknown"),
        ({"tool_choice": {"type": []}}, "tool_choice: the type [] is unknown"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: needs tools"),
        ({"thinking": {"type": "enabled", "budget_tokens": "x"}}, "thinking.budget_tokens must be an integer"),
        ({"top_k": "x"}, "top_k"),
        ({"stop_sequences": 5}, "stop_sequences must be a text or a list"),
        ({"n": 2}, "the field 'n' is unknown"),
    ],
)
def test_what_is_wrong_is_said_in_anthropics_form(http, fields, says):
    response = ask(http, **fields)
    assert response.status_code == 400
    document = response.json()
    assert (document["type"], document["error"]["type"]) == ("error", "invalid_request_error")
    assert says in document["error"]["message"]


def test_a_number_that_none_can_be(http):
    call = '{"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1e999}}'
    body = f'{{"max_tokens": 1, "messages": [{{"role": "assistant", "content": [{call}]}}]}}'
    response = http.post("/v1/messages", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert "1e999 is more than a number can be" in response.json()["error"]["message"]


def test_the_key_of_anthropics_clients(http):
    with httpx.Client(base_url=http.base_url, headers={"x-api-key": "wrong"}) as other:
        assert ask(other).status_code == 401


def test_ollamas_tools_reasoning_and_format(http, say, seen):
    """Calls come whole, with arguments that are objects; their results go back in turn."""
    shown = http.post("/api/show", headers=BEARER, json={"model": "tiny"}).json()
    assert shown["capabilities"] == ["completion", "tools"]
    say(f"<think>Hm.</think>I look.{CALL}")
    body = {"model": "tiny", "messages": ASK, "tools": [WEATHER], "options": {"temperature": 0}}
    message = http.post("/api/chat", headers=BEARER, json={**body, "stream": False}).json()["message"]
    call = {"function": {"name": "get_weather", "arguments": {"city": "Köln", "days": 3}}}
    expected = {"role": "assistant", "content": "I look.", "thinking": "Hm.", "tool_calls": [call]}
    assert message == expected
    lines = [json.loads(line) for line in http.post("/api/chat", headers=BEARER, json=body).text.splitlines()]
    assert [line["message"]["tool_calls"] for line in lines if "tool_calls" in line["message"]] == [[call]]
    for name, said in (("content", "I look."), ("thinking", "Hm.")):
        assert "".join(line["message"].get(name, "") for line in lines) == said
    result = {"role": "tool", "content": "rain", "tool_name": "get_weather"}
    say("It rains.")
    http.post(
        "/api/chat", headers=BEARER, json={**body, "messages": [*ASK, message, result], "think": False}
    ).raise_for_status()
    assert "[('city', 'Köln'), ('days', 3)]" in seen[-1]
    assert "tool:<get_weather/call_1_0>rain" in seen[-1]
    assert seen[-1].endswith("<think></think>")
    say("{No.")
    schema = {"type": "array", "items": {"enum": ["yes"]}, "minItems": 1, "maxItems": 1}
    answer = http.post(
        "/api/chat", headers=BEARER, json={**body, "tools": [], "format": schema, "stream": False}
    ).json()
    assert json.loads(answer["message"]["content"]) == ["yes"]


def test_prompts_as_tokens(http, say, tools_path):
    def post(path, **body):
        response = http.post(path, json=body)
        return response.json() if response.status_code == 200 else response.json()["error"]["message"]

    tokenizer = Tokenizer.load(tools_path)
    text = post("/apply-template", messages=ASK, tools=[WEATHER])["prompt"]
    assert text.startswith("T{")
    assert text.endswith(";user:Rain?;assistant:")
    ids = tokenizer.encode(text, add_special=False)
    assert post("/tokenize", messages=ASK, tools=[WEATHER], model="tiny")["tokens"] == ids
    ids = tokenizer.encode("One day")
    assert post("/tokenize", content="One day") == {"tokens": ids, "count": len(ids), "max_model_len": 1024}
    assert post("/detokenize", tokens=ids)["content"] == tokenizer.decode(ids)
    assert "the field 'tokens' is unknown" in post("/tokenize", tokens=ids)
    assert "not below the model's vocabulary" in post("/detokenize", tokens=[10**6])
    assert "messages must be a list" in post("/apply-template")
    assert "there is no model 'other'" in post("/tokenize", content="x", model="other")


def test_an_answer_ends_where_the_context_does(http, say):
    """Agents ask for as many tokens as large models give."""
    say("Yes.")
    assert ask(http, max_tokens=32_000).json()["stop_reason"] == "end_turn"


def test_ollamas_prompts(http, say, seen):
    say("<think>Hm.</think>It rains.")
    body = {"model": "tiny", "prompt": "Rain?", "system": "Help.", "options": {"temperature": 0}, "suffix": ""}
    whole = http.post("/api/generate", json={**body, "stream": False}).json()
    assert (whole["response"], whole["thinking"], whole["done"]) == ("It rains.", "Hm.", True)
    assert seen[-1] == "system:Help.;user:Rain?;assistant:"
    *lines, last = [json.loads(line) for line in http.post("/api/generate", json=body).text.splitlines()]
    assert "".join(line["response"] for line in lines) == "It rains."
    assert (last["done"], last["response"], last["eval_count"]) == (True, "", whole["eval_count"])
    say("It <think>rains.")
    raw = {"prompt": "It", "raw": True, "stream": False, "options": {"temperature": 0, "num_predict": 500}}
    answer = http.post("/api/generate", json=raw).json()
    assert (answer["response"], answer["done_reason"]) == ("It rains.", "stop")  # as a completion
    say("It <think>rains.")
    assert http.post("/api/generate", json={**raw, "think": False}).json()["response"] == "It rains."
    assert len(seen) == 2
    for wrong, says in (({"context": [1]}, "'context' is unknown"), ({"prompt": None}, "prompt must be a text")):
        response = http.post("/api/generate", json={**body, **wrong})
        assert (response.status_code, says in response.json()["error"]) == (400, True)


@pytest.fixture
def held(scripted, monkeypatch):
    """Set, it lets passes run."""
    monkeypatch.setattr("flashllm.serve.http.KEEP_ALIVE_S", 0.1)
    scripted.runs.clear()
    yield scripted.runs
    scripted.runs.set()


@pytest.mark.parametrize(
    ("path", "first"),
    [
        ("/v1/messages", '{"type": "ping"}'),
        ("/v1/responses", '{"type": "response.created", "sequence_number": 0,'),
        ("/v1/responses", '{"type": "response.in_progress", "sequence_number": 1,'),
        ("/api/chat", '"message": {"role": "assistant", "content": ""}, "done": false}'),
        ("/api/generate", '"response": "", "done": false}'),
    ],
)
def test_a_long_prompt_is_waited_for_with_events(http, held, say, path, first):
    """Clients give up a stream in which no event comes for long; comments are none to them."""
    say("Yes.")
    body = {"model": "tiny", "messages": ASK, "stream": True, "max_tokens": 50}
    body = {"/v1/responses": {"input": "Rain?", "stream": True}, "/api/generate": {"prompt": "Rain?"}}.get(path, body)
    body = body if not path.startswith("/api/chat") else {"messages": ASK}
    with http.stream("POST", path, json=body) as response:
        lines = response.iter_lines()
        assert next(line for line in lines if first in line)
        held.set()
        rest = list(lines)
    assert "Y" in "".join(rest)
    assert not any("response.created" in line for line in rest)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": ASK, "stream": True, "return_progress": True}),
        ("/v1/messages", {"messages": ASK, "stream": True, "max_tokens": 50}),
        ("/v1/responses", {"input": "Rain?", "stream": True}),
        ("/api/chat", {"messages": ASK}),
    ],
)
def test_a_prompts_progress_is_told_in_numbers(http, held, say, path, body, *, scripted, monkeypatch):
    monkeypatch.setattr(scripted, "watch", lambda progress: progress(1, 4), raising=False)
    say("Yes.")
    with http.stream("POST", path, headers=BEARER, json=body) as response:
        lines = response.iter_lines()
        told = next(line for line in lines if "prompt_progress" in line)
        held.set()
        rest = list(lines)
    progress = json.loads(told.removeprefix("data: "))["prompt_progress"]
    total, cache = progress["total"], progress["cache"]
    assert 0 <= cache < total
    assert progress["processed"] == cache + (total - cache) // 4
    assert progress["time_ms"] >= 0
    assert "Y" in "".join(rest)
    if path == "/v1/chat/completions":  # which other clients' streams have no such chunk
        wrong = http.post(path, headers=BEARER, json={**body, "stream": False})
        assert "return_progress needs stream" in wrong.json()["error"]["message"]
        monkeypatch.setattr(scripted, "delay_s", 0.3)
        assert "prompt_progress" not in http.post(path, headers=BEARER, json={**body, "return_progress": False}).text
