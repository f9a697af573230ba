"""Thresholds on gates: their share, the same function in every pass, what they cost, and that nobody overlooks it."""

import json

import numpy as np
import pytest
import torch
from arch_models import LAYERS, VARIANTS, make_checkpoint, scale
from arch_reference import ReferenceDecoder
from tiny_models import SENTENCES

from flashllm.cli import main
from flashllm.config import RunConfig
from flashllm.convert.run import convert
from flashllm.engine.model import Model
from flashllm.errors import FlashError, FormatError, UnsupportedModelError, UsageError
from flashllm.format.manifest import MANIFEST, Manifest
from flashllm.format.model_dir import ModelDir
from flashllm.format.popularity import read_popularity
from flashllm.format.report.inspect import format_inspection, inspect
from flashllm.format.report.verify import verify
from flashllm.generate.tokenizer import Tokenizer
from flashllm.offload.runtime.tiers.source import open_weights
from flashllm.pack.score import split_windows
from flashllm.pack.sparsified import _patched, convert_sparsified, sparsify

IDS = np.random.default_rng(5).integers(4, 300, 90).tolist()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "sample.txt"
    words = " ".join(SENTENCES).split()
    path.write_text(" ".join(np.random.default_rng(0).choice(words, 1200)))
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("hf") / "hf", VARIANTS["llama"])


@pytest.fixture(scope="module")
def models(tmp_path_factory, source, text):
    """{gate: a SiLU model with half of its neurons cut}."""
    root = tmp_path_factory.mktemp("sparsified")
    for gate in ("resident", "4bit"):
        convert_sparsified(source, root / gate, 0.5, text, source_name="tiny", gate=gate)
    return {gate: root / gate for gate in ("resident", "4bit")}


def fails(*args, **kwargs):
    raise KeyboardInterrupt


def run(directory, mode, ids=IDS, **config):
    with Model.open(directory, RunConfig(mode=mode, threads=2, io_threads=4, **config)) as model:
        logits = model.step([(model.new_sequence(), ids)], all_logits=True)
        return logits, model.meter.take()


def test_the_manifest_says_what_was_cut_and_what_it_costs(models, text):
    for directory in models.values():
        sparsity = Manifest.load(directory).sparsity
        assert sparsity is not None
        assert len(sparsity.cuts) == LAYERS
        assert all(0 < cut < 2 for cut in sparsity.cuts)
        assert sparsity.zeros == pytest.approx(0.5, abs=0.05)
        assert sparsity.dense_perplexity != sparsity.perplexity
        assert (sparsity.share, sparsity.text) == (0.5, text.name)
        assert sparsity.scored_tokens > 500
        assert verify(directory).ok
        line = format_inspection(inspect(directory))
        assert "of the neurons are zero by thresholds on the gate; perplexity" in line
        assert inspect(directory)["modes"] == ["sparse", "oracle", "dense"]


def test_every_pass_computes_the_same_function(models):
    """What the cuts leave, as plain torch computes it."""
    directory = models["resident"]
    reference = ReferenceDecoder(directory).logits(IDS).numpy()
    assert np.abs(reference - ReferenceDecoder(directory, cuts=False).logits(IDS).numpy()).max() > 0.01
    for mode, prompts in (("dense", "dense"), ("sparse", "dense"), ("sparse", "sparse"), ("oracle", "sparse")):
        logits, _ = run(directory, mode, prompts=prompts)
        np.testing.assert_allclose(logits, reference, atol=2e-3, rtol=0)


def test_a_resident_gate_computes_no_neuron_in_vain(models):
    sparsity = Manifest.load(models["resident"]).sparsity
    exact, times = run(models["resident"], "sparse", prompts="sparse")
    assert times.active / (LAYERS * 96 * len(IDS)) == pytest.approx(1 - sparsity.zeros, abs=0.06)
    rows, firing = run(models["4bit"], "oracle", prompts="sparse")
    assert firing.active == times.active
    assert np.array_equal(exact, rows)


def test_gates_in_4_bits_find_what_is_left(models):
    exact, firing = run(models["4bit"], "oracle", prompts="sparse")
    found, named = run(models["4bit"], "sparse", prompts="sparse")
    assert firing.active < named.active < 1.5 * firing.active
    assert np.abs(found - exact).mean() < 0.05 * exact.std()


def test_how_often_each_neuron_is_named_is_kept(models, text):
    """By what the cuts leave of the text that chose them; gates in 4 bits name some more."""
    sums = {}
    for gate, directory in models.items():
        manifest = Manifest.load(directory)
        popularity = read_popularity(directory, manifest)
        assert [len(shares) for shares in popularity] == [96] * LAYERS
        assert all(len(np.unique(shares)) > 10 for shares in popularity)
        sums[gate] = sum(float(shares.sum()) for shares in popularity)
        assert f"tokens: {text.name}" in format_inspection(inspect(directory))
    assert sums["resident"] == pytest.approx(0.5 * 96 * LAYERS, rel=0.01)
    assert sums["resident"] < sums["4bit"] < 1.5 * sums["resident"]
    ids = Tokenizer.load(models["4bit"]).encode(text.read_text(), add_special=False)[:150]
    for gate, directory in models.items():  # another pass over such text names about as many
        _, times = run(directory, "sparse", ids, prompts="sparse")
        assert times.active / len(ids) == pytest.approx(sums[gate], rel=0.15)


def test_the_command_prints_the_cost(source, text, tmp_path, capsys):
    arguments = ["convert", str(source), str(tmp_path / "model"), "--sparsify", "0.3", "--text", str(text)]
    assert main(arguments) == 0
    said = capsys.readouterr()
    assert "of the neurons are zero by thresholds on the gate; perplexity" in said.err
    assert said.out.strip() == str(tmp_path / "model")
    assert Manifest.load(tmp_path / "model").resident_gate
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_interrupted_run_goes_on_from_the_dense_model(source, text, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr("flashllm.pack.sparsified.sparsify", fails)
        with pytest.raises(KeyboardInterrupt):
            convert_sparsified(source, tmp_path / "model", 0.3, text, source_name="tiny")
    dense = tmp_path / "model.dense"
    assert Manifest.load(dense).sparsity is None
    with pytest.raises(UsageError, match="left from another conversion"):
        convert_sparsified(source, tmp_path / "model", 0.3, text, source_name="other")
    with pytest.raises(UsageError, match="left from another conversion"):
        convert_sparsified(source, tmp_path / "model", 0.3, text, source_name="tiny", gate="4bit")
    monkeypatch.setattr("flashllm.pack.sparsified.convert", fails)  # not again
    assert convert_sparsified(source, tmp_path / "model", 0.3, text, source_name="tiny").sparsity is not None
    assert not dense.exists()
    with pytest.raises(UsageError, match="exists"):
        convert_sparsified(source, tmp_path / "model", 0.3, text, source_name="tiny")


def test_a_dense_model_of_other_weights_is_not_gone_on_with(text, tmp_path, monkeypatch):
    """Though their folder has the same name."""
    one, two = (make_checkpoint(tmp_path / name / "hf", VARIANTS["llama"]) for name in ("one", "two"))
    with monkeypatch.context() as patched:
        patched.setattr("flashllm.pack.sparsified.sparsify", fails)
        with pytest.raises(KeyboardInterrupt):
            convert_sparsified(one, tmp_path / "model", 0.3, text)
    with pytest.raises(UsageError, match="left from another conversion"):
        convert_sparsified(two, tmp_path / "model", 0.3, text)
    convert_sparsified(one, tmp_path / "model", 0.3, text)
    assert not (tmp_path / "model" / ".made_from").exists()


def test_a_model_that_12_bits_cannot_hold_is_gone_on_with(text, tmp_path, monkeypatch):
    source = make_checkpoint(tmp_path / "hf", VARIANTS["llama"], dtype="bfloat16")
    scale(source, "model.layers.0.mlp.up_proj.weight", torch.logspace(-30, 0, 64, dtype=torch.bfloat16))
    with monkeypatch.context() as patched:
        patched.setattr("flashllm.pack.sparsified.sparsify", fails)
        with pytest.raises(KeyboardInterrupt):
            convert_sparsified(source, tmp_path / "model", 0.3, text, encoding="bf12")
    assert Manifest.load(tmp_path / "model.dense").rows.encoding == "bfloat16"
    assert convert_sparsified(source, tmp_path / "model", 0.3, text, encoding="bf12").sparsity is not None


def test_a_model_without_a_finite_loss_is_refused(text, tmp_path):
    source = make_checkpoint(tmp_path / "hf", VARIANTS["llama"])
    scale(source, "lm_head.weight", 1e6)
    with pytest.raises(FlashError, match=r"computes no finite loss on sample\.txt"):
        convert_sparsified(source, tmp_path / "model", 0.3, text)


@pytest.mark.parametrize("chunk", [16, 64, 1 << 20])
def test_bytes_are_replaced_in_any_chunk(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr("flashllm.base.files.CHUNK_NBYTES", chunk)
    content = bytearray(range(200))
    (tmp_path / "file").write_bytes(content)
    found = b"".join(_patched(tmp_path / "file", {198: b"ab", 0: b"cd", 14: b"ef", 64: b"gh"}))
    for offset, stored in ((198, b"ab"), (0, b"cd"), (14, b"ef"), (64, b"gh")):
        content[offset : offset + 2] = stored
    assert found == content


def test_dense_stays_the_default(source, tmp_path):
    convert(source, tmp_path / "model", predictors=True)
    assert Manifest.load(tmp_path / "model").sparsity is None
    assert "sparsity" not in json.loads((tmp_path / "model" / MANIFEST).read_text())
    with pytest.raises(UsageError, match=r"mode sparse needs an activation of the ReLU family.*--sparsify"):
        Model.open(tmp_path / "model", RunConfig(mode="sparse"))


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5, float("nan")])
def test_shares_that_cannot_be_are_refused(models, text, share):
    with pytest.raises(UsageError, match="between 0 and 1"):
        sparsify(models["resident"], share, text)


def test_what_cannot_be_sparsified_is_refused(source, text, tmp_path):
    with pytest.raises(UsageError, match="--gate resident or 4bit"):
        convert_sparsified(source, tmp_path / "a", 0.5, text, source_name="tiny", gate="rows")
    convert(source, tmp_path / "rows", predictors=True)
    with pytest.raises(UsageError, match="needs gates that name the active neurons"):
        sparsify(tmp_path / "rows", 0.5, text)
    opt = make_checkpoint(tmp_path / "opt", VARIANTS["opt"])
    with pytest.raises(UsageError, match="has no gate"):
        convert_sparsified(opt, tmp_path / "b", 0.5, text, source_name="tiny")
    short = tmp_path / "short.txt"
    short.write_text("One day.")
    with pytest.raises(UsageError, match="at least 64 are needed"):
        convert_sparsified(source, tmp_path / "c", 0.5, short, source_name="tiny")
    with pytest.raises(UsageError, match="cannot be read as text"):
        convert_sparsified(source, tmp_path / "d", 0.5, tmp_path / "none.txt", source_name="tiny")


def test_the_throughput_engine_refuses_thresholds(models):
    with pytest.raises(UnsupportedModelError, match="has thresholds"):
        open_weights(models["resident"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cuts": [0.1]}, "sparsity has 1 layers, not 3"),
        ({"cuts": [0.1, 0.1, -1]}, "cuts must be numbers from 0"),
        ({"cuts": 3}, "cuts"),
        ({"zeros": "half"}, "zeros must be a number"),
        ({"more": 1}, "the key 'more' is unknown"),
    ],
)
def test_a_damaged_record_is_refused(models, tmp_path, change, message):
    value = json.loads((models["resident"] / MANIFEST).read_text())
    value["sparsity"] |= change
    for path in models["resident"].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / MANIFEST).write_text(json.dumps(value))
    with pytest.raises(FormatError, match=message):
        ModelDir.open(tmp_path)


def test_windows_alternate_between_calibrating_and_scoring():
    calibrating, scored = split_windows(list(range(10_000)), 100)
    assert {len(window) for window in (*calibrating, *scored)} == {100}
    assert len(calibrating) + len(scored) == 81
    assert not {token for window in calibrating for token in window} & {token for window in scored for token in window}
    assert torch.tensor(scored).max() > 9000
