"""The check of a GPU, its steps on torch's CPU device: they work, and go on where they stopped."""

import importlib.util
import json

import gpu_check
import pytest

ALL = list(gpu_check.STEPS)


def call(out, *argv):
    return gpu_check.main(["--device", "cpu", "--out", str(out), *argv])


def without(*steps):
    return ["--skip", *(step for step in ALL if step not in steps)]


def test_a_call_does_what_is_missing_and_says_that_no_gpu_ran(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu_check, "picture", lambda document, file: file.touch())
    assert call(tmp_path, *without("pinned"), "--minutes", "0") == 0
    left = json.loads((tmp_path / "gpu_check.json").read_text())["steps"]
    assert all("no time" in each["left_out"] for each in left.values())
    assert call(tmp_path, *without("pinned")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "on a GPU: unrun" in lines
    document = json.loads(lines[-1])
    assert document == json.loads((tmp_path / "gpu_check.json").read_text())
    assert not document["ran_on_a_gpu"]
    assert list(document["steps"]) == ["pinned"]
    assert min(document["steps"]["pinned"]["bytes_per_s"].values()) > 0
    made = (tmp_path / "gpu_check.json").stat().st_mtime_ns
    assert call(tmp_path, *without("pinned")) == 0
    assert (tmp_path / "gpu_check.json").stat().st_mtime_ns == made
    assert (tmp_path / "gpu_check.png").exists() == (importlib.util.find_spec("matplotlib") is not None)
    with pytest.raises(SystemExit):
        gpu_check.main(["--device", "cuda", "--out", str(tmp_path)])
    assert "give another --out" in capsys.readouterr().err


def test_every_step_works(tmp_path, monkeypatch):
    few = [gpu_check.cases()[i] for i in (0, 15, 18)]  # in one place, in all, packed; others: tests/offload/runtime
    monkeypatch.setattr(gpu_check, "cases", lambda: few)
    rate = gpu_check._rate
    monkeypatch.setattr(gpu_check, "_rate", lambda work, units, at_least_s: rate(work, units, at_least_s / 20))
    check = gpu_check.Check("cpu", tmp_path)
    found = {}
    for name in ALL:
        found[name] = gpu_check.STEPS[name](check)
        document = {"steps": {step: {**each, "seconds": 0.0} for step, each in found.items()}}
        (tmp_path / "gpu_check.json").write_text(json.dumps(document))
    assert not [name for name, each in found.items() if "failed" in each], found
    assert found["correct"]["cases"] == 2 * len(few)
    assert "accelerator's memory" in found["limit"]["refused"]
    assert set(found["breakdown"]["roof_s"]) <= set(found["breakdown"]["busy_s"])
    assert all(row["throughput"] > 0 for step in ("table2", "peers") for row in found[step]["rows"])
    if importlib.util.find_spec("matplotlib") is not None:
        gpu_check.picture(document, tmp_path / "picture.png")


def test_a_wrong_token_is_told(tmp_path, monkeypatch):
    check = gpu_check.Check("cpu", tmp_path)
    right = gpu_check.run

    def wrong(settings):
        result = right(settings)
        if settings["accelerator"] is not None:
            result["answers"][0][-1] += 1
        return result

    monkeypatch.setattr(gpu_check, "run", wrong)
    monkeypatch.setattr(gpu_check, "cases", lambda: [("all on the device", gpu_check.placed("g"))])
    assert "7 of 8 answers" in gpu_check.correct(check)["failed"]
