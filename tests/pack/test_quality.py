"""A checkpoint's perplexity, a layer at a time, is that of the model directory made of it."""

import numpy as np
import pytest
from arch_models import VARIANTS, make_checkpoint

from flashllm.config import RunConfig
from flashllm.convert.run import convert
from flashllm.engine.model import Model
from flashllm.pack.quality import source_perplexity
from flashllm.pack.score import perplexity


@pytest.mark.parametrize("name", ["llama widths", "bloom", "bitnet", "gpt_oss", "qwen2_moe and a dense layer"])
def test_a_source_is_scored_as_its_model(tmp_path, name):
    source = make_checkpoint(tmp_path / "hf", VARIANTS[name])
    convert(source, tmp_path / "model")
    windows = [np.random.default_rng(seed).integers(4, 300, 60).tolist() for seed in range(2)]
    with Model.open(tmp_path / "model", RunConfig(mode="dense", threads=1)) as model:
        expected = perplexity(model, windows)
    assert source_perplexity(source, windows, "x") == pytest.approx(expected, rel=1e-5)
