"""`flashllm offload run` as a process: the answers, kills and interrupts at any moment, and what is refused."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import psutil
import pytest
from test_engine import CONTEXT, LENGTHS, POLICY, PROMPTS, expected, tiny  # noqa: F401 - fixtures

from flashllm.cli import main
from flashllm.offload.planner.packing import PACKING

LARGE = 1000  # requests of a job that takes seconds, and so outlasts the kills


@pytest.fixture
def policy(tmp_path):
    path = tmp_path / "policy.json"
    path.write_text(json.dumps({"policy": POLICY}))
    return path


def batch_file(path, count=8):
    lines = []
    for index in range(count):
        body = {"prompt": PROMPTS[index % len(PROMPTS)], "max_tokens": LENGTHS[index % len(PROMPTS)], "temperature": 0}
        line = {"custom_id": f"r{index}", "method": "POST", "url": "/v1/completions", "body": body}
        lines.append(json.dumps(line))
    path.write_text("\n".join(lines))
    return path


def arguments(model, source, out, policy, *more):
    scratch = str(out.parent / "scratch")
    given = ["-i", str(source), "-o", str(out), "--policy", str(policy), "--scratch", scratch]
    return ["offload", "run", str(model), *given, *more]


def answers(out):
    result = {}
    for line in out.read_text().splitlines():
        value = json.loads(line)
        assert value["custom_id"] not in result
        result[value["custom_id"]] = value
    return result


def test_a_batch_file_is_answered(tiny, tmp_path, policy, expected, capsys):  # noqa: F811
    source, out = batch_file(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    assert main(arguments(tiny, source, out, policy, "--json")) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out.splitlines()[-1])
    measured = document["measured"]
    assert document["policy"]["gpu_batch"] == 2
    assert {"prefill_s", "decode_s", "throughput", "busy", "peak_rss_bytes", "bytes_read", "bytes_written"} <= set(
        measured
    )
    assert measured["new_tokens"] == sum(len(ids) for ids in expected)
    assert {"prefill_s", "decode_s", "throughput"} <= set(document["predicted"])
    assert document["requests"] == {"lines": len(PROMPTS), "answered_now": len(PROMPTS), "failed": 0}
    got = answers(out)
    for index, ids in enumerate(expected):
        body = got[f"r{index}"]["response"]["body"]
        assert body["usage"]["completion_tokens"] == len(ids)
    assert main(arguments(tiny, source, out, policy)) == 2
    assert "exists; continue it with --resume" in capsys.readouterr().err
    assert main(arguments(tiny, source, out, policy, "--resume")) == 0
    captured = capsys.readouterr()
    assert f"all {len(PROMPTS)} lines are answered" in captured.out
    assert answers(out) == got
    assert main(arguments(tiny, source, out, policy, "--resume", "--seed", "3")) == 1
    assert "was asked otherwise" in capsys.readouterr().err


def test_packed_by_other_rules_a_job_is_not_resumed(tiny, tmp_path, policy, capsys, monkeypatch):  # noqa: F811
    """Answers of packed weights depend on how they are packed; those of plain ones do not."""
    source = batch_file(tmp_path / "in.jsonl", 2)
    for packed, status in ((["--compress", "weights"], 1), ([], 0)):
        out = tmp_path / f"{len(packed)}.jsonl"
        assert main(arguments(tiny, source, out, policy, *packed)) == 0
        with monkeypatch.context() as patch:
            patch.setattr("flashllm.offload.launch.PACKING", PACKING - 1)
            capsys.readouterr()
            assert main(arguments(tiny, source, out, policy, *packed, "--resume")) == status
        assert ("was asked otherwise" in capsys.readouterr().err) == bool(packed)


def test_the_table(tiny, tmp_path, policy, capsys):  # noqa: F811
    source = tmp_path / "in.txt"
    source.write_text("\n".join(PROMPTS))
    assert main(arguments(tiny, source, tmp_path / "out.jsonl", policy, "--max-new-tokens", "4")) == 0
    out = capsys.readouterr().out
    for word in ("prefill", "decoding", "throughput", "busy", "disk", "memory", "measured", "predicted", "tiers"):
        assert word in out


def test_malformed_lines_write_nothing(tiny, tmp_path, policy, capsys):  # noqa: F811
    source, out = batch_file(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    source.write_text(
        source.read_text() + '\n{"prompt": "a", "stream": true}\n' + json.dumps({"prompt": [3] * CONTEXT})
    )
    assert main(arguments(tiny, source, out, policy)) == 1
    assert f"line {len(PROMPTS) + 1}: stream: True is not supported" in capsys.readouterr().err
    assert not out.exists()
    assert main(arguments(tiny, source, out, policy, "--skip-bad")) == 0
    assert "2 of them errors" in capsys.readouterr().out
    assert len(answers(out)) == len(PROMPTS) + 2


def test_a_job_that_cannot_start_leaves_no_file(tiny, tmp_path, policy, capsys):  # noqa: F811
    source, out = batch_file(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    assert main(arguments(tiny, source, out, policy, "--memory", "1MB")) == 1
    assert "nothing is left for the model; give it more than" in capsys.readouterr().err
    assert not out.exists()
    assert main(arguments(tiny, source, source, policy, "--resume")) == 2
    assert main(arguments(tiny, tmp_path / "none.jsonl", out, policy)) == 1
    assert main(arguments(tmp_path, source, out, policy)) == 2
    assert not out.exists()


def start(*given):
    return subprocess.Popen(
        [sys.executable, "-m", "flashllm", *given], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_killed_at_any_moment_and_resumed(tiny, tmp_path, policy):  # noqa: F811
    source, whole, out = batch_file(tmp_path / "in.jsonl", LARGE), tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert main(arguments(tiny, source, whole, policy)) == 0
    moments, answered, half = random.Random(5), 0, whole.stat().st_size // 2
    for _ in range(2):
        killed = start(*arguments(tiny, source, out, policy, "--resume"))
        while killed.poll() is None and (out.stat().st_size if out.exists() else 0) <= answered:
            time.sleep(0.005)
        time.sleep(moments.uniform(0, 0.1))
        killed.kill()
        killed.communicate()
        answered = out.stat().st_size
        if answered > half:  # a busy machine wakes this test late
            break
    assert 0 < len(out.read_bytes().splitlines()) < LARGE, "killed too late to show anything"
    last = start(*arguments(tiny, source, out, policy, "--resume"))
    _, err = last.communicate()
    assert last.returncode == 0, err
    texts = [
        {name: value["response"]["body"]["choices"] for name, value in answers(path).items()} for path in (out, whole)
    ]
    assert texts[0] == texts[1]
    assert len(texts[0]) == LARGE
    scratch = tmp_path / "scratch"
    assert not list(scratch.iterdir())


def test_an_interrupt_ends_the_job_within_a_second(tiny, tmp_path, policy):  # noqa: F811
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"max_tokens": CONTEXT - 4, "ignore_eos": True}
    lines = [{"prompt": [5, 6, index % 200 + 7], "custom_id": str(index), **body} for index in range(500)]
    source.write_text("\n".join(json.dumps(line) for line in lines))
    job = start(*arguments(tiny, source, out, policy))
    while not (out.exists() and out.stat().st_size):
        assert job.poll() is None, job.communicate()
        time.sleep(0.02)
    began, used, reaped = time.monotonic(), psutil.Process(job.pid).cpu_times(), os.times()
    job.send_signal(signal.SIGINT)
    _, err = job.communicate()
    seconds, after = time.monotonic() - began, os.times()
    assert job.returncode == 130, err
    assert "run the same command with --resume to go on" in err
    whole = after.children_user + after.children_system - reaped.children_user - reaped.children_system
    assert whole - used.user - used.system < 1.0  # of the processor: the machine may have other work
    assert seconds < 20
    kept = answers(out)
    assert 0 < len(kept) < len(lines)
    assert os.path.getsize(out) == sum(len(line) for line in out.read_bytes().splitlines(keepends=True))
