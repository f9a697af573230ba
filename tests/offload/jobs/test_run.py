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
from arch_models import VARIANTS, make_checkpoint
from asked import CONTEXT, LENGTHS, POLICY, PROMPTS
from gguf_files import write_gguf
from scripts import REPOSITORY
from workers.job import main

from flashllm.offload import launch
from flashllm.offload.planner.packing import PACKING

JOB = REPOSITORY / "bench/offload/workers/job.py"
LARGE = 600  # requests of a job that takes seconds, and so outlasts the kills


def batch_file(path, count=8):
    lines = []
    for index in range(count):
        body = {"prompt": PROMPTS[index % len(PROMPTS)], "max_tokens": LENGTHS[index % len(PROMPTS)], "temperature": 0}
        line = {"custom_id": f"r{index}", "method": "POST", "url": "/v1/completions", "body": body}
        lines.append(json.dumps(line))
    path.write_text("\n".join(lines))
    return path


def arguments(model, source, out, *more):
    fields = {"policy": POLICY, "scratch": str(out.parent / "scratch")}
    return [json.dumps(fields), str(model), "-i", str(source), "-o", str(out), *more]


def answers(out):
    result = {}
    for line in out.read_text().splitlines():
        value = json.loads(line)
        assert value["custom_id"] not in result
        result[value["custom_id"]] = value
    return result


def test_a_batch_file_is_answered(tiny, tmp_path, expected, capsys):
    source, out = batch_file(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    assert main(arguments(tiny, source, out, "--json")) == 0
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
    assert main(arguments(tiny, source, out)) == 2
    assert "exists; continue it with --resume" in capsys.readouterr().err
    assert main(arguments(tiny, source, out, "--resume")) == 0
    captured = capsys.readouterr()
    assert f"all {len(PROMPTS)} lines are answered" in captured.out
    assert answers(out) == got
    assert main(arguments(tiny, source, out, "--resume", "--compress", "cache")) == 1
    assert "was asked otherwise" in capsys.readouterr().err


def test_a_conversion_shows_its_progress(tmp_path, capsys):
    file = write_gguf(make_checkpoint(tmp_path / "hf", VARIANTS["llama"]), tmp_path / "tiny.gguf")
    source, out = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text("once")
    assert main(arguments(file, source, out, "--max-new-tokens", "1")) == 0
    said = capsys.readouterr().err
    assert said.startswith(f"flashllm: converting {file} once")
    assert "\nconvert: " in said


@pytest.mark.parametrize("more", [(), ("--no-profile",)])
def test_the_drive_may_be_left_unmeasured(tiny, tmp_path, monkeypatch, more):
    asked, prepare = [], launch.prepare

    def asked_to_prepare(*given, **named):
        asked.append(named["profiles"])
        return prepare(*given, **named)

    monkeypatch.setattr(launch, "prepare", asked_to_prepare)
    assert main(arguments(tiny, batch_file(tmp_path / "in.jsonl", 1), tmp_path / "out.jsonl", *more)) == 0
    assert asked == [not more]


def test_packed_by_other_rules_a_job_is_not_resumed(tiny, tmp_path, capsys, monkeypatch):
    """Answers of packed weights depend on how they are packed; those of plain ones do not."""
    source = batch_file(tmp_path / "in.jsonl", 2)
    for packed, status in ((["--compress", "weights"], 1), ([], 0)):
        out = tmp_path / f"{len(packed)}.jsonl"
        assert main(arguments(tiny, source, out, *packed)) == 0
        with monkeypatch.context() as patch:
            patch.setattr("flashllm.offload.launch.PACKING", PACKING - 1)
            capsys.readouterr()
            assert main(arguments(tiny, source, out, *packed, "--resume")) == status
        assert ("was asked otherwise" in capsys.readouterr().err) == bool(packed)


def test_the_table(tiny, tmp_path, capsys):
    source = tmp_path / "in.txt"
    source.write_text("\n".join(PROMPTS))
    assert main(arguments(tiny, source, tmp_path / "out.jsonl", "--max-new-tokens", "4")) == 0
    out = capsys.readouterr().out
    for word in ("prefill", "decoding", "throughput", "busy", "disk", "memory", "measured", "predicted", "tiers"):
        assert word in out


def test_malformed_lines_write_nothing(tiny, tmp_path, capsys):
    source, out = batch_file(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    good, long = source.read_text(), json.dumps({"prompt": [3] * CONTEXT})
    source.write_text(f'{good}\n{{"prompt": "a", "stream": true}}\n{long}')
    assert main(arguments(tiny, source, out)) == 1
    assert f"line {len(PROMPTS) + 1}: stream: True is not supported" in capsys.readouterr().err
    assert not out.exists()
    source.write_text(f"{good}\n{long}")  # which the model cannot answer, and so fails alone
    assert main(arguments(tiny, source, out)) == 0
    assert "1 of them errors" in capsys.readouterr().out
    assert len(answers(out)) == len(PROMPTS) + 1


def test_a_job_that_cannot_start_leaves_no_file(tiny, tmp_path, capsys):
    source, out = batch_file(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    assert main(arguments(tiny, source, out, "--memory", "1MB")) == 1
    assert "nothing is left for the model; give it more than" in capsys.readouterr().err
    assert not out.exists()
    assert main(arguments(tiny, source, source, "--resume")) == 2
    assert main(arguments(tiny, tmp_path / "none.jsonl", out)) == 1
    assert main(arguments(tmp_path, source, out)) == 2
    assert not out.exists()


def start(*given):
    return subprocess.Popen([sys.executable, JOB, *given], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_killed_at_any_moment_and_resumed(tiny, tmp_path):
    source, whole, out = batch_file(tmp_path / "in.jsonl", LARGE), tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert main(arguments(tiny, source, whole)) == 0
    moments, answered, half = random.Random(5), 0, whole.stat().st_size // 2
    for _ in range(2):
        killed = start(*arguments(tiny, source, out, "--resume"))
        while killed.poll() is None and (out.stat().st_size if out.exists() else 0) <= answered:
            time.sleep(0.005)
        time.sleep(moments.uniform(0, 0.1))
        killed.kill()
        killed.communicate()
        answered = out.stat().st_size
        if answered > half:  # a busy machine wakes this test late
            break
    assert 0 < len(out.read_bytes().splitlines()) < LARGE, "killed too late to show anything"
    last = start(*arguments(tiny, source, out, "--resume"))
    _, err = last.communicate()
    assert last.returncode == 0, err
    texts = [
        {name: value["response"]["body"]["choices"] for name, value in answers(path).items()} for path in (out, whole)
    ]
    assert texts[0] == texts[1]
    assert len(texts[0]) == LARGE
    scratch = tmp_path / "scratch"
    assert not list(scratch.iterdir())


def test_an_interrupt_ends_the_job_within_a_second(tiny, tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"max_tokens": CONTEXT - 4, "ignore_eos": True}
    lines = [{"prompt": [5, 6, index % 200 + 7], "custom_id": str(index), **body} for index in range(500)]
    source.write_text("\n".join(json.dumps(line) for line in lines))
    job = start(*arguments(tiny, source, out))
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
