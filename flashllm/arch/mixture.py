"""A mixture of experts as the native core sees it: how a layer's neurons are shared out, and what its router decides.

A layer's neurons are those of its experts, one expert after the other, and behind them the shared ones, which every
token uses. Plain values; knows no model_type.
"""

from dataclasses import dataclass, field
from typing import Literal

from flashllm.base.checks import check_from_zero, check_int


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """A router's choice: which experts a token goes to, and their weights, by its products with the token.

    The experts with the highest scores are chosen. Where the model has a bias of the choice, it is added to the scores
    for the choice alone, and not to the weights (Wang et al., 2024: auxiliary-loss-free load balancing).
    """

    # A softmax over all experts; a softmax over the chosen, by their products; a sigmoid of each product; or
    # SparseMixer's (Liu et al., 2023): of one chosen after the other, its part of a softmax over those experts that are
    # left and whose products are within 2 * `jitter` of the highest, as a part of the larger of it and their own.
    score: Literal["softmax", "softmax_of_chosen", "sigmoid", "sparse_mixer"] = "softmax"
    softcap: float = 0.0  # products become cap * tanh(product / cap) first; 0: they stay
    # The experts come in `groups` of as many, of which only the `chosen_groups` count that score highest, each by the
    # sum of its two highest experts or by its highest (DeepSeek-AI, 2024: DeepSeek-V3, and V2).
    groups: int = 1
    chosen_groups: int = 1
    groups_by: Literal["two", "one"] = "two"
    normalized: bool = False  # the weights of the chosen are divided by their sum, and so:
    epsilon: float = 0.0  # that is added to the sum
    least_sum: float = 0.0  # what they are divided by is no less
    factor: float = 1.0  # that the weights are multiplied by, afterwards
    jitter: float = 0.0  # of SparseMixer
    # Its products are with what the FFN's norm is applied to, by an RMS norm of its own of this epsilon without a
    # weight, times a scale of each dimension over the root of their number (Gemma 4); None: with the FFN's input.
    norm_epsilon: float | None = None

    def __post_init__(self) -> None:
        scores = ("softmax", "softmax_of_chosen", "sigmoid", "sparse_mixer")
        for name, known in (("score", scores), ("groups_by", ("two", "one"))):
            if getattr(self, name) not in known:
                raise ValueError(f"router: {name} must be one of {', '.join(known)}, not {getattr(self, name)!r}")
        if not 1 <= self.chosen_groups <= self.groups:
            raise ValueError(f"router: {self.chosen_groups} of {self.groups} groups cannot be chosen")
        for name in ("softcap", "epsilon", "least_sum", "factor", "jitter", "norm_epsilon"):
            value = getattr(self, name)
            if value is not None:
                check_from_zero(f"router: {name}", value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """A layer's experts (Shazeer et al., 2017). A token goes to those that the router chooses, and their weights are
    what their neurons' values are multiplied by."""

    count: int
    chosen: int  # of them, for a token
    size: int  # neurons of an expert
    shared: int = 0  # neurons behind the experts', which every token uses
    router: RouterSpec = field(default_factory=RouterSpec)

    def __post_init__(self) -> None:
        for name, least in (("count", 1), ("chosen", 1), ("size", 1), ("shared", 0)):
            check_int(f"experts: {name}", getattr(self, name), least, 2**20)
        if self.chosen > self.count:
            raise ValueError(f"a token cannot go to {self.chosen} of {self.count} experts")
        groups, chosen_groups = self.router.groups, self.router.chosen_groups
        if self.count % groups or self.chosen > self.count // groups * chosen_groups:
            raise ValueError(
                f"{self.chosen} of {self.count} experts cannot be chosen from {chosen_groups} of {groups} groups"
            )

    @property
    def neurons(self) -> int:
        return self.count * self.size + self.shared
