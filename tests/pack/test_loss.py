"""A model just converted that predicts text as garbage does is warned of."""

import argparse
import json
import math
import shutil

import pytest

from flashllm.cli import main
from flashllm.commands.asked import find_model, warn_of_garbage
from flashllm.convert.named import demo_path
from flashllm.convert.run import convert
from flashllm.errors import BudgetError
from flashllm.pack.loss import GARBAGE, Loss, measure_loss
from flashllm.pack.score import WINDOW


def loss(mean, vocab_size=1000):
    return Loss(mean=mean, tokens=128, vocab_size=vocab_size)


def test_garbage_is_what_knows_no_more_than_how_frequent_tokens_are():
    guess = math.log(1000)
    assert [loss(share * guess).is_garbage for share in (0.1, 0.6, GARBAGE + 0.01, 1, 200)] == [False] * 2 + [True] * 3
    for mean in (math.nan, math.inf):
        assert loss(mean).is_garbage
        assert loss(mean).perplexity == math.inf
    assert loss(1e4).perplexity == math.inf


def test_a_trained_model_is_told_from_a_random_one(tmp_path, tiny):
    text = tmp_path / "sample.txt"
    text.write_text("The little dog ran to the big tree and looked up. " * 99)
    trained, untrained = measure_loss(demo_path(), text), measure_loss(tiny("float32").path(), text)
    assert (trained.is_garbage, untrained.is_garbage) == (False, True)
    assert 32 < trained.tokens < WINDOW
    with pytest.raises(BudgetError):
        measure_loss(demo_path(), text, memory=1000)


def test_converting_warns_once(tmp_path, tiny, capsys, monkeypatch):
    source = tiny("float32").source
    assert main(["convert", str(source), str(tmp_path / "model")]) == 0
    assert capsys.readouterr().err.count("flashllm: warning: this model predicts plain English as garbage does") == 1
    monkeypatch.setenv("HOME", str(tmp_path))
    args = argparse.Namespace(model=str(source), memory=None, verbose=False)
    for times in (1, 0):
        find_model(args)
        assert capsys.readouterr().err.count("as garbage does") == times
    warn_of_garbage(demo_path())
    assert capsys.readouterr().err == ""


def test_without_memory_or_a_tokenizer_nothing_is_said(tmp_path, tiny, capsys):
    warn_of_garbage(tiny("float32").path(), memory=1000)
    warn_of_garbage(tmp_path)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "fault",
    [
        ("generation_config.json", "{", "generation_config.json"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id must be an id"),
        ("chat_template.jinja", "{% if %}", "the chat template is not valid"),
    ],
)
def test_what_no_run_could_read_is_found_before_the_work(tmp_path, tiny, capsys, fault):
    name, text, message = fault
    source = shutil.copytree(tiny("float32").source, tmp_path / "source")
    (source / name).write_text(text)
    assert main(["convert", str(source), str(tmp_path / "model")]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "model").exists()
    convert(source, tmp_path / "model")
    warn_of_garbage(tmp_path / "model")
    said = capsys.readouterr().err
    assert said.startswith("flashllm: warning: this model could not be checked: ")
    assert message in said


def test_fewer_bits_of_a_model_that_is_not_computed_by_layers_are_said_by_their_own_loss(tmp_path, variant_of, capsys):
    source, _ = variant_of("gemma3n")
    assert main(["convert", str(source), str(tmp_path / "model"), "--bits", "4"]) == 0
    said = capsys.readouterr().err
    assert "what fewer bits cost was not measured" in said
    assert "its perplexity is " in said


def test_a_tokenizer_with_ids_beyond_the_vocabulary_is_said(tmp_path, tiny, capsys):
    source = shutil.copytree(tiny("float32").source, tmp_path / "source")
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab.update(dict.fromkeys(vocab, 10**6))  # all words
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    for bits in ([], ["--bits", "4"]):
        assert main(["convert", str(source), str(tmp_path / f"model{len(bits)}"), *bits]) == 0
        assert "token id 1000000 is not in the model's vocabulary of" in capsys.readouterr().err


def test_a_model_whose_check_is_interrupted_is_whole(tmp_path, tiny, capsys, monkeypatch):
    def interrupted(*_, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("flashllm.pack.loss.measure_loss", interrupted)
    assert main(["convert", str(tiny("float32").source), str(tmp_path / "model")]) == 130
    assert f"interrupted; {tmp_path / 'model'} is whole" in capsys.readouterr().err
    assert main(["verify", str(tmp_path / "model")]) == 0
