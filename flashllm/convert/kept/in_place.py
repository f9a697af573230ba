"""Experts that a conversion leaves where they lie in a checkpoint: which can be, and the checksums of their pieces.

Reads each of their bytes once. Knows no file format.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from flashllm._core import xxh3_64_rows
from flashllm.arch.registry import Claim, bundle_names
from flashllm.arch.spec import Architecture
from flashllm.base.dtypes import WeightDtype
from flashllm.convert.checkpoint.pieces import runs
from flashllm.convert.checkpoint.source import Checkpoint, Lying
from flashllm.convert.kept.blocks import usual_powers
from flashllm.convert.kept.weights import KeptWeights
from flashllm.errors import FormatError
from flashllm.format.in_place import PIECE_ROWS, InPlace, LyingFile, SliceReader, Slices, block_rows
from flashllm.format.rows import RowLayout

_MIN_HASHED = 512  # bytes of a piece (csrc/io/xxh3.h)
_OTHER_FORM = (
    "they lie there in another form than here (fp8, inputs first, or another dtype than --dtype); a GGUF file of the "
    "model can be used where it lies"
)


def choose_in_place(
    lies: Callable[[str], Lying | None], kept: KeptWeights | None, architecture: Architecture, layout: RowLayout
) -> InPlace | str:
    """The places of the experts that can be read in their files, layer by layer; or the reason why none can.

    `lies`: where a matrix lies, by its canonical name; None where it cannot be read there.
    """
    size = architecture.unit_rows
    if size == 1:
        return "its neurons are read one by one"
    if kept is not None and kept.has_scales_apart:
        return "its experts' matrices have scales that lie apart from them"
    if size % PIECE_ROWS or architecture.d_model % PIECE_ROWS:
        return f"its experts' matrices are no multiples of {PIECE_ROWS}"
    found = [
        _of_layer(lies, bundle_names(architecture, layer)[: architecture.experts], layout.matrices)
        if layer in architecture.mixtures
        else []
        for layer in range(architecture.num_layers)
    ]
    paths = sorted({each.path for layer in found for matrix in layer for each in matrix})
    if not paths:
        return _OTHER_FORM if kept is None else "its experts' codes are not all kept"
    places = {path: file for file, path in enumerate(paths)}
    layers = tuple(
        tuple(
            Slices(
                kind=matrix[0].kind,
                nbytes=matrix[0].nbytes,
                places=tuple((places[each.path], each.offset) for each in matrix),
            )
            for matrix in layer
        )
        for layer in found
    )
    return InPlace(files=tuple(map(LyingFile.of, paths)), layers=layers)


def _of_layer(
    lies: Callable[[str], Lying | None], bundles: Sequence[str], matrices: Sequence[str]
) -> list[list[Lying]]:
    """The places of a layer's experts, by matrix; an empty list if one cannot be read there, or is too short, or
    kinds differ."""
    layer = []
    for matrix in matrices:
        found = [each for bundle in bundles if (each := lies(f"{bundle}{matrix}.weight")) is not None]
        forms = {(each.kind, each.nbytes) for each in found}
        if len(found) < len(bundles) or len(forms) > 1 or found[0].nbytes < _MIN_HASHED:
            return []
        layer.append(found)
    return layer


def lies_plain(checkpoint: Checkpoint, source: str, claim: Claim, dtype: WeightDtype) -> Lying | None:
    """The place of an unquantised matrix; None unless it is one run of whole rows in `dtype`."""
    if claim.part.transposed or claim.part.turned or checkpoint.tensors[source].dtype != dtype.code:
        return None
    place, found = checkpoint.extent(source), runs(claim, 0, claim.rows)
    if place is None or len(found) != 1:
        return None
    row_nbytes = claim.shape[1] * dtype.itemsize
    return Lying(place[0], place[1] + found[0][0] * row_nbytes, dtype.code, claim.rows * row_nbytes)


def slice_sums(
    reader: SliceReader,
    plan: tuple[InPlace, Architecture, RowLayout],
    layer: int,
    report: Callable[[int], None],
    kept: KeptWeights | None,
) -> NDArray[np.uint64]:
    """The checksums of the pieces of a layer's experts, in order; `report` is told of bytes that were read.

    FormatError for scales that no weights have.
    """
    in_place, architecture, layout = plan
    layout = layout.of_layer(layer, architecture.unit_rows)
    unpackings = block_rows(in_place.layers[layer], layout, architecture.unit_rows)
    rows, sums = np.empty((architecture.unit_rows, layout.stride), np.uint8), []
    for expert in range(architecture.experts):
        for path, matrix, first, stored in reader.expert(layer, expert):
            try:
                unpackings[matrix].unpack(stored, first, rows)
            except FormatError as error:
                raise FormatError(f"{path}: layer {layer}, expert {expert}: {error}") from error
            if kept is not None and in_place.layers[layer][matrix].kind == "E8M0" and not usual_powers(stored).all():
                kept.check_scales(layer, expert)  # their codes lie apart
            sums.append(xxh3_64_rows(stored.reshape(1, -1)))
            report(stored.nbytes)
    return np.concatenate(sums)
