"""From the logits of a step to one token: penalty, temperature, filters, and the draw. Knows no model and no text.

The order and the meaning of every option are those of transformers' `generate`: repetition penalty, temperature, top-k,
top-p, min-p, each seeing what the one before left. The draw is numpy's PCG64: a seed gives the same answer in every
process, but not the one that torch draws with that seed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flashllm.errors import FlashError, UsageError
from flashllm.generate.grammar import Matcher

_MIN_TEMPERATURE = 1e-6  # below, logits divided by it overflow fp32
_FIRST_SORTED = 256  # tokens that top-p looks at first


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How an answer's tokens are chosen and where it ends. UsageError for a value that cannot be."""

    max_new_tokens: int = 128
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0  # 1: all
    min_p: float = 0.0  # of the likeliest token's probability; 0: all
    repetition_penalty: float = 1.0  # 1: none
    seed: int | None = None  # None: another answer each time
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False  # go on after an end token: for measurements of a given length

    def __post_init__(self) -> None:
        infinity = float("inf")
        checks = {
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "temperature": (
                self.temperature == 0 or _MIN_TEMPERATURE <= self.temperature < infinity,
                f"0, or finite and at least {_MIN_TEMPERATURE}",
            ),
            "top_k": (self.top_k >= 0, "at least 0"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "from 0 to 1"),
            "repetition_penalty": (0 < self.repetition_penalty < infinity, "above 0 and finite"),
            "seed": (self.seed is None or self.seed >= 0, "at least 0"),
            "stop": (all(self.stop), "of texts that are not empty"),
        }
        for name, (good, must_be) in checks.items():
            if not good:
                raise UsageError(f"--{name.replace('_', '-')} cannot be {getattr(self, name)!r}: it must be {must_be}")


class Sampler:
    """Chooses tokens. Holds the random state, and nothing of the conversation."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = np.random.Generator(np.random.PCG64(seed))

    def choose(
        self,
        logits: NDArray[np.float32],
        context: Sequence[int],
        options: SamplingOptions,
        matcher: Matcher | None = None,
    ) -> int:
        """The next token after `logits` [vocab] (left as they are); `context` are the ids so far, for the penalty. It
        goes on as `matcher` demands, which is told. FlashError where the logits are not finite."""
        token_id = self._chosen(logits, context, options, matcher)
        if matcher is not None:
            matcher.accept(token_id)
        return token_id

    def _chosen(
        self, logits: NDArray[np.float32], context: Sequence[int], options: SamplingOptions, matcher: Matcher | None
    ) -> int:
        likeliest = int(logits.argmax())  # where there is a NaN, its place
        if not np.isfinite(logits[likeliest]):
            raise FlashError(
                "the model computed no usable logits (an overflow, most likely); convert it with --dtype float32"
            )
        if matcher is not None:
            if matcher.forced:
                return matcher.forced[0]
            logits = matcher.masked(logits)
            likeliest = int(logits.argmax())
        if options.temperature == 0 and options.repetition_penalty == 1:
            return likeliest
        ids, scores = candidates(logits, context, options)
        if options.temperature == 0:
            return int(scores.argmax())
        cumulative = np.cumsum(_weights(scores), dtype=np.float64)
        # A uniform number below 1 times the sum is below the sum, so no token without probability is found.
        return int(ids[np.searchsorted(cumulative, self._random.random() * cumulative[-1], side="right")])


def candidates(
    logits: NDArray[np.float32], context: Sequence[int], options: SamplingOptions
) -> tuple[NDArray[np.intp], NDArray[np.float32]]:
    """(ids, scores): the tokens that may come next, each with probability softmax(scores); ids ascend.

    Without a temperature only the penalty applies, as in transformers' greedy search.
    """
    scores, ids = logits.astype(np.float32), np.arange(len(logits))
    if options.repetition_penalty != 1:
        _penalise(scores, context, options.repetition_penalty)
    if options.temperature == 0:
        return ids, scores
    scores /= np.float32(options.temperature)
    if 0 < options.top_k < len(scores):
        ids, scores = _only(_top_k(scores, options.top_k), ids, scores)
    if options.top_p < 1:
        ids, scores = _only(_top_p(scores, options.top_p), ids, scores)
    if options.min_p > 0:
        ids, scores = _only(_weights(scores) >= options.min_p, ids, scores)  # Nguyen et al. 2024, section 3
    return ids, scores


def _only(
    mask: NDArray[np.bool_], ids: NDArray[np.intp], scores: NDArray[np.float32]
) -> tuple[NDArray[np.intp], NDArray[np.float32]]:
    kept = np.flatnonzero(mask)
    return ids[kept], scores[kept]


def _penalise(scores: NDArray[np.float32], context: Sequence[int], penalty: float) -> None:
    """Make every token of the context less likely, once (Keskar et al. 2019, CTRL, section 4.1, for both signs)."""
    ids = np.asarray(context, np.int64)
    ids = ids[ids < len(scores)]  # a tokenizer may know ids that the model cannot say
    said = scores[ids]
    scores[ids] = np.where(said < 0, said * np.float32(penalty), said / np.float32(penalty))


def _top_k(scores: NDArray[np.float32], count: int) -> NDArray[np.bool_]:
    """The `count` largest scores, and those equal to the last of them."""
    mask: NDArray[np.bool_] = scores >= np.partition(scores, -count)[-count]
    return mask


def _top_p(scores: NDArray[np.float32], share: float) -> NDArray[np.bool_]:
    """The fewest tokens that hold `share` of the probability, of equal ones the later (Holtzman et al. 2020, 3.1)."""
    largest = scores.max()
    mass = share * np.exp(scores - largest).sum(dtype=np.float64)
    size = min(_FIRST_SORTED, len(scores))
    while True:  # a few tokens hold the mass, nearly always: sorting all of a large vocabulary takes milliseconds
        top = np.sort(np.partition(scores, -size)[-size:])[::-1]
        cumulative = np.cumsum(np.exp(top - largest), dtype=np.float64)
        if cumulative[-1] >= mass or size == len(scores):
            break
        size = min(16 * size, len(scores))
    count = min(int(np.searchsorted(cumulative, mass)) + 1, size)
    last = top[count - 1]
    mask: NDArray[np.bool_] = scores > last
    equal = np.flatnonzero(scores == last)
    mask[equal[len(equal) - (count - int(mask.sum())) :]] = True
    return mask


def _weights(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    """Probabilities, as parts of the likeliest token's."""
    weights: NDArray[np.float32] = np.exp(scores - scores.max())
    return weights
