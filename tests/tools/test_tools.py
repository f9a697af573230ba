"""The tools and the window benchmark, with tiny arguments."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
import torch
from activity_trace import Stream, Trace
from build_wheels import build
from install_popularity import measure_popularity
from predictor_files import MARGIN
from record_trace import pieces
from scripts import REPOSITORY, document_of, run_python, run_script, write_gz
from synthetic.trace import write_synthetic_trace
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from traced import TracedModel
from traces import masks_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from flashllm.cli import main
from flashllm.config import RunConfig
from flashllm.engine.model import Model
from flashllm.format.manifest import Manifest
from flashllm.format.popularity import read_popularity


@pytest.fixture
def shards(tmp_path):
    text = "The fox ran over the hill, and the old dog slept in the sun. {} Then it rained, and they went home. "
    paths = {}
    for name, count in (("books", 40), ("stories", 10), ("validation", 10)):
        rows = ({"text": text.format(i) * 4} for i in range(count))
        paths[name] = write_gz(tmp_path / f"{name}.jsonl.gz", rows)
    return paths


def actives(out, tokens):
    """Neurons of the passes over each of these tokens, after a prompt of 12."""
    with TracedModel.open(out, RunConfig(threads=1, io_threads=4)) as model, model.new_sequence() as sequence:
        assert "synthetic weights, synthetic trace" in model.activity_source
        model.step([(sequence, range(4, 16))])
        model.meter.restart()
        found = []
        for token in tokens:
            model.step([(sequence, [token])])
            found.append(model.meter.take().active)
        return found, model.activity_source


def test_the_demo_script_trains_saves_resumes_and_refuses_a_checkpoint_of_another_recipe(shards, tmp_path):
    small = ["--vocab-size", 300, "--hidden-size", 32, "--ffn-dim", 64, "--num-layers", 2, "--num-heads", 2]
    small += ["--context", 64, "--window", 32, "--batch", 4, "--eval-tokens", 640]
    small += [part for name in shards for part in (f"--{name}", shards[name])]
    small += ["--work", tmp_path / "w"]
    first = run_script("tools/train_demo_model.py", *small, "--out", tmp_path / "a", "--tokens", 2560)
    report = json.loads((tmp_path / "a" / "training_report.json").read_text())
    assert report == document_of(first)
    assert 1 < report["perplexity"] < 300  # a uniform guess over the vocabulary is 300
    assert len(report["activity_per_layer"]) == 2
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert model.config.ffn_dim == 64
    text = "The fox ran."
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text

    more = run_script("tools/train_demo_model.py", *small, "--out", tmp_path / "b", "--tokens", 5120)
    assert "resumed at step 20" in more.stdout
    other = run_script("tools/train_demo_model.py", *small, "--out", tmp_path / "c", "--batch", 2, status=1)
    assert "another recipe" in other.stderr


def test_a_dummy_checkpoint_converts_and_fires_as_asked(tmp_path):
    small = ["--shape", "opt-125m", "--layers", 1, "--tokenizer", REPOSITORY / "flashllm" / "demo"]
    run_script("tools/make_dummy_checkpoint.py", tmp_path / "hf", *small)
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "m")]) == 0
    active = []
    with Model.open(tmp_path / "m", RunConfig(mode="oracle", context=64)) as model, model.new_sequence() as sequence:
        for token in range(5, 14):
            model.step([(sequence, [token])])
            active.append(model.meter.take().active)
            model.meter.restart()
    share = sum(active[1:]) / len(active[1:]) / 3072
    assert 0.02 < share < 0.10


def test_a_trace_is_what_the_model_did(tiny, tmp_path):
    model = tiny("float32")
    texts = {"a.txt": "One day a girl found a house in the forest. " * 4, "b.jsonl.gz": "It was home. " * 30}
    (tmp_path / "a.txt").write_text(texts["a.txt"])
    write_gz(tmp_path / "b.jsonl.gz", [{"text": texts["b.jsonl.gz"]}] * 2)
    out = tmp_path / "trace"
    arguments = [model.path("exact"), "--text", *(tmp_path / name for name in texts), "--tokens", 220, "--out", out]
    run_script("tools/record_trace.py", *arguments)
    with Trace(out) as trace:
        info = trace.info
        active, firing, prefetch = (
            np.stack([masks_of(trace, layer, stream) for layer in range(3)]) for stream in Stream
        )
    assert (info.num_tokens, info.num_layers, info.num_neurons, info.synthetic) == (220, 3, 512, False)
    assert info.sequence_starts[0] == 0
    assert len(info.sequence_starts) >= 3  # of 96 tokens at most
    assert not (firing & ~active).any()  # these predictors name what comes near to firing, too
    assert 0 < (active & ~firing).mean() < 0.05
    assert not prefetch[0].any()
    assert prefetch[1:].any(axis=2).all()
    # The first sequence, against the dense model.
    ids = model.tokenizer(texts["a.txt"])["input_ids"][: info.sequence_starts[1]]
    inputs = {}
    for index, layer in enumerate(model.reference.model.decoder.layers):
        layer.fc1.register_forward_hook(lambda _m, x, y, index=index: inputs.update({index: (x[0].detach(), y > 0)}))
    with torch.no_grad():
        model.reference(torch.tensor([ids]))
    for layer, (_, fires) in inputs.items():
        assert (fires.reshape(len(ids), -1).numpy() == firing[layer, : len(ids)]).mean() > 0.999
    named = model.reference.model.decoder.layers[2].fc1(inputs[1][0]).reshape(len(ids), -1) > -MARGIN
    assert (named.numpy() == prefetch[2, : len(ids)]).mean() > 0.999
    assert "exists" in run_script("tools/record_trace.py", *arguments, status=1).stderr
    arguments[-1], arguments[arguments.index(220)] = tmp_path / "more", 10**6
    assert "lower --tokens" in run_script("tools/record_trace.py", *arguments, status=1).stderr


def test_a_stretch_without_tokens_is_passed_over():
    backend = tokenizers.Tokenizer(WordLevel({"a": 0, "?": 1}, unk_token="?"))
    backend.pre_tokenizer = Whitespace()
    text = f"{' ' * 40}a{' ' * 40}a"
    assert list(pieces(text, SimpleNamespace(backend=backend), 2)) == [[0], [0]]


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory):
    out = tmp_path_factory.mktemp("synthetic") / "model"
    small = ["--shape", "opt-125m", "--layers", 2, "--hidden", 192, "--vocab", 8192, "--tokens", 20]
    run_script("tools/make_synthetic_model.py", out, *small, "--dtype", "float32")
    return out


def test_a_synthetic_model_knows_its_popular_neurons_from_another_trace(synthetic):
    shares = read_popularity(synthetic, Manifest.load(synthetic))
    with Trace(synthetic / "trace.safetensors") as trace:
        judged = measure_popularity(trace)
    assert not np.array_equal(shares, judged)
    assert all(np.corrcoef(known, seen)[0, 1] > 0.8 for known, seen in zip(shares, judged, strict=True))


def test_a_synthetic_model_computes_what_its_trace_says(synthetic):
    prompt, steps = 12, 9
    tokens = {}
    with Trace(synthetic / "trace.safetensors") as trace:
        active = [masks_of(trace, layer).sum(1) for layer in range(2)]
    for window in (1, 4):
        with (
            TracedModel.open(synthetic, RunConfig(window=window, context=64)) as model,
            model.new_sequence() as sequence,
        ):
            logits = model.step([(sequence, range(prompt))])
            model.meter.restart()
            tokens[window] = []
            for step in range(steps):  # beyond the trace's end, where it begins again
                tokens[window].append(int(logits[0].argmax()))
                logits = model.step([(sequence, tokens[window][-1:])])
                position = (prompt + step) % 20
                assert model.meter.take().active == sum(layer[position] for layer in active)
            assert "synthetic weights, synthetic trace" in model.activity_source
            assert any("synthetic weights" in notice for notice in model.notices)
    assert tokens[1] == tokens[4]


def test_a_command_runs_on_a_synthetic_model_by_its_trace(synthetic):
    asked = ["generate", synthetic, "--prompt", "Once", "--max-new-tokens", 3, "--json"]
    # In a process of its own: the seam is there before the commands are imported.
    done = run_python(REPOSITORY / "bench/engine/traced.py", *asked)
    assert "synthetic weights, synthetic trace" in done.stderr
    with Trace(synthetic / "trace.safetensors") as trace:
        active = sum(masks_of(trace, layer).sum(1) for layer in range(2)).tolist()
    found = [token["active"] for token in json.loads(done.stdout)["tokens"][1:]]  # the first comes out of the prompt
    assert found in [active[first : first + 2] for first in range(len(active))]


def test_synthetic_experts_are_those_of_their_trace(tmp_path):
    out, size, chosen = tmp_path / "model", 32, 8
    small = {"hidden_size": 64, "intermediate_size": size, "num_attention_heads": 4, "num_experts": 16}
    small |= {"vocab_size": 8192, "max_position_embeddings": 64}
    sizes = ["--layers", 2, "--tokens", 20, "--config", json.dumps(small)]
    done = run_script("tools/make_synthetic_experts.py", out, *sizes)
    assert "8 of 16 experts" in done.stderr
    with Trace(out / "trace.safetensors") as trace:
        masks = masks_of(trace, 1).reshape(20, 16, size)
    assert np.array_equal(masks.any(-1), masks.all(-1))
    assert np.all(masks.any(-1).sum(-1) == chosen)
    found, source = actives(out, range(4, 9))
    assert found == [2 * chosen * size] * 5
    assert "synthetic weights, synthetic trace of routing" in source


@pytest.mark.parametrize("gate", ["resident", "rows"])
def test_a_synthetic_gated_model_runs_by_its_trace(tmp_path, gate):
    out, small = tmp_path / "model", {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4}
    small |= {"vocab_size": 8192, "max_position_embeddings": 64}
    sizes = ["--layers", 2, "--tokens", 20, "--learn-tokens", 20, "--config", json.dumps(small)]
    run_script("tools/make_synthetic_gated.py", out, "--gate", gate, *sizes)
    with Trace(out / "trace.safetensors") as trace:
        active = [masks_of(trace, layer).sum(1) for layer in range(2)]
        firing = [masks_of(trace, layer, Stream.FIRING).sum(1) for layer in range(2)]
    assert all(np.array_equal(a, f) == (gate == "resident") for a, f in zip(active, firing, strict=True))
    assert actives(out, [4])[0] == [sum(layer[12] for layer in active)]


def test_a_synthetic_trace_has_the_statistics_it_promises(tmp_path):
    for part in ("learn", "judge"):
        write_synthetic_trace(tmp_path / part, layers=3, neurons=2048, tokens=300, part=part, recall=0.6, precision=0.8)
    with Trace(tmp_path / "learn") as learn, Trace(tmp_path / "judge") as judge:
        assert judge.info.synthetic
        first, middle = masks_of(judge, 0), masks_of(judge, 1)
        assert first.mean() == pytest.approx(0.06, abs=0.015)
        assert middle.mean() == pytest.approx(0.10, abs=0.015)
        new = [(middle[t] & ~middle[t - 4 : t].any(0)).mean() for t in range(4, 300)]
        assert sum(new) / len(new) == pytest.approx(0.024, abs=0.006)  # paper A, section 3.1
        firing, prefetch = masks_of(judge, 1, Stream.FIRING), masks_of(judge, 1, Stream.PREFETCH)
        assert not (firing & ~middle).any()
        assert firing.sum() / middle.sum() == pytest.approx(1 / 3, abs=0.02)
        assert (prefetch & middle).sum() / middle.sum() == pytest.approx(0.6, abs=0.02)
        assert (prefetch & middle).sum() / prefetch.sum() == pytest.approx(0.8, abs=0.02)
        assert not masks_of(judge, 0, Stream.PREFETCH).any()
        other = masks_of(learn, 1)
        assert not np.array_equal(other, middle)
        assert np.corrcoef(other.mean(0), middle.mean(0))[0, 1] > 0.95  # the same popularity


def test_two_builds_of_one_wheel_take_turns(tmp_path, monkeypatch):
    building, most = [], []

    def built(arch, folder, out):
        building.append(arch)
        most.append(len(building))
        time.sleep(0.05)
        building.remove(arch)
        return out

    monkeypatch.setattr("build_wheels.REPOSITORY", tmp_path)
    monkeypatch.setattr("build_wheels._build", built)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(build, ["x86_64"] * 4, [tmp_path] * 4)) == [tmp_path] * 4
    assert most == [1] * 4
