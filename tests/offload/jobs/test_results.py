"""The output file: its form, and every way to begin, break off, continue and refuse it."""

import dataclasses
import errno
import json
import os

import pytest
from fakes import ENCODER, Interrupted, Letters, Runner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashllm.errors import FlashIOError, FormatError, UsageError
from flashllm.offload.jobs.blocks import equal
from flashllm.offload.jobs.job import Job
from flashllm.offload.jobs.lines import BatchFile
from flashllm.offload.jobs.results import Results, expected_nbytes

NEW = 6  # tokens, of a line that does not say
FOREIGN = b'{"id": "batch_req_ffffffffffffffffffffffff", "custom_id": "%b"}\n'


def asked(custom_id, url="completions", **body):
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": f"/v1/{url}", "body": body})


def chat(custom_id, text, **body):
    return asked(custom_id, "chat/completions", messages=[{"role": "user", "content": text}], **body)


LINES = [
    json.dumps({"prompt": "é|a"}),
    chat("c1", "hello", max_tokens=4, logprobs=True, top_logprobs=2),
    asked("long", prompt=[3] * 200),
    json.dumps({"prompt": "bb", "custom_id": 'q"u\u2028o', "logprobs": 1}),
    json.dumps({"prompt": [3] * 200, "custom_id": "too long"}),
    asked("c2", prompt="xyz", logprobs=2, temperature=0.9),
    chat("c3", "bye", stop=["e", "a", "o"]),
]


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(line + "\n" for line in LINES))
    return path


def run(source, out, *, resume=False, runner=None, block_size=2, settings="model", encoder=ENCODER):
    """Runs what is left to do; the job's totals, or None where the runner broke it off."""
    with (
        BatchFile.read(source, encoder, max_new_tokens=NEW, settings=settings) as batch,
        Results.open(out, batch.lines, source=source, resume=resume) as results,
    ):
        text = lambda token: Letters().decode([token])  # noqa: E731
        job = Job(batch, results, model="tiny", token_text=text)
        job.answer_problems()
        try:
            job.run(runner or Runner(), equal(len(job.sizes), block_size))
        except Interrupted:
            return None
        return job.totals


def answers(out):
    """custom_id -> answer, without the second it was made in."""
    result = {}
    for line in out.read_bytes().splitlines():
        value = json.loads(line)
        assert value["custom_id"] not in result, "a line twice"
        if value.get("response", {}).get("body", {}).get("created"):
            value["response"]["body"]["created"] = 0
        result[value["custom_id"]] = value
    return result


@pytest.fixture
def expected(source, tmp_path):
    run(source, tmp_path / "whole.jsonl")
    return answers(tmp_path / "whole.jsonl")


def test_the_form_of_answers(expected):
    assert set(expected) == {"line-1", "c1", "long", 'q"u\u2028o', "too long", "c2", "c3"}
    c1 = expected["c1"]
    assert set(c1) == {"id", "custom_id", "response", "error"}
    assert c1["error"] is None
    assert c1["response"]["status_code"] == 200
    body = c1["response"]["body"]
    assert (body["object"], body["model"]) == ("chat.completion", "tiny")
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] in ("stop", "length")
    tokens = choice["logprobs"]["content"]
    assert len(tokens) == usage["completion_tokens"]
    assert "".join(token["token"] for token in tokens) == choice["message"]["content"]
    assert [len(token["top_logprobs"]) for token in tokens] == [2] * len(tokens)
    assert bytes(tokens[0]["bytes"]).decode() == tokens[0]["token"]
    body = expected["c2"]["response"]["body"]
    assert body["object"] == "text_completion"
    logprobs = body["choices"][0]["logprobs"]
    assert {len(each) for each in logprobs.values()} == {body["usage"]["completion_tokens"]}
    plain = expected["line-1"]
    assert set(plain) == {"id", "custom_id", "text", "finish_reason", "prompt_tokens", "completion_tokens"}
    assert expected['q"u\u2028o']["logprobs"][0]["top_logprobs"]


def test_prompts_of_ids_are_answered_with_ids(tmp_path):
    """Without a tokenizer they are all the answer there is."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"prompt": [4, 5]}) + "\n" + asked("c", prompt=[4, 5]))
    run(source, out, encoder=dataclasses.replace(ENCODER, tokenizer=None))
    found = answers(out)
    (choice,) = found["c"]["response"]["body"]["choices"]
    for each in (found["line-1"], choice):
        assert (each["text"], len(each["token_ids"])) == ("", 6)
    assert choice["token_ids"] == found["line-1"]["token_ids"]


def test_lines_that_failed_say_why(expected):
    assert expected["long"]["response"]["status_code"] == 400
    assert "200 tokens" in expected["long"]["error"]["message"]
    assert expected["long"]["response"]["body"]["error"]["type"] == "invalid_request_error"
    assert expected["too long"]["error"]["status_code"] == 400
    assert "200 tokens" in expected["too long"]["error"]["message"]


def test_a_sequence_that_failed_is_a_500(source, tmp_path):
    class Broken(Runner):
        def run(self, sequences, progress):
            sequences[0].fail("the logits are gone")
            return super().run(sequences, progress)

    out = tmp_path / "out.jsonl"
    totals = run(source, out, runner=Broken(), block_size=10)
    failed = [each for each in answers(out).values() if (each.get("error") or {}).get("code") == "generation_failed"]
    assert len(failed) == 1
    assert totals.requests == 5


def test_how_far_a_job_is(source, tmp_path):
    shares = []
    with (
        BatchFile.read(source, ENCODER, max_new_tokens=NEW) as batch,
        Results.open(tmp_path / "out.jsonl", batch.lines, source=source, resume=False) as results,
    ):
        job = Job(batch, results, model="tiny", token_text=str)

        class Watched(Runner):
            def run(self, sequences, progress):
                def note(new_tokens):
                    progress(new_tokens)
                    shares.append((job.done_share, job.done_tokens))

                return super().run(sequences, note)

        assert (job.done_share, job.done_tokens) == (0, 0)
        job.run(Watched(), (2, 2, 1))
        assert (job.done_share, job.done_tokens) == (1, job.totals.new_tokens)
        assert [len(block) for block in job.blocks] == [2, 2, 1]
    assert all(0 < share <= 1 for share, _ in shares)
    assert [tokens for _, tokens in shares] == sorted(tokens for _, tokens in shares)


def test_blocks_and_totals(source, tmp_path):
    runner = Runner()
    totals = run(source, tmp_path / "out.jsonl", runner=runner)
    assert [len(block) for block in runner.blocks] == [2, 2, 1]
    assert (totals.blocks, totals.requests, totals.bytes_read, totals.busy) == (3, 5, 300, {"compute": 1.5})
    assert totals.throughput == pytest.approx(totals.new_tokens / 2.25)


@pytest.mark.parametrize("block_size", [1, 3, 100])
def test_answers_do_not_depend_on_the_blocks(source, tmp_path, expected, block_size):
    out = tmp_path / "out.jsonl"
    run(source, out, block_size=block_size)
    assert answers(out) == expected


def test_cut_at_every_byte_and_resumed_every_line_is_there_once(source, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # hundreds of them take seconds
    source.write_text("\n".join([LINES[0], chat("é\u2028\n", "hello", max_tokens=2), LINES[2]]))
    out, first = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    run(source, first, block_size=100)
    expected, whole = answers(first), first.read_bytes()
    for size in range(len(whole) + 1):
        out.write_bytes(whole[:size])
        run(source, out, resume=True, block_size=100)
        assert answers(out) == expected, size
        assert out.read_bytes().startswith(whole[: whole.rfind(b"\n", 0, size) + 1])


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 400), st.booleans()), max_size=6))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_broken_off_again_and_again(source, tmp_path, expected, breaks):
    """Each run ends after some steps, and the file loses some of its last bytes or gets zeros for them."""
    out = tmp_path / "out.jsonl"
    out.unlink(missing_ok=True)
    for steps, lost, zeros in breaks:
        run(source, out, resume=True, runner=Runner(end_after=steps))
        data = out.read_bytes()
        kept = data[: max(len(data) - lost, 0)]
        # Only what is being written can be torn: a block, of which whole lines may have reached the drive.
        out.write_bytes(kept + bytes(len(data) - len(kept)) * zeros)
    run(source, out, resume=True)
    assert answers(out) == expected
    run(source, out, resume=True)
    assert answers(out) == expected


def test_what_finished_in_a_broken_block_is_kept(source, tmp_path, expected):
    out = tmp_path / "out.jsonl"
    assert run(source, out, runner=Runner(end_after=5), block_size=100) is None
    kept = answers(out)
    assert {"long", "too long"} < set(kept) < set(expected)
    assert all(expected[name] == value for name, value in kept.items())


def test_an_empty_file_is_nothing_to_lose(source, tmp_path, expected):
    """A kill before the first block leaves one."""
    out = tmp_path / "out.jsonl"
    out.touch()
    run(source, out)
    assert answers(out) == expected


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_the_input_is_never_the_output(source, tmp_path, link):
    alias = tmp_path / "alias.jsonl"
    link(source, alias)
    for out in (source, alias):
        with pytest.raises(UsageError, match="is the input itself"):
            run(source, out, resume=True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"someone's notes\n", "line 1: is not JSON.*or is damaged"),
        (b"someone's notes", "last line is not of this job"),
        (b'{"a": 1}\n', "line 1 is no output of"),
        (FOREIGN % b"zz", "answers 'zz', which the input does not"),
        (FOREIGN % b"c1", "answers 'c1', which was asked otherwise"),
        (FOREIGN[:30], "last line is not of this job"),
        (b"\0\0\0\n", "line 1"),
    ],
)
def test_a_foreign_file_is_refused_and_left_alone(source, tmp_path, content, message):
    out = tmp_path / "out.jsonl"
    out.write_bytes(content)
    with pytest.raises(FormatError, match=message):
        run(source, out, resume=True)
    assert out.read_bytes() == content


def _without(value, *keys):
    return {key: each for key, each in value.items() if key not in keys}


@pytest.mark.parametrize(
    "change",
    [
        lambda value: {"dustom_id": value["custom_id"], **_without(value, "custom_id")},
        lambda value: {**value, "custom_id": "c1"},  # another line's
        lambda value: {**value, "text": value["text"] + "."},
        lambda value: {**value, "completion_tokens": value["completion_tokens"] + 1},
        lambda value: {**value, "error": None},
        lambda value: _without(value, "text"),
        lambda value: {"id": value["id"]},
        lambda value: {**value, "id": value["id"].partition("_req_")[0] + "_req_" + value["id"][10:34]},
    ],
)
def test_a_line_that_was_changed_is_no_answer(source, tmp_path, expected, change):
    """It is named and left alone; taken out, its request is answered again and no other."""
    out = tmp_path / "whole.jsonl"
    lines = out.read_text().split("\n")[:-1]
    number = next(index for index, line in enumerate(lines) if json.loads(line)["custom_id"] == "line-1")
    changed = [*lines[:number], json.dumps(change(json.loads(lines[number]))), *lines[number + 1 :]]
    out.write_text("".join(line + "\n" for line in changed))
    with pytest.raises(FormatError, match=rf"line {number + 1} is not as it was written.*take it out"):
        run(source, out, resume=True)
    assert out.read_text().split("\n")[:-1] == changed
    out.write_text("".join(line + "\n" for line in lines[:number] + lines[number + 1 :]))
    assert run(source, out, resume=True).requests == 1
    assert answers(out) == expected


def test_a_line_may_be_written_otherwise(source, tmp_path, expected):
    """Its values are what counts: other programs write JSON in other ways."""
    out = tmp_path / "whole.jsonl"
    lines = [json.dumps(json.loads(line), separators=(",", ":")) for line in out.read_text().split("\n")[:-1]]
    out.write_text("".join(line + "\n" for line in lines))
    assert run(source, out, resume=True).requests == 0


def test_a_doubled_line_is_refused_and_the_input_may_grow(source, tmp_path, expected):
    path = tmp_path / "whole.jsonl"
    data = path.read_bytes()
    path.write_bytes(data + data.splitlines(keepends=True)[0])
    with pytest.raises(FormatError, match="a second time"):
        run(source, path, resume=True)
    path.write_bytes(data)
    with source.open("a") as file:
        file.write(json.dumps({"prompt": "more", "custom_id": "new"}) + "\n")
    assert run(source, path, resume=True).requests == 1
    assert set(answers(path)) == {*expected, "new"}


def test_one_process_at_a_time(source, tmp_path):
    out = tmp_path / "out.jsonl"
    with (
        BatchFile.read(source, ENCODER, max_new_tokens=NEW) as batch,
        Results.open(out, batch.lines, source=source, resume=False),
        pytest.raises(FlashIOError, match="another flashllm is writing"),
    ):
        Results.open(out, batch.lines, source=source, resume=True)


def test_a_full_disk_can_be_continued(source, tmp_path, expected, monkeypatch):
    out = tmp_path / "out.jsonl"
    written = 0
    real = os.pwrite

    def full(fd, data, offset):
        nonlocal written
        if written > 900:
            raise OSError(errno.ENOSPC, "No space left on device")
        data = data[:100]  # short writes, too
        written += len(data)
        return real(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(FlashIOError, match=r"the disk is full; the answers before them are safe .* --resume"):
            run(source, out)
    assert out.read_bytes().endswith(b"\n")
    run(source, out, resume=True)
    assert answers(out) == expected


def test_no_directory_no_file(source, tmp_path):
    with pytest.raises(UsageError, match="directory does not exist"):
        run(source, tmp_path / "none" / "out.jsonl")
    with pytest.raises(UsageError, match="not a regular file"):
        run(source, tmp_path, resume=True)


def test_expected_size(source):
    with BatchFile.read(source, ENCODER, max_new_tokens=NEW) as batch:
        least, most = expected_nbytes(batch.lines)
    assert 0 < least < most
