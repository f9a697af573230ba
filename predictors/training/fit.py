"""Fit one layer's predictor: active where b (a x) + bias > threshold (paper A, section 3.1).

Starts from the best low-rank approximation of the layer's own pre-activations (`flashllm.convert.untrained.svd`, with
measured input statistics), then trains with a loss balanced over active and inactive neurons. A missed neuron counts
by what it adds to the output, |h| * ||down column||, coded in two bits. Knows tensors and chunks of them, not files.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from flashllm.convert.untrained.svd import InputStatistics, LowRankPredictor
from training.stored import stored_values

CODES_PER_BYTE = 4
# Codes: 0 does not fire; 1, 2, 3 fire with a contribution below, around and above the mean of those that fire.
CODE_EDGES = (0.5, 1.5)  # in means
_CODE_MEANS = (0.3, 0.9, 2.5)  # about the mean contribution within a code
PROBIT_TO_LOGIT = 1.7  # the logistic curve nearest to a unit normal's
JUDGE_TOKENS = 512  # logits computed at once where nothing is learnt

# The activity of a chunk of tokens: inputs [n, d_model] fp32, packed codes [n, ceil(d_ff / 4)] uint8.
Chunk = tuple[torch.Tensor, torch.Tensor]
Chunks = Callable[[], Iterator[Chunk]]


def pack_codes(
    codes: np.ndarray[tuple[int, int], np.dtype[np.uint8]],
) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """Codes [tokens, d_ff] of 0 to 3 as [tokens, ceil(d_ff / 4)], the first neuron in the lowest bits."""
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % CODES_PER_BYTE)))
    quads = padded.reshape(len(codes), -1, CODES_PER_BYTE)
    return quads[..., 0] | quads[..., 1] << 2 | quads[..., 2] << 4 | quads[..., 3] << 6


class UnpackCodes:
    """Packed codes to a value for each neuron [tokens, d_ff], by a table of the values of the four codes."""

    def __init__(
        self, d_ff: int, values: tuple[float, float, float, float], dtype: torch.dtype = torch.float32
    ) -> None:
        self._d_ff = d_ff
        codes = torch.arange(256)[:, None].bitwise_right_shift(torch.tensor([0, 2, 4, 6])) & 3
        self._table = torch.tensor(values, dtype=dtype)[codes]  # [256, 4]

    def __call__(self, packed: torch.Tensor) -> torch.Tensor:
        return self._table[packed.long()].flatten(-2)[..., : self._d_ff]


def fires(d_ff: int) -> UnpackCodes:
    """Unpacks to booleans."""
    return UnpackCodes(d_ff, (False, True, True, True), torch.bool)


@dataclass(slots=True)
class LayerPredictor:
    """a [rank, d_model], b [d_ff, rank], bias [d_ff], threshold (a logit)."""

    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor
    threshold: float = 0.0

    @property
    def rank(self) -> int:
        return len(self.a)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, d_ff] for x [tokens, d_model]."""
        return torch.addmm(self.bias, x @ self.a.T, self.b.T)

    @classmethod
    def from_low_rank(cls, start: LowRankPredictor, threshold: float = 0.0) -> "LayerPredictor":
        return cls(torch.from_numpy(start.a), torch.from_numpy(start.b), torch.from_numpy(start.bias), threshold)

    @classmethod
    def everything(cls, d_model: int, d_ff: int) -> "LayerPredictor":
        """The predictor of a layer without one: every neuron is active."""
        return cls(torch.zeros(1, d_model), torch.zeros(d_ff, 1), torch.zeros(d_ff), -1.0)

    def stored(self, bits: int) -> "LayerPredictor":
        """As a file of `bits` will hold it: its factors rounded."""
        a, b = (torch.from_numpy(stored_values(factor.numpy(), bits)) for factor in (self.a, self.b))
        return LayerPredictor(a, b, self.bias.clone(), self.threshold)


@dataclass(frozen=True, slots=True, kw_only=True)
class FitOptions:
    """How one layer is trained."""

    epochs: int = 2
    batch_tokens: int = 1024
    learning_rate: float = 3e-3
    positive_weight: float = 4.0  # a missed neuron of mean contribution costs this many wrong predictions
    even_share: float = 0.5  # of that weight, the share all firings have alike; the rest goes by contribution
    seed: int = 0

    def __post_init__(self) -> None:
        if self.epochs < 0 or self.batch_tokens < 1:
            raise ValueError(f"epochs must be at least 0 and batch_tokens at least 1, not {self}")
        if not 0.0 <= self.even_share <= 1.0 or self.positive_weight <= 0.0 or self.learning_rate <= 0.0:
            raise ValueError(f"even_share must lie in 0 to 1, the weight and rate above 0: {self}")

    @property
    def code_weights(self) -> tuple[float, float, float, float]:
        """Weight of missing a neuron of each code."""
        low, middle, high = (
            self.positive_weight * (self.even_share + (1 - self.even_share) * mean) for mean in _CODE_MEANS
        )
        return (0.0, low, middle, high)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerQuality:
    """On held-back positions: shares of all neurons, and errors as shares of the truly active / inactive."""

    rank: int
    true_share: float
    predicted_share: float
    false_negative: float
    false_positive: float


def root_of_covariance(covariance: NDArray[np.float64]) -> NDArray[np.float64]:
    """R with R R^T = `covariance`, directions of no variance given a little so that R can be inverted."""
    values, vectors = np.linalg.eigh(covariance)
    floor = 1e-8 * max(float(values[-1]), 1e-30)
    return np.asarray(vectors * np.sqrt(np.maximum(values, floor)))


def input_statistics(chunks: Chunks) -> InputStatistics:
    """Mean and covariance of the inputs of all chunks."""
    count, total, products = 0, None, None
    for x, _ in chunks():
        sums, outer = x.double().sum(0), (x.T @ x).double()
        total, products = (sums, outer) if total is None else (total + sums, products + outer)
        count += len(x)
    if total is None or products is None:
        raise ValueError("no inputs")
    mean = total / count
    covariance = products / count - torch.outer(mean, mean)
    return InputStatistics(mean=mean.numpy(), root=root_of_covariance(covariance.numpy()))


def fit(
    start: LayerPredictor, chunks: Chunks, options: FitOptions, d_ff: int, held: Chunks | None = None
) -> tuple[LayerPredictor, list[float]]:
    """Train on all chunks at most `options.epochs` times, in fp32: the predictor, and its loss on `held` by epoch.

    Stops after an epoch that is worse on `held` than one before, and gives back the best. Each chunk must hold a random
    part of the data: positions are shuffled within chunks. The gradient of the weighted cross-entropy is written out:
    torch's would keep six matrices of [batch, d_ff] alive instead of two.
    """
    weigh = UnpackCodes(d_ff, options.code_weights)
    generator = torch.Generator().manual_seed(options.seed)
    a = start.a.clone()
    b, bias = start.b * PROBIT_TO_LOGIT, start.bias * PROBIT_TO_LOGIT
    parameters = [a, b, bias]
    optimizer = torch.optim.AdamW(parameters, lr=options.learning_rate, weight_decay=0.0, betas=(0.9, 0.99))
    batch = options.batch_tokens
    steps = options.epochs * sum(max(1, len(x) // batch) for x, _ in chunks())
    done, losses, best = 0, list[float](), start
    for _ in range(options.epochs):
        for x, packed in chunks():
            order = torch.randperm(len(x), generator=generator)
            for first in range(0, max(1, len(x) // batch) * batch, batch):
                rows = order[first : first + batch]
                xs, weights = x[rows], weigh(packed[rows])
                projected = xs @ a.T
                gradient = torch.sigmoid_(torch.addmm(bias, projected, b.T))
                gradient = torch.where(weights > 0, (gradient - 1).mul_(weights), gradient).div_(len(rows))
                a.grad, b.grad, bias.grad = (gradient @ b).T @ xs, gradient.T @ projected, gradient.sum(0)
                for group in optimizer.param_groups:
                    group["lr"] = options.learning_rate * max(0.02, 1 - done / steps)
                optimizer.step()
                done += 1
        if held is not None:
            losses.append(weighted_loss(LayerPredictor(a, b, bias), held, options, d_ff))
            if losses[-1] > min(losses):
                return best, losses
        best = LayerPredictor(a.clone(), b.clone(), bias.clone())
    return best, losses


def weighted_loss(predictor: LayerPredictor, chunks: Chunks, options: FitOptions, d_ff: int) -> float:
    """The loss `fit` lowers, per position."""
    weigh = UnpackCodes(d_ff, options.code_weights)
    total, count = 0.0, 0
    for x, packed in chunks():
        for first in range(0, len(x), JUDGE_TOKENS):
            rows = slice(first, first + JUDGE_TOKENS)
            logits, weights = predictor.logits(x[rows]), weigh(packed[rows])
            signed = torch.where(weights > 0, -logits, logits)
            loss = torch.nn.functional.softplus(signed)
            total += float(torch.where(weights > 0, loss * weights, loss).double().sum())
        count += len(x)
    return total / max(1, count)


# The fp16 numbers in ascending order, as floats; the first and last thousand are NaNs, which no logit is.
_KEYS = torch.arange(-(2**15), 2**15)
_KEY_VALUES = torch.where(_KEYS >= 0, _KEYS, -(2**15) - _KEYS).to(torch.int16).view(torch.float16).float()


class LogitCounts:
    """Logits of firing and of silent neurons, counted by their fp16 value: every threshold's recall and density."""

    def __init__(self) -> None:
        self.firing = torch.zeros(2**16, dtype=torch.int64)
        self.silent = torch.zeros(2**16, dtype=torch.int64)

    def add(self, logits: torch.Tensor, active: torch.Tensor) -> None:
        """logits and active [tokens, d_ff]."""
        bits = logits.half().view(torch.int16).int()
        keys = torch.where(bits >= 0, bits, -32768 - bits).add_(2**15)  # in the order of the values
        self.firing += torch.bincount(keys[active], minlength=2**16)
        self.silent += torch.bincount(keys[~active], minlength=2**16)

    def threshold_for(self, recall: float) -> float:
        """The highest threshold that finds at least `recall` of the firings; infinite where nothing fires."""
        total = int(self.firing.sum())
        if total == 0:
            return float("inf")
        missed = self.firing.cumsum(0)  # by a threshold above each value
        lowest = int((missed > int((1 - recall) * total)).nonzero()[0])
        return 0.5 * float(_KEY_VALUES[lowest] + _KEY_VALUES[lowest - 1])

    def threshold_for_precision(self, precision: float) -> float:
        """The lowest threshold at which at least `precision` of the neurons named fire; infinite where none does."""
        found, wrong = (counts.flip(0).cumsum(0).flip(0) for counts in (self.firing, self.silent))
        seen = self.firing + self.silent > 0
        enough = (seen & (found > 0) & (found >= precision * (found + wrong))).nonzero()
        if not len(enough):
            return float("inf")
        lowest = int(enough[0])
        return 0.5 * float(_KEY_VALUES[lowest] + _KEY_VALUES[lowest - 1])

    def density_at(self, threshold: float) -> tuple[float, float]:
        """(recall, predicted share of all neurons) of a threshold."""
        above = threshold < _KEY_VALUES
        found, total = int(self.firing[above].sum()), int(self.firing.sum())
        everything = total + int(self.silent.sum())
        return found / max(1, total), (found + int(self.silent[above].sum())) / max(1, everything)


def count_logits(predictor: LayerPredictor, chunks: Chunks, d_ff: int) -> LogitCounts:
    active, counts = fires(d_ff), LogitCounts()
    for x, packed in chunks():
        for start in range(0, len(x), JUDGE_TOKENS):
            counts.add(predictor.logits(x[start : start + JUDGE_TOKENS]), active(packed[start : start + JUDGE_TOKENS]))
    return counts


def judge(predictor: LayerPredictor, chunks: Chunks, d_ff: int) -> LayerQuality:
    """Errors and densities on positions not trained on."""
    active = fires(d_ff)
    true = predicted = both = total = 0
    for x, packed in chunks():
        for start in range(0, len(x), JUDGE_TOKENS):
            named = predictor.logits(x[start : start + JUDGE_TOKENS]) > predictor.threshold
            fact = active(packed[start : start + JUDGE_TOKENS])
            true += int(fact.sum())
            predicted += int(named.sum())
            both += int((named & fact).sum())
            total += fact.numel()
    return LayerQuality(
        rank=len(predictor.a),
        true_share=true / total,
        predicted_share=predicted / total,
        false_negative=(true - both) / max(1, true),
        false_positive=(predicted - both) / max(1, total - true),
    )
