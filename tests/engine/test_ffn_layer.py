"""The native FFN layer: right against float64, the same bits whatever is cached, and right after failures."""

import time

import numpy as np
import pytest
import torch
from ffn_rows import FILE_OFFSET, TORCH_DTYPES, Ffn, random_input, resident, write_ffn

from flashllm import _core

DTYPES = sorted(TORCH_DTYPES)
SIMD = _core.simd_levels()


def _active(num_neurons, share, seed):
    return np.flatnonzero(np.random.default_rng(seed).random(num_neurons) < share).tolist()


@pytest.mark.parametrize("simd", SIMD)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "form",
    [
        (False, True, "relu", 64),
        (False, False, "relu", 77),
        (False, True, "squared_relu", 40),
        (True, False, "relu", 100),
        (True, True, "squared_relu", 33),
    ],
)
def test_equals_float64_over_the_active_set(tmp_path, dtype, form, simd):
    gated, biased, activation, d_model = form
    ffn = write_ffn(tmp_path / "f", dtype=dtype, num_neurons=50, d_model=d_model, gated=gated, biased=biased)
    layer = Ffn(ffn, activation=activation, threads=2, simd=simd)
    for seed, share in enumerate((0.0, 0.1, 0.5, 1.0)):
        x, active = random_input(ffn, seed), _active(50, share, seed)
        expected, magnitude = ffn.dense(x, active, activation)
        # fp32 sums over d_model, then over neurons; squares and gates double the first error. Then y is rounded.
        bound = 1e-6 * (d_model + 60) * (magnitude + 10) + torch.finfo(x.dtype).eps * expected.abs()
        assert ((layer(x, active).double() - expected).abs() <= bound).all()


def test_no_active_neuron_leaves_the_bias(tmp_path):
    ffn = write_ffn(tmp_path / "f")
    assert torch.equal(Ffn(ffn)(random_input(ffn), []), torch.from_numpy(ffn.down_bias))
    unbiased = write_ffn(tmp_path / "g", biased=False)
    assert torch.equal(Ffn(unbiased)(random_input(unbiased), []), torch.zeros(64))


def test_nan_in_the_input_is_not_hidden(tmp_path):
    ffn = write_ffn(tmp_path / "f")
    x = random_input(ffn)
    x[3] = float("nan")
    assert Ffn(ffn)(x, [0, 5]).isnan().all()


def test_refuses_ids_that_are_not_ascending_neurons(tmp_path):
    ffn = write_ffn(tmp_path / "f")
    layer, x = Ffn(ffn), random_input(ffn)
    for active in ([3, 1], [1, 1], [-1], [24], [0, 24]):
        with pytest.raises(ValueError, match="ascending"):
            layer.layer.forward_active(x.data_ptr(), np.array(active, np.int32), x.data_ptr())


def test_counters_add_up(tmp_path):
    ffn = write_ffn(tmp_path / "f", num_neurons=400, d_model=1024)
    layer = Ffn(ffn, capacity=150, window=2, io_threads=4)
    for seed in range(20):
        x, active = random_input(ffn, seed), _active(400, 0.3, seed)
        layer.counters.take()
        started = time.perf_counter_ns()
        layer(x, active)
        wall = time.perf_counter_ns() - started
        counters = layer.counters.take()
        assert counters["active"] == len(active) == counters["hits"] + counters["misses"]
        assert counters["bytes_read"] == counters["misses"] * ffn.stride
        assert counters["retries"] == 0
        assert counters["io_ns"] + counters["memory_ns"] + counters["compute_ns"] <= wall
        assert counters["io_busy_ns"] <= wall
        assert counters["misses"] > 0
    assert set(layer.counters.take().values()) == {0}


def test_exposed_times_cover_the_call(tmp_path):
    ffn = write_ffn(tmp_path / "f", num_neurons=1000, d_model=2048)
    layer = Ffn(ffn, io_threads=2)
    shares = [0.0]
    for seed in range(100):
        if shares[-1] > 0.9:  # one will do: the scheduler may take the rest between two clock reads
            break
        layer = Ffn(ffn, io_threads=2)
        x, active = random_input(ffn, seed), range(1000)
        started = time.perf_counter_ns()
        layer(x, active)
        wall = time.perf_counter_ns() - started
        counters = layer.counters.take()
        shares.append((counters["io_ns"] + counters["memory_ns"] + counters["compute_ns"]) / wall)
    assert max(shares) <= 1.0
    assert shares[-1] > 0.9


# Filling the cache as rows stream by


def _with_predictor(ffn, **options):
    """A layer whose predictor finds exactly the neurons that fire: rank d_model, the up projection itself."""
    layer = Ffn(ffn, **options)
    layer.predict_by(torch.eye(ffn.d_model), ffn.up.float().contiguous(), ffn.up_bias, 0.0)
    return layer


def _tokens(ffn, count):
    return torch.stack([random_input(ffn, seed) for seed in range(count)]).contiguous()


def _fires(ffn, x):
    return torch.nonzero(ffn.up @ x.double() + torch.from_numpy(ffn.up_bias).double() > 0).flatten().tolist()


@pytest.mark.parametrize("capacity", [4, 12, 40])
@pytest.mark.parametrize("block", [1, 7, 40])
def test_filled_rows_are_as_good_as_read_ones(tmp_path, capacity, block):
    ffn = write_ffn(tmp_path / "f", num_neurons=40)
    layer = _with_predictor(ffn, capacity=capacity, window=2)
    x = _tokens(ffn, 5)
    layer(x[0], _fires(ffn, x[0]))
    layer.layer.begin_fill(x.data_ptr(), 5)
    for first in range(0, 40, block):
        rows = np.ascontiguousarray(ffn.rows[first : first + block])
        layer.layer.fill_from(rows, first, len(rows))
    assert layer.wrong_rows() == []
    newest = _fires(ffn, x[4])
    assert set(layer.layer.cached()) >= set(newest if len(newest) <= capacity else newest[:capacity])
    layer.counters.take()
    assert torch.equal(layer(x[4], newest), Ffn(ffn)(x[4], newest))
    if len(newest) <= capacity:
        assert layer.counters.take()["misses"] == 0


def test_a_fill_replaces_a_fill(tmp_path):
    ffn = write_ffn(tmp_path / "f", num_neurons=40)
    x = _tokens(ffn, 2)
    layer = _with_predictor(ffn, window=1)
    layer.layer.begin_fill(x[:1].data_ptr(), 1)
    layer.layer.begin_fill(x[1:].data_ptr(), 1)
    layer.layer.fill_from(ffn.rows, 0, 40)
    assert sorted(layer.layer.cached()) == _fires(ffn, x[1])
    assert layer.wrong_rows() == []


def test_a_block_to_fill_from_must_be_whole(tmp_path):
    ffn = write_ffn(tmp_path / "f")
    layer = _with_predictor(ffn)
    for rows, first, count in [(ffn.rows[:2], 0, 3), (ffn.rows, -1, 2), (ffn.rows, 0, -1), (ffn.rows, 2**31 - 1, 1)]:
        with pytest.raises(ValueError, match="whole rows"):
            layer.layer.fill_from(rows, first, count)


def test_long_prefills_keep_no_more_than_the_window(tmp_path):
    ffn = write_ffn(tmp_path / "f", num_neurons=40)
    layer = _with_predictor(ffn, window=3)
    x = _tokens(ffn, 60)
    layer.layer.begin_fill(x.data_ptr(), 60)
    layer.layer.fill_from(ffn.rows, 0, 40)
    assert sorted(layer.layer.cached()) == sorted(set().union(*(_fires(ffn, row) for row in x[-3:])))


# Predictor


@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_uses_what_predict_says_token_by_token(tmp_path, dtype):
    ffn = write_ffn(tmp_path / "f", dtype=dtype, num_neurons=40)
    layer, other = Ffn(ffn, capacity=15, threads=2), Ffn(ffn)
    random = torch.Generator().manual_seed(4)
    a, b = torch.randn(8, 64, generator=random), torch.randn(40, 8, generator=random)
    bias = torch.randn(40, generator=random).numpy()
    for one in (layer, other):
        one.predict_by(a.to(TORCH_DTYPES[dtype]), b.to(TORCH_DTYPES[dtype]), bias, 1.5)
    x = torch.stack([random_input(ffn, seed) for seed in range(6)]).contiguous()
    for row, out in zip(x, layer.predicted(x), strict=True):
        active = other.layer.predict(row.data_ptr())
        logits = b.to(TORCH_DTYPES[dtype]).double() @ (a.to(TORCH_DTYPES[dtype]).double() @ row.double())
        logits += torch.from_numpy(bias)
        clear = (logits - 1.5).abs() > 1e-3
        assert {n for n in range(40) if clear[n] and logits[n] > 1.5} == {n for n in active if clear[n]}
        assert torch.equal(other(row, active), out)


def test_a_layer_without_predictor_says_so(tmp_path):
    ffn = write_ffn(tmp_path / "f")
    layer, x = Ffn(ffn), random_input(ffn)
    with pytest.raises(ValueError, match="layer 3 has no predictor"):
        layer.predicted(x[None])
    with pytest.raises(ValueError, match="no predictor"):
        layer.layer.begin_fill(x.data_ptr(), 1)


def test_predictors_of_other_shapes_are_refused(tmp_path):
    layer = Ffn(write_ffn(tmp_path / "f"))
    for a, b, bias in (((8, 63), (24, 8), 24), ((8, 64), (24, 7), 24), ((8, 64), (23, 8), 23), ((8, 64), (24, 8), 23)):
        with pytest.raises(ValueError, match="do not fit"):
            layer.predict_by(torch.zeros(a), torch.zeros(b), np.zeros(bias, np.float32), 0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stride": 256}, "shorter than its weights"),
        ({"stride": 520}, "multiple of 64"),
        ({"down": 260}, "shorter than its weights"),
        ({"gate": 280}, "shorter than its weights"),
        ({"ffn.gate_bias": np.zeros(24, np.float32)}, "no gate bias"),
        ({"checksums": np.zeros(23, np.uint64)}, "one checksum for every"),
        ({"count": 23, "checksums": np.zeros(23, np.uint64)}, "needs neurons with rows"),
        ({"ffn.up_bias": np.zeros(23, np.float32)}, "up_bias does not fit"),
        ({"ffn.down_bias": np.zeros(63, np.float32)}, "down_bias does not fit"),
        ({"gate": 256, "down": 512, "stride": 1024, "gate.weight": np.zeros((24, 64), np.float32)}, "rows that hold"),
        ({"memory": _core.allocate(0)}, "room for at least one row"),
        ({"memory": _core.allocate(4096)[8:]}, "multiple of 64"),
        ({"neurons": 0, "ffn.up_bias": None}, "needs"),
        ({"d_model": 0}, "needs"),
        ({"window": 0}, "window"),
        ({"cache_policy": "lru"}, "cache policy must be window or frequency, got lru"),
        ({"popularity": np.zeros(23, np.float32)}, "popularity has the wrong length"),
        ({"bypass_rows": _core.allocate(4096)[8:]}, "bypass rows must start at a multiple of 64"),
        ({"activation": "tanh"}, "tanh"),
        ({"encoding": "int8"}, "int8"),
    ],
)
def test_layers_that_cannot_be_are_refused(tmp_path, change, message):
    ffn = write_ffn(tmp_path / "f")
    _layer(ffn)
    with pytest.raises(ValueError, match=message):
        _layer(ffn, **change)


def _layer(ffn, **change):
    """A layer over `ffn`, of which something is changed."""

    def parts(**usual):
        return {name: change.pop(name, value) for name, value in usual.items()}

    biases = parts(**{"ffn.up_bias": ffn.up_bias, "ffn.gate_bias": None, "ffn.down_bias": ffn.down_bias})
    biases |= parts(**{"gate.weight": None})
    source = parts(reader=_core.Reader(1), file=_core.DirectFile(str(ffn.path)), cache_policy="window", window=1)
    source |= parts(bypass_rows=None)
    rows = parts(offset=FILE_OFFSET, count=24, checksums=ffn.checksums)
    cache = parts(memory=_core.allocate(4096), popularity=None)
    layout = parts(encoding="float32", stride=512, d_model=64, up=0, gate=-1, down=256)
    layer = parts(neurons=24, activation="relu")
    assert not change
    return _core.FfnLayer(
        layer=3,
        tensors=resident({name: values for name, values in biases.items() if values is not None}, "float32"),
        row_format=_core.RowFormat(**layout, down_encoding="float32", inputs="float32"),
        source=_core.NeuronSource(**source),
        rows=_core.FileRows(**rows),
        cache=_core.LayerCache(**cache),
        pool=_core.ThreadPool(1),
        counters=_core.Counters(),
        **layer,
    )
