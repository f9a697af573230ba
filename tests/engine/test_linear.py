"""Resident linears against torch in fp64; the same bits however many tokens and threads."""

import pytest
import torch
from torch import nn

from flashllm import _core
from flashllm.engine.linear import FlashLinear, dense_product
from flashllm.engine.meter import Meter

# Relative to the largest output: accumulation in fp32 (k = 96), then one rounding to the dtype.
ROUNDING = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def make(dtype, *, bias=True, threads=1, few_tokens=4, meter=None, n=70, k=96):
    generator = torch.Generator().manual_seed(0)
    linear = FlashLinear(k, n, bias=bias)
    linear.weight = nn.Parameter(torch.randn((n, k), generator=generator).to(dtype), requires_grad=False)
    if bias:
        linear.bias = nn.Parameter(torch.randn(n, generator=generator).to(dtype), requires_grad=False)
    meter = Meter() if meter is None else meter
    linear.attach(_core.ThreadPool(threads), meter, few_tokens)
    return linear


def exact(linear, x):
    out = x.double() @ linear.weight.double().T
    return out if linear.bias is None else out + linear.bias.double()


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tokens", [1, 4, 5, 300])
@pytest.mark.parametrize("width", [96, 301, 302])  # an odd one has no pairs; the last two are several blocks of terms
def test_equals_the_exact_product(dtype, bias, tokens, width):
    linear = make(dtype, bias=bias, k=width)
    x = torch.randn((tokens, width), generator=torch.Generator().manual_seed(1)).to(dtype)
    out, expected = linear(x), exact(linear, x)
    assert out.dtype == dtype
    assert (out.double() - expected).abs().max() <= ROUNDING[dtype] * expected.abs().max()


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
def test_few_tokens_give_the_bits_of_one_for_any_threads(dtype):
    x = torch.randn((4, 96), generator=torch.Generator().manual_seed(1)).to(dtype)
    alone = torch.cat([make(dtype)(row[None]) for row in x])
    for threads in (1, 2, 3):
        assert torch.equal(make(dtype, threads=threads)(x), alone)


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
def test_many_tokens_give_the_same_bits_for_any_threads_and_company(dtype):
    x = torch.randn((530, 96), generator=torch.Generator().manual_seed(1)).to(dtype)
    together = make(dtype)(x)
    for threads in (1, 2, 3):
        for part in (slice(0, 5), slice(7, 40), slice(250, 530)):
            assert torch.equal(make(dtype, threads=threads)(x[part]), together[part])


def test_shapes_and_strides():
    linear = make(torch.float16)
    for shape in ((96,), (1, 96), (2, 2, 96), (3, 5, 96)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).half()
        assert linear(x).shape == (*shape[:-1], 70)
        assert (linear(x).double() - exact(linear, x)).abs().max() < 0.05
    x = torch.randn((96, 6), generator=torch.Generator().manual_seed(3)).half().T
    assert torch.equal(linear(x), linear(x.contiguous()))
    assert torch.equal(linear(x[:3]), linear(x[:3].contiguous()))


def test_no_tokens():
    assert make(torch.bfloat16)(torch.zeros((1, 0, 96), dtype=torch.bfloat16)).shape == (1, 0, 70)


def test_times_are_counted_in_both_ways():
    meter = Meter()
    linear = make(torch.float16, meter=meter)
    for tokens in (1, 40):
        meter.restart()
        linear(torch.randn(tokens, 96).half())
        assert meter.take().compute_ms > 0


def test_another_dtype_is_refused():
    linear = make(torch.bfloat16)
    with pytest.raises(TypeError, match=r"must be torch\.bfloat16, as the model was loaded, not torch\.float32"):
        linear(torch.zeros(1, 96))
    linear.float()
    with pytest.raises(TypeError, match=r"must be torch\.bfloat16"):
        linear(torch.zeros(1, 96))


def test_fp16_products_do_not_overflow_inside():
    x, weight = torch.full((5, 64), 300.0).half(), torch.full((2, 64), 300.0).half()
    weight[:, 32:] *= -1
    assert torch.equal(dense_product(x, weight), torch.zeros(5, 2))
