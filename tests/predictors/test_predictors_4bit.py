"""Predictors in 4 bits: the engine names what their stored weights name."""

import numpy as np
import pytest
import torch
from arch_models import VARIANTS, make_checkpoint
from masked import load_predictors
from training.stored import StoredPredictor, encode_predictors

from flashllm.config import RunConfig
from flashllm.convert.run import convert
from flashllm.engine.model import Model
from flashllm.format.install import install_predictors
from flashllm.format.manifest import Manifest
from flashllm.format.model_files import FFN, PREDICTORS


@pytest.mark.parametrize("rank", [4, 40])
def test_a_model_runs_with_them(tmp_path, rank):
    source = make_checkpoint(tmp_path / "hf", VARIANTS["opt"])
    convert(source, tmp_path / "model")
    manifest = Manifest.load(tmp_path / "model")
    d_model, d_ff = manifest.rows.d_model, manifest.rows.d_ff
    random = np.random.default_rng(0)
    predictors = [
        StoredPredictor(
            layer=layer,
            a=random.standard_normal((rank, d_model)).astype(np.float32),
            b=random.standard_normal((d_ff, rank)).astype(np.float32),
            bias=random.standard_normal(d_ff).astype(np.float32),
            threshold=0.25,
        )
        for layer in range(manifest.architecture.num_layers)
    ]
    parts = encode_predictors(predictors, 4, manifest.files[FFN].sha256, {})
    (tmp_path / "file").write_bytes(b"".join(bytes(part) for part in parts))
    install_predictors(tmp_path / "model", tmp_path / "file")
    stored = load_predictors(tmp_path / "model" / PREDICTORS, Manifest.load(tmp_path / "model"))
    x = torch.randn(d_model, generator=torch.Generator().manual_seed(1))
    with Model.open(tmp_path / "model", RunConfig(mode="sparse", threads=2, io_threads=2)) as model:
        for layer, predictor in enumerate(stored):
            values = (predictor.b @ (predictor.a @ x) + predictor.bias).numpy()
            named = model.parts.ffns[layer].predict(x.numpy().ctypes.data)
            clear = np.abs(values - 0.25) > 0.02 * np.abs(values).max()  # inputs have 8 bits
            expected = np.flatnonzero((values > 0.25) & clear)
            assert set(expected) <= set(named)
            assert not set(named) & set(np.flatnonzero((values <= 0.25) & clear))
        sequence = model.new_sequence()
        assert np.isfinite(model.step([(sequence, [1, 2, 3])])).all()
