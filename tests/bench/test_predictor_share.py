"""The script that times predictors alone, on a tiny model."""

import json

import numpy as np
import predictor_share
import pytest
from arch_models import VARIANTS, make_checkpoint

from flashllm.commands.predictors.scripts import sample_text
from flashllm.config import RunConfig
from flashllm.convert.run import convert
from flashllm.engine.model import Model
from flashllm.generate.tokenizer import Tokenizer
from flashllm.pack.score import Inputs


@pytest.mark.parametrize("gate", ["rows", "resident", "4bit"])
def test_what_is_named_is_what_the_engine_names(tmp_path, capsys, gate):
    source = make_checkpoint(tmp_path / "hf", VARIANTS["fatrelu by layer"], dtype="bfloat16")
    convert(source, tmp_path / "model", predictors=True, gate=gate)
    out = tmp_path / "out.json"
    assert predictor_share.main([str(tmp_path / "model"), "--tokens", "12", "--threads", "1", "--out", str(out)]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document == json.loads(out.read_text())
    row = document["rows"]["model"]
    assert row["share"] == pytest.approx(row["naming_ms"] / row["token_ms"])
    assert row["naming_ms"] > 0

    ids = Tokenizer.load(tmp_path / "model").encode(sample_text().read_text())[: predictor_share.PROMPT + 12]
    with Model.open(tmp_path / "model", RunConfig(mode="sparse", threads=1, io_threads=4)) as model:
        sequence = model.new_sequence()
        model.step([(sequence, ids[: predictor_share.PROMPT])])
        model.meter.take()
        for token in ids[predictor_share.PROMPT :]:
            model.step([(sequence, [token])])
        active = model.meter.take().active / (12 * model.manifest.rows.d_ff * len(model.parts.ffns))
    assert row["named"] == pytest.approx(active, abs=0.01)  # rounding of other sums


def test_inputs_of_a_prompt_in_parts_are_put_together():
    inputs = Inputs(layers=2, step=1)
    for part in (0, 1):
        for layer in (0, 1):
            inputs.input(layer, np.full((2, 3), 10 * layer + part, np.float32))
    assert [inputs.of(layer)[:, 0].tolist() for layer in (0, 1)] == [[0, 0, 1, 1], [10, 10, 11, 11]]


def test_a_text_that_is_too_short_is_said(tmp_path):
    convert(make_checkpoint(tmp_path / "hf", VARIANTS["llama relu"]), tmp_path / "model", predictors=True)
    (tmp_path / "text.txt").write_text("too short")
    with pytest.raises(SystemExit, match="fewer than 26"):
        predictor_share.main([str(tmp_path / "model"), "--text", str(tmp_path / "text.txt"), "--tokens", "10"])
