"""Measures the profile of a drive and this machine: all of it, or in a few seconds what a run lacks.

That is: batches of direct random reads through each backend, alone and during products; sequential reads; writes;
memory bandwidth; products of resident weights and of gathered rows; how fast a file's blocks become rows; what else a
layer costs; what the throughput engine computes with. Rounds go over all reads, so that a busy neighbour slows every
figure and not one. What runs a model or batches is handed in: this package knows neither. Stores nothing: see
`flashllm.profile.store`.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flashllm import _core
from flashllm.base.dtypes import WEIGHT_DTYPES
from flashllm.base.files import Progress
from flashllm.base.machine import system_name
from flashllm.base.units import format_size
from flashllm.profile.machine import BatchRates, GpuRates, Profile
from flashllm.profile.products import ResidentProducts, blocks_wps, gathered_bps, resident_bps
from flashllm.profile.reads import ReadOptions, ReadTimer, write_curve

# The products that run during reads: arithmetic is their limit. Where memory is (those of 16-bit weights), a core that
# reads leaves bandwidth to the others, and a read takes two thirds of the time from them.
_BESIDE = "int4_32"
_SLICE_NBYTES = 16 << 20  # of their weights, at most
_TYPICAL_OVERHEAD_S = 3e-4  # of a token, a layer, where no model is run for it


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationOptions:
    """How much is measured, and for how long. The defaults take under two minutes, with what is handed in."""

    reads: ReadOptions = field(default_factory=ReadOptions)
    dram_nbytes: int = 256 << 20
    gemv_nbytes: int = 512 << 20  # of weights
    write_nbytes: int = 256 << 20
    read_s: float = 20.0
    memory_s: float = 1.0  # of each figure of memory and products
    rounds: int = 40  # at most

    def product_s(self, encoding: str) -> float:
        """For how long products of weights of one encoding are timed: coded ones, which are many, for less."""
        return self.memory_s if encoding in WEIGHT_DTYPES else self.memory_s / 2


QUICK = CalibrationOptions(
    reads=ReadOptions(
        sizes=(16 << 10, 64 << 10, 256 << 10, 1 << 20), requests=(4, 32), beside=48, batch_nbytes=8 << 20,
        gaps=(8 << 10, 32 << 10), pairs=24, again=1,
    ),
    dram_nbytes=64 << 20, gemv_nbytes=128 << 20, write_nbytes=32 << 20, read_s=1.0, memory_s=0.1,
)  # fmt: skip


def measure(
    file: Path,
    *,
    threads: int,
    encodings: Iterable[str],
    options: CalibrationOptions = QUICK,
    known: Profile | None = None,
    layer_overhead: Callable[[], float] | None = None,
    writes_in: Path | None = None,
    batches: Callable[[], Mapping[str, BatchRates]] | None = None,
    gpu: Callable[[], GpuRates | None] | None = None,
    progress: Progress | None = None,
) -> Profile:
    """The profile of the drive of `file`, which is read at random, and of this machine with `threads` compute threads.

    Args:
        encodings: of MEASURED_ENCODINGS, whose products are timed.
        known: a profile of the same drive and machine. Where it is fresh, what it has is not measured again; what is
            not measured is taken from it, unless the processor or the kernel is another one.
        layer_overhead: returns the seconds of a token, a layer, that neither reads nor weights explain.
        writes_in: a folder of the drive, whose writes are timed.
        batches, gpu: return what the throughput engine computes with.

    FlashIOError where the drive cannot be read.
    """
    report = progress if progress is not None else lambda what, done, total: None
    total, done = options.rounds * (len(options.reads.sizes) + 2) + 6, 0

    def step(what: str) -> None:
        nonlocal done
        done += 1
        report(what, done, total)

    system, file_nbytes, pool = system_name(), file.stat().st_size, _core.ThreadPool(threads)
    found: dict[str, Any] = {"layer_overhead_s": _TYPICAL_OVERHEAD_S, "gemv_bps": {}, "sparse_bps": {}, "batches": {}}
    fresh = False
    if known is not None and known.system == system:
        fresh = known.is_fresh(system, file_nbytes)
        found = {one.name: getattr(known, one.name) for one in dataclasses.fields(known)}
    found |= {"system": system, "threads": threads}
    if not fresh:
        found |= _drive(file, pool, options, step)
        step("memory")
        found["dram_bps"] = statistics.median(_core.read_bandwidth(pool, options.dram_nbytes, options.memory_s))
        found["blocks_wps"] = blocks_wps(nbytes=options.dram_nbytes, seconds=options.memory_s / 2)
        found |= {"file_nbytes": file_nbytes, "made": datetime.now(UTC).isoformat(timespec="seconds")}
    step("products")
    for encoding in encodings:
        if fresh and encoding in found["gemv_bps"]:
            continue
        nbytes, seconds = options.gemv_nbytes, options.product_s(encoding)
        resident = resident_bps(encoding, nbytes=nbytes, pool=pool, seconds=seconds)
        gathered = gathered_bps(encoding, nbytes=nbytes, pool=pool, file=file, seconds=seconds)
        found["gemv_bps"] = {**found["gemv_bps"], encoding: resident}
        found["sparse_bps"] = {**found["sparse_bps"], encoding: gathered}
    if layer_overhead is not None:
        step("the demo model")
        found["layer_overhead_s"] = layer_overhead()
    if writes_in is not None:
        step("writes")
        found["writes"] = write_curve(writes_in, options.write_nbytes)
    if batches is not None:
        step("batches")
        found["batches"] = {**found["batches"], **batches()}
    if gpu is not None:
        step("the GPU")
        found["gpu"] = gpu()
    report("done", done, done)
    return Profile(**found)


def _drive(
    file: Path, pool: _core.ThreadPool, options: CalibrationOptions, step: Callable[[str], None]
) -> dict[str, Any]:
    """Costs of a file's reads, as the fields of a profile."""
    slices = max(2, options.gemv_nbytes // _SLICE_NBYTES)
    reads = ReadTimer(file, options.reads, ResidentProducts(_BESIDE, options.gemv_nbytes, pool, slices))
    again, start = reads.again(), time.monotonic()

    def over() -> bool:
        return time.monotonic() - start > options.read_s

    for round_ in range(options.rounds):
        for size in options.reads.sizes:
            # What is measured at one size suffices for costs: a drive too slow for more is not waited for.
            if over() and (round_ or size > options.reads.sizes[0]):
                break
            reads.alone(size)
            reads.beside(size)
            step(f"reads of {format_size(size)}")
        if over():
            break
        reads.gaps()
        step("gaps")
        reads.sequential()
        step("sequential reads")
    return {
        "readers": reads.costs(),
        "sequential_bps": reads.sequential_bps,
        "direct": reads.direct,
        "scatter": reads.scatter(),
        "again": again,
    }
