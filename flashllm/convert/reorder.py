"""A converted model again, with its neurons also in the order in which they are best read.

The order is learned from a trace of the model's own activity, which only a converted model with predictors can record;
so this takes a model directory and makes another one: every listed file, byte for byte, and `placed.safetensors`.
Interruptible like a conversion, and like it never writes to its source.
"""

import dataclasses
import os
from pathlib import Path

import numpy as np

from flashllm.base.files import HashingWriter, Progress, iterate_chunks
from flashllm.convert.placed import Checksums, permutation_of, write_placed
from flashllm.convert.run import new_model_directory
from flashllm.errors import FormatError, UsageError
from flashllm.format.manifest import MANIFEST, Manifest, open_model_dir
from flashllm.format.manifest_values import FileEntry
from flashllm.format.model_files import MODEL_CARD, PLACED, RESIDENT, checksums_tensor
from flashllm.format.partial import PartialDirectory
from flashllm.format.placed import placed_nbytes
from flashllm.format.safetensors import open_safetensors
from flashllm.format.trace import Trace


def reorder(src: Path, dst: Path, trace: Trace, progress: Progress | None = None) -> Manifest:
    """Copy the model directory `src` to the new directory `dst`, its neurons placed by `trace`; the new manifest.

    An earlier placement is replaced. Raises UsageError (`dst` exists, `src` is no model directory, the trace is another
    model's), FormatError (`src` is damaged), FlashIOError (no space, a failed read or write).
    """
    src, dst = Path(src), Path(os.path.abspath(dst))
    if os.path.lexists(dst):
        raise UsageError(f"{dst}: exists; remove it or choose another destination")
    if not dst.parent.is_dir():
        raise UsageError(f"{dst.parent}: there is no such directory")
    manifest = open_model_dir(src)
    if manifest.architecture.experts:
        raise UsageError(f"{src}: a mixture of experts, whose neurons lie in the order in which they are read already")
    trace.check_model(manifest.architecture)
    files = _copied_files(manifest)
    identity = {"reorder": trace.fingerprint(), "files": {name: entry.sha256 for name, entry in files.items()}}
    with new_model_directory(dst, identity, _total_nbytes(src, manifest)) as partial:
        return _Reordering(src, manifest, partial, progress).run(dst, trace)


def _copied_files(manifest: Manifest) -> dict[str, FileEntry]:
    return {name: entry for name, entry in manifest.files.items() if name != PLACED}


def _total_nbytes(src: Path, manifest: Manifest) -> int:
    card = src / MODEL_CARD
    nbytes = card.stat().st_size if card.is_file() else 0
    nbytes += sum(entry.nbytes for entry in _copied_files(manifest).values())
    return nbytes + placed_nbytes(manifest.rows, manifest.architecture.num_layers)


class _Reordering:
    """The steps, in order, in a locked partial directory."""

    def __init__(self, src: Path, manifest: Manifest, partial: PartialDirectory, progress: Progress | None) -> None:
        self._src, self._manifest, self._partial, self._progress = src, manifest, partial, progress
        self._files = _copied_files(manifest)
        self._total_nbytes, self._done_nbytes = _total_nbytes(src, manifest), 0

    def run(self, dst: Path, trace: Trace) -> Manifest:
        """1. the files as they are, 2. the neurons reordered, 3. the manifest, 4. the name."""
        for name, entry in self._files.items():
            self._copy(name, entry)
        layout, copied = self._manifest.rows, self._done_nbytes

        def report(what: str, done: int, total: int) -> None:
            self._report(what, copied + done)

        placed = write_placed(self._partial.path, layout, self._checksums(), trace, report)
        files = {**self._files, PLACED: placed}
        manifest = dataclasses.replace(self._manifest, files=files, permutation=permutation_of(trace))
        manifest.save(self._partial.path)
        names = {MANIFEST, *manifest.files}
        if (self._src / MODEL_CARD).is_file():
            self._write(MODEL_CARD)
            names.add(MODEL_CARD)
        self._partial.publish(dst, names)
        return manifest

    def _copy(self, name: str, entry: FileEntry) -> None:
        """One file, unless an earlier run has finished it: the journal names those."""
        step = {"file": name, "sha256": entry.sha256}
        if step in self._partial.steps:
            self._report(name, self._done_nbytes + entry.nbytes)
            return
        if self._write(name) != entry.sha256:
            raise FormatError(
                f"{self._src / name}: is not what {MANIFEST} says (SHA-256); the model directory is damaged: check it "
                "with `flashllm verify`"
            )
        self._partial.record(step)

    def _write(self, name: str) -> str:
        """Copy a file; the SHA-256 of what was read."""
        with HashingWriter(self._partial.path / name) as writer:
            for chunk in iterate_chunks(self._src / name):
                writer.write(memoryview(chunk))
                self._report(name, self._done_nbytes + len(chunk))
            return writer.finish()

    def _checksums(self) -> list[Checksums]:
        checksums = []
        with open_safetensors(self._partial.path / RESIDENT) as file:
            for layer in range(self._manifest.architecture.num_layers):
                values = np.empty(self._manifest.rows.num_rows, "<u8")
                file.read_into(file.header.tensors[checksums_tensor(layer)], 0, values.view(np.uint8).data)
                checksums.append(values)
        return checksums

    def _report(self, what: str, done: int) -> None:
        self._done_nbytes = done
        if self._progress is not None:
            self._progress(what, done, self._total_nbytes)
