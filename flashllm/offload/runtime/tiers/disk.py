"""A run's things on disk besides weights: a scratch file written and read in whole aligned runs."""

import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashllm import _core
from flashllm.offload.runtime.tiers.scratch import ScratchFile

Runs = Iterable[tuple[int, NDArray[Any]]]  # (offset, contiguous array), both in whole blocks of scratch.ALIGNMENT


class DiskFile:
    """A scratch file that threads write and read at once. FlashIOError where a transfer fails."""

    def __init__(self, file: ScratchFile, reader: _core.Reader) -> None:
        self._scratch, self._reader = file, reader
        self._lock = threading.Lock()
        self.bytes_read = self.bytes_written = 0

    def write(self, runs: Runs) -> None:
        """Write each (offset, array); returns when all are written."""
        nbytes = 0
        tickets: list[int] = []
        for offset, array in runs:
            tickets.append(self._scratch.start(offset, array.reshape(-1).view(np.uint8)))
            nbytes += array.nbytes
        self._scratch.wait(tickets)
        with self._lock:
            self.bytes_written += nbytes

    def read(self, runs: Runs) -> None:
        """Fill each (offset, array); returns when all are read."""
        nbytes = 0
        batch = _core.ReadBatch(self._reader, self._scratch.file)
        for offset, array in runs:
            batch.add(offset, array.reshape(-1).view(np.uint8))
            nbytes += array.nbytes
        if nbytes:
            batch.submit()
            batch.wait()
        with self._lock:
            self.bytes_read += nbytes
