"""`flashllm plan`: both ends of a conversation, and a process as small as the run it plans."""

import functools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from profiles import profile_of, reader
from scripts import run_python

from flashllm._core import PAGE_TOKENS
from flashllm.format.install import install_files
from flashllm.format.model_files import POPULARITY
from flashllm.format.popularity import encode_popularity
from flashllm.generate.templates.renderer import Renderer
from flashllm.profile.store import device_of, save_profile


@pytest.fixture
def plan_json(document):
    return functools.partial(document, "plan")


@pytest.fixture
def table_of(run):
    """The columns of the plan's table, by what they are of."""

    def call(*arguments):
        status, out, err = run("plan", *arguments)
        assert (status, err) == (0, "")
        return {line[2:30].strip(): line[30:].split() for line in out.splitlines()[1:]}

    return call


def test_the_table_shows_both_ends(tiny, plan_json, table_of):
    path = tiny().path("random")
    document = plan_json(path)
    limit = (document["minimum_bytes"] + 3_000_000) // 10**6
    document = plan_json(path, "--memory", f"{limit}MB")
    assert document["kv_cache_bytes_full"] == 2 * document["kv_cache_bytes"] == 2 * document["page_bytes"]
    assert document["max_pages"] >= 96 / PAGE_TOKENS
    assert all(a >= b for a, b in zip(document["cache_rows"], document["cache_rows_full"], strict=True))
    table = table_of(path, "--memory", f"{limit}MB")
    assert table[""] == ["64", "tokens", "96", "tokens"]
    assert table["limit"][:2] == [str(limit), "MB"]
    assert table_of(path, "--context", "32")[""] == ["32", "tokens", "32", "tokens"]
    assert {"interpreter and libraries", "KV cache", "neuron cache", "total", "limit", "minimum"} <= set(table)


def test_a_limit_that_is_too_small_is_an_error(tiny, run):
    status, out, err = run("plan", tiny().path(), "--memory", "50MB", "--json")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("flashllm: error: ")
    assert "50 MB cannot hold this model" in err


def test_of_a_name_that_is_unknown_it_says_where_names_are(run):
    status, _, err = run("plan", "nosuchmodel")
    assert status == 2
    assert "there is no such directory" in err
    assert err.endswith("`flashllm models` lists more\n")


def test_the_plan_says_by_what_rows_are_shared_out(tiny, tmp_path, plan_json, table_of):
    model = Path(shutil.copytree(tiny().path("random"), tmp_path / "model"))
    assert plan_json(model)["popularity"] is None
    assert "popularity" not in " ".join(table_of(model)["neuron cache"])
    shares = encode_popularity([np.linspace(0, 1, 512, dtype=np.float32)] * 3, tokens=70, measured_on="stories")
    install_files(model, {POPULARITY: shares})
    assert plan_json(model)["popularity"] == {"tokens": "70", "measured_on": "stories"}
    assert " ".join(table_of(model)["neuron cache"]).endswith("neurons, shared out by popularity")
    assert "popularity" not in " ".join(table_of(model, "--mode", "dense")["neuron cache"])


def test_a_model_that_runs_densely_alone_is_planned_so(variant_of, plan_json, table_of, run):
    _, directory = variant_of("llama")
    assert plan_json(directory, "--mode", "dense")["mode"] == "dense"
    table_of(directory, "--mode", "dense")
    assert plan_json(directory)["mode"] == "dense"
    status, _, err = run("plan", directory, "--mode", "sparse")
    assert status == 2
    assert "use --mode dense" in err


def test_a_dense_token_has_an_estimate(variant_of, tmp_path, plan_json, run):
    _, directory = variant_of("llama")
    store = tmp_path / "profiles.json"
    assert plan_json(directory, "--store", store)["token"] is None
    assert "has no profile" in run("plan", directory, "--store", store)[1]
    rates = {"gemv_bps": {"float32": 20e9}, "sparse_bps": {"float32": 16e9}}
    save_profile(store, device_of(directory), profile_of(**rates))
    token = plan_json(directory, "--store", store)["token"]
    assert token["total_s"] == max(token["read_s"], token["products_s"]) > 0
    assert "a token (every neuron)" in run("plan", directory, "--store", store)[1]


def test_a_drive_that_is_slow_at_scattered_reads_is_better_read_in_sequence(
    tiny, tmp_path, plan_json, run, monkeypatch
):
    monkeypatch.setattr("flashllm.base.machine.process_nbytes", lambda: 100_000_000)  # it would grow between the calls
    path, store = tiny("float16").path("random"), tmp_path / "profiles.json"
    times = {}
    for name, read_s in (("slow", 1e-2), ("fast", 1e-9)):
        slow = {"latency_s": read_s, "request_s": (read_s, read_s), "beside_s": (read_s, read_s)}
        save_profile(store, device_of(path), profile_of(reader(**slow), sequential_bps=1e8, layer_overhead_s=1e-6))
        limit = f"{plan_json(path, '--store', store)['minimum_bytes'] // 1000 + 100}kB"
        common = (path, "--store", store, "--memory", limit)
        times[name] = plan_json(*common)["token"]
        assert ("--mode dense" in run("plan", *common)[1]) == (name == "slow")
    assert times["slow"]["dense_total_s"] < 0.85 * times["slow"]["total_s"]
    assert times["fast"]["dense_total_s"] > times["fast"]["total_s"]


def test_it_loads_what_a_run_loads_and_no_more(tiny):
    code = (
        "import sys; from flashllm.cli import main; status = main(['plan', sys.argv[1], '--json']); "
        "print([status, *(name in sys.modules for name in ('tokenizers', 'jinja2', 'torch', 'transformers'))])"
    )
    document, loaded = run_python("-c", code, tiny().path("random")).stdout.splitlines()
    assert loaded == "[0, True, False, False, False]"
    assert json.loads(document)["process_bytes"] < 200_000_000


def test_the_process_of_a_chats_template_counts(tiny, tmp_path, plan_json, monkeypatch):
    monkeypatch.setattr("flashllm.base.machine.process_nbytes", lambda: 100_000_000)
    model = Path(shutil.copytree(tiny().path(), tmp_path / "model"))
    before = plan_json(model)["process_bytes"]
    install_files(model, {"chat_template.jinja": [b"{{ messages }}"]})
    assert plan_json(model)["process_bytes"] == before + Renderer.beside_nbytes
