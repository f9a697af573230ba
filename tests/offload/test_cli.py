"""`flashllm offload plan`: one JSON document, exit statuses, and a parser that loads nothing heavy."""

import json
from functools import partial
from pathlib import Path

import pytest
from offload_host import HOST, policy_of
from scripts import run_python

from flashllm.cli import main
from flashllm.convert.outline import find_well_known
from flashllm.offload.machine.machines import T4
from flashllm.offload.planner import local
from flashllm.offload.planner import search as planner

PLAN = ["plan", "opt-1.3b", "--prompt-len", "64", "--gen-len", "8", "--hardware", "t4"]


@pytest.fixture(autouse=True)
def _few_policies(monkeypatch):
    """The search, which has tests of its own, looks at a few block sizes: a second less a plan."""
    few = partial(planner.SearchSpace, gpu_batches=(1, 4, 16), num_batches=(1, 4))
    monkeypatch.setattr(planner, "SearchSpace", few)


def run(capsys, *more, argv=PLAN):
    status = main(["offload", *argv, *more])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_json_is_one_document(capsys):
    status, out, err = run(capsys, "--json")
    assert (status, err) == (0, "")
    document = json.loads(out)
    assert document["policy"]["wg"] + document["policy"]["wc"] + document["policy"]["wd"] == pytest.approx(1)
    predicted = document["predicted"]
    for key in ("prefill_s", "decode_s", "throughput", "peak_device", "peak_cpu", "peak_disk", "binding"):
        assert key in predicted


def test_text_says_what_binds_and_whose_figures_they_are(capsys):
    status, out, err = run(capsys)
    assert (status, err) == (0, "")
    for word in ("policy", "binding", "peak", "tokens/s", T4.source):
        assert word in out


def test_a_given_policy_is_priced(capsys, tmp_path):
    path = tmp_path / "p.json"
    policy = json.loads(run(capsys, "--json")[1])["policy"]
    path.write_text(json.dumps(policy | {"num_batches": 1, "gpu_batch": 2}))
    status, out, _ = run(capsys, "--json", "--policy", str(path))
    document = json.loads(out)
    assert status == 0
    assert document["policy"]["gpu_batch"] == 2
    assert "search" not in document


def test_a_policy_that_does_not_fit_fails_but_is_priced(capsys, tmp_path):
    path = tmp_path / "p.json"
    path.write_text(json.dumps(policy_of("device", num_batches=1).to_json()))
    argv = ["plan", "opt-175b", *PLAN[2:]]
    status, out, err = run(capsys, "--json", "--policy", str(path), argv=argv)
    assert status == 1
    assert "device memory is short by" in err
    assert json.loads(out)["predicted"]["over"]["device"] > 300e9


def test_the_limit_of_memory_is_the_cpus_or_the_only_ones(capsys, tmp_path):
    path = tmp_path / "small.json"
    path.write_text(json.dumps(T4.limited(device_memory=3 * 10**9, disk_capacity=0).to_json()))
    document = json.loads(run(capsys, "--json", "--memory", "8GB", "--hardware", str(path))[1])
    assert (document["hardware"]["device_memory"], document["hardware"]["cpu_memory"]) == (3 * 10**9, 8 * 10**9)
    assert document["predicted"]["peak_device"] <= 3e9
    path.write_text(json.dumps(HOST.to_json()))
    document = json.loads(run(capsys, "--json", "--memory", "5GB", "--hardware", str(path))[1])
    assert (document["hardware"]["device_memory"], document["hardware"]["cpu_memory"]) == (5 * 10**9, HOST.cpu_memory)


def test_compression_reaches_the_search(capsys):
    for given, expected in (
        ("weights,cache", (True, True)),
        ("weights", (True, False)),
        ("cache", (False, True)),
        ("none", (False, False)),
    ):
        policy = json.loads(run(capsys, "--json", "--compress", given)[1])["policy"]
        assert (policy["compress_weights"], policy["compress_cache"]) == expected


def test_compression_reaches_a_given_policy(capsys, tmp_path):
    path = tmp_path / "p.json"
    path.write_text(json.dumps(policy_of(compress_cache=True).to_json()))
    for given, expected in (([], (False, True)), (["--compress", "weights"], (True, False))):
        policy = json.loads(run(capsys, "--json", "--policy", str(path), *given)[1])["policy"]
        assert (policy["compress_weights"], policy["compress_cache"]) == expected


@pytest.mark.parametrize(
    ("more", "status", "said"),
    [
        (["--memory", "3 apples"], 2, "apples"),
        (["--latency", "5"], 2, "unrecognized arguments: --latency"),
        (["--prompt-len", "0"], 2, "argument --prompt-len: must be at least 1"),
        (["--hardware", "h100"], 2, "h100"),
        (["--compress", "all"], 2, "--compress must be of weights, cache, not 'all'"),
        (["--compress", "all", "--policy", "absent.json"], 2, "--compress must be of weights, cache, not 'all'"),
        (["--policy", "absent.json"], 1, "absent.json"),
    ],
)
def test_errors_have_their_status(capsys, more, status, said):
    got, out, err = run(capsys, "--json", *more)
    assert (got, out) == (status, "")
    assert said in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "option", ["--policy=p", "--scratch=s", "--threads=1", "--temperature=1", "--skip-bad", "--seed=1"]
)
def test_what_a_job_needs_is_asked_and_no_more(capsys, option):
    status, out, err = run(capsys, option, argv=["run", "model", "-i", "in.jsonl", "-o", "out.jsonl"])
    assert (status, out) == (2, "")
    assert f"unrecognized arguments: {option}" in err


def test_unknown_model_is_wrong_use(capsys):
    status, _, err = run(capsys, argv=["plan", "opt-9b", "--prompt-len", "1", "--gen-len", "1"])
    assert status == 2
    assert "opt-9b" in err


def test_parser_loads_nothing_heavy():
    code = (
        "import sys; from flashllm.cli import make_parser; make_parser('offload');"
        "print([m for m in ('torch', 'numpy', 'scipy', 'psutil') if m in sys.modules])"
    )
    assert run_python("-c", code).stdout.strip() == "[]"


def test_what_a_gpu_does_not_run_is_said(capsys):
    for model, said in (("qwen3.6-35b-a3b", "mixtures of experts"), ("qwen3.5-4b", "layers that keep a state")):
        status, _, err = run(capsys, argv=["plan", model, *PLAN[2:]])
        assert status == 0
        assert f"computes {said} on the CPU alone" in err


def test_this_machine_is_the_default_known_by_its_profile_or_typical(capsys, monkeypatch):
    argv = PLAN[:-2]
    monkeypatch.setattr(local, "this_machine", lambda folder, dtype, device: None)
    assert "on this machine (typical figures: this machine has no profile" in run(capsys, argv=argv)[1]
    small = run(capsys, "--json", "--memory", "2GB", argv=argv)[1]
    assert json.loads(small)["predicted"]["peak_device"] <= 2e9
    monkeypatch.setattr(local, "this_machine", lambda folder, dtype, device: HOST)
    assert f"on {HOST.name} ({HOST.source})" in run(capsys, argv=argv)[1]


def test_the_drive_is_the_models(capsys, monkeypatch, tmp_path):
    """Also of a model that is a file."""
    path, seen = tmp_path / "config.json", []
    path.write_text(json.dumps(find_well_known("opt-1.3b").config))
    monkeypatch.setattr(local, "this_machine", lambda folder, dtype, device: seen.append(folder) or HOST)
    for model in (path, tmp_path, "opt-1.3b"):
        assert run(capsys, argv=["plan", str(model), *PLAN[2:-2]])[0] == 0
    assert seen == [path, tmp_path, Path()]
