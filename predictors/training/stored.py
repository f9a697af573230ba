"""Predictors as a training writes them: their weights as a file of 4, 8 or 16 bits holds them, and the whole file.

What the file is says `flashllm.format.predictors`. Plain numpy.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashllm.format.model_files import PREDICTOR_METADATA
from flashllm.format.predictors import FACTOR_CODE, PREFETCH, predictor_entries
from flashllm.format.safetensors import encode_header

_LARGEST_CODE = 127
_SMALLEST_SCALE = 2.0**-14  # below, fp16 has fewer digits, and coding twice would not give the same codes


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPredictor:
    """One predictor's values: a [rank, d_model], b [d_ff, rank], bias [d_ff]. `prefetch`: see rule 4 of the file."""

    layer: int
    a: NDArray[np.float32]
    b: NDArray[np.float32]
    bias: NDArray[np.float32]
    threshold: float
    prefetch: bool = False


def code_rows(matrix: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Codes and scales [rows] of `matrix` [rows, columns], rounded to nearest.

    Coding what `code_rows` gave back (scale * code) gives the same codes and scales. OverflowError for rows beyond
    fp16's range of scales.
    """
    exact = np.abs(matrix).max(axis=1) / np.float32(_LARGEST_CODE)
    if bool((exact > np.finfo(np.float16).max).any()):
        raise OverflowError(f"a predictor's weight of {float(np.abs(matrix).max()):g} has no 8-bit code")
    scale = np.maximum(exact, np.float32(_SMALLEST_SCALE)).astype(np.float16)
    above = np.nextafter(scale, np.float16(np.inf))
    scale = np.where(scale.astype(np.float32) < exact, above, scale)  # so that no code exceeds the largest
    return np.rint(matrix / scale.astype(np.float32)[:, None]).astype(np.int8), scale


def stored_values(matrix: NDArray[np.float32], bits: int) -> NDArray[np.float32]:
    """`matrix` as a file of `bits` holds it."""
    if bits == 16:
        return matrix.astype(np.float16).astype(np.float32)
    if bits == 4:
        return FACTOR_CODE.decode(FACTOR_CODE.encode(matrix), matrix.shape[1])
    codes, scale = code_rows(matrix)
    return codes.astype(np.float32) * scale.astype(np.float32)[:, None]


def encode_predictors(
    predictors: Iterable[StoredPredictor], bits: int, model_sha256: str, metadata: Mapping[str, str]
) -> Iterator[NDArray[np.uint8] | bytes]:
    """A whole file; equal predictors give equal bytes. Wider elements come first, so that all are aligned.

    Memory: the file's bytes, and one predictor.
    """
    entries: list[tuple[tuple[str, str, tuple[int, ...]], NDArray[Any]]] = []
    for p in predictors:
        arrays: list[NDArray[Any]]
        if bits == 16:
            arrays = [p.a.astype("<f2"), p.b.astype("<f2")]
        elif bits == 4:
            arrays = [FACTOR_CODE.encode(p.a), FACTOR_CODE.encode(p.b)]
        else:
            (a, a_scale), (b, b_scale) = code_rows(p.a), code_rows(p.b)
            arrays = [a, b, a_scale.astype("<f2"), b_scale.astype("<f2")]
        arrays += [p.bias.astype("<f4"), np.array([p.threshold], "<f4")]
        start = f"layers.{p.layer}.{PREFETCH if p.prefetch else ''}"
        names = predictor_entries(start, len(p.a), p.a.shape[1], len(p.b), bits)
        entries += zip(names, arrays, strict=True)
    entries.sort(key=lambda entry: -entry[1].itemsize)
    yield encode_header(
        [entry[0] for entry in entries], {**PREDICTOR_METADATA, "model_sha256": model_sha256, **metadata}
    )
    for _, array in entries:
        yield array.reshape(-1).view(np.uint8)
