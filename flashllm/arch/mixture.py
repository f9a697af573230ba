"""A mixture of experts as the native core sees it: how a layer's neurons are shared out, and what its router decides.

A layer's neurons are those of its experts, one expert after the other, and behind them the shared ones, which every
token uses. Plain values; knows no model_type.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """A layer's experts (Shazeer et al., 2017). A token goes to those with the highest products of router and input,
    and their weights, which their neurons' values are multiplied by, come of a softmax of these products."""

    count: int
    chosen: int  # of them, for a token
    size: int  # neurons of an expert
    shared: int = 0  # neurons behind the experts', which every token uses
    softmax_of: Literal["all", "chosen"] = "all"  # the softmax is over all experts, or over the chosen alone
    normalized: bool = False  # the weights of the chosen are divided by their sum

    def __post_init__(self) -> None:
        for name, least in (("count", 1), ("chosen", 1), ("size", 1), ("shared", 0)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= 2**20:
                raise ValueError(f"experts: {name} must be an integer from {least}, not {str(value)[:80]!r}")
        if self.chosen > self.count:
            raise ValueError(f"a token cannot go to {self.chosen} of {self.count} experts")
        if self.softmax_of not in ("all", "chosen"):
            raise ValueError(f"softmax_of must be all or chosen, not {self.softmax_of!r}")

    @property
    def neurons(self) -> int:
        """Neurons of a layer."""
        return self.count * self.size + self.shared

    @property
    def active(self) -> int:
        """Neurons of the experts that a token goes to, and the shared ones."""
        return self.chosen * self.size + self.shared
