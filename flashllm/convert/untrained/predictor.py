"""The predictors a model gets at conversion, before any are trained for it: truncated SVDs with expected thresholds, or
the gate itself in 4 bits with an expected margin.

Says their size, and makes one layer's out of its weights and the norm before it.
Plain numpy; opens no files.
"""

import math

import numpy as np
from numpy.typing import NDArray

from flashllm.arch.spec import Architecture
from flashllm.convert.untrained.svd import Blocks, InputStatistics, LowRankPredictor, low_rank_predictor, missed_share
from flashllm.format.predictors import GATE_CODE, gates_header, predictors_header

RECALL = 0.99  # expected under Gaussian inputs; text turned out a little below (bench/log)
GATE_RECALL = 0.995  # of gates in 4 bits, expected in the same way; random models' own inputs gave 0.988 and more
_JUDGED_NEURONS = 2048  # of a layer, evenly spaced, from which its margin is found
_HALVINGS = 30


def default_rank(d_model: int) -> int:
    """Grows with the root of the width, as trained predictors' does: 40 for 256, 116 for 2048, 164 for 4096."""
    return min(d_model, max(4, 4 * round(0.64 * math.sqrt(d_model))))


def untrained_header(architecture: Architecture, rank: int, model_sha256: str) -> bytes:
    """Header of the file that conversion writes."""
    return predictors_header(rank, architecture.every_width, architecture.d_model, model_sha256, {"made_by": "svd"})


def untrained_nbytes(architecture: Architecture, rank: int) -> int:
    layers = [2 * rank * (architecture.d_model + d_ff) + 4 * (d_ff + 1) for d_ff in architecture.every_width if d_ff]
    return len(untrained_header(architecture, rank, "0" * 64)) + sum(layers)


def untrained_predictor(
    blocks: Blocks, bias: NDArray[np.float32] | None, inputs: InputStatistics, rank: int
) -> tuple[LowRankPredictor, float]:
    """One layer's predictor and threshold, for what the FFN reads."""
    predictor = low_rank_predictor(blocks, bias, inputs, rank)
    return predictor, predictor.threshold_for(RECALL)


def coded_gates_header(architecture: Architecture, model_sha256: str) -> bytes:
    """Header of the file of gates in 4 bits that conversion writes."""
    metadata = {"made_by": "gate in 4 bits"}
    return gates_header(architecture.every_width, architecture.d_model, model_sha256, metadata)


def coded_gates_nbytes(architecture: Architecture) -> int:
    codes = architecture.neurons * GATE_CODE.vector_nbytes(architecture.d_model)
    return len(coded_gates_header(architecture, "0" * 64)) + 2 * architecture.num_layers + codes


def coded_gate(
    blocks: Blocks, bias: NDArray[np.float32] | None, inputs: InputStatistics
) -> tuple[NDArray[np.uint8], float]:
    """Codes and margin of one layer's gate, whose neurons fire where its product plus `bias` is above 0.

    The margin is the least with which an expected share `GATE_RECALL` of all firings is named: for inputs of which the
    norm is known, a product and what coding changes of it are independent and Gaussian.
    """
    codes, means, deviations, errors = [], [], [], []
    for block in blocks():
        codes.append(GATE_CODE.encode(block))
        change = GATE_CODE.decode(codes[-1], inputs.d_model).astype(np.float64) - block
        means.append(block @ inputs.mean + change @ inputs.mean)
        deviations.append(np.linalg.norm(block * inputs.root, axis=1))
        errors.append(np.linalg.norm(change * inputs.root, axis=1))
    mean, deviation, error = np.concatenate(means), np.concatenate(deviations), np.concatenate(errors)
    if bias is not None:
        mean = mean + bias
    some = slice(None, None, max(1, len(mean) // _JUDGED_NEURONS))
    low, high = 0.0, 8.0 * float(error.max())
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        enough = missed_share(mean[some], deviation[some], error[some], middle) <= 1.0 - GATE_RECALL
        low, high = (low, middle) if enough else (middle, high)
    return np.concatenate(codes), high
