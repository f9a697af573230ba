"""Rereads a whole model directory and says which bytes are not those of the conversion: file, layer, neuron.

Every listed file is hashed, from the device where the system lets us drop its cache. The rows of the FFN are compared
with their checksums too, which says where the damage is; so are experts that lie in another file. Repairs nothing.
"""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flashllm._core import xxh3_64_rows
from flashllm.base.files import Progress, drop_page_cache, iterate_chunks, open_for_reading, pread_bytes, pread_into
from flashllm.errors import FlashError
from flashllm.format.in_place import SliceReader
from flashllm.format.manifest import MANIFEST, Manifest, check_directory, open_model_dir, size_problem
from flashllm.format.model_files import (
    FFN,
    MODEL_CARD,
    RESIDENT,
    check_ffn_header,
    check_resident_header,
    checksums_tensor,
)
from flashllm.format.rows import row_checksums
from flashllm.format.safetensors import DATA_ALIGNMENT, MAX_HEADER_NBYTES, open_safetensors, read_header

MAX_LISTED_ROWS = 20  # of a file; the rest is counted
_ADVICE = "convert the model again or copy the file anew"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One finding. `layer` and `neuron` or `tensor` say where, as far as it is known."""

    file: str
    message: str
    layer: int | None = None
    neuron: int | None = None
    tensor: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """The outcome for the model directory `path`: how much was read, and every problem found."""

    path: str
    num_files: int
    nbytes: int
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


@dataclass(frozen=True, slots=True)
class _BadRow:
    layer: int
    row: int  # the neuron, or padding


def verify(path: Path, progress: Progress | None = None) -> VerifyReport:
    """Check every byte of the model directory `path`. UsageError where it is no model directory, FormatError where the
    manifest itself cannot be read; everything else is a problem in the report."""
    path = Path(path)
    return _Verification(path, open_model_dir(path, check_files=False), progress).run()


class _Verification:
    """One pass over the files."""

    def __init__(self, path: Path, manifest: Manifest, progress: Progress | None) -> None:
        self._path = path
        self._manifest = manifest
        self._progress = progress
        self._done_nbytes = 0
        self._total_nbytes = sum(entry.nbytes for entry in manifest.files.values())
        if manifest.in_place is not None:
            self._total_nbytes += manifest.in_place.nbytes
        self._problems: list[Problem] = []

    def run(self) -> VerifyReport:
        """Hash every file; then check what hashes cannot say."""
        damaged: set[str] = set()  # right size, wrong hash
        bad_rows: list[_BadRow] = []
        for name in sorted(self._manifest.files):
            problem = size_problem(self._path / name, self._manifest.files[name])
            if problem is not None:
                self._report(name, problem)
                continue
            try:
                chunks = self._row_chunks(bad_rows) if name == FFN else iterate_chunks(self._path / name)
                digest = self._hash(name, chunks)
            except FlashError as error:
                self._report(name, str(error))
                continue
            if digest != self._manifest.files[name].sha256:
                damaged.add(name)
        self._report_rows(bad_rows, damaged)
        self._check_lying(damaged)
        for name in sorted(damaged):
            self._report_damage(name, located=any(problem.file == name for problem in self._problems))
        self._check_unlisted()
        if not self._problems:
            self._check_contents()
        return VerifyReport(
            path=str(self._path.absolute()),
            num_files=len(self._manifest.files),
            nbytes=self._done_nbytes,
            problems=tuple(self._problems),
        )

    def _check_lying(self, damaged: set[str]) -> None:
        """Compare the experts that lie in another file with their checksums, as far as those are whole."""
        manifest, in_place = self._manifest, self._manifest.in_place
        if in_place is None or RESIDENT in damaged:
            return
        try:
            in_place.check_files(self._path)
            with SliceReader(in_place, manifest.architecture, manifest.rows) as reader:
                for layer in range(manifest.architecture.num_layers):
                    expected = self._recorded_checksums(layer)
                    if expected is not None and manifest.lying_experts(layer):
                        self._check_experts(reader, layer, expected)
        except FlashError as error:
            self._report(MANIFEST, str(error))

    def _check_experts(self, reader: SliceReader, layer: int, expected: NDArray[np.uint64]) -> None:
        unit, at = self._manifest.architecture.unit_rows, 0
        for expert in range(self._manifest.lying_experts(layer)):
            sums = []
            for path, _, _, stored in reader.expert(layer, expert):
                sums.append(xxh3_64_rows(stored.reshape(1, -1)))
                self._done_nbytes += stored.nbytes
                if self._progress is not None:
                    self._progress(path, self._done_nbytes, self._total_nbytes)
            if not np.array_equal(np.concatenate(sums), expected[at : at + len(sums)]):
                message = f"{path}: layer {layer}, expert {expert}: wrong checksum; get the file again"
                self._problems.append(Problem(file=path, message=message, layer=layer, neuron=expert * unit))
            at += len(sums)

    def _report(self, file: str, message: str) -> None:
        self._problems.append(Problem(file=file, message=message))

    def _hash(self, name: str, chunks: Iterator[bytes] | Iterator[memoryview]) -> str:
        sha256 = hashlib.sha256()
        for chunk in chunks:
            sha256.update(chunk)
            self._done_nbytes += len(chunk)
            if self._progress is not None:
                self._progress(name, self._done_nbytes, self._total_nbytes)
        return sha256.hexdigest()

    def _row_chunks(self, bad_rows: list[_BadRow]) -> Iterator[memoryview]:
        """The bytes of the neurons' file, checking every row on the way. Offsets come from the manifest: the header
        may be damaged."""
        path, layout, layouts = self._path / FFN, self._manifest.rows, self._manifest.stored_layouts
        data_start = self._manifest.files[FFN].nbytes - sum(each.layer_nbytes for each in layouts if each is not None)
        if not 0 < data_start <= MAX_HEADER_NBYTES + DATA_ALIGNMENT or data_start % DATA_ALIGNMENT:
            yield from (memoryview(chunk) for chunk in iterate_chunks(path))
            return
        buffer = np.empty((max(layout.stream_block_rows, self._manifest.checksum_rows), layout.stride), np.uint8)
        fd = open_for_reading(path)
        try:
            drop_page_cache(fd)
            yield memoryview(pread_bytes(fd, data_start, 0, path))
            offset = data_start
            for layer, stored in enumerate(layouts):
                if stored is None:
                    continue
                together = self._manifest.checksum_rows_of(layer)
                expected, ids = self._recorded_checksums(layer), np.arange(0, stored.num_rows, together)
                lying = self._manifest.lying_experts(layer) * self._manifest.architecture.unit_rows
                if expected is not None:  # those of the experts come first
                    expected = expected[len(expected) - len(ids) :]
                rows = stored.block_in(buffer)
                at_once = len(rows) // together * together
                for first in range(0, stored.num_rows, at_once):
                    block = rows[: min(at_once, stored.num_rows - first)]
                    data = block.reshape(-1).data
                    pread_into(fd, data, offset, path)
                    drop_page_cache(fd, offset, len(data))
                    offset += len(data)
                    if expected is not None:
                        block_ids = ids[first // together :][: -(-len(block) // together)]
                        wrong = block_ids[row_checksums(block, together) != expected[block_ids // together]]
                        bad_rows.extend(_BadRow(layer, lying + int(row)) for row in wrong)
                    yield data
            drop_page_cache(fd)
        finally:
            os.close(fd)

    def _recorded_checksums(self, layer: int) -> NDArray[np.uint64] | None:
        """A layer's checksums, uint64; None where the resident file cannot say (reported with that file)."""
        try:
            with open_safetensors(self._path / RESIDENT) as file:
                info = file.header.tensors.get(checksums_tensor(layer))
                if info is None or (info.dtype, info.shape) != ("U64", (self._manifest.checksums[layer],)):
                    return None
                return file.array(info)
        except FlashError:
            return None

    def _report_rows(self, bad_rows: list[_BadRow], damaged: set[str]) -> None:
        """Report rows unlike their checksums: the row is wrong where the file's hash is, else the checksum."""
        blamed = FFN if FFN in damaged else RESIDENT
        for bad in bad_rows[:MAX_LISTED_ROWS]:
            neuron = bad.row if bad.row < self._manifest.architecture.width(bad.layer) else None
            if blamed == RESIDENT:
                tensor = checksums_tensor(bad.layer)
                where = f"tensor {tensor}, item {bad.row // self._manifest.checksum_rows_of(bad.layer)} is wrong"
                self._problems.append(self._problem(RESIDENT, where, bad.layer, neuron, tensor))
            else:
                what = "padding row" if neuron is None else "neuron"
                num_rows = self._manifest.num_rows[bad.layer]
                last = min(bad.row + self._manifest.checksum_rows_of(bad.layer), num_rows) - 1
                rows = f"{what} {bad.row}" if last == bad.row else f"{what}s {bad.row} to {last}"
                where = f"layer {bad.layer}, {rows}: wrong checksum"
                self._problems.append(self._problem(FFN, where, bad.layer, neuron))
        if len(bad_rows) > MAX_LISTED_ROWS:
            self._report(blamed, f"{self._path / blamed}: and {len(bad_rows) - MAX_LISTED_ROWS} more rows")

    def _problem(self, name: str, where: str, layer: int, neuron: int | None, tensor: str | None = None) -> Problem:
        message = f"{self._path / name}: {where}; {_ADVICE}"
        return Problem(file=name, message=message, layer=layer, neuron=neuron, tensor=tensor)

    def _report_damage(self, name: str, *, located: bool) -> None:
        """Report a wrong hash, with what the header says about it."""
        where = f"{self._path / name}"
        try:
            if name == FFN:
                check_ffn_header(read_header(self._path / FFN), self._manifest.stored_layouts)
            elif name == RESIDENT:
                check_resident_header(read_header(self._path / RESIDENT), self._manifest.checksums)
        except FlashError as error:
            self._report(name, f"{error}; {_ADVICE}")
            return
        if located:
            return
        if name == FFN and self._recorded_checksums(0) is not None:
            where += ": in the header, as every row matches its checksum"
        self._report(name, f"{where}: the SHA-256 is not the one in {MANIFEST}; {_ADVICE}")

    def _check_unlisted(self) -> None:
        for name in sorted(os.listdir(self._path)):
            known = name in self._manifest.files or name in (MANIFEST, MODEL_CARD)
            if not known and not name.startswith("."):
                self._report(name, f"{self._path / name}: is not listed in {MANIFEST}; remove it")

    def _check_contents(self) -> None:
        """The hashes are right, the contents are not: an edited manifest, rows that never matched their checksums."""
        try:
            check_directory(self._path, self._manifest)
        except FlashError as error:
            self._report(MANIFEST, str(error))
