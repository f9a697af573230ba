"""The tools and the window benchmark, run as a user runs them, with tiny arguments."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from predictor_files import MARGIN
from transformers import AutoModelForCausalLM, AutoTokenizer

from flashllm.trace import Stream, Trace

REPOSITORY = Path(__file__).resolve().parents[1]


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPOSITORY / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def shards(tmp_path):
    text = "The fox ran over the hill, and the old dog slept in the sun. {} Then it rained, and they went home. "
    paths = {}
    for name, count in (("books", 40), ("stories", 10), ("validation", 10)):
        paths[name] = tmp_path / f"{name}.jsonl.gz"
        with gzip.open(paths[name], "wt", encoding="utf-8") as lines:
            for i in range(count):
                lines.write(json.dumps({"text": text.format(i) * 4}) + "\n")
    return paths


def test_the_demo_script_trains_saves_and_resumes(shards, tmp_path):
    small = ["--vocab-size", 300, "--hidden-size", 32, "--ffn-dim", 64, "--num-layers", 2, "--num-heads", 2]
    small += ["--context", 64, "--window", 32, "--batch", 4, "--eval-tokens", 640]
    small += [part for name in shards for part in (f"--{name}", shards[name])]
    first = run(
        "tools/train_demo_model.py", *small, "--work", tmp_path / "w", "--out", tmp_path / "a", "--tokens", 2560
    )
    assert first.returncode == 0, first.stderr
    report = json.loads((tmp_path / "a" / "training_report.json").read_text())
    assert report == json.loads(first.stdout.splitlines()[-1])
    assert 1 < report["perplexity"] < 300  # a uniform guess over the vocabulary is 300
    assert len(report["activity_per_layer"]) == 2
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert model.config.ffn_dim == 64
    text = "The fox ran."
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text

    again = run(
        "tools/train_demo_model.py", *small, "--work", tmp_path / "w", "--out", tmp_path / "b", "--tokens", 5120
    )
    assert again.returncode == 0, again.stderr
    assert "resumed at step 20" in again.stdout


def test_a_checkpoint_of_another_recipe_is_refused(shards, tmp_path):
    small = ["--vocab-size", 300, "--hidden-size", 32, "--ffn-dim", 64, "--num-layers", 1, "--num-heads", 2]
    small += ["--context", 64, "--window", 32, "--eval-tokens", 64, "--tokens", 64, "--work", tmp_path / "w"]
    small += [part for name in shards for part in (f"--{name}", shards[name])]
    assert run("tools/train_demo_model.py", *small, "--batch", 2, "--out", tmp_path / "a").returncode == 0
    other = run("tools/train_demo_model.py", *small, "--batch", 4, "--out", tmp_path / "b")
    assert other.returncode == 1
    assert "another recipe" in other.stderr


def test_a_dummy_checkpoint_converts_and_fires_as_asked(tmp_path):
    made = run(
        "tools/make_dummy_checkpoint.py", tmp_path / "hf", "--shape", "opt-125m", "--layers", 1, "--tokenizer",
        REPOSITORY / "flashllm" / "demo",
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    command = [sys.executable, "-m", "flashllm"]
    converted = subprocess.run([*command, "convert", tmp_path / "hf", tmp_path / "m"], capture_output=True, check=False)
    assert converted.returncode == 0, converted.stderr
    arguments = ["--prompt", "a", "--max-new-tokens", "8", "--mode", "oracle", "--context", "64", "--json"]
    generated = subprocess.run(
        [*command, "generate", tmp_path / "m", *arguments], capture_output=True, text=True, check=False
    )
    assert generated.returncode == 0, generated.stderr
    tokens = json.loads(generated.stdout)["tokens"][1:]
    share = sum(token["active"] for token in tokens) / len(tokens) / 3072
    assert 0.02 < share < 0.10


def test_the_window_benchmark_on_the_demo():
    done = run("bench/window.py", "--windows", 1, 5, "--tokens", 40)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["windows"]
    assert [row["window"] for row in rows] == [1, 5]
    assert rows[0]["hit_rate"] < rows[1]["hit_rate"]
    assert rows[0]["bytes_per_token"] > rows[1]["bytes_per_token"]
    assert rows[0]["active_share"] == rows[1]["active_share"]


def test_a_trace_is_what_the_model_did(tiny, tmp_path):
    model = tiny("float32")
    texts = {"a.txt": "One day a girl found a house in the forest. " * 4, "b.jsonl.gz": "It was home. " * 30}
    (tmp_path / "a.txt").write_text(texts["a.txt"])
    with gzip.open(tmp_path / "b.jsonl.gz", "wt", encoding="utf-8") as lines:
        lines.writelines(json.dumps({"text": texts["b.jsonl.gz"]}) + "\n" for _ in range(2))
    out = tmp_path / "trace"
    arguments = [model.path("exact"), "--text", *(tmp_path / name for name in texts), "--tokens", 220, "--out", out]
    recorded = run("tools/record_trace.py", *arguments)
    assert recorded.returncode == 0, recorded.stderr
    with Trace(out) as trace:
        info = trace.info
        active, firing, early = (np.stack([trace.masks(layer, stream) for layer in range(3)]) for stream in Stream)
    assert (info.num_tokens, info.num_layers, info.num_neurons, info.synthetic) == (220, 3, 512, False)
    assert info.sequence_starts[0] == 0
    assert len(info.sequence_starts) >= 3  # of 96 tokens at most
    assert not (firing & ~active).any()  # these predictors name what comes near to firing, too
    assert 0 < (active & ~firing).mean() < 0.05
    assert not early[0].any()
    assert early[1:].any(axis=2).all()
    # The first sequence, against the dense model.
    ids = model.tokenizer(texts["a.txt"])["input_ids"][: info.sequence_starts[1]]
    inputs = {}
    for index, layer in enumerate(model.reference.model.decoder.layers):
        layer.fc1.register_forward_hook(lambda _m, x, y, index=index: inputs.update({index: (x[0].detach(), y > 0)}))
    with torch.no_grad():
        model.reference(torch.tensor([ids]))
    for layer, (_, fires) in inputs.items():
        assert (fires.reshape(len(ids), -1).numpy() == firing[layer, : len(ids)]).mean() > 0.999
    guess = model.reference.model.decoder.layers[2].fc1(inputs[1][0]).reshape(len(ids), -1) > -MARGIN
    assert (guess.numpy() == early[2, : len(ids)]).mean() > 0.999
    refused = run("tools/record_trace.py", *arguments)
    assert (refused.returncode, "exists" in refused.stderr) == (1, True)
    arguments[-1], arguments[arguments.index(220)] = tmp_path / "more", 10**6
    assert "lower --tokens" in run("tools/record_trace.py", *arguments).stderr
