"""What tests of the throughput engine's native side share: levels, dtypes, and numpy arrays of them."""

import numpy as np

from flashllm import _core
from flashllm.base.dtypes import WEIGHT_DTYPES, cast

LEVELS = _core.simd_levels()
DTYPES = sorted(WEIGHT_DTYPES)


def narrow(values, dtype):
    """A copy of float32 values rounded to `dtype`, as numpy holds it (bfloat16: uint16 bits)."""
    return cast(np.array(values, np.float32, order="C"), WEIGHT_DTYPES["float32"], WEIGHT_DTYPES[dtype])


def widen(values, dtype):
    """The float32 values of an array of `dtype`."""
    return cast(values, WEIGHT_DTYPES[dtype], WEIGHT_DTYPES["float32"])


def rounded(values, dtype):
    """float32 values that `dtype` holds exactly."""
    return widen(narrow(values, dtype), dtype)


def random_values(*shape, seed):
    """Normal float32 values."""
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def empty(shape, dtype):
    """An array of `dtype`, all bits set: NaNs."""
    out = np.empty(shape, WEIGHT_DTYPES[dtype].storage)
    out.view(np.uint8)[...] = 0xFF
    return out
