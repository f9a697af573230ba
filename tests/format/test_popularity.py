"""Popularity: measured on a trace, kept in a model directory, and what the cache makes of it."""

import shutil

import numpy as np
import pytest
from activity_trace import Trace
from arch_models import make_model
from generating import greedy, ids_of
from install_popularity import install_popularity, measure_popularity
from traces import write_trace

from flashllm.errors import FormatError, UsageError
from flashllm.format.install import install_files, install_predictors
from flashllm.format.manifest import Manifest
from flashllm.format.model_files import POPULARITY, PREDICTORS
from flashllm.format.popularity import describe_popularity, encode_popularity, read_popularity
from flashllm.format.report.verify import verify
from flashllm.format.safetensors import encode_header

LAYERS, NEURONS = 3, 512


@pytest.fixture
def model(tiny, tmp_path):
    return shutil.copytree(tiny("bfloat16").path("random"), tmp_path / "model")


@pytest.fixture
def active():
    """Later layers are busier, and some neurons much more often active than others."""
    random = np.random.default_rng(1)
    popularity = random.beta(0.3, 2.0, (LAYERS, NEURONS)) * np.array([[0.2], [0.5], [1.0]])
    return random.random((50, LAYERS, NEURONS)) < popularity


def test_shares_are_counted_and_kept(model, active, tmp_path):
    assert read_popularity(model, Manifest.load(model)) is None
    with Trace(write_trace(tmp_path / "trace", active)) as trace:
        shares = measure_popularity(trace)
        manifest = install_popularity(model, trace)
    np.testing.assert_allclose(shares, active.mean(axis=0), atol=1e-6)
    assert POPULARITY in manifest.files
    np.testing.assert_array_equal(read_popularity(model, Manifest.load(model)), shares)
    assert verify(model).ok


def test_a_foreign_trace_is_refused(model, tmp_path):
    with (
        Trace(write_trace(tmp_path / "trace", np.zeros((2, LAYERS, NEURONS + 1), bool))) as trace,
        pytest.raises(UsageError, match="a trace of 3 layers of 513 neurons; the model has 3 of 512"),
    ):
        install_popularity(model, trace)
    assert not (model / POPULARITY).exists()


def test_each_layer_has_as_many_shares_as_neurons(tmp_path):
    _, model = make_model(tmp_path, "llama relu widths")
    manifest = Manifest.load(model)
    widths = manifest.architecture.every_width
    assert len(set(widths)) == LAYERS
    shares = [np.linspace(0, layer / LAYERS, width, dtype=np.float32) for layer, width in enumerate(widths)]
    written = encode_popularity(shares, tokens=9, measured_on="a text")
    manifest = install_files(model, {POPULARITY: written})
    for found, expected in zip(read_popularity(model, manifest), shares, strict=True):
        np.testing.assert_array_equal(found, expected)
    assert describe_popularity(model, manifest) == {"tokens": "9", "measured_on": "a text"}
    written = encode_popularity([shares[1], shares[0], shares[2]], tokens=9, measured_on="a text")
    manifest = install_files(model, {POPULARITY: written})
    with pytest.raises(FormatError, match=r"must hold layers\.0\.popularity, F32 \["):
        read_popularity(model, manifest)


def test_files_of_one_tensor_still_open(model):
    shares = np.random.default_rng(0).random((LAYERS, NEURONS), np.float32)
    old = [encode_header([("popularity", "F32", shares.shape)], {"tokens": "9"}), shares.tobytes()]
    manifest = install_files(model, {POPULARITY: old})
    np.testing.assert_array_equal(np.stack(read_popularity(model, manifest)), shares)


def test_other_predictors_take_the_popularity_of_the_old_ones_with_them(model, tiny):
    predictors = tiny("bfloat16").path("exact") / PREDICTORS
    shares = [np.full(NEURONS, 0.5, np.float32)] * LAYERS
    manifest = install_predictors(model, predictors, None, encode_popularity(shares, tokens=1, measured_on="a text"))
    assert {PREDICTORS, POPULARITY} < set(manifest.files)
    np.testing.assert_array_equal(read_popularity(model, manifest), shares)
    assert POPULARITY not in install_predictors(model, predictors).files
    assert not (model / POPULARITY).exists()
    assert verify(model).ok


@pytest.mark.parametrize("wrong", [-0.5, 1.5, float("nan")])
def test_damage_is_found(model, active, tmp_path, wrong):
    with Trace(write_trace(tmp_path / "trace", active)) as trace:
        manifest = install_popularity(model, trace)
    with open(model / POPULARITY, "r+b") as file:
        file.seek(-4, 2)
        file.write(np.float32(wrong).tobytes())
    with pytest.raises(FormatError, match="outside 0 to 1"):
        read_popularity(model, manifest)


def test_the_cache_goes_where_it_saves_most(model, active, tmp_path, load, monkeypatch):
    """Same tokens, another plan: busy layers get more, and the cache holds the popular neurons after a prefill."""
    monkeypatch.setattr("flashllm.engine.model.process_nbytes", lambda: 400_000_000)
    plain = load(model)
    limit = plain.engine.plan.memory.minimum_nbytes + 300 * plain.engine.plan.memory.row_nbytes
    even = load(model, memory=limit)
    with Trace(write_trace(tmp_path / "trace", active)) as trace:
        install_popularity(model, trace)
    shared = load(model, memory=limit)
    rows = shared.engine.plan.memory.cache_rows
    assert sum(rows) == sum(even.engine.plan.memory.cache_rows)
    assert rows[0] < rows[1] < rows[2]
    assert max(even.engine.plan.memory.cache_rows) - min(even.engine.plan.memory.cache_rows) <= 1
    tokens = [greedy(one, ids_of(20)) for one in (plain, even, shared)]
    assert tokens[0] == tokens[1] == tokens[2]
