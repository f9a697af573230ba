"""bf12: every bit pattern comes back, and what has too many rare exponents is refused."""

import numpy as np
import pytest

from flashllm import _core
from flashllm.base.bf12 import BF12
from flashllm.base.dtypes import WEIGHT_DTYPES, cast

SIMD = _core.simd_levels()


def bfloats(*shape, seed=0):
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * np.float32(0.02)
    return cast(values, WEIGHT_DTYPES["float32"], WEIGHT_DTYPES["bfloat16"])


def test_every_pattern_comes_back():
    # 15 high bytes a vector, each with all low bytes, so that nothing escapes; then with escapes in every place.
    patterns = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    for first in range(0, 256, 15):
        bits = patterns[first : first + 15].reshape(1, -1)
        np.testing.assert_array_equal(BF12.decode(BF12.encode(bits), bits.shape[1]), bits)
    for high in range(256):
        bits = np.zeros((4, 128), np.uint16)
        for row in range(4):
            bits[row, row * 31 : row * 31 + 4] = patterns[high, row * 64 : row * 64 + 4]
        bits[:, 40] = 0x7FC1
        np.testing.assert_array_equal(BF12.decode(BF12.encode(bits), 128), bits)


@pytest.mark.parametrize("length", [1, 4, 31, 32, 33, 70, 130, 576, 4096])
def test_weights_come_back(length):
    bits = bfloats(9, length, seed=length)
    rows = BF12.encode(bits)
    assert rows.shape == (9, BF12.vector_nbytes(length))
    np.testing.assert_array_equal(BF12.decode(rows, length), bits)


def test_three_quarters_of_the_bytes():
    assert BF12.vector_nbytes(4096) == 16 + 4096 + 2048 + 3 * 32


@pytest.mark.parametrize("escapes", [0, 1, 31, 32, 33, 4096])
def test_escapes_fill_their_places_and_no_more(escapes):
    bits = bfloats(3, 4096)
    high = np.unique(bits >> 8)
    rare = np.setdiff1d(np.arange(256, dtype=np.uint16), high)
    common = np.bincount(bits[1] >> 8, minlength=256).argsort()[::-1][:15].astype(np.uint16)
    bits[1] = common[np.arange(4096) % 15] << 8 | np.uint16(3)
    at = np.random.default_rng(1).permutation(4096)[:escapes]
    bits[1, at] = rare[np.arange(escapes) % len(rare)] << 8 | np.uint16(7)
    assert BF12.holds(bits) == (escapes <= 32)
    if escapes > 32:
        with pytest.raises(OverflowError, match="of a vector's 4096 weights have rare exponents"):
            BF12.encode(bits)
        return
    np.testing.assert_array_equal(BF12.decode(BF12.encode(bits), 4096), bits)


@pytest.mark.parametrize("simd", SIMD)
@pytest.mark.parametrize("many", [False, True])
def test_products_are_those_of_bfloat16(simd, many):
    for width in (1, 17, 32, 33, 70, 96, 130, 320, 1000):
        bits = bfloats(21, width, seed=width)
        bits[::3, :: max(1, width // 3)] ^= 0x3000  # escapes
        x = bfloats(4, width, seed=1)
        found = []
        for weight, encoding in ((bits, None), (BF12.encode(bits), "bf12")):
            native = _core.Linear(weight, None, "bfloat16", _core.ThreadPool(2), simd, encoding, width)
            out = np.zeros((4, 21), np.float32 if many else np.uint16)
            native.forward(x, out, many)
            found.append(out)
        np.testing.assert_array_equal(found[0], found[1], err_msg=str(width))


def test_vectors_that_are_too_long_and_wrong_rows():
    with pytest.raises(OverflowError, match="longer than 65535"):
        BF12.encode(np.zeros((1, 65536), np.uint16))
    with pytest.raises(ValueError, match="rows must be uint8"):
        BF12.decode(np.zeros((1, 7), np.uint8), 64)
