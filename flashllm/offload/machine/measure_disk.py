"""Disk read and write rates of a folder, by the runtime's own reader and scratch files. No torch, no model."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flashllm import _core
from flashllm.offload.machine.curves import Sample, seconds_of
from flashllm.offload.runtime.tiers.scratch import ALIGNMENT, Bytes, Scratch, ScratchFile, open_reader


@dataclass(frozen=True, slots=True)
class DiskProbe:
    """A scratch file, written once, and memory to transfer from and to. Use `open_probe`."""

    file: ScratchFile
    reader: _core.Reader
    buffer: Bytes

    @property
    def direct(self) -> bool:
        """Whether transfers go past the page cache."""
        return self.file.direct

    def read(self, size: int, *, at_least_s: float = 0.1) -> Sample:
        """Seconds to read `size` bytes (a multiple of 4096, at most the file's) at a random aligned place."""
        self._check(size)
        return Sample(size=size, units=size, seconds=seconds_of(lambda: self.read_once(size), at_least_s=at_least_s))

    def write(self, size: int, *, at_least_s: float = 0.1) -> Sample:
        """Seconds to overwrite `size` bytes at a random aligned place."""
        self._check(size)

        def transfer() -> None:
            self.file.write(self._somewhere(size), self.buffer[:size])
            self.file.flush()

        return Sample(size=size, units=size, seconds=seconds_of(transfer, at_least_s=at_least_s))

    def read_once(self, size: int) -> None:
        """One read, as the runtime makes it: a batch that is split and waited for."""
        start = self._somewhere(size)
        self.file.drop_cached(start, size)  # or the page cache would be measured, not the disk
        batch = _core.ReadBatch(self.reader, self.file.file)
        batch.add(start, self.buffer[:size])
        batch.submit()
        batch.wait()

    def _check(self, size: int) -> None:
        most = min(self.file.nbytes, len(self.buffer))
        if size <= 0 or size % ALIGNMENT or size > most:
            raise ValueError(f"size {size} must be a multiple of {ALIGNMENT} up to {most}")

    def _somewhere(self, size: int) -> int:
        return random.randrange(0, self.file.nbytes - size + 1, ALIGNMENT)


@contextmanager
def open_probe(folder: Path, *, nbytes: int, largest: int) -> Iterator[DiskProbe]:
    """A probe over a scratch file of `nbytes` in `folder`, written once and gone at the end.

    Transfers may be up to `largest` bytes. Raises FlashIOError with the reason when the file cannot be written.
    """
    with Scratch(folder, nbytes) as scratch:
        file = scratch.create("profile", nbytes)
        buffer = _core.allocate(largest)
        buffer[:] = np.random.default_rng(0).integers(0, 256, largest, np.uint8)  # no drive compresses it away
        for start in range(0, file.nbytes, largest):
            file.write(start, buffer[: min(largest, file.nbytes - start)])
        file.flush()
        yield DiskProbe(file, open_reader(), buffer)
