"""Ollama's dialect: the same answers under other names."""

import json

import pytest

import flashllm

SAY = [{"role": "user", "content": "The little dog ran to the big tree"}]


def test_what_clients_ask_first(http):
    assert http.get("/api/version").json() == {"version": flashllm.__version__}
    (model,) = http.get("/api/tags").json()["models"]
    assert http.get("/api/ps").json()["models"] == [model]
    assert (model["name"], model["model"]) == ("tiny", "tiny")
    assert model["size"] > 0
    for name in ("tiny", "tiny:latest"):
        shown = http.post("/api/show", json={"model": name}).json()
        assert shown["capabilities"] == ["completion"]
        assert shown["model_info"]["flashllm.context_length"] == 96
    assert http.post("/api/show", json={"model": "other"}).status_code == 404


def test_a_chat_is_openais(http):
    same = {"model": "tiny", "messages": SAY}
    theirs = http.post("/v1/chat/completions", json={**same, "max_tokens": 8, "temperature": 0}).json()
    options = {"num_predict": 8, "temperature": 0, "num_ctx": 4096}
    whole = http.post("/api/chat", json={**same, "stream": False, "options": options, "keep_alive": "5m"}).json()
    expected = theirs["choices"][0]["message"]["content"]
    assert whole["message"] == {"role": "assistant", "content": expected}
    assert (whole["done"], whole["done_reason"], whole["eval_count"]) == (True, "length", 8)
    assert whole["prompt_eval_count"] == theirs["usage"]["prompt_tokens"]
    with http.stream("POST", "/api/chat", json={**same, "model": "tiny:latest", "options": options}) as response:
        assert response.headers["content-type"] == "application/x-ndjson"
        *lines, last = [json.loads(line) for line in response.iter_lines()]
    assert "".join(line["message"]["content"] for line in lines) == expected
    assert not any(line["done"] for line in lines)
    assert (last["done"], last["eval_count"]) == (True, 8)
    assert last["eval_duration"] > 0


def test_a_model_that_does_not_reason_can_be_asked_not_to(http):
    body = {"model": "tiny", "messages": SAY, "stream": False, "options": {"num_predict": 2}}
    assert http.post("/api/chat", json={**body, "think": False}).status_code == 200


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"options": []}, "options must be an object"),
        ({"options": {"mirostat": 1}}, "options: 'mirostat' is not supported"),
        ({"options": {"temperature": "x"}}, "temperature must be a number"),
        ({"options": {"num_predict": 0}}, "num_predict must be an integer"),
        ({"format": "yaml"}, "format: the schema must be a JSON object"),
        ({"format": {"type": "x"}}, "response_format: the JSON schema cannot be the form of an answer: Invalid type"),
        ({"think": True}, "this model's chat template has no enable_thinking"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "tool_calls: each needs a function"),
        ({"stream": 1}, "stream must be true or false"),
        ({"wisdom": 5}, "the field 'wisdom' is unknown"),
    ],
)
def test_bad_requests(http, fields, message):
    response = http.post("/api/chat", json={"model": "tiny", "messages": SAY, **fields})
    assert response.status_code == 400
    assert message in response.json()["error"]


def test_bodies_that_are_none(http):
    for body in (b"", b"[]", b"{", b"[" * 50_000):
        for path in ("/api/chat", "/api/show"):
            response = http.post(path, content=body, headers={"Content-Type": "application/json"})
            assert response.status_code == 400
    huge = http.post(
        "/api/chat", content=b'{"options": %s}' % (b"9" * 5000), headers={"Content-Type": "application/json"}
    )
    assert huge.json() == {"error": "the body: holds an integer of more than 4300 digits"}
    assert http.get("/api/nothing").json() == {"error": "there is no '/api/nothing' here"}


def test_an_unlimited_answer_fills_the_context(http):
    options = {"num_predict": -1, "temperature": 0}
    done = http.post("/api/chat", json={"model": "tiny", "messages": SAY, "stream": False, "options": options}).json()
    assert done["done_reason"] in ("stop", "length")
    assert done["prompt_eval_count"] + done["eval_count"] <= 96
