"""Ranks and thresholds of predictors by model: paper A's recipes (section 3.1 and appendix C) as data, and a rule.

Knows layer numbers and names of architectures; no tensors.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """`ranks`: (first layer counted from the front, or from the back where negative; rank) from there on.

    A rank of 0 stands for no predictor: such a layer computes every neuron. The paper's thresholds (0.5; 0.7 for
    Persimmon) are not part of it: ours are calibrated to a recall, and our loss gives its sigmoid another meaning.
    """

    name: str
    ranks: tuple[tuple[int, int], ...]
    num_layers: int | None = None  # of the model the recipe was written for; None: any
    source: str = ""

    def __post_init__(self) -> None:
        if not self.ranks or self.ranks[0][0] != 0:
            raise ValueError(f"ranks must begin with layer 0, not {self.ranks!r}")
        if any(rank < 0 for _, rank in self.ranks):
            raise ValueError(f"ranks must not be negative: {self.ranks!r}")

    def rank(self, layer: int, num_layers: int) -> int:
        """Rank of the predictor of `layer`."""
        chosen = 0
        for first, rank in self.ranks:
            if layer >= (first if first >= 0 else num_layers + first):
                chosen = rank
        return chosen


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(name="opt-6.7b", ranks=((0, 128), (-4, 1024)), num_layers=32, source="appendix C.1"),
        Recipe(name="falcon-7b", ranks=((0, 256), (-4, 1152)), num_layers=32, source="appendix C.2"),
        Recipe(name="persimmon-8b", ranks=((0, 256), (-4, 1152)), num_layers=36, source="appendix C.3"),
        Recipe(
            name="phi-2",
            ranks=((0, 160), (8, 480), (12, 800), (20, 480), (24, 160), (28, 0)),
            num_layers=32,
            source="appendix C.4: groups of four layers; none in the last",
        ),
        Recipe(
            name="llama-2-7b-fatrelu",
            ranks=((0, 256), (14, 1024), (18, 256)),
            num_layers=32,
            source="appendix C.5: larger in the middle four",
        ),
    )
}

_AUTO = re.compile(r"AUTO(?:\*(\d+(?:\.\d+)?))?", re.IGNORECASE)
_CUSTOM = re.compile(r"(\d+)(?::(\d+)x(\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoRanks:
    """Ranks by the rule of `auto_rank`, times `scale`, and larger where weights have fewer bits: equal bytes."""

    scale: float = 1.0

    def rank(self, d_model: int, waste: float, bits: int) -> int:
        """For a layer; `waste` as in `auto_rank`."""
        return auto_rank(d_model, waste, self.scale * 16 / bits)


def parse_ranks(text: str) -> Recipe | AutoRanks:
    """The meaning of `--ranks`: AUTO, AUTO*2 (twice as large), a recipe's name, a rank for all layers, or "128:1024x4".

    The last is 128, and 1024 in the last four layers. ValueError says what would be right.
    """
    auto = _AUTO.fullmatch(text)
    if auto is not None and float(auto[1] or 1) > 0:
        return AutoRanks(scale=float(auto[1] or 1))
    if text.lower() in RECIPES:
        return RECIPES[text.lower()]
    match = _CUSTOM.fullmatch(text)
    if match is None or int(match[1]) == 0 or match[2] == "0":
        known = ", ".join(RECIPES)
        raise ValueError(
            f'--ranks must be AUTO, AUTO*2, a rank, "128:1024x4" (the last 4 layers larger) or one of {known}'
        )
    common = (0, int(match[1]))
    special = () if match[2] is None else ((-int(match[3]), int(match[2])),)
    return Recipe(name=text, ranks=(common, *special))


def probe_rank(d_model: int) -> int:
    """Rank of the truncated SVD by which a layer's difficulty is measured."""
    return min(d_model, max(4, 4 * round(0.5 * d_model**0.5)))


def auto_rank(d_model: int, waste: float, scale: float = 1.0) -> int:
    """Larger where prediction is harder. `waste`: share of all neurons that the SVD of `probe_rank` names in vain.

    The paper chose larger ranks for less sparse layers by hand (appendices B and C.4); activity alone misses sparse
    layers that are hard (bench/log). Grows with the root of the width: for a waste of 1 % it is 28 at a width of
    256 and 112 at 4096 (the paper: 128).
    """
    rank = scale * 16 * d_model**0.5 * (0.04 + 0.65 * min(max(waste, 0.0), 0.25) ** 0.5)
    return min(max(4, 4 * round(rank / 4)), d_model)
