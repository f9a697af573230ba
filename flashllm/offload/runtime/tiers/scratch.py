"""Scratch files of the disk tier: of a stated size, preallocated, read and written past the page cache, gone on exit.

A file is unlinked as soon as it is open, so the system frees its bytes when the process ends, however it ends; names
under /proc, which O_TMPFILE would need for a second descriptor, are not needed. A kill can leave an empty directory,
or a file caught between being made and being unlinked: the directory is locked while its process lives, and the next
start removes those that nobody locks. It does not know what is stored.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashllm import _core
from flashllm.base.files import Closing
from flashllm.base.units import format_size
from flashllm.errors import FlashIOError

Bytes = NDArray[np.uint8]
Runs = Iterable[tuple[int, NDArray[Any]]]  # (offset, contiguous array), both in whole blocks of ALIGNMENT
ALIGNMENT = 4096  # of offsets, sizes and memory of direct transfers
READ_THREADS = 8  # large blocks: a few keep the drive busy and leave the processor to the products
REQUEST_NBYTES = 1 << 20  # of one read; larger ones gain nothing on the drives measured
WRITE_THREADS = 4
_PREFIX = "flashllm-scratch-"
MARGIN_NBYTES = 64 << 20  # stays free: a full file system is trouble for everyone on it


def round_up(nbytes: int) -> int:
    """`nbytes`, up to whole blocks of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def open_reader() -> _core.Reader:
    """The reader of the disk tier. FlashIOError where its threads cannot be started."""
    return _core.Reader(READ_THREADS, max_request=REQUEST_NBYTES)


class ScratchFile:
    """A preallocated file without a name, which threads write and read at once, in whole aligned runs. `file` is for a
    reader. FlashIOError where a transfer fails."""

    def __init__(self, path: Path, nbytes: int, reader: _core.Reader) -> None:
        """Creates `path`, which must not exist, and unlinks it. FlashIOError where it cannot have its bytes. `reader`
        is `read`'s."""
        self._reader = reader
        self.nbytes = max(round_up(nbytes), ALIGNMENT)
        self.bytes_read = self.bytes_written = 0
        self._lock = threading.Lock()
        self._writer = _core.DirectWriter(str(path), self.nbytes, WRITE_THREADS)
        try:
            self.file = _core.DirectFile(str(path))
        finally:
            path.unlink(missing_ok=True)

    def write(self, runs: Runs) -> None:
        """Write each (offset, array); returns when all are written. ValueError for one not in whole blocks of the file,
        before anything is written; what is written where a transfer fails is not known."""
        written = [(offset, bytes_of(array)) for offset, array in runs]
        self._writer.write(written)
        with self._lock:
            self.bytes_written += sum(array.nbytes for _, array in written)

    def read(self, runs: Runs) -> None:
        """Fill each (offset, array); returns when all are read."""
        batch, nbytes = _core.ReadBatch(self._reader, self.file), 0
        for offset, array in runs:
            batch.add(offset, bytes_of(array))
            nbytes += array.nbytes
        if nbytes:
            batch.submit()
            batch.wait()
        with self._lock:
            self.bytes_read += nbytes

    def close(self) -> None:
        """Close the file, which frees its bytes once no reader holds it either."""
        self._writer.close()


class Scratch(Closing):
    """A locked directory for scratch files of at most `nbytes` together, below `parent`; a context manager."""

    def __init__(self, parent: Path, nbytes: int) -> None:
        """Sweeps `parent` and checks its free space; `parent` is made where it is missing.

        FlashIOError where less is free than `nbytes`, with both numbers, or where nothing can be written.
        """
        self.nbytes = nbytes
        self._left = nbytes
        self._files: list[ScratchFile] = []
        try:
            parent.mkdir(parents=True, exist_ok=True)
            sweep(parent)
            check_space(parent, nbytes)
            self.path, self._lock = _locked_directory(parent)
        except OSError as error:
            message = f"{parent}: cannot hold scratch files: {error.strerror}; choose another folder"
            raise FlashIOError(message) from error

    def create(self, name: str, nbytes: int, reader: _core.Reader) -> ScratchFile:
        """A new file of `nbytes`, open until the directory is closed. ValueError beyond the stated size."""
        if round_up(nbytes) > self._left:
            raise ValueError(f"scratch file {name}: {nbytes} bytes; {self._left} of {self.nbytes} are left")
        file = ScratchFile(self.path / name, nbytes, reader)
        self._left -= file.nbytes
        self._files.append(file)
        return file

    def close(self) -> None:
        for file in self._files:
            file.close()
        self._files.clear()
        if self._lock >= 0:
            with contextlib.suppress(OSError):  # of an fstat, which `ignore_errors` lets pass; the next start sweeps
                shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def check_space(parent: Path, nbytes: int) -> None:
    """FlashIOError, with the numbers, unless the file system of `parent` has room for `nbytes` and a margin."""
    free = shutil.disk_usage(parent).free
    if nbytes and nbytes + MARGIN_NBYTES > free:
        raise FlashIOError(
            f"{parent}: the disk tier needs {format_size(nbytes)} ({nbytes} bytes) and {format_size(MARGIN_NBYTES)} "
            f"that stay free; {format_size(free)} ({free} bytes) are free. Free space, choose another scratch folder, "
            "or keep less on disk"
        )


def sweep(parent: Path) -> None:
    """Remove the scratch directories below `parent` that no living process locks."""
    for path in sorted(parent.glob(f"{_PREFIX}*")):
        with contextlib.suppress(OSError):  # another user's, or gone already
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
            finally:
                os.close(fd)


def _locked_directory(parent: Path) -> tuple[Path, int]:
    """A new directory and the descriptor that locks it. Made again where another start's sweep took it in between."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        with contextlib.suppress(FileNotFoundError, BlockingIOError):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.stat(path), os.fstat(fd)):
                    return path, fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)


def bytes_of(array: NDArray[Any]) -> Bytes:
    """The bytes of a contiguous array, as a view."""
    return array.reshape(-1).view(np.uint8)
