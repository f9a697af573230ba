"""The time of reads in rounds, each of which waits for the one before, through the engine's own reader."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flashllm import _core
from flashllm.errors import UsageError

REPEATS = 15
IO_THREADS = 32
_PIECE_NBYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Round:
    """Reads of `nbytes` each, at random distinct places."""

    count: int
    nbytes: int


class Drive:
    """A file read without the page cache; once in sequence before anything is timed, for drives that have memory of
    their own in front."""

    def __init__(self, path: Path) -> None:
        self._file = _core.DirectFile(str(path), direct=True)
        if not self._file.direct:
            raise UsageError(f"{path}: direct reads are not possible: {self._file.fallback_reason}")
        self._reader = _core.Reader(IO_THREADS)
        self._random = np.random.default_rng(0)
        for start in range(self._file.size // _PIECE_NBYTES):
            batch = self._batch(_PIECE_NBYTES, [start])
            batch.submit()
            batch.wait()

    def quartiles_of(self, ways: Sequence[Sequence[Round]]) -> list[list[float]]:
        """Seconds that the rounds of each way take, one after the other: [quartile, median, quartile] of REPEATS, in
        which the ways take turns."""
        seconds: list[list[float]] = [[] for _ in ways]
        for _ in range(REPEATS):
            for taken, rounds in zip(seconds, ways, strict=True):
                taken.append(sum(self._seconds(each) for each in rounds))
        return [statistics.quantiles(taken, n=4, method="inclusive") for taken in seconds]

    def _seconds(self, each: Round) -> float:
        if each.count == 0:
            return 0.0
        places = self._file.size // each.nbytes
        if each.count > places:
            raise UsageError(
                f"{self._file.path}: has no {each.count} places of {each.nbytes} bytes; give a larger file"
            )
        batch = self._batch(each.nbytes, self._random.choice(places, each.count, replace=False))
        started = time.perf_counter()
        batch.submit()
        batch.wait()
        return time.perf_counter() - started

    def _batch(self, nbytes: int, places: Sequence[int] | NDArray[np.int64]) -> _core.ReadBatch:
        """Reads of as many bytes each, at these multiples of them."""
        buffer = _core.allocate(len(places) * nbytes)
        batch = _core.ReadBatch(self._reader, self._file)
        for i, place in enumerate(places):
            batch.add(int(place) * nbytes, buffer[i * nbytes : (i + 1) * nbytes])
        return batch
