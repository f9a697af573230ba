"""The script that measures thresholds on gates, on a tiny model."""

import json

import gate_thresholds
import pytest
from arch_models import VARIANTS, make_checkpoint
from tiny_models import SENTENCES


@pytest.mark.parametrize("gate", ["resident", "4bit"])
def test_more_zeros_cost_more(tmp_path, capsys, gate):
    source = make_checkpoint(tmp_path / "hf", VARIANTS["llama"])
    text = tmp_path / "text.txt"
    text.write_text(" ".join(SENTENCES) * 20)
    arguments = [str(source), str(text), str(text), "--windows", "2", "--window", "60", "--gate", gate]
    assert gate_thresholds.main([*arguments, "--share", "0.4", "--out", str(tmp_path / "out.json")]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document == json.loads((tmp_path / "out.json").read_text())
    dense, cut = document["rows"]
    assert (dense["share"], dense["zeros"]) == (0.0, 0.0)
    assert cut["zeros"] == pytest.approx(0.4, abs=0.08)
    assert cut["perplexity"] != dense["perplexity"]
    assert ("not_named" in cut) == (gate == "4bit")
    if gate == "4bit":
        assert cut["not_named"] <= cut["zeros"]
