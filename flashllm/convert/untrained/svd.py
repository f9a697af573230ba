"""Activity predictors without training: the best low-rank map under Gaussian inputs, and its threshold.

A neuron fires where m.x + bias > 0. For x of mean u and covariance C = R R^T, the rank-r map closest to M x in mean
square is the truncated SVD of M R (Eckart-Young). What it leaves of neuron j is Gaussian noise of deviation s_j, so
logits divided by s_j rank neurons by their probability of firing, and the recall of every threshold is known.
Without data, u and C are those of a normed vector: the norm's shift, and its scale squared on the diagonal.
Plain numpy, a block of the matrix at a time; knows no files. Training starts from the same map, with measured u and C.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Blocks = Callable[[], Iterator[NDArray[np.float32]]]  # the driver matrix M [d_ff, d_model], some rows at a time

_ITERATIONS = 6  # of subspace iteration: the singular values of trained matrices fall slowly, but so does the loss
_OVERSAMPLING = 16
_MIN_RESIDUAL = 1e-3  # of a neuron's own deviation: fp16 factors are no better than that
_NODES = np.linspace(-6.0, 6.0, 121)  # of the quadrature over a unit normal
_WEIGHTS = np.exp(-0.5 * _NODES**2) / np.exp(-0.5 * _NODES**2).sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class InputStatistics:
    """Mean [d_model] and root R of the covariance (R R^T): [d_model, d_model], or [d_model] where it is diagonal."""

    mean: NDArray[np.float64]
    root: NDArray[np.float64]

    @property
    def d_model(self) -> int:
        return len(self.mean)


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankPredictor:
    """Active where b (a x) + bias > threshold. The mean and deviation of each neuron's logit tell what to expect."""

    a: NDArray[np.float32]  # [rank, d_model]
    b: NDArray[np.float32]  # [d_ff, rank]
    bias: NDArray[np.float32]  # [d_ff]
    logit_mean: NDArray[np.float64]  # [d_ff], in units of the residual, as all logits
    logit_deviation: NDArray[np.float64]  # [d_ff]

    def threshold_for(self, recall: float) -> float:
        """The highest threshold that finds an expected share `recall` of all firings."""
        logits = self.logit_mean[:, None] + self.logit_deviation[:, None] * _NODES
        firing = normal_cdf(logits) * _WEIGHTS
        order = np.argsort(logits, axis=None)
        missed = np.cumsum(firing.reshape(-1)[order])
        if missed[-1] <= 0.0:  # a layer that cannot fire
            return float(np.float32(np.inf))
        position = int(np.searchsorted(missed, (1.0 - recall) * missed[-1]))
        return float(np.nextafter(np.float32(logits.reshape(-1)[order[position]]), np.float32(-np.inf)))


def low_rank_predictor(
    blocks: Blocks, bias: NDArray[np.float32] | None, inputs: InputStatistics, rank: int
) -> LowRankPredictor:
    """The predictor of M's signs. `blocks` is called twice; memory: a few of [d_model, d_model] and of [d_ff, rank]."""
    if not 1 <= rank <= inputs.d_model:
        raise ValueError(f"rank must be from 1 to {inputs.d_model}, not {rank}")
    # 1. The top right singular vectors V of M R, from its Gram matrix.
    gram = np.zeros((inputs.d_model, inputs.d_model))
    for block in blocks():
        gram += block.T @ block
    gram = _times_root(_times_root(gram, inputs.root).T, inputs.root)
    vectors = _top_eigenvectors(gram, rank)
    # 2. M ~ b a with b = M R V and a = V^T R^-1, and what that leaves of each neuron.
    project = _root_times(inputs.root, vectors)
    parts, totals, means = [], [], []
    for block in blocks():
        parts.append(block.astype(np.float64) @ project)
        totals.append((_times_root(block.astype(np.float64), inputs.root) ** 2).sum(axis=1))
        means.append(block.astype(np.float64) @ inputs.mean)
    b, total, mean = np.concatenate(parts), np.concatenate(totals), np.concatenate(means)
    explained = (b * b).sum(axis=1)
    residual = np.sqrt(np.maximum(total - explained, _MIN_RESIDUAL**2 * total + 1e-30))
    a = _times_inverse_root(vectors.T, inputs.root)
    if bias is not None:
        mean = mean + bias
    # 3. In units of the residual, and both factors of one size: they are stored in 16 bit.
    b /= residual[:, None]
    mean /= residual
    balance = np.sqrt(np.maximum(np.abs(b).max(axis=0), 1e-30) / np.maximum(np.abs(a).max(axis=1), 1e-30))
    shift = mean - b @ (a @ inputs.mean)
    return LowRankPredictor(
        a=(a * balance[:, None]).astype(np.float32),
        b=(b / balance).astype(np.float32),
        bias=shift.astype(np.float32),
        logit_mean=mean,
        logit_deviation=np.sqrt(explained) / residual,
    )


def normed_inputs(
    weight: NDArray[np.float32] | None, bias: NDArray[np.float32] | None, d_model: int
) -> InputStatistics:
    """Statistics of a LayerNorm's output that need no data: its entries have mean `bias` and deviation `weight`."""
    scale = np.ones(d_model) if weight is None else np.abs(weight.astype(np.float64))
    if not scale.any():  # nothing passes such a norm; any metric will do
        scale = np.ones(d_model)
    mean = np.zeros(d_model) if bias is None else bias.astype(np.float64)
    return InputStatistics(mean=mean, root=np.maximum(scale, 1e-6 * float(scale.max())))


def missed_share(
    mean: NDArray[np.float64], deviation: NDArray[np.float64], error: NDArray[np.float64], margin: float
) -> float:
    """The expected share of firings that are missed where logits of this mean and deviation [neurons] are known up to
    an error of deviation `error`, and neurons are named above -margin."""
    logits = mean[:, None] + deviation[:, None] * _NODES
    firing = np.where(logits > 0, _WEIGHTS, 0.0)
    total = float(firing.sum())
    if total <= 0.0:  # a layer that cannot fire
        return 0.0
    missed = normal_cdf(-(logits + margin) / np.maximum(error, 1e-30)[:, None])
    return float((firing * missed).sum()) / total


def normal_cdf(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """The standard normal distribution function, to 1e-7 (Abramowitz and Stegun 26.2.17)."""
    t = 1.0 / (1.0 + 0.2316419 * np.abs(x))
    series = t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    tail = np.exp(-0.5 * x * x) / np.sqrt(2 * np.pi) * series
    return np.asarray(np.where(x >= 0, 1.0 - tail, tail))


def _top_eigenvectors(gram: NDArray[np.float64], rank: int) -> NDArray[np.float64]:
    """[d, rank], by subspace iteration where the whole decomposition would cost much more."""
    d = len(gram)
    width = rank + _OVERSAMPLING
    if d <= 512 or width * 4 > d:
        return np.asarray(np.linalg.eigh(gram)[1][:, ::-1][:, :rank])
    small = gram.astype(np.float32)
    basis = np.random.default_rng(0).standard_normal((d, width)).astype(np.float32)
    for _ in range(_ITERATIONS):
        basis = np.linalg.qr(small @ basis)[0]
    values, rotation = np.linalg.eigh((basis.T @ (small @ basis)).astype(np.float64))
    del values
    return np.asarray((basis.astype(np.float64) @ rotation)[:, ::-1][:, :rank])


def _times_root(matrix: NDArray[np.float64], root: NDArray[np.float64]) -> NDArray[np.float64]:
    return matrix * root if root.ndim == 1 else matrix @ root


def _root_times(root: NDArray[np.float64], matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    return root[:, None] * matrix if root.ndim == 1 else root @ matrix


def _times_inverse_root(matrix: NDArray[np.float64], root: NDArray[np.float64]) -> NDArray[np.float64]:
    if root.ndim == 1:
        return matrix / root
    return np.asarray(np.linalg.solve(root.T, matrix.T).T)
