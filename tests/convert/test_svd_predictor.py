import json
import math
import shutil

import numpy as np
import pytest
from tiny_models import make_tiny_opt

from flashllm.convert.run import convert
from flashllm.convert.untrained.predictor import default_rank, untrained_predictor
from flashllm.convert.untrained.svd import InputStatistics, low_rank_predictor, normal_cdf, normed_inputs
from flashllm.errors import UsageError
from flashllm.format.manifest import Manifest, predictor_ranks
from flashllm.format.model_files import PREDICTORS

D_MODEL, D_FF = 32, 120


def random_layer(seed=0):
    rng = np.random.default_rng(seed)
    matrix = (rng.standard_normal((D_FF, D_MODEL)) * np.linspace(0.2, 2.0, D_FF)[:, None]).astype(np.float32)
    bias = (-1.5 + 0.5 * rng.standard_normal(D_FF)).astype(np.float32)
    mixing = rng.standard_normal((D_MODEL, D_MODEL)) * np.linspace(2.0, 0.05, D_MODEL)
    mean = 0.3 * rng.standard_normal(D_MODEL)
    return matrix, bias, InputStatistics(mean=mean, root=mixing), mixing


def blocks_of(matrix, rows=50):
    return lambda: (matrix[first : first + rows] for first in range(0, len(matrix), rows))


def logits(predictor, x):
    return (x @ predictor.a.T) @ predictor.b.T + predictor.bias


def test_full_rank_predicts_the_signs_themselves():
    matrix, bias, inputs, mixing = random_layer()
    predictor = low_rank_predictor(blocks_of(matrix), bias, inputs, D_MODEL)
    x = inputs.mean + np.random.default_rng(1).standard_normal((500, D_MODEL)) @ mixing.T
    pre = x @ matrix.T + bias
    clear = np.abs(pre) > 1e-3 * np.abs(pre).max()
    assert np.array_equal((logits(predictor, x) > 0)[clear], (pre > 0)[clear])


@pytest.mark.parametrize("rank", [1, 5, 12])
def test_no_map_of_the_rank_is_nearer_in_mean_square(rank):
    """Against the truncated SVD of M R, computed plainly (Eckart-Young); residuals are undone with its own."""
    matrix, bias, inputs, _ = random_layer()
    predictor = low_rank_predictor(blocks_of(matrix), bias, inputs, rank)
    left, values, right = np.linalg.svd(matrix @ inputs.root)
    best = (left[:, :rank] * values[:rank]) @ right[:rank]
    residual = np.sqrt(((matrix @ inputs.root - best) ** 2).sum(1))
    mine = (predictor.b.astype(np.float64) @ predictor.a) @ inputs.root * residual[:, None]
    assert np.allclose(mine, best, atol=1e-4 * np.abs(best).max())


@pytest.mark.parametrize("recall", [0.5, 0.9, 0.99])
def test_the_threshold_keeps_its_recall_on_gaussian_inputs(recall):
    matrix, bias, inputs, mixing = random_layer()
    predictor = low_rank_predictor(blocks_of(matrix), bias, inputs, 6)
    x = inputs.mean + np.random.default_rng(2).standard_normal((20_000, D_MODEL)) @ mixing.T
    fires = x @ matrix.T + bias > 0
    found = logits(predictor, x) > predictor.threshold_for(recall)
    assert (found & fires).sum() / fires.sum() == pytest.approx(recall, abs=0.01)


def test_logits_rank_neurons_by_their_probability_of_firing():
    matrix, bias, inputs, mixing = random_layer()
    predictor = low_rank_predictor(blocks_of(matrix), bias, inputs, 6)
    x = inputs.mean + np.random.default_rng(3).standard_normal((20_000, D_MODEL)) @ mixing.T
    fires, score = (x @ matrix.T + bias > 0), logits(predictor, x)
    for low in (-2.0, -1.0, 0.0, 1.0):
        near = np.abs(score - low) < 0.05
        assert fires[near].mean() == pytest.approx(float(normal_cdf(np.array(low))), abs=0.05)


def test_the_subspace_iteration_finds_what_the_decomposition_finds(monkeypatch):
    rng = np.random.default_rng(0)
    matrix = (rng.standard_normal((1500, 600)) @ np.diag(np.linspace(3.0, 0.1, 600))).astype(np.float32)
    inputs = normed_inputs(None, None, 600)
    fast = low_rank_predictor(blocks_of(matrix, 400), None, inputs, 40)
    monkeypatch.setattr("flashllm.convert.untrained.svd._OVERSAMPLING", 600)  # too wide: decomposes instead
    exact = low_rank_predictor(blocks_of(matrix, 400), None, inputs, 40)

    def error(p):
        left = p.logit_deviation / np.sqrt(1 + p.logit_deviation**2)  # share of a neuron's deviation that is explained
        return 1 - np.mean(left**2)

    assert error(fast) == pytest.approx(error(exact), rel=0.01)
    assert error(fast) >= error(exact) - 1e-9


def test_diagonal_statistics_are_those_of_a_diagonal_matrix():
    matrix, bias, _, _ = random_layer()
    rng = np.random.default_rng(5)
    scale, mean = 0.5 + rng.random(D_MODEL), rng.standard_normal(D_MODEL)
    one = low_rank_predictor(blocks_of(matrix), bias, InputStatistics(mean=mean, root=scale), 8)
    two = low_rank_predictor(blocks_of(matrix), bias, InputStatistics(mean=mean, root=np.diag(scale)), 8)
    x = rng.standard_normal((50, D_MODEL))
    assert np.allclose(logits(one, x), logits(two, x), atol=1e-4)


@pytest.mark.parametrize("rank", [0, -1, D_MODEL + 1])
def test_impossible_ranks_are_refused(rank):
    matrix, bias, inputs, _ = random_layer()
    with pytest.raises(ValueError, match="rank must be from 1"):
        low_rank_predictor(blocks_of(matrix), bias, inputs, rank)


def test_degenerate_layers_give_finite_predictors():
    zero = np.zeros((D_FF, D_MODEL), dtype=np.float32)
    silent = low_rank_predictor(blocks_of(zero), np.full(D_FF, -1.0, np.float32), normed_inputs(None, None, D_MODEL), 4)
    assert np.isfinite(silent.a).all()
    assert np.isfinite(silent.b).all()
    matrix, bias, _, _ = random_layer()
    dead = np.zeros(D_MODEL, np.float32)  # a norm that lets nothing through
    predictor, threshold = untrained_predictor(blocks_of(matrix), bias, normed_inputs(dead, None, D_MODEL), 4)
    assert np.isfinite(predictor.b.astype(np.float16)).all()
    assert not math.isnan(threshold)


def test_the_normal_distribution_function():
    for x in (-8.0, -3.0, -0.5, 0.0, 0.5, 3.0, 8.0):
        assert float(normal_cdf(np.array(x))) == pytest.approx(0.5 * math.erfc(-x / math.sqrt(2)), abs=2e-7)


def test_a_conversion_killed_among_the_predictors_resumes_to_the_same_bytes(tmp_path):
    source = make_tiny_opt(tmp_path / "hf")
    whole = convert(source, tmp_path / "whole", predictors=True)

    def stop(what, _done, _total):
        if what == PREDICTORS:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "model", predictors=True, progress=stop)
    assert not (tmp_path / "model").exists()
    with pytest.raises(UsageError, match="other options"):
        convert(source, tmp_path / "model")
    assert convert(source, tmp_path / "model", predictors=True).files == whole.files
    for name in whole.files:
        assert (tmp_path / "model" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_predictors_change_no_other_file(tmp_path):
    source = make_tiny_opt(tmp_path / "hf")
    bare, full = convert(source, tmp_path / "a"), convert(source, tmp_path / "b", predictors=True)
    assert {**bare.files, PREDICTORS: full.files[PREDICTORS]} == dict(full.files)
    assert predictor_ranks(tmp_path / "b" / PREDICTORS, full) == [default_rank(64)] * 2
    assert json.loads((tmp_path / "b" / "flashllm.json").read_text())["calibration"] is None
    shutil.rmtree(tmp_path / "a")
    assert Manifest.load(tmp_path / "b").files == full.files
