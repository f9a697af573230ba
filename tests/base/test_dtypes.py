"""Conversions agree with torch bit for bit, and refuse what would become infinite."""

import numpy as np
import pytest
import torch

from flashllm.base.dtypes import WEIGHT_DTYPES, cast

FLOAT32, FLOAT16, BFLOAT16 = (WEIGHT_DTYPES[name] for name in ("float32", "float16", "bfloat16"))
SPECIAL = [0.0, -0.0, 1.0, 1.00390625, 1.01171875, 65280.0, 1e-8, 6e-8, 1e-40, -3.14159, np.inf, -np.inf]


def _values(dtype):
    generator = torch.Generator().manual_seed(0)
    values = torch.cat([torch.randn(100_000, generator=generator) * 10, torch.tensor(SPECIAL)])
    return values.to(getattr(torch, dtype.name))


def _bits(tensor, dtype):
    return tensor.view(torch.int16).numpy().view(dtype.storage) if dtype.itemsize == 2 else tensor.numpy()


@pytest.mark.parametrize("source", [FLOAT32, FLOAT16, BFLOAT16], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("target", [FLOAT32, FLOAT16, BFLOAT16], ids=lambda dtype: dtype.name)
def test_casts_equal_torch(source, target):
    values = _values(source)
    expected = _bits(values.to(getattr(torch, target.name)), target)
    assert cast(_bits(values, source), source, target).tobytes() == expected.tobytes()


def test_nan_stays_nan():
    nans = np.array([0x7F800001, 0xFFFFFFFF, 0x7FC00000], np.uint32).view(np.float32)
    bits = cast(nans, FLOAT32, BFLOAT16)
    assert np.isnan(cast(bits, BFLOAT16, FLOAT32)).all()
    assert np.isnan(cast(nans, FLOAT32, FLOAT16)).all()


@pytest.mark.parametrize(("value", "target"), [(65520.0, FLOAT16), (-1e30, FLOAT16), (3.4e38, BFLOAT16)])
def test_overflow_is_an_error(value, target):
    with pytest.raises(OverflowError, match=f"outside the range of {target.name}"):
        cast(np.array([1.0, value], np.float32), FLOAT32, target)
