"""The facts add up, are JSON, and are printed for a person."""

import dataclasses
import json

import numpy as np
import pytest
from predictor_files import write_plain
from tiny_models import make_tiny_opt

from flashllm.convert.run import convert
from flashllm.errors import UsageError
from flashllm.format.install import install_files, install_predictors
from flashllm.format.manifest_values import Calibration
from flashllm.format.model_files import POPULARITY
from flashllm.format.popularity import encode_popularity
from flashllm.format.report.inspect import format_inspection, inspect


@pytest.fixture
def model(tmp_path):
    make_tiny_opt(tmp_path / "hf", dtype="float16")
    convert(tmp_path / "hf", tmp_path / "model")
    return tmp_path / "model"


def test_the_facts_of_a_tiny_model(model):
    facts = inspect(model)
    assert json.loads(json.dumps(facts)) == facts
    assert facts["path"] == str(model)
    # 2 layers of 256 neurons of 2 * 64 values
    ffn = 2 * 256 * 2 * 64
    # embedding, positions; a layer: 4 projections, 2 norms, FFN biases; the last norm
    resident = 300 * 64 + 130 * 64 + 2 * (4 * (64 * 64 + 64) + 4 * 64 + 256 + 64) + 2 * 64
    assert facts["parameters"] == ffn + resident
    assert facts["ffn_nbytes"] == 2 * ffn
    assert facts["ffn_share"] == ffn / (ffn + resident)
    assert facts["resident_nbytes"] == 2 * resident + 2 * 256 * 8
    assert facts["rows"]["stride"] == 512
    assert facts["rows"]["row_nbytes"] == 256
    assert facts["kv_nbytes_per_token"] == 2 * 2 * 64 * 2
    assert facts["total_nbytes"] == sum(facts["files"].values())
    assert facts["predictors"] is None
    assert facts["calibration"] is None


def test_the_text_of_a_bare_and_of_a_complete_model(model, tmp_path):
    text = format_inspection(inspect(model))
    assert str(model) in text
    assert "opt, 2 layers, d_model 64, d_ff 256, relu" in text
    assert "256 bytes every 512 (50.0% padding), float16" in text
    assert "none; `flashllm train` makes them" in text

    manifest = install_predictors(model, write_plain(tmp_path / "trained", model, ranks=(3, 5)))
    calibration = Calibration(window=4, mean_active=(25.6, 51.2), req=(80, 90), tokens=1000, text="stories")
    dataclasses.replace(manifest, calibration=calibration).save(model)

    facts = inspect(model)
    assert facts["predictors"] == {"ranks": [3, 5], "nbytes": 2 * 8 * (64 + 256) + 2 * 4 * 257}
    text = format_inspection(facts)
    assert "ranks 3 to 5" in text
    assert facts["popularity"] is None
    shares = encode_popularity([np.zeros(256, np.float32)] * 2, tokens=70, measured_on="stories")
    install_files(model, {POPULARITY: shares})
    assert "of every neuron, on 70 tokens: stories" in format_inspection(inspect(model))
    assert "window 4, 15.0% of the neurons active, on 1000 tokens of stories" in text


def test_other_folders_are_refused(tmp_path):
    with pytest.raises(UsageError, match="not a model directory"):
        inspect(tmp_path)
