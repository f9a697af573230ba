"""Disk read and write rates of a folder, past the page cache where the file system allows it.

A transfer of a size is cut into pieces that several threads issue at once, as the disk tier will. No torch, no model.
"""

import errno
import mmap
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flashllm.errors import FlashIOError
from flashllm.offload.machine.curves import Sample, seconds_of

THREADS = 8
PIECE = 1 << 20  # bytes of one request; larger ones gain nothing on the devices measured
_ALIGN = 4096


@dataclass(frozen=True, slots=True)
class DiskProbe:
    """A scratch file, open for direct I/O where `direct` says so. Use `open_probe`."""

    fd: int
    nbytes: int
    direct: bool
    buffer: memoryview  # page-aligned, private to this probe
    pool: ThreadPoolExecutor

    def read(self, size: int, *, at_least_s: float = 0.1) -> Sample:
        """Seconds to read `size` bytes (a multiple of 4096, at most the file's) at a random aligned place."""
        return self._timed(size, at_least_s, write=False)

    def write(self, size: int, *, at_least_s: float = 0.1) -> Sample:
        """Seconds to overwrite `size` bytes at a random aligned place."""
        return self._timed(size, at_least_s, write=True)

    def _timed(self, size: int, at_least_s: float, *, write: bool) -> Sample:
        if size <= 0 or size % _ALIGN or size > min(self.nbytes, len(self.buffer)):
            raise ValueError(f"size {size} must be a multiple of {_ALIGN} up to {min(self.nbytes, len(self.buffer))}")

        def transfer() -> None:
            start = random.randrange(0, self.nbytes - size + 1, _ALIGN)
            if not (write or self.direct):  # or the page cache would be measured, not the disk
                os.posix_fadvise(self.fd, start, size, os.POSIX_FADV_DONTNEED)
            pieces = [(offset, min(PIECE, size - offset)) for offset in range(0, size, PIECE)]
            list(self.pool.map(lambda piece: self._piece(start, *piece, write=write), pieces))
            if write and not self.direct:
                os.fdatasync(self.fd)

        return Sample(size=size, units=size, seconds=seconds_of(transfer, at_least_s=at_least_s))

    def _piece(self, start: int, offset: int, nbytes: int, *, write: bool) -> None:
        view = self.buffer[offset : offset + nbytes]
        operation = os.pwritev if write else os.preadv
        moved = operation(self.fd, [view], start + offset)
        if moved != nbytes:
            raise FlashIOError(f"profile file: {moved} of {nbytes} bytes at {start + offset}; is the disk full?")


def _open(path: Path) -> tuple[int, bool]:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    if hasattr(os, "O_DIRECT"):
        try:
            return os.open(path, flags | os.O_DIRECT, 0o600), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            path.unlink(missing_ok=True)  # some file systems create the file before they refuse the flag
    return os.open(path, flags, 0o600), False


@contextmanager
def open_probe(folder: Path, *, nbytes: int, largest: int) -> Iterator[DiskProbe]:
    """A probe over a scratch file of `nbytes` in `folder`, written once and removed at the end.

    Transfers may be up to `largest` bytes. Raises FlashIOError with the reason when the file cannot be written.
    """
    path = folder / f".flashllm-profile-{os.getpid()}"
    try:
        fd, direct = _open(path)
    except OSError as error:
        raise FlashIOError(f"{folder}: cannot write a profile file: {error.strerror}; choose another folder") from None
    memory = mmap.mmap(-1, largest)
    try:
        memory.write(random.randbytes(min(largest, PIECE)) * (largest // min(largest, PIECE)))
        with ThreadPoolExecutor(THREADS) as pool, memoryview(memory) as view:
            probe = DiskProbe(fd, nbytes, direct, view, pool)
            for start in range(0, nbytes, largest):
                size = min(largest, nbytes - start)
                for offset in range(0, size, PIECE):
                    probe._piece(start, offset, min(PIECE, size - offset), write=True)
            os.fsync(fd)
            yield probe
    except OSError as error:
        raise FlashIOError(f"{path}: {error.strerror}; nothing was kept") from None
    finally:
        os.close(fd)
        path.unlink(missing_ok=True)
