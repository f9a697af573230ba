"""Changes a model directory that is there: values of its manifest, and files, whose entries change with them.

One process at a time; a crash leaves a directory that loads. Knows the manifest, not what is in the files.
"""

import dataclasses
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from flashllm.base.files import HashingWriter, fsync_directory, iterate_chunks, locked_directory
from flashllm.format.manifest import Manifest, predictor_ranks
from flashllm.format.manifest_values import Calibration, FileEntry
from flashllm.format.model_files import PREDICTORS


def install_predictors(directory: Path, path: Path, calibration: Calibration | None = None) -> Manifest:
    """Put a copy of the predictor file `path` into the model directory and its manifest; the new manifest.

    `calibration`: activity statistics under these predictors; those under older ones are dropped with them.
    FormatError where the predictors belong to another model.
    """
    path = Path(path)
    predictor_ranks(path, Manifest.load(Path(directory)))
    return install_file(directory, PREDICTORS, iterate_chunks(path), check=predictor_ranks, calibration=calibration)


def change_manifest(directory: Path, **changes: Any) -> Manifest:
    """Put `changes` into the manifest of a model directory; the new manifest."""
    with locked_directory(directory, f"{directory}: another process is changing this model; try again later"):
        manifest = dataclasses.replace(Manifest.load(directory), **changes)
        manifest.save(directory)
        return manifest


def install_file(
    directory: Path,
    name: str,
    chunks: Iterable[bytes],
    *,
    check: Callable[[Path, Manifest], object] | None = None,
    **changes: Any,
) -> Manifest:
    """Put a file of these bytes into the model directory, its entry and `changes` into the manifest; the new manifest.

    `check` is called with the finished file under a temporary name, and raises where it must not be installed. A crash
    leaves the old file or none, never a directory that does not load: the manifest forgets the old file first.
    """
    directory = Path(directory)
    with locked_directory(directory, f"{directory}: another process is changing this model; try again later"):
        manifest = Manifest.load(directory)
        # 1. The new file's bytes are safe under another name.
        temporary = directory / f".{name}.tmp"
        with HashingWriter(temporary) as writer:
            for chunk in chunks:
                writer.write(memoryview(chunk))
            entry = FileEntry(sha256=writer.finish(), nbytes=writer.position)
        if check is not None:
            check(temporary, manifest)
        # 2. The manifest forgets the old file, 3. the file is replaced, 4. the manifest lists the new one.
        files = {other: old for other, old in manifest.files.items() if other != name}
        dataclasses.replace(manifest, files=files).save(directory)
        os.rename(temporary, directory / name)
        fsync_directory(directory)
        manifest = dataclasses.replace(manifest, files={**files, name: entry}, **changes)
        manifest.save(directory)
        return manifest
