"""Codes in groups: literal bytes, errors within half a step, and what cannot be coded."""

import numpy as np
import pytest
from native_arrays import narrow, rounded

from flashllm import _core
from flashllm.base.group_codes import GROUP_CODES, code_of

CODES = sorted(GROUP_CODES.values(), key=lambda code: code.name)
LENGTHS = (1, 31, 32, 33, 64, 70, 96, 128, 200)


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def halves(*values):
    return np.array(values, "<f2").tobytes()


def test_literal_bytes_of_8_bits():
    values = np.zeros((1, 33), np.float32)
    values[0, :3] = (-1.0, 0.5, 127 / 128)
    values[0, 32] = -2.0
    (row,) = GROUP_CODES["int8_32"].encode(values)
    codes = np.zeros(64, np.int8)
    codes[:3], codes[32] = (-128, 64, 127), -128
    assert row.tobytes() == halves(2**-7, 2**-6) + codes.tobytes()


def test_literal_bytes_of_4_bits():
    values = np.zeros((1, 32), np.float32)
    values[0, [0, 1, 16]] = (-8.0, 7.0, 3.0)
    (row,) = GROUP_CODES["int4_32"].encode(values)
    assert row.tobytes() == halves(1.0) + bytes([0xB0, 0x8F] + [0x88] * 14)


def test_literal_bytes_with_a_minimum():
    values = np.arange(32, dtype=np.float32)[None] % 16 * 0.5 - 3.0
    (row,) = GROUP_CODES["int4_32_min"].encode(values)
    assert row.tobytes() == halves(0.5, -3.0) + bytes(17 * i for i in range(16))
    np.testing.assert_array_equal(GROUP_CODES["int4_32_min"].decode(row[None], 32), values)


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
def test_weights_come_back_within_a_step(code):
    for length in LENGTHS:
        values = random(5, length, seed=length) * np.float32(0.02)
        rows = code.encode(values)
        assert rows.shape == (5, code.vector_nbytes(length))
        for first in range(0, length, code.group):
            group = values[:, first : first + code.group]
            span = np.ptp(group, axis=1) if code.has_minimum else 2 * np.abs(group).max(axis=1)
            # Filled up with zeros, a group reaches to 0.
            span = np.maximum(span, np.abs(group).max(axis=1)) + 1e-6
            error = np.abs(code.decode(rows, length)[:, first : first + code.group] - group)
            assert (error.max(axis=1) <= 1.1 * span / (2**code.bits - 1)).all()


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
def test_zeros_constants_and_tiny_weights(code):
    for value in (0.0, 3.0, -3.0):
        constant = np.full((2, 2 * code.group), value, np.float32)
        np.testing.assert_array_equal(code.decode(code.encode(constant), 2 * code.group), constant)
    tiny = random(2, code.group) * np.float32(1e-30)
    np.testing.assert_allclose(code.decode(code.encode(tiny), code.group), 0.0, atol=1e-7)


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
def test_encoding_is_fitting_rounding_and_packing(code):
    """The native encoder has the bytes of its three steps in numpy, of weights of any dtype and for any threads."""
    for length in LENGTHS:
        for dtype in ("float32", "float16", "bfloat16"):
            stored = narrow(rounded(random(37, length, seed=length), dtype), dtype)
            values = rounded(random(37, length, seed=length), dtype)
            grid = code.fit(values)
            padded = np.pad(values, ((0, 0), (0, -length % code.group)))
            grouped = padded.reshape(37, -1, code.group)
            expected = code.pack(grid.codes(grouped), grid)
            for threads in (1, 3):
                found = np.full_like(expected, 0xFF)
                _core.encode_rows(stored, dtype, code.name, found, _core.ThreadPool(threads))
                np.testing.assert_array_equal(found, expected)


def test_a_group_keeps_its_largest_weights_where_it_has_a_minimum():
    """Ranges narrower than the group's own lose fewer squares, and a model more."""
    values = random(200, 64, seed=3)
    back = GROUP_CODES["int4_64_min"].decode(GROUP_CODES["int4_64_min"].encode(values), 64)
    step = np.ptp(values, axis=1) / 15
    largest = np.abs(back.max(axis=1) - values.max(axis=1)) / step
    assert largest.mean() < 0.25  # 0.35 with narrower ones


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
def test_groups_are_fitted_apart(code):
    """A group's bytes do not depend on its neighbours, nor on where it lies."""
    values = random(3, 5 * code.group)
    rows = code.encode(values)
    for group in range(5):
        alone = code.encode(np.ascontiguousarray(values[:, group * code.group : (group + 1) * code.group]))
        np.testing.assert_array_equal(
            code.decode(alone, code.group),
            code.decode(rows, 5 * code.group)[:, group * code.group : (group + 1) * code.group],
        )


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
def test_no_range_near_the_chosen_one_is_much_better(code):
    """The error is near that of the best of 300 ranges, each with its own best scale and minimum."""
    values = random(40, code.group, seed=7)
    found = np.square(code.decode(code.encode(values), code.group) - values).sum()
    best = np.full(len(values), np.inf)
    low = values.min(axis=1, keepdims=True)
    signed = np.take_along_axis(values, np.abs(values).argmax(axis=1)[:, None], 1)
    for share in np.linspace(0.7, 1.3, 300):
        if code.has_minimum:
            codes = np.clip(np.rint((values - low) / (share * np.ptp(values, axis=1, keepdims=True) / 15)), 0, 15)
            x, y = (each - each.mean(axis=1, keepdims=True) for each in (codes, values))
        else:
            half = 2 ** (code.bits - 1)
            x, y = np.clip(np.rint(values * -half / (share * signed)), -half, half - 1), values
        explained = np.square((x * y).sum(axis=1)) / np.square(x).sum(axis=1)
        best = np.minimum(best, np.square(y).sum(axis=1) - explained)
    assert found <= 1.15 * best.sum()


def test_least_squares_beats_the_largest_value():
    values = random(64, 1024)
    errors = {code.name: float(np.square(code.decode(code.encode(values), 1024) - values).mean()) for code in CODES}
    scale = np.abs(values.reshape(64, -1, 32)).max(axis=2, keepdims=True) / 8
    nearest = np.clip(np.rint(values.reshape(64, -1, 32) / scale), -8, 7) * scale
    assert errors["int4_32"] < 0.95 * np.square(nearest.reshape(64, -1) - values).mean()
    assert errors["int8_32"] < errors["int8_64"] < errors["int4_32_min"] < errors["int4_32"] < errors["int4_64"]


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
def test_what_cannot_be_coded_is_refused(code):
    values = random(2, 64)
    for bad in (np.nan, np.inf, -np.inf):
        values[1, 3] = bad
        with pytest.raises(OverflowError, match="not finite"):
            code.encode(values)
    for bad in (1e9, -1e25):  # the squares of the second overflow
        values[1, 3] = bad
        with pytest.raises(OverflowError, match="outside the range of float16"):
            code.encode(values)
    with pytest.raises(ValueError, match="rows must be uint8"):
        code.decode(np.zeros((2, 3), np.uint8), 64)


def test_encodings_by_their_numbers():
    assert code_of(4).name == "int4_32"
    assert code_of(4, 64, has_minimum=True).name == "int4_64_min"
    with pytest.raises(ValueError, match="no codes of 8 bits in groups of 32 with minimums"):
        code_of(8, has_minimum=True)
