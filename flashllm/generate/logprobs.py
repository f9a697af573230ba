"""Log probabilities of tokens, from logits. Knows no text."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_LOGPROBS = 20  # likeliest tokens listed with each chosen one, as in OpenAI's interface


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """A chosen token's log probability, and the likeliest tokens at its place, before penalty, temperature, filters."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (id, log probability), the likeliest first, of equal ones the lower id


def logprobs_of(logits: NDArray[np.float32], token_id: int, count: int) -> TokenLogprobs:
    """Log probabilities of `logits` [vocab]: `token_id`'s, and the `count` likeliest tokens at its place.

    Of fp64 sums, so that a token's value does not depend on how they were split.
    """
    scores = logits.astype(np.float64)
    scores -= scores.max()
    scores -= np.log(np.exp(scores).sum())
    count = min(count, len(scores))
    top: list[int] = []
    if count:
        last = np.partition(scores, -count)[-count]  # all that are at least this likely, then the order
        likely = np.flatnonzero(scores >= last)
        top = likely[np.argsort(-scores[likely], kind="stable")][:count].tolist()
    return TokenLogprobs(
        token_id=token_id, logprob=float(scores[token_id]), top=tuple((each, float(scores[each])) for each in top)
    )
