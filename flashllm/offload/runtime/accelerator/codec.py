"""Packed keys and values (csrc/kernels/group_codec.h) and packed weights (base/group_codes.py) by torch.

Values have the bits of the native codecs': a code times a scale, rounded to fp32, plus a minimum, rounded again.
"""

import torch

from flashllm.base.group_codes import GROUP_CODES
from flashllm.offload.planner.packing import Packing
from flashllm.offload.runtime.accelerator.device import Tensor

_LARGEST = 65504.0  # of fp16
_TOGETHER = 4096  # vectors unpacked at a time
_UNIT_NBYTES = 16  # of 32 weights in 4 bits: their lower halves are the first 16


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """[..., n * bits / 8] uint8 -> [..., n] uint8, the lowest bits first."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(-2)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """The other way round."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    together: Tensor = codes.reshape(*codes.shape[:-1], -1, 8 // bits) << shifts
    return together.sum(-1, dtype=torch.uint8)


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
    """A matrix of `rows` outputs and `columns` inputs, packed, where it lies."""

    def __init__(self, packed: Tensor, rows: int, columns: int, packing: Packing) -> None:
        self._count, self._length = packing.vectors(rows, columns)
        self._vectors, self._code = packed.view(self._count, -1), GROUP_CODES[packing.encoding]

    def parts(self) -> list[slice]:
        """Vectors that are unpacked together."""
        return [slice(first, min(first + _TOGETHER, self._count)) for first in range(0, self._count, _TOGETHER)]

    def unpack(self, part: slice) -> Tensor:
        """fp32 [vectors of a part, weights of each]."""
        code, vectors = self._code, self._vectors[part]
        groups = code.groups(self._length)
        halves = vectors[:, : groups * (4 if code.has_minimum else 2)].contiguous().view(torch.float16).float()
        packed = vectors[:, 2 * halves.shape[1] :]
        if code.bits == 8:
            codes = packed.contiguous().view(torch.int8).float()
        else:
            units = packed.reshape(len(vectors), -1, _UNIT_NBYTES)
            codes = torch.cat([units & 15, units >> 4], -1).float()
            codes -= 0.0 if code.has_minimum else 8.0
        values = codes.view(len(vectors), groups, code.group).mul_(halves[:, :groups, None])
        if code.has_minimum:
            values.add_(halves[:, groups:, None])
        return values.view(len(vectors), -1)[:, : self._length]
