import dataclasses
import gzip
import json

import numpy as np
import pytest
import torch
from activity import aggregated_usage, friends, layer_activity, new_rows_per_token
from arch_models import LAYERS, VARIANTS, make_checkpoint, tokens
from evaluate import main, read_time, text_windows
from masked import MaskedModel, Variant, load_predictors, own_gates, untrained
from safetensors.torch import load_file, save_file
from scoring import score_items, score_text, windows
from tasks import TASKS, Item, answer_of, load_items
from weights import LayerWeights

from flashllm.base.text import inert
from flashllm.convert.named import demo_path
from flashllm.convert.run import convert
from flashllm.errors import UsageError
from flashllm.format.install import install_predictors
from flashllm.format.manifest import Manifest
from flashllm.format.model_files import FFN, PREDICTOR_METADATA, PREDICTORS
from flashllm.generate.tokenizer import Tokenizer
from flashllm.pack.sparsified import convert_sparsified
from flashllm.profile.costs import ReaderCosts
from flashllm.profile.machine import Profile
from flashllm.profile.store import device_of, save_profile, store_path

DTYPES = ("float32", "float16", "bfloat16")
TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 0.15}  # of logits of a few units


def masked_model(tiny, opened, dtype="float32", kind="random"):
    directory = tiny(dtype).path(kind)
    predictors = load_predictors(directory / PREDICTORS, Manifest.load(directory))
    return MaskedModel(opened(directory, mode="dense"), {Variant.TRAINED: predictors})


def token_ids(count):
    return torch.tensor([tokens(count)])


@pytest.mark.parametrize(
    ("dtype", "kind"),
    # In 16 bit a rounding can flip a prediction at the threshold; where only silent neurons lie there, it is no matter.
    [("float32", "random"), ("float32", "exact"), ("float16", "exact"), ("bfloat16", "exact")],
)
def test_masked_passes_compute_what_the_engine_computes(tiny, opened, dtype, kind):
    """Token by token through the engine's cache against one masked pass; random predictors miss two thirds."""
    model = masked_model(tiny, opened, dtype, kind)
    engine = opened(tiny(dtype).path(kind), mode="sparse")
    ids = token_ids(90)
    model.use(Variant.TRAINED)
    batched = model.logits(ids)
    with engine.new_sequence() as sequence:
        steps = [engine.step([(sequence, [token])]) for token in ids[0].tolist()]
    torch.testing.assert_close(batched[0], torch.from_numpy(np.concatenate(steps)), rtol=0, atol=TOLERANCE[dtype])
    model.use(Variant.DENSE)
    difference = float((model.logits(ids) - batched).abs().max())
    assert difference > 0.5 if kind == "random" else difference < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_dense_and_oracle_variants_are_the_hugging_face_model(tiny, opened, dtype):
    model, ids = masked_model(tiny, opened, dtype), token_ids(60)
    expected = tiny(dtype).reference(ids).logits.detach().float()
    for variant in (Variant.DENSE, Variant.ORACLE):
        model.use(variant)
        torch.testing.assert_close(model.logits(ids).float(), expected, rtol=0, atol=TOLERANCE[dtype])


@torch.no_grad()
def test_scores_of_a_text_against_the_hugging_face_model(tiny, opened):
    model, ids = masked_model(tiny, opened), token_ids(90).reshape(3, 30)
    scores = score_text(model, ids, {v: v for v in model.variants})
    reference = tiny("float32").reference
    loss = float(reference(ids, labels=ids).loss)
    assert scores[Variant.DENSE].perplexity == pytest.approx(np.exp(loss), rel=1e-4)
    assert scores[Variant.DENSE].tokens == 87
    assert scores[Variant.ORACLE].kl == pytest.approx(0.0, abs=1e-4)
    trained = scores[Variant.TRAINED]
    model.use(Variant.TRAINED)
    mine = torch.log_softmax(model.logits(ids)[:, :-1].float(), -1)
    theirs = torch.log_softmax(reference(ids).logits[:, :-1], -1)
    assert trained.kl == pytest.approx(float((theirs.exp() * (theirs - mine)).sum()), rel=1e-3)
    assert trained.kl > 0.01
    assert trained.same_top < trained.tokens


@torch.no_grad()
def test_items_are_scored_by_the_log_likelihood_of_their_choices(tiny, opened):
    model, tokenizer = masked_model(tiny, opened), Tokenizer.load(tiny("float32").path())
    items = [
        Item(prompts=("The little dog",), choices=(" ran to the tree", " was happy"), label=0, normalised=False),
        Item(prompts=("The little dog",), choices=(" ran to the tree", " was happy"), label=0, normalised=True),
        Item(prompts=("The cat said", "She was"), choices=(" home", " home"), label=1, normalised=False),
        Item(prompts=("One day a girl",), choices=(" found",), label=0, normalised=False),
    ]
    score = score_items(model, Variant.DENSE, items, tokenizer, context=96)

    def likelihood(prompt, choice):
        before, whole = (tokenizer.encode(text) for text in (prompt, prompt + choice))
        scored = torch.log_softmax(tiny("float32").reference(torch.tensor([whole])).logits[0].float(), -1)
        return sum(float(scored[at - 1, whole[at]]) for at in range(len(before), len(whole)))

    plain = [likelihood("The little dog", choice) for choice in items[0].choices]
    assert score.chosen[0] == int(np.argmax(plain))
    assert score.chosen[1] == int(np.argmax([v / len(c.strip()) for v, c in zip(plain, items[0].choices, strict=True)]))
    assert score.chosen[2] == int(likelihood("She was", " home") > likelihood("The cat said", " home"))
    assert score.items == 4


def test_the_space_before_a_choice_is_none_of_its_characters():
    item = Item(prompts=("It is",), choices=(" a", " two"), label=0, normalised=True)
    assert answer_of(item, (-1.0, -2.5), greedy=False) == (0, 1, True, False)
    assert answer_of(item, (-1.0, -3.5), greedy=False) == (0, 0, True, True)
    word = Item(prompts=("He said",), choices=(" no",), label=0, normalised=False)
    assert answer_of(word, (-9.0,), greedy=True) == (1, 1, True, True)
    assert answer_of(word, (-9.0,), greedy=False) == (0, 0, False, False)


def test_a_prompt_longer_than_the_context_is_cut_on_the_left(tiny, opened):
    model, tokenizer = masked_model(tiny, opened), Tokenizer.load(tiny("float32").path())
    long = "The little dog ran to the big tree and looked up. " * 30
    item = Item(prompts=(long,), choices=(" ran", " tree"), label=0, normalised=False)
    assert score_items(model, Variant.DENSE, [item], tokenizer, context=64).items == 1


ROWS = {
    "arc_easy": {"question": "Why?", "choices": ["a", "b"], "label": 1},
    "hellaswag": {"activity_label": "Cooking", "ctx": "A man", "endings": ["x", "y"], "label": 0},
    "copa": {"premise": "It rained, therefore", "choices": ["We left.", "I ran."], "label": 0},
    "winogrande": {"context_options": ["A", "B"], "continuation": "won.", "label": 1},
    "lambada": {"context": "He said", "target": "no"},
    "openbookqa": {"question": "Fog is at", "choices": ["sea", "land"], "label": 0},
    "piqa": {"goal": "How?", "choices": ["so", "thus"], "label": 1},
}
ITEMS = {
    "arc_easy": (("Question: Why?\nAnswer:",), (" a", " b"), 1),
    "hellaswag": (("Cooking: A man",), (" x", " y"), 0),
    "copa": (("It rained therefore",), (" we left.", " i ran."), 0),
    "winogrande": (("A", "B"), (" won.", " won."), 1),
    "lambada": (("He said",), (" no",), 0),
    "openbookqa": (("Fog is at",), (" sea", " land"), 0),
    "piqa": (("Question: How?\nAnswer:",), (" so", " thus"), 1),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_become_lm_evals_prompts(tmp_path, name):
    path = tmp_path / TASKS[name].file
    path.write_bytes(gzip.compress(json.dumps(ROWS[name]).encode() + b"\n"))
    (item,) = load_items(name, tmp_path, limit=5, seed=0)
    assert (item.prompts, item.choices, item.label) == ITEMS[name]


def test_hub_rows_become_the_local_files_rows():
    lettered = {"question": "Why?", "choices": {"text": ["a", "b"], "label": ["1", "2"]}, "answerKey": "2"}
    assert TASKS["arc_easy"].from_hub(lettered) == {"question": "Why?", "choices": ["a", "b"], "label": 1}
    row = TASKS["winogrande"].from_hub({"sentence": "So _ won.", "option1": "A", "option2": "B", "answer": "2"})
    assert row == {"context_options": ["So A", "So B"], "continuation": "won.", "label": 1}
    assert TASKS["lambada"].from_hub({"text": "He said no"}) == {"context": "He said", "target": "no"}


def test_errors_by_layer_are_counted_from_the_weights(tiny, opened):
    model = masked_model(tiny, opened)
    weights = tiny("float32").reference.state_dict()
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    predictor = model.predictors(Variant.TRAINED)[1]
    found = layer_activity(LayerWeights(model.model, 1), x, predictor)
    name = "model.decoder.layers.1.fc1."
    true = x @ weights[name + "weight"].T + weights[name + "bias"] > 0
    named = predictor.logits(x) > predictor.threshold
    errors = found.errors()
    assert errors["true_share"] == pytest.approx(float(true.float().mean()))
    assert errors["predicted_share"] == pytest.approx(float(named.float().mean()))
    assert errors["false_negative"] == pytest.approx(float((true & ~named).sum() / true.sum()))
    assert errors["false_positive"] == pytest.approx(float((named & ~true).sum() / (~true).sum()))
    assert errors["false_positive_mean_deviations"] < 0 < errors["false_negative_mean_deviations"]
    assert 0 < errors["missed_energy"] < 1


class Recorder:
    """Observes a pass: FFN inputs [tokens, d_model] and activations [tokens, d_ff] of every layer."""

    def __init__(self):
        self.inputs, self.activity = {}, {}

    def input(self, layer, x):
        self.inputs[layer] = torch.from_numpy(x.copy())

    def activations(self, layer, first, h):
        before = self.activity.get(layer, torch.empty(0, h.shape[1]))
        assert len(before) == first
        self.activity[layer] = torch.cat([before, torch.from_numpy(h.copy())])


@pytest.mark.parametrize(
    ("name", "gate", "encoding"),
    [
        *((name, "rows", None) for name in ("llama relu", "llama biases", "llama squared relu", "bamboo")),
        *(("fatrelu by layer", gate, None) for gate in ("rows", "resident")),
        ("llama biases", "resident", None),
        ("llama squared relu", "resident", "int8_32"),
        ("fatrelu by layer", "resident", "int8_32"),
    ],
)
def test_errors_of_gated_layers_are_those_of_what_the_engine_computes(opened, tmp_path, name, gate, encoding):
    """Gates, thresholds by layer and values of ups all count: who fires, and what misses cost."""
    source = make_checkpoint(tmp_path / "hf", VARIANTS[name])
    convert(source, tmp_path / "model", predictors=False, gate=gate, encoding=encoding)
    model, seen = opened(tmp_path / "model", mode="dense"), Recorder()
    with model.new_sequence() as sequence:
        model.step([(sequence, tokens(60))], all_logits=True, observer=seen)
    for layer, predictor in enumerate(untrained(model, [8] * LAYERS)):
        weights, x = LayerWeights(model, layer), seen.inputs[layer]
        errors = layer_activity(weights, x, predictor).errors()
        h = seen.activity[layer].T
        named = predictor.logits(x) > predictor.threshold
        energy = (h * torch.from_numpy(weights.down_norms())) ** 2
        assert errors["true_share"] == pytest.approx(float((h != 0).float().mean()), abs=1e-3)
        assert errors["false_negative"] == pytest.approx(float((~named & (h != 0)).sum() / (h != 0).sum()), abs=1e-3)
        assert errors["missed_energy"] == pytest.approx(float(energy[~named].sum() / energy.sum()), rel=1e-3, abs=1e-6)
        assert errors["false_negative"] < 0.1  # the predictors aim at where a neuron begins to fire
        assert errors["predicted_share"] < 1


@pytest.mark.parametrize("name", ["llama biases", "fatrelu by layer"])
def test_masked_passes_with_gates_in_4_bits_compute_what_the_engine_computes(opened, tmp_path, name):
    convert(make_checkpoint(tmp_path / "hf", VARIANTS[name]), tmp_path / "model", gate="4bit")
    dense = opened(tmp_path / "model", mode="dense")
    # Narrower margins than conversion chooses, so that neurons are missed.
    gates = [dataclasses.replace(gate, threshold=0.1 * gate.threshold) for gate in own_gates(dense)]
    tensors = load_file(tmp_path / "model" / PREDICTORS)
    for layer, gate in enumerate(gates):
        tensors[f"layers.{layer}.margin"] = torch.tensor([-gate.threshold]).half()
        gate.threshold = -float(tensors[f"layers.{layer}.margin"])
    metadata = {**PREDICTOR_METADATA, "model_sha256": dense.manifest.files[FFN].sha256}
    save_file(tensors, tmp_path / "narrow.safetensors", metadata=metadata)
    install_predictors(tmp_path / "model", tmp_path / "narrow.safetensors")
    engine = opened(tmp_path / "model", mode="sparse")
    model, ids = MaskedModel(dense, {Variant.GATES: gates}), token_ids(60)
    model.use(Variant.GATES)
    masked = model.logits(ids)
    with engine.new_sequence() as sequence:
        steps = [engine.step([(sequence, [token])]) for token in ids[0].tolist()]
    torch.testing.assert_close(masked[0], torch.from_numpy(np.concatenate(steps)), rtol=0, atol=1e-4)
    model.use(Variant.DENSE)
    assert float((model.logits(ids) - masked).abs().max()) > 0.01


def test_gates_in_4_bits_are_judged_and_layers_can_do_without_predictors(tmp_path, capsys):
    convert(make_checkpoint(tmp_path / "hf", VARIANTS["fatrelu by layer"]), tmp_path / "model", gate="4bit")
    arguments = ["--threads", "1", "--length", "32", "--tokens", "256", "--layer-tokens", "64"]
    arguments += ["--json", str(tmp_path / "report.json")]
    assert main([str(tmp_path / "model"), *arguments, "--without", "0", "1", str(LAYERS), "--no-svd"]) == 0
    captured = capsys.readouterr()
    report = json.loads((tmp_path / "report.json").read_text())
    assert set(report["perplexity"]) == {"dense", "oracle", "gates"}
    assert "layers_svd" not in report
    assert "untrained" not in captured.out
    assert max(layer["false_negative"] for layer in report["layers"]) < 0.05
    none, one, every = report["without"]
    missed = [layer["missed_energy"] for layer in report["layers"]]
    assert (none["layers"], one["layers"], every["layers"]) == ([], [missed.index(max(missed))], list(range(LAYERS)))
    assert none["predicted_share"] < one["predicted_share"] < every["predicted_share"] == 1
    assert none["kl"] == pytest.approx(report["kl"]["gates"])
    assert (every["kl"], every["same_top"]) == (pytest.approx(0, abs=1e-6), 1)
    assert every["perplexity"] == pytest.approx(every["perplexity_dense"], rel=1e-6)
    assert "## Layers left without predictors" in captured.out
    assert report["popularity"] is None
    assert "Popularity:" not in captured.out


def test_gates_in_memory_miss_nothing_and_thresholds_are_told(tmp_path, capsys):
    source = make_checkpoint(tmp_path / "hf", VARIANTS["llama"])
    (tmp_path / "text.txt").write_text("A boy had a red ball and a small dog. " * 300, encoding="utf-8")
    convert_sparsified(source, tmp_path / "model", 0.5, tmp_path / "text.txt", source_name="tiny", gate="resident")
    arguments = ["--threads", "1", "--length", "32", "--tokens", "256", "--layer-tokens", "64"]
    assert main([str(tmp_path / "model"), *arguments, "--no-svd", "--json", str(tmp_path / "report.json")]) == 0
    captured = capsys.readouterr()
    report = json.loads((tmp_path / "report.json").read_text())
    assert set(report["perplexity"]) == {"dense", "oracle", "gates"}
    assert report["perplexity"]["gates"] == pytest.approx(report["perplexity"]["dense"], rel=1e-5)
    assert max(layer["false_negative"] for layer in report["layers"]) < 1e-3
    assert 0.2 < np.mean([layer["predicted_share"] for layer in report["layers"]]) < 0.8
    assert "The dense model is the one with thresholds. When it was converted: " in captured.out
    assert "Popularity: of every neuron, on " in captured.out
    assert report["popularity"]["measured_on"] == "text.txt"
    assert report["sparsity"]["perplexity"] == Manifest.load(tmp_path / "model").sparsity.perplexity


def test_a_model_without_zeros_is_not_judged(tmp_path, capsys):
    convert(make_checkpoint(tmp_path / "hf", VARIANTS["llama"]), tmp_path / "model")
    assert main([str(tmp_path / "model")]) == 2
    assert "no neuron of this model is ever zero" in capsys.readouterr().err


def test_usage_and_misses_of_a_known_pattern():
    predicted = np.zeros((4, 4), dtype=bool)
    predicted[[0, 1, 2, 3], [0, 1, 0, 2]] = True
    assert aggregated_usage(predicted, (1, 2, 4)) == [0.25, pytest.approx(0.5), 0.75]
    assert new_rows_per_token(predicted, 1, 4) == 1.0  # the one token before never had it
    assert new_rows_per_token(predicted, 2, 4) == 0.5  # token 2 finds neuron 0 again
    # Two texts of two tokens: nothing is remembered from one to the next.
    assert new_rows_per_token(predicted, 1, 2) == 1.0


def test_friends_fire_together():
    rng = np.random.default_rng(0)
    true = rng.random((400, 12)) < 0.2
    true[:, 1] = true[:, 0]
    shares = friends(true, (1, 4))
    assert sum(share == 1.0 for share in shares[1]) == 2
    assert max(shares[4]) < 0.6
    assert friends(np.zeros((5, 12), dtype=bool), (1,)) == {1: []}


def test_a_text_without_tokens_is_refused(tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(UsageError, match="too little text"):
        text_windows(tmp_path / "empty.txt", Tokenizer.load(demo_path()), 8, 100)


def test_windows_leave_out_the_rest():
    assert windows(range(10), 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert windows(range(3), 4).tolist() == [[0, 1, 2]]


def test_untrained_predictors_find_most_of_what_fires(tiny, opened):
    model = opened(tiny("float32").path("bare"), mode="dense")
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    for layer, predictor in enumerate(untrained(model, [32, 32, 32])):
        errors = layer_activity(LayerWeights(model, layer), x, predictor).errors()
        assert errors["false_negative"] < 0.05
        assert errors["predicted_share"] < 0.9


def test_the_report_has_the_fields_others_build_on(tiny, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    row = {"question": "Why?", "choices": ["the big tree", "the moon"], "label": 1}
    (tmp_path / TASKS["arc_easy"].file).write_bytes(gzip.compress((json.dumps(row) + "\n").encode() * 3))
    out, page, plots = tmp_path / "o.json", tmp_path / "o.md", tmp_path / "plots"
    model = str(tiny("float16").path("random"))
    arguments = ["--threads", "1", "--length", "32", "--tokens", "256", "--layer-tokens", "64", "--curve"]
    arguments += ["--recalls", "0.9", "0.99", "--tasks", "arc_easy", "--tasks-dir", str(tmp_path)]
    arguments += ["--samples", "3", "--bandwidth", "2"]
    arguments += ["--json", str(out), "--markdown", str(page), "--plots", str(plots)]
    assert main([model, *arguments]) == 0
    assert capsys.readouterr().out == inert(page.read_text()) + "\n"
    report = json.loads(out.read_text())
    assert len(report["layers"]) == 3
    assert {"true_share", "predicted_share", "false_negative", "false_positive"} <= set(report["layers"][0])
    assert set(report["perplexity"]) == {"dense", "oracle", "trained", "svd"}
    assert set(report["kl"]) == set(report["agreement"]) == {"oracle", "trained", "svd"}
    assert report["kl"]["trained"] > report["kl"]["oracle"]
    assert report["tasks"]["arc_easy"]["items"] == 3
    assert report["curve"][0]["predicted_share"] < report["curve"][1]["predicted_share"]
    assert report["curve"][0]["io_ms_per_token"] == pytest.approx(report["curve"][0]["flash_bytes_per_token"] / 2e6)
    assert report["io_by"] == "2 GB/s"
    assert "appendix" not in page.read_text()
    assert {path.name for path in plots.iterdir()} >= {"preactivations.png", "usage.png", "coactivation.png"}


def test_read_times_come_from_the_drives_calibration(tmp_path, monkeypatch):
    reader = ReaderCosts(
        backend="threads", depth=32, latency_s=1e-3, sizes=(4096,), request_s=(1e-5,), beside_s=(1e-5,), lost_s=(1e-6,),
        gap_nbytes=0.0,
    )  # fmt: skip
    costs = Profile(
        readers=(reader,), sequential_bps=1e9, direct=True, dram_bps=1e10, gemv_bps={}, sparse_bps={},
        layer_overhead_s=0.0, scatter=1.0, again=1.0, threads=1,
        made="2026-11-21T00:00:00",
    )  # fmt: skip
    monkeypatch.setenv("HOME", str(tmp_path))
    seconds, known_by = read_time(tmp_path, 4096, None)
    assert (seconds([2e9, 1e9]), known_by) == (pytest.approx(3.0), "1 GB/s")
    save_profile(store_path(), device_of(tmp_path), costs)
    seconds, known_by = read_time(tmp_path, 4096, None)
    assert seconds([4096 * 100, 4096 * 50]) == pytest.approx(2e-3 + 150e-5)  # a barrier a layer
    assert known_by == "the drive's calibration"
    assert read_time(tmp_path, 4096, 2.0)[1] == "2 GB/s"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "chess"], "not one of hellaswag"),
        (["--json", "absent/report.json"], "absent is no folder"),
        (["--text", "absent.txt"], "cannot be read"),
        (["--tasks", "piqa", "--tasks-dir", "absent"], "absent"),
    ],
)
def test_wrong_arguments_are_named(tiny, capsys, arguments, message):
    short = ["--threads", "1", "--tokens", "32", "--length", "32", "--layer-tokens", "32"]
    assert main([str(tiny("float16").path("random")), *short, *arguments]) == 2
    assert message in capsys.readouterr().err
