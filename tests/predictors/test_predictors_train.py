import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import train_predictor
from arch_models import VARIANTS, make_checkpoint, make_model
from masked import load_predictors
from safetensors.torch import load_file
from tiny_models import SENTENCES
from training import trainer
from training.fit import fires
from training.passes import BATCH_TOKENS, LayerPass, PassShape, kept_positions
from training.plan import pass_nbytes
from training.recipes import Recipe
from training.trainer import needed_rows

from flashllm.config import RunConfig
from flashllm.convert.run import convert
from flashllm.engine.model import Model
from flashllm.format.manifest import Manifest
from flashllm.format.model_dir import ModelDir
from flashllm.format.model_files import POPULARITY, PREDICTORS
from flashllm.format.popularity import describe_popularity, read_popularity
from flashllm.format.report.verify import verify

SCRIPT = Path(train_predictor.__file__)
QUICK = ["--samples", "40", "--tokens-per-sample", "24", "--epochs", "1", "--threads", "1", "--ranks", "8"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    words = " ".join(SENTENCES).split()
    rng = random.Random(0)
    path = tmp_path_factory.mktemp("data") / "text.jsonl"
    texts = (" ".join(rng.choices(words, k=rng.randint(20, 200))) for _ in range(60))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def bare(tiny, tmp_path):
    """A model directory of one's own, without predictors."""

    def get(name="model", dtype="float16"):
        return Path(shutil.copytree(tiny(dtype).path("bare"), tmp_path / name))

    return get


def train(model, data, *options):
    return train_predictor.main([str(model), "--data-files", str(data), *QUICK, *options])


def test_trains_installs_and_reports(bare, data, tmp_path, capsys, opened):
    model, report_path = bare(), tmp_path / "report.json"
    assert train(model, data, "--json", str(report_path)) == 0
    captured = capsys.readouterr()
    report = json.loads(report_path.read_text())
    lines = {line.split()[0]: line for line in captured.out.splitlines()}
    assert list(lines) == ["predictors", "recall", "named", "popularity", "installed"]
    assert "of 3 layers, rank 8, " in lines["predictors"]
    shares = [layer["predicted_share"] for layer in report["layers"]]
    assert f" {np.mean(shares):.2%} of the neurons a token; " in lines["named"]
    assert str(model) in lines["installed"]
    assert "memory:" in captured.err.split("layer 0")[0]  # the plan comes before the work
    assert "scratch:" in captured.err.split("layer 0")[0]
    assert re.search(r"about \d+ minutes", captured.err.split("layer 0")[0])
    manifest = Manifest.load(model)
    assert manifest.calibration.req == tuple(layer["req"] for layer in report["layers"])
    assert all(layer["rank"] == 8 for layer in report["layers"])
    assert not model.with_name("model.predictors").exists()
    # The engine takes the file as it is.
    engine = opened(model, mode="sparse")
    engine.step([(engine.new_sequence(), [2, 5, 9, 12])])
    assert [len(p.a) for p in load_predictors(model / PREDICTORS, manifest)] == [8] * 3


def test_how_often_each_neuron_is_named_is_installed_with_the_predictors(bare, data, monkeypatch):
    """Against the stored predictors, asked about the same inputs."""
    inputs, model, split = [], bare(), trainer.Split.of(40)
    real = trainer.Trainer._fit_layer

    def keep_inputs(self, layer):
        judged = self._record.chunks(layer, self.split.validation, self.split.end)
        inputs.append(torch.cat([x.clone() for x, _ in judged]))
        return real(self, layer)

    monkeypatch.setattr(trainer.Trainer, "_fit_layer", keep_inputs)
    assert train(model, data) == 0
    manifest = Manifest.load(model)
    assert len(inputs[0]) == manifest.calibration.tokens == 24 * (split.end - split.validation)
    popularity = read_popularity(model, manifest)
    for x, predictor, shares in zip(inputs, load_predictors(model / PREDICTORS, manifest), popularity, strict=True):
        named = (predictor.logits(x) > predictor.threshold).double().mean(0)
        np.testing.assert_allclose(shares, named.numpy(), atol=1.01 / len(x))  # a logit at the threshold may flip
        assert shares.min() < shares.max()
    sums = [float(shares.sum(dtype=np.float64)) for shares in popularity]
    assert sums == pytest.approx(manifest.calibration.mean_active, rel=1e-6)
    facts = {"tokens": str(len(inputs[0])), "measured_on": manifest.calibration.text}
    assert describe_popularity(model, manifest) == facts
    assert verify(model).ok


def test_the_report_holds_on_the_samples_judged(bare, data, capsys):
    assert train(bare(), data, "--recall", "0.9", "--json") == 0
    for layer in json.loads(capsys.readouterr().out)["layers"]:
        assert 0.0 < layer["true_share"] < layer["predicted_share"] < 1.0
        assert layer["false_negative"] < 0.3
        recalls = [point["recall"] for point in layer["curve"]]
        shares = [point["predicted_share"] for point in layer["curve"]]
        assert recalls == sorted(recalls)
        assert shares == sorted(shares)


def readmes_options():
    """Options of the line that retrains the demo."""
    readme = (SCRIPT.parent / "README.md").read_text(encoding="utf-8")
    line = re.search(r"<!-- predictors line -->\n```sh\n(.*?)\n```", readme, re.DOTALL)[1]
    interpreter, script, model, *options = line.split("#")[0].split()
    assert (interpreter, script, model) == ("python", "predictors/train_predictor.py", "flashllm/demo")
    return options


def test_equal_seeds_give_equal_bits(bare, data):
    """By the README's options, with fewer and shorter samples."""
    files, options = [], readmes_options()
    assert options[-2:] == ["--threads", "2"]
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        model = bare(name)
        small = ["--data-files", str(data), *QUICK, "--threads", "2", "--seed", seed]
        assert train_predictor.main([str(model), *options, *small]) == 0
        files.append((model / PREDICTORS).read_bytes())
    assert files[0] == files[1]
    assert files[0] != files[2]


def test_memory_decides_nothing_but_whether_it_runs(bare, data, capsys):
    free, limited, small = bare("a"), bare("b"), bare("c")
    assert train(free, data) == 0
    assert train(limited, data, "--memory", "6GB") == 0
    assert (free / PREDICTORS).read_bytes() == (limited / PREDICTORS).read_bytes()
    capsys.readouterr()
    assert train(small, data, "--memory", "100MB") == 1
    refusal = capsys.readouterr().err
    assert "100 MB cannot hold this training" in refusal
    assert "use --memory" in refusal
    assert PREDICTORS not in Manifest.load(small).files


def test_no_more_is_held_than_planned(bare, data, monkeypatch):
    """What a batch holds while it passes, by tokens a sample, is counted before the work begins."""
    manifest = Manifest.load(bare())
    block = ModelDir.open(bare("b")).block
    for tokens in (2, 24, 64, 65, 5000):
        shape = PassShape(samples=9, tokens=tokens, kept=1, d_model=64, d_ff=512)
        assert shape.batch_samples == 1 or shape.batch_tokens <= shape.kv_positions <= BATCH_TOKENS
        held = 4 * 10 * 64 * shape.batch_tokens + shape.kv_positions * 2 * block.kv_dim * 2
        assert pass_nbytes(shape, block, manifest) > held


def test_the_model_takes_no_more_than_it_needs_of_the_limit(bare, data, monkeypatch):
    """Dense passes have no use for cached neurons; what is left of the limit is not theirs to fill."""
    given, real = [], Model.open

    def spy(directory, config):
        given.append(config.memory)
        return real(directory, config)

    monkeypatch.setattr(Model, "open", spy)
    held = psutil.Process().memory_info().rss  # by this process, after many tests perhaps a lot
    assert train(bare("a"), data, "--memory", "6GB") == 0
    assert train(bare("b"), data) == 0
    assert given[0] == pytest.approx(given[1], abs=100_000_000)  # the process has grown in between
    assert max(given) < held + 1_500_000_000


EARLY = ("--early", "0.5")


@pytest.fixture(scope="module")
def undisturbed_run(tiny, data, tmp_path_factory):
    """The model directory after a training that nothing interrupted."""
    whole = Path(shutil.copytree(tiny("float16").path("bare"), tmp_path_factory.mktemp("whole") / "model"))
    assert train(whole, data, *EARLY) == 0
    return whole


@pytest.mark.parametrize("kill_at", ["passed.000.done", "layer.000.pt"])
def test_a_killed_run_resumes_with_the_same_results(bare, data, undisturbed_run, tmp_path, kill_at):
    whole, killed, scratch = undisturbed_run, bare("killed"), tmp_path / "scratch"
    options = ["--data-files", str(data), *QUICK, *EARLY, "--scratch", str(scratch)]
    command = [sys.executable, str(SCRIPT), str(killed), *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 120
        while not (scratch / kill_at).exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.001)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert (scratch / kill_at).exists()
    assert PREDICTORS not in Manifest.load(killed).files
    assert train(killed, data, *EARLY, "--scratch", str(scratch), "--resume") == 0
    for name in (PREDICTORS, POPULARITY):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()
    assert Manifest.load(killed).calibration == Manifest.load(whole).calibration
    assert not scratch.exists()


def test_scratch_of_another_run_is_not_resumed(bare, data, tmp_path, capsys):
    model, scratch = bare(), tmp_path / "scratch"
    scratch.mkdir()
    assert train(model, data, "--scratch", str(scratch)) == 2
    assert "--resume" in capsys.readouterr().err
    (scratch / "identity.json").write_bytes(b"{}")
    assert train(model, data, "--scratch", str(scratch), "--resume") == 2
    assert "other options" in capsys.readouterr().err


def test_what_fails_before_the_work_leaves_nothing_to_remove(bare, data, tmp_path, capsys):
    model, scratch = bare(), tmp_path / "scratch"
    wrong = (["--data-files", str(tmp_path / "absent")], ["--memory", "100MB"], ["--json", "no/folder.json"])
    for options in (*wrong, ["--json", str(model)]):
        assert train(model, data, "--scratch", str(scratch), *options) in (1, 2)
        assert not scratch.exists()
    said = capsys.readouterr().err
    assert "no is no folder" in said
    assert "the name of a report ends in .json" in said
    assert train(model, data, "--scratch", str(scratch)) == 0


def test_scratch_that_holds_other_files_is_left_alone(bare, data, tmp_path, capsys):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    for name in ("pytorch_model.bin", "predictors.safetensors"):
        (scratch / name).write_text("mine")
        assert train(bare(name), data, "--scratch", str(scratch), "--resume") == 2
        assert f"holds {name}" in capsys.readouterr().err
        (scratch / name).unlink()


def test_a_kill_while_tidying_up_leaves_nothing_that_is_believed(bare, data, tmp_path):
    """The identity goes first; what other options find without one they do not use."""
    whole, again, scratch = bare("whole"), bare("again"), tmp_path / "scratch"
    assert train(whole, data) == 0
    scratch.mkdir()
    for name in ("passed.001.done", "layer.000.pt", "states.002.bin", "trained.safetensors"):
        (scratch / name).write_bytes(b"of another run")
    assert train(again, data, "--scratch", str(scratch), "--resume") == 0
    assert (again / PREDICTORS).read_bytes() == (whole / PREDICTORS).read_bytes()
    assert not scratch.exists()


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_full_disk_and_ctrl_c_end_in_a_line_and_resume(bare, data, monkeypatch, capsys, error):
    model, whole = bare(), bare("whole")
    assert train(whole, data) == 0
    status, message = (1, "No space left") if error is OSError else (130, "interrupted")

    def fail(*_args):
        raise error(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "_fit_layer", fail)
        assert train(model, data) == status
    last = capsys.readouterr().err.splitlines()[-1]
    assert message in last
    assert "--resume" in last
    assert train(model, data, "--resume") == 0
    assert (model / PREDICTORS).read_bytes() == (whole / PREDICTORS).read_bytes()


@pytest.mark.parametrize("left", [b"", b"not what was written", None])
def test_a_damaged_layer_of_the_run_before_is_named(bare, data, monkeypatch, capsys, left):
    model = bare()
    scratch = model.with_name("scratch")
    path = scratch / "layer.000.pt"

    def fail(*_args):
        raise OSError(28, "No space left on device")

    real = trainer.Trainer._fit_layer
    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "_fit_layer", lambda self, layer: (fail if layer else real)(self, layer))
        assert train(model, data, "--scratch", str(scratch)) == 1
    path.write_bytes(path.read_bytes()[:-200] if left is None else left)
    capsys.readouterr()
    assert train(model, data, "--scratch", str(scratch), "--resume") == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"{path}: damaged" in last
    assert f"remove {scratch}" in last


def test_a_recipe_needs_its_number_of_layers_and_no_more_than_the_width(bare, data, monkeypatch, capsys):
    model = bare()
    assert train(model, data, "--ranks", "opt-6.7b") == 2
    assert "written for 32 layers, this model has 3" in capsys.readouterr().err
    assert train(model, data, "--ranks", "8:9999x1", "--json") == 0
    widths = {layer["rank"] for layer in json.loads(capsys.readouterr().out)["layers"]}
    assert widths == {8, Manifest.load(model).architecture.d_model}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--samples", "2"], "--samples must be at least 3"),
        (["--recall", "1.0"], "--recall must lie between"),
        (["--epochs", "-1"], "--epochs"),
        (["--ranks", "many"], "--ranks must be"),
        (["--memory", "lots"], "not a size"),
        (["--positive-weight", "0"], "weight"),
        (["--early", "1.5"], "--early must lie between"),
    ],
)
def test_values_that_cannot_be_are_refused(bare, data, capsys, options, message):
    model = bare()
    assert train(model, data, *options) == 2
    assert message in capsys.readouterr().err


def test_a_layer_without_a_predictor_computes_everything(bare, data, monkeypatch):
    """phi-2's recipe has none in the last layers; here in all but the first."""
    model = bare()
    recipe = Recipe(name="first", ranks=((0, 8), (1, 0)))
    monkeypatch.setattr(train_predictor, "parse_ranks", lambda _text: recipe)
    assert train(model, data) == 0
    tensors = load_file(model / PREDICTORS)
    assert tensors["layers.1.a"].shape[0] == 1
    assert float(tensors["layers.1.threshold"]) < float((tensors["layers.1.bias"]).min())
    assert Manifest.load(model).calibration.mean_active[1] == 512


def test_epochs_0_calibrates_the_truncated_svd(bare, data, capsys):
    assert train(bare(), data, "--epochs", "0", "--json") == 0
    for layer in json.loads(capsys.readouterr().out)["layers"]:
        assert layer["false_negative"] == layer["svd"]["false_negative"]


def test_fewer_positions_are_runs_of_each_sample(bare, data, capsys):
    assert train(bare(), data, "--positions", "400") == 0
    assert "trained on 10 positions of each" in capsys.readouterr().err
    shape = PassShape(samples=5, tokens=24, kept=10, d_model=8, d_ff=8)
    positions = kept_positions(shape, seed=0)
    assert positions.shape == (5, 10)
    assert (np.diff(positions) == 1).all()
    assert len(set(positions[:, 0].tolist())) > 1


def test_needed_rows_counts_the_fullest_window():
    predicted = np.zeros((5, 6), dtype=bool)
    for token, neurons in enumerate([(0, 1), (1,), (2, 3), (3,), (0,)]):
        predicted[token, list(neurons)] = True
    assert [needed_rows(predicted, window) for window in (1, 2, 3, 5)] == [2, 3, 4, 4]


def test_recorded_codes_are_the_dense_models_activity(bare, data, tmp_path, monkeypatch, tiny):
    """The chunks the predictor is fitted on against the Hugging Face model's own activations."""
    seen = []
    real = trainer.fit

    def spy(start, chunks, options, d_ff, held=None):
        if held is not None:  # else it is the step that is timed beforehand
            seen.append([(x.clone(), codes.clone()) for x, codes in chunks()])
        return real(start, chunks, options, d_ff, held)

    monkeypatch.setattr(trainer, "fit", spy)
    model = bare(dtype="float32")
    assert train(model, data) == 0
    weights = tiny("float32").reference.state_dict()
    for layer, chunks in enumerate(seen):
        x, packed = chunks[0]
        name = f"model.decoder.layers.{layer}.fc1."
        pre = x @ weights[name + "weight"].T + weights[name + "bias"]
        fired = fires(512)(packed)
        clear = pre.abs() > 0.02  # inputs were kept in 16 bit
        assert torch.equal(fired[clear], (pre > 0)[clear])
        assert 0.05 < float(fired.float().mean()) < 0.6


def test_models_that_use_no_predictors_are_refused_before_any_work(data, tmp_path, capsys):
    for variant, gate, message in (
        ("llama", "rows", "no neuron of this model is ever zero"),
        ("llama relu", "resident", "its gates are in memory and name exactly the neurons that fire"),
        ("mixtral", "rows", "a mixture of experts, whose router names the neurons"),
    ):
        convert(make_checkpoint(tmp_path / variant, VARIANTS[variant]), tmp_path / f"{variant}-flash", gate=gate)
        before = sorted(tmp_path.iterdir())
        assert train(tmp_path / f"{variant}-flash", data) == 2
        assert message in capsys.readouterr().err
        assert sorted(tmp_path.iterdir()) == before


def test_a_hugging_face_folder_is_converted_first(tiny, data, tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert train(tiny("float16").source, data, "--scratch", str(tmp_path / "scratch")) == 0
    (manifest,) = (tmp_path / ".cache/flashllm/models").glob("*/flashllm.json")
    assert Manifest.load(manifest.parent).calibration is not None
    Model.open(manifest.parent, RunConfig(threads=1)).close()


def test_8_bits_take_half_the_bytes_and_the_engine_names_what_was_judged(bare, data, opened, capsys):
    """The stored predictor, as the engine's kernels compute it, against the one that was calibrated."""
    sizes = {}
    for bits in ("8", "16"):
        model = bare(bits)
        assert train(model, data, "--bits", bits, "--ranks", "32", "--json") == 0
        sizes[bits] = json.loads(capsys.readouterr().out)["predictor_bytes"]
        tensors = load_file(model / PREDICTORS)
        assert tensors["layers.0.a"].dtype == {"8": torch.int8, "16": torch.float16}[bits]
        ffns = opened(model, mode="sparse").parts.ffns
        x = torch.randn((20, 64), generator=torch.Generator().manual_seed(1)).half()
        for layer, predictor in enumerate(load_predictors(model / PREDICTORS, Manifest.load(model))):
            logits = predictor.logits(x.float())
            clear = (logits - predictor.threshold).abs() > 1e-3 * logits.abs().max()
            for token, row in enumerate(x):
                named = torch.zeros(logits.shape[1], dtype=torch.bool)
                named[ffns[layer].predict(row.data_ptr())] = True
                assert torch.equal(named[clear[token]], (logits[token] > predictor.threshold)[clear[token]])
    assert sizes["8"] < 0.65 * sizes["16"]


def test_prefetch_predictors_tell_the_next_layer_from_the_input_before(bare, data, opened, capsys):
    model = bare()
    assert train(model, data, "--early", "0.5", "--ranks", "32", "--epochs", "4", "--json") == 0
    layers = json.loads(capsys.readouterr().out)["layers"]
    assert "early" not in layers[0]
    for layer in layers[1:]:
        early = layer["early"]
        assert early["rank"] == 16
        assert early["precision"] > 0.4  # asked for on other text
        assert early["precision"] > 1.5 * early["true_share"]  # by chance it would be the share itself
        assert early["recall"] > 2 * early["predicted_share"]
    tensors = load_file(model / PREDICTORS)
    assert "layers.0.early_a" not in tensors
    assert tensors["layers.2.early_a"].shape == (16, tensors["layers.2.a"].shape[1])
    engine = opened(model, mode="sparse")  # the engine takes the file as it is
    sequence = engine.new_sequence()
    for ids in ([2, 5, 9, 12], [7]):
        engine.step([(sequence, ids)])


def test_the_demo_is_retrained_by_the_readmes_line(tmp_path):
    """The line itself, on a copy and with few short samples; the options that decide what is trained stay."""
    copy, text = tmp_path / "demo", tmp_path / "words.txt"
    shutil.copytree(SCRIPT.parents[1] / "flashllm" / "demo", copy)
    before = (copy / PREDICTORS).read_bytes()
    text.write_text(" ".join(random.Random(1).choices(" ".join(SENTENCES).split(), k=4000)))
    small = ["--data-files", str(text), "--samples", "12", "--tokens-per-sample", "64", "--ranks", "8", "--epochs", "1"]
    assert train_predictor.main([str(copy), *readmes_options(), *small]) == 0
    assert (copy / PREDICTORS).read_bytes() != before
    Model.open(copy, RunConfig(threads=1)).close()


def test_the_umbrella_command_s_own_arguments_do_not_make_another_run(bare):
    manifest, rows = Manifest.load(bare()), np.zeros((2, 3), np.int64)
    args = train_predictor.build_parser().parse_args(["model", "--ranks", "8"])
    mine = train_predictor.identity(args, manifest, rows)
    args.main, args.verb = (lambda: None), "train"
    assert train_predictor.identity(args, manifest, rows) == mine
    args.ranks = "9"
    assert train_predictor.identity(args, manifest, rows) != mine


def test_layers_may_have_other_widths(data, tmp_path):
    """Each layer's predictors are of its own neurons; the scratch files hold codes of the widest."""
    _, model = make_model(tmp_path, "llama relu widths")
    widths = Manifest.load(model).architecture.every_width
    assert len(set(widths)) == 3
    assert train(model, data) == 0
    tensors = load_file(model / PREDICTORS)
    assert [tensors[f"layers.{layer}.bias"].shape[0] for layer in range(3)] == [*widths]
    calibration = Manifest.load(model).calibration
    assert all(0 < need <= width for need, width in zip(calibration.req, widths, strict=True))
    popularity = read_popularity(model, Manifest.load(model))
    assert [len(shares) for shares in popularity] == [*widths]
    with Model.open(model, RunConfig(threads=1, io_threads=4)) as loaded:
        sequence = loaded.new_sequence()
        loaded.step([(sequence, [5, 6, 7])])
        assert 0 < loaded.meter.take().active < 3 * sum(widths)


def test_layers_that_differ_in_heads_are_passed_one_by_one(variant_of, opened):
    """Each with room for its own keys and values: the FFNs see what they see in a prompt's pass through all."""
    model = opened(variant_of("differing relu layers")[1], mode="dense")
    shape = PassShape(samples=2, tokens=20, kept=20, d_model=64, d_ff=96)
    ids, one = np.random.default_rng(0).integers(4, 300, (2, 20)), LayerPass(model, shape)
    states, kept, edges = one.embed(ids), np.tile(np.arange(20), (2, 1)), np.ones((2, 96), np.float32)
    expected = Inputs()
    model.step([(model.new_sequence(), row.tolist()) for row in ids], observer=expected)
    for layer in range(3):
        states, inputs, _ = one.run(layer, states, kept, edges)
        np.testing.assert_array_equal(inputs, expected.seen[layer])


class Inputs:
    """Observer of the FFNs' inputs."""

    def __init__(self):
        self.seen = []

    def input(self, layer, x):
        self.seen.append(x.copy())

    def activations(self, layer, first, h):
        pass
