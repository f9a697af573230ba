"""Rows of a canonical tensor out of a checkpoint's tensor: runs, parts of runs, transposed ones."""

from types import SimpleNamespace

import numpy as np
import pytest

from flashllm.arch.registry import Claim
from flashllm.arch.tensors import Part
from flashllm.convert.checkpoint import pieces


class OneTensor:
    """A checkpoint of one tensor that counts the bytes read."""

    def __init__(self, values):
        self.values, self.nbytes = values, 0
        self.tensors = {"x": SimpleNamespace(shape=values.shape)}

    def read(self, name, start, out):
        self.nbytes += out.nbytes
        flat = self.values.reshape(-1).view(np.uint8)
        out.reshape(-1).view(np.uint8)[:] = flat[start : start + out.nbytes]


PARTS = [
    (Part(), np.arange(24)),
    (Part(first=6, count=8), np.arange(6, 14)),
    (Part(first=2, count=2, step=6, repeats=4), np.concatenate([np.arange(f, f + 2) for f in (2, 8, 14, 20)])),
    (Part(first=0, count=3, step=3, repeats=8), np.arange(24)),
]


@pytest.mark.parametrize("columns", [(5,), ()])
@pytest.mark.parametrize(("part", "rows"), PARTS)
@pytest.mark.parametrize("together", [1, 3, 100])
def test_the_rows_asked_for_and_no_other_bytes(part, rows, together, columns):
    values = np.random.default_rng(0).standard_normal((24, *columns)).astype(np.float32)
    checkpoint = OneTensor(values)
    claim = Claim(name="y", source="x", part=part, shape=(len(rows), *columns))
    for first in range(0, len(rows), together):
        out = np.empty((min(together, len(rows) - first), *columns), np.float32)
        pieces.read_rows(checkpoint, "x", claim, first, out)
        assert np.array_equal(out, values[rows][first : first + len(out)])
    assert checkpoint.nbytes == values[rows].nbytes


@pytest.mark.parametrize("block_nbytes", [1, 300, 10**6])
def test_rows_of_a_transposed_tensor_are_its_columns(monkeypatch, block_nbytes):
    monkeypatch.setattr(pieces, "_COLUMN_NBYTES", block_nbytes)
    values = np.random.default_rng(0).integers(0, 2**16, (7, 24), dtype=np.uint16)
    for part, rows in PARTS:
        transposed = Part(first=part.first, count=part.count, step=part.step, repeats=part.repeats, transposed=True)
        claim = Claim(name="y", source="x", part=transposed, shape=(len(rows), 7))
        out = np.empty((len(rows) - 1, 7), np.uint16)
        pieces.read_rows(OneTensor(values), "x", claim, 1, out)
        assert np.array_equal(out, values.T[rows][1:])
