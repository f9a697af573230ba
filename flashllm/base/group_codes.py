"""Weights in groups: 8- or 4-bit codes along a vector, with a scale for each group and, for some, a minimum.

The bytes are those of csrc/kernels/row_codecs.h: the groups' scales (fp16), their minimums (fp16, where the encoding
has them), then the codes of whole groups. Of 4 bits, 32 codes take 16 bytes: code i is the lower half of byte i, code
i + 16 its upper half. A weight is `code * scale` (8 bits), `(code - 8) * scale` or `code * scale + minimum` (4 bits),
exact in fp32 but for the last sum.

Scales are chosen by least squares (csrc/pack/group_fit.h): of a few roundings, each with the scale (and minimum) that
fits its codes best, the one with the least squared error. What they are in fp16 is what the codes are rounded by.

Choosing scales, rounding and packing are apart: error feedback (flashllm/pack/feedback.py) rounds a weight at a time by
a rule of its own and uses the same groups.

Knows numpy arrays, no files and no models.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flashllm import _core
from flashllm.base.codes.carried import CARRIED_CODES, pack_codes, unpack_codes

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The weights that groups can have: `scales` and `minimums`, fp16 of one shape, which the weights broadcast to."""

    lowest: int  # code, as it is stored
    highest: int
    zero: int  # the code of weight 0, where there are no minimums
    scales: NDArray[np.float16]
    minimums: NDArray[np.float16] | None = None

    def codes(self, values: Floats) -> Floats:
        """The nearest codes, as they are stored; whole numbers."""
        scales = self.scales.astype(np.float32)
        if self.minimums is not None:
            return _rounded(values - self.minimums.astype(np.float32), scales, self.lowest, self.highest)
        zero = np.float32(self.zero)
        return _rounded(values, scales, self.lowest - self.zero, self.highest - self.zero) + zero

    def weights(self, codes: Floats) -> Floats:
        """Weights that codes stand for, exactly as the kernels have them."""
        if self.minimums is not None:
            return codes * self.scales.astype(np.float32) + self.minimums.astype(np.float32)
        return (codes - np.float32(self.zero)) * self.scales.astype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCode:
    """One encoding: `bits` a code, `group` weights a scale, with or without a minimum a group."""

    name: str
    bits: int
    group: int
    has_minimum: bool = False

    def groups(self, length: int) -> int:
        """Groups of a vector of `length` weights; the last one is filled up with zeros."""
        return -(-length // self.group)

    @property
    def scale_nbytes(self) -> int:
        """Bytes of a group's scale and minimum."""
        return 4 if self.has_minimum else 2

    def vector_nbytes(self, length: int) -> int:
        return self.groups(length) * (self.scale_nbytes + self.group * self.bits // 8)

    def encode(self, values: Floats) -> Bytes:
        """uint8 [n, vector_nbytes(k)] of the weights [n, k], row by row. OverflowError where a weight is not finite, or
        too large for an fp16 scale."""
        n, length = values.shape
        rows = np.empty((n, self.vector_nbytes(length)), np.uint8)
        _core.encode_rows(np.ascontiguousarray(values, np.float32), "float32", self.name, rows, _core.ThreadPool(1))
        return rows

    def decode(self, rows: Bytes, length: int) -> Floats:
        """The weights [n, length] of `rows`, uint8 [n, vector_nbytes(length)]. ValueError for other shapes."""
        if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != self.vector_nbytes(length):
            raise ValueError(f"rows must be uint8 [n, {self.vector_nbytes(length)}], not {rows.dtype} {rows.shape}")
        n, groups = len(rows), self.groups(length)
        codes = unpack_codes(rows[:, groups * self.scale_nbytes :], self.bits, groups * self.group, unsigned=True)
        weights = self._grid(rows, groups).weights(codes.astype(np.float32).reshape(n, groups, self.group))
        return np.ascontiguousarray(weights.reshape(n, -1)[:, :length])

    def fit(self, values: Floats) -> Grid:
        """The scales (and minimums), [n, groups, 1], that suit the weights [n, length] best. Raises as `encode`."""
        return self._grid(self.encode(values), self.groups(values.shape[1]))

    def pack(self, codes: Floats, grid: Grid) -> Bytes:
        """uint8 [n, vector_nbytes] of codes [n, groups, group] on a grid of [n, groups, 1]."""
        halves = [grid.scales] if grid.minimums is None else [grid.scales, grid.minimums]
        parts: list[Bytes] = [np.ascontiguousarray(half[..., 0]).view(np.uint8) for half in halves]
        parts.append(pack_codes(codes.reshape(len(codes), -1).astype(np.int8), self.bits, unsigned=True))
        return np.concatenate(parts, axis=1)

    def _grid(self, rows: Bytes, groups: int) -> Grid:
        """The scales (and minimums), [n, groups, 1], of encoded rows."""
        halves = np.ascontiguousarray(rows[:, : groups * self.scale_nbytes]).view("<f2")[..., None]
        lowest, highest = (-128, 127) if self.bits == 8 else (0, (1 << self.bits) - 1)
        return Grid(
            lowest=lowest,
            highest=highest,
            zero=0 if self.bits == 8 else 8,
            scales=halves[:, :groups],
            minimums=halves[:, groups:] if self.has_minimum else None,
        )


def usual_activations(encodings: Iterable[str | None]) -> str | None:
    """Inputs that a model of these encodings multiplies its codes by, a token at a time, unless it says otherwise:
    "int16" (by 8 bits what is not multiplied by 16) where there are codes, which inputs of 32 bits would slow down two
    to four times; else fp32, None."""
    return "int16" if any(encoding in GROUP_CODES or encoding in CARRIED_CODES for encoding in encodings) else None


def _rounded(values: Floats, scale: Floats, lowest: int, highest: int) -> Floats:
    """values / scale to the nearest code; 0 where the scale is 0."""
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
    with np.errstate(over="ignore", invalid="ignore"):  # of scales next to zero
        codes = np.rint(values * inverse)
    return np.nan_to_num(np.clip(codes, lowest, highest, out=codes), copy=False)


DEFAULT_GROUP = 32


def code_of(bits: int, group: int = DEFAULT_GROUP, *, has_minimum: bool = False) -> GroupCode:
    """The encoding of these numbers. ValueError where there is none."""
    for code in GROUP_CODES.values():
        if (code.bits, code.group, code.has_minimum) == (bits, group, has_minimum):
            return code
    raise ValueError(f"there are no codes of {bits} bits in groups of {group}{' with minimums' * has_minimum}")


GROUP_CODES = {
    code.name: code
    for code in (
        GroupCode(name="int8_32", bits=8, group=32),
        GroupCode(name="int8_64", bits=8, group=64),
        GroupCode(name="int4_32", bits=4, group=32),
        GroupCode(name="int4_64", bits=4, group=64),
        GroupCode(name="int4_32_min", bits=4, group=32, has_minimum=True),
        GroupCode(name="int4_64_min", bits=4, group=64, has_minimum=True),
    )
}
