"""Quick profiles: taken once by runs that read, by no other, and never a reason for a run to fail."""

import dataclasses
import json
import shutil
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
from offload_host import policy_of
from profiles import BATCHES, TINY, profile_of
from scripts import run_python
from tiny_models import make_tiny_opt

from flashllm.base.files import locked_directory
from flashllm.base.machine import system_name
from flashllm.cli import main
from flashllm.commands.machine import quick as program
from flashllm.convert.run import convert
from flashllm.offload import launch
from flashllm.offload.launch import LaunchOptions
from flashllm.offload.shape import load_shape
from flashllm.profile import quick
from flashllm.profile.quick import NOT_MEASURED, NOTICE, Wanted, take_quick_profile
from flashllm.profile.store import device_of, load_profile, save_profile


@pytest.fixture(name="file")
def _file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    return path


@pytest.fixture(name="measure")
def _measure(file, tmp_path, monkeypatch):
    """The program, with short measurements, for `file` and more; the profile that it leaves."""
    monkeypatch.setattr(program, "QUICK", TINY)
    monkeypatch.setattr(program, "measure_batches", lambda dtypes, *given, **named: dict.fromkeys(dtypes, BATCHES))

    def run(**more):
        wanted = Wanted(file=str(file), store=str(tmp_path / "profiles.json"), room=1 << 30, **more)
        assert program.main([json.dumps(dataclasses.asdict(wanted))]) == 0
        profile = load_profile(tmp_path / "profiles.json", device_of(file))
        assert wanted.is_in(profile)
        return profile

    return run


def test_what_is_lacking_is_measured_and_kept(file, tmp_path, measure):
    first = measure(encodings=("float16",))
    assert first.gemv_bps.keys() == first.sparse_bps.keys() == {"float16"}
    assert first.is_fresh(system_name(), 1 << 20)
    assert (first.batches, first.writes, first.layer_overhead_s > 0) == ({}, None, True)
    assert measure(encodings=("float16",)) == first  # it is there
    more = measure(encodings=("int8_32",), dtype="bfloat16", writes_in=str(tmp_path))
    assert (more.readers, more.made) == (first.readers, first.made)  # fresh, and so not measured again
    assert more.gemv_bps["float16"] == first.gemv_bps["float16"]
    assert more.gemv_bps.keys() == {"float16", "int8_32"}
    assert more.batches == {"bfloat16": BATCHES}
    file.write_bytes(bytes(2 << 20))
    assert measure().readers != first.readers  # a larger file may lie in no cache
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "profiles.json"]


def take(file, store, room=1 << 30, **wanted):
    said = []
    failure = take_quick_profile(file, room=room, say=said.append, store=store, **wanted)
    return said if failure is None else [*said, failure]


def test_a_calibration_suffices(file, tmp_path, monkeypatch):
    monkeypatch.setattr(quick, "_run_measurer", lambda wanted: None)
    store, now = tmp_path / "profiles.json", datetime.now(UTC).isoformat()
    save_profile(store, device_of(file), profile_of(made=now, system=system_name()))
    assert take(file, store, encodings=["float16"]) == []
    assert take(file, store, encodings=["int8_32"]) == [NOTICE]
    assert take(file, store, dtype="float16") == [NOTICE]
    save_profile(store, device_of(file), profile_of(made="2020-01-01T00:00:00", system=system_name()))
    assert take(file, store, encodings=["float16"]) == [NOTICE]


def test_nothing_is_measured_that_cannot_be_kept(file, tmp_path, monkeypatch):
    assert take(file, file / "profiles.json") == []  # a home that is none
    assert take(file, tmp_path / "a.json", room=1 << 20) == []
    assert take(tmp_path / "gone", tmp_path / "a.json") == []
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 4096}))
        assert take(file, tmp_path / "a.json") == []
    with monkeypatch.context() as patch:
        patch.setattr(quick.os, "access", lambda path, mode: False)
        assert take(file, tmp_path / "a.json") == []
    assert not (tmp_path / "a.json").exists()


def test_a_run_goes_on_where_measuring_fails(file, tmp_path, monkeypatch):
    store = tmp_path / "cache" / "profiles.json"
    with monkeypatch.context() as patch:
        patch.setattr(quick, "_MEASURER", "flashllm.not_there")
        said = take(file, store)
        assert said[0] == NOTICE
        assert said[1].startswith(NOT_MEASURED)
        assert said[1].endswith("No module named flashllm.not_there")
    with monkeypatch.context() as patch:
        patch.setattr(quick, "_PATIENCE_S", 0.01)  # a drive that hangs
        assert take(file, store) == [NOTICE, f"{NOT_MEASURED}: it took over 0.01 s"]
    store.parent.mkdir(exist_ok=True)
    with locked_directory(store.parent, "busy"):
        assert NOT_MEASURED in take(file, store)[1]  # another process measures, and is not waited for
    assert not store.exists()


@pytest.fixture(name="model", scope="module")
def _model(tmp_path_factory):
    """A model whose neurons are as many bytes as are worth measuring for."""
    root = tmp_path_factory.mktemp("large")
    source = make_tiny_opt(root / "hf", num_layers=2, d_model=256, d_ff=8192, num_heads=4)
    convert(source, root / "model")
    return root / "model"


def test_a_run_that_reads_takes_one_and_the_next_takes_none(model, tmp_path):
    """In processes of their own, whose memory is no other test's."""
    store = tmp_path / "profiles.json"
    common = [str(model), "--mode", "dense", "--context", "64", "--store", str(store), "--json"]
    prompt = ["--prompt", "The fox ran", "--max-new-tokens", "4", "--threads", "1", "--temperature", "0"]
    here = tmp_path / "here"  # whose packages are not imported: in a clone, that is one without its core
    here.mkdir()
    (here / "numpy.py").write_text("raise ImportError('not the installed one')")

    def flashllm(*arguments):
        # So small a model leaves less than what is measured with, and a machine with other work takes longer.
        code = "import sys; from flashllm.profile import quick; quick._LEAST_NBYTES = 0; quick._PATIENCE_S = 99;"
        code += "from flashllm.cli import main; sys.exit(main(sys.argv[1:]))"
        done = run_python("-P", "-c", code, *arguments, cwd=here)
        return json.loads(done.stdout), done.stderr

    least = flashllm("plan", *common)[0]["minimum_bytes"]
    generate = ["generate", *common, *prompt, "--memory", f"{least // 10**6 + 12}MB"]
    without, told = flashllm(*generate, "--no-profile")
    assert NOTICE not in told
    assert not store.exists()
    assert without["reader"]["source"] == "default"
    first, told = flashllm(*generate)
    assert told.count(NOTICE) == 1
    assert store.exists()
    assert first["reader"]["source"] in ("calibration", "default")  # without direct I/O there is nothing to choose by
    again, told = flashllm(*generate)
    assert NOTICE not in told
    assert first["token_ids"] == again["token_ids"] == without["token_ids"]  # what is read, never what is computed


@pytest.mark.parametrize("more", [[], ["--memory", "8GB"]])
def test_a_run_that_reads_nothing_takes_none(model, tmp_path, more):
    store = tmp_path / "profiles.json"
    arguments = ["--mode", "dense", "--context", "64", "--prompt", "The fox", "--max-new-tokens", "2"]
    assert main(["generate", str(model), *arguments, "--store", str(store), *more]) == 0
    assert not store.exists()


@pytest.mark.parametrize(
    ("planned", "changes"), [("disk", {}), ("device", {}), ("disk", {"policy": policy_of("disk")})]
)
def test_a_job_takes_one_where_its_plan_reads(tiny, tmp_path, monkeypatch, planned, changes):
    """And is planned again by it."""
    monkeypatch.setattr(launch, "WORTH_NBYTES", 0)
    plans, taken, said = [], [], []
    monkeypatch.setattr(launch, "plan_policy", lambda *job, **sizes: plans.append(sizes) or policy_of(planned))
    monkeypatch.setattr(launch, "predict_job", lambda *job: {"prefill_s": 1, "decode_s": 1})
    monkeypatch.setattr(launch, "take_quick_profile", lambda file, **named: taken.append((file.name, named)))
    monkeypatch.setattr(launch, "local_hardware", lambda *job: SimpleNamespace(source=len(taken)))
    model = shutil.copytree(tiny("float16").source, tmp_path / "model")
    options = LaunchOptions(scratch=tmp_path / "scratch", device="cpu", memory=4 * 10**9, **changes)
    made = launch.prepare(model, load_shape(str(model)), [(8, 12)], options, profiles=True, report=said.append)
    measured = planned == "disk" and not changes
    wanted = {"room": made.options.memory, "say": said.append, "dtype": "float16", "writes_in": tmp_path / "scratch"}
    assert taken == [("model.safetensors", wanted)] * measured
    assert len(plans) == (0 if changes else 2 if measured else 1)
