"""Experts that a conversion leaves where they lie, in a GGUF file: which can be, and the checksums of their pieces.

Reads each of their bytes once. Knows where tensors lie by `KeptWeights`, no file format.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from flashllm._core import xxh3_64_rows
from flashllm.arch.spec import Architecture
from flashllm.convert.kept.weights import KeptWeights
from flashllm.errors import FormatError
from flashllm.format.in_place import PIECE_ROWS, InPlace, LyingFile, SliceReader, Slices, block_rows
from flashllm.format.rows import RowLayout


def choose_in_place(kept: KeptWeights | None, architecture: Architecture, layout: RowLayout) -> InPlace | str:
    """Where the experts lie of the layers whose experts can be read there; else why those of none can."""
    size = architecture.unit_rows
    if size == 1:
        return "its neurons are read one by one"
    if kept is None or kept.rows is None or not layout.has_plane:
        return "its experts' codes are not all kept"
    if kept.has_scales_apart:
        return "its experts' matrices have scales that lie apart from them"
    if size % PIECE_ROWS or architecture.d_model % PIECE_ROWS:
        return f"its experts' matrices are no multiples of {PIECE_ROWS}"
    found = [
        kept.slices(layer, architecture.experts) if layer in architecture.mixtures else None
        for layer in range(architecture.num_layers)
    ]
    paths = sorted({each[0] for layer in found if layer is not None for each in layer})
    if not paths:
        return "its experts do not lie one after the other"
    layers = tuple(
        tuple(
            Slices(file=paths.index(path), kind=kind, offset=offset, nbytes=n) for path, kind, offset, n in layer or ()
        )
        for layer in found
    )
    return InPlace(files=tuple(map(LyingFile.of, paths)), layers=layers)


def slice_sums(
    reader: SliceReader,
    plan: tuple[InPlace, Architecture, RowLayout],
    layer: int,
    report: Callable[[int], None],
) -> NDArray[np.uint64]:
    """The checksums of the pieces of a layer's experts, in order; `report` is told of bytes that were read.

    FormatError for scales that no weights have.
    """
    in_place, architecture, layout = plan
    unpackings = block_rows(in_place.layers[layer], layout, architecture.unit_rows)
    rows, sums = np.empty((architecture.unit_rows, layout.stride), np.uint8), []
    for expert in range(architecture.experts):
        for path, matrix, first, stored in reader.expert(layer, expert):
            try:
                unpackings[matrix].unpack(stored, first, rows)
            except FormatError as error:
                raise FormatError(f"{path}: layer {layer}, expert {expert}: {error}") from error
            sums.append(xxh3_64_rows(stored.reshape(1, -1)))
            report(stored.nbytes)
    return np.concatenate(sums)
