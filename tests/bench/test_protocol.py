"""The protocol on tiny models, its block, and what is said of the drive."""

import importlib.util
import json
import sys

import numpy as np
import protocol
import pytest
from drive import answers, kind_of_drive, modes_of
from dummy_gguf import config_of, make
from memory_group import GroupError, MemoryGroup
from scripts import REPOSITORY

from flashllm.generate.tokenizer import Tokenizer

TINY = {"hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 2, "num_experts": 12, "vocab_size": 100}


@pytest.fixture
def run(capsys, monkeypatch):
    monkeypatch.setattr(protocol, "PROMPTS", (12, 20))
    monkeypatch.setattr(protocol, "TOKENS", 6)
    monkeypatch.setattr(protocol, "_SCRATCH_NBYTES", 4 << 20)

    def call(*argv):
        status = protocol.main([*map(str, argv), "--threads", "1", "--no-profile"])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def groups_can_be_made():
    try:
        MemoryGroup(64 << 20).close()
    except GroupError:
        return False
    return True


def test_a_report_has_every_run_the_machine_and_the_drive(run, tiny, tmp_path):
    status, out, err = run(tiny().path(), "--memory", "300MB", "--json", tmp_path / "out.json")
    assert status == 0, err
    document = json.loads(out.splitlines()[-1])
    assert json.loads((tmp_path / "out.json").read_text()) == document
    assert document["enforced"] == groups_can_be_made()
    assert [(one["engine"], one["prompt"]) for one in document["runs"]] == [("flashllm", 12), ("flashllm", 20)]
    for one in document["runs"]:
        assert [each["name"] for each in one["runs"]] == ["cold", "warm"]
        for each in one["runs"]:
            assert len(each["token_ms_each"]) == 6
            assert sum(each["mean_ms"][part] for part in ("io", "memory", "compute", "other")) == pytest.approx(
                each["mean_ms"]["total"], rel=0.02
            )
        assert one["peak_bytes"] > 0
    kept = sum(not one["page_cache_dropped"] for one in document["runs"])
    assert out.count("| cold, page cache kept |") == kept
    drive = document["drive"]
    assert drive["span_nbytes"] == 4 << 20
    assert drive["bps"] > 0
    assert f"| drive | {drive['kind']}, " in out
    assert sum(line.startswith("| flashllm | ") for line in out.splitlines()) == 4
    assert "memory limit | 300 MB, " + ("enforced" if document["enforced"] else "NOT enforced") in out


def test_the_peer_needs_its_package_and_a_gguf_file(run, tiny, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install" in run(tiny().path(), "--beside", "llama.cpp")[2]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert "must be a GGUF file" in run(tiny().path(), "--beside", "llama.cpp")[2]


@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed")
def test_both_engines_run_the_same_file(run, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    file = tmp_path / "m.gguf"
    make(file, config_of("olmoe-1b-7b", 2, num_key_value_heads=1, **TINY), "bf16")
    status, out, err = run(file, "--beside", "llama.cpp")
    assert status == 0, err
    runs = json.loads(out.splitlines()[-1])["runs"]
    order = [("flashllm", 12), ("llama.cpp", 12), ("llama.cpp", 20), ("flashllm", 20)]
    assert [(one["engine"], one["prompt"]) for one in runs] == order
    assert all(len(each["token_ms_each"]) == 6 for one in runs for each in one["runs"])


def test_a_cold_run_with_pages_in_the_page_cache_says_so(run, tiny, monkeypatch):
    def refuse():
        raise GroupError("not allowed")

    monkeypatch.setattr(protocol, "drop_page_cache", refuse)
    status, out, err = run(tiny().path())
    assert status == 0, err
    assert [one["page_cache_dropped"] for one in json.loads(out.splitlines()[-1])["runs"]] == [False, False]
    assert out.count("| cold, page cache kept |") == 2
    assert out.count("| warm |") == 2


def test_a_peer_that_ends_with_words_of_its_own_is_a_row(monkeypatch, tmp_path):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho '[1] 0x00 in abort ()'\nexit 134\n")
    script.chmod(0o755)
    monkeypatch.setattr(protocol, "ENGINE", (str(script),))
    assert protocol.Limit(None).run({"engine": "llama.cpp"})["error"] == "ended with status 134"


def test_what_the_context_is_too_short_for_is_left_out(run, tiny, monkeypatch):
    monkeypatch.setattr(protocol, "PROMPTS", (100_000,))
    status, _, err = run(tiny().path())
    assert status == 2
    assert "a prompt of 100000 tokens is left out" in err
    assert "too short for the protocol" in err


def test_text_begins_again_and_without_a_tokenizer_there_are_ids(tiny, tmp_path):
    ids = protocol.text_ids(tiny().path(), 100, 50_000)
    assert len(ids) == 50_000
    whole = Tokenizer.load(tiny().path()).encode((REPOSITORY / "LICENSE").read_text(encoding="utf-8"))
    assert ids[: 2 * len(whole)] == 2 * whole
    (tmp_path / "config.json").write_text("{}")
    assert protocol.text_ids(tmp_path, 5, 7) == [0, 1, 2, 3, 4, 0, 1]


def test_another_drive_takes_the_longer_of_requests_and_bytes():
    mean = {"total": 100.0, "io": 40.0, "compute": 50.0}
    run = {"runs": [{"mean_ms": mean, "bytes_read": 53e6, "requests": 900}], "mode": "sparse"}
    assert protocol.elsewhere(run)[0] == {"drive": "SATA SSD", "token_ms": pytest.approx(160)}
    run["runs"][0]["requests"] = 18_000
    assert protocol.elsewhere(run)[0]["token_ms"] == pytest.approx(260)
    assert protocol.elsewhere({**run, "mode": "dense"})[0]["token_ms"] == pytest.approx(210)


def test_two_modes_are_told_from_one():
    random = np.random.default_rng(0)
    one = random.lognormal(np.log(1e-4), 0.3, 1500)
    assert len(modes_of(one)) == 1
    slow = random.lognormal(np.log(1e-3), 0.3, 300)
    (most, fast), (few, slower) = modes_of(np.concatenate([one, slow]))
    assert (most, few) == (pytest.approx(0.83, abs=0.02), pytest.approx(0.17, abs=0.02))
    assert (fast, slower) == (pytest.approx(1e-4, rel=0.1), pytest.approx(1e-3, rel=0.1))
    assert len(modes_of(np.full(4, 1e-4))) == 1


def test_a_drive_answers(tmp_path):
    from flashllm.profile.costs import ReaderChoice

    file = tmp_path / "file"
    file.write_bytes(np.random.default_rng(0).bytes(1 << 20))
    choice = ReaderChoice(backend="threads", depth=4, max_gap=0, source="argument")
    found = answers(file, choice, request_nbytes=10_000, singles=50)
    assert (found.span_nbytes, found.request_nbytes) == (1 << 20, 12_288)
    assert found.median_s <= found.p99_s
    assert kind_of_drive(tmp_path)
    if sys.platform == "linux":
        assert kind_of_drive(tmp_path / "..")
