"""Layer norms against torch in fp64; the same bits however many rows and threads."""

import pytest
import torch
from torch import nn

from flashllm import _core
from flashllm.engine.meter import Meter
from flashllm.engine.norm import FlashNorm

ROUNDING = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # relative to the largest output


def make(dtype, *, width=70, threads=1, affine=True, bias=True, meter=None):
    generator = torch.Generator().manual_seed(0)
    norm = FlashNorm(width, 1e-5, affine, bias).to(dtype)
    for parameter in norm.parameters():
        parameter.data = torch.randn(width, generator=generator).to(dtype)
    norm.requires_grad_(False).attach(dtype, _core.ThreadPool(threads), Meter() if meter is None else meter)
    return norm


def inputs(*shape, dtype, seed=1):
    return (5 + 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
@pytest.mark.parametrize("options", [{}, {"affine": False}, {"bias": False}], ids=str)
@pytest.mark.parametrize("width", [1, 15, 16, 70, 4096])
def test_equals_torch(dtype, options, width):
    norm, x = make(dtype, width=width, **options), inputs(3, 2, width, dtype=dtype)
    weight, bias = (None if p is None else p.double() for p in (norm.weight, norm.bias))
    expected = nn.functional.layer_norm(x.double(), (width,), weight, bias, norm.eps)
    out = norm(x)
    assert out.dtype == dtype
    assert (out.double() - expected).abs().max() <= ROUNDING[dtype] * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
def test_same_bits_for_any_rows_and_threads(dtype):
    x = inputs(41, 70, dtype=dtype)
    alone = torch.cat([make(dtype)(row[None]) for row in x])
    for threads in (1, 2, 3):
        assert torch.equal(make(dtype, threads=threads)(x), alone)
    assert torch.equal(make(dtype)(inputs(70, 41, dtype=dtype).T), make(dtype)(inputs(70, 41, dtype=dtype).T.clone()))


def test_edges():
    norm = make(torch.float32)
    assert norm(torch.zeros(1, 0, 70)).shape == (1, 0, 70)
    assert torch.equal(norm(torch.full((70,), 3.0)), norm.bias)
    assert norm(torch.full((2, 70), torch.nan)).isnan().all()
    for wrong in (torch.zeros(1, 70).half(), torch.zeros(1, 71)):
        with pytest.raises(TypeError, match=r"must be torch\.float32 \[\.\.\., 70\]"):
            norm(wrong)


def test_its_time_is_counted():
    meter = Meter()
    make(torch.float16, meter=meter)(inputs(1, 70, dtype=torch.float16))
    assert meter.take().compute_ms > 0
