"""The start of a prefetch predictor: the best low-rank map from an earlier layer's input to a layer's pre-activations.

By least squares the layer's own input is a linear map of the earlier one; through it, and the layer's weights, goes the
truncated SVD that ordinary predictors start from. Knows tensors, not files.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from flashllm.convert.untrained.svd import Blocks, InputStatistics, low_rank_predictor
from training.fit import LayerPredictor, root_of_covariance

_RIDGE = 1e-4  # of the inputs' mean variance

# Inputs of the earlier layer and of the layer itself at the same positions, [n, d_model] each.
Pairs = Callable[[], Iterator[tuple[torch.Tensor, torch.Tensor]]]


def linear_start(drivers: Blocks, bias: NDArray[np.float32] | None, pairs: Pairs, rank: int) -> LayerPredictor:
    """`drivers`: rows of the matrix that decides which neurons fire; `bias` [d_ff] what is added to its products."""
    before, move, at_mean = _regression(pairs)

    def moved() -> Iterator[NDArray[np.float32]]:
        for block in drivers():
            yield (block.astype(np.float64) @ move).astype(np.float32)

    # M x_at ~ M (move x_before + rest)
    rest = at_mean - move @ before.mean
    shift = np.concatenate([block.astype(np.float64) @ rest for block in drivers()]).astype(np.float32)
    if bias is not None:
        shift += bias
    return LayerPredictor.from_low_rank(low_rank_predictor(moved, shift, before, rank))


def _regression(pairs: Pairs) -> tuple[InputStatistics, NDArray[np.float64], NDArray[np.float64]]:
    """(statistics of the earlier inputs, the map from their deviations to the later ones', mean of the later ones)."""
    count = 0
    sums = squares = crosses = later = None
    for before, at in pairs():
        parts = (before.double().sum(0), (before.T @ before).double(), (before.T @ at).double(), at.double().sum(0))
        if sums is None or squares is None or crosses is None or later is None:
            sums, squares, crosses, later = parts
        else:
            sums, squares, crosses, later = sums + parts[0], squares + parts[1], crosses + parts[2], later + parts[3]
        count += len(before)
    if sums is None or squares is None or crosses is None or later is None:
        raise ValueError("no inputs")
    mean, at_mean = sums / count, later / count
    covariance = squares / count - torch.outer(mean, mean)
    cross = crosses / count - torch.outer(mean, at_mean)
    ridge = _RIDGE * covariance.diagonal().mean() * torch.eye(len(covariance), dtype=torch.float64)
    move = torch.linalg.solve(covariance + ridge, cross).T
    statistics = InputStatistics(mean=mean.numpy(), root=root_of_covariance(covariance.numpy()))
    return statistics, move.numpy(), at_mean.numpy()
