"""The table of predictor sizes: ratios over all layers, the worst layer, and quality beside them."""

import json

import pytest
from predictor_sizes import main


def layer(true, predicted):
    curve = [{"recall": recall, "predicted_share": predicted * recall} for recall in (0.9, 0.95, 0.97, 0.99)]
    errors = {"true_share": true, "predicted_share": predicted, "false_negative": 0.03, "false_positive": 0.01}
    return {**errors, "rank": 8, "curve": curve}


def test_one_size_with_and_one_without_an_evaluation(tmp_path, capsys):
    layers = [layer(0.1, 0.2), layer(0.02, 0.08)]
    trained = {"layers": layers, "predictor_bytes": 60, "early_predictor_bytes": 40, "model_bytes": 1040}
    text = {"perplexity": {"dense": 50.0, "trained": 50.5}, "kl": {"trained": 0.01}, "same_top": {"trained": 0.9}}
    judged = {**trained, "texts": {"a": text}, "agreement": {"trained": 0.99}, "flash_bytes_per_token": 2000.0}
    for name, report in (("t.json", trained), ("j.json", judged)):
        (tmp_path / name).write_text(json.dumps(report))
    reports = [f"one={tmp_path}/t.json,{tmp_path}/j.json", f"two={tmp_path}/t.json"]
    assert main([*reports, "--out", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    one, two = json.loads(captured.out)["sizes"]
    assert one["share_of_model"] == two["share_of_model"] == pytest.approx(0.06)
    assert one["curve"][0]["ratio"] == pytest.approx(0.9 * 0.28 / 0.12)
    assert one["curve"][0]["worst_ratio"] == pytest.approx(0.9 * 4)
    assert one["texts"]["a"]["perplexity"] == pytest.approx(0.01)
    assert "judged" not in two
    page = (tmp_path / "predictor_sizes.md").read_text()
    assert "| one | 0.00 | 6.0% | 8 to 8 | 2.10 (3.60) |" in page
    assert "+1.00%, 0.01000" in page
    assert (tmp_path / "predictor_sizes.png").stat().st_size > 1000
