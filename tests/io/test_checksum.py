"""Row checksums against PyPI's xxhash: every length a row can have, and every byte counted."""

import numpy as np
import pytest
import xxhash

from flashllm import _core


def test_equals_xxhash_at_every_length():
    for stride in (*range(512, 20001, 64), *range(513, 3200)):
        rows = np.random.default_rng(stride).integers(0, 256, (3, stride), dtype=np.uint8)
        expected = [xxhash.xxh3_64_intdigest(row.tobytes()) for row in rows]
        assert _core.xxh3_64_rows(rows).tolist() == expected, stride


def test_equals_xxhash_on_extreme_bytes():
    rows = np.stack([np.zeros(4096, np.uint8), np.full(4096, 255, np.uint8)])
    assert _core.xxh3_64_rows(rows).tolist() == [xxhash.xxh3_64_intdigest(row.tobytes()) for row in rows]


def test_every_bit_of_a_row_counts():
    row = np.random.default_rng(1).integers(0, 256, 1088, dtype=np.uint8)
    rows = np.tile(row, (8 * 1088 + 1, 1))
    for bit in range(8 * 1088):
        rows[bit, bit // 8] ^= 1 << bit % 8
    assert len(set(_core.xxh3_64_rows(rows).tolist())) == 8 * 1088 + 1


def test_no_rows_no_checksums():
    assert _core.xxh3_64_rows(np.zeros((0, 512), np.uint8)).shape == (0,)


@pytest.mark.parametrize("stride", [0, 64, 448, 511])
def test_refuses_rows_it_cannot_hash(stride):
    with pytest.raises(ValueError, match="at least 512"):
        _core.xxh3_64_rows(np.zeros((2, stride), np.uint8))
