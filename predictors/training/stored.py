"""Predictors as a training writes them: their weights as a file of 4, 8 or 16 bits holds them, and the whole file.

What the file is says `flashllm.format.predictors`. Plain numpy.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashllm.format.model_files import PREDICTOR_METADATA
from flashllm.format.predictors import FACTOR_CODES, PREFETCH, predictor_entries
from flashllm.format.safetensors import encode_header


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPredictor:
    """One predictor's values: a [rank, d_model], b [d_ff, rank], bias [d_ff]. `prefetch`: see rule 4 of the file."""

    layer: int
    a: NDArray[np.float32]
    b: NDArray[np.float32]
    bias: NDArray[np.float32]
    threshold: float
    prefetch: bool = False


def stored_values(matrix: NDArray[np.float32], bits: int) -> NDArray[np.float32]:
    """`matrix` as a file of `bits` holds it."""
    if bits == 16:
        return matrix.astype(np.float16).astype(np.float32)
    code = FACTOR_CODES[bits]
    return code.decode(code.encode(matrix), matrix.shape[1])


def encode_predictors(
    predictors: Iterable[StoredPredictor], bits: int, model_sha256: str, metadata: Mapping[str, str]
) -> Iterator[NDArray[np.uint8] | bytes]:
    """A whole file; equal predictors give equal bytes. Wider elements come first, so that all are aligned.

    Memory: the file's bytes, and one predictor.
    """
    entries: list[tuple[tuple[str, str, tuple[int, ...]], NDArray[Any]]] = []
    for p in predictors:
        factors: list[NDArray[Any]] = [
            factor.astype("<f2") if bits == 16 else FACTOR_CODES[bits].encode(factor) for factor in (p.a, p.b)
        ]
        arrays = [*factors, p.bias.astype("<f4"), np.array([p.threshold], "<f4")]
        start = f"layers.{p.layer}.{PREFETCH if p.prefetch else ''}"
        names = predictor_entries(start, len(p.a), p.a.shape[1], len(p.b), bits)
        entries += zip(names, arrays, strict=True)
    entries.sort(key=lambda entry: -entry[1].itemsize)
    yield encode_header(
        [entry[0] for entry in entries], {**PREDICTOR_METADATA, "model_sha256": model_sha256, **metadata}
    )
    for _, array in entries:
        yield array.reshape(-1).view(np.uint8)
