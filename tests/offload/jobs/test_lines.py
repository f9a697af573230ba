"""Batch files: what is a request, what is refused and how it is said, and where lines lie."""

import contextlib
import json
import os

import pytest
from fakes import CONTEXT, ENCODER, VOCAB
from hypothesis import given, settings
from hypothesis import strategies as st

from flashllm.api.fields import MAX_DEPTH, BadRequest
from flashllm.api.prompts import PromptEncoder
from flashllm.errors import FlashIOError, FormatError
from flashllm.offload.jobs import lines as lines_module
from flashllm.offload.jobs.lines import BatchFile, ranked
from flashllm.offload.jobs.requests import parse_request

CHAT = {"messages": [{"role": "user", "content": "hello"}]}


def batch_line(body, *, custom_id="a", url="/v1/completions", **more):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body, **more}


def write(path, *values):
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in values))
    return path


def read(path, **options):
    return BatchFile.read(path, ENCODER, max_new_tokens=8, **options)


def parse(value, *, number=1, text=False):
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    return parse_request(raw, number, text=text, max_new_tokens=256)


def test_a_completion_line():
    body = {
        "model": "any",
        "prompt": "ab",
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
    }
    request = parse(batch_line(body | {"seed": -1, "stop": "x", "logprobs": 3, "n": 1, "stream": False, "user": None}))
    assert (request.custom_id, request.kind, request.prompt, request.logprobs) == ("a", "completion", "ab", 3)
    options = request.options
    assert (options.max_new_tokens, options.temperature, options.top_p, options.top_k) == (5, 0.5, 0.9, 0)
    assert (options.min_p, options.seed, options.stop, request.max_new_given) == (0.1, 2**63 - 1, ("x",), True)


def test_a_chat_line():
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be"}, {"role": "user", "content": content, "name": "eve"}]
    body = {"messages": messages, "max_completion_tokens": 3, "logprobs": True, "top_logprobs": 20}
    request = parse(batch_line(body, url="/v1/chat/completions"))
    assert request.prompt == ({"role": "system", "content": "be"}, {"role": "user", "content": "a\nb", "name": "eve"})
    assert (request.options.max_new_tokens, request.logprobs) == (3, 20)


def test_plain_prompts():
    assert parse({"prompt": "hi"}, number=7).custom_id == "line-7"
    assert parse({"prompt": [3, 4], "custom_id": "x"}).prompt == (3, 4)
    assert parse(b'{"not": json', text=True).prompt == '{"not": json'


def test_a_line_that_says_nothing_is_greedy_and_has_a_seed_of_its_own():
    one, two = parse({"prompt": "a", "custom_id": "1"}), parse({"prompt": "a", "custom_id": "2"})
    assert one.options.temperature == 0
    assert one.options.seed != two.options.seed
    assert one.options.seed == parse({"prompt": "b", "custom_id": "1"}).options.seed
    assert not one.max_new_given


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"{", "is not JSON"),
        (b"\xff", "is not UTF-8"),
        (b'{"prompt": "a", "prompt": "b"}', "occurs twice"),
        (b'{"prompt": NaN}', "NaN"),
        (b"[" * 100_000, "nested too deeply"),
        ([1], "must be a JSON object, not list"),
        ({}, 'neither a "prompt" nor a "body"'),
        ({"prompt": json.loads("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1))}, "nested more than"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": []}, "token ids"),
        ({"prompt": ["a", "b"]}, "2 prompts in a line"),
        ({"prompt": 3}, "must be a text or a list"),
        ({"prompt": "\ud800"}, "lone surrogate"),
        ({"prompt": "a", "custom_id": ""}, "custom_id must have"),
        ({"prompt": "a", "custom_id": 3}, "custom_id must be a text"),
        ({"prompt": "a", "promt": "b"}, "'promt' is unknown"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens must be an integer of at least 1, not 0"),
        ({"prompt": "a", "logprobs": 21}, "logprobs must be an integer from 0 to 20"),
        (batch_line({"prompt": "a"}, url="/v1/embeddings"), "url must be"),
        (batch_line({"prompt": "a"}, method="GET"), "method must be POST"),
        (batch_line({"prompt": "a"}, extra=1), "'extra' is unknown besides"),
        (batch_line([]), "body must be an object"),
        ({"body": {"prompt": "a"}, "url": "/v1/completions"}, "custom_id is missing"),
        (batch_line({"prompt": "a", "stream": True}), "stream: True is not supported"),
        (batch_line({"prompt": "a", "n": 2}), "n: 2 is not supported"),
        (batch_line({"prompt": "a", "n": True}), "n: True is not supported"),
        (batch_line({"prompt": "a", "echo": True}), "echo"),
        (batch_line({"prompt": "a", "max_tokens": 2, "max_completion_tokens": 3}), "max_completion_tokens"),
        (batch_line({"messages": []}, url="/v1/chat/completions"), "at least one message"),
    ],
)
def test_what_is_no_request(value, message):
    """Of bodies a few: what else they may not say, tests/serve/test_requests.py tries on the same code."""
    with pytest.raises(BadRequest, match=message):
        parse(value)


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_a_request_or_a_named_error(raw):
    with contextlib.suppress(BadRequest):
        parse(raw)


SAME, STREAM = {"prompt": "a", "custom_id": "x"}, {"prompt": "a", "stream": True}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            ({"prompt": "a"}, "", "{", {"prompt": "a", "stream": True}),
            r"2 of 3 lines .*line 3: is not JSON.*line 4: st",
        ),
        (["{"] * 13, r"13 of 13.*line 10: .*; and 3 more"),
        ((SAME, {"prompt": "b"}, SAME, SAME), "line 3: custom_id 'x' is that of line 1; line 4"),
        (({"prompt": "a", "custom_id": "line-2"}, {"prompt": "b"}), "custom_id 'line-2' is that of line 1"),  # as ours
        (({"prompt": [VOCAB]},), f"token id {VOCAB} is not below"),
        (("", ""), "no requests"),
    ],
)
def test_problems_have_their_line_numbers_and_nothing_runs(tmp_path, lines, message):
    with pytest.raises(FormatError, match=message):
        read(write(tmp_path / "in.jsonl", *lines))


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(FormatError, match="not a regular file"):
        read(tmp_path)


def test_lines_are_found_again(tmp_path):
    path = tmp_path / "in.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\n\n  two \n \t\nthree")
    with read(path) as batch:
        assert [(line.number, batch.request(index).prompt) for index, line in enumerate(batch.lines)] == [
            (1, "one"),
            (3, "  two "),
            (5, "three"),
        ]
        assert list(batch.sequence(2).prompt) == ENCODER.tokenizer.encode("three")
        assert batch.sequence(2).key == 2


def test_a_file_that_changes_is_noticed(tmp_path):
    path = write(tmp_path / "in.txt", "one", "two")
    with read(path) as batch:
        status = path.stat()
        path.write_text("one\nTWO!\n")
        with pytest.raises(FlashIOError, match="was changed while the job ran"):
            batch.request(0)
        path.write_text("one\ntwO\n")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # other bytes at the old time
        assert batch.request(0).prompt == "one"
        with pytest.raises(FlashIOError, match="line 2 reads otherwise than when it was checked"):
            batch.request(1)


def test_bounds(tmp_path, monkeypatch):
    monkeypatch.setattr(lines_module, "MAX_LINE_NBYTES", 10)
    path = write(tmp_path / "in.txt", "0123456789", "01234567890", "x" * 100, "last")
    with pytest.raises(FormatError, match="line 2: is longer than 10 bytes; line 3"):
        read(path)
    monkeypatch.setattr(lines_module, "MAX_LINES", 3)
    with pytest.raises(FormatError, match="more than 3 lines"):
        read(path)


def test_what_the_model_cannot_answer_is_no_malformed_line(tmp_path):
    path = write(
        tmp_path / "in.jsonl",
        {"prompt": [3] * CONTEXT},
        {"prompt": [3] * (CONTEXT - 1)},
        {"prompt": [3] * (CONTEXT - 5), "max_tokens": 6},
        {"prompt": [3] * (CONTEXT - 5)},
    )
    with read(path) as batch:
        assert [line.max_new_tokens for line in batch.lines] == [0, 1, 0, 5]
        assert "128 tokens; with a new token" in batch.lines[0].problem
        assert "with 6 new tokens" in batch.lines[2].problem
        assert [batch.sequence(index).options.max_new_tokens for index in (1, 3)] == [1, 5]


def test_a_model_without_tokenizer_or_template(tmp_path):
    bare = PromptEncoder(tokenizer=None, template=None, context=CONTEXT, vocab=VOCAB)

    def problem(value):
        with pytest.raises(FormatError) as caught:
            BatchFile.read(write(tmp_path / "in.jsonl", value), bare, max_new_tokens=8)
        return str(caught.value)

    assert "no tokenizer" in problem({"prompt": "a"})
    assert "no chat template" in problem(batch_line(CHAT, url="/v1/chat/completions"))
    assert "stop needs" in problem({"prompt": [3], "stop": "a"})
    with BatchFile.read(write(tmp_path / "in.jsonl", {"prompt": [3]}), bare, max_new_tokens=8) as batch:
        assert list(batch.sequence(0).prompt) == [3]


def test_chat_is_rendered_by_the_template_which_may_break_on_one_alone(tmp_path):
    bad = {"messages": [{"role": "user", "content": "break"}]}
    lines = [batch_line(body, custom_id=name, url="/v1/chat/completions") for name, body in (("a", bad), ("b", CHAT))]
    with read(write(tmp_path / "in.jsonl", *lines)) as batch:
        assert [line.problem for line in batch.lines] == ["the chat template failed", None]
        text = "<user>hello<assistant>"
        assert list(batch.sequence(1).prompt) == ENCODER.tokenizer.encode(text, add_special=False)


def test_neighbours_are_alike_and_the_longest_first(tmp_path):
    sizes = [(3, 4), (100, 2), (5, 8), (3, 8), (70, 9), (101, 9)]
    path = write(tmp_path / "in.jsonl", *({"prompt": [3] * size, "max_tokens": new} for size, new in sizes))
    with read(path) as batch:
        order = ranked(batch.lines, list(range(len(sizes))))
    assert [sizes[index] for index in order] == [(101, 9), (70, 9), (100, 2), (5, 8), (3, 8), (3, 4)]
