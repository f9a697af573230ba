"""The floating-point types of weights: their names, sizes and exact conversions, in numpy.

numpy has no bfloat16, so bfloat16 values are held as their uint16 bits; `storage` is the numpy type that holds a
dtype's bits. Knows nothing of files or tensors' names.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightDtype:
    """One dtype: Hugging Face's name, safetensors' code, and the numpy type holding its bits."""

    name: str
    code: str
    storage: np.dtype[Any]

    @property
    def itemsize(self) -> int:
        return int(self.storage.itemsize)


WEIGHT_DTYPES = {
    dtype.name: dtype
    for dtype in (
        WeightDtype(name="float32", code="F32", storage=np.dtype("<f4")),
        WeightDtype(name="float16", code="F16", storage=np.dtype("<f2")),
        WeightDtype(name="bfloat16", code="BF16", storage=np.dtype("<u2")),
    )
}
WEIGHT_DTYPE_BY_CODE = {dtype.code: dtype for dtype in WEIGHT_DTYPES.values()}


def cast(values: NDArray[Any], source: WeightDtype, target: WeightDtype) -> NDArray[Any]:
    """`values` (in `source.storage`, any shape) as `target.storage`, rounded once, to nearest even.

    Raises OverflowError where a finite value has no finite counterpart: float16 ends at 65504.
    """
    if source is target:
        return values
    wide = _bfloat16_to_float32(values) if source.name == "bfloat16" else values.astype(np.float32, copy=False)
    if target.name == "float32":
        return wide
    with np.errstate(over="ignore", invalid="ignore"):  # checked below, value by value
        narrow = _float32_to_bfloat16(wide) if target.name == "bfloat16" else wide.astype(np.float16)
    back = _bfloat16_to_float32(narrow) if target.name == "bfloat16" else narrow
    if bool(np.any(np.isinf(back) & np.isfinite(wide))):
        largest = float(np.max(np.abs(wide[np.isfinite(wide)])))
        raise OverflowError(f"the value {largest:g} is outside the range of {target.name}")
    return narrow


def _bfloat16_to_float32(bits: NDArray[Any]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _float32_to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16  # ties to even; a carry into the exponent is right
    quiet_nan = (bits >> 16) | 0x40  # rounding could carry a NaN's mantissa into infinity
    return np.where(np.isnan(values), quiet_nan, rounded).astype(np.uint16)
