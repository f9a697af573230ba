"""Relufication on tiny random models: what it writes runs natively, and a run that was stopped goes on to its bytes."""

import json

import numpy as np
import pytest
import torch
from arch_models import VARIANTS, Variant, make_checkpoint, make_config
from folders import written_back
from gguf_files import write_gguf
from relufication.distill import Training
from relufication.refit import fit, threshold_of
from relufication.student import ffns, relufied_config, student_of
from relufy import main
from safetensors.torch import load_file
from tiny_models import SENTENCES, config_of
from transformers import AutoModelForCausalLM

from flashllm.arch.registry import resolve
from flashllm.cli import main as flashllm_main
from flashllm.config import RunConfig
from flashllm.convert.run import convert
from flashllm.engine.model import Model
from flashllm.errors import UnsupportedModelError

SILU = Variant("llama", {"hidden_act": "silu"})
SIZES = ("--length", "16", "--calibration", "12", "--test-windows", "2", "--every", "32", "--threads", "1")


@pytest.fixture
def texts(tmp_path):
    lines = [json.dumps({"text": f"{first} {second}"}) + "\n" for first in SENTENCES for second in SENTENCES]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    (tmp_path / "b.txt").write_text(" ".join(SENTENCES * 4))
    (tmp_path / "test.txt").write_text(" ".join(SENTENCES[::-1] * 4))
    a, b, test = (str(tmp_path / name) for name in ("a.jsonl", "b.txt", "test.txt"))
    return ["--text", a, b, "--test", test, "--device", "cpu"]


def relufied(tmp_path, texts, source, name, *arguments):
    out = tmp_path / name
    command = [str(source), str(out), "--work", str(tmp_path / f"{name}-work"), *texts, *SIZES, *arguments]
    return out, main(command)


def pair(path):
    """(unmodified model, its FFNs, student, its FFNs) of a folder."""
    teacher = AutoModelForCausalLM.from_pretrained(path).eval()
    return teacher, ffns(teacher, config_of(path)), *student_of(teacher, config_of(path))


def test_what_is_written_converts_and_runs_with_its_zeros(tmp_path, texts, capsys):
    source = make_checkpoint(tmp_path / "hf", SILU, dtype="bfloat16")
    out, status = relufied(tmp_path, texts, source, "out", "--tokens", "64", "--dtype", "float32")
    assert status == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    facts = json.loads((out / "relufication.json").read_text())
    stages = [row["stage"] for row in facts["table"]]
    assert stages == ["unmodified", "thresholds", "refitted", "distilled", "distilled"]
    assert [row["tokens"] for row in facts["table"]] == [0, 0, 0, 32, 64]
    assert {key: last[key] for key in facts["table"][-1]} == facts["table"][-1]
    assert 0.6 < last["zeros"] < 0.85
    assert last["least_zeros"] <= last["zeros"] <= last["most_zeros"]
    config = config_of(out)
    assert (config["hidden_act"], config["dtype"]) == ("fatrelu", "float32")
    assert config["hidden_act_param"] == facts["thresholds"]
    assert (out / "relufication.md").read_text().count("\n") == 2 + len(stages)

    convert(out, tmp_path / "model", gate="resident")
    _, _, student, layers = pair(source)
    state = AutoModelForCausalLM.from_pretrained(out, config=student.config, dtype=torch.float32).state_dict()
    student.float().load_state_dict(state)
    for layer, threshold in zip(layers, facts["thresholds"], strict=True):
        layer.activation.threshold = threshold
    ids = list(range(4, 40))
    with torch.no_grad():
        expected = student(torch.tensor([ids])).logits[0].numpy()
    for mode in ("sparse", "dense"):
        with Model.open(tmp_path / "model", RunConfig(mode=mode, threads=1, io_threads=4)) as model:
            found = model.step([(model.new_sequence(), ids)], all_logits=True)
            np.testing.assert_allclose(found, expected, atol=2e-4, rtol=0)


def test_an_interrupted_run_goes_on_to_the_same_bytes(tmp_path, texts, monkeypatch, capsys):
    source = make_checkpoint(tmp_path / "hf", SILU)
    whole, status = relufied(tmp_path, texts, source, "whole", "--tokens", "160")
    assert status == 0

    step = Training.train
    monkeypatch.setattr(Training, "train", lambda self, rows: step(self, rows) if self.step < 5 else interrupt())
    _, status = relufied(tmp_path, texts, source, "parts", "--tokens", "160")
    assert status == 130
    assert "again" in capsys.readouterr().err
    monkeypatch.setattr(Training, "train", step)
    parts, status = relufied(tmp_path, texts, source, "parts", "--tokens", "160")
    assert status == 0
    for name in ("model.safetensors", "relufication.json", "config.json"):
        assert (whole / name).read_bytes() == (parts / name).read_bytes()

    _, status = relufied(tmp_path, texts, source, "again", "--tokens", "160", "--work", str(tmp_path / "parts-work"))
    assert status == 0  # a finished run is written again
    _, status = relufied(tmp_path, texts, source, "other", "--tokens", "96", "--work", str(tmp_path / "parts-work"))
    assert (status, "has seen 160 tokens" in capsys.readouterr().err) == (1, True)


def test_a_run_goes_on_to_another_end(tmp_path, texts, capsys):
    source = make_checkpoint(tmp_path / "hf", SILU)
    work = ("--work", str(tmp_path / "short-work"))
    short, _ = relufied(tmp_path, texts, source, "short", "--tokens", "96")
    long, status = relufied(tmp_path, texts, source, "long", "--tokens", "192", *work, "--minutes", "0")
    assert status == 0
    capsys.readouterr()
    end, status = relufied(tmp_path, texts, source, "end", "--tokens", "128", *work)
    assert status == 0
    assert "going on to 128 tokens in place of 96" in capsys.readouterr().err
    facts = [json.loads((out / "relufication.json").read_text()) for out in (short, long, end)]
    first = {"step": 6, "tokens": 96}
    assert [each["replanned"] for each in facts] == [[], [first], [first]]  # nothing was saved of the second plan
    assert [each["table"][-1]["tokens"] for each in facts] == [96, 96, 128]
    assert facts[2]["table"][: len(facts[0]["table"])] == facts[0]["table"]
    same = [path.joinpath("model.safetensors").read_bytes() for path in (short, long, end)]
    assert same[0] == same[1] != same[2]


def interrupt():
    raise KeyboardInterrupt


def test_the_time_that_is_given_ends_a_run(tmp_path, texts):
    source = make_checkpoint(tmp_path / "hf", SILU)
    out, status = relufied(tmp_path, texts, source, "out", "--tokens", "160", "--minutes", "0")
    assert status == 0
    table = json.loads((out / "relufication.json").read_text())["table"]
    assert [row["stage"] for row in table] == ["unmodified", "thresholds", "refitted"]


def test_bf16_products_train_fp32_weights(tmp_path, texts, capsys):
    source = make_checkpoint(tmp_path / "hf", SILU)
    weights = {}
    for name, *precision in (("start", "0"), ("wide", "96"), ("narrow", "96", "--precision", "bfloat16")):
        out, status = relufied(tmp_path, texts, source, name, "--tokens", *precision)
        assert status == 0
        weights[name] = load_file(out / "model.safetensors")
    changed = [name for name, value in weights["wide"].items() if not torch.equal(value, weights["start"][name])]
    assert changed
    for name in changed:
        wide, narrow = (weights[run][name] - weights["start"][name] for run in ("wide", "narrow"))
        assert narrow.dtype == torch.float32
        assert 0 < (wide - narrow).norm() < 0.5 * wide.norm(), name

    _, status = relufied(tmp_path, texts, source, "other", "--tokens", "96", "--work", str(tmp_path / "narrow-work"))
    assert (status, "another precision" in capsys.readouterr().err) == (1, True)


@pytest.mark.parametrize("variant", [Variant("qwen2"), Variant("phi"), Variant("gpt_neox"), Variant("gemma")])
def test_refitted_layers_follow_the_unmodified_stream(tmp_path, variant):
    source = make_checkpoint(tmp_path / "hf", variant)
    rows = torch.randint(4, 300, (40, 24), generator=torch.Generator().manual_seed(0))
    teacher, before, student, after = pair(source)
    with torch.no_grad():
        wanted = teacher(rows[:8], output_hidden_states=True).hidden_states[-1]
        errors = []
        for refit in (False, True):
            fit(teacher, before, after, rows, 0.7, refit=refit)
            found = student(rows[:8], output_hidden_states=True).hidden_states[-1]
            errors.append(float((found - wanted).square().mean()))
    assert errors[1] < 0.7 * errors[0]
    assert all(layer.activation.threshold >= 0 for layer in after)
    changed = [not torch.equal(a.down.weight, b.down.weight) for a, b in zip(before, after, strict=True)]
    assert all(changed)
    assert teacher.get_input_embeddings().weight is student.get_input_embeddings().weight


def test_a_threshold_leaves_the_share_and_is_never_below_zero():
    values = torch.arange(-50, 50).float()
    assert float((values <= threshold_of(values, 0.7)).float().mean()) == pytest.approx(0.7)
    assert threshold_of(values, 0.3) == 0.0


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        (Variant("llama", {"hidden_act": "relu"}), "sparse already"),
        (Variant("olmoe"), "mixture of experts"),
        (Variant("gemma2"), "without norm or scale"),
        (Variant("granite", {"residual_multiplier": 0.5}), "without norm or scale"),
        (Variant("phi3"), "linear modules each"),
    ],
)
def test_models_that_cannot_be_had_with_fatrelu_are_refused(tmp_path, texts, capsys, variant, message):
    """From the config: nothing is loaded."""
    source = make_checkpoint(tmp_path / "hf", variant)
    (source / "model.safetensors").unlink()
    out, status = relufied(tmp_path, texts, source, "out")
    assert (status, out.exists()) == (1, False)
    assert message in capsys.readouterr().err


def test_every_kind_that_its_config_lets_through_has_the_modules(tmp_path):
    taken = set()
    for variant in VARIANTS.values():
        config = json.loads(make_config(variant).to_json_string())
        if variant.model_type in taken or not is_let_through(config):
            continue
        taken.add(variant.model_type)
        source = make_checkpoint(tmp_path / variant.model_type, variant)
        assert is_let_through(config_of(source))
        layers = ffns(AutoModelForCausalLM.from_pretrained(source), config_of(source))
        assert len(layers) == resolve(config).num_layers
    assert {"llama", "mistral", "qwen2", "qwen3", "gemma", "smollm3", "stablelm", "cohere", "phi"} < taken
    assert not taken & {"phi3", "glm", "gemma2", "gemma3_text", "olmo2"}


def is_let_through(config):
    try:
        relufied_config(config, [0.0] * resolve(config).num_layers)
    except UnsupportedModelError:
        return False
    return True


def test_a_gguf_file_becomes_a_folder_as_the_refusal_says(tmp_path, texts, capsys):
    source = make_checkpoint(tmp_path / "hf", SILU)
    file, model, folder = write_gguf(source, tmp_path / "model.gguf"), tmp_path / "model", tmp_path / "folder"
    assert relufied(tmp_path, texts, file, "out")[1] == 1
    said = capsys.readouterr().err
    convert_command = f"flashllm convert {file} DIR --bits 16 --dtype float32"
    assert f"`{convert_command}`, then `python bench/quality/folders.py DIR FOLDER`" in said
    command = convert_command.replace("DIR", str(model)).split()
    assert flashllm_main(command[1:]) == 0
    assert relufied(tmp_path, texts, model, "out")[1] == 1
    assert f"`python bench/quality/folders.py {model} FOLDER`" in capsys.readouterr().err
    written_back(model, folder)
    ids = torch.arange(4, 40)[None]
    with torch.no_grad():
        found, expected = (AutoModelForCausalLM.from_pretrained(path)(ids).logits for path in (folder, source))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert relufied(tmp_path, texts, folder, "out")[1] == 0


def test_arguments_that_cannot_be_are_said(tmp_path, texts, capsys):
    source = make_checkpoint(tmp_path / "hf", SILU)
    (tmp_path / "there").mkdir()
    for arguments, message in (
        (["--share", "1"], "--share must be between 0 and 1"),
        (["--length", "1"], "--length must be at least 2"),
        (["--length", "100000"], "less than one row"),
        (["--test-windows", "1000"], "lower --test-windows"),
        (["--work", str(tmp_path / "work")], "there exists"),
    ):
        out = "there" if "exists" in message else "out"
        assert relufied(tmp_path, texts, source, out, *arguments)[1] == 1
        assert message in capsys.readouterr().err
    damaged = tmp_path / "out-work" / "state.pt"
    damaged.parent.mkdir()
    damaged.write_bytes(b"x")
    assert relufied(tmp_path, texts, source, "out")[1] == 1
    assert "is damaged" in capsys.readouterr().err
    (tmp_path / "a.jsonl").write_text("no JSON\n")
    assert relufied(tmp_path, texts, source, "out")[1] == 1
    assert "neither plain text nor .jsonl" in capsys.readouterr().err
