"""From a Hugging Face checkpoint to a model directory whose FFN neurons can be read one by one.

Streams: memory holds one layer's down projection and a few blocks, whatever the model's size. Interruptible: run it
again and it goes on after the last finished layer, and the result is the same, byte for byte. What goes where was
decided by `conversion_plan`; knows no kernels and no model code.
"""

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from flashllm.arch.tensors import TOKEN_TABLE
from flashllm.base.dtypes import WEIGHT_DTYPES
from flashllm.base.files import HashingWriter, Progress, iterate_chunks
from flashllm.base.units import format_size
from flashllm.convert.checkpoint.opened import open_checkpoint
from flashllm.convert.checkpoint.source import Checkpoint, OwnPredictors
from flashllm.convert.choices import Choices
from flashllm.convert.hub import Say
from flashllm.convert.kept.in_place import slice_sums
from flashllm.convert.known import KNOWN
from flashllm.convert.plan import ConversionPlan, plan_conversion
from flashllm.convert.storage import ResidentEntry
from flashllm.convert.untrained.file import made_predictors
from flashllm.convert.weights import Weights
from flashllm.errors import FlashIOError, UsageError
from flashllm.format.in_place import SliceReader
from flashllm.format.manifest import MANIFEST, PARTIAL_SUFFIX, Manifest
from flashllm.format.manifest_values import FileEntry
from flashllm.format.model_files import FFN, PREDICTORS, RESIDENT, TABLE, TABLE_CHECKSUMS
from flashllm.format.partial import PartialDirectory, check_space, open_partial
from flashllm.format.rows import CODED_ENCODINGS, checksum_rows, row_checksums


def convert(
    src: Path,
    dst: Path,
    *,
    source_name: str | None = None,
    say: Say | None = None,
    progress: Progress | None = None,
    **choices: Unpack[Choices],
) -> Manifest:
    """Convert the checkpoint `src` (a folder, or a GGUF file) into the new model directory `dst`; the manifest.

    What may be chosen is listed in `Choices` (flashllm/convert/choices.py). `source_name` is recorded (a hub id), by
    default the folder's name. `say` gets a line where the checkpoint's own bits are kept, and where it leaves open what
    is assumed. On one machine the same choices give the same bytes.

    Works in `dst`.partial, and resumes what it finds there.
    Raises UsageError (`dst` exists, `src` is no checkpoint), UnsupportedModelError, FormatError (`src` is damaged),
    FlashIOError (no space, a failed read or write). Never writes to `src`.
    """
    src = Path(src)
    name = source_name if source_name is not None else os.path.basename(os.path.abspath(src))
    _check_request(Path(dst), choices)
    with open_checkpoint(src) as checkpoint:
        return convert_checkpoint(checkpoint, dst, source_name=name, say=say, progress=progress, **choices)


def convert_checkpoint(
    checkpoint: Checkpoint,
    dst: Path,
    *,
    source_name: str,
    say: Say | None = None,
    progress: Progress | None = None,
    **choices: Unpack[Choices],
) -> Manifest:
    """Convert an open checkpoint, which need not lie in files; otherwise as `convert`."""
    _check_request(dst, choices)
    plan = plan_conversion(checkpoint, **choices)
    if plan.kept_line is not None and say is not None:
        say(plan.kept_line)
    if checkpoint.assumed is not None and say is not None and source_name not in KNOWN:
        say(checkpoint.assumed)
    dst = Path(os.path.abspath(dst))
    begun = partial_path(dst)
    try:
        check_space(dst.parent, begun, plan.total_nbytes)
        with open_partial(begun, dst, plan.identity()) as partial:
            return _Conversion(plan, partial, progress).run(dst, source_name)
    except OSError as error:
        raise FlashIOError(_explain(error, dst, begun, plan.total_nbytes)) from error


def partial_path(dst: Path) -> Path:
    """The folder in which the conversion into `dst` is under way."""
    return dst.with_name(dst.name + PARTIAL_SUFFIX)


def _check_request(dst: Path, choices: Choices) -> None:
    """Refuse before anything is opened. UsageError."""
    dtype = choices.get("dtype")
    if dtype is not None and dtype not in WEIGHT_DTYPES:
        raise UsageError(f"dtype {dtype!r} is not one of {', '.join(WEIGHT_DTYPES)}")
    for encoding in (choices.get("encoding"), choices.get("resident_encoding"), choices.get("table_encoding")):
        if encoding is not None and encoding not in CODED_ENCODINGS:
            raise UsageError(f"encoding {encoding!r} is not one of {', '.join(CODED_ENCODINGS)}")
    check_destination(Path(os.path.abspath(dst)))


def check_destination(dst: Path) -> None:
    """That a model directory can be made at `dst`, an absolute path. UsageError."""
    if os.path.lexists(dst):
        raise UsageError(f"{dst}: exists; remove it or choose another destination")
    if not dst.parent.is_dir():
        raise UsageError(f"{dst.parent}: there is no such directory")


def _explain(error: OSError, dst: Path, begun: Path, nbytes: int) -> str:
    message = f"{dst}: the conversion stopped: {error.strerror}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        with contextlib.suppress(OSError):
            free = shutil.disk_usage(dst.parent).free
            message += f"; the output has {format_size(nbytes)} ({nbytes} bytes), {free} are free"
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        message += "; give `flashllm convert` a DST that you may write to"
    if begun.exists():
        message += f"; {begun} is kept: run the same conversion again to go on, or remove it"
    return message


class _Conversion:
    """The steps, in order, in a locked partial directory."""

    def __init__(self, plan: ConversionPlan, partial: PartialDirectory, progress: Progress | None) -> None:
        self._plan = plan
        self._partial = partial
        self._progress = progress
        self._done_nbytes = 0
        self._files: dict[str, FileEntry] = {}
        self._checksums: list[NDArray[np.uint64]] = []  # of every `checksum_rows` rows, by layer
        self._table_checksums: list[NDArray[np.uint64]] = []  # of every row of per-layer embeddings
        self._layouts = plan.layouts
        self._together = checksum_rows(plan.layout, plan.architecture)
        self._rows = np.empty((plan.layout.stream_block_rows, plan.layout.stride), np.uint8)  # of any layer
        self._weights = Weights(plan)
        self._slices: SliceReader | None = None  # of experts that stay where they are

    def run(self, dst: Path, source_name: str) -> Manifest:
        """1. neurons, 2. per-layer embeddings, everything else, 3. predictors, 4. the manifest, 5. the name."""
        if self._plan.in_place is None:
            self._write_ffn()
        else:
            with SliceReader(self._plan.in_place, self._plan.architecture, self._plan.layout) as self._slices:
                self._write_ffn()
        self._write_table()
        self._write_resident()
        for path in self._plan.companions:
            self._copy(path)
        for name, content in self._plan.made.items():
            with self._file(name) as writer:
                self._write(writer, name, memoryview(content))
        if self._plan.own_predictors is not None:
            self._write_own_predictors(self._plan.own_predictors)
        elif self._plan.predictor_rank or self._plan.coded_gates:
            self._write_predictors()
        manifest = self._plan.manifest(self._files, source_name)
        manifest.save(self._partial.path)
        self._partial.publish(dst, {MANIFEST, *self._files})
        return manifest

    def _write_ffn(self) -> None:
        plan = self._plan
        with self._file(FFN, plan.ffn_nbytes) as writer:
            self._write(writer, FFN, memoryview(plan.ffn_header))
            self._resume(writer)
            for layer in range(len(self._checksums), plan.architecture.num_layers):
                checksums = self._lying_sums(layer)
                for rows in self._blocks(layer):
                    self._write(writer, FFN, rows.data)
                    checksums.append(row_checksums(rows, self._together[layer]))
                writer.sync()  # before the journal says so
                self._checksums.append(np.concatenate([np.empty(0, np.uint64), *checksums]))  # none without neurons
                self._partial.record(self._step(layer))
        if self._files[FFN].nbytes != plan.ffn_nbytes:
            raise AssertionError("the layout and the written rows disagree")

    def _step(self, layer: int) -> dict[str, Any]:
        """A finished layer's journal line. Its rows are represented by their checksums."""
        digest = hashlib.sha256(self._checksums[layer].data).hexdigest()
        layout = self._layouts[layer]
        return {"layer": layer, "nbytes": 0 if layout is None else layout.layer_nbytes, "checksums_sha256": digest}

    def _lying_sums(self, layer: int) -> list[NDArray[np.uint64]]:
        """The checksums of the layer's experts that stay where they are."""
        plan = self._plan
        if self._slices is None or plan.in_place is None or not plan.lying_experts(layer):
            return []
        where, name = (plan.in_place, plan.architecture, plan.layout), plan.checkpoint.path.name
        return [slice_sums(self._slices, where, layer, lambda nbytes: self._report(name, nbytes), plan.kept)]

    def _resume(self, writer: HashingWriter) -> None:
        """Reread the layers of earlier runs, as far as they are what the journal says."""
        for layout, together, step in zip(self._layouts, self._together, self._partial.steps, strict=False):
            mark, checksums = writer.mark(), self._lying_sums(len(self._checksums))
            if layout is not None:
                block = layout.block_in(self._rows)
                block = block[: len(block) // together * together]
                for first in range(0, layout.num_rows, len(block)):
                    rows = block[: layout.num_rows - first]
                    writer.reread(rows.reshape(-1).data)
                    checksums.append(row_checksums(rows, together))
            self._checksums.append(np.concatenate([np.empty(0, np.uint64), *checksums]))  # none without neurons
            if step != self._step(len(self._checksums) - 1):
                writer.rewind(mark)
                self._checksums.pop()
                break
            self._report(FFN, 0 if layout is None else layout.layer_nbytes)
        if len(self._checksums) != len(self._partial.steps):
            self._partial.restart_journal(self._plan.identity(), self._partial.steps[: len(self._checksums)])

    def _blocks(self, layer: int) -> Iterator[NDArray[np.uint8]]:
        """A layer's rows, uint8 [n, stride] at a time, zero rows at the end included. One buffer is used for all."""
        layout, done = self._layouts[layer], 0
        if layout is None:
            return
        block = layout.block_in(self._rows)
        for bundle in self._plan.bundles(layer):
            for rows in self._weights.bundle(bundle, layout, block):
                done += len(rows)
                yield rows
        for first in range(done, layout.num_rows, len(block)):
            rows = block[: layout.num_rows - first]
            rows[:] = 0
            yield rows

    def _write_table(self) -> None:
        """Per-layer embeddings, where the model has them."""
        table = self._plan.table
        if table is None:
            return
        with self._file(TABLE, self._plan.table_nbytes) as writer:
            self._write(writer, TABLE, memoryview(self._plan.table_header))
            for stored in self._weights.vectors(self._plan.claims[TOKEN_TABLE], table.encoding):
                rows = np.zeros((len(stored), table.stride), np.uint8)
                rows[:, : table.row_nbytes] = stored
                self._table_checksums.append(row_checksums(rows))
                self._write(writer, TABLE, rows.reshape(-1).data)

    def _write_resident(self) -> None:
        with self._file(RESIDENT, self._plan.resident_nbytes) as writer:
            self._write(writer, RESIDENT, memoryview(self._plan.resident_header))
            for entry in self._plan.resident:
                self._write_tensor(writer, entry)

    def _write_tensor(self, writer: HashingWriter, entry: ResidentEntry) -> None:
        if entry.name == TABLE_CHECKSUMS:
            self._write(writer, RESIDENT, np.concatenate(self._table_checksums).astype("<u8").data)
            return
        if entry.layer is not None and not entry.plane:
            self._write(writer, RESIDENT, self._checksums[entry.layer].astype("<u8").data)
            return
        for data in self._weights.resident(entry):
            self._write(writer, RESIDENT, data)

    def _write_own_predictors(self, predictors: OwnPredictors) -> None:
        with self._file(PREDICTORS) as writer:
            self._write(writer, PREDICTORS, memoryview(predictors.header(self._files[FFN].sha256)))
            for array in predictors.arrays():
                self._write(writer, PREDICTORS, array.data)

    def _write_predictors(self) -> None:
        with self._file(PREDICTORS) as writer:
            for data in made_predictors(self._plan, self._weights, self._files[FFN].sha256):
                self._write(writer, PREDICTORS, data)

    def _copy(self, path: Path) -> None:
        with self._file(path.name) as writer:
            for chunk in iterate_chunks(path):
                self._write(writer, path.name, memoryview(chunk))

    @contextlib.contextmanager
    def _file(self, name: str, nbytes: int = 0) -> Iterator[HashingWriter]:
        """A file of the directory, of `nbytes` where they are known; it is listed when it is written."""
        with HashingWriter(self._partial.path / name, preallocate=nbytes) as writer:
            yield writer
            self._files[name] = FileEntry(sha256=writer.finish(), nbytes=writer.position)

    def _write(self, writer: HashingWriter, what: str, data: memoryview) -> None:
        writer.write(data)
        self._report(what, data.nbytes)

    def _report(self, what: str, nbytes: int) -> None:
        self._done_nbytes += nbytes
        if self._progress is not None:
            self._progress(what, self._done_nbytes, self._plan.total_nbytes + self._plan.lying_nbytes)
