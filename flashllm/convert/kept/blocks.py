"""Blocks of GGUF files taken apart: codes and scales of whole rows. Knows bytes and numpy, no files and no models.

The layouts are in csrc/planes/blocks.cpp and codebooks.cpp: 32 weights to an fp16 scale, or to a power of two, 16 to a
number in E4M3, or 256 to an fp16 scale (and minimum), but in TQ1_0 and TQ2_0 with factors of 4 to 8 bits for their
groups.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flashllm import _core
from flashllm.base.codes.carried import PACKED_AS, SCALE_FORMS, WHOLE, CarriedCode, Quantised, ScaleForm, zero_of

_ONE = 127  # a scale of MXFP4: that of zeros that have no usual one
_SCALES = np.dtype(  # of a block; those that its kind has, the first of sixteen
    [
        *(("scales", "<f2"), ("minimums", "<f2"), ("powers", np.uint8)),
        *(("factors", np.int8, 16), ("minimum_factors", np.int8, 16)),
    ],
    align=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of ggml's tensors."""

    name: str
    bits: int
    form: ScaleForm
    weights: int  # of a block
    nbytes: int  # of a block
    of_codebook: bool = False  # its codes take more bytes than its blocks

    @property
    def packed_as(self) -> CarriedCode:
        """The code in which its weights are stored."""
        return next(code for code in PACKED_AS.values() if (code.bits, code.form) == (self.bits, self.form))

    def quantised(self, raw: NDArray[np.uint8], scale: float = 1.0) -> Quantised:
        """Rows of blocks, uint8 [n, bytes], of a tensor whose weights are multiplied by `scale`, where the form has one
        for all. OverflowError where a scale is not finite."""
        n = len(raw)
        stored, found = _core.block_codes(self.name, np.ascontiguousarray(raw).reshape(-1, self.nbytes))
        parts = found.view(_SCALES)[:, 0]
        if self.form.is_power:
            powers = parts["powers"]
            powers[~((stored & 7).any(axis=1) | usual_powers(powers))] = _ONE
            if not usual_powers(powers).all():
                raise OverflowError("a scale is no number, or as small or large as none of a model is")
        scales: dict[str, NDArray[np.generic]] = {}
        for name, (share, dtype) in self.form.parts().items():
            if share == WHOLE:
                scales[name] = np.full((n, 1), scale, dtype)
                continue
            values = parts["powers" if self.form.is_power else name].reshape(len(parts), -1)
            scales[name] = np.ascontiguousarray(values[:, : self.weights // share]).view(dtype).reshape(n, -1)
            if dtype == np.float16 and not bool(np.all(np.isfinite(scales[name].astype(np.float32)))):
                raise OverflowError("a scale is not finite")
        codes = stored.view(np.int8).reshape(n, -1)
        if not self.form.unsigned:
            codes = codes - np.int8(zero_of(self.bits))
        return Quantised(form=self.form, codes=codes, scales=scales)


def usual_powers(powers: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """True for scales of MXFP4 whose weights are normal fp32 numbers."""
    return (powers >= 2) & (powers <= 252)


KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(name="Q4_0", bits=4, form=SCALE_FORMS["half_32"], weights=32, nbytes=18),
        Kind(name="Q4_1", bits=4, form=SCALE_FORMS["half_32_min"], weights=32, nbytes=20),
        Kind(name="Q5_0", bits=5, form=SCALE_FORMS["half_32"], weights=32, nbytes=22),
        Kind(name="Q5_1", bits=5, form=SCALE_FORMS["half_32_min"], weights=32, nbytes=24),
        Kind(name="Q8_0", bits=8, form=SCALE_FORMS["half_32"], weights=32, nbytes=34),
        Kind(name="Q4_K", bits=4, form=SCALE_FORMS["shared_32_min"], weights=256, nbytes=144),
        Kind(name="Q5_K", bits=5, form=SCALE_FORMS["shared_32_min"], weights=256, nbytes=176),
        Kind(name="MXFP4", bits=4, form=SCALE_FORMS["power_32"], weights=32, nbytes=17),
        Kind(name="NVFP4", bits=4, form=SCALE_FORMS["e4m3_16"], weights=64, nbytes=36),
        Kind(name="Q2_K", bits=2, form=SCALE_FORMS["shared_16_min"], weights=256, nbytes=84),
        Kind(name="Q3_K", bits=3, form=SCALE_FORMS["shared_16"], weights=256, nbytes=110),
        Kind(name="IQ4_NL", bits=4, form=SCALE_FORMS["half_32_iq4"], weights=32, nbytes=18),
        Kind(name="IQ4_XS", bits=4, form=SCALE_FORMS["shared_32_iq4"], weights=256, nbytes=136),
        Kind(name="IQ3_S", bits=4, form=SCALE_FORMS["shared_32_iq3_s"], weights=256, nbytes=110, of_codebook=True),
        Kind(name="IQ3_XXS", bits=4, form=SCALE_FORMS["shared_32_iq3_xxs"], weights=256, nbytes=98, of_codebook=True),
        Kind(name="IQ2_XXS", bits=3, form=SCALE_FORMS["shared_32_iq2"], weights=256, nbytes=66, of_codebook=True),
        Kind(name="IQ2_XS", bits=3, form=SCALE_FORMS["shared_16_iq2"], weights=256, nbytes=74, of_codebook=True),
        Kind(name="IQ2_S", bits=3, form=SCALE_FORMS["shared_16_iq2"], weights=256, nbytes=82, of_codebook=True),
        Kind(name="IQ1_S", bits=3, form=SCALE_FORMS["shared_32_iq1"], weights=256, nbytes=50, of_codebook=True),
        Kind(name="IQ1_M", bits=3, form=SCALE_FORMS["shared_16_iq1"], weights=256, nbytes=56, of_codebook=True),
        Kind(name="TQ1_0", bits=2, form=SCALE_FORMS["half_256"], weights=256, nbytes=54),
        Kind(name="TQ2_0", bits=2, form=SCALE_FORMS["half_256"], weights=256, nbytes=66),
        Kind(name="Q6_K", bits=6, form=SCALE_FORMS["shared_16"], weights=256, nbytes=210),
    )
}
