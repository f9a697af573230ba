"""A text as windows of tokens, its perplexity under a model, and what the model's FFNs see of it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flashllm.engine.model import Model
from flashllm.errors import FlashError, UsageError

WINDOW = 512  # tokens that are computed together, each window from an empty context
MAX_TOKENS = 8192  # of a text that are used: one half to calibrate, the other to score
MIN_TOKENS = 64
SAMPLES = 512  # positions whose FFN inputs are kept, over all calibrating windows
_PIECE_NBYTES = 32 << 20  # of logits in memory at once

Windows = list[list[int]]
Floats = NDArray[np.float32]


def read_text(path: Path) -> str:
    """A text file in UTF-8. UsageError where it cannot be read as one."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read as text: {error}") from error


def windows_of(ids: Sequence[int], context: int, longest: int) -> Windows:
    """A text's tokens in windows of one length: `longest`, or what a context or an eighth of the text allows.

    UsageError for a text of fewer than MIN_TOKENS tokens.
    """
    if len(ids) < MIN_TOKENS:
        raise UsageError(f"the text has {len(ids)} tokens; at least {MIN_TOKENS} are needed")
    length = min(longest, context, max(MIN_TOKENS // 2, len(ids) // 8))
    return [list(ids[first : first + length]) for first in range(0, len(ids) - length + 1, length)]


def split_windows(ids: Sequence[int], context: int) -> tuple[Windows, Windows]:
    """(windows to calibrate on, windows to score) of a text's tokens, in turn, so that both are of all its parts.

    UsageError for a text of fewer than MIN_TOKENS tokens.
    """
    windows = windows_of(ids, context, WINDOW)
    most = max(2, MAX_TOKENS // len(windows[0]))
    chosen = [windows[i] for i in np.linspace(0, len(windows) - 1, min(most, len(windows))).astype(int)]
    return chosen[::2], chosen[1::2]


@dataclass(slots=True)
class Inputs:
    """An observer that keeps the FFNs' inputs at every `step`-th token."""

    layers: int
    step: int
    _kept: list[list[Floats]] = field(init=False)
    _seen: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._kept = [[] for _ in range(self.layers)]
        self._seen = [0] * self.layers

    def input(self, layer: int, x: Floats) -> None:
        first = -self._seen[layer] % self.step
        self._kept[layer].append(np.array(x[first :: self.step]))
        self._seen[layer] += len(x)

    def activations(self, layer: int, first: int, h: Floats) -> None:
        """As of `Observer`."""

    def of(self, layer: int) -> Floats:
        """[samples, d_model]"""
        return np.concatenate(self._kept[layer])


@dataclass(slots=True)
class Zeros:
    """An observer that counts neurons that are exactly zero."""

    zeros: int = 0
    values: int = 0

    def input(self, layer: int, x: Floats) -> None:
        """As of `Observer`."""

    def activations(self, layer: int, first: int, h: Floats) -> None:
        self.zeros += h.size - int(np.count_nonzero(h))
        self.values += h.size


def perplexity(
    model: Model, windows: Windows, *, observer: Inputs | Zeros | None = None, done: Callable[[], None] | None = None
) -> float:
    """The perplexity of every token but each window's first. `done` is called after each window."""
    return perplexity_of(mean_surprise(model, windows, observer=observer, done=done))


def perplexity_of(mean: float) -> float:
    """exp of a mean negative log-likelihood; infinite where that is no number, or too large."""
    return math.exp(mean) if mean < 700 else math.inf


def check_finite(text: Path, *perplexities: float) -> None:
    """FlashError where one is infinite."""
    if not all(map(math.isfinite, perplexities)):
        raise FlashError(
            f"the model computes no finite loss on {text.name}: numbers overflow in its dtype, or weights are damaged"
        )


def piece_tokens(vocab_size: int) -> int:
    """Tokens whose logits are computed at once."""
    return max(1, _PIECE_NBYTES // (4 * vocab_size))


def mean_surprise(
    model: Model, windows: Windows, *, observer: Inputs | Zeros | None = None, done: Callable[[], None] | None = None
) -> float:
    """The mean negative log-likelihood of every token but each window's first. `done` is called after each window."""
    total, count = 0.0, 0
    size = piece_tokens(model.vocab_size)
    for ids in windows:
        sequence = model.new_sequence()
        try:
            for first in range(0, len(ids), size):
                piece = ids[first : first + size]
                logits = model.step([(sequence, piece)], all_logits=True, as_prompt=True, observer=observer)
                targets = ids[first + 1 : first + 1 + len(piece)]
                total += surprise(logits[: len(targets)], targets)
                count += len(targets)
        finally:
            sequence.close()
        if done is not None:
            done()
    return total / count


def surprise(logits: Floats, targets: Sequence[int]) -> float:
    """The sum of -log softmax(logits)[target], in double precision; NaN where a logit is not finite."""
    total = 0.0
    with np.errstate(invalid="ignore"):
        for row, target in zip(logits, targets, strict=True):
            values = row.astype(np.float64)
            highest = values.max()
            total += math.log(np.exp(values - highest).sum()) + highest - values[target]
    return float(total)
