"""Bundles: how a neuron's weights lie in one row of `ffn.safetensors`, and packing rows from matrices and back.

A row is `up[n] | gate[n] (if any) | down[:, n]`, then zeros up to the stride; down may be encoded otherwise. Layout
arithmetic and copies of bits; knows no files and no model. A row encoding is a table entry: a dtype, or coded weights,
whose vectors carry their own scales or tables and are bytes here (flashllm/base/group_codes.py, bf12.py,
codes/carried.py). Down columns may be codes alone, whose scales are resident (`PLANE_ENCODINGS`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashllm._core import RowFormat, xxh3_64_rows
from flashllm.arch.spec import Architecture
from flashllm.base.bf12 import BF12, Bf12
from flashllm.base.codes.carried import CARRIED_CODES, PLANE_CODES, SHARED, UNIT, CarriedCode, Plane, PlaneCode
from flashllm.base.dtypes import WEIGHT_DTYPES, WeightDtype, cast
from flashllm.base.group_codes import GROUP_CODES, GroupCode

LINE_NBYTES = 64
SECTOR_NBYTES = 512
PAGE_NBYTES = 4096
MAX_PAGE_WASTE = 0.05  # rows are padded to whole pages where that costs less than this share of them
_TILE_ITEMS = 64
STREAM_BLOCK_NBYTES = 4 * 2**20
SCALED_TOGETHER = UNIT  # weights of a column whose scales lie apart are handled together
MATRICES = (("up", "down"), ("up", "gate", "down"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowEncoding:
    """How the values of one vector (a matrix's part of a row) are stored."""

    name: str
    safetensors_dtype: str
    storage: np.dtype[Any]  # the numpy type of one stored item
    code: GroupCode | Bf12 | CarriedCode | PlaneCode | None = None  # of weights that are coded

    def vector_items(self, length: int) -> int:
        """Stored items of a vector of `length` values."""
        return length if self.code is None else self.code.vector_nbytes(length)

    def stored(self, values: NDArray[Any], dtype: WeightDtype) -> NDArray[Any]:
        """Vectors [n, length] of `dtype` as this encoding stores them. OverflowError for what it cannot hold.

        ValueError for an encoding of quantised checkpoints, into which nothing is rounded.
        """
        if self.code is None:
            return cast(values, dtype, WEIGHT_DTYPES[self.name])
        if isinstance(self.code, CarriedCode | PlaneCode):
            raise ValueError(f"{self.name} holds what a checkpoint has in it, and nothing else is encoded so")
        if isinstance(self.code, Bf12):
            return self.code.encode(cast(values, dtype, WEIGHT_DTYPES["bfloat16"]))
        return self.code.encode(cast(values, dtype, WEIGHT_DTYPES["float32"]))

    def widened(self, stored: NDArray[Any], length: int) -> NDArray[np.float32]:
        """The weights [n, length] of stored vectors, exactly. ValueError for columns whose scales lie apart."""
        if self.code is None:
            return cast(stored, WEIGHT_DTYPES[self.name], WEIGHT_DTYPES["float32"])
        if isinstance(self.code, PlaneCode):
            raise ValueError(f"columns of {self.name} are widened with the scales of their layer")
        if isinstance(self.code, Bf12):
            return cast(self.code.decode(stored, length), WEIGHT_DTYPES["bfloat16"], WEIGHT_DTYPES["float32"])
        return self.code.decode(stored, length)


def _coded(code: GroupCode | Bf12 | CarriedCode | PlaneCode) -> RowEncoding:
    return RowEncoding(name=code.name, safetensors_dtype="U8", storage=np.dtype(np.uint8), code=code)


CODED_ENCODINGS = (*GROUP_CODES, BF12.name)  # that weights are encoded in
CARRIED_ENCODINGS = tuple(CARRIED_CODES)  # that quantised checkpoints have
ROW_ENCODINGS = (
    {
        dtype.name: RowEncoding(name=dtype.name, safetensors_dtype=dtype.code, storage=dtype.storage)
        for dtype in WEIGHT_DTYPES.values()
    }
    | {code.name: _coded(code) for code in GROUP_CODES.values()}
    | {BF12.name: _coded(BF12)}
    | {code.name: _coded(code) for code in CARRIED_CODES.values()}
)
MEASURED_ENCODINGS = tuple(name for name in ROW_ENCODINGS if name not in CARRIED_ENCODINGS)  # by `calibrate`
PLANE_ENCODINGS = {code.name: _coded(code) for code in PLANE_CODES.values()}  # of down columns alone


def measured_as(encoding: str) -> tuple[str, float]:
    """The encoding of `MEASURED_ENCODINGS` whose products are about as fast, and how many bytes of it take as long as
    one of this: more than one where codes have fewer bits than four, as these are taken apart no faster."""
    carried = CARRIED_CODES.get(encoding) or PLANE_CODES.get(encoding)
    if carried is None:
        return encoding, 1.0
    if carried.bits >= 4:
        return "int4_32" if carried.bits == 4 else "int8_32", 1.0
    return "int4_32", GROUP_CODES["int4_32"].vector_nbytes(SHARED) / carried.vector_nbytes(SHARED)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class TableLayout:
    """The byte layout of a table with a row for every token's id: uint8 [rows, stride], of whole sectors where it has
    a file of its own."""

    rows: int
    columns: int
    encoding: RowEncoding
    apart: bool = True  # in a file of its own

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row that carry weights."""
        return self.encoding.vector_items(self.columns) * int(self.encoding.storage.itemsize)

    @property
    def stride(self) -> int:
        """Bytes from one row to the next."""
        return _round_up(self.row_nbytes, SECTOR_NBYTES) if self.apart else self.row_nbytes

    @property
    def is_hashed(self) -> bool:
        """True where a row can have a checksum (csrc/io/xxh3.h)."""
        return self.stride >= SECTOR_NBYTES

    @property
    def nbytes(self) -> int:
        return self.rows * self.stride


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """The byte layout of every FFN layer, or where layers differ, of rows that are as long as any layer's: `num_rows`
    rows of `stride` bytes, of which `row_nbytes` carry weights."""

    encoding: str
    d_model: int
    d_ff: int
    matrices: tuple[str, ...] = ("up", "down")
    down_encoding: str | None = None  # where it differs from `encoding`
    # Of each layer, where they differ: of PLANE_ENCODINGS, or a dtype; the widest is that of all.
    downs: tuple[str, ...] = ()
    ups: tuple[str, ...] = ()  # of each layer's up and gate, where they differ; the longest `encoding`
    packed: bool = False  # rows are whole cache lines, and units whole pages (`packed`)

    def __post_init__(self) -> None:
        for encoding, known in ((self.encoding, ROW_ENCODINGS), (self.down, ROW_ENCODINGS | PLANE_ENCODINGS)):
            if encoding not in known:
                raise ValueError(f"encoding {encoding!r} is not one of {', '.join(known)}")
        if self.down_encoding == self.encoding:
            raise ValueError(f"down_encoding is written only where it differs from {self.encoding}")
        for name, least in (("d_model", 1), ("d_ff", 0)):  # a layer may have no neurons
            if not least <= getattr(self, name) <= 2**24:
                raise ValueError(f"{name} must be from {least} to 2^24, not {getattr(self, name)}")
        if self.has_plane and self.d_model % SCALED_TOGETHER:
            raise ValueError(f"columns of {self.down} must be multiples of {SCALED_TOGETHER} weights")
        if self.downs:
            each_of = (*PLANE_ENCODINGS, *WEIGHT_DTYPES)
            if len({*self.downs}) == 1 or any(down not in each_of for down in self.downs):
                raise ValueError(f"downs are written only where they differ, each of {', '.join(each_of)}")
            if self.down != widest_down(self.downs):
                raise ValueError(f"down_encoding must be {widest_down(self.downs)}, the widest of downs")
        if self.ups:
            if len({*self.ups}) == 1 or any(up not in ROW_ENCODINGS for up in self.ups):
                raise ValueError(f"ups are written only where they differ, each of {', '.join(ROW_ENCODINGS)}")
            if self.encoding != longest_up(self.ups, self.d_model):
                raise ValueError(f"encoding must be {longest_up(self.ups, self.d_model)}, the longest of ups")
        if self.matrices not in MATRICES:
            raise ValueError(f"matrices must be up, down or up, gate, down, not {self.matrices!r}")

    def of_layer(self, layer: int, neurons: int) -> "RowLayout":
        """The layout of this layer, of so many neurons."""
        if self.downs or self.ups:
            up = self.ups[layer] if self.ups else self.encoding
            down = self.downs[layer] if self.downs else self.down
            other = None if down == up else down
            return replace(self, d_ff=neurons, encoding=up, down_encoding=other, ups=(), downs=())
        return self if neurons == self.d_ff else replace(self, d_ff=neurons)

    @property
    def down(self) -> str:
        """The encoding of the down columns."""
        return self.encoding if self.down_encoding is None else self.down_encoding

    @property
    def described(self) -> str:
        """The encodings, for people."""
        ups, downs = (" or ".join(sorted({*each})) for each in (self.ups or [self.encoding], self.downs or [self.down]))
        return ups if ups == downs else f"{ups}, down {downs}"

    @property
    def has_plane(self) -> bool:
        """True where down columns, of some layer, are codes alone, whose scales are resident."""
        return any(down in PLANE_ENCODINGS for down in self.downs or (self.down,))

    def encoding_of(self, matrix: str) -> RowEncoding:
        """How a matrix's part of a row is stored."""
        return (ROW_ENCODINGS | PLANE_ENCODINGS)[self.down if matrix == "down" else self.encoding]

    @property
    def storage(self) -> np.dtype[Any]:
        """The numpy type of a row's items (bfloat16: its bits, uint16); bytes where matrices differ."""
        return ROW_ENCODINGS[self.encoding].storage if self.down_encoding is None else np.dtype(np.uint8)

    @property
    def safetensors_dtype(self) -> str:
        """safetensors' code of the rows' tensor."""
        return ROW_ENCODINGS[self.encoding].safetensors_dtype if self.down_encoding is None else "U8"

    @property
    def itemsize(self) -> int:
        return int(self.storage.itemsize)

    def vector_nbytes(self, matrix: str) -> int:
        """Bytes of one matrix's part of a row."""
        encoding = self.encoding_of(matrix)
        return encoding.vector_items(self.d_model) * int(encoding.storage.itemsize)

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row that carry weights, with the scales of those that are coded."""
        return sum(self.vector_nbytes(matrix) for matrix in self.matrices)

    @property
    def stride(self) -> int:
        """Bytes from one row to the next: whole sectors, or whole pages where that wastes under 5 %; whole cache lines
        where rows are packed."""
        if self.packed:
            return _round_up(self.row_nbytes, LINE_NBYTES)
        pages = _round_up(self.row_nbytes, PAGE_NBYTES)
        if pages - self.row_nbytes < MAX_PAGE_WASTE * self.row_nbytes:
            return pages
        return _round_up(self.row_nbytes, SECTOR_NBYTES)

    @property
    def num_rows(self) -> int:
        """Rows of a layer: `d_ff`, and zero rows that make the layer's bytes a multiple of 4096."""
        return _round_up(self.d_ff, PAGE_NBYTES // math.gcd(self.stride, PAGE_NBYTES))

    @property
    def layer_nbytes(self) -> int:
        return self.num_rows * self.stride

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of a layer's tensor in `ffn.safetensors`: [num_rows, items of a stride]."""
        return self.num_rows, self.stride // self.itemsize

    def byte_offset(self, matrix: str) -> int:
        """First byte of `matrix` ("up", "gate", "down") in a row. ValueError where the row has no such matrix."""
        if matrix not in self.matrices:
            raise ValueError(f"matrix {matrix!r} is not one of {self.matrices!r}")
        return self.matrices.index(matrix) * self.vector_nbytes("up")  # down, which may differ, is the last

    def native(self, inputs: str, unit: int = 1) -> RowFormat:
        """The same for the core. `inputs`: what up and gate are multiplied by, as the manifest's activations. `unit`:
        neurons whose vectors lie matrix by matrix, without gaps, in as many strides."""
        return RowFormat(
            encoding=self.encoding,
            down_encoding=self.down,
            stride=self.stride,
            d_model=self.d_model,
            up=self.byte_offset("up"),
            gate=self.byte_offset("gate") if "gate" in self.matrices else -1,
            down=self.byte_offset("down"),
            inputs=inputs,
            unit=unit,
        )

    def block_in(self, buffer: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """As many rows [n, stride] of a buffer [n, bytes], whose rows are no shorter."""
        return buffer.reshape(-1)[: len(buffer) * self.stride].reshape(-1, self.stride)

    @property
    def stream_block_rows(self) -> int:
        """Neurons of one dense FFN product: a multiple of 64 within 4 MiB, at least 64, never over `num_rows`."""
        fitting = STREAM_BLOCK_NBYTES // self.stride // 64 * 64
        return min(self.num_rows, max(64, fitting))


def widest_down(downs: Sequence[str]) -> str:
    """The one of PLANE_ENCODINGS, or of dtypes, whose columns are longest."""
    widths = {down: (ROW_ENCODINGS | PLANE_ENCODINGS)[down] for down in downs}
    return max(downs, key=lambda down: (widths[down].vector_items(UNIT) * widths[down].storage.itemsize, down))


def longest_up(ups: Sequence[str], d_model: int) -> str:
    """The one of ROW_ENCODINGS whose vectors of `d_model` weights are longest."""
    return max(ups, key=lambda up: (ROW_ENCODINGS[up].vector_items(d_model) * ROW_ENCODINGS[up].storage.itemsize, up))


def packed(layout: RowLayout, architecture: Architecture) -> RowLayout:
    """`layout` with rows packed where they are of units that are read whole, and these and all layers are whole pages.
    It saves the padding, and rows whole pages apart are multiplied at 0.8 of the rate, as they want the same lines of a
    processor's caches."""
    tight = replace(layout, packed=True)
    runs = (architecture.unit_rows, architecture.shared_neurons, *architecture.every_width)
    strides = {tight.of_layer(layer, layout.d_ff).stride for layer in range(architecture.num_layers)}
    fits = architecture.unit_rows > 1 and all(run * each % PAGE_NBYTES == 0 for run in runs for each in strides)
    return tight if fits and SECTOR_NBYTES <= min(strides) <= tight.stride < layout.stride else layout


def pack_rows(layout: RowLayout, vectors: Mapping[str, NDArray[Any]], out: NDArray[np.uint8]) -> None:
    """Write neurons into rows.

    `vectors[matrix]` is [n, items] of its encoding's storage (for "down": the transposed columns); `out` is
    uint8 [n, stride], overwritten whole, padding included. ValueError for other shapes, types or matrices.
    """
    _check_rows(layout, out)
    if set(vectors) != set(layout.matrices):
        raise ValueError(f"vectors must be of {layout.matrices!r}, not {tuple(vectors)!r}")
    for matrix, part in unpack_rows(layout, out).items():
        values = vectors[matrix]
        if values.dtype != part.dtype or values.shape != part.shape:
            raise ValueError(f"{matrix}: {values.dtype} {values.shape}, not {part.dtype} rows of {part.shape[1]}")
        # In tiles: a transposed source (down) is then read by cache lines, 2.1 instead of 0.27 GB/s in one go.
        for first in range(0, part.shape[1], _TILE_ITEMS):
            tile = values[:, first : first + _TILE_ITEMS]
            part[:, first : first + tile.shape[1]] = tile
    out[:, layout.row_nbytes :] = 0


def unpack_rows(layout: RowLayout, rows: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
    """Views [n, items] of each encoding's storage into `rows` (uint8 [n, stride]), by matrix.

    ValueError as `pack_rows`.
    """
    _check_rows(layout, rows)
    parts = {}
    for matrix in layout.matrices:
        start = layout.byte_offset(matrix)
        part = rows[:, start : start + layout.vector_nbytes(matrix)]
        parts[matrix] = part.view(layout.encoding_of(matrix).storage)
    return parts


def widened_rows(
    layout: RowLayout, rows: NDArray[np.uint8], plane: Plane | None = None, first: int = 0
) -> dict[str, NDArray[np.float32]]:
    """The weights [n, d_model] of `rows` in fp32, by matrix. `plane`: the layer's, where down columns have their scales
    there, and `first` is the id of the first neuron. ValueError as `pack_rows`, and where a plane is missing."""
    return {
        matrix: widened(layout.encoding_of(matrix), part, layout.d_model, plane, first)
        for matrix, part in unpack_rows(layout, rows).items()
    }


def widened(
    encoding: RowEncoding, stored: NDArray[Any], length: int, plane: Plane | None = None, first: int = 0
) -> NDArray[np.float32]:
    """The weights [n, length] of vectors stored as `encoding` says; `plane` and `first` as in `widened_rows`."""
    if isinstance(encoding.code, PlaneCode) and plane is not None:
        return plane.widened(stored, encoding.code, first, length)
    return encoding.widened(stored, length)


def _check_rows(layout: RowLayout, rows: NDArray[np.uint8]) -> None:
    if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != layout.stride or not rows.flags.c_contiguous:
        raise ValueError(f"rows must be contiguous uint8 [n, {layout.stride}], not {rows.dtype} {rows.shape}")


def row_checksums(rows: NDArray[np.uint8], together: int = 1) -> NDArray[np.uint64]:
    """xxh3-64 (seed 0) of every `together` rows of uint8 [n, stride], padding included; the last may be of fewer."""
    whole = len(rows) // together * together
    sums = [xxh3_64_rows(rows[:whole].reshape(whole // together, together * rows.shape[1]))]
    sums += [xxh3_64_rows(rows[whole:].reshape(1, -1))] if whole < len(rows) else []
    return np.concatenate(sums, dtype=np.uint64)


def checksum_rows(layout: RowLayout, architecture: Architecture) -> list[int]:
    """Rows of each layer that share a checksum in a new model: those of a unit, where a block of the stream holds whole
    units, else as many as divide both; one in layers whose neurons are read apart."""
    runs = [run for run in (architecture.expert_size, architecture.shared_neurons) if run]
    if architecture.unit_rows == 1:
        return [1] * architecture.num_layers
    blocks = [layout.stream_block_rows] if max(runs) > layout.stream_block_rows else []
    together = math.gcd(*runs, *blocks)
    return [together if layer in architecture.mixtures else 1 for layer in range(architecture.num_layers)]
