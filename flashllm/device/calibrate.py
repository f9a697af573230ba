"""Measures the device profile of a drive and this machine.

That is: batches of direct random reads through each backend, alone and beside products; sequential reads; memory
bandwidth; products of resident weights and of gathered rows; what else a layer costs. Rounds go over all reads, so that
a busy neighbour slows every figure and not one. Stores nothing: see `flashllm.device.store`.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from flashllm import _core
from flashllm.base.dtypes import WEIGHT_DTYPES
from flashllm.base.files import Progress
from flashllm.base.units import format_size
from flashllm.device.costs import DeviceCosts
from flashllm.device.products import ResidentProducts, gathered_bps, resident_bps
from flashllm.device.reads import ReadOptions, ReadTimer, file_to_read
from flashllm.format.rows import MEASURED_ENCODINGS

# The products that run beside reads: arithmetic is their limit. Where memory is (those of 16-bit weights), a core that
# reads leaves bandwidth to the others, and a read takes two thirds of the time from them.
_BESIDE = "int4_32"
_SLICE_NBYTES = 16 << 20  # of their weights


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationOptions:
    """What is measured, and for how long. The defaults take under two minutes; smaller ones are for tests."""

    reads: ReadOptions = field(default_factory=ReadOptions)
    scratch_nbytes: int = 4 << 30
    dram_nbytes: int = 256 << 20
    gemv_nbytes: int = 512 << 20  # of weights
    read_s: float = 40.0
    memory_s: float = 2.0  # of each figure of memory and products
    rounds: int = 40  # at most

    def product_s(self, encoding: str) -> float:
        """For how long products of weights of one encoding are timed: coded ones, which are many, for less."""
        return self.memory_s if encoding in WEIGHT_DTYPES else self.memory_s / 4


def measure_device(
    path: Path,
    *,
    threads: int,
    options: CalibrationOptions,
    layer_overhead: Callable[[], float],
    progress: Progress | None = None,
) -> DeviceCosts:
    """The device profile of the drive on which `path` lies, and of this machine with `threads` compute threads.

    `layer_overhead` returns the seconds of a token, a layer, that neither reads nor weights explain. It runs a model,
    which this package cannot.

    FlashIOError where the drive cannot be read, or a scratch file not be written.
    """
    report = progress if progress is not None else lambda what, done, total: None
    total = options.rounds * (len(options.reads.sizes) + 2) + 4
    report("preparing a file to read", 0, total)
    with file_to_read(path, options.scratch_nbytes) as file:
        pool = _core.ThreadPool(threads)
        slices = max(2, options.gemv_nbytes // _SLICE_NBYTES)
        reads = ReadTimer(file, options.reads, ResidentProducts(_BESIDE, options.gemv_nbytes, pool, slices))
        again = reads.again()
        done = _read_rounds(reads, options, report, total)
        costs, sequential_bps, scatter = reads.costs(), statistics.median(reads.sequential_bps), reads.scatter()
        direct = reads.direct
        del reads  # and its memory
        report("memory", done, total)
        dram = _core.read_bandwidth(pool, options.dram_nbytes, options.memory_s)
        report("resident products", done + 1, total)
        gemv = {
            encoding: resident_bps(encoding, nbytes=options.gemv_nbytes, pool=pool, seconds=options.product_s(encoding))
            for encoding in MEASURED_ENCODINGS
        }
        report("products of gathered rows", done + 2, total)
        sparse = {
            encoding: gathered_bps(
                encoding, nbytes=options.gemv_nbytes, pool=pool, file=file, seconds=options.product_s(encoding)
            )
            for encoding in MEASURED_ENCODINGS
        }
    report("the demo model", done + 3, total)
    overhead = layer_overhead()
    report("done", done + 4, done + 4)
    return DeviceCosts(
        readers=costs,
        sequential_bps=sequential_bps,
        direct=direct,
        dram_bps=statistics.median(dram),
        gemv_bps=gemv,
        sparse_bps=sparse,
        layer_overhead_s=overhead,
        scatter=scatter,
        again=again,
        threads=threads,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _read_rounds(reads: ReadTimer, options: CalibrationOptions, report: Progress, total: int) -> int:
    """Rounds until the time is up, one at least; the steps done."""
    start, done = time.monotonic(), 0
    for round_ in range(options.rounds):
        for size in options.reads.sizes:
            if round_ > 0 and time.monotonic() - start > options.read_s:
                return done
            reads.alone(size)
            reads.beside(size)
            done += 1
            report(f"reads of {format_size(size)}", done, total)
        reads.gaps()
        report("gaps", done + 1, total)
        reads.sequential()
        done += 2
        report("sequential reads", done, total)
    return done
