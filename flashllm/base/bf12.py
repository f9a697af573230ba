"""bfloat16 without loss in about 12 bits: of a vector's high bytes (sign and seven bits of the exponent) few differ.

The bytes are those of csrc/kernels/row_codecs.h: a table of the vector's 15 most frequent high bytes and a 0; a low
byte a weight; 4-bit indexes into the table, 32 to 16 bytes (index i the lower half of byte i, index i + 16 its upper
half), 15 for a weight whose high byte is not in the table; then places for those: positions, and behind all of them
high bytes.

A vector with more such weights than places cannot be held: `holds` says so, and its matrix stays bfloat16.
Knows numpy arrays, no files and no models.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint16]
Bytes = NDArray[np.uint8]

MAX_LENGTH = 0xFFFF  # of a vector: positions are 16 bits, and one of them says that there is none
_TABLE, _ESCAPE = 16, 15
_UNIT = 32  # indexes that share 16 bytes
_NOWHERE = 0xFFFF
_VALUES_TOGETHER = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Bf12:
    name: str = "bf12"

    def escapes(self, length: int) -> int:
        """Places of a vector of `length` weights for high bytes that are not in its table."""
        return max(4, length // 128)

    def vector_nbytes(self, length: int) -> int:
        padded = -(-length // _UNIT) * _UNIT
        nbytes = _TABLE + padded + padded // 2 + 3 * self.escapes(length)
        return nbytes + nbytes % 2

    def encode(self, bits: Bits) -> Bytes:
        """uint8 [n, vector_nbytes(k)] of bfloat16 bits, uint16 [n, k].

        OverflowError where a vector has more escapes than places, or is too long.
        """
        n, length = bits.shape
        if length > MAX_LENGTH:
            raise OverflowError(f"vectors of {length} weights are longer than {MAX_LENGTH}")
        rows = np.zeros((n, self.vector_nbytes(length)), np.uint8)
        together = max(1, _VALUES_TOGETHER // max(1, length))
        for first in range(0, n, together):
            self._encode(bits[first : first + together], rows[first : first + together])
        return rows

    def holds(self, bits: Bits) -> bool:
        """True where every vector of these bfloat16 bits, uint16 [n, k], can be encoded."""
        n, length = bits.shape
        if length > MAX_LENGTH:
            return False
        together = max(1, _VALUES_TOGETHER // max(1, length))
        for first in range(0, n, together):
            frequencies = _frequencies(bits[first : first + together] >> 8)
            common = np.sort(frequencies, axis=1)[:, -_ESCAPE:].sum(axis=1)
            if length - common.min(initial=length) > self.escapes(length):
                return False
        return True

    def decode(self, rows: Bytes, length: int) -> Bits:
        """bfloat16 bits, uint16 [n, length], of `rows`, uint8 [n, vector_nbytes(length)].

        ValueError for other shapes.
        """
        if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != self.vector_nbytes(length):
            raise ValueError(f"rows must be uint8 [n, {self.vector_nbytes(length)}], not {rows.dtype} {rows.shape}")
        n, padded = len(rows), -(-length // _UNIT) * _UNIT
        units = rows[:, _TABLE + padded : _TABLE + padded + padded // 2].reshape(n, -1, _UNIT // 2)
        indexes = np.concatenate([units & 15, units >> 4], axis=2).reshape(n, -1)[:, :length]
        high = np.take_along_axis(rows[:, :_TABLE], indexes.astype(np.intp), axis=1)
        positions, escaped = self._places(rows, length)
        which, place = np.nonzero(positions != _NOWHERE)
        high[which, positions[which, place]] = escaped[which, place]
        return np.asarray(high.astype(np.uint16) * 256 + rows[:, _TABLE : _TABLE + length], np.uint16)

    def _places(self, rows: Bytes, length: int) -> tuple[Bits, Bytes]:
        """(positions, high bytes) of the escapes, [n, escapes]."""
        padded, count = -(-length // _UNIT) * _UNIT, self.escapes(length)
        start = _TABLE + padded + padded // 2
        positions = np.ascontiguousarray(rows[:, start : start + 2 * count]).view("<u2")
        return positions, rows[:, start + 2 * count : start + 3 * count]

    def _encode(self, bits: Bits, rows: Bytes) -> None:
        n, length = bits.shape
        padded, count = -(-length // _UNIT) * _UNIT, self.escapes(length)
        high = (bits >> 8).astype(np.intp)
        lines = np.arange(n)[:, None]
        table = np.argsort(-_frequencies(high), axis=1, kind="stable")[:, :_ESCAPE]
        indexes_of = np.full((n, 256), _ESCAPE, np.uint8)
        indexes_of[lines, table] = np.arange(_ESCAPE, dtype=np.uint8)
        indexes = np.zeros((n, padded), np.uint8)
        indexes[:, :length] = np.take_along_axis(indexes_of, high, axis=1)
        which, position = np.nonzero(indexes == _ESCAPE)
        counts = np.bincount(which, minlength=n)
        if counts.size and counts.max() > count:
            raise OverflowError(
                f"{counts.max()} of a vector's {length} weights have rare exponents; bf12 holds at most {count} of them"
            )
        rows[:, :_ESCAPE] = table
        rows[:, _TABLE : _TABLE + length] = bits & 0xFF
        units = indexes.reshape(n, -1, _UNIT)
        rows[:, _TABLE + padded : _TABLE + padded + padded // 2] = (
            units[..., : _UNIT // 2] | units[..., _UNIT // 2 :] << 4
        ).reshape(n, -1)
        place = np.arange(len(which)) - (np.cumsum(counts) - counts)[which]
        positions, escaped = np.full((n, count), _NOWHERE, "<u2"), np.zeros((n, count), np.uint8)
        positions[which, place] = position
        escaped[which, place] = high[which, position]
        start = _TABLE + padded + padded // 2
        rows[:, start : start + 2 * count] = positions.view(np.uint8)
        rows[:, start + 2 * count : start + 3 * count] = escaped


def _frequencies(high: NDArray[np.integer]) -> NDArray[np.intp]:
    """How often each high byte stands in each vector: [n, 256] of [n, k]."""
    lines = np.arange(len(high))[:, None]
    return np.bincount((high + 256 * lines).reshape(-1), minlength=256 * len(high)).reshape(-1, 256)


BF12 = Bf12()
