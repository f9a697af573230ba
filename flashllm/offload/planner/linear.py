"""`Linear`: an affine form over the nine placement fractions, so that each equation of A.3 is written once.

The same object prices a given policy (`value`) and is a row of the linear program (`coef`, `const`).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flashllm.offload.policy import Policy

SIZE = len(Policy.PLACEMENT)


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """coef · (wg, wc, wd, cg, cc, cd, hg, hc, hd) + const."""

    coef: NDArray[np.float64]  # [9]
    const: float = 0.0

    def __add__(self, other: "Linear | float") -> "Linear":
        if isinstance(other, Linear):
            return Linear(self.coef + other.coef, self.const + other.const)
        return Linear(self.coef, self.const + other)

    __radd__ = __add__

    def __mul__(self, factor: float) -> "Linear":
        return Linear(self.coef * factor, self.const * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> "Linear":
        return self * (1 / divisor)

    def value(self, placement: tuple[float, ...] | NDArray[np.float64]) -> float:
        return float(self.coef @ np.asarray(placement)) + self.const

    @property
    def minimum(self) -> float:
        """The least value over all placements: each kind wholly on its cheapest tier."""
        return self.const + float(self.coef.reshape(3, 3).min(axis=1).sum())


def constant(value: float) -> Linear:
    return Linear(np.zeros(SIZE), value)


WG, WC, WD, CG, CC, CD, HG, HC, HD = (Linear(row) for row in np.eye(SIZE))
