"""Changes a model directory that is there: values of its manifest, and files, whose entries change with them.

One process at a time; a crash leaves a directory that loads. Knows the manifest, and of the files what it checks.
"""

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flashllm.base.files import HashingWriter, fsync_directory, iterate_chunks, locked_directory
from flashllm.format.manifest import Manifest, predictor_ranks
from flashllm.format.manifest_values import Calibration, FileEntry
from flashllm.format.model_files import POPULARITY, PREDICTORS


def install_predictors(
    directory: Path, path: Path, calibration: Calibration | None = None, popularity: Iterable[bytes] | None = None
) -> Manifest:
    """Put a copy of the predictor file `path` into the model directory and its manifest; the new manifest.
    `calibration`, `popularity` (the file's bytes): activity statistics under these predictors; those under older ones
    are dropped with them. FormatError where the predictors belong to another model."""
    path = Path(path)
    predictor_ranks(path, Manifest.load(Path(directory)))
    files = {PREDICTORS: iterate_chunks(path), POPULARITY: popularity}
    return install_files(directory, files, calibration=calibration)


def change_manifest(directory: Path, **changes: Any) -> Manifest:
    """Put `changes` into the manifest of a model directory; the new manifest."""
    return install_files(directory, {}, **changes)


def install_files(directory: Path, files: Mapping[str, Iterable[bytes] | None], **changes: Any) -> Manifest:
    """Put files of these bytes into the model directory, their entries and `changes` into the manifest; the new
    manifest. A file whose bytes are None is removed.

    Predictors are checked before anything is replaced: FormatError where they are another model's. A crash leaves the
    old files or none of them, never a directory that does not load: the manifest forgets the old files first.
    """
    directory = Path(directory)
    with locked_directory(directory, f"{directory}: another process is changing this model; try again later"):
        manifest = Manifest.load(directory)
        # 1. The new files' bytes are safe under other names.
        entries: dict[str, FileEntry] = {}
        for name, chunks in files.items():
            if chunks is None:
                continue
            with HashingWriter(_temporary(directory, name)) as writer:
                for chunk in chunks:
                    writer.write(memoryview(chunk))
                entries[name] = FileEntry(sha256=writer.finish(), nbytes=writer.position)
        if PREDICTORS in entries:
            predictor_ranks(_temporary(directory, PREDICTORS), manifest)
        # 2. The manifest forgets the old files, 3. they are replaced, 4. the manifest lists the new ones.
        kept = {name: entry for name, entry in manifest.files.items() if name not in files}
        if files:
            dataclasses.replace(manifest, files=kept).save(directory)
            for name in files:
                if name in entries:
                    os.rename(_temporary(directory, name), directory / name)
                else:
                    (directory / name).unlink(missing_ok=True)
            fsync_directory(directory)
        manifest = dataclasses.replace(manifest, files={**kept, **entries}, **changes)
        manifest.save(directory)
        return manifest


def _temporary(directory: Path, name: str) -> Path:
    return directory / f".{name}.tmp"
