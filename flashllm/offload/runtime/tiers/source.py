"""A model's tensors by canonical name, from a Hugging Face folder or from a converted model directory.

Names are those of flashllm/arch/tensors.py; the FFN's matrices besides: layers.{i}.up.weight and gate [d_ff, d_model],
down [d_model, d_ff]. Says where a tensor's bytes lie in a file as they are, so that the disk tier can read them there,
and fills arrays with those that have to be put together or rounded first. Never holds more than a layer.

Of a stage of a pipeline only its own tensors are there; layers have their numbers in the model.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashllm.arch.registry import block_spec, bundle_names, claims, complete_config, resident_shapes, resolve
from flashllm.arch.spec import Architecture, BlockSpec
from flashllm.arch.tensors import Shape, is_wide
from flashllm.base.dtypes import WEIGHT_DTYPE_BY_CODE, WEIGHT_DTYPES, WeightDtype, cast
from flashllm.base.files import Closing, drop_page_cache
from flashllm.convert.checkpoint.opened import open_checkpoint
from flashllm.convert.checkpoint.pieces import read_rows
from flashllm.convert.checkpoint.source import Checkpoint
from flashllm.convert.plan import checked_tensors
from flashllm.errors import ChecksumError, UnsupportedModelError
from flashllm.format.manifest import MANIFEST
from flashllm.format.model_dir import ModelDir, read_plane
from flashllm.format.model_files import FFN, RESIDENT, checksums_tensor, ffn_tensor, plane_tensors
from flashllm.format.rows import row_checksums, unpack_rows, widened
from flashllm.format.safetensors import SafetensorsFile, TensorInfo, open_safetensors
from flashllm.offload.planner.packing import CODES
from flashllm.offload.shape import ModelShape, check_mixers, is_assembled, mixer_matrices, shape_of
from flashllm.offload.stages import Stage, whole

Array = NDArray[Any]
_TILE = 64  # rows and columns
_WIDENED = 1 << 19  # weights in codes that are widened at a time, which takes tens of bytes each


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes of a file that are a tensor, row by row, in the model's dtype."""

    path: Path
    offset: int
    nbytes: int


class WeightSource(ABC, Closing):
    """An open model. A context manager; tensors are in `dtype.storage` (bfloat16: its bits, uint16)."""

    def __init__(self, path: Path, config: Mapping[str, Any], dtype: WeightDtype, stage: Stage | None) -> None:
        self.path = path
        self.config = complete_config(config)
        self.block: BlockSpec = block_spec(config)
        check_mixers(self.block, str(path))
        self.architecture: Architecture = resolve(config)
        self.dtype = dtype
        self._files = ExitStack()
        shapes = resident_shapes(config)
        arch, block = self.architecture, self.block
        for layer, matrix in product(range(arch.num_layers), arch.matrices):
            shape = (arch.width(layer), block.d_model)
            if block.layers[layer].neurons:
                shapes[matrix_name(layer, matrix)] = shape[::-1] if matrix == "down" else shape
        self.stage = stage or whole(arch.num_layers)
        self._shapes = {
            name: shape for name, shape in shapes.items() if _is_of_stage(name, self.stage, tied=block.tied_head)
        }

    @property
    def num_layers(self) -> int:
        return self.stage.num_layers

    def matrices(self, layer: int) -> tuple[str, ...]:
        """The matrices of a layer of the model that have a tier: those of its mixers, then up, (gate,) down."""
        neurons = self.block.layers[layer].neurons
        return (*mixer_matrices(self._shapes, layer), *(self.architecture.matrices if neurons else ()))

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Canonical name -> shape of every tensor the stage has."""
        return self._shapes

    @property
    def model_shape(self) -> ModelShape:
        layers, assembled = self.stage.numbers, is_assembled(self.path)
        arch, dtype = self.architecture, self.dtype.name
        return shape_of(arch, self.block, self._shapes, layers, name=self.path.name, dtype=dtype, assembled=assembled)

    @abstractmethod
    def extent(self, name: str) -> Extent | None:
        """The place of the tensor as it is; None where it must be read with `read`."""

    def encoding(self, _name: str) -> str | None:
        """The codes that a layer's matrix is stored in, and may stay in; None for another."""
        return None

    def plane_nbytes(self, _layer: int) -> int:
        return 0

    def plane(self, _layer: int) -> Mapping[str, Array]:
        """The scales of a layer's down columns that lie beside their codes, by name; none of others."""
        return {}

    @abstractmethod
    def read(self, targets: Mapping[str, Array]) -> None:
        """Fill contiguous arrays of the storage of `read_dtype` with the tensors of these names, which are of one layer
        or of none; and arrays of bytes with the vectors of matrices as they are stored in codes, one an output, of
        `down` an input. UnsupportedModelError for a value outside the dtype's range, ChecksumError for a damaged row,
        FlashIOError and FormatError for failed reads."""

    def read_dtype(self, name: str) -> WeightDtype:
        """The dtype that a tensor is read in: the model's, but for those in fp32 (`is_wide`)."""
        return WEIGHT_DTYPES["float32"] if is_wide(name) else self.dtype

    def vector(self, name: str) -> NDArray[np.float32] | None:
        """A tensor in its `read_dtype`, as fp32 of one dimension; a norm's weight with its shift.

        None where the model has none.
        """
        if name not in self._shapes:
            return None
        dtype = self.read_dtype(name)
        values = np.empty(self._shapes[name], dtype.storage)
        self.read({name: values})
        wide = np.ascontiguousarray(cast(values, dtype, WEIGHT_DTYPE_BY_CODE["F32"]), np.float32).reshape(-1)
        is_shifted = name.endswith("_norm.weight") and not name.endswith(".mixed_norm.weight")
        shift = self.block.norm_shift if is_shifted else 0.0
        return wide + np.float32(shift) if shift else wide

    def close(self) -> None:
        self._files.close()


def matrix_name(layer: int, matrix: str) -> str:
    return f"layers.{layer}.{matrix}.weight"


def of_either(matrix: str) -> str:
    """The name that a mixer's matrix has in common with that of the other kind of mixer."""
    return matrix.removeprefix("state.")


def _is_of_stage(name: str, stage: Stage, *, tied: bool) -> bool:
    """True where a stage has a use for a tensor of the model."""
    first, number, *_ = name.split(".")
    if first == "layers":
        return int(number) in stage.numbers
    if first in ("head", "final_norm", "project_out"):
        return stage.is_last
    return stage.is_first or (name == "embedding.weight" and tied and stage.is_last)


def open_weights(path: Path, stage: Stage | None = None, *, codes: Collection[str] = tuple(CODES)) -> WeightSource:
    """The model in the folder `path`, or a stage of it: a flashllm directory, or a Hugging Face safetensors folder.
    `codes`: that its matrices may stay in; those in others are read in the model's dtype. UsageError where it is
    neither, FormatError where it is damaged, UnsupportedModelError for what `arch` lacks."""
    path = Path(path)
    if (path / MANIFEST).exists():
        return _ModelDirWeights(path, stage, codes)
    return _CheckpointWeights(path, stage)


class _CheckpointWeights(WeightSource):
    """A Hugging Face folder. The model's dtype is its embedding's; tensors of another are rounded to it."""

    def __init__(self, path: Path, stage: Stage | None) -> None:
        with ExitStack() as stack:
            checkpoint: Checkpoint = stack.enter_context(open_checkpoint(path))
            self._checkpoint, self._claims = checkpoint, claims(checkpoint.config)
            names = checked_tensors(checkpoint, self._claims)
            self._names = {name: names[claim.source] for name, claim in self._claims.items()}
            for name in self._names.values():
                if checkpoint.tensors[name].dtype not in WEIGHT_DTYPE_BY_CODE:
                    found, known = checkpoint.tensors[name].dtype, ", ".join(WEIGHT_DTYPE_BY_CODE)
                    raise UnsupportedModelError(f"{checkpoint.where(name)}: has dtype {found}; supported: {known}")
            super().__init__(path, checkpoint.config, self._dtype_of("embedding.weight"), stage)
            self._files = stack.pop_all()

    def _info(self, name: str) -> TensorInfo:
        return self._checkpoint.tensors[self._names[name]]

    def _dtype_of(self, name: str) -> WeightDtype:
        return WEIGHT_DTYPE_BY_CODE[self._info(name).dtype]

    def extent(self, name: str) -> Extent | None:
        if name not in self._claims:  # of all experts of a layer
            return None
        info, claim = self._info(name), self._claims[name]
        where = self._checkpoint.extent(self._names[name])
        if self._dtype_of(name) is not self.dtype or where is None or where[1] % info.itemsize:
            return None
        if claim.part.transposed or claim.part.turned or claim.part.repeats > 1:
            return None
        row_nbytes = prod(claim.shape[1:]) * info.itemsize
        return Extent(where[0], where[1] + claim.part.first * row_nbytes, claim.rows * row_nbytes)

    def read(self, targets: Mapping[str, Array]) -> None:
        for name, target in targets.items():
            if name in self._claims:
                self._read_tensor(name, target)
                continue
            _, number, matrix, _ = name.split(".")
            first = 0
            for bundle in bundle_names(self.architecture, int(number)):
                one = f"{bundle}{matrix}.weight"
                rows, columns = self._claims[one].shape
                if matrix == "down":
                    part = np.empty((rows, columns), target.dtype)
                    self._read_tensor(one, part)
                    target[:, first : first + columns] = part
                    first += columns
                else:
                    self._read_tensor(one, target[first : first + rows])
                    first += rows

    def _read_tensor(self, name: str, target: Array) -> None:
        dtype, claim = self._dtype_of(name), self._claims[name]
        if dtype is self.read_dtype(name):
            read_rows(self._checkpoint, self._names[name], claim, 0, target)
            return
        values = np.empty(target.shape, dtype.storage)
        read_rows(self._checkpoint, self._names[name], claim, 0, values)
        try:
            target[...] = cast(values, dtype, self.read_dtype(name))
        except OverflowError as error:
            where = self._checkpoint.where(self._names[name])
            raise UnsupportedModelError(f"{where}: {error}; save the model in one dtype") from error


class _ModelDirWeights(WeightSource):
    """A model directory: matrices of the FFN are put together from the neurons' rows, whose checksums are compared."""

    def __init__(self, path: Path, stage: Stage | None, codes: Collection[str]) -> None:
        model = ModelDir.open(path)
        if model.manifest.sparsity is not None:
            raise UnsupportedModelError(
                f"{path}: has thresholds (--sparsify), by which this engine would save nothing and lose quality; use "
                "the model it was converted from"
            )
        if model.manifest.in_place is not None:
            raise UnsupportedModelError(
                f"{path}: its experts lie in {model.manifest.in_place.files[0].path}, where this engine does not read "
                "them; give it that file"
            )
        super().__init__(path, model.config, model.dtype, stage)
        self._manifest, self._codes = model.manifest, codes
        with ExitStack() as stack:
            self._resident: SafetensorsFile = stack.enter_context(open_safetensors(path / RESIDENT))
            self._ffn: SafetensorsFile = stack.enter_context(open_safetensors(path / FFN))
            self._files = stack.pop_all()

    def extent(self, name: str) -> Extent | None:
        info = self._resident.header.tensors.get(name)
        if info is None or info.dtype != self.dtype.code:  # a matrix of the FFN, or in codes
            return None
        return Extent(self.path / RESIDENT, info.offset, info.nbytes)

    def encoding(self, name: str) -> str | None:
        of = self._manifest
        if name in self._resident.header.tensors:
            stored = of.encoding_of(name)
        else:
            _, layer, matrix, _ = name.split(".")
            stored = of.layout(int(layer)).encoding_of(matrix)
        return stored.name if stored.name in self._codes else None

    def plane_nbytes(self, layer: int) -> int:
        of = self._manifest
        names = plane_tensors(layer, of.down_scales[layer], of.layout(layer)) if of.down_scales else ()
        return sum(self._resident.header.tensors[name].nbytes for name in names)

    def plane(self, layer: int) -> Mapping[str, Array]:
        plane = read_plane(self.path, self._manifest, layer)
        return {} if plane is None else plane.arrays

    def read(self, targets: Mapping[str, Array]) -> None:
        bundled: dict[int, dict[str, Array]] = {}
        for name, target in targets.items():
            info = self._resident.header.tensors.get(name)
            if info is not None:
                self._read_resident(info, target)
            else:
                _, number, matrix, _ = name.split(".")
                bundled.setdefault(int(number), {})[matrix] = target
        for layer, matrices in bundled.items():
            self._read_rows(layer, matrices)

    def _read_resident(self, info: TensorInfo, target: Array) -> None:
        if info.dtype == self.read_dtype(info.name).code or target.dtype == np.uint8:
            _read(self._resident, info, 0, target)
            return
        encoding = self._manifest.encoding_of(info.name)
        together = max(1, _WIDENED // target.shape[1])
        for first in range(0, info.shape[0], together):
            part = target[first : first + together]
            codes = np.empty((len(part), info.shape[1]), encoding.storage)
            _read(self._resident, info, first * info.shape[1], codes)
            part[...] = cast(encoding.widened(codes, target.shape[1]), WEIGHT_DTYPES["float32"], self.dtype)

    def _read_rows(self, layer: int, targets: Mapping[str, Array]) -> None:
        """One pass over the layer's rows, a block at a time, for all of its matrices that are asked for."""
        layout, together = self._manifest.layout(layer), self._manifest.checksum_rows_of(layer)
        info = self._ffn.header.tensors[ffn_tensor(layer)]
        checksums = np.empty(self._manifest.checksums[layer], np.dtype("<u8"))
        _read(self._resident, self._resident.header.tensors[checksums_tensor(layer)], 0, checksums)
        most = min(layout.stream_block_rows, _WIDENED // self.block.d_model)
        whole = max(1, most // together) * together  # rows that share checksums lie in one block
        block = np.empty((whole, layout.stride), np.uint8)
        plane = read_plane(self.path, self._manifest, layer) if "down" in targets else None
        for first in range(0, layout.d_ff, len(block)):
            read = block[: layout.num_rows - first]
            _read(self._ffn, info, first * layout.stride, read)
            sums = row_checksums(read, together)
            wrong = np.flatnonzero(sums != checksums[first // together : first // together + len(sums)])
            if len(wrong):
                where = f"{self._ffn.header.path}: layer {layer}, neuron {first + int(wrong[0]) * together}"
                raise ChecksumError(f"{where}: wrong checksum; run `flashllm verify`, or convert the model again")
            rows = read[: layout.d_ff - first]
            for matrix, stored in unpack_rows(layout, rows).items():
                if matrix not in targets:
                    continue
                if targets[matrix].dtype == np.uint8:
                    targets[matrix][first : first + len(rows)] = stored
                    continue
                encoding = layout.encoding_of(matrix)
                vectors = stored
                if encoding.name != self.dtype.name:  # coded: in the model's dtype
                    values = widened(encoding, stored, self.block.d_model, plane, first)
                    vectors = cast(values, WEIGHT_DTYPES["float32"], self.dtype)
                if matrix == "down":
                    transpose(vectors, targets[matrix][:, first : first + len(rows)])
                else:
                    targets[matrix][first : first + len(rows)] = vectors


def transpose(vectors: Array, out: Array) -> None:
    """out = vectors.T in tiles, so that the rows written are in the cache together."""
    for first in range(0, len(out), _TILE):
        out[first : first + _TILE] = vectors[:, first : first + _TILE].T


def _read(file: SafetensorsFile, info: TensorInfo, start: int, out: Array) -> None:
    buffer = out.reshape(-1).view(np.uint8).data
    file.read_into(info, start, buffer)
    drop_page_cache(file.fd, info.offset + start, len(buffer))
