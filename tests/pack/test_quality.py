"""A checkpoint's perplexity, a layer at a time, is that of the model directory made of it."""

import numpy as np
import pytest
from arch_models import VARIANTS, make_checkpoint, scale

from flashllm.config import RunConfig
from flashllm.convert.run import convert
from flashllm.engine.model import Model
from flashllm.errors import FlashError
from flashllm.pack.layers import Calibration
from flashllm.pack.quality import measure_quality, source_perplexity
from flashllm.pack.score import perplexity


@pytest.mark.parametrize("name", ["llama widths", "bloom", "bitnet", "gpt_oss", "qwen2_moe and a dense layer"])
def test_a_source_is_scored_as_its_model(tmp_path, name):
    source = make_checkpoint(tmp_path / "hf", VARIANTS[name])
    convert(source, tmp_path / "model")
    windows = [np.random.default_rng(seed).integers(4, 300, 60).tolist() for seed in range(2)]
    with Model.open(tmp_path / "model", RunConfig(mode="dense", threads=1)) as model:
        expected = perplexity(model, windows)
    assert source_perplexity(source, windows, "x") == pytest.approx(expected, rel=1e-5)


def test_a_head_is_read_once_for_all_windows(tmp_path, monkeypatch):
    source = make_checkpoint(tmp_path / "hf", VARIANTS["llama"])
    table, names = Calibration._table, []
    monkeypatch.setattr(Calibration, "_table", lambda self, name: (names.append(name), table(self, name))[1])
    source_perplexity(source, [list(range(4, 40))] * 3, "x")
    assert names == ["embedding", "head"]


@pytest.mark.parametrize("by", [1e6, 1e39])
def test_a_loss_that_is_not_finite_is_said(tmp_path, by):
    """exp of it is no number, or it is none itself."""
    source, text = make_checkpoint(tmp_path / "hf", VARIANTS["llama"]), tmp_path / "sample.txt"
    text.write_text("The little dog ran to the big tree and looked up. " * 20)
    scale(source, "lm_head.weight", by)
    convert(source, tmp_path / "model")
    with pytest.raises(FlashError, match=r"computes no finite loss on sample\.txt"):
        measure_quality(source, tmp_path / "model", text)
