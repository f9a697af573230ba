"""Weights on their tiers: each matrix of a layer, whole, where the policy puts it; the rest beside the device.

Device and CPU matrices are read once, into memory. Those of the disk are read again for every use, with direct reads
into a staging buffer: from the model's own file where its bytes are the matrix, else from a scratch file written at the
start. CPU matrices are copied into the staging buffer, as they would be to an accelerator. Norms, biases, positions and
narrow embeddings' projections always stay on the device. `weight_plan.py` says what lies where. It knows no schedule:
whoever loads a buffer sees to it that nobody uses it.
"""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from flashllm import _core
from flashllm.base.files import Closing
from flashllm.errors import UnsupportedModelError, UsageError
from flashllm.offload.planner.packing import Packing
from flashllm.offload.runtime.ops import Array, Matrix, Tensors
from flashllm.offload.runtime.tiers.scratch import ALIGNMENT, Scratch, ScratchFile, round_up
from flashllm.offload.runtime.tiers.source import Extent, WeightSource, transpose
from flashllm.offload.runtime.tiers.weight_plan import (
    CPU,
    DEVICE,
    DISK,
    GATHERED_ROWS,
    Bundle,
    TieredTensor,
    WeightPlan,
    is_outer_matrix,
    is_vector,
    small_tensors,
)

Bytes = NDArray[np.uint8]
_TURNED = 512  # inputs of a matrix that are brought together at a time


class WeightStore(Closing):
    """A model's weights, each on its tier. A context manager; every method may be called from any thread.

    The caller sees to it that a staging buffer is not loaded while it is used.
    """

    def __init__(
        self, source: WeightSource, plan: WeightPlan, *, pool: _core.ThreadPool, scratch: Scratch, reader: _core.Reader
    ) -> None:
        """Brings the weights to their tiers.

        `scratch` has room for the plan's scratch_nbytes. The source may be closed afterwards. FlashIOError,
        FormatError, ChecksumError, UnsupportedModelError as the source's.
        """
        self.plan, self._first = plan, source.stage.first
        self.bytes_read = 0  # from files, since the start
        self.notices: list[str] = []
        self._block, self._dtype = source.block, source.dtype
        self._reader, self._pool = reader, pool
        self._lock = threading.Lock()
        self._gathering = threading.Lock()
        self._files: dict[Path, _core.DirectFile] = {}
        self._scratch: ScratchFile | None = None
        self._memory: dict[str, Bytes] = {}  # of tiers, beside an accelerator
        self._buffers: list[Bytes] = []
        self._lent: dict[tuple[int | None, int | None], Tensors] = {}  # by layer and buffer, where they lie
        self._reserve()
        self._gathered = _core.allocate(self.plan.gather_nbytes)
        self._small: dict[str, Array] = {name: self._read_small(source, name) for name in small_tensors(source)}
        self._planes = [
            source.plane(layer) if any(one.packing and one.packing.has_plane for one in bundle.tensors.values()) else {}
            for layer, bundle in zip(source.stage.numbers, self.plan.bundles, strict=False)
        ]
        if self.plan.scratch_nbytes:
            self._scratch = scratch.create("weights", self.plan.scratch_nbytes, reader)
        self._fill(source)

    # What the runtime sees -------------------------------------------------------------------------------------

    def load(self, layer: int, buffer: int) -> None:
        """Fill a staging buffer with the disk and CPU matrices of a layer; the one after the last is the head. Blocks.
        FlashIOError, FormatError where a read fails."""
        bundle = self.plan.bundles[layer]
        batches = self._start_reads(bundle, self._buffers[buffer])
        for one in loaded_tensors(bundle):
            if one.home == CPU:
                start = one.start + one.skip
                source = self._memory[CPU][start : start + one.nbytes]
                np.copyto(self._buffers[buffer][one.staged_at : one.staged_at + one.nbytes], source)
        self._wait(batches)

    def layer(self, layer: int, buffer: int) -> Tensors:
        """Tensors of a layer, counted from the stage's first, where they lie once `buffer` is loaded."""
        if (layer, buffer) not in self._lent:
            number, tensors = self._first + layer, self.plan.bundles[layer].tensors
            prefix = f"layers.{number}."
            matrices = {
                name: self._matrix(tensor, buffer, self._small.get(bias_name(number, name)))
                for name, tensor in tensors.items()
            }
            for name, one in self._small.items():  # a router's, or of a recurrent mixer
                if name.startswith(prefix) and not is_vector(name):
                    short = name.removeprefix(prefix).removesuffix(".weight")
                    matrices[short] = Matrix.of(one)
            planes = {f"down.{name}": one for name, one in self._planes[layer].items()}
            self._lent[layer, buffer] = Tensors(matrices, self._vectors(prefix) | planes)
        return self._lent[layer, buffer]

    def ends(self, buffer: int | None = None) -> Tensors:
        """Weights before the first layer and after the last; with the head where it lies once `buffer` is loaded."""
        if (None, buffer) not in self._lent:
            small = {name.removesuffix(".weight"): one for name, one in self._small.items() if is_outer_matrix(name)}
            matrices = {name: Matrix.of(one) for name, one in small.items()}
            if buffer is not None:
                name = "embedding" if self._block.tied_head else "head"
                bias = self._small.get("head.bias")
                matrices[name] = self._matrix(self.plan.bundles[-2].tensors["head"], buffer, bias)
            self._lent[None, buffer] = Tensors(matrices, self._vectors(""))
        return self._lent[None, buffer]

    def _vectors(self, prefix: str) -> dict[str, Array]:
        """Those of a layer, by the names without the layer's; or those of none."""
        found = {name: one for name, one in self._small.items() if name.startswith(prefix) and is_vector(name)}
        short = {name.removeprefix(prefix): one for name, one in found.items()}
        return {name: one for name, one in short.items() if not name.startswith("layers.")}

    def embedding_rows(self, ids: NDArray[np.integer[Any]]) -> Array:
        """Rows [n, embed_dim] of the embedding, in the model's dtype; read from the disk where it lies there."""
        _, table = self.plan.table
        if table.home == DISK:
            return self._gathered_rows(table, ids)
        return self._array(table, self._memory[table.home], table.start + table.skip)[ids]

    def _gathered_rows(self, table: TieredTensor, ids: NDArray[np.integer[Any]]) -> NDArray[Any]:
        distinct, inverse = np.unique(ids, return_inverse=True)
        if len(distinct) and not 0 <= int(distinct[0]) <= int(distinct[-1]) < table.rows:
            raise UsageError(f"token ids must be from 0 to {table.rows - 1}")
        rows = np.empty((len(distinct), table.columns), self._dtype.storage)
        with self._gathering:
            for first in range(0, len(distinct), GATHERED_ROWS):
                self._gather(table, distinct[first : first + GATHERED_ROWS], rows[first : first + GATHERED_ROWS])
        return cast(NDArray[Any], rows[inverse])

    def close(self) -> None:
        self._lent.clear()
        if self._scratch is not None:
            self._scratch.close()
        self._files.clear()
        self._buffers.clear()
        self._memory.clear()

    # At the start ----------------------------------------------------------------------------------------------

    def _reserve(self) -> None:
        """Allocate the tiers' memory and the staging buffers."""
        self._memory[DEVICE] = _core.allocate(self.plan.device_nbytes - self.plan.small_nbytes)
        self._memory[CPU] = _core.allocate(self.plan.cpu_nbytes)
        self._buffers = [_core.allocate(self.plan.buffer_nbytes) for _ in range(self.plan.staging_buffers)]

    def _home(self, bundle: Bundle, tier: str) -> tuple[Bytes, int]:
        """Memory that a bundle's tensors of a tier are brought to, and the tier's byte that it begins with."""
        return self._memory[tier], 0

    def _settle(self, bundle: Bundle) -> None:
        """Do what is to be done with a bundle that is in the memory of `_home`."""

    def _read_small(self, source: WeightSource, name: str) -> NDArray[Any]:
        if is_vector(name):
            return cast(NDArray[Any], source.vector(name))
        array = np.empty(source.shapes[name], source.read_dtype(name).storage)
        source.read({name: array})
        return array

    def _fill(self, source: WeightSource) -> None:
        """Bring every tensor to its tier, a layer at a time."""
        *others, table = self.plan.bundles
        # An embedding that is put into the scratch file comes first: nothing else takes memory yet, and the head, which
        # is as large, will.
        for bundle in (table, *others):
            image = self._buffers[0]
            if bundle.image[1] > len(image):
                image = _core.allocate(bundle.image[1])
            # 1. What is read as it is, into memory; files of the disk tier are opened to see that they are there.
            found = [one for one in bundle.tensors.values() if one.extent is not None]
            homes = {tier: self._home(bundle, tier) for tier in (DEVICE, CPU)} | {DISK: (image, 0)}
            self._wait(self._submit([(one, *homes[one.home]) for one in found if one.home != DISK]))
            for one in found:
                self._file(cast(Extent, one.extent).path)
            # 2. What is put together or packed: into memory, or into the image of the scratch file.
            made = [one for one in bundle.tensors.values() if one.extent is None]
            places = {}
            for one in made:
                memory, begin = homes[one.home]
                places[one.name] = memory[one.start - begin : one.start - begin + one.nbytes]
            if made:
                self._make(source, made, places)
            self._settle(bundle)
            first, last = bundle.image
            if last > first:
                cast(ScratchFile, self._scratch).write([(bundle.scratch_offset, image[first:last])])
        for path, file in self._files.items():
            if not file.direct:
                reason = f"direct I/O is not available for {path} ({file.fallback_reason})"
                self.notices.append(f"{reason}: weights are read through the page cache")

    def _make(self, source: WeightSource, made: list[TieredTensor], places: Mapping[str, Bytes]) -> None:
        """Put tensors together, and pack those that are to be packed."""
        targets: dict[str, Array] = {}
        to_pack = {}
        for one in made:
            place, packing = places[one.name], one.packing
            if packing is not None and packing.encoding == source.encoding(one.name):
                targets[one.name] = place.reshape(packing.vectors(one.rows, one.columns)[0], -1)
                continue
            if packing is not None:
                to_pack[one.name] = packing
                # Not from the heap, which would keep the room of what it has once freed.
                place = _core.allocate(one.rows * one.columns * self._dtype.itemsize)
            targets[one.name] = place.view(self._dtype.storage).reshape(one.rows, one.columns)
        source.read(targets)
        for one in made:
            if one.name not in to_pack:
                continue
            try:
                pack(targets.pop(one.name), self._dtype.name, to_pack[one.name], places[one.name], self._pool)
            except OverflowError as error:
                raise UnsupportedModelError(f"{one.name} cannot be packed: {error}") from error

    # Memory and files ------------------------------------------------------------------------------------------

    def _start_reads(self, bundle: Bundle, buffer: Bytes) -> list[_core.ReadBatch]:
        """Start to read a bundle's tensors of the disk into a staging buffer."""
        tensors = loaded_tensors(bundle)
        batches = self._submit([(one, buffer, 0) for one in tensors if one.home == DISK and one.extent is not None])
        first, last = bundle.image
        if last > first:
            batch = _core.ReadBatch(self._reader, cast(ScratchFile, self._scratch).file)
            batch.add(bundle.scratch_offset, buffer[first:last])
            batch.submit()
            batches.append(batch)
        return batches

    def _submit(self, wanted: list[tuple[TieredTensor, Bytes, int]]) -> list[_core.ReadBatch]:
        """Start reading tensors, with the whole blocks around each, to their places in memory that begins there."""
        batches: dict[Path, _core.ReadBatch] = {}
        for one, memory, first in wanted:
            extent = cast(Extent, one.extent)
            file = self._file(extent.path)
            if extent.path not in batches:
                batches[extent.path] = _core.ReadBatch(self._reader, file)
            begin = extent.offset - one.skip
            end = min(begin + one.room, file.size)
            batches[extent.path].add(begin, memory[one.start - first : one.start - first + end - begin])
        for batch in batches.values():
            batch.submit()
        return list(batches.values())

    def _wait(self, batches: list[_core.ReadBatch]) -> None:
        nbytes = sum(batch.wait()["bytes"] for batch in batches)
        with self._lock:
            self.bytes_read += nbytes

    def _gather(self, table: TieredTensor, ids: NDArray[np.integer[Any]], rows: NDArray[Any]) -> None:
        """Fill `rows` with the embedding's rows of `ids`, which are distinct and ascending."""
        bundle, _ = self.plan.table
        if table.extent is not None:
            file, base = self._file(table.extent.path), table.extent.offset
        else:
            file, base = cast(ScratchFile, self._scratch).file, bundle.scratch_offset + table.start - bundle.image[0]
        nbytes = table.columns * self._dtype.itemsize
        stride = round_up(nbytes) + ALIGNMENT
        batch = _core.ReadBatch(self._reader, file)
        skips = []
        for slot, token in enumerate(ids.tolist()):
            offset = base + token * nbytes
            begin = offset // ALIGNMENT * ALIGNMENT
            end = min(round_up(offset + nbytes), file.size)
            batch.add(begin, self._gathered[slot * stride : slot * stride + end - begin])
            skips.append(slot * stride + offset - begin)
        batch.submit()
        self._wait([batch])
        for row, start in zip(rows, skips, strict=True):
            row[:] = self._gathered[start : start + nbytes].view(self._dtype.storage)

    def _file(self, path: Path) -> _core.DirectFile:
        if path not in self._files:
            self._files[path] = _core.DirectFile(str(path))
        return self._files[path]

    def _matrix(self, one: TieredTensor, buffer: int, bias: Array | None) -> Matrix:
        memory, start = self._memory[DEVICE], one.start + one.skip
        if one.home != DEVICE:
            memory, start = self._buffers[buffer], one.staged_at if one.home == CPU else start
        return Matrix(self._array(one, memory, start), one.rows, one.columns, one.packing, bias)

    def _array(self, one: TieredTensor, memory: Bytes, start: int) -> Array:
        data = memory[start : start + one.nbytes]
        return data if one.packing else data.view(self._dtype.storage).reshape(one.rows, one.columns)


def bias_name(layer: int, matrix: str) -> str:
    of_ffn = matrix in ("up", "gate", "down")
    return f"layers.{layer}.ffn.{matrix}_bias" if of_ffn else f"layers.{layer}.{matrix}.bias"


def loaded_tensors(bundle: Bundle) -> list[TieredTensor]:
    """The arrays of a bundle that pass a staging buffer: a table's rows are gathered one by one."""
    return [one for name, one in bundle.tensors.items() if one.home != DEVICE and name != "table"]


def pack(weights: NDArray[Any], dtype: str, packing: Packing, to: Bytes, pool: _core.ThreadPool) -> None:
    """Pack weights [outputs, inputs]. OverflowError where one is not finite or too large."""
    count, length = packing.vectors(*weights.shape)
    vectors = to.reshape(count, -1)
    if not packing.by_inputs:
        _core.encode_rows(weights, dtype, packing.encoding, vectors, pool)
        return
    for first in range(0, count, _TURNED):
        turned = np.empty((min(_TURNED, count - first), length), weights.dtype)
        transpose(weights[:, first : first + len(turned)], turned)
        _core.encode_rows(turned, dtype, packing.encoding, vectors[first : first + len(turned)], pool)
