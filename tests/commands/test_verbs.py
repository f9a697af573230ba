"""The verbs around a model: kept models, training, judging, measuring, advice, completion, and slips of the finger."""

import json
import random
import shutil
from pathlib import Path

import pytest
from tiny_models import SENTENCES, make_tiny_opt

import flashllm
from flashllm.cli import VERBS
from flashllm.commands.machine.doctor import examine
from flashllm.commands.predictors import scripts
from flashllm.errors import FlashError

PIECE = ["--threads", "1"]


def test_models_converted_on_first_use_are_listed_and_removed(run, home, tmp_path):
    status, out, err = run("list")
    assert (status, out) == (0, "")
    assert "flashllm chat MODEL" in err
    source = make_tiny_opt(tmp_path / "source")
    assert run("generate", source, "--prompt", "The", "--max-new-tokens", "2", *PIECE)[0] == 0
    (home / ".cache/flashllm/models/half.partial").mkdir()
    (home / ".cache/flashllm/models/broken").mkdir()
    (home / ".cache/flashllm/models/broken/flashllm.json").write_text("{")
    document = json.loads(run("list", "--json")[1])
    models = {Path(one["path"]).name: one for one in document["models"]}
    assert len(models) == 3
    (kept,) = (one for name, one in models.items() if name.startswith("source-"))
    assert kept["what"] == "opt, float32"
    assert kept["bytes"] == sum(path.stat().st_size for path in Path(kept["path"]).iterdir())
    assert "unfinished" in models["half.partial"]["what"]
    status, out, _ = run("list")
    assert (status, out.count("\n")) == (0, 3)
    # A wrong name deletes nothing, not even what a right one beside it means.
    status, _, err = run("rm", kept["path"], source)
    assert status == 2
    assert "is not in the cache" in err
    assert Path(kept["path"]).is_dir()
    status, _, err = run("rm", Path(kept["path"]).name, "broken", kept["path"])
    assert status == 0
    assert err.count("deleted") == 2
    assert source.is_dir()
    assert [one["name"] for one in json.loads(run("list", "--json")[1])["models"]] == ["half.partial"]


def test_a_model_of_the_hubs_goes_by_its_id(home, tiny, run):
    folder = home / ".cache/flashllm/models"
    from flashllm.convert.hub import HubModel

    path = shutil.copytree(tiny().path("bare"), folder / HubModel.parse("some/model").directory_name)
    manifest = json.loads((path / "flashllm.json").read_text())
    manifest["source"]["name"] = "some/model"
    del manifest["sha256"]
    (path / "flashllm.json").write_text(json.dumps(manifest))
    assert run("list")[1].startswith("some/model ")
    assert run("rm", "some/model")[0] == 0
    assert not path.exists()


def test_train_and_evaluate(tiny, tmp_path, run):
    """On a copy; what the scripts do is tested with the scripts."""
    model = Path(shutil.copytree(tiny().path("bare"), tmp_path / "model"))
    text = tmp_path / "words.txt"
    text.write_text(" ".join(random.Random(0).choices(" ".join(SENTENCES).split(), k=1500)))
    small = ["--samples", "12", "--threads", "1"]
    status, out, err = run("train", model, "--data-files", text, *small, "--json")
    assert status == 0, err
    assert len(json.loads(out)["layers"]) == 3
    assert (model / "predictors.safetensors").exists()
    status, out, err = run("evaluate", model, "--text", text, "--tokens", "200", "--threads", "1", "--json")
    assert status == 0, err
    assert json.loads(out)["texts"]


def test_errors_of_the_scripts_are_one_line(tmp_path, tiny, run):
    for argv in (
        ["train", tiny().path(), "--data-files", tmp_path / "nothing.txt"],
        ["train", tiny().path(), "--samples", "0"],
        ["evaluate", tiny().path(), "--tasks", "chess"],
        ["evaluate", tmp_path / "nothing"],
    ):
        status, out, err = run(*argv)
        assert status in (1, 2)
        assert out == ""
        assert err.splitlines()[-1].startswith("flashllm: error: ")


def test_an_installation_without_the_scripts_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(flashllm, "__file__", str(tmp_path / "flashllm/__init__.py"))
    with pytest.raises(FlashError, match="lacks the predictors' scripts"):
        scripts.load("arguments")


def test_bench(run, tiny):
    status, out, err = run("bench", tiny().path(), "--tokens", "12", "--json", *PIECE)
    assert status == 0, err
    facts = json.loads(out)
    assert (facts["tokens"], facts["mode"]) == (7, "sparse")
    assert 0 < facts["token_ms"] <= facts["token_ms_p95"]
    status, out, _ = run("bench", tiny().path(), "--tokens", "12", *PIECE)
    assert status == 0
    for name in ("reading from flash", "managing memory", "computing", "other"):
        assert f"  {name} " in out
    status, _, err = run("bench", tiny().path(), "--context", "40", *PIECE)
    assert status == 0
    assert "the context limit of 40 tokens ended" in err
    status, _, err = run("bench", tiny().path(), "--context", "6", *PIECE)
    assert status == 2
    assert "give a larger --context" in err


def test_doctor(run, tmp_path):
    status, out, err = run("doctor", tmp_path, "--store", tmp_path / "none.json")
    assert (status in (0, 1), err) == (True, "")
    lines = [line for line in out.splitlines() if line[:1] != " "]
    for what in (
        "flashllm",
        "processor",
        "memory",
        "reader",
        "drive",
        "direct I/O",
        "profile",
        "torch",
        "transformers",
    ):
        assert any(line[6:].startswith(what) for line in lines), what
    assert f"flashllm calibrate {tmp_path}" in out
    findings = json.loads(run("doctor", tmp_path, "--json")[1])["findings"]
    assert all(each["advice"] for each in findings if each["state"] != "good")
    assert list(tmp_path.iterdir()) == []  # nothing stays behind
    assert run("doctor", tmp_path / "nowhere")[0] == 2


def test_doctor_says_what_is_bad(tmp_path):
    (tmp_path / "store.json").write_text("{")
    found = {each.what: each for each in examine(tmp_path, tmp_path / "store.json")}
    assert found["profile"].state == "bad"
    assert "flashllm calibrate" in found["profile"].advice


@pytest.mark.parametrize(("shell", "says"), [("bash", "complete "), ("zsh", "#compdef flashllm")])
def test_completion_knows_every_verb_and_option(run, shell, says):
    status, out, err = run("completion", shell)
    assert (status, err) == (0, "")
    assert says in out
    for verb in VERBS:
        assert verb in out
    assert "memory" in out
    assert "api" in out


@pytest.mark.parametrize(
    ("argv", "near"),
    [
        (["chatt"], "chat"),
        (["infer"], None),
        (["sevre"], "serve"),
        (["serve", "--prot", "8080"], "--port"),
        (["generate", "--prompt", "x", "--max-new-token=3"], "--max-new-tokens"),
        (["train", "--sample", "3"], "--samples"),
        (["plan", "--zzz"], None),
    ],
)
def test_slips_are_answered_with_what_was_meant(run, argv, near):
    status, out, err = run(*argv)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert ("did you mean" in err) == (near is not None)
    assert near is None or f"did you mean {near}?" in err


@pytest.mark.parametrize("verb", ["serve", "train", "evaluate", "list", "rm", "bench", "doctor", "completion"])
def test_help_says_how_it_is_used(run, verb):
    status, out, _ = run(verb, "--help")
    assert status == 0
    assert any(sign in out for sign in ("Example: ", "`flashllm ", "Exit status"))
