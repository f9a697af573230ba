"""`RateCurve`: a rate that depends on size, as appendix A.3 says real systems need.

Knots are (size, rate); between them the rate runs linearly in log(size), outside it stays at the end knot.
It does not know what is measured: bytes/s over bytes of a transfer, flop/s over rows of a GEMM.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import Any


@dataclass(frozen=True, slots=True)
class RateCurve:
    """Units per second at a size; sizes rise strictly, rates are positive."""

    knots: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if not self.knots:
            raise ValueError("a rate curve needs at least one (size, rate) knot")
        for size, rate in self.knots:
            if not (size > 0 and math.isfinite(size) and rate > 0 and math.isfinite(rate)):
                raise ValueError(f"knot ({size!r}, {rate!r}): size and rate must be positive and finite")
        sizes = [size for size, _ in self.knots]
        if any(b <= a for a, b in pairwise(sizes)):
            raise ValueError(f"knot sizes must rise strictly: {sizes}")

    @classmethod
    def flat(cls, rate: float) -> "RateCurve":
        return cls(((1.0, rate),))

    @classmethod
    def from_json(cls, data: Any) -> "RateCurve":
        """A number, or a list of [size, rate]. Raises ValueError for anything else."""
        try:
            if isinstance(data, int | float) and not isinstance(data, bool):
                return cls.flat(float(data))
            return cls(tuple((float(size), float(rate)) for size, rate in data))
        except (TypeError, OverflowError):
            raise ValueError(f"expected a rate or a list of [size, rate], not {data!r}") from None

    def to_json(self) -> list[list[float]]:
        return [[size, rate] for size, rate in self.knots]

    def at(self, size: float) -> float:
        """The rate at `size`, in units per second."""
        index = bisect_right([knot for knot, _ in self.knots], size)
        if index == 0:
            return self.knots[0][1]
        if index == len(self.knots):
            return self.knots[-1][1]
        (low, low_rate), (high, high_rate) = self.knots[index - 1], self.knots[index]
        share = math.log(size / low) / math.log(high / low)
        return low_rate + share * (high_rate - low_rate)

    def scaled(self, factor: float) -> "RateCurve":
        return RateCurve(tuple((size, rate * factor) for size, rate in self.knots))
