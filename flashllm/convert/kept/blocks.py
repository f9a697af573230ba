"""Blocks of GGUF files taken apart: codes and scales of whole rows. Knows bytes and numpy, no files and no models.

The layouts are ggml's (ggml-common.h, block_q4_0 to block_q6_K, block_mxfp4, block_nvfp4, block_iq4_nl, block_iq4_xs,
block_tq1_0, block_tq2_0): 32 weights to an fp16 scale, or to a power of two, 16 to a number in E4M3, or 256 to an fp16
scale (and minimum), but in TQ1_0 and TQ2_0 with factors of 4 to 8 bits for their groups.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flashllm.base.codes.carried import SCALE_FORMS, Quantised, ScaleForm, zero_of

_ONE, _LEAST_POWER, _LARGEST_POWER = 127, 2, 252  # scales of MXFP4 whose weights are normal fp32 numbers
_E4M3_NAN = 127  # which ggml takes for 0

Bytes = NDArray[np.uint8]
Parts = tuple[NDArray[np.uint8], dict[str, NDArray[np.generic]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of ggml's tensors."""

    bits: int
    form: ScaleForm
    weights: int  # of a block
    nbytes: int  # of a block
    take: Callable[[Bytes], Parts]  # blocks [n, nbytes] -> stored codes [n, weights], scales [n, items] by name

    def quantised(self, raw: Bytes, scale: float = 1.0) -> Quantised:
        """Rows of blocks, uint8 [n, bytes], of a tensor whose weights are multiplied by `scale`, where the form has one
        for all. OverflowError where a scale is not finite."""
        n = len(raw)
        stored, scales = self.take(np.ascontiguousarray(raw).reshape(-1, self.nbytes))
        for values in scales.values():
            if values.dtype == np.float16 and not bool(np.all(np.isfinite(values.astype(np.float32)))):
                raise OverflowError("a scale is not finite")
        codes = stored.view(np.int8).reshape(n, -1)
        if self.form.is_e4m3:
            scales = {"scales": np.full((n, 1), scale, np.float32), **scales}
        if not self.form.unsigned:
            codes = codes - np.int8(zero_of(self.bits))
        return Quantised(
            form=self.form, codes=codes, scales={name: values.reshape(n, -1) for name, values in scales.items()}
        )


def _halves(blocks: Bytes, start: int) -> NDArray[np.generic]:
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2")


def _nibbles(packed: Bytes) -> Bytes:
    """Halves of bytes [.., k]: all lower ones, then all upper ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _bits(packed: Bytes) -> Bytes:
    """The fifth bits [n, 32] of four bytes [n, 4]."""
    return np.unpackbits(packed, axis=1, bitorder="little")


def _with_upper(lower: Bytes, upper: Bytes) -> Bytes:
    """Codes of which `lower` are the last four bits."""
    return np.bitwise_or(lower, np.left_shift(upper, 4), dtype=np.uint8)


def _q8_0(blocks: Bytes) -> Parts:
    return np.ascontiguousarray(blocks[:, 2:]), {"scales": _halves(blocks, 0)}


def _q4_0(blocks: Bytes) -> Parts:
    return _nibbles(blocks[:, 2:]), {"scales": _halves(blocks, 0)}


def _q4_1(blocks: Bytes) -> Parts:
    return _nibbles(blocks[:, 4:]), {"scales": _halves(blocks, 0), "minimums": _halves(blocks, 2)}


def _q5_0(blocks: Bytes) -> Parts:
    return _with_upper(_nibbles(blocks[:, 6:]), _bits(blocks[:, 2:6])), {"scales": _halves(blocks, 0)}


def _q5_1(blocks: Bytes) -> Parts:
    codes = _with_upper(_nibbles(blocks[:, 8:]), _bits(blocks[:, 4:8]))
    return codes, {"scales": _halves(blocks, 0), "minimums": _halves(blocks, 2)}


def _k_scales(blocks: Bytes) -> dict[str, NDArray[np.generic]]:
    """Scales and minimums of blocks that begin with a scale, a minimum (to be subtracted) and 12 bytes of eight 6-bit
    factors of each."""
    first, second, third = (blocks[:, start : start + 4] for start in (4, 8, 12))
    factors = np.concatenate([first & 63, third & 15 | (first >> 6) << 4], axis=1)
    minimum_factors = np.concatenate([second & 63, third >> 4 | (second >> 6) << 4], axis=1)
    return {
        "scales": _halves(blocks, 0),
        "minimums": -_halves(blocks, 2).astype(np.float16),
        "factors": factors.view(np.int8),
        "minimum_factors": minimum_factors.view(np.int8),
    }


def _q4_k(blocks: Bytes) -> Parts:
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32))  # 64 weights to 32 bytes
    return codes.reshape(len(blocks), -1), _k_scales(blocks)


def _q5_k(blocks: Bytes) -> Parts:
    codes = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    fifth = np.asarray(
        blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1, np.uint8
    )  # bit g of byte i: weight i of group g
    return _with_upper(codes, fifth).reshape(len(blocks), -1), _k_scales(blocks)


def _q6_k(blocks: Bytes) -> Parts:
    lower = blocks[:, :128].reshape(-1, 2, 64)  # 128 weights to 64 bytes
    shifts = (2 * np.arange(4, dtype=np.uint8))[:, None]
    upper = np.asarray(blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3, np.uint8)
    codes = _with_upper(_nibbles(lower).reshape(-1, 2, 4, 32), upper)
    scales = {"scales": _halves(blocks, 208), "factors": np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)}
    return codes.reshape(len(blocks), -1), scales


def _two_bits(packed: Bytes) -> Bytes:
    """Codes [n, 256] of two bits: 128 to 32 bytes, of whose places each has 32."""
    shifts = (2 * np.arange(4, dtype=np.uint8))[:, None]
    return np.asarray(packed.reshape(-1, 2, 1, 32) >> shifts & 3, np.uint8).reshape(-1, 256)


def _q2_k(blocks: Bytes) -> Parts:
    both = blocks[:, :16]
    scales = {
        "scales": _halves(blocks, 80),
        "minimums": -_halves(blocks, 82).astype(np.float16),
        "factors": (both & 15).view(np.int8),
        "minimum_factors": (both >> 4).view(np.int8),
    }
    return _two_bits(blocks[:, 16:80]), scales


def _q3_k(blocks: Bytes) -> Parts:
    third = np.asarray(blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1, np.uint8)
    codes = np.asarray(_two_bits(blocks[:, 32:96]) | third.reshape(len(blocks), -1) << 2, np.uint8)
    lower = _nibbles(blocks[:, 96:104])  # of sixteen factors
    upper = np.asarray(blocks[:, None, 104:108] >> (2 * np.arange(4, dtype=np.uint8))[:, None] & 3, np.uint8)
    factors = (lower | upper.reshape(len(blocks), -1) << 4).view(np.int8) - np.int8(32)
    return codes, {"scales": _halves(blocks, 108), "factors": factors}


def _iq4_nl(blocks: Bytes) -> Parts:
    return _nibbles(blocks[:, 2:]), {"scales": _halves(blocks, 0)}


def _iq4_xs(blocks: Bytes) -> Parts:
    groups = np.arange(8, dtype=np.uint8)
    lower = blocks[:, 4:8].repeat(2, axis=1) >> 4 * (groups % 2) & 15
    upper = blocks[:, 2:4].repeat(4, axis=1) >> 2 * (groups % 4) & 3
    factors = np.asarray(lower | upper << 4, np.uint8).view(np.int8) - np.int8(32)
    codes = _nibbles(blocks[:, 8:].reshape(-1, 8, 16))
    return codes.reshape(len(blocks), -1), {"scales": _halves(blocks, 0), "factors": factors}


def _tq2_0(blocks: Bytes) -> Parts:
    return _two_bits(blocks[:, :64]), {"scales": _halves(blocks, 64)}


def _tq1_0(blocks: Bytes) -> Parts:
    """A byte is a fraction of 256, rounded up: its digits to the base 3, the first ones first, are five codes; of the
    last four bytes four."""
    parts = []
    for packed, digits in ((blocks[:, :32], 5), (blocks[:, 32:48], 5), (blocks[:, 48:52], 4)):
        left = packed[:, None] * 3 ** np.arange(digits, dtype=np.uint8)[:, None]  # without what is above a byte
        parts.append((left.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(len(blocks), -1))
    return np.concatenate(parts, axis=1), {"scales": _halves(blocks, 52)}


def _mxfp4(blocks: Bytes) -> Parts:
    codes, scales = _nibbles(blocks[:, 1:]), blocks[:, :1].copy()
    scales[~(codes & 7).any(axis=1)] = _ONE  # all zero: the scale does not matter
    if not bool(np.all((scales >= _LEAST_POWER) & (scales <= _LARGEST_POWER))):
        raise OverflowError("a scale is no number, or as small or large as none of a model is")
    return codes, {"scales": scales}


def _nvfp4(blocks: Bytes) -> Parts:
    """Four bytes for 16 weights each, whose codes are in the lower halves of eight bytes, then in the upper ones."""
    factors = np.where(blocks[:, :4] == _E4M3_NAN, 0, blocks[:, :4] & 127).astype(np.uint8)
    return _nibbles(blocks[:, 4:].reshape(-1, 4, 8)).reshape(len(blocks), -1), {"factors": factors}


KINDS: Mapping[str, Kind] = {
    "Q4_0": Kind(bits=4, form=SCALE_FORMS["half_32"], weights=32, nbytes=18, take=_q4_0),
    "Q4_1": Kind(bits=4, form=SCALE_FORMS["half_32_min"], weights=32, nbytes=20, take=_q4_1),
    "Q5_0": Kind(bits=5, form=SCALE_FORMS["half_32"], weights=32, nbytes=22, take=_q5_0),
    "Q5_1": Kind(bits=5, form=SCALE_FORMS["half_32_min"], weights=32, nbytes=24, take=_q5_1),
    "Q8_0": Kind(bits=8, form=SCALE_FORMS["half_32"], weights=32, nbytes=34, take=_q8_0),
    "Q4_K": Kind(bits=4, form=SCALE_FORMS["shared_32_min"], weights=256, nbytes=144, take=_q4_k),
    "Q5_K": Kind(bits=5, form=SCALE_FORMS["shared_32_min"], weights=256, nbytes=176, take=_q5_k),
    "MXFP4": Kind(bits=4, form=SCALE_FORMS["power_32"], weights=32, nbytes=17, take=_mxfp4),
    "NVFP4": Kind(bits=4, form=SCALE_FORMS["e4m3_16"], weights=64, nbytes=36, take=_nvfp4),
    "Q2_K": Kind(bits=2, form=SCALE_FORMS["shared_16_min"], weights=256, nbytes=84, take=_q2_k),
    "Q3_K": Kind(bits=3, form=SCALE_FORMS["shared_16"], weights=256, nbytes=110, take=_q3_k),
    "IQ4_NL": Kind(bits=4, form=SCALE_FORMS["half_32_iq4"], weights=32, nbytes=18, take=_iq4_nl),
    "IQ4_XS": Kind(bits=4, form=SCALE_FORMS["shared_32_iq4"], weights=256, nbytes=136, take=_iq4_xs),
    "TQ1_0": Kind(bits=2, form=SCALE_FORMS["half_256"], weights=256, nbytes=54, take=_tq1_0),
    "TQ2_0": Kind(bits=2, form=SCALE_FORMS["half_256"], weights=256, nbytes=66, take=_tq2_0),
    "Q6_K": Kind(bits=6, form=SCALE_FORMS["shared_16"], weights=256, nbytes=210, take=_q6_k),
}
