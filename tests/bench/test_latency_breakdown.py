"""The latency breakdown and its relatives, on a tiny synthetic model."""

import json
import subprocess

import breakdown_worker
import latency_breakdown
import memory_group
import pytest
from engine_runs import Workers
from scripts import document_of, run_script

from flashllm.format.manifest import open_model_dir
from flashllm.format.model_files import FFN, RESIDENT

PARTS = ("io_ms", "memory_ms", "compute_ms", "other_ms")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    out = tmp_path_factory.mktemp("synthetic") / "model"
    small = ["--shape", "opt-125m", "--layers", 2, "--hidden", 192, "--vocab", 8192, "--tokens", 40]
    run_script("tools/make_synthetic_model.py", out, *small)
    return out


@pytest.fixture
def in_process(monkeypatch):
    """Workers of engines and roofs compute here; processes of their own the other tests have."""

    def run(command, **_):
        settings = json.loads(command[-1])
        done = breakdown_worker.TASKS[settings["task"]](settings)
        return subprocess.CompletedProcess(command, 0, stdout=json.dumps(done) + "\n")

    monkeypatch.setattr(breakdown_worker, "ROOF_NBYTES", 16 << 20)
    monkeypatch.setattr(memory_group.subprocess, "run", run)


def test_the_breakdown_says_what_it_promises(model, tmp_path):
    quick = ["--tokens", 14, "--prompt", 12, "--rounds", 1, "--roof-seconds", 0.05, "--io-threads", 4]
    out, chart = tmp_path / "out.json", tmp_path / "chart.png"
    done = run_script("bench/engine/latency_breakdown.py", "--model", model, *quick, "--json", out, "--plot", chart)
    result = document_of(done)
    assert set(result) == {"conditions", "roof", "engines", "ratios"}
    assert list(result["engines"]) == ["naive", "hybrid", "paper", "flashllm"]
    assert "synthetic weights, synthetic trace" in done.stdout
    assert "synthetic weights, synthetic trace" in result["conditions"]["activity"]
    full = json.loads(out.read_text())
    for engine, runs in full["runs"].items():
        for token in runs[0]["tokens"]:
            assert sum(token[part] for part in PARTS) == pytest.approx(token["total_ms"], rel=1e-3), engine
            assert 0 <= token["io_busy_ms"] <= token["total_ms"] * 1.001, engine
    assert full["runs"]["flashllm"][0]["shape"]["firing"] == pytest.approx(1 / 3)
    engines, weights = result["engines"], result["conditions"]["weights"]
    assert "synthetic" in weights
    model_nbytes = sum((model / name).stat().st_size for name in ("ffn.safetensors", "resident.safetensors"))
    assert engines["naive"]["bytes_read"] == pytest.approx(model_nbytes, rel=0.01)
    assert engines["hybrid"]["bytes_read"] < 0.8 * model_nbytes
    assert engines["flashllm"]["active"] == engines["paper"]["active"] > 0
    assert 0 < engines["paper"]["window_held"] <= 5
    assert engines["flashllm"]["window_held"] == 0
    ratio = engines["naive"]["total_ms"] / engines["flashllm"]["total_ms"]
    assert result["ratios"]["naive_over_flashllm"] == pytest.approx(ratio)
    read = engines["flashllm"]["bytes_read"]
    assert (result["roof"]["io_ms"] > 0) is (read > 0)  # everything may be in memory
    assert result["roof"]["compute_ms"] > 0
    assert chart.stat().st_size > 1000


def test_the_breakdown_refuses_what_it_cannot_mean(model):
    for wrong in (["--engines", "fast"], ["--cgroup"], ["--tokens", 10], ["--engines", "paper24"], ["--simd", "sse"]):
        done = run_script("bench/engine/latency_breakdown.py", "--model", model, *wrong, status=2)
        assert "error:" in done.stderr


def test_every_engine_computes_with_the_instructions_asked_for(model, monkeypatch):
    run = latency_breakdown.Run(latency_breakdown.parse(["--simd", "scalar"]), model)
    monkeypatch.setattr(run.workers, "run", lambda settings, **_: settings)
    settings = {name: run._engine(name) for name in (*latency_breakdown.ENGINES, "streamed")}
    assert settings["naive"]["simd"] == settings["hybrid"]["simd"] == "scalar"
    assert settings["paper"]["options"] == {**latency_breakdown.PAPER["options"], "simd": "scalar"}
    assert settings["flashllm"]["options"] == {"simd": "scalar"}
    assert settings["streamed"]["options"] == {"simd": "scalar", "mode": "dense"}


def test_parts_are_left_out_of_the_ablation(tmp_path):
    """Each row reads as its parts say; none changes a token."""
    wide = ["--shape", "opt-125m", "--layers", 2, "--hidden", 1032, "--dtype", "float32", "--vocab", 4096]
    run_script("tools/make_synthetic_model.py", tmp_path / "model", *wide, "--tokens", 40)
    common = {"task": "flash", "memory": None, "tokens": 6, "prompt_tokens": 12, "context": 20, "io_threads": 4}
    common |= {"options": {"cache_policy": "window", "window": 1}}
    workers = Workers(tmp_path / "model", memory=None)
    rows = [("prefetch",), ("merged", "prefetch"), ("bundled", "merged", "overlap", "prefetch"), ("cached", "prefetch")]
    runs = [workers.run({**common, "without": without}) for without in [*rows, ()]]
    assert {tuple(run["text_ids"]) for run in runs} == {tuple(runs[0]["text_ids"])}
    assert [run["prefetch"] for run in runs] == [False] * 4 + [True]
    requests, hits, nbytes = (
        [sum(token[what] for token in run["tokens"]) for run in runs[:4]] for what in ("requests", "hits", "bytes_read")
    )
    assert requests[0] < requests[1] < requests[2]
    assert hits[0] == hits[1] == hits[2] > hits[3] == 0
    assert nbytes[3] > nbytes[1]


@pytest.mark.usefixtures("in_process")
def test_the_first_token_is_held_against_its_roof(model):
    quick = ["--prompt", 24, "--rounds", 1, "--roof-seconds", 0.05]
    result = document_of(run_script("bench/engine/first_token.py", "--model", model, *quick))
    (one,) = result["rounds"]
    assert sum(one[part] for part in PARTS) == pytest.approx(one["total_ms"], rel=1e-3)
    assert one["bytes_read"] == pytest.approx((model / "ffn.safetensors").stat().st_size, rel=0.01)
    assert one["roof_io_ms"] == pytest.approx(one["bytes_read"] / one["sequential_gbps"] / 1e6)
    assert one["ratio"] == pytest.approx(one["total_ms"] / max(one["roof_io_ms"], one["products_ms"]))


@pytest.mark.usefixtures("in_process")
def test_a_long_generation_is_compared_with_itself(model):
    done = run_script("bench/engine/long_generation.py", "--model", model, "--tokens", 200, "--prompt", 12)
    result = document_of(done)
    for sampling in ("greedy", "nucleus"):
        one = result["samplings"][sampling]
        assert one["tokens"] == 200
        assert len(one["hundreds_ms"]) == 2
        assert one["late_ms"] == one["hundreds_ms"][1] == one["early_ms"]  # of 200 tokens both are the second hundred
        assert one["late_over_early"] == pytest.approx(one["late_ms"] / one["early_ms"])


def test_the_memory_curve_caches_more_where_there_is_more(model):
    model_nbytes = sum((model / name).stat().st_size for name in ("ffn.safetensors", "resident.safetensors"))
    shares = ",".join(str(limit / model_nbytes) for limit in (700e6, 2e9))  # the libraries alone hold 0.4 GB
    done = run_script(
        "bench/engine/memory_curve.py", "--model", model, "--shares", shares, "--tokens", 14, "--prompt", 12
    )
    rows = document_of(done)["rows"]
    assert [row["memory"] for row in rows] == [pytest.approx(700e6, rel=0.01), pytest.approx(2e9, rel=0.01)]
    assert rows[0]["cached_share"] <= rows[1]["cached_share"] == 1.0


def test_several_models_share_a_memory_curve(model):
    arguments = ["--model", model, "--model", model, "--limits", "1MB,700MB", "--plan", "--tokens", 12, "--prompt", 12]
    rows = document_of(run_script("bench/engine/memory_curve.py", *arguments))["rows"]
    assert [row["memory"] for row in rows] == [700_000_000]  # 1 MB cannot hold it; the same model counts once
    assert rows[0]["encoding"] == open_model_dir(model).rows.encoding


def test_an_engines_files_are_read_before_it_runs(tmp_path, monkeypatch):
    asked = []

    def run(command, **options):
        asked.append(json.loads(command[-1]))
        return subprocess.CompletedProcess(command, 0, stdout="{}\n")

    monkeypatch.setattr(memory_group.subprocess, "run", run)
    workers = Workers(tmp_path, memory=None, read_first=True)
    workers.roof(0.1)
    workers.run({"task": "flash"})
    workers.run({"task": "dense"})
    assert [settings["task"] for settings in asked] == ["roof", "read_through", "flash", "read_through", "dense"]
    files = [settings["files"] for settings in asked if settings["task"] == "read_through"]
    assert files == [[RESIDENT, FFN]] * 2
    asked.clear()
    Workers(tmp_path, memory=None).run({"task": "flash"})
    assert [settings["task"] for settings in asked] == ["flash"]
