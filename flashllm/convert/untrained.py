"""The predictors a model gets at conversion, before any are trained for it: truncated SVDs with expected thresholds.

Says their size, and makes one layer's out of its weights and the norm before it.
Plain numpy; opens no files.
"""

import math

import numpy as np
from numpy.typing import NDArray

from flashllm.arch.spec import Architecture
from flashllm.convert.svd import Blocks, LowRankPredictor, low_rank_predictor, normed_inputs
from flashllm.format.predictors import predictors_header

RECALL = 0.99  # expected under Gaussian inputs; text turned out a little below (bench/LOG.md)


def default_rank(d_model: int) -> int:
    """Grows with the root of the width, as trained predictors' does: 40 for 256, 116 for 2048, 164 for 4096."""
    return min(d_model, max(4, 4 * round(0.64 * math.sqrt(d_model))))


def untrained_header(architecture: Architecture, rank: int, model_sha256: str) -> bytes:
    """Header of the file that conversion writes."""
    ranks = [rank] * architecture.num_layers
    return predictors_header(ranks, architecture.d_model, architecture.d_ff, model_sha256, {"made_by": "svd"})


def untrained_nbytes(architecture: Architecture, rank: int) -> int:
    """Size of the predictor file."""
    d_model, d_ff = architecture.d_model, architecture.d_ff
    per_layer = 2 * rank * (d_model + d_ff) + 4 * (d_ff + 1)
    return len(untrained_header(architecture, rank, "0" * 64)) + architecture.num_layers * per_layer


def untrained_predictor(
    blocks: Blocks,
    bias: NDArray[np.float32] | None,
    norm_weight: NDArray[np.float32] | None,
    norm_bias: NDArray[np.float32] | None,
    *,
    d_model: int,
    rank: int,
) -> tuple[LowRankPredictor, float]:
    """One layer's predictor and threshold. `norm_...` are of the norm before the FFN; None: as if it had none."""
    predictor = low_rank_predictor(blocks, bias, normed_inputs(norm_weight, norm_bias, d_model), rank)
    return predictor, predictor.threshold_for(RECALL)
