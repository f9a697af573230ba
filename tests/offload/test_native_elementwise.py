"""What lies between a layer's products, against numpy step by step: every step rounded once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_arrays import DTYPES, LEVELS, empty, narrow, random_values, rounded, widen

from flashllm import _core

CASES = [(dtype, level) for dtype in DTYPES for level in LEVELS]
ACTIVATIONS = {
    "relu": lambda x: np.where(x <= 0, np.float32(0), x),
    "squared_relu": lambda x: np.where(x <= 0, np.float32(0), x * x),
    "silu": lambda x: x / (np.float32(1) + np.exp(-x)),
}
SIZES = st.sampled_from([1, 7, 16, 1023, 1024, 1025, 17 * 1024 + 5, 40_001])


def elementwise(dtype, level, threads=2):
    return _core.Elementwise(dtype, _core.ThreadPool(threads), level)


def close(got, expected, dtype):
    """Equal within a unit in the last place: numpy's exp is not the C library's."""
    step = {"float32": 1e-6, "float16": 2**-10, "bfloat16": 2**-7}[dtype]
    return np.all(np.abs(widen(got, dtype) - expected) <= step * np.abs(expected) + 1e-7)


@pytest.mark.parametrize(("dtype", "level"), CASES)
@settings(max_examples=10, deadline=None)
@given(n=SIZES)
def test_sums_and_scales_are_rounded_once(dtype, level, n):
    x, y = random_values(n, seed=1), random_values(n, seed=2)
    x, y = rounded(x, dtype), rounded(y, dtype)
    native = elementwise(dtype, level)
    out = narrow(x, dtype)
    native.add(out, narrow(y, dtype))
    assert np.array_equal(out, narrow(x + y, dtype))
    native.scale(out, 0.3)
    assert np.array_equal(out, narrow(rounded(x + y, dtype) * np.float32(0.3), dtype))
    wide = np.empty(n, np.float32)
    native.widen(out, wide)
    again = empty(n, dtype)
    native.narrow(wide, again)
    assert np.array_equal(wide, widen(out, dtype))
    assert np.array_equal(again, out)


@pytest.mark.parametrize(("dtype", "level"), CASES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@settings(max_examples=5, deadline=None)
@given(n=SIZES)
def test_an_activation_is_rounded_before_its_product(dtype, level, activation, n):
    x, gate = (rounded(random_values(n, seed=seed), dtype) for seed in (1, 2))
    native = elementwise(dtype, level)
    out = narrow(x, dtype)
    native.activate(out, None, activation)
    assert close(out, ACTIVATIONS[activation](x), dtype)
    act = narrow(gate, dtype)
    native.activate(act, None, activation)
    out = narrow(x, dtype)
    native.activate(out, narrow(gate, dtype), activation)
    assert np.array_equal(out, narrow(widen(act, dtype) * x, dtype))


@pytest.mark.parametrize(("dtype", "level"), CASES)
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_norms(dtype, level, kind):
    x = rounded(random_values(5, 33, seed=1), dtype)
    for weight, bias in ((None, None), (random_values(33, seed=2), None), (random_values(33, seed=2),) * 2):
        out = empty(x.shape, dtype)
        elementwise(dtype, level).normalize(narrow(x, dtype), out, kind, 1e-5, weight, bias)
        wide = x.astype(np.float64)
        centred = wide - wide.mean(1, keepdims=True) if kind == "layer" else wide
        expected = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5)
        expected = expected * (1 if weight is None else weight) + (0 if bias is None else bias)
        assert np.abs(widen(out, dtype) - expected).max() <= {"float32": 1e-5, "float16": 4e-3}.get(dtype, 3e-2)
        in_place = narrow(x, dtype)
        elementwise(dtype, level, 1).normalize(in_place, in_place, kind, 1e-5, weight, bias)
        assert np.array_equal(in_place, out)


@pytest.mark.parametrize(("dtype", "level"), CASES)
@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_rotation(dtype, level, style, factor):
    tokens, heads, dim, dims = 21, 3, 10, 8
    x = rounded(random_values(tokens, heads, dim, seed=1), dtype)
    positions = np.random.default_rng(2).integers(0, 4000, tokens)
    inverse = (1.0 / 10000 ** (np.arange(0, dims, 2) / dims)).astype(np.float32)
    angles = positions.astype(np.float32)[:, None] * inverse
    cosine, sine = (np.float32(1.5) * function(angles)[:, None, :] for function in (np.cos, np.sin))
    pairs = (slice(0, 4), slice(4, 8)) if style == "half" else (slice(0, 8, 2), slice(1, 8, 2))
    expected = x.copy()
    expected[..., pairs[0]] = x[..., pairs[0]] * cosine - x[..., pairs[1]] * sine
    expected[..., pairs[1]] = x[..., pairs[1]] * cosine + x[..., pairs[0]] * sine
    out = narrow(x, dtype).reshape(tokens, heads * dim)
    elementwise(dtype, level).rotate(out, heads, positions, inverse, dims, style, 1.5, factor)
    difference = widen(out, dtype).reshape(x.shape) - expected * np.float32(factor)
    assert np.abs(difference).max() <= {"float32": 1e-5, "float16": 4e-3}.get(dtype, 3e-2)


def test_what_does_not_fit_is_refused():
    native = elementwise("bfloat16", "auto")
    x = np.zeros((2, 6), np.uint16)
    frequency, positions = np.ones(2, np.float32), np.zeros(2, np.int64)
    with pytest.raises(ValueError, match="x must be of the model's dtype"):
        native.scale(x.view(np.float16), 2.0)
    with pytest.raises(ValueError, match="same size"):
        native.add(x, x[:1])
    with pytest.raises(ValueError, match="same size"):
        native.activate(x, x[:1], "relu")
    with pytest.raises(ValueError, match="same size"):
        native.widen(x, np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="unknown activation"):
        native.activate(x, None, "tanh")
    with pytest.raises(ValueError, match="one value a column"):
        native.normalize(x, x, "rms", 1e-5, np.ones(5, np.float32), None)
    with pytest.raises(ValueError, match="out must be"):
        native.normalize(x, x[:1], "rms", 1e-5, None, None)
    with pytest.raises(ValueError, match="layer or rms"):
        native.normalize(x, x, "batch", 1e-5, None, None)
    with pytest.raises(ValueError, match="every token needs a position"):
        native.rotate(x, 1, positions[:1], frequency, 4)
    with pytest.raises(ValueError, match="must not be negative"):
        native.rotate(x, 1, positions - 1, frequency, 4)
    with pytest.raises(ValueError, match="beyond the head's"):
        native.rotate(x, 2, positions, frequency, 4)
    with pytest.raises(ValueError, match="come in pairs"):
        native.rotate(x, 1, positions, frequency, 5)
