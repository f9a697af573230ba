"""Requests that cannot be meant: each is a 4xx with OpenAI's error object, which names what is wrong."""

import json
import os
import socket

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_bounds import address_of, begun

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HELLO = {"role": "user", "content": "hello"}
ASSISTANT = {"role": "assistant", "content": "x"}
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
DEEP = json.loads("[" * 40 + "]" * 40)

# (path, fields beside the good ones; or the body itself), what the message says
BAD_FIELDS = [
    # Fields with values that cannot be.
    (CHAT, {"messages": []}, "messages must be a list"),
    (CHAT, {"messages": "hello"}, "messages must be a list"),
    (CHAT, {"messages": [None]}, "messages[0] must be an object"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0]: content must be a text"),
    (CHAT, {"messages": [{"role": "king", "content": "x"}]}, "messages[0]: role must be one of"),
    (CHAT, {"messages": [{"role": ["user"], "content": "x"}]}, "messages[0]: role must be one of"),
    (
        CHAT,
        {"messages": [HELLO, {"role": "tool", "content": "x"}]},
        "messages[1]: a tool's message needs the tool_call",
    ),
    (CHAT, {"messages": [HELLO, {"role": "tool", "content": "x", "tool_call_id": 3}]}, "tool_call_id must be a text"),
    (CHAT, {"messages": [{**ASSISTANT, "tool_calls": {"id": "1"}}]}, "messages[0]: tool_calls must be a list"),
    (CHAT, {"messages": [{**ASSISTANT, "tool_calls": [7]}]}, "messages[0].tool_calls[0]: its type must be"),
    (CHAT, {"messages": [{**ASSISTANT, "tool_calls": [{**CALL, "id": None}]}]}, "tool_calls[0]: id must be a text"),
    (CHAT, {"messages": [{**ASSISTANT, "tool_calls": [{**CALL, "function": {}}]}]}, "function needs a name"),
    (CHAT, {"messages": [{**ASSISTANT, "content": None}]}, "messages[0]: content must be a text"),
    (CHAT, {"messages": [{**HELLO, "content": {"text": "x"}}]}, "messages[0]: content must be a text"),
    (CHAT, {"messages": [{**HELLO, "content": [{"type": "image_url", "image_url": {}}]}]}, "only text is"),
    (CHAT, {"messages": [{**HELLO, "content": [{"type": "text", "text": 5}]}]}, "messages[0]: text must be a text"),
    (CHAT, {"messages": [{**HELLO, "content": ["x"]}]}, "a content part of type"),
    (CHAT, {"messages": [{**HELLO, "content": [{"type": "text", "text": "", "x": 1}]}]}, "the field 'x' is unknown"),
    (CHAT, {"messages": [{**HELLO, "content": "\ud800"}]}, "half a character"),
    (CHAT, {"messages": [{**HELLO, "tool_calls": [{"id": "1"}]}]}, "'tool_calls' is not supported"),
    (CHAT, {"messages": [{**HELLO, "name": 7}]}, "messages[0]: name must be a text"),
    (CHAT, {"max_tokens": 0}, "max_tokens must be an integer"),
    (CHAT, {"max_tokens": 1.5}, "max_tokens must be an integer"),
    (CHAT, {"max_tokens": True}, "max_tokens must be an integer"),
    (CHAT, {"max_tokens": 10**30}, "max_tokens must be an integer"),
    (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens and max_completion_tokens differ"),
    (CHAT, {"max_completion_tokens": []}, "max_completion_tokens must be an integer"),
    (CHAT, {"temperature": -0.1}, "temperature cannot be"),
    (CHAT, {"temperature": 1e300}, "temperature must be a number"),
    (CHAT, {"temperature": False}, "temperature must be a number"),
    (CHAT, {"top_p": 1.01}, "top_p cannot be 1.01: it must be above 0 and at most 1"),
    (CHAT, {"top_k": -2}, "top_k must be an integer"),
    (CHAT, {"min_p": 2}, "min_p cannot be"),
    (CHAT, {"repetition_penalty": 0}, "repetition_penalty cannot be"),
    (CHAT, {"seed": "x"}, "seed must be an integer"),
    (CHAT, {"seed": 2**64}, "seed must be an integer"),
    (CHAT, {"stop": 5}, "stop must be a text or a list"),
    (CHAT, {"stop": [""]}, "stop: a text must have"),
    (CHAT, {"stop": ["x"] * 17}, "stop must be a text or a list of at most 16"),
    (CHAT, {"stop": ["x" * 1001]}, "stop: a text must have"),
    (CHAT, {"stop": [3]}, "stop must be a text"),
    (CHAT, {"stream": 1}, "stream must be true or false"),
    (CHAT, {"stream_options": {"include_usage": True}}, "stream_options needs stream"),
    (CHAT, {"stream": True, "stream_options": []}, "stream_options must be an object"),
    (CHAT, {"stream": True, "stream_options": {"include": True}}, "stream_options: the field 'include' is unknown"),
    (CHAT, {"stream": True, "stream_options": {"include_usage": "yes"}}, "include_usage must be true or false"),
    (CHAT, {"logprobs": 5}, "logprobs must be true or false"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs needs logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs must be an integer from 0 to 20"),
    (CHAT, {"model": 3}, "model must be a text"),
    (CHAT, {"ignore_eos": "no"}, "ignore_eos must be true or false"),
    # Fields of the interface that we have not, by name.
    (CHAT, {"n": 2}, "n: 2 is not supported"),
    (CHAT, {"tools": {}}, "tools: must be a list"),
    (CHAT, {"tools": [{"type": "function"}]}, "tools[0]: function needs a name"),
    (CHAT, {"tools": [{"type": "web_search"}]}, "tools[0]: its type must be"),
    (CHAT, {"tools": [TOOL] * 257}, "a list of at most 256"),
    (
        CHAT,
        {"tools": [{**TOOL, "function": {"name": "f", "parameters": []}}]},
        "tools[0]: parameters must be an object",
    ),
    (CHAT, {"tools": [{**TOOL, "function": {"name": "f", "description": 1}}]}, "tools[0]: description must be a text"),
    (CHAT, {"tools": [{**TOOL, "function": {"name": "f", "x": "\ud800"}}]}, "tools: hold half a character"),
    (CHAT, {"tools": [TOOL]}, "tools: this model's chat template takes no tools"),
    (CHAT, {"tools": [], "tool_choice": "required"}, "tool_choice: needs tools"),
    (CHAT, {"tools": [TOOL], "tool_choice": "any"}, 'tool_choice: its type must be "function"'),
    (
        CHAT,
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}},
        "tool_choice: there is no tool 'other' in tools",
    ),
    (CHAT, {"parallel_tool_calls": 1}, "parallel_tool_calls must be true or false"),
    (CHAT, {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs must be an object with nothing but"),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": 1}}, "enable_thinking must be true or false"),
    (
        CHAT,
        {"chat_template_kwargs": {"enable_thinking": True}},
        "chat_template_kwargs: this model's chat template has no",
    ),
    (CHAT, {"functions": [{}]}, "functions: "),
    (CHAT, {"response_format": {"type": "yaml"}}, "response_format must be an object with the type text, json_object"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format must be an object with the type text"),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"properties": {"a": {"type": "x"}}}}}},
        "response_format: the JSON schema cannot be the form of an answer, at /properties/a: Invalid type: x",
    ),
    (COMPLETION, {"response_format": {"type": "regex", "regex": "(a"}}, "response_format: the regular expression"),
    (COMPLETION, {"response_format": {"type": "grammar", "grammar": 1}}, "response_format: grammar must be a text"),
    (CHAT, {"logit_bias": {"5": 1}}, "logit_bias: "),
    (CHAT, {"presence_penalty": 0.5}, "presence_penalty: 0.5 is not supported"),
    (CHAT, {"frequency_penalty": -1}, "frequency_penalty: -1 is not supported"),
    (CHAT, {"audio": {"voice": "x"}}, "audio: "),
    (CHAT, {"reasoning_effort": "high"}, "reasoning_effort: this model's chat template has no"),
    (CHAT, {"echo": True}, "echo: "),
    (CHAT, {"prompt": "x"}, "the field 'prompt' is unknown"),
    (CHAT, {"wisdom": 1}, "the field 'wisdom' is unknown"),
    (CHAT, {"\ud800": 1}, "the field '\\ud800' is unknown"),
    (CHAT, {"stream": True, "stream_options": {"\udfff": 1}}, "the field '\\udfff' is unknown"),
    (CHAT, {"metadata": DEEP}, "nested more than 32 deep"),
    # Completions.
    (COMPLETION, {"prompt": None}, "prompt must be"),
    (COMPLETION, {"prompt": ""}, "prompt is empty"),
    (COMPLETION, {"prompt": []}, "prompt must be"),
    (COMPLETION, {"prompt": [5, "x"]}, "prompt must be"),
    (COMPLETION, {"prompt": [5, -1]}, "prompt must be"),
    (COMPLETION, {"prompt": [5, 1.0]}, "prompt must be"),
    (COMPLETION, {"prompt": [300]}, "token id 300 is not below the model's vocabulary of 300"),
    (COMPLETION, {"prompt": [[5], ["x"]]}, "prompt must be"),
    (COMPLETION, {"prompt": ["x"] * 129}, "129 prompts are more than 128"),
    (COMPLETION, {"prompt": ["x", ""]}, "prompt is empty"),
    (COMPLETION, {"messages": [HELLO]}, "the field 'messages' is unknown"),
    (COMPLETION, {"echo": 1}, "echo must be true or false"),
    (COMPLETION, {"logprobs": True}, "logprobs must be an integer"),
    (COMPLETION, {"logprobs": 21}, "logprobs must be an integer from 0 to 20"),
    (COMPLETION, {"suffix": "end"}, "suffix: "),
    (COMPLETION, {"best_of": 3}, "best_of: 3 is not supported"),
    (COMPLETION, {"prompt": "x" * 2000}, "that is more than the model's 96 positions"),
    (COMPLETION, {"max_tokens": 96}, "that is more than the model's 96 positions"),
]

BAD_BODIES = [
    b"",
    b"{",
    b"null",
    b"[]",
    b"3",
    b'"hello"',
    b"\xff\xfe",
    b"\xef\xbb\xbf{}",
    b'{"prompt": "x", "prompt": "y"}',
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x", "temperature": Infinity}',
    b'{"prompt": "x", "temperature": 1e400}',
    b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    b"[" * 100_000,
    b'{"a":' * 50_000,
]


def assert_is_error(response, status, text=""):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert text in error["message"]
    return error


@pytest.mark.parametrize(("path", "fields", "message"), BAD_FIELDS)
def test_bad_fields(http, path, fields, message):
    good = {"messages": [HELLO]} if path == CHAT else {"prompt": "hello"}
    body = json.dumps({"model": "tiny", **good, **fields})
    error = assert_is_error(_post(http, path, body.encode()), 400, message)
    assert error["type"] == "invalid_request_error"
    assert error["param"] or "nested" in message or "differ" in message


def test_a_form_that_explodes_in_the_answer(http):
    body = {"prompt": "hello", "response_format": {"type": "regex", "regex": "((a{99}){99}){99}"}}
    error = assert_is_error(_post(http, COMPLETION, json.dumps(body).encode()), 500, "too complex here")
    assert (error["type"], error["code"]) == ("server_error", "generation_failed")


def _post(http, path, body, **headers):
    return http.post(path, content=body, headers={"Content-Type": "application/json", **headers})


@pytest.mark.parametrize("body", BAD_BODIES, ids=lambda body: repr(body[:20]))
def test_bad_bodies(http, body):
    assert_is_error(_post(http, CHAT, body), 400)


def test_unknown_models_paths_and_methods(http):
    error = assert_is_error(_post(http, COMPLETION, b'{"model": "gpt-9", "prompt": "x"}'), 404, "no model 'gpt-9'")
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    for path in ("/v1/embeddings", "/v2", "/v1/chat/completions/", "/%2e%2e/etc/passwd", "/v1/models/"):
        assert_is_error(http.get(path), 404)
    assert http.get(COMPLETION).headers["allow"] == "POST"
    assert_is_error(http.get(COMPLETION), 405)
    assert_is_error(http.delete("/v1/models"), 405)


def test_bodies_that_are_no_json_by_their_header(http):
    """What a page of another site can send without asking first."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        response = http.post(COMPLETION, content=b'{"prompt": "x"}', headers={"Content-Type": kind})
        assert_is_error(response, 415, "application/json")
    kind = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert _post(http, COMPLETION, b'{"prompt": "x", "max_tokens": 1}', **kind).status_code == 200


def test_a_slow_body_is_given_up(served, monkeypatch):
    monkeypatch.setattr("flashllm.serve.http.BODY_TIMEOUT_S", 0.1)
    with begun(address_of(served), 50, b"{") as sock:
        assert sock.recv(4096).startswith(b"HTTP/1.1 408")


def test_garbage_instead_of_http(served, http):
    twice = b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"
    for junk in (b"\x00" * 100, b"GET\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", twice):
        with socket.create_connection(address_of(served), timeout=10) as sock:
            sock.sendall(junk)
            answer = sock.recv(4096)
            assert not answer or answer.startswith(b"HTTP/1.1 4")
    assert http.get("/health").status_code == 200


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["hello", "user"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
names = st.sampled_from(
    [
        *("model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k"),
        *("min_p", "seed", "stop", "stream", "stream_options", "logprobs", "top_logprobs", "echo", "n", "tools"),
        *("user", "repetition_penalty", "ignore_eos", "response_format"),
    ]
)
bodies = st.dictionaries(names | st.text(max_size=5), values, max_size=6)
raw = bodies.map(json.dumps).map(str.encode) | st.binary(max_size=60) | values.map(json.dumps).map(str.encode)


# 60 in every run; FLASHLLM_FUZZ=10000 for the long one.
@settings(
    max_examples=int(os.environ.get("FLASHLLM_FUZZ", "60")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(path=st.sampled_from([CHAT, COMPLETION]), body=raw, good=st.booleans())
def test_no_request_breaks_the_server(http, served, path, body, good):
    if good:  # otherwise nearly all fail at the first field
        try:
            fields = json.loads(body)
        except ValueError:
            fields = None
        if isinstance(fields, dict):
            base = {"messages": [HELLO]} if path == CHAT else {"prompt": "hello"}
            body = json.dumps({**fields, **base, "model": "tiny", "max_tokens": 1}).encode()
    response = _post(http, path, body)
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        assert_is_error(response, response.status_code)
    assert served[1].alive
