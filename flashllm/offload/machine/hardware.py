"""`Hardware`: the constants of table 8 (paper B) for one machine, rates as functions of size, and its file format.

It knows no model. `source` says where the constants come from: a profile, a fit to published figures, a person.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from flashllm.base.checks import check_int, from_json, is_number, to_json
from flashllm.base.files import read_json_object
from flashllm.errors import FormatError
from flashllm.profile.rates import RateCurve

# How streams share the machine while they overlap (`costs.py` gives the two formulas).
COMBINE = ("a3", "serial-load")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Three tiers, the links between them, and what computes. Sizes in bytes, rates in bytes/s or flop/s."""

    name: str
    device: str  # what the device tier is: "cuda" or "cpu"
    source: str = "file"
    device_memory: int
    device_reserved: int = 0  # context, libraries, fragmentation: never available to tensors
    cpu_memory: int
    cpu_reserved: int = 0
    disk_capacity: int
    ctog: RateCurve  # CPU -> device, over bytes of one transfer
    gtoc: RateCurve
    dtoc: RateCurve  # disk -> CPU
    ctod: RateCurve
    gemm: RateCurve  # device matrix multiplication, flop/s over rows
    bmm: RateCurve  # device batched multiplication of attention, flop/s over the side of the score matrix
    device_bandwidth: RateCurve  # the device reading its own memory, over bytes
    cpu_attention: RateCurve  # key and value bytes/s that decode attention on the CPU consumes, over bytes of a call
    cpu_bandwidth: RateCurve  # the CPU reading its own memory: dequantising a compressed cache there
    combine: str = "serial-load"
    direct_io: bool | None = None  # whether the disk rates were measured past the page cache; None: not known
    # What this engine measured of itself on a CPU; a file written by hand may leave it out.
    dtype: str | None = None  # of the weights and the cache that were measured with
    packed_gemm: RateCurve | None = None  # as gemm, of packed weights, which are unpacked on the way
    decoded_gemm: RateCurve | None = None  # as packed_gemm, in decoding, by inputs in codes
    packed_attention: RateCurve | None = None  # as cpu_attention, of a packed cache, in bytes that it takes unpacked
    seal: RateCurve | None = None  # cache bytes/s that are packed
    elementwise: RateCurve | None = None  # bytes/s that norms, sums and activations read and write
    read_takes: float = 0.0  # share of the products' rate that is lost while the disk is read at full rate
    read_loses: float = 0.0  # share of the disk's rate that is lost while products run
    square_s: float = 0.0  # of a batch in a layer: what neither products nor bytes explain

    def __post_init__(self) -> None:
        if self.device not in ("cuda", "cpu"):
            raise ValueError(f"device must be 'cuda' or 'cpu', not {self.device!r}")
        if self.combine not in COMBINE:
            raise ValueError(f"combine must be one of {COMBINE}, not {self.combine!r}")
        for field in ("device_memory", "device_reserved", "cpu_memory", "cpu_reserved", "disk_capacity"):
            check_int(field, getattr(self, field), 0, 2**63 - 1)
        for field, limit in (("read_takes", 1), ("read_loses", 1), ("square_s", float("inf"))):
            value = getattr(self, field)
            if not is_number(value) or not 0 <= value < limit:
                raise ValueError(f"{field} must be a number from 0 and below {limit}, not {value!r}")

    @property
    def device_usable(self) -> int:
        return max(0, self.device_memory - self.device_reserved)

    @property
    def cpu_usable(self) -> int:
        return max(0, self.cpu_memory - self.cpu_reserved)

    def limited(self, **capacities: int | None) -> "Hardware":
        """This machine with other device_memory, cpu_memory or disk_capacity; None: as it is. Rates stay."""
        given: dict[str, Any] = {name: nbytes for name, nbytes in capacities.items() if nbytes is not None}
        return dataclasses.replace(self, **given)

    def to_json(self) -> dict[str, Any]:
        return dict(to_json(self))

    @classmethod
    def load(cls, path: Path) -> "Hardware":
        """The machine that the JSON file `path` describes by its constants; a rate is a number or a list of
        [size, rate]. Raises FormatError that names the constant, FlashIOError; unknown ones are errors."""
        try:
            return cast(Hardware, from_json(cls, read_json_object(path), "the hardware"))
        except ValueError as error:
            raise FormatError(f"{path}: {error}") from None
