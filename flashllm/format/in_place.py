"""Experts that are read where they lie, in files next to the model directory: which files, and where in them.

A matrix of an expert is a slice of a file: its stored rows. A slice is read in pieces of whole rows, each of which has
a checksum. Knows no codes: the core puts what it reads into neurons' rows (csrc/planes/block_rows.h).
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from flashllm._core import BlockRows
from flashllm.arch.spec import Architecture
from flashllm.base.checks import check_int, check_list, check_str, from_json
from flashllm.base.files import drop_page_cache, open_for_reading, pread_bytes
from flashllm.errors import FormatError
from flashllm.format.rows import RowLayout

PIECE_NBYTES = 1 << 19  # at most, where 64 rows are no more: one request (plan/memory.py, MAX_REQUEST)
PIECE_ROWS = 64  # a multiple: units of codes across rows (32), and whole stripes of a checksum


@dataclass(frozen=True, slots=True, kw_only=True)
class LyingFile:
    """A file as it was when its checksums were taken."""

    path: str
    nbytes: int
    mtime_ns: int

    def __post_init__(self) -> None:
        check_str("path", self.path, 10_000)
        if not os.path.isabs(self.path):
            raise ValueError(f"path must be absolute, not {self.path[:80]!r}")
        check_int("nbytes", self.nbytes, 1, 2**62)
        check_int("mtime_ns", self.mtime_ns, -(2**63), 2**63 - 1)

    @classmethod
    def of(cls, path: Path) -> "LyingFile":
        status = path.stat()
        return cls(path=str(path.resolve()), nbytes=status.st_size, mtime_ns=status.st_mtime_ns)

    def check(self, directory: Path) -> None:
        """FormatError where it is gone or another."""
        advice = f"or remove {directory} and convert the model anew"
        try:
            found = LyingFile.of(Path(self.path))
        except OSError as error:
            raise FormatError(
                f"{self.path}: holds the experts of {directory}, but: {error.strerror}; put it back, {advice}"
            ) from error
        if (found.nbytes, found.mtime_ns) != (self.nbytes, self.mtime_ns):
            raise FormatError(
                f"{self.path}: holds the experts of {directory}, but was written to or replaced since "
                f"({found.nbytes} bytes, {self.nbytes} then); put the file of then back, {advice}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Slices:
    """A matrix of a layer's experts: `kind` of csrc/planes/blocks.h, where each expert's lies, the bytes of each."""

    kind: str
    nbytes: int
    places: tuple[tuple[int, int], ...]  # (file in the list of files, offset in it) of each expert's

    def __post_init__(self) -> None:
        check_str("kind", self.kind, 16)
        check_int("nbytes", self.nbytes, 1, 2**40)
        for file, offset in self.places:
            check_int("file", file, 0, 10**5)
            check_int("offset", offset, 0, 2**62)

    def to_plain(self) -> list[Any]:
        """[file, kind, first offset, nbytes] where one slice lies behind the other; else files and offsets are lists,
        of each."""
        file, first = self.places[0]
        if self.places == _behind(file, first, self.nbytes, len(self.places)):
            return [file, self.kind, first, self.nbytes]
        files, offsets = zip(*self.places, strict=True)
        return [list(files), self.kind, list(offsets), self.nbytes]

    @classmethod
    def from_json(cls, value: list[Any], experts: int) -> "Slices":
        """ValueError says what is wrong."""
        if len(value) != 4:
            raise ValueError("in_place.layers must have file, kind, offset and nbytes of each matrix")
        files, kind, offsets, nbytes = value
        if isinstance(files, list) and isinstance(offsets, list):
            if not len(files) == len(offsets) == experts:
                raise ValueError(f"in_place.layers must have a place of each of {experts} experts")
            return cls(kind=kind, nbytes=nbytes, places=tuple(zip(files, offsets, strict=True)))
        check_int("offset", offsets, 0, 2**62)
        check_int("nbytes", nbytes, 1, 2**40)
        return cls(kind=kind, nbytes=nbytes, places=_behind(files, offsets, nbytes, experts))

    def piece_nbytes(self, rows: int) -> int:
        """Bytes that are read together of a slice of `rows` stored rows: about equal parts."""
        row = self.nbytes // rows
        count = max(1, -(-self.nbytes // PIECE_NBYTES))
        return -(-rows // (count * PIECE_ROWS)) * PIECE_ROWS * row


def _behind(file: int, first: int, nbytes: int, experts: int) -> tuple[tuple[int, int], ...]:
    """Places of slices that lie one behind the other."""
    return tuple((file, first + expert * nbytes) for expert in range(experts))


@dataclass(frozen=True, slots=True, kw_only=True)
class InPlace:
    """The files, and for each layer the slices of its rows' matrices in their order; none of a layer whose experts are
    in the directory."""

    files: tuple[LyingFile, ...]
    layers: tuple[tuple[Slices, ...], ...]

    def __post_init__(self) -> None:
        for each in (each for layer in self.layers for each in layer):
            for file, offset in each.places:
                if file >= len(self.files) or offset + each.nbytes > self.files[file].nbytes:
                    raise ValueError(f"slices at {offset} of file {file} lie in no file of the list")

    def pieces(self, layer: int, rows: tuple[int, ...]) -> int:
        """Pieces of an expert of this layer; `rows`: stored rows of each matrix's slices."""
        found = zip(self.layers[layer], rows, strict=True)
        return sum(-(-each.nbytes // each.piece_nbytes(count)) for each, count in found)

    def longest_piece(self, rows: tuple[int, ...]) -> int:
        """Bytes of the longest piece; `rows` as in `pieces`."""
        return max(each.piece_nbytes(count) for layer in self.layers for each, count in zip(layer, rows, strict=False))

    @property
    def nbytes(self) -> int:
        """Bytes of all experts, of all layers."""
        return sum(each.nbytes * len(each.places) for layer in self.layers for each in layer)

    def check_files(self, directory: Path) -> None:
        """FormatError where one is gone or another."""
        for file in self.files:
            file.check(directory)


class SliceReader:
    """Reads experts where they lie, piece by piece. A context manager, which closes their files."""

    def __init__(self, in_place: InPlace, architecture: Architecture, layout: RowLayout) -> None:
        self._in_place, self._slice_rows = in_place, slice_rows(architecture, layout)
        self._fds: list[int] = []
        with ExitStack() as stack:
            for file in in_place.files:
                self._fds.append(open_for_reading(Path(file.path)))
                stack.callback(os.close, self._fds[-1])
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def expert(self, layer: int, expert: int) -> Iterator[tuple[str, int, int, NDArray[np.uint8]]]:
        """(file, matrix, first byte of the slice, bytes) of every piece of an expert, in the order of checksums."""
        slices = self._in_place.layers[layer]
        for matrix, (each, rows) in enumerate(zip(slices, self._slice_rows, strict=True)):
            (file, start), piece = each.places[expert], each.piece_nbytes(rows)
            path, fd = self._in_place.files[file].path, self._fds[file]
            for first in range(0, each.nbytes, piece):
                offset, nbytes = start + first, min(piece, each.nbytes - first)
                stored = np.frombuffer(pread_bytes(fd, nbytes, offset, Path(path)), np.uint8)
                drop_page_cache(fd, offset, nbytes)
                yield path, matrix, first, stored


def read_in_place(value: Any, experts: int) -> InPlace | None:
    """From JSON, of layers of so many experts; None for null. ValueError says what is wrong."""
    if value is None:
        return None
    if not isinstance(value, dict) or set(value) != {"files", "layers"}:
        raise ValueError("in_place must have files and layers")
    files = from_json(tuple[LyingFile, ...], value["files"], "in_place.files")
    layers = []
    for layer in check_list(value["layers"], "in_place.layers"):
        found = [check_list(each, "in_place.layers") for each in check_list(layer, "in_place.layers")]
        layers.append(tuple(Slices.from_json(each, experts) for each in found))
    return InPlace(files=files, layers=tuple(layers))


def block_rows(slices: tuple[Slices, ...], layout: RowLayout, size: int) -> list[BlockRows]:
    """For each matrix of experts of `size` neurons: puts its slices into their rows, matrix by matrix."""
    fmt = layout.native("float32", size)
    return [
        BlockRows(each.kind, size if matrix == "down" else layout.d_model, fmt, matrix)
        for each, matrix in zip(slices, layout.matrices, strict=True)
    ]


def slice_rows(architecture: Architecture, layout: RowLayout) -> tuple[int, ...]:
    """Stored rows of each matrix of an expert: neurons, and outputs of the last, down."""
    return (architecture.unit_rows,) * (len(layout.matrices) - 1) + (layout.d_model,)


def lying_experts(architecture: Architecture, in_place: InPlace | None, layer: int) -> int:
    """Experts of a layer that lie in another file: all or none."""
    return architecture.experts if in_place is not None and in_place.layers[layer] else 0


def stored_layouts(architecture: Architecture, layout: RowLayout, in_place: InPlace | None) -> list[RowLayout | None]:
    """The layout of each layer's rows in `ffn.safetensors`: all of them, or those behind the experts that lie in
    another file; None where it holds no row."""
    found: list[RowLayout | None] = []
    for layer, width in enumerate(architecture.every_width):
        left = width - lying_experts(architecture, in_place, layer) * architecture.unit_rows
        found.append(layout.of_layer(layer, left) if left else None)
    return found


def checksum_counts(
    architecture: Architecture, layout: RowLayout, in_place: InPlace | None, together: Sequence[int]
) -> list[int]:
    """Checksums of each layer: of pieces of experts that lie elsewhere, and of every `together` stored rows."""
    stored = stored_layouts(architecture, layout, in_place)
    counts = [0 if each is None else -(-each.num_rows // rows) for each, rows in zip(stored, together, strict=True)]
    for layer, slices in enumerate(() if in_place is None else in_place.layers):
        if in_place is not None and slices:
            counts[layer] += architecture.experts * in_place.pieces(layer, slice_rows(architecture, layout))
    return counts
