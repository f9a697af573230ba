"""Codes of checkpoints that are quantised already, carried over without rounding anything again.

The bytes are those of csrc/kernels/row_codecs.h and csrc/planes/scale_planes.h. A vector holds its scales, its
minimums, the factors of both, where it has them, and then its codes in units of 32. Where scales have factors, an fp16
scale is shared by 256 weights, and a group's own is that times its int8 factor; minimums likewise. A weight is
`code * scale`, or `code * scale + minimum`: exact in fp32 but for the last sum.

Codes may be numbers of a table (`TABLES`). MXFP4 (Open Compute Project, Microscaling Formats 1.0) has a byte for 32
weights, which stands for 2^(byte - 127), and codes in FP4; NVFP4 a byte in E4M3 for 16, and one fp32 scale for all of a
vector, or of a group of columns; ggml's IQ4_NL and IQ4_XS have sixteen integers of their own. What ggml's codebooks
(IQ1_S to IQ3_S) are made of are a few levels too, whose numbers here take more bits than a codebook's.

A down column's scales may lie apart, as a checkpoint's groups are along the neurons: a row then holds the column's
codes alone (`PlaneCode`), and `Plane` the scales of a layer, [groups of neurons, d_model].

Knows numpy arrays, no files and no models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Codes = NDArray[np.int8]

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)  # by code
IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)  # likewise
_LEVELS: dict[str, list[float]] = {  # of codebooks; the same with a minus follow
    "iq3_s": [1, 3, 5, 7, 9, 11, 13, 15],
    "iq3_xxs": [1, 3, 5, 7, 9, 11, 13, 15.5],
    "iq2": [1, 3.125, 5.375, 0],
}
IQ1 = np.array([-0.875, 0.125, 1.125, 0, -1.125, -0.125, 0.875, 0], np.float32)  # -1, 0, 1 and an eighth, then less it
TABLES = {
    "fp4": FP4,
    "iq4": IQ4,
    **{name: np.array([*levels, *(-level for level in levels)], np.float32) for name, levels in _LEVELS.items()},
    "iq1": IQ1,
}
_POWER_BIAS = 127  # of the byte of a scale that is a power of two
UNIT = 32  # codes that lie together
SHARED = 256  # weights that share a scale which groups have factors of
WHOLE = 0  # of all weights of a vector
CODE_BITS = (2, 4, 5, 6, 8)  # of down columns, where they are no numbers of a table
# Bits of codes that lie apart, behind halves of bytes: the first of them, and how many.
_APART = {2: ((0, 2),), 3: ((0, 2), (2, 1)), 4: (), 5: ((4, 1),), 6: ((4, 2),)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleForm:
    """How scales are stored: a group's own in fp16, or shared ones in fp16 and int8 factors of groups."""

    name: str
    group: int = 32
    has_minimum: bool = False
    has_factors: bool = False
    is_power: bool = False  # a byte: the scale is 2^(byte - 127)
    is_e4m3: bool = False  # factors are bytes in E4M3, their scale is fp32 and all of a vector's
    table: str = ""  # the name of what codes are numbers of; "": they are integers

    @property
    def unsigned(self) -> bool:
        """True where codes begin at 0."""
        return self.has_minimum or bool(self.table)

    def parts(self) -> Mapping[str, tuple[int, np.dtype[np.generic]]]:
        """Name -> (weights an item is for, or WHOLE; its type) of each array, in the order of a vector's bytes."""
        if self.is_e4m3:
            return {"scales": (WHOLE, np.dtype("<f4")), "factors": (self.group, np.dtype(np.uint8))}
        if self.is_power:
            return {"scales": (self.group, np.dtype(np.uint8))}
        shared = SHARED if self.has_factors else self.group
        found: dict[str, tuple[int, np.dtype[np.generic]]] = {"scales": (shared, np.dtype("<f2"))}
        if self.has_minimum:
            found["minimums"] = (shared, np.dtype("<f2"))
        if self.has_factors:
            found["factors"] = (self.group, np.dtype(np.int8))
        if self.has_factors and self.has_minimum:
            found["minimum_factors"] = (self.group, np.dtype(np.int8))
        return found


SCALE_FORMS = {
    form.name: form
    for form in (
        ScaleForm(name="half_32"),
        ScaleForm(name="half_32_min", has_minimum=True),
        ScaleForm(name="half_256", group=SHARED),
        ScaleForm(name="shared_32_min", has_minimum=True, has_factors=True),
        ScaleForm(name="shared_16", group=16, has_factors=True),
        ScaleForm(name="shared_16_min", group=16, has_minimum=True, has_factors=True),
        ScaleForm(name="power_32", is_power=True, table="fp4"),
        ScaleForm(name="e4m3_16", group=16, is_e4m3=True, table="fp4"),
        ScaleForm(name="half_32_iq4", table="iq4"),
        ScaleForm(name="shared_32_iq4", has_factors=True, table="iq4"),
        ScaleForm(name="shared_32_iq3_s", has_factors=True, table="iq3_s"),
        ScaleForm(name="shared_32_iq3_xxs", has_factors=True, table="iq3_xxs"),
        ScaleForm(name="shared_32_iq2", has_factors=True, table="iq2"),
        ScaleForm(name="shared_16_iq2", group=16, has_factors=True, table="iq2"),
        ScaleForm(name="shared_32_iq1", has_factors=True, table="iq1"),
        ScaleForm(name="shared_16_iq1", group=16, has_factors=True, table="iq1"),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantised:
    """Vectors [n, length] as a checkpoint has them: codes, signed unless the form says otherwise, and scales."""

    form: ScaleForm
    codes: Codes
    scales: Mapping[str, NDArray[np.generic]] = field(repr=False)  # by the names of `form.parts`, [n, items]

    def widened(self) -> Floats:
        """The weights [n, length]."""
        return weights(self.form, self.codes, self.scales)


def weights(form: ScaleForm, codes: Codes, scales: Mapping[str, NDArray[np.generic]]) -> Floats:
    """Weights that codes [n, length] stand for with scales [n, items] of `form`."""
    length = codes.shape[1]
    parts = form.parts().items()
    each = {name: np.repeat(scales[name], share or length, axis=1)[:, :length] for name, (share, _) in parts}
    return _weighted(form, codes, each)


def _weighted(form: ScaleForm, codes: Codes, parts: Mapping[str, NDArray[np.generic]]) -> Floats:
    """Weights that codes [n, length] stand for, with each part of the form for every one of them."""
    if form.is_power:
        return np.ldexp(FP4[codes], parts["scales"].astype(np.int32) - _POWER_BIAS)

    def scale(half: str, factor: str) -> Floats:
        found: Floats = parts[half].astype(np.float32)
        if form.is_e4m3:
            return found * e4m3_values(parts[factor])
        return found * parts[factor].astype(np.float32) if form.has_factors else found

    numbers: Floats = TABLES[form.table][codes] if form.table else codes.astype(np.float32)
    found = numbers * scale("scales", "factors")
    if form.has_minimum:
        found += scale("minimums", "minimum_factors")
    return found


def e4m3_values(factors: NDArray[np.generic]) -> Floats:
    """The numbers that bytes in E4M3 (four bits of exponent, three of mantissa) stand for, which have no sign."""
    found: Floats = (factors.astype(np.uint16) << 7).view(np.float16).astype(np.float32) * np.float32(256)
    return found


def zero_of(bits: int) -> int:
    """The code that stands for 0, of signed ones as they are packed."""
    return 0 if bits == 8 else 1 if bits == 2 else 1 << (bits - 1)


def pack_codes(codes: Codes, bits: int, *, unsigned: bool) -> Bytes:
    """uint8 [n, units * 4 * bits] of codes [n, length], signed ones shifted to begin at 0 (but those of 8 bits)."""
    n, length = codes.shape
    padded = np.zeros((n, -(-length // UNIT) * UNIT), np.int8)
    padded[:, :length] = codes
    if bits == 8:
        return padded.view(np.uint8)
    whole = (padded + np.int8(0 if unsigned else zero_of(bits))).view(np.uint8).reshape(n, -1, UNIT)
    parts = []
    if bits >= 4:
        lower = whole & 15
        parts.append(lower[..., : UNIT // 2] | lower[..., UNIT // 2 :] << 4)
    for first, each in _APART[bits]:
        spread = (whole >> first & ((1 << each) - 1)).reshape(n, whole.shape[1], 8 // each, -1)  # [.., place, byte]
        shifts = (np.arange(8 // each, dtype=np.uint8) * each)[:, None]
        parts.append(np.bitwise_or.reduce(spread << shifts, axis=2))
    return np.ascontiguousarray(np.concatenate(parts, axis=2).reshape(n, -1).astype(np.uint8))


def unpack_codes(packed: Bytes, bits: int, length: int, *, unsigned: bool) -> Codes:
    """The codes [n, length] of `pack_codes`."""
    n = len(packed)
    if bits == 8:
        return np.ascontiguousarray(packed).view(np.int8)[:, :length]
    units = packed.reshape(n, -1, 4 * bits)
    codes: NDArray[np.integer[Any]] = np.zeros((*units.shape[:2], UNIT), np.uint8)
    at = 0
    if bits >= 4:
        low, at = units[..., : UNIT // 2], UNIT // 2
        codes = np.concatenate([low & 15, low >> 4], axis=2)
    for first, each in _APART[bits]:
        shifts = (np.arange(8 // each, dtype=np.uint8) * each)[:, None]
        apart = units[:, :, None, at : at + 4 * each] >> shifts & ((1 << each) - 1)
        codes, at = codes | apart.reshape(codes.shape) << first, at + 4 * each
    whole = codes.reshape(n, -1)[:, :length].astype(np.int8)
    return whole if unsigned else whole - np.int8(zero_of(bits))


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedCode:
    """An encoding of whole vectors: `bits` a code, and scales of `form`."""

    name: str
    bits: int
    form: ScaleForm
    wide: bool = False  # scales are stored in fp32, which those of the form are exact in

    @property
    def largest_factor(self) -> int:
        """The largest factor of a scale. A code of 2 bits times this fits a byte, and prompts multiply such bytes
        (csrc/kernels/row_codecs.h, takes_factors_along)."""
        return 15 if self.bits == 2 else 127

    def vector_nbytes(self, length: int) -> int:
        units = -(-length // UNIT)
        return units * 4 * self.bits + sum(items * dtype.itemsize for items, dtype in self._items(length).values())

    def pack(self, vectors: Quantised) -> Bytes:
        """uint8 [n, vector_nbytes(length)]. ValueError for vectors of another form, or with factors too large."""
        if vectors.form != self.form:
            raise ValueError(f"vectors of {vectors.form.name} cannot be stored as {self.name}")
        if self.form.has_factors and not self.form.is_e4m3 and np.max(vectors.scales["factors"]) > self.largest_factor:
            raise ValueError(f"factors of {self.name} are at most {self.largest_factor}")
        items = self._items(vectors.codes.shape[1])
        parts = [np.ascontiguousarray(vectors.scales[name], dtype).view(np.uint8) for name, (_, dtype) in items.items()]
        return np.concatenate(
            [*parts, pack_codes(vectors.codes, self.bits, unsigned=self.form.unsigned)], axis=1, dtype=np.uint8
        )

    def decode(self, rows: Bytes, length: int) -> Floats:
        """The weights [n, length] of `rows`, uint8 [n, vector_nbytes(length)]. ValueError for other shapes."""
        if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != self.vector_nbytes(length):
            raise ValueError(f"rows must be uint8 [n, {self.vector_nbytes(length)}], not {rows.dtype} {rows.shape}")
        scales, start = {}, 0
        for name, (items, dtype) in self._items(length).items():
            scales[name] = np.ascontiguousarray(rows[:, start : start + items * dtype.itemsize]).view(dtype)
            start += items * dtype.itemsize
        codes = unpack_codes(rows[:, start:], self.bits, length, unsigned=self.form.unsigned)
        return weights(self.form, codes, scales)

    def _items(self, length: int) -> dict[str, tuple[int, np.dtype[np.generic]]]:
        """Name -> (items, type) of a vector's arrays."""
        together = SHARED if self.form.has_factors else self.form.group
        whole = -(-length // max(UNIT, together)) * max(UNIT, together)
        parts = self.form.parts().items()
        wide = np.dtype("<f4")
        return {
            name: (1 if weights == WHOLE else whole // weights, wide if self.wide else dtype)
            for name, (weights, dtype) in parts
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneCode:
    """An encoding of down columns: codes of `bits`, whose scales are in a `Plane`."""

    name: str
    bits: int
    table: str = ""  # as a form's

    def vector_nbytes(self, length: int) -> int:
        return -(-length // UNIT) * 4 * self.bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """The scales of a layer's down columns: arrays [neurons / weights an item is for, d_model] by name."""

    form: ScaleForm
    arrays: Mapping[str, NDArray[np.generic]] = field(repr=False)

    def widened(self, packed: Bytes, code: PlaneCode, first: int, length: int) -> Floats:
        """The weights [n, length] of the columns of neurons `first` on, uint8 [n, vector_nbytes(length)]."""
        codes = unpack_codes(packed, code.bits, length, unsigned=self.form.unsigned)
        neurons = np.arange(first, first + len(packed))
        parts = self.form.parts().items()
        rows = {name: self.arrays[name][neurons // (weights or self.form.group)] for name, (weights, _) in parts}
        return _weighted(self.form, codes, rows)


_SAFETENSORS_DTYPES = {"float32": "F32", "float16": "F16", "int8": "I8", "uint8": "U8"}


def plane_shapes(form: ScaleForm, neurons: int, length: int) -> dict[str, tuple[str, tuple[int, int]]]:
    """Name -> (safetensors' dtype, shape) of the arrays of a layer of `neurons` whose columns have `length` weights."""
    return {
        name: (
            _SAFETENSORS_DTYPES[dtype.name],
            (-(-neurons // (weights or form.group)), 1 if weights == WHOLE else length),
        )
        for name, (weights, dtype) in form.parts().items()
    }


CARRIED_CODES = {
    code.name: code
    for code in (
        CarriedCode(name="int5_32", bits=5, form=SCALE_FORMS["half_32"]),
        CarriedCode(name="int5_32_min", bits=5, form=SCALE_FORMS["half_32_min"]),
        CarriedCode(name="q4_k", bits=4, form=SCALE_FORMS["shared_32_min"]),
        CarriedCode(name="q5_k", bits=5, form=SCALE_FORMS["shared_32_min"]),
        CarriedCode(name="q6_k", bits=6, form=SCALE_FORMS["shared_16"]),
        CarriedCode(name="mxfp4", bits=4, form=SCALE_FORMS["power_32"]),
        CarriedCode(name="nvfp4", bits=4, form=SCALE_FORMS["e4m3_16"]),
        CarriedCode(name="q2_k", bits=2, form=SCALE_FORMS["shared_16_min"]),
        CarriedCode(name="q3_k", bits=3, form=SCALE_FORMS["shared_16"]),
        CarriedCode(name="iq4_nl", bits=4, form=SCALE_FORMS["half_32_iq4"]),
        CarriedCode(name="iq4_xs", bits=4, form=SCALE_FORMS["shared_32_iq4"]),
        CarriedCode(name="ternary", bits=2, form=SCALE_FORMS["half_256"], wide=True),
        CarriedCode(name="iq3_s", bits=4, form=SCALE_FORMS["shared_32_iq3_s"]),
        CarriedCode(name="iq3_xxs", bits=4, form=SCALE_FORMS["shared_32_iq3_xxs"]),
        CarriedCode(name="iq2_xxs", bits=3, form=SCALE_FORMS["shared_32_iq2"]),
        CarriedCode(name="iq2_s", bits=3, form=SCALE_FORMS["shared_16_iq2"]),
        CarriedCode(name="iq1_s", bits=3, form=SCALE_FORMS["shared_32_iq1"]),
        CarriedCode(name="iq1_m", bits=3, form=SCALE_FORMS["shared_16_iq1"]),
    )
}
# Group codes have the same bytes (flashllm/base/group_codes.py): these pack them without rounding.
PACKED_AS = CARRIED_CODES | {
    name: CarriedCode(name=name, bits=bits, form=SCALE_FORMS[form])
    for name, bits, form in (("int4_32", 4, "half_32"), ("int4_32_min", 4, "half_32_min"), ("int8_32", 8, "half_32"))
}
PLANE_CODES = {
    code.name: code
    for code in (
        *(PlaneCode(name=f"codes{bits}", bits=bits) for bits in CODE_BITS),
        *(
            PlaneCode(name=f"codes_{table}", bits=(len(numbers) - 1).bit_length(), table=table)
            for table, numbers in TABLES.items()
        ),
    )
}


def plane_code_of(codes: Sequence[tuple[int, ScaleForm]]) -> PlaneCode | None:
    """The narrowest that holds the codes of all of these (bits, form); None where none does."""
    bits = max(bits for bits, _ in codes)
    tables = {form.table for _, form in codes}
    return next((code for code in PLANE_CODES.values() if code.bits >= bits and {code.table} == tables), None)
