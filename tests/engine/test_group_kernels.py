"""Kernels over weights in groups: bit for bit those of fp32 over the same weights, widened."""

import numpy as np
import pytest
from ffn_rows import FILE_OFFSET, resident, row_format

from flashllm import _core
from flashllm.base.group_codes import GROUP_CODES

ENCODINGS = sorted(GROUP_CODES)
SIMD = _core.simd_levels()
WIDTHS = (32, 64, 96, 320)
ODD_WIDTHS = (1, 17, 33, 70, 100, 130)


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def products(weight, x, simd, *, threads=1, many=False, encoding=None, columns=None):
    native = _core.Linear(weight, None, "float32", _core.ThreadPool(threads), simd, encoding, columns)
    out = np.full((len(x), len(weight)), np.nan, np.float32)
    native.forward(x, out, many)
    return out


@pytest.mark.parametrize("simd", SIMD)
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("many", [False, True])
def test_products_are_those_of_the_widened_weights(encoding, simd, many):
    code = GROUP_CODES[encoding]
    for width in WIDTHS + ODD_WIDTHS:
        rows = code.encode(random(21, width, seed=width))
        widened, x = code.decode(rows, width), random(4, width, seed=1)
        found = products(rows, x, simd, many=many, encoding=encoding, columns=width)
        np.testing.assert_array_equal(found, products(widened, x, simd, many=many), err_msg=str(width))
        for threads in (2, 3):
            other = products(rows, x, simd, threads=threads, many=many, encoding=encoding, columns=width)
            np.testing.assert_array_equal(other, found)


@pytest.mark.parametrize("simd", SIMD)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_products_by_inputs_are_one_sum_whatever_the_tokens(simd, dtype):
    """Vectors along the outputs: few tokens and many have the same bits, those of a chain in the order of inputs."""
    for encoding, width in ((one, width) for one in ENCODINGS for width in (17, 64, 100)):
        code = GROUP_CODES[encoding]
        rows, bias = code.encode(random(300, width, seed=width)), random(width, seed=2)
        x = random(20, 300, seed=1).astype(dtype)
        one, several = (
            _core.Linear(rows, bias, dtype, _core.ThreadPool(threads), simd, encoding, width, "int16", True)
            for threads in (1, 3)
        )
        found = np.empty((20, width), np.float32)
        one.forward(x, found, many=True)
        expected = x.astype(np.float64) @ code.decode(rows, width) + bias
        np.testing.assert_allclose(found, expected, atol=1e-3)
        for first, last in ((0, 20), (0, 1), (3, 10), (12, 20)):
            out = np.empty((last - first, width), np.float32)
            several.forward(x[first:last], out, many=True)
            np.testing.assert_array_equal(out, found[first:last])
            few = np.empty(out.shape, dtype)
            several.forward(x[first:last], few)
            np.testing.assert_array_equal(few, out.astype(dtype))
    with pytest.raises(ValueError, match="one value an output"):
        _core.Linear(rows, random(300), dtype, _core.ThreadPool(1), simd, encoding, width, "int16", True)
    with pytest.raises(ValueError, match="encoding must be"):
        _core.Linear(random(4, 4), None, "float32", _core.ThreadPool(1), simd, None, None, "float32", True)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_no_rows_no_tokens_and_wrong_shapes(encoding):
    rows = GROUP_CODES[encoding].encode(random(3, 40))
    assert products(rows[:0], random(2, 40), "auto", encoding=encoding, columns=40).shape == (2, 0)
    assert products(rows, random(0, 40), "auto", encoding=encoding, columns=40).shape == (0, 3)
    with pytest.raises(Exception, match="not of its dtype or encoding"):
        products(rows, random(1, 80), "auto", encoding=encoding, columns=80)


def ffn_layer(tmp_path, rows, *, d_model, encoding, threads, simd, gated):
    """A layer whose rows are all cached, by reading them: up, gate (if any) and down, each `vector` bytes."""
    path = tmp_path / f"{encoding}-{len(rows)}"
    stride = rows.shape[1]
    path.write_bytes(bytes(FILE_OFFSET) + rows.tobytes())
    vector = GROUP_CODES[encoding].vector_nbytes(d_model) if encoding in GROUP_CODES else 4 * d_model
    return _core.FfnLayer(
        layer=0,
        tensors=resident({}, "float32", simd),
        row_format=row_format(encoding, d_model, stride=stride, vector_nbytes=vector, gated=gated),
        neurons=len(rows),
        activation="relu",
        source=_core.NeuronSource(
            reader=_core.Reader(threads=2), file=_core.DirectFile(str(path), False), cache_policy="window", window=2
        ),
        rows=_core.FileRows(offset=FILE_OFFSET, count=len(rows), checksums=_core.xxh3_64_rows(rows)),
        cache=_core.LayerCache(_core.allocate(len(rows) * stride)),
        pool=_core.ThreadPool(threads),
        counters=_core.Counters(),
    )


def padded(rows):
    stride = max(512, -(-rows.shape[1] // 512) * 512)
    out = np.zeros((len(rows), stride), np.uint8)
    out[:, : rows.shape[1]] = rows
    return out


@pytest.mark.parametrize("simd", SIMD)
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("gated", [False, True])
def test_a_layer_is_that_of_the_widened_weights(tmp_path, encoding, simd, gated):
    code = GROUP_CODES[encoding]
    for width in WIDTHS if simd == "scalar" else WIDTHS + ODD_WIDTHS:  # scalar rows of other widths end otherwise
        vectors = [code.encode(random(19, width, seed=seed)) for seed in range(3 if gated else 2)]
        coded = padded(np.concatenate(vectors, axis=1))
        plain = padded(np.concatenate([code.decode(v, width) for v in vectors], axis=1).view(np.uint8))
        x = random(width, seed=9)
        active = np.flatnonzero(np.arange(19) % 4).astype(np.int32)
        found = []
        for rows, name, threads in ((plain, "float32", 1), (coded, encoding, 1), (coded, encoding, 3)):
            layer = ffn_layer(tmp_path, rows, d_model=width, encoding=name, threads=threads, simd=simd, gated=gated)
            y = np.full(width, np.nan, np.float32)
            layer.forward_active(x.ctypes.data, active, y.ctypes.data)
            found.append(y)
        np.testing.assert_array_equal(found[1], found[0], err_msg=str(width))
        np.testing.assert_array_equal(found[2], found[1], err_msg=str(width))
