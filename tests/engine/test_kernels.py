"""Kernels at every SIMD level: right against float64, the same bits for any threads and any number of tokens."""

import numpy as np
import pytest
import torch
from ffn_rows import TORCH_DTYPES

from flashllm import _core

DTYPES = sorted(TORCH_DTYPES)
SIMD = _core.simd_levels()
LENGTHS = [1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 63, 65, 127, 130, 320, 1000]


_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def _bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def _random(*shape, dtype="float32", seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(TORCH_DTYPES[dtype])


def _linear(weight, bias, x, *, threads=1, simd="auto"):
    """x [tokens, columns] through our kernel: [tokens, rows] in the weights' dtype."""
    native = _core.Linear(weight, bias, _NAMES[weight.dtype], _core.ThreadPool(threads), simd)
    out = torch.full((len(x), len(weight)), torch.nan, dtype=weight.dtype)
    native.forward(x, out)
    return out


@pytest.mark.parametrize("simd", SIMD)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 33), (5, 100), (70, 64), (333, 257)])
def test_bits_do_not_depend_on_threads_or_tokens(dtype, simd, rows, columns):
    weight, x = _random(rows, columns, dtype=dtype), _random(9, columns, dtype=dtype, seed=1)
    bias = _random(rows, seed=2).numpy()
    alone = torch.cat([_linear(weight, bias, row[None], simd=simd) for row in x])
    for threads in (1, 2, 3, 4):
        assert torch.equal(_bits(_linear(weight, bias, x, threads=threads, simd=simd)), _bits(alone))
    # Nor on where a row lies among the others.
    backwards = _linear(weight.flip(0).contiguous(), bias[::-1].copy(), x, simd=simd)
    assert torch.equal(_bits(backwards.flip(1)), _bits(alone))


@pytest.mark.skipif("avx512_amx" not in SIMD, reason="the processor has no tiles")
@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (16, 64), (53, 320), (115, 288)])
def test_a_prompts_bfloat16_is_summed_in_tiles_of_32_terms(rows, columns):
    weight, x = _random(rows, columns, dtype="bfloat16"), _random(37, columns, dtype="bfloat16", seed=1)
    expected = np.zeros((37, rows), np.float32)
    for first in range(0, columns, 32):
        halves = np.zeros((2, 37, rows), np.float32)
        for j in range(first, first + 32):
            halves[j % 2] += np.outer(x[:, j].float().numpy(), weight[:, j].float().numpy())
        expected += halves[0] + halves[1]
    for threads, tokens in ((1, 37), (3, 37), (1, 5)):
        native = _core.Linear(weight, None, "bfloat16", _core.ThreadPool(threads), "avx512_amx")
        found = np.empty((tokens, rows), np.float32)
        native.forward(x[:tokens].contiguous(), found, many=True)
        np.testing.assert_array_equal(found, expected[:tokens])


def test_no_tokens_and_no_rows():
    assert _linear(_random(4, 8), None, _random(0, 8)).shape == (0, 4)
    assert _linear(_random(0, 8), None, _random(2, 8)).shape == (2, 0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e30])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_so(dtype, value):
    weight, x = torch.ones(5, 40, dtype=TORCH_DTYPES[dtype]), torch.ones(1, 40, dtype=TORCH_DTYPES[dtype])
    x[0, 7] = value
    assert torch.equal(_linear(weight, None, x).isnan(), (x @ weight.T).isnan())
    assert torch.equal(_linear(weight, None, x).isinf(), (x @ weight.T).isinf())


@pytest.mark.parametrize(
    ("weight", "bias", "error"),
    [
        (np.zeros(8, np.float32), None, TypeError),
        (np.zeros((4, 8), np.float64), None, ValueError),
        (np.zeros((4, 8), np.uint16), None, ValueError),
        (np.zeros((8, 8), np.float32)[:, ::2], None, TypeError),
        (np.zeros((4, 8), np.float32), np.zeros(3, np.float32), ValueError),
        (np.zeros((4, 8), np.float32), np.zeros(4, np.float64), TypeError),
    ],
)
def test_weights_that_cannot_be_used_are_refused(weight, bias, error):
    with pytest.raises(error):
        _core.Linear(weight, bias, "float32", _core.ThreadPool(1))


def test_inputs_and_outputs_that_do_not_fit_are_refused():
    linear = _core.Linear(np.zeros((4, 8), np.float32), None, "float32", _core.ThreadPool(1))
    for x, out in (((1, 8), (2, 4)), ((1, 4), (1, 4)), ((1, 8), (1, 8))):
        for many in (False, True):
            with pytest.raises(ValueError, match=r"\[tokens, inputs\], outputs \[tokens, outputs\]"):
                linear.forward(np.zeros(x, np.float32), np.zeros(out, np.float32), many)
    with pytest.raises(ValueError, match="dtype"):
        linear.forward(np.zeros((1, 8), np.float16), np.zeros((1, 4), np.float32))


def test_bfloat16_may_come_as_its_bits():
    weight, x = _random(5, 16, dtype="bfloat16"), _random(2, 16, dtype="bfloat16", seed=1)
    bits = [tensor.view(torch.uint16).numpy() for tensor in (weight, x)]
    out = np.zeros((2, 5), np.uint16)
    _core.Linear(bits[0], None, "bfloat16", _core.ThreadPool(1)).forward(bits[1], out)
    assert np.array_equal(out, _linear(weight, None, x).view(torch.uint16).numpy())


def test_levels_by_name():
    assert _core.best_simd_level() == SIMD[-1]
    assert SIMD[0] == "scalar"
    names = {"scalar", "neon", "neon_dot", "avx2", "avx2_vnni", "avx512", "avx512_bf16", "avx512_amx"}
    assert set(SIMD) <= names
    with pytest.raises(ValueError, match="sse9"):
        _linear(_random(4, 8), None, _random(1, 8), simd="sse9")


@pytest.mark.parametrize("threads", [0, -1, 1025])
def test_thread_pools_that_cannot_be_are_refused(threads):
    with pytest.raises(ValueError, match="1 to 1024"):
        _core.ThreadPool(threads)


def test_read_bandwidth_gives_the_rate_of_every_pass():
    pool = _core.ThreadPool(2)
    for simd in SIMD:
        assert len(_core.read_bandwidth(pool, 4 << 20, 0.0, simd)) == 1
        assert all(rate > 0 for rate in _core.read_bandwidth(pool, 4 << 20, 0.05, simd))
    with pytest.raises(ValueError, match="no bytes"):
        _core.read_bandwidth(pool, 0, 0.0)


# Conversion, both ways


def _widen(values, simd):
    """16-bit values as fp32, through the kernels: y = 0 + 1.0 * value, by attention over one position."""
    value = values.float().reshape(1, -1, 8)
    out = _attention(
        torch.zeros(value.shape[1:]), torch.zeros_like(value), value, dtype=_NAMES[values.dtype], simd=simd
    )
    return out.flatten()


@pytest.mark.parametrize("simd", SIMD)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("columns", [1, 16])
def test_every_16_bit_value_survives_the_way_through_fp32(dtype, simd, columns):
    """x = every half, weight = 1: columns 1 takes the scalar conversion, 16 the vector one (the rest of x is 0)."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(TORCH_DTYPES[dtype])
    x = torch.zeros(65536, columns, dtype=every.dtype)
    x[:, -1] = every
    weight = torch.ones(1, columns, dtype=every.dtype)
    if columns > 1:  # no 0 * inf
        weight[0, :-1] = 0
    out = _linear(weight, None, x, simd=simd)[:, 0]
    assert torch.equal(out.isnan(), every.isnan())
    finite = ~every.isnan()
    expected = torch.where(every == 0, torch.zeros_like(every), every)  # 0 + -0.0 is 0.0
    assert torch.equal(_bits(out[finite]), _bits(expected[finite]))


@pytest.mark.parametrize("simd", SIMD)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_16_bit_weight_is_read_right(dtype, simd):
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(TORCH_DTYPES[dtype])
    values = every[every.isfinite()]
    expected = torch.where(values == 0, torch.zeros_like(values), values).float()
    assert torch.equal(_bits(_widen(values, simd)), _bits(expected))


def _edges(dtype):
    """fp32 values at, beside and half-way between 16-bit ones, around overflow and in the subnormals."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(TORCH_DTYPES[dtype])
    values = every[every.isfinite()].float()
    following = torch.nextafter(every[every.isfinite()], torch.tensor(torch.inf, dtype=every.dtype)).float()
    ties = (values.double() + following.double().where(following.isfinite(), values.double())) / 2
    around = torch.cat([values, ties.float()])
    around = torch.cat([around, torch.nextafter(around, torch.tensor(torch.inf)), torch.nextafter(around, -around)])
    large = [torch.inf, 65504.0, 65519.996, 65520.0, 65536.0, 3.3895e38, 3.4e38, 3.4028235e38]
    small = [1e-45, 2.0**-24, 2.0**-25, 2.0**-25 * 1.0000001, 2.0**-14, 6.1e-5, 2.0**-133, 2.0**-134, 1e-40, 0.0]
    special = torch.tensor([*large, *small])
    generator = torch.Generator().manual_seed(5)
    anything = torch.randint(-(2**31), 2**31, (200_000,), generator=generator).to(torch.int32).view(torch.float32)
    return torch.cat([around, special, -special, anything[~anything.isnan()]])


@pytest.mark.parametrize("simd", SIMD)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_fp32_is_rounded_to_nearest_ties_to_even(dtype, simd):
    """The bias is fp32: 0 * 0 + bias is the value itself, then rounded on the way out."""
    values = _edges(dtype)
    zero = torch.zeros(len(values), 1, dtype=TORCH_DTYPES[dtype])
    out = _linear(zero, values.numpy(), torch.zeros(1, 1, dtype=zero.dtype), simd=simd)[0]
    expected = (values + 0.0).to(TORCH_DTYPES[dtype])
    assert torch.equal(_bits(out), _bits(expected))
    if dtype == "float16":
        with np.errstate(over="ignore"):
            by_numpy = (values + 0.0).numpy().astype(np.float16)
        assert np.array_equal(out.numpy().view(np.uint16), by_numpy.view(np.uint16))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_nan_stays_nan_whatever_its_bits(dtype):
    bits = torch.tensor([0x7F800001, 0x7FC00000, 0x7FFFFFFF, -0x7FFFFF, -1], dtype=torch.int32)  # -0x7FFFFF: 0xFF800001
    values = bits.view(torch.float32)
    assert values.isnan().all()
    zero = torch.zeros(len(values), 1, dtype=TORCH_DTYPES[dtype])
    assert _linear(zero, values.numpy(), torch.zeros(1, 1, dtype=zero.dtype)).isnan().all()


# Attention


def _attention(q, k, v, *, dtype, threads=1, simd="auto"):
    """One query [heads, head_dim] over k, v [length, kv_heads, head_dim], all fp32, kept as `dtype`."""
    _, kv_heads, head_dim = k.shape
    native = _core.KvAttention(
        heads=len(q), kv_heads=kv_heads, head_dim=head_dim, context=len(k), dtype=dtype,
        pool=_core.ThreadPool(threads), simd=simd,
    )  # fmt: skip
    native.append(k.numpy(), v.numpy())
    out = np.full((1, *q.shape), np.nan, np.float32)
    native.attend_each(q[None].numpy(), out)
    return torch.from_numpy(out[0])


def test_attention_survives_large_scores():
    q, k = torch.full((1, 8), 1e4), torch.stack([torch.full((8,), 1e4), torch.full((8,), -1e4)])[:, None]
    v = torch.stack([torch.ones(8), torch.zeros(8)])[:, None]
    assert torch.equal(_attention(q, k, v, dtype="float32"), torch.ones(1, 8))


def test_more_queries_than_cached_tokens_are_refused():
    native = _core.KvAttention(heads=2, kv_heads=1, head_dim=8, context=4, dtype="float32", pool=_core.ThreadPool(1))
    with pytest.raises(ValueError, match="more queries than cached tokens"):
        native.attend_each(np.zeros((1, 2, 8), np.float32), np.zeros((1, 2, 8), np.float32))


@pytest.mark.parametrize("simd", SIMD)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("group", "head_dim", "length"), [(4, 64, 130), (7, 72, 9), (8, 136, 65), (2, 33, 3), (3, 250, 17)]
)
def test_heads_that_share_keys_have_the_bits_of_each_alone(dtype, simd, group, head_dim, length):
    q, k, v = _random(2 * group, head_dim), _random(length, 2, head_dim, seed=1), _random(length, 2, head_dim, seed=2)
    q *= head_dim**-0.5
    kwargs = {"dtype": dtype, "simd": simd}
    alone = [
        _attention(q[h : h + 1], *(x[:, h // group, None].contiguous() for x in (k, v)), **kwargs)[0]
        for h in range(len(q))
    ]
    keys, values = k.to(TORCH_DTYPES[dtype]).double(), v.to(TORCH_DTYPES[dtype]).double()
    weights = torch.softmax(torch.einsum("ghd,pgd->ghp", q.double().view(2, group, -1), keys), dim=-1)
    expected = torch.einsum("ghp,pgd->ghd", weights, values).view(len(q), -1)
    for threads in (1, 3, 4):
        assert torch.equal(_bits(_attention(q, k, v, threads=threads, **kwargs)), _bits(torch.stack(alone)))
    assert torch.allclose(torch.stack(alone).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(0, 1), (4, 3)])
def test_attention_shapes_that_cannot_be_are_refused(heads, kv_heads):
    with pytest.raises(ValueError, match="multiple of kv_heads"):
        _attention(torch.zeros(heads, 8), *2 * [torch.zeros(1, kv_heads, 8)], dtype="float32")
