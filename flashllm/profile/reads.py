"""Times direct random reads as the engine issues them: a batch of scattered requests of one size, then a barrier;
alone, and during products on all cores. Also pairs of reads with a gap between them, reads in sequence, and writes.
"""

import contextlib
import fcntl
import os
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from io import RawIOBase
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flashllm import _core
from flashllm.base.files import drop_page_cache
from flashllm.base.units import format_size
from flashllm.config import Backend
from flashllm.errors import FlashIOError
from flashllm.format.manifest import MANIFEST
from flashllm.format.model_files import FFN
from flashllm.profile.choice import backends, open_reader
from flashllm.profile.costs import (
    BatchSample,
    BesideSample,
    GapSample,
    ReaderChoice,
    ReaderCosts,
    fit_reader,
    scatter_of,
)
from flashllm.profile.machine import LEAST_FILE
from flashllm.profile.products import ResidentProducts
from flashllm.profile.rates import RateCurve, Sample, curve_of, sample_rounds, seconds_of

_WRITES = tuple((64 << 10) << 2 * i for i in range(5))  # bytes of a write: 64 KiB to 16 MiB
_WRITE_ROUNDS, _WRITE_S = 3, 0.05
_BLOCK = 4096  # of direct writes
_SCRATCH = ".flashllm-calibrate-"  # and the process that reads the file
_DISK_MARGIN = 1 << 30  # bytes that stay free


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    sizes: tuple[int, ...] = tuple(4096 << i for i in range(9))  # bytes of a request: 4 KiB to 1 MiB
    requests: tuple[int, ...] = (8, 64, 256)  # of a batch
    beside: int = 512  # requests of a batch during products
    batch_nbytes: int = 64 << 20  # at most
    gaps: tuple[int, ...] = (4096, 8192, 16384, 32768)  # bytes between two rows
    pairs: int = 128  # of rows, with a gap between them: as many requests as a layer's, several times a queue's depth
    again: int = 5  # batches that are read a second time

    def __post_init__(self) -> None:
        for name in ("sizes", "requests", "gaps"):
            values = getattr(self, name)
            if len(values) == 0 or list(values) != sorted(set(values)) or values[0] < 1:
                raise ValueError(f"{name} must be ascending, from 1, not {values}")


@contextlib.contextmanager
def file_to_read(path: Path, nbytes: int) -> Iterator[Path]:
    """A file on the drive of `path` to read at random: `path`, or the neurons' file of the model directory that it is,
    where that is large enough, else a scratch file of `nbytes`, removed at the end, also of a run that was interrupted.
    One that a killed process left there is removed, too.

    FlashIOError where there is no room, or the file cannot be written.
    """
    own = path / FFN if (path / MANIFEST).exists() else path
    if own.is_file() and own.stat().st_size >= LEAST_FILE:
        yield own
        return
    folder = path if path.is_dir() else path.parent
    _sweep(folder)
    scratch = folder / f"{_SCRATCH}{os.getpid()}"
    free = shutil.disk_usage(folder).free
    if free < nbytes + _DISK_MARGIN:
        raise FlashIOError(
            f"{folder}: {format_size(free)} are free, but a scratch file of {format_size(nbytes)} is needed for a "
            "minute; free some space, or name a folder elsewhere on the same drive"
        )
    try:
        with scratch.open("xb", buffering=0) as file:
            with contextlib.suppress(OSError):  # of a file system that cannot lock, nothing is swept
                fcntl.flock(file, fcntl.LOCK_EX)
            _write_scratch(file, nbytes)
            yield scratch
    except OSError as error:
        raise FlashIOError(f"{scratch}: {error.strerror}; nothing was kept") from error
    finally:
        scratch.unlink(missing_ok=True)


def write_curve(folder: Path, nbytes: int, among: Sequence[int] = _WRITES) -> RateCurve | None:
    """Direct writes to a file of `nbytes` in `folder`, at random places, bytes a second over bytes of one, `among` as
    many as fit; None where there is no room for the file, or it cannot be written directly. It is written whole before,
    and gone at the end."""
    path = folder / f".flashllm-writes-{os.getpid()}"
    sizes = [size for size in among if size <= nbytes]
    buffer = _core.allocate(sizes[-1])
    buffer[:] = np.random.default_rng(0).integers(0, 256, len(buffer), np.uint8)  # no drive compresses it away
    random = np.random.default_rng(0)
    try:
        if shutil.disk_usage(folder).free < nbytes + _DISK_MARGIN:
            return None
        writer = _core.DirectWriter(str(path), nbytes)
    except (OSError, FlashIOError):
        return None
    path.unlink(missing_ok=True)  # its bytes go with the process, however that ends

    def write(size: int) -> Sample:
        def once() -> None:
            place = int(random.integers(0, nbytes - size + 1)) // _BLOCK * _BLOCK
            writer.write([(place, buffer[:size])])

        return Sample(size=size, units=size, seconds=seconds_of(once, at_least_s=_WRITE_S))

    try:
        if not writer.direct:
            return None  # the page cache's rates say nothing of the drive
        for start in range(0, nbytes, len(buffer)):
            writer.write([(start, buffer[: nbytes - start])])
        return curve_of(sample_rounds({"writes": (write, sizes)}, rounds=_WRITE_ROUNDS)["writes"])
    except FlashIOError:
        return None
    finally:
        writer.close()


def _write_scratch(file: RawIOBase, nbytes: int) -> None:
    """Bytes that no file system can compress, on the drive and out of the page cache."""
    block = np.random.default_rng(0).bytes(min(nbytes, 16 << 20))
    for start in range(0, nbytes, len(block)):
        file.write(block[: nbytes - start])
        os.fsync(file.fileno())
        drop_page_cache(file.fileno(), start, len(block))


def _sweep(folder: Path) -> None:
    """Remove scratch files that no process holds."""
    for path in folder.glob(f"{_SCRATCH}*"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def batch_of(
    reader: _core.Reader, file: _core.DirectFile, offsets: NDArray[np.int64], size: int, memory: NDArray[np.uint8]
) -> _core.ReadBatch:
    """Reads of `size` bytes into `memory`, to be submitted. The page cache forgets a file that is not read directly."""
    if not file.direct:
        fd = os.open(file.path, os.O_RDONLY)
        drop_page_cache(fd)
        os.close(fd)
    batch = _core.ReadBatch(reader, file)
    for slot, offset in enumerate(offsets.tolist()):
        batch.add(offset, memory[slot * size : (slot + 1) * size])
    return batch


def batch_s(
    reader: _core.Reader, file: _core.DirectFile, offsets: NDArray[np.int64], size: int, memory: NDArray[np.uint8]
) -> float:
    """Seconds that the reads of `batch_of` take."""
    batch = batch_of(reader, file, offsets, size, memory)
    start = time.perf_counter()
    batch.submit()
    batch.wait()
    return time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class _Measured:
    """A backend and its samples."""

    backend: Backend
    depth: int
    reader: _core.Reader
    merging: _core.Reader  # reads through any gap that is measured
    batches: list[BatchSample] = field(default_factory=list)
    beside: list[BesideSample] = field(default_factory=list)
    gaps: list[GapSample] = field(default_factory=list)


class ReadTimer:
    """Batches of reads from one file through all backends; `products` run during some of them."""

    def __init__(self, path: Path, options: ReadOptions, products: ResidentProducts) -> None:
        self._file = _core.DirectFile(str(path))
        self._options, self._products = options, products
        self._memory = _core.allocate(max(options.batch_nbytes, options.sizes[-1]))
        self._random = np.random.default_rng(0)
        self.direct = self._file.direct
        self._measured = [
            _Measured(backend, depth, self._open(backend, depth, 0), self._open(backend, depth, options.gaps[-1]))
            for backend, depth in backends()
        ]
        self._sequential: list[float] = []  # bytes a second

    def _open(self, backend: Backend, depth: int, max_gap: int) -> _core.Reader:
        choice = ReaderChoice(backend=backend, depth=depth, max_gap=max_gap, source="argument")
        return open_reader(choice, max_request=max(self._options.sizes[-1], 4096))

    def again(self) -> float:
        """Time of a first read of some places ÷ time of a second one. Measured before anything else, while the file
        has not been read for long."""
        size = self._options.sizes[0]
        gains = []
        for _ in range(self._options.again):
            offsets = self._scattered(min(self._options.beside, self._most(size)), size)
            first, second = (self._timed(self._measured[-1].reader, offsets, size).wall_s for _ in range(2))
            gains.append(first / second)
        return statistics.median(gains)

    def alone(self, size: int) -> None:
        """One batch of each length at `size` through each backend."""
        for one in self._measured:
            for requests in self._options.requests:
                if requests > self._most(size):
                    break
                one.batches.append(self._timed(one.reader, self._scattered(requests, size), size))

    def beside(self, size: int) -> None:
        """One batch at `size` through each backend while products run, and as many products without."""
        requests, products = min(self._options.beside, self._most(size)), self._products
        for one in self._measured:
            batch = batch_of(one.reader, self._file, self._scattered(requests, size), size, self._memory)
            products.pool.set_side_work(one.reader)
            start, slices = time.perf_counter(), 0
            batch.submit()
            while not batch.poll():
                products.slice()
                slices += 1
            wall_s = time.perf_counter() - start
            batch.wait()
            # As many as ran during reads, and at least all slices: the time of a few would be noise.
            start, without = time.perf_counter(), max(slices, len(products))
            for _ in range(without):
                products.slice()
            alone_s = (time.perf_counter() - start) * slices / without
            one.beside.append(
                BesideSample(requests=requests, nbytes=size, wall_s=wall_s, lost_s=wall_s - alone_s if slices else 0.0)
            )

    def gaps(self) -> None:
        """Pairs of rows at each gap, read apart and through, by each backend; other pairs each time, as a place that
        was read a moment ago comes from a cache we cannot see."""
        row = self._options.sizes[0]
        apart = 2 * row + 2 * self._options.gaps[-1]  # no two pairs are near enough to be read as one
        pairs = min(self._options.pairs, self._file.size // apart // 2)
        for one in self._measured:
            for gap in self._options.gaps:
                starts = self._random.choice(self._file.size // apart, 2 * pairs, replace=False) * apart
                offsets = np.stack([starts, starts + row + gap], axis=1)
                two, through = (
                    self._timed(reader, offsets[part::2].reshape(-1), row).wall_s
                    for part, reader in enumerate((one.reader, one.merging))
                )
                one.gaps.append(GapSample(gap_nbytes=gap, apart_s=two, through_s=through))

    def sequential(self) -> None:
        """A batch's bytes in sequence, through each backend; keeps the best rate."""
        size = self._options.sizes[-1]
        count = max(1, min(self._memory.nbytes, self._file.size) // size // 2)
        first = int(self._random.integers(0, self._file.size // size - count + 1))
        offsets = np.arange(first, first + count) * size
        timed = [self._timed(one.reader, offsets, size) for one in self._measured]
        self._sequential.append(count * size / min(sample.wall_s for sample in timed))

    @property
    def sequential_bps(self) -> float:
        """The median rate of reads in sequence; of the best batch where there was no time for them."""
        batches = (sample for one in self._measured for sample in one.batches)
        return statistics.median(
            self._sequential or [max(sample.requests * sample.nbytes / sample.wall_s for sample in batches)]
        )

    def _most(self, size: int) -> int:
        """Requests of `size` that a batch can hold."""
        return min(self._file.size, self._memory.nbytes) // size

    def _scattered(self, requests: int, size: int) -> NDArray[np.int64]:
        return self._random.choice(self._file.size // size, requests, replace=False) * size

    def _timed(self, reader: _core.Reader, offsets: NDArray[np.int64], size: int) -> BatchSample:
        wall_s = batch_s(reader, self._file, offsets, size, self._memory)
        return BatchSample(requests=len(offsets), nbytes=size, wall_s=wall_s)

    def costs(self) -> tuple[ReaderCosts, ...]:
        return tuple(
            fit_reader(one.batches, one.beside, one.gaps, backend=one.backend, depth=one.depth)
            for one in self._measured
        )

    def scatter(self) -> float:
        return max(scatter_of(one.batches) for one in self._measured)
