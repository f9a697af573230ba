"""Predicting a layer from the input of the one before: the comparison and its counts."""

import json

import numpy as np
import pytest
import torch
from early_prediction import RECALLS, Counts, at_precision, main, recent, renormed
from tiny_models import SENTENCES
from training.fit import LayerPredictor


def test_recent_is_what_the_tokens_before_had():
    active = np.zeros((6, 3), dtype=bool)
    active[0, 0] = active[3, 1] = True
    assert recent(active, 2).tolist() == [
        [False, False, False],
        [True, False, False],
        [True, False, False],
        [False, False, False],
        [False, True, False],
        [False, True, False],
    ]


def test_counts_tell_new_firings_from_old_ones():
    truth, named, old = (np.array([row], dtype=bool) for row in ([1, 1, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 0, 0, 0]))
    counts = Counts()
    counts.add(named, truth, old)
    rates = counts.rates()
    assert rates["recall"] == pytest.approx(2 / 3)
    assert rates["precision"] == pytest.approx(2 / 3)
    assert rates["recall_new"] == pytest.approx(1 / 2)
    assert rates["precision_new"] == pytest.approx(1 / 2)
    assert rates["fetched_per_new"] == pytest.approx(1.0)


def test_recall_at_a_precision_lies_between_thresholds():
    points = [{"recall_new": r, "precision_new": p} for r, p in ((0.2, 0.9), (0.6, 0.6), (0.9, 0.2))]
    assert at_precision(points, 0.6) == pytest.approx(0.6)
    assert at_precision(points, 0.4) == pytest.approx(0.75)
    assert at_precision(points, 0.95) == 0.0
    assert at_precision(points, 0.1) == pytest.approx(0.9)


def test_a_renormed_predictor_sees_the_other_norm_as_its_own():
    generator = torch.Generator().manual_seed(0)
    own = LayerPredictor(*(torch.randn(shape, generator=generator) for shape in ((4, 8), (16, 4), (16,))))
    before, at = ((torch.rand(8, generator=generator) + 0.5, torch.randn(8, generator=generator)) for _ in range(2))
    x = torch.randn((5, 8), generator=generator)
    moved = renormed(own, before, at)
    torch.testing.assert_close(moved.logits(x * before[0] + before[1]), own.logits(x * at[0] + at[1]))


def test_compares_on_a_tiny_model(tiny, tmp_path, capsys):
    text = " ".join(SENTENCES) + " "
    shard, judged = tmp_path / "train.jsonl", tmp_path / "judged.txt"
    shard.write_text("".join(json.dumps({"text": text * 3}) + "\n" for _ in range(20)))
    judged.write_text(text * 40)
    options = ["--samples", "12", "--tokens", "400", "--epochs", "1", "--threads", "1", "--json", str(tmp_path / "out")]
    model = str(tiny("float16").path("exact"))
    assert main([model, "--data-files", str(shard), "--text", str(judged), *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "out").read_text()) == report
    assert [layer["layer"] for layer in report["layers"]] == [1, 2]
    for layer in report["layers"]:
        found = layer["texts"]["judged.txt"]
        assert set(found["fires"]) == {"own", "own_renormed", "linear", "trained"}
        assert len(found["fires"]["trained"]) == len(RECALLS)
        assert found["own_input"]["recall"] > 0.9  # an exact predictor, on its own input
        assert 0.0 < found["per_token"]["new_fires"] <= found["per_token"]["fires"]
    assert main([model, "--data-files", str(tmp_path / "none"), "--text", str(judged), *options]) == 1
    assert "cannot read" in capsys.readouterr().err
