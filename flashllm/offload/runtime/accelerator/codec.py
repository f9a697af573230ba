"""Group-wise quantisation (paper B, section 5) by torch: the arithmetic and the layout of csrc/offload/group_codec.h.

Values have the bits of the native codec's: a code times a scale, rounded to fp32, plus a minimum, rounded again.
"""

import torch

from flashllm.offload.runtime.accelerator.device import Tensor
from flashllm.offload.runtime.ops import Packing

GROUP = 64  # values that share a scale and a minimum
UNIT = 16  # codes that lie together, in 2 * bits bytes
_LARGEST = 65504.0  # of fp16
_PANELS = 64  # unpacked at a time: 4096 rows


def in_units(columns: int) -> int:
    """`columns`, up to whole units."""
    return -(-columns // UNIT) * UNIT


def codes_nbytes(columns: int, bits: int) -> int:
    """Bytes of a row's codes."""
    return in_units(columns) // UNIT * 2 * bits


def _fields(packed: Tensor, bits: int) -> Tensor:
    """[..., n] bytes -> [..., n * 8 / bits] codes of `bits` bits (1, 2, 4 or 8), the lowest first."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(-2)


def _packed(codes: Tensor, bits: int) -> Tensor:
    """The other way round."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    together: Tensor = codes.reshape(*codes.shape[:-1], -1, 8 // bits) << shifts
    return together.sum(-1, dtype=torch.uint8)


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """[..., units * 2 * bits] uint8 -> [..., units * UNIT] uint8."""
    if bits != 3:
        return _fields(packed, bits)
    units = packed.reshape(*packed.shape[:-1], -1, 6)  # 16 codes: their lower two bits, then their third
    return (_fields(units[..., :4], 2) | (_fields(units[..., 4:], 1) << 2)).flatten(-2)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """The other way round."""
    if bits != 3:
        return _packed(codes, bits)
    units = codes.reshape(*codes.shape[:-1], -1, UNIT)
    return torch.cat([_packed(units & 3, 2), _packed(units >> 2, 1)], -1).flatten(-2)


def quantise(x: Tensor, smallest: Tensor, largest: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and minimums (fp16) of fp32 values, whose groups' ends broadcast with them."""
    top = float((1 << bits) - 1)
    scale = ((largest - smallest) / top).clamp(max=_LARGEST).half()
    minimum = (smallest + 0.0).clamp(-_LARGEST, _LARGEST).half()
    wide = scale.float()
    steps = torch.where(wide == 0, torch.zeros_like(x), (x - minimum.float()) / wide)
    return steps.clamp(0, top).round().to(torch.uint8), scale, minimum


def restore(codes: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    """fp32 values of codes, with scales and minimums that broadcast with them."""
    return codes.float().mul_(scale.float()).add_(minimum.float())


class PackedMatrix:
    """A matrix [rows, columns] as csrc/offload/packed_weights.h packs it, where it lies."""

    def __init__(self, packed: Tensor, rows: int, columns: int, packing: Packing) -> None:
        self._packed, self.rows, self.columns, self._packing = packed, rows, columns, packing
        self._row = codes_nbytes(columns, packing.bits)

    def _scales_nbytes(self, rows: int) -> int:
        """Bytes of the scales of a panel of some rows, and of its minimums."""
        return 2 * (in_units(self.columns) if self._packing.along == "outputs" else rows * -(-self.columns // GROUP))

    def parts(self) -> list[slice]:
        """Rows that are unpacked together."""
        step = _PANELS * GROUP
        return [slice(first, min(first + step, self.rows)) for first in range(0, self.rows, step)]

    def unpack(self, part: slice) -> Tensor:
        """fp32 [rows of a part, columns]."""
        panel = 2 * self._scales_nbytes(GROUP) + GROUP * self._row
        whole, rest = divmod(part.stop - part.start, GROUP)
        begin = part.start // GROUP * panel
        out = []
        if whole:
            out.append(self._panels(self._packed[begin : begin + whole * panel].view(whole, panel), GROUP))
        if rest:
            begin += whole * panel
            out.append(
                self._panels(self._packed[begin : begin + 2 * self._scales_nbytes(rest) + rest * self._row][None], rest)
            )
        return out[0] if len(out) == 1 else torch.cat(out)

    def _panels(self, panels: Tensor, rows: int) -> Tensor:
        nbytes = self._scales_nbytes(rows)
        scales = panels[:, :nbytes].contiguous().view(torch.float16)
        minimums = panels[:, nbytes : 2 * nbytes].contiguous().view(torch.float16)
        codes = unpack_codes(panels[:, 2 * nbytes :].reshape(-1, rows, self._row), self._packing.bits)
        if self._packing.along == "inputs":
            scales, minimums = (
                each.view(-1, rows, nbytes // 2 // rows).repeat_interleave(GROUP, dim=2)[..., : codes.shape[-1]]
                for each in (scales, minimums)
            )
        else:
            scales, minimums = scales[:, None], minimums[:, None]
        values = restore(codes, scales, minimums)
        return values.reshape(-1, values.shape[-1])[:, : self.columns]
