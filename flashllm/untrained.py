"""The predictors a model gets at conversion, before any are trained for it: truncated SVDs with expected thresholds.

Says their size, their tensors in a predictor file, and makes one layer's out of its weights and the norm before it.
Plain numpy; opens no files.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from flashllm.architectures import Architecture
from flashllm.model_files import PREDICTOR_METADATA
from flashllm.safetensors_file import encode_header
from flashllm.svd_predictor import Blocks, LowRankPredictor, low_rank_predictor, normed_inputs

RECALL = 0.99  # expected under Gaussian inputs; text turned out a little below (bench/LOG.md)


def default_rank(d_model: int) -> int:
    """Grows with the root of the width, as trained predictors' does: 40 for 256, 116 for 2048, 164 for 4096."""
    return min(d_model, max(4, 4 * round(0.64 * math.sqrt(d_model))))


def predictors_header(
    architecture: Architecture, ranks: Sequence[int], model_sha256: str, metadata: Mapping[str, str]
) -> bytes:
    """Header of a predictor file with a rank for each layer, in our own writer's fixed order (the library's is not).

    Its length does not depend on `model_sha256`, the checksum of the `ffn.safetensors` it belongs to.
    """
    d_model, d_ff = architecture.d_model, architecture.d_ff
    tensors = []
    for layer, rank in enumerate(ranks):
        tensors += [
            (f"layers.{layer}.a", "F16", (rank, d_model)),
            (f"layers.{layer}.b", "F16", (d_ff, rank)),
            (f"layers.{layer}.bias", "F32", (d_ff,)),
            (f"layers.{layer}.threshold", "F32", (1,)),
        ]
    return encode_header(tensors, {**PREDICTOR_METADATA, "model_sha256": model_sha256, **metadata})


def untrained_header(architecture: Architecture, rank: int, model_sha256: str) -> bytes:
    """Header of the file that conversion writes."""
    return predictors_header(architecture, [rank] * architecture.num_layers, model_sha256, {"made_by": "svd"})


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


def predictor_bytes(
    a: NDArray[np.float32], b: NDArray[np.float32], bias: NDArray[np.float32], threshold: float
) -> Iterator[NDArray[np.uint8]]:
    """A layer's arrays as they are stored, in the order of the header."""
    values = (a, b, bias, np.array([threshold]))
    for array, dtype in zip(values, ("<f2", "<f2", "<f4", "<f4"), strict=True):
        yield array.astype(dtype).reshape(-1).view(np.uint8)
