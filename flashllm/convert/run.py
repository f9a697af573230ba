"""From a Hugging Face checkpoint to a model directory whose FFN neurons can be read one by one.

Streams: memory holds one layer's down projection and a few blocks, whatever the model's size. Interruptible: run it
again and it goes on after the last finished layer, and the result is the same, byte for byte. What goes where was
decided by `conversion_plan`; knows no kernels and no model code.
"""

import contextlib
import errno
import hashlib
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import flashllm
from flashllm.arch.registry import Claim
from flashllm.base.dtypes import WEIGHT_DTYPES, WeightDtype, cast
from flashllm.base.files import CHUNK_NBYTES, HashingWriter, Progress, iterate_chunks
from flashllm.base.units import format_size
from flashllm.convert.checkpoint.coded import CodedWeights, Vectors
from flashllm.convert.checkpoint.opened import open_checkpoint
from flashllm.convert.checkpoint.source import Checkpoint, OwnPredictors
from flashllm.convert.pieces import read_rows
from flashllm.convert.placed import permutation_of, write_placed
from flashllm.convert.plan import ConversionPlan, GatePlace, ResidentEntry, plan_conversion
from flashllm.convert.untrained import coded_gate, coded_gates_header, untrained_header, untrained_predictor
from flashllm.errors import FlashIOError, UnsupportedModelError, UsageError
from flashllm.format.manifest import MANIFEST, PARTIAL_SUFFIX, FileEntry, Manifest, Source
from flashllm.format.model_files import FFN, PLACED, PREDICTORS, RESIDENT
from flashllm.format.partial import PartialDirectory, check_space, open_partial
from flashllm.format.predictors import margin_above, predictor_bytes
from flashllm.format.rows import CODED_ENCODINGS, RowEncoding, pack_rows, row_checksums
from flashllm.format.trace import Trace

Say = Callable[[str], None]


def convert(
    src: Path,
    dst: Path,
    *,
    dtype: str | None = None,
    encoding: str | None = None,
    resident_encoding: str | None = None,
    table_encoding: str | None = None,
    source_name: str | None = None,
    predictors: bool = False,
    gate: GatePlace = "rows",
    reorder: Trace | None = None,
    coded: CodedWeights | None = None,
    keep: bool = False,
    say: Say | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Convert the checkpoint `src` (a folder, or a GGUF file) into the new model directory `dst`; the manifest.

    `dtype` ("float32", "float16", "bfloat16") is the result's, by default the source's. `encoding` and
    `resident_encoding` (of `CODED_ENCODINGS`) store the rows and the resident matrices in fewer bits, `table_encoding`
    the embedding and the head, where they shall differ from other resident matrices. `source_name` is
    recorded (a hub id), by default the folder's name. With `predictors` untrained ones are made, so that the model can
    be used before better ones are trained (none for activations that are never zero); on one machine they too are the
    same byte for byte. With a "resident" `gate` the gates of a gated FFN stay in memory when the model runs, and name
    the active neurons exactly; rows are shorter by a third, and no predictors are made. With "4bit" the gates are in
    the rows, and in 4 bits in memory, where they are the predictors. With `reorder`, a trace of this model, the neurons
    are written a second time in the order in which they are best read (flashllm/format/placed.py). What `coded` holds
    is written as it is, and not encoded. With `keep`, and neither encodings nor `coded`, the weights of a quantised
    checkpoint keep their codes and scales (flashllm/convert/kept); `say` gets a line about it.

    Works in `dst`.partial, and resumes what it finds there.
    Raises UsageError (`dst` exists, `src` is no checkpoint, the trace is another model's), UnsupportedModelError,
    FormatError (`src` is damaged), FlashIOError (no space, a failed read or write). Never writes to `src`.
    """
    src = Path(src)
    name = source_name if source_name is not None else os.path.basename(os.path.abspath(src))
    _check_request(Path(dst), dtype, encoding, resident_encoding, table_encoding)
    with open_checkpoint(src) as checkpoint:
        return convert_checkpoint(
            checkpoint,
            dst,
            dtype=dtype,
            encoding=encoding,
            resident_encoding=resident_encoding,
            table_encoding=table_encoding,
            source_name=name,
            predictors=predictors,
            gate=gate,
            reorder=reorder,
            coded=coded,
            keep=keep,
            say=say,
            progress=progress,
        )


def convert_checkpoint(
    checkpoint: Checkpoint,
    dst: Path,
    *,
    dtype: str | None = None,
    encoding: str | None = None,
    resident_encoding: str | None = None,
    table_encoding: str | None = None,
    source_name: str,
    predictors: bool = False,
    gate: GatePlace = "rows",
    reorder: Trace | None = None,
    coded: CodedWeights | None = None,
    keep: bool = False,
    say: Say | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Convert an open checkpoint, which need not lie in files; otherwise as `convert`."""
    _check_request(dst, dtype, encoding, resident_encoding, table_encoding)
    plan = plan_conversion(
        checkpoint,
        dtype,
        encoding=encoding,
        resident_encoding=resident_encoding,
        table_encoding=table_encoding,
        predictors=predictors,
        gate=gate,
        reorder=reorder,
        coded=coded,
        keep=keep,
    )
    if plan.kept is not None and say is not None:
        say(plan.kept_line)
    with new_model_directory(dst, plan.identity(), plan.total_nbytes) as partial:
        return _Conversion(plan, partial, progress).run(Path(os.path.abspath(dst)), source_name)


@contextlib.contextmanager
def new_model_directory(dst: Path, identity: Mapping[str, Any], nbytes: int) -> Iterator[PartialDirectory]:
    """`dst`.partial, begun or resumed, for a model of `nbytes`. OSErrors become FlashIOErrors that say what to do."""
    dst = Path(os.path.abspath(dst))
    partial_path = dst.with_name(dst.name + PARTIAL_SUFFIX)
    try:
        check_space(dst.parent, partial_path, nbytes)
        with open_partial(partial_path, dst, identity) as partial:
            yield partial
    except OSError as error:
        raise FlashIOError(_explain(error, dst, partial_path, nbytes)) from error


def _check_request(dst: Path, dtype: str | None, *encodings: str | None) -> None:
    """Refuse before anything is opened. UsageError."""
    dst = Path(os.path.abspath(dst))
    if dtype is not None and dtype not in WEIGHT_DTYPES:
        raise UsageError(f"dtype {dtype!r} is not one of {', '.join(WEIGHT_DTYPES)}")
    for encoding in encodings:
        if encoding is not None and encoding not in CODED_ENCODINGS:
            raise UsageError(f"encoding {encoding!r} is not one of {', '.join(CODED_ENCODINGS)}")
    check_destination(dst)


def check_destination(dst: Path) -> None:
    """That a model directory can be made at `dst`, an absolute path. UsageError."""
    if os.path.lexists(dst):
        raise UsageError(f"{dst}: exists; remove it or choose another destination")
    if not dst.parent.is_dir():
        raise UsageError(f"{dst.parent}: there is no such directory")


def _explain(error: OSError, dst: Path, partial_path: Path, nbytes: int) -> str:
    message = f"{dst}: the conversion stopped: {error.strerror}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        with contextlib.suppress(OSError):
            free = shutil.disk_usage(dst.parent).free
            message += f"; the output has {format_size(nbytes)} ({nbytes} bytes), {free} are free"
    if partial_path.exists():
        message += f"; {partial_path} is kept: run the same conversion again to go on, or remove it"
    return message


class _Conversion:
    """The steps, in order, in a locked partial directory."""

    def __init__(self, plan: ConversionPlan, partial: PartialDirectory, progress: Progress | None) -> None:
        self._plan = plan
        self._partial = partial
        self._progress = progress
        self._done_nbytes = 0
        self._files: dict[str, FileEntry] = {}
        self._checksums: list[NDArray[np.uint64]] = []  # [num_rows] a layer
        layout = plan.layout
        self._rows = np.empty((layout.stream_block_rows, layout.stride), np.uint8)
        self._planes: dict[str, NDArray[Any]] = {}  # of the layer at hand
        self._down = np.empty((layout.d_model, 0), plan.dtype.storage)  # of all neurons of a layer, or of an expert

    def run(self, dst: Path, source_name: str) -> Manifest:
        """1. neurons, 2. everything else, 3. predictors, 4. the neurons reordered, 5. the manifest, 6. the name."""
        self._write_ffn()
        self._write_resident()
        for path in self._plan.companions:
            self._copy(path)
        for name, content in self._plan.made.items():
            with HashingWriter(self._partial.path / name) as writer:
                self._write(writer, name, memoryview(content))
                self._files[name] = FileEntry(sha256=writer.finish(), nbytes=writer.position)
        if self._plan.own_predictors is not None:
            self._write_own_predictors(self._plan.own_predictors)
        elif self._plan.predictor_rank or self._plan.coded_gates:
            self._write_predictors(self._plan.predictor_rank)
        if self._plan.reorder is not None:
            self._write_placed(self._plan.reorder)
        manifest = Manifest(
            flashllm_version=flashllm.__version__,
            architecture=self._plan.architecture,
            dtype=self._plan.dtype.name,
            rows=self._plan.layout,
            resident_encoding=self._plan.resident_encoding,
            other_encodings=self._plan.other_encodings,
            down_scales=self._plan.kept.down_scales if self._plan.kept is not None else (),
            activations=self._plan.activations,
            files=self._files,
            permutation=None if self._plan.reorder is None else permutation_of(self._plan.reorder),
            stream_block_rows=self._plan.layout.stream_block_rows,
            source=Source(name=source_name, dtype=self._plan.source_dtype.name),
        )
        manifest.save(self._partial.path)
        self._partial.publish(dst, {MANIFEST, *self._files})
        return manifest

    def _write_ffn(self) -> None:
        plan = self._plan
        with HashingWriter(self._partial.path / FFN, preallocate=plan.ffn_nbytes) as writer:
            self._write(writer, FFN, memoryview(plan.ffn_header))
            self._resume(writer)
            for layer in range(len(self._checksums), plan.architecture.num_layers):
                checksums = []
                for rows in self._blocks(layer):
                    self._write(writer, FFN, rows.data)
                    checksums.append(row_checksums(rows))
                writer.sync()  # before the journal says so
                self._checksums.append(np.concatenate(checksums))
                self._partial.record(self._step(layer))
            self._files[FFN] = FileEntry(sha256=writer.finish(), nbytes=writer.position)
        if self._files[FFN].nbytes != plan.ffn_nbytes:
            raise AssertionError("the layout and the written rows disagree")

    def _step(self, layer: int) -> dict[str, Any]:
        """A finished layer's journal line. Its rows are represented by their checksums."""
        digest = hashlib.sha256(self._checksums[layer].data).hexdigest()
        return {"layer": layer, "nbytes": self._plan.layout.layer_nbytes, "checksums_sha256": digest}

    def _resume(self, writer: HashingWriter) -> None:
        """Reread the layers of earlier runs, as far as they are what the journal says."""
        layout = self._plan.layout
        for step in self._partial.steps[: self._plan.architecture.num_layers]:
            mark, checksums = writer.mark(), []
            for first in range(0, layout.num_rows, len(self._rows)):
                rows = self._rows[: layout.num_rows - first]
                writer.reread(rows.reshape(-1).data)
                checksums.append(row_checksums(rows))
            self._checksums.append(np.concatenate(checksums))
            if step != self._step(len(self._checksums) - 1):
                writer.rewind(mark)
                self._checksums.pop()
                break
            self._report(FFN, layout.layer_nbytes)
        if len(self._checksums) != len(self._partial.steps):
            self._partial.restart_journal(self._plan.identity(), self._partial.steps[: len(self._checksums)])

    def _blocks(self, layer: int) -> Iterator[NDArray[np.uint8]]:
        """A layer's rows, uint8 [n, stride] at a time, zero rows at the end included. One buffer is used for all."""
        done = 0
        for bundle in self._plan.bundles(layer):
            for rows in self._bundle_blocks(bundle):
                done += len(rows)
                yield rows
        for first in range(done, self._plan.layout.num_rows, len(self._rows)):
            rows = self._rows[: self._plan.layout.num_rows - first]
            rows[:] = 0
            yield rows

    def _bundle_blocks(self, bundle: Mapping[str, Claim]) -> Iterator[NDArray[np.uint8]]:
        """The rows of the neurons of these matrices: of all of a layer, or of an expert."""
        layout, neurons = self._plan.layout, bundle["up"].rows
        sources = {matrix: self._vectors_of(matrix, bundle[matrix]) for matrix in layout.matrices}
        for first in range(0, neurons, len(self._rows)):
            rows = self._rows[: neurons - first]
            pack_rows(layout, {matrix: source(first, len(rows)) for matrix, source in sources.items()}, rows)
            yield rows

    def _vectors_of(self, matrix: str, claim: Claim) -> Callable[[int, int], NDArray[Any]]:
        """(first, count) -> a matrix's part of those neurons' rows, as it is stored."""
        encoding = self._plan.layout.encoding_of(matrix)
        if (vectors := self._coded(claim)) is not None:
            return vectors
        if matrix != "down":
            rows_of = self._rows_of(claim)
            return lambda first, count: self._stored(claim, encoding, rows_of(first, count))
        if self._down.shape[1] != claim.shape[1]:
            self._down = np.empty(claim.shape, self._plan.dtype.storage)
        for start, part in self._parts(claim):
            self._down[start : start + len(part)] = part
        return lambda first, count: self._stored(claim, encoding, self._down[:, first : first + count].T)

    def _coded(self, claim: Claim) -> Vectors | None:
        return None if self._plan.coded is None else self._plan.coded.vectors(claim.name)

    def _rows_of(self, claim: Claim) -> Callable[[int, int], NDArray[Any]]:
        """(first, count) -> those rows of a tensor in the result's dtype. A transposed one is read whole, once."""
        if not claim.part.transposed:
            return lambda first, count: self._read_rows(claim, first, count)
        whole = self._read_rows(claim, 0, claim.rows)
        return lambda first, count: whole[first : first + count]

    def _read_rows(self, claim: Claim, first: int, count: int) -> NDArray[Any]:
        """Rows of a tensor in the result's dtype."""
        name = self._plan.names[claim.source]
        source = self._plan.dtype_of(name)
        values = np.empty((count, *claim.shape[1:]), source.storage)
        read_rows(self._plan.checkpoint, name, claim, first, values)
        return self._cast(name, values, source)

    def _parts(self, claim: Claim) -> Iterator[tuple[int, NDArray[Any]]]:
        """(first row, rows in the result's dtype) of a whole tensor, a chunk at a time."""
        row_nbytes = math.prod(claim.shape[1:]) * self._plan.dtype_of(self._plan.names[claim.source]).itemsize
        together = claim.rows if claim.part.transposed else max(1, CHUNK_NBYTES // row_nbytes)
        for first in range(0, claim.rows, together):
            yield first, self._read_rows(claim, first, min(together, claim.rows - first))

    def _stored(self, claim: Claim, encoding: RowEncoding, values: NDArray[Any]) -> NDArray[Any]:
        """Vectors in the result's dtype as `encoding` stores them."""
        try:
            return encoding.stored(values, self._plan.dtype)
        except OverflowError as error:
            where = self._plan.checkpoint.where(self._plan.names[claim.source])
            raise UnsupportedModelError(f"{where}: {error}; leave these weights at 16 bits") from error

    def _cast(self, name: str, values: NDArray[Any], source: WeightDtype) -> NDArray[Any]:
        try:
            return cast(values, source, self._plan.dtype)
        except OverflowError as error:
            raise UnsupportedModelError(
                f"{self._plan.checkpoint.where(name)}: {error}; choose another dtype"
            ) from error

    def _write_resident(self) -> None:
        with HashingWriter(self._partial.path / RESIDENT, preallocate=self._plan.resident_nbytes) as writer:
            self._write(writer, RESIDENT, memoryview(self._plan.resident_header))
            for entry in self._plan.resident:
                self._write_tensor(writer, entry)
            self._files[RESIDENT] = FileEntry(sha256=writer.finish(), nbytes=writer.position)

    def _write_tensor(self, writer: HashingWriter, entry: ResidentEntry) -> None:
        if entry.plane:
            self._write(writer, RESIDENT, self._plane(entry).reshape(-1).view(np.uint8).data)
            return
        if entry.layer is not None:
            self._write(writer, RESIDENT, self._checksums[entry.layer].astype("<u8").data)
            return
        claim, encoding = self._plan.claims[entry.name], entry.encoding
        if encoding is None:
            raise AssertionError("weights have an encoding")
        vectors = self._coded(claim)
        if vectors is not None:
            together = max(1, CHUNK_NBYTES // (entry.nbytes // claim.rows))
            for first in range(0, claim.rows, together):
                stored = np.ascontiguousarray(vectors(first, min(together, claim.rows - first)))
                self._write(writer, RESIDENT, stored.reshape(-1).data)
            return
        for _, values in self._parts(claim):
            stored = np.ascontiguousarray(self._stored(claim, encoding, values))
            self._write(writer, RESIDENT, stored.reshape(-1).view(np.uint8).data)

    def _plane(self, entry: ResidentEntry) -> NDArray[Any]:
        """A tensor of scales of down columns. Those of a layer are read together."""
        if entry.name not in self._planes:
            assert self._plan.kept is not None
            assert entry.layer is not None
            self._planes = self._plan.kept.plane(entry.layer)
        return self._planes[entry.name]

    def _write_own_predictors(self, predictors: OwnPredictors) -> None:
        with HashingWriter(self._partial.path / PREDICTORS) as writer:
            self._write(writer, PREDICTORS, memoryview(predictors.header(self._files[FFN].sha256)))
            for array in predictors.arrays():
                self._write(writer, PREDICTORS, array.data)
            self._files[PREDICTORS] = FileEntry(sha256=writer.finish(), nbytes=writer.position)

    def _write_predictors(self, rank: int) -> None:
        plan = self._plan
        layout = plan.layout
        norm = plan.block.ffn_input_norm
        driver = "gate" if plan.architecture.gated else "up"
        with HashingWriter(self._partial.path / PREDICTORS) as writer:
            sha256 = self._files[FFN].sha256
            if plan.coded_gates:
                self._write(writer, PREDICTORS, memoryview(coded_gates_header(plan.architecture, sha256)))
            else:
                self._write(writer, PREDICTORS, memoryview(untrained_header(plan.architecture, rank, sha256)))
            for layer in range(plan.architecture.num_layers):
                drivers = [(self._rows_of(claims[driver]), claims[driver].rows) for claims in plan.bundles(layer)]

                def blocks(
                    drivers: Sequence[tuple[Callable[[int, int], NDArray[Any]], int]] = drivers,
                ) -> Iterator[NDArray[np.float32]]:
                    for rows_of, neurons in drivers:
                        for first in range(0, neurons, layout.stream_block_rows):
                            count = min(layout.stream_block_rows, neurons - first)
                            yield cast(rows_of(first, count), plan.dtype, WEIGHT_DTYPES["float32"])

                bias, (norm_weight, norm_bias) = self._driver_bias(layer, driver), self._norm(layer, norm)
                if plan.coded_gates:
                    codes, margin = coded_gate(blocks, bias, norm_weight, norm_bias, d_model=layout.d_model)
                    for stored in (margin_above(margin), codes):
                        self._write(writer, PREDICTORS, stored.reshape(-1).view(np.uint8).data)
                    continue
                predictor, threshold = untrained_predictor(
                    blocks, bias, norm_weight, norm_bias, d_model=layout.d_model, rank=rank
                )
                for array in predictor_bytes(predictor.a, predictor.b, predictor.bias, threshold):
                    self._write(writer, PREDICTORS, array.data)
            self._files[PREDICTORS] = FileEntry(sha256=writer.finish(), nbytes=writer.position)

    def _vector(self, name: str) -> NDArray[np.float32] | None:
        """A resident vector in fp32, by its canonical name; None where the model has none of that name."""
        if name not in self._plan.claims:
            return None
        parts = [
            cast(part, self._plan.dtype, WEIGHT_DTYPES["float32"]) for _, part in self._parts(self._plan.claims[name])
        ]
        return np.concatenate(parts)

    def _driver_bias(self, layer: int, driver: str) -> NDArray[np.float32] | None:
        """The bias with which a neuron fires above 0: its own, less FATReLU's threshold."""
        bias = self._vector(f"layers.{layer}.ffn.{driver}_bias")
        threshold = np.float32(self._plan.block.layer(layer).activation_threshold)
        if not threshold:
            return bias
        return (np.zeros(self._plan.layout.d_ff, np.float32) if bias is None else bias) - threshold

    def _norm(self, layer: int, name: str | None) -> tuple[NDArray[np.float32] | None, NDArray[np.float32] | None]:
        """Weight and bias of a layer's norm, as they are used; of None, as of a norm that has none."""
        weight, bias = (self._vector(f"layers.{layer}.{name}.{part}") for part in ("weight", "bias"))
        shift = np.float32(self._plan.block.norm_shift)
        return weight + shift if weight is not None and shift else weight, bias

    def _write_placed(self, trace: Trace) -> None:
        before = self._done_nbytes

        def report(what: str, done: int, total: int) -> None:
            self._report(what, before + done - self._done_nbytes)

        self._files[PLACED] = write_placed(self._partial.path, self._plan.layout, self._checksums, trace, report)

    def _copy(self, path: Path) -> None:
        with HashingWriter(self._partial.path / path.name) as writer:
            for chunk in iterate_chunks(path):
                self._write(writer, path.name, memoryview(chunk))
            self._files[path.name] = FileEntry(sha256=writer.finish(), nbytes=writer.position)

    def _write(self, writer: HashingWriter, what: str, data: memoryview) -> None:
        writer.write(data)
        self._report(what, data.nbytes)

    def _report(self, what: str, nbytes: int) -> None:
        self._done_nbytes += nbytes
        if self._progress is not None:
            self._progress(what, self._done_nbytes, self._plan.total_nbytes)
