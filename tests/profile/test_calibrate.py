"""Calibration on a tiny file: every figure is there, nothing is left behind, and a run uses what was stored."""

import dataclasses
import json
import shutil
import sys
from datetime import UTC, datetime

import plan_accuracy
import pytest
from profiles import BATCHES, TINY, profile_of, reader
from scripts import run_script

from flashllm import _core
from flashllm.base.checks import from_json, to_json
from flashllm.base.machine import system_name
from flashllm.cli import main
from flashllm.errors import FlashIOError
from flashllm.format.model_files import FFN
from flashllm.format.rows import MEASURED_ENCODINGS
from flashllm.profile.calibrate import measure
from flashllm.profile.choice import backends
from flashllm.profile.costs import BatchSample
from flashllm.profile.machine import Profile
from flashllm.profile.products import ResidentProducts
from flashllm.profile.reads import ReadOptions, ReadTimer, file_to_read
from flashllm.profile.store import device_of, load_profile, save_profile


@pytest.fixture
def room(monkeypatch):
    """A drive with enough space left, whatever this one has."""
    monkeypatch.setattr("flashllm.profile.reads._DISK_MARGIN", 0)
    monkeypatch.setattr("flashllm.commands.calibrate._SCRATCH_NBYTES", 1 << 20)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A file of 1 MiB to read."""
    path = tmp_path_factory.mktemp("drive") / "file"
    path.write_bytes(bytes(1 << 20))
    return path


def test_every_figure_is_measured(tmp_path, file, room):
    steps = []
    costs = measure(
        file,
        threads=1,
        encodings=MEASURED_ENCODINGS,
        options=TINY,
        layer_overhead=lambda: 1e-4,
        writes_in=tmp_path,
        batches=lambda: {"float16": BATCHES},
        progress=lambda *step: steps.append(step),
    )
    assert [(reader.backend, reader.depth) for reader in costs.readers] == backends()
    assert all(reader.sizes == (4096, 8192) for reader in costs.readers)
    assert min(costs.sequential_bps, costs.dram_bps, costs.again) > 0
    assert costs.blocks_wps not in (0, profile_of().blocks_wps)  # the typical one, where none was measured
    assert costs.layer_overhead_s == 1e-4
    assert set(costs.gemv_bps) == set(costs.sparse_bps) == set(MEASURED_ENCODINGS)
    assert costs.writes is None or min(rate for _, rate in costs.writes.knots) > 0  # None without direct I/O
    assert (costs.batches, costs.gpu) == ({"float16": BATCHES}, None)
    assert costs.is_fresh(system_name(), 1 << 20)
    assert not costs.is_fresh(system_name(), 2 << 20)
    assert from_json(Profile, json.loads(json.dumps(to_json(costs))), "the entry") == costs
    assert [done for _, done, _ in steps] == sorted(done for _, done, _ in steps)
    assert steps[-1][1] == steps[-1][2]
    assert list(tmp_path.iterdir()) == []


def test_what_is_fresh_is_not_measured_again(file):
    stale = profile_of(made="2020-01-01T00:00:00", gemv_bps={"float16": 1.0}, sparse_bps={"float16": 1.0})
    found = [
        measure(file, threads=1, encodings=("float16",), options=TINY, known=known)
        for known in (
            dataclasses.replace(stale, system=system_name(), made=datetime.now(UTC).isoformat()),
            dataclasses.replace(stale, system=system_name(), batches={"float32": BATCHES}),
            dataclasses.replace(stale, batches={"float32": BATCHES}),  # of another processor
        )
    ]
    assert [one.readers == stale.readers for one in found] == [True, False, False]
    assert [one.gemv_bps["float16"] == 1.0 for one in found] == [True, False, False]
    assert [set(one.batches) for one in found] == [set(), {"float32"}, set()]


def test_a_slow_drive_is_measured_at_one_size(file):
    """No round is waited for that would take minutes."""
    options = dataclasses.replace(TINY, read_s=-1.0)
    profile = measure(file, threads=1, encodings=(), options=options)
    assert {reader.sizes for reader in profile.readers} == {(4096,)}
    assert profile.sequential_bps > 0


def test_places_read_again_are_held_against_their_first_reading(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    products = ResidentProducts("bfloat16", 1 << 16, _core.ThreadPool(1))
    timer, seen = ReadTimer(tmp_path / "file", TINY.reads, products), set()

    def timed(reader, offsets, size):
        first = tuple(offsets) not in seen
        seen.add(tuple(offsets))
        return BatchSample(requests=len(offsets), nbytes=size, wall_s=3e-3 if first else 1e-3)

    monkeypatch.setattr(timer, "_timed", timed)
    assert timer.again() == pytest.approx(3)


def test_the_scratch_file_goes_whatever_happens(tmp_path, room):
    def interrupted():
        with file_to_read(tmp_path, 1 << 16) as path:
            assert path.stat().st_size == 1 << 16
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_goes_and_what_one_reads_stays(tmp_path, room):
    left = tmp_path / ".flashllm-calibrate-1"
    with file_to_read(tmp_path, 1 << 16) as path:
        left.write_bytes(b"left")
        read = path.rename(tmp_path / ".flashllm-calibrate-2")  # as if by another process
        with file_to_read(tmp_path, 1 << 16) as other:
            assert sorted(tmp_path.iterdir()) == sorted([read, other])


def test_a_full_drive_is_told_before_anything_is_written(tmp_path):
    with pytest.raises(FlashIOError, match="are free"), file_to_read(tmp_path, 1 << 60):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_models_own_file_is_read_where_it_is_large_enough(tmp_path, tiny, room, monkeypatch):
    model = tiny().path()
    with file_to_read(model, 1 << 16) as path:
        assert path.name != FFN
    monkeypatch.setattr("flashllm.profile.reads.LEAST_FILE", 1)
    with file_to_read(model, 1 << 16) as path:
        assert path == model / FFN


@pytest.mark.parametrize("changes", [{"sizes": ()}, {"requests": (4, 2)}, {"gaps": (0, 4096)}])
def test_wrong_options_are_refused(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        ReadOptions(**changes)


def test_the_command_stores_and_runs_and_plans_use_it(tmp_path, tiny, room, monkeypatch, capsys):
    monkeypatch.setattr("flashllm.profile.calibrate.CalibrationOptions", lambda **given: TINY)
    monkeypatch.setattr(
        "flashllm.offload.machine.measure.measure_batches", lambda *given, **named: {"float16": BATCHES}
    )
    monkeypatch.setattr("flashllm.commands.calibrate._DEMO_TOKENS", 3)
    store, model = tmp_path / "profiles.json", shutil.copytree(tiny().path("random"), tmp_path / "model")
    common = [str(model), "--store", str(store), "--json"]
    plan = ["plan", *common, "--memory", "6GB"]
    generate = ["generate", *common, "--prompt", "The fox ran", "--max-new-tokens", "4", "--threads", "1"]

    assert main(plan) == 0
    assert json.loads(capsys.readouterr().out)["token"] is None
    assert main(["plan", str(model), "--store", str(store), "--memory", "6GB"]) == 0
    assert f"run `flashllm calibrate {model}`" in capsys.readouterr().out
    assert main(generate) == 0
    before = json.loads(capsys.readouterr().out)
    assert before["reader"] == {"backend": "threads", "depth": 32, "max_gap": 0, "source": "default"}

    assert main(["calibrate", str(model), "--store", str(store)]) == 0
    assert "stored in" in capsys.readouterr().out
    costs = load_profile(store, device_of(model))
    monkeypatch.setattr("flashllm.convert.named._DEMO", tmp_path / "none")  # as in a published wheel
    assert main(["calibrate", *common]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["store"] == str(store)
    assert "beside its weights is assumed" in captured.err
    costs = load_profile(store, device_of(model))
    assert 0 < costs.layer_overhead_s < 1

    assert main(plan) == 0
    document = json.loads(capsys.readouterr().out)
    token = document["token"]
    assert token["total_s"] == pytest.approx(token["io_s"] + token["compute_s"] + token["overhead_s"])
    assert main(["plan", str(model), "--store", str(store), "--memory", "6GB"]) == 0
    assert "tokens/s" in capsys.readouterr().out
    assert main(generate) == 0
    after = json.loads(capsys.readouterr().out)
    assert after["reader"]["source"] == ("calibration" if costs.direct else "default")
    assert after["reader"] == document["reader"]
    assert after["token_ids"] == before["token_ids"]


def test_a_drive_in_a_bad_minute_is_noticed(tmp_path, room, monkeypatch, capsys):
    store = tmp_path / "profiles.json"
    usual = profile_of(gemv_bps={"float32": 1e10}, sparse_bps={"float32": 1e10}, scatter=1.9, again=1.2)
    slow = reader(request_s=(30e-6, 120e-6))
    for costs, heard in (
        (usual, ()),
        (dataclasses.replace(usual, scatter=2.1), ("did not keep its rate", "2.1 times")),
        (dataclasses.replace(usual, again=3.0), ("3 times as fast", "outside this machine")),
        (dataclasses.replace(usual, readers=(slow,)), ("took 3 times what it took in the last calibration",)),
    ):
        monkeypatch.setattr("flashllm.profile.calibrate.measure", lambda *given, costs=costs, **named: costs)
        assert main(["calibrate", str(tmp_path), "--store", str(store)]) == 0
        told = capsys.readouterr().err
        assert all(part in told for part in heard)
        assert bool(told.count("flashllm: ")) is bool(heard)


def test_a_damaged_store_does_not_stop_a_run(tmp_path, tiny, capsys):
    store = tmp_path / "profiles.json"
    store.write_text("{")
    arguments = ["--prompt", "The fox", "--max-new-tokens", "2", "--threads", "1", "--json"]
    assert main(["generate", str(tiny().path("random")), "--store", str(store), *arguments]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["reader"]["source"] == "default"
    assert "run `flashllm calibrate` again" in captured.err or "is not JSON" in captured.err


def test_a_path_that_is_not_there_is_wrong_use(tmp_path, capsys):
    assert main(["calibrate", str(tmp_path / "none")]) == 2
    assert "there is no such" in capsys.readouterr().err


def test_the_plan_is_compared_with_a_run(tmp_path, tiny, monkeypatch, capsys):
    """Its commands run in this process."""
    monkeypatch.setattr(plan_accuracy.subprocess, "run", lambda command, **options: run_script(*command[1:]))
    model, store = tiny().path("random"), tmp_path / "profiles.json"
    save_profile(store, device_of(model), profile_of(gemv_bps={"float32": 1e10}, sparse_bps={"float32": 1e10}))
    arguments = [str(model), "--memory", "6GB", "--context", "64", "--store", str(store), "--tokens", "14"]
    assert plan_accuracy.main(arguments) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    predicted, measured = document["predicted"]["total_s"], document["measured"]["total_ms"] / 1e3
    assert document["predicted_over_measured"] == pytest.approx(predicted / measured)


def test_the_peer_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    done = run_script("bench/peer/dummy_gguf.py", "olmoe-1b-7b", tmp_path / "m.gguf", status=1)
    assert "pip install gguf" in done.stderr
    assert list(tmp_path.iterdir()) == []
