"""Parts of the engine that can be switched off to see what each is worth (paper A, table 2). Plain data.

None of them changes a token; nobody who wants an answer switches one off. Benchmarks do, through
`FlashModel.from_pretrained(..., ablation=...)`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Ablation:
    """What is on; everything, by default."""

    cached: bool = True  # neurons stay in memory from token to token (paper A, section 3.1)
    bundled: bool = True  # a neuron's matrices are read as one row, not one by one (paper A, section 3.2)
    merged: bool = True  # misses that are neighbours on flash are read in one request
    placed: bool = True  # misses are read from the reordered copy, where the model has one
    overlap: bool = True  # hits are multiplied while misses fly
    early: bool = True  # the next layer's rows are read ahead on a guess, where there are predictors for it
