import json
import os
import random
import re
import shutil
import signal
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
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
from flashllm.pack.score import Inputs

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


@dataclass
class Watched:
    """A training that nothing disturbed, and what it was seen to do."""

    model: Path
    report: dict
    out: str
    err: str
    limits: list  # of memory, of the models it opened
    chunks: list  # that each layer's predictor was fitted on
    judged: list  # inputs that each layer's predictor was judged on


@pytest.fixture(scope="module")
def plain_run(tiny, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    model = Path(shutil.copytree(tiny("float16").path("bare"), folder / "model"))
    seen = Watched(model, {}, "", "", [], [], [])
    fit, fit_layer = trainer.fit, trainer.Trainer._fit_layer

    def watched_fit(start, chunks, options, d_ff, held=None):
        if held is not None:  # else it is the step that is timed beforehand
            seen.chunks.append([(x.clone(), codes.clone()) for x, codes in chunks()])
        return fit(start, chunks, options, d_ff, held)

    def watched_fit_layer(self, layer):
        judged = self._record.chunks(layer, self.split.validation, self.split.end)
        seen.judged.append(torch.cat([x.clone() for x, _ in judged]))
        return fit_layer(self, layer)

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        patch.setattr(trainer, "fit", watched_fit)
        patch.setattr(trainer.Trainer, "_fit_layer", watched_fit_layer)
        note_limits(patch, seen.limits)
        assert train(model, data, "--json", str(folder / "report.json")) == 0
    seen.report, seen.out, seen.err = json.loads((folder / "report.json").read_text()), out.getvalue(), err.getvalue()
    return seen


def note_limits(patch, limits):
    """Put the memory limit of every model that is opened into the list."""
    real = Model.open

    def spy(directory, config):
        limits.append(config.memory)
        return real(directory, config)

    patch.setattr(Model, "open", spy)


def test_trains_installs_and_reports(plain_run, opened):
    model, report = plain_run.model, plain_run.report
    lines = {line.split()[0]: line for line in plain_run.out.splitlines()}
    assert list(lines) == ["predictors", "recall", "named", "popularity", "installed"]
    assert "of 3 layers, rank 8, " in lines["predictors"]
    shares = [layer["predicted_share"] for layer in report["layers"]]
    assert f" {np.mean(shares):.2%} of the neurons a token; " in lines["named"]
    assert str(model) in lines["installed"]
    before = plain_run.err.split("layer 0")[0]  # the plan comes before the work
    assert "memory:" in before
    assert "scratch:" in before
    assert re.search(r"about \d+ minutes", before)
    manifest = Manifest.load(model)
    assert manifest.calibration.req == tuple(layer["req"] for layer in report["layers"])
    assert all(layer["rank"] == 8 for layer in report["layers"])
    assert not model.with_name("model.predictors").exists()
    # The engine takes the file as it is.
    engine = opened(model, mode="sparse")
    engine.step([(engine.new_sequence(), [2, 5, 9, 12])])
    assert [len(p.a) for p in load_predictors(model / PREDICTORS, manifest)] == [8] * 3


def test_how_often_each_neuron_is_named_is_installed_with_the_predictors(plain_run):
    """Against the stored predictors, asked about the same inputs."""
    model, inputs, split = plain_run.model, plain_run.judged, trainer.Split.of(40)
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


def test_recorded_codes_are_the_dense_models_activity(plain_run, tiny):
    """The chunks the predictor is fitted on against the Hugging Face model's own activations."""
    weights = {name: value.float() for name, value in tiny("float16").reference.state_dict().items()}
    assert len(plain_run.chunks) == 3
    for layer, chunks in enumerate(plain_run.chunks):
        x, packed = chunks[0]
        name = f"model.decoder.layers.{layer}.fc1."
        pre = x.float() @ weights[name + "weight"].T + weights[name + "bias"]
        fired = fires(512)(packed)
        clear = pre.abs() > 0.02  # inputs were kept in 16 bit
        assert torch.equal(fired[clear], (pre > 0)[clear])
        assert 0.05 < float(fired.float().mean()) < 0.6


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


def test_memory_decides_nothing_but_whether_it_runs(bare, data, plain_run, monkeypatch, capsys):
    """Dense passes have no use for cached neurons; what is left of the limit is not theirs to fill."""
    limited, small, limits = bare("limited"), bare("small"), []
    held = psutil.Process().memory_info().rss  # by this process, after many tests perhaps a lot
    note_limits(monkeypatch, limits)
    assert train(limited, data, "--memory", "6GB") == 0
    assert (limited / PREDICTORS).read_bytes() == (plain_run.model / PREDICTORS).read_bytes()
    assert limits == pytest.approx(plain_run.limits, abs=100_000_000)  # the process has grown in between
    assert max(limits) < held + 1_500_000_000
    capsys.readouterr()
    assert train(small, data, "--memory", "100MB") == 1
    refusal = capsys.readouterr().err
    assert "100 MB cannot hold this training" in refusal
    assert "use --memory" in refusal
    assert PREDICTORS not in Manifest.load(small).files


def test_no_more_is_held_than_planned(bare):
    """What a batch holds while it passes, by tokens a sample, is counted before the work begins."""
    opened = ModelDir.open(bare())
    for tokens in (2, 24, 64, 65, 5000):
        shape = PassShape(samples=9, tokens=tokens, kept=1, d_model=64, d_ff=512)
        assert shape.batch_samples == 1 or shape.batch_tokens <= shape.kv_positions <= BATCH_TOKENS
        held = 4 * 10 * 64 * shape.batch_tokens + shape.kv_positions * 2 * opened.block.kv_dim * 2
        assert pass_nbytes(shape, opened.block, opened.manifest) > held


EARLY = ("--early", "0.5")


@pytest.fixture(scope="module")
def undisturbed_run(tiny, data, tmp_path_factory):
    """The model directory after a training that nothing interrupted."""
    whole = Path(shutil.copytree(tiny("float16").path("bare"), tmp_path_factory.mktemp("whole") / "model"))
    assert train(whole, data, *EARLY) == 0
    return whole


def killed_at(path, work):
    """Do `work` in a forked process that is killed as soon as there is a file of this path."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    deadline = time.monotonic() + 120
    while not path.exists() and os.waitpid(pid, os.WNOHANG) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL


def test_a_killed_run_resumes_with_the_same_results(bare, data, undisturbed_run, tmp_path):
    """Killed twice: while the model passes, and once a layer is trained."""
    whole, killed, scratch = undisturbed_run, bare("killed"), tmp_path / "scratch"
    options = [*EARLY, "--scratch", str(scratch)]
    for kill_at in ("passed.000.done", "layer.000.pt"):
        killed_at(scratch / kill_at, partial(train, killed, data, *options))
        assert (scratch / kill_at).exists()
        assert PREDICTORS not in Manifest.load(killed).files
        options = [*EARLY, "--scratch", str(scratch), "--resume"]
    assert train(killed, data, *options) == 0
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


def test_a_kill_while_tidying_up_leaves_nothing_that_is_believed(bare, data, plain_run, tmp_path):
    """The identity goes first; what other options find without one they do not use."""
    again, scratch = bare("again"), tmp_path / "scratch"
    scratch.mkdir()
    for name in ("passed.001.done", "layer.000.pt", "states.002.bin", "trained.safetensors"):
        (scratch / name).write_bytes(b"of another run")
    assert train(again, data, "--scratch", str(scratch), "--resume") == 0
    assert (again / PREDICTORS).read_bytes() == (plain_run.model / PREDICTORS).read_bytes()
    assert not scratch.exists()


def failing(error):
    def fail(*_args):
        raise error(28, "No space left on device")

    return fail


def test_a_full_disk_and_ctrl_c_end_in_a_line_and_resume(bare, data, plain_run, monkeypatch, capsys):
    model, resume = bare(), ()
    for error, status, message in ((OSError, 1, "No space left"), (KeyboardInterrupt, 130, "interrupted")):
        with monkeypatch.context() as patch:
            patch.setattr(trainer.Trainer, "_fit_layer", failing(error))
            assert train(model, data, *resume) == status
        last = capsys.readouterr().err.splitlines()[-1]
        assert message in last
        assert "--resume" in last
        resume = ("--resume",)
    assert train(model, data, "--resume") == 0
    assert (model / PREDICTORS).read_bytes() == (plain_run.model / PREDICTORS).read_bytes()


def test_a_damaged_layer_of_the_run_before_is_named(bare, data, monkeypatch, capsys):
    model = bare()
    scratch = model.with_name("scratch")
    path, real, fail = scratch / "layer.000.pt", trainer.Trainer._fit_layer, failing(OSError)
    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "_fit_layer", lambda self, layer: (fail if layer else real)(self, layer))
        assert train(model, data, "--scratch", str(scratch)) == 1
    for left in (b"", b"not what was written", path.read_bytes()[:-200]):
        path.write_bytes(left)
        capsys.readouterr()
        assert train(model, data, "--scratch", str(scratch), "--resume") == 1
        last = capsys.readouterr().err.splitlines()[-1]
        assert f"{path}: damaged" in last
        assert f"remove {scratch}" in last


def test_recipes_of_other_models_are_refused_and_ranks_are_no_more_than_the_width(bare, data, monkeypatch, capsys):
    """Rank 0, as in phi-2's recipe: a layer without a predictor computes everything."""
    model = bare()
    assert train(model, data, "--ranks", "opt-6.7b") == 2
    assert "written for 32 layers, this model has 3" in capsys.readouterr().err
    recipe = Recipe(name="a", ranks=((0, 8), (1, 0), (2, 9999)))
    monkeypatch.setattr(train_predictor, "parse_ranks", lambda _text: recipe)
    assert train(model, data) == 0
    tensors, manifest = load_file(model / PREDICTORS), Manifest.load(model)
    assert [len(tensors[f"layers.{layer}.a"]) for layer in range(3)] == [8, 1, manifest.architecture.d_model]
    assert float(tensors["layers.1.threshold"]) < float((tensors["layers.1.bias"]).min())
    assert manifest.calibration.mean_active[1] == 512


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


def test_epochs_0_calibrates_the_truncated_svd(bare, data, capsys):
    assert train(bare(), data, "--epochs", "0", "--json") == 0
    for layer in json.loads(capsys.readouterr().out)["layers"]:
        assert layer["false_negative"] == layer["svd"]["false_negative"]


def test_the_report_holds_on_the_samples_judged_and_fewer_positions_are_runs_of_each_sample(bare, data, capsys):
    assert train(bare(), data, "--recall", "0.9", "--positions", "400", "--json") == 0
    said = capsys.readouterr()
    for layer in json.loads(said.out)["layers"]:
        assert 0.0 < layer["true_share"] < layer["predicted_share"] < 1.0
        assert layer["false_negative"] < 0.3
        recalls = [point["recall"] for point in layer["curve"]]
        shares = [point["predicted_share"] for point in layer["curve"]]
        assert recalls == sorted(recalls)
        assert shares == sorted(shares)
    assert "trained on 10 positions of each" in said.err
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


def test_fewer_bits_take_fewer_bytes_and_the_engine_names_what_was_judged(bare, data, opened, capsys):
    """The stored predictor, as the engine's kernels compute it, against the one that was calibrated."""
    sizes, model = {}, bare()
    for bits, rank in (("4", "40"), ("8", "32"), ("16", "32")):  # each run's predictors take the last one's place
        assert train(model, data, "--bits", bits, "--ranks", rank, "--json") == 0
        sizes[bits] = json.loads(capsys.readouterr().out)["predictor_bytes"]
        tensors = load_file(model / PREDICTORS)
        assert tensors["layers.0.a"].dtype == {"4": torch.uint8, "8": torch.int8, "16": torch.float16}[bits]
        ffns = opened(model, mode="sparse").parts.ffns
        x = torch.randn((20, 64), generator=torch.Generator().manual_seed(1)).half()
        for layer, predictor in enumerate(load_predictors(model / PREDICTORS, Manifest.load(model))):
            logits = predictor.logits(x.float())
            tolerance = 2e-2 if bits == "4" else 1e-3  # inputs have 8 bits where weights have 4
            clear = (logits - predictor.threshold).abs() > tolerance * logits.abs().max()
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


def test_the_demo_is_retrained_by_the_readmes_line(tmp_path, monkeypatch):
    """The line itself, on a copy, with few short samples and for two layers; how they are trained stays."""
    copy, text, fitted = tmp_path / "demo", tmp_path / "words.txt", []
    real = trainer.Trainer._fit_layer

    def fit_two(self, layer):
        if layer == 2:
            raise KeyboardInterrupt
        fitted.append(real(self, layer))
        return fitted[-1]

    monkeypatch.setattr(trainer.Trainer, "_fit_layer", fit_two)
    shutil.copytree(SCRIPT.parents[1] / "flashllm" / "demo", copy)
    text.write_text(" ".join(random.Random(1).choices(" ".join(SENTENCES).split(), k=4000)))
    small = ["--data-files", str(text), "--samples", "12", "--tokens-per-sample", "64", "--ranks", "8", "--epochs", "1"]
    assert train_predictor.main([str(copy), *readmes_options(), *small]) == 130
    assert len(fitted) == 2


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
    expected = Inputs(layers=3, step=1)
    model.step([(model.new_sequence(), row.tolist()) for row in ids], observer=expected)
    for layer in range(3):
        states, inputs, _ = one.run(layer, states, kept, edges)
        np.testing.assert_array_equal(inputs, expected.of(layer))
