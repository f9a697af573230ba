"""Group-wise quantisation: literal bytes, and at every level the bits of numpy's arithmetic (group_codec.py)."""

import group_codec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_arrays import DTYPES, LEVELS, empty, narrow, rounded

from flashllm import _core

BITS = [2, 3, 4, 8]
POOL = _core.ThreadPool(3)
ALONG = st.sampled_from(["outputs", "inputs"])
VALUES = st.sampled_from(["normal", "constant", "zeros", "tiny", "huge", "subnormal", "far", "outlier"])


def matrix(rows, columns, kind, dtype, seed):
    """float32 values of one kind, exact in the dtype."""
    random = np.random.default_rng(seed)
    values = random.standard_normal((rows, columns), dtype=np.float32)
    if kind == "constant":
        values[:] = 0.7
    if kind == "zeros":
        values = random.choice(np.array([0.0, -0.0], np.float32), (rows, columns))
    if kind == "outlier":
        values[rows // 2] *= 1000
    values *= {"tiny": 1e-6, "subnormal": 1e-40, "huge": 1e4 if dtype == "float16" else 6e37}.get(kind, 1.0)
    return rounded(values + (1000 if kind == "far" else 0), dtype)


def pack(values, dtype, bits, level="auto", along="outputs", *, scales="range"):
    out = np.full(_core.packed_weight_nbytes(*values.shape, bits, along), 0xFF, np.uint8)
    _core.pack_weights(narrow(values, dtype), dtype, bits, out, POOL, level, along, scales)
    return out


def unpack(packed, shape, bits, level="auto", along="outputs"):
    out = np.full(shape, np.nan, np.float32)
    _core.unpack_weights(packed, *shape, bits, out, POOL, level, along)
    return out


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bits", BITS)
@settings(max_examples=40, deadline=None)
@given(
    shape=st.tuples(
        st.sampled_from([1, 2, 63, 64, 65, 130]), st.sampled_from([1, 15, 16, 17, 64, 100, 255, 256, 257, 300])
    ),
    values=st.tuples(VALUES, st.sampled_from(DTYPES)),
    along=ALONG,
)
def test_packing_has_the_bits_of_numpy(level, bits, shape, values, along):
    kind, dtype = values
    values = matrix(*shape, kind, dtype, 1)
    expected, back = group_codec.pack_weights(values, bits, along)
    packed = pack(values, dtype, bits, level, along)
    assert np.array_equal(packed, expected)
    assert np.array_equal(unpack(packed, values.shape, bits, level, along), back)


@pytest.mark.parametrize("bits", BITS)
@settings(max_examples=30, deadline=None)
@given(
    shape=st.tuples(st.sampled_from([1, 2, 63, 64, 65, 130]), st.sampled_from([1, 15, 17, 64, 100, 257, 300])),
    values=st.tuples(VALUES, st.sampled_from(DTYPES)),
    along=ALONG,
)
def test_scales_of_least_squares_are_the_same_at_every_level(bits, shape, values, along):
    kind, dtype = values
    values = matrix(*shape, kind, dtype, 1)
    packed = [pack(values, dtype, bits, level, along, scales="squares") for level in LEVELS]
    assert all(np.array_equal(each, packed[0]) for each in packed)
    assert np.isfinite(unpack(packed[0], values.shape, bits, along=along)).all()


@pytest.mark.parametrize("along", ["outputs", "inputs"])
@pytest.mark.parametrize("kind", ["normal", "far", "outlier", "constant"])
def test_least_squares_lose_less_than_the_range(along, kind):
    values = matrix(130, 200, kind, "float32", 1)
    lost = {
        scales: np.square(
            unpack(pack(values, "float32", 4, along=along, scales=scales), values.shape, 4, along=along) - values
        )
        for scales in ("range", "squares")
    }
    assert lost["squares"].sum() <= lost["range"].sum() * (0.99 if kind == "normal" else 1.0001)


@pytest.mark.parametrize("bits", BITS)
def test_a_value_is_off_by_half_a_step(bits):
    values = matrix(128, 96, "normal", "float32", 1)
    back = unpack(pack(values, "float32", bits), values.shape, bits)
    step = (values.reshape(2, 64, 96).max(1) - values.reshape(2, 64, 96).min(1)) / (2**bits - 1)
    # Half a step, and what fp16 moves the scale and the minimum by.
    bound = 0.5 * step + (2**bits * step + np.abs(values).max()) * 2**-11
    assert (np.abs(values - back).reshape(2, 64, 96).max(1) <= bound).all()


def test_literal_bytes():
    """Rows 0 to 15 of one column are its codes: scale 1, minimum -3."""
    column = np.arange(16, dtype=np.float32)[:, None] - 3
    packed = pack(column, "float32", 4)
    scales, minimums, codes = packed[:32].view(np.float16), packed[32:64].view(np.float16), packed[64:]
    assert (scales == 1).all()
    assert (minimums == -3).all()
    assert np.array_equal(codes.reshape(16, 8), np.repeat(np.arange(16) * 0x11, 8).reshape(16, 8))
    # Columns of 0 and c: the second row has the largest code in all columns but the first.
    row = np.stack([np.zeros(16), np.arange(16)]).astype(np.float32)
    for bits, expected in (
        (2, [0xFC, 0xFF, 0xFF, 0xFF]),
        (3, [0xFC, 0xFF, 0xFF, 0xFF, 0xFE, 0xFF]),
        (4, [0xF0, *[0xFF] * 7]),
        (8, [0, *[0xFF] * 15]),
    ):
        assert pack(row, "float32", bits)[64:].tolist() == [0] * (2 * bits) + expected


def test_what_cannot_be_packed_is_refused():
    for value in (np.nan, np.inf, -np.inf):
        values = np.zeros((70, 20), np.float32)
        values[66, 19] = value
        with pytest.raises(ValueError, match="not finite"):
            pack(values, "float32", 4)
    with pytest.raises(ValueError, match="2, 3, 4 or 8"):
        _core.packed_weight_nbytes(4, 4, 5)
    with pytest.raises(ValueError, match="outputs or inputs, not rows"):
        _core.packed_weight_nbytes(4, 4, 4, "rows")
    with pytest.raises(ValueError, match="range or of squares, not best"):
        pack(np.zeros((4, 4), np.float32), "float32", 4, scales="best")
    with pytest.raises(ValueError, match="at least one row"):
        _core.packed_weight_nbytes(0, 4, 4)
    values, out = np.zeros((4, 4), np.float32), np.zeros(_core.packed_weight_nbytes(4, 4, 4), np.uint8)
    with pytest.raises(ValueError, match="bytes, got"):
        _core.pack_weights(values, "float32", 4, out[:-1], POOL)
    with pytest.raises(ValueError, match="16 bytes"):
        _core.pack_weights(values, "float32", 4, np.zeros(out.size + 2, np.uint8)[2:], POOL)
    with pytest.raises(ValueError, match="dtype"):
        _core.pack_weights(values, "bfloat16", 4, out, POOL)
    with pytest.raises(ValueError, match="out must be"):
        _core.unpack_weights(out, 4, 4, 4, np.zeros((4, 5), np.float32), POOL)


def products(native, x, rows, dtype):
    out = empty((len(x), rows), dtype)
    native.forward_many(narrow(x, dtype), out)
    return out


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=15, deadline=None)
@given(
    packing=st.tuples(st.sampled_from(BITS), ALONG),
    shape=st.tuples(st.sampled_from([1, 11, 48, 64, 77, 150]), st.sampled_from([1, 16, 100, 256, 520])),
    tokens=st.sampled_from([1, 3, 16, 300]),
)
def test_packed_products_have_the_bits_of_the_unpacked_weights(level, dtype, packing, shape, tokens):
    bits, along = packing
    rows, columns = shape
    values = matrix(rows, columns, "normal", "bfloat16", 1)
    bias = matrix(1, rows, "normal", "float32", 2)[0] if tokens != 3 else None
    x = matrix(tokens, columns, "normal", dtype, 3)
    packed = pack(values, "bfloat16", bits, along=along)
    native = _core.PackedLinear(packed, rows, columns, bits, bias, dtype, POOL, level, along)
    out = products(native, x, rows, dtype)
    # fp32 weights and inputs are never multiplied in pairs; the output is rounded once.
    wide = _core.Linear(unpack(packed, values.shape, bits, along=along), bias, "float32", _core.ThreadPool(1), level)
    assert np.array_equal(out, narrow(products(wide, x, rows, "float32"), dtype))
    # A token's bits do not depend on its company.
    assert np.array_equal(products(native, x[-1:], rows, dtype), out[-1:])


def test_products_that_do_not_fit_are_refused():
    packed = pack(np.zeros((4, 6), np.float32), "float32", 4)
    native = _core.PackedLinear(packed, 4, 6, 4, None, "float32", POOL)
    x, out = np.zeros((2, 6), np.float32), np.zeros((2, 4), np.float32)
    for bad_x, bad_out in ((x[:, :5].copy(), out), (x, out[:1]), (x.astype(np.float16), out), (x, out.astype("f2"))):
        with pytest.raises(ValueError, match="must be"):
            native.forward_many(bad_x, bad_out)
    with pytest.raises(ValueError, match="bytes, got"):
        _core.PackedLinear(packed, 4, 6, 3, None, "float32", POOL)
    with pytest.raises(ValueError, match="one value a row"):
        _core.PackedLinear(packed, 4, 6, 4, np.zeros(3, np.float32), "float32", POOL)
