"""The server as clients see it: openai-python, plain HTTP, one that relies on `usage`, and lm-eval's requests."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

import httpx
import openai
import pytest
import torch
from serving import running

from flashllm.generate.sampling import SamplingOptions
from flashllm.generate.session import Session, TokenRecord
from flashllm.generate.tokenizer import Tokenizer

SAY = [{"role": "user", "content": "The little dog ran to the big tree"}]


def test_models(client, http):
    (model,) = client.models.list().data
    assert model.id == "tiny"
    assert client.models.retrieve("tiny") == model
    assert (model.max_model_len, model.context_length) == (96, 96)
    # Anthropic's clients read pages of models, Codex a catalogue of its own, which must be there.
    listed = http.get("/v1/models").json()
    assert (listed["has_more"], listed["first_id"], listed["last_id"], listed["models"]) == (False, "tiny", "tiny", [])
    card = http.get("/v1/models/tiny").json()
    assert (card["type"], card["display_name"], card["max_input_tokens"]) == ("model", "tiny", 96)
    assert datetime.fromisoformat(card["created_at"]).timestamp() == model.created
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-9'"):
        client.models.retrieve("gpt-9")
    assert http.get("/health").json() == {"status": "ok"}


def test_a_completion_is_what_generate_says(tiny, model, client):
    text, tokenizer = "One day a girl found", Tokenizer.load(tiny().path())
    with Session(model, tokenizer, SamplingOptions(max_new_tokens=8)) as session:  # as the command line's
        records = [each for each in session.stream_ids(tokenizer.encode(text)) if isinstance(each, TokenRecord)]
    done = client.completions.create(model="tiny", prompt=text, max_tokens=8, temperature=0)
    (choice,), count = done.choices, len(records)
    assert choice.text == "".join(each.text for each in records)
    assert choice.finish_reason == ("length" if count == 8 else "stop")
    assert (done.usage.completion_tokens, done.usage.total_tokens) == (count, done.usage.prompt_tokens + count)


def test_a_chat_streamed_is_the_chat_whole(client):
    asked = {"model": "tiny", "messages": SAY, "max_tokens": 9, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, **_streamed(include_usage=True)))
    *others, last = chunks
    assert others[0].choices[0].delta.role == "assistant"
    assert "".join(each.choices[0].delta.content or "" for each in others) == whole.choices[0].message.content
    assert [each.choices[0].finish_reason for each in others] == [None] * (len(others) - 1) + ["length"]
    assert all(each.usage is None for each in others)  # several editors drop a chunk with usage, text and all
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens == 9
    assert {each.id for each in chunks} == {last.id}


def _streamed(**options):
    return {"stream": True, "stream_options": options}


def test_a_stream_without_usage_has_none_and_ends_with_done(http):
    body = {"model": "tiny", "messages": SAY, "max_tokens": 4, "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert all("usage" not in json.loads(line.removeprefix("data: ")) for line in lines[:-1])


def test_stop_seed_and_sampling(client):
    def say(**options):
        return client.completions.create(model="tiny", prompt="The cat said", max_tokens=10, **options)

    free = say(temperature=0).choices[0].text
    stop = free[3:5]
    cut = say(temperature=0, stop=[stop]).choices[0]
    assert (cut.text, cut.finish_reason) == (free[: free.index(stop)], "stop")
    assert say(temperature=1.5, seed=5).choices[0].text == say(temperature=1.5, seed=5).choices[0].text
    texts = {say(temperature=1.5, extra_body={"top_k": 40}).choices[0].text for _ in range(4)}
    assert len(texts) > 1


def test_several_prompts_and_token_ids(client, tiny):
    tokenizer = Tokenizer.load(tiny().path())
    texts = ["The little dog", "She was happy"]

    def asked(prompt):
        return client.completions.create(model="tiny", prompt=prompt, max_tokens=5, temperature=0)

    many, ids = asked(texts), asked([tokenizer.encode(text) for text in texts])
    alone = [asked(text) for text in texts]
    assert [each.text for each in many.choices] == [each.choices[0].text for each in alone]
    assert [each.text for each in many.choices] == [each.text for each in ids.choices]
    assert [each.index for each in many.choices] == [0, 1]
    assert many.usage.completion_tokens == sum(each.usage.completion_tokens for each in alone)


def test_chat_log_probabilities(client):
    asked = {"model": "tiny", "messages": SAY, "max_tokens": 4, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    content = client.chat.completions.create(**asked).choices[0].logprobs.content
    assert len(content) == 4
    for token in content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == token.top_logprobs[0].logprob <= 0
    chunks = client.chat.completions.create(**asked, stream=True)
    streamed = [token for chunk in chunks if chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.content]
    assert streamed == content


def log_likelihood(response, ctxlen):
    """As lm-eval's local-completions reads an answer (lm_eval/models/openai_completions.py, `parse_logprobs`)."""
    results = []
    for choice, length in zip(sorted(response["choices"], key=lambda each: each["index"]), ctxlen, strict=True):
        tokens = choice["logprobs"]["token_logprobs"][length:-1]
        tops = choice["logprobs"]["top_logprobs"][length:-1]
        results.append((sum(tokens), all(one == max(top.values()) for one, top in zip(tokens, tops, strict=True))))
    return results


@pytest.mark.parametrize("mode", ["sparse", "prompt"])
def test_lm_eval_gets_the_models_log_likelihoods(http, tiny, load, mode):
    """Token ids, echo, log probabilities, a list of prompts: the request that lm-eval sends to score continuations."""
    length = 7 if mode == "sparse" else 40  # K0 is 8
    flash = load(tiny().path())
    torch.manual_seed(1)
    prompts = torch.randint(5, 290, (3, length))
    body = {"model": "tiny", "prompt": prompts.tolist(), "temperature": 0, "max_tokens": 1, "seed": 1234}
    response = http.post("/v1/completions", json={**body, "logprobs": 1, "echo": True})
    assert response.status_code == 200, response.text
    found = log_likelihood(response.json(), [4] * 3)
    for ids, (likelihood, greedy) in zip(prompts, found, strict=True):
        scores = flash(ids[None]).logits[0].double().log_softmax(-1)
        expected = scores[3:-1].gather(-1, ids[4:, None]).sum().item()
        assert likelihood == pytest.approx(expected, abs=1e-5)
        assert greedy == bool((scores[3:-1].argmax(-1) == ids[4:]).all())


def test_echo_begins_with_the_prompt_also_streamed(client):
    asked = {"model": "tiny", "prompt": "She was", "max_tokens": 4, "logprobs": 1, "temperature": 0}
    plain = client.completions.create(**asked).choices[0]
    whole = client.completions.create(**asked, echo=True).choices[0]
    assert whole.text == "She was" + plain.text
    chunks = [chunk.choices[0] for chunk in client.completions.create(**asked, echo=True, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    values = [value for chunk in chunks if chunk.logprobs for value in chunk.logprobs.token_logprobs]
    assert values == whole.logprobs.token_logprobs


def test_timings_come_where_they_are_asked_for(http):
    body = {"model": "tiny", "prompt": "She was", "max_tokens": 3} | _streamed(include_timings=True)
    with http.stream("POST", "/v1/completions", json=body) as response:
        documents = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    timed = [each["timings"] for each in documents if "timings" in each]
    assert len(timed) == 4
    assert timed[0]["prompt_tokens"] > 0
    for each in timed:
        parts = sum(each[f"{kind}_ms"] for kind in ("io", "memory", "compute", "other"))
        assert parts == pytest.approx(each["total_ms"], rel=0.01)
        assert each["memory_bytes"] > 0
        assert each["memory_limit_bytes"] == 10**9


def test_a_client_that_goes_away_stops_its_answer(http, slow, served):
    slow.passes.clear()
    body = {"model": "tiny", "prompt": "She was", "max_tokens": 80, "stream": True, "ignore_eos": True}
    with http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        while not next(lines).startswith("data:"):
            pass
    _wait_until(lambda: not served[1]._running)
    assert len(slow.passes) < 60


def test_a_client_that_does_not_stream_and_goes_away_stops_its_answer(served, slow):
    slow.passes.clear()
    body = {"model": "tiny", "prompt": "She was", "max_tokens": 80, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout), httpx.Client(base_url=served[0], timeout=0.2) as http:
        http.post("/v1/completions", json=body)
    _wait_until(lambda: not served[1]._running)
    assert len(slow.passes) < 70


@pytest.fixture
def held(slow, client):
    """A stream of 90 tokens that has begun; passes wait from here on."""
    body = {"model": "tiny", "prompt": "She", "max_tokens": 90, "extra_body": {"ignore_eos": True}}
    stream = client.completions.create(**body, stream=True)
    next(iter(stream))
    slow.runs.clear()
    return stream


def test_requests_given_up_while_they_wait_leave_the_queue(served, slow, client, held):
    for _ in range(12):  # more than may wait at once
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.05).completions.create(model="tiny", prompt="It was", max_tokens=60)
    _wait_until(lambda: not served[1].waiting)
    assert served[1]._running
    slow.passes.clear()
    held.close()
    slow.runs.set()
    _wait_until(lambda: not served[1]._running)
    assert len(slow.passes) < 50  # of the first alone it would be more


def test_the_queue_is_bounded(served, slow, client, held):
    asked = {"model": "tiny", "prompt": "It was", "max_tokens": 1}
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(client.completions.create, **asked) for _ in range(8)]
        _wait_until(lambda: served[1].waiting == 8)
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(**asked)
        assert refused.value.response.headers["retry-after"] == "10"
        held.close()
        slow.runs.set()
    assert all(each.result().choices for each in answers)


def test_a_server_that_stops_says_so(tiny, model):
    with running(model, tiny().path()) as (address, worker):
        worker.cancel_all()
        response = httpx.post(f"{address}/v1/completions", json={"prompt": "It was"})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "stopping")
    assert "retry-after" not in response.headers


def test_a_long_prompt_is_waited_for_with_comments(http, slow, monkeypatch):
    monkeypatch.setattr("flashllm.serve.http.KEEP_ALIVE_S", 0.05)
    slow.delay_s = 0.6
    body = {"model": "tiny", "prompt": "She was", "max_tokens": 1, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as response:
        lines = list(response.iter_lines())
    assert lines[0].startswith(":")
    assert lines[-2:] == ["data: [DONE]", ""]


def test_a_failing_model_is_a_500_and_the_next_request_is_answered(model, client, capsys):
    from flashllm.errors import ChecksumError

    model.fault = ChecksumError("layer 3: a row has the wrong checksum in /secret/place")
    with pytest.raises(openai.InternalServerError, match="ChecksumError") as failed:
        client.completions.create(model="tiny", prompt="It was", max_tokens=1)
    assert "secret" not in str(failed.value)
    assert "wrong checksum" in capsys.readouterr().err
    model.fault = ChecksumError("again")
    with pytest.raises(openai.APIError, match="ChecksumError"):
        list(client.completions.create(model="tiny", prompt="It was", max_tokens=1, stream=True))
    assert client.completions.create(model="tiny", prompt="It was", max_tokens=1).choices


def test_many_requests_at_once_are_all_answered(served, model):
    """60 of them, eight at a time: none is lost, each gets its own answer, and no more is kept than may be."""
    expected = {}

    def ask(number):
        body = {"model": "tiny", "prompt": [5 + number % 7] * (2 + number % 5), "max_tokens": 3, "temperature": 0}
        return http.post("/v1/completions", json=body).json()

    with httpx.Client(base_url=served[0], timeout=60) as http, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(60)))
    for number, answer in enumerate(answers):
        text = answer["choices"][0]["text"]
        assert expected.setdefault((number % 7, number % 5), text) == text
    assert len({answer["id"] for answer in answers}) == 60
    assert model.state_nbytes <= model.plan.memory.kept_nbytes


def _wait_until(met, timeout_s=20):
    end = time.monotonic() + timeout_s
    while not met():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_metrics(http):
    http.post("/v1/completions", json={"prompt": "She", "max_tokens": 1})
    lines = [line.rsplit(" ", 1) for line in http.get("/metrics").text.splitlines() if not line.startswith("#")]
    values = {name: float(value) for name, value in lines}
    assert values['flashllm_requests_total{path="/v1/completions",status="200"}'] > 0
    assert values["flashllm_generated_tokens_total"] > 0
    assert values["flashllm_memory_limit_bytes"] == 10**9
