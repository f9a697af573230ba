"""Measures a drive and this machine: what batches of direct random reads cost through each backend, alone and beside
products, sequential reads, memory bandwidth, the rates of resident products and of gathered rows, and what else a layer
costs.

Rounds go over all reads, so that a busy neighbour slows every figure and not one. Stores nothing: see `device_store`.
"""

import statistics
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch
from transformers import AutoTokenizer

from flashllm import _core
from flashllm.arch.registry import spec_of
from flashllm.base.dtypes import WEIGHT_DTYPES
from flashllm.base.files import Progress
from flashllm.base.units import format_size
from flashllm.convert.locate import demo_path
from flashllm.device.costs import DeviceCosts
from flashllm.device.products import ResidentProducts, gathered_bps, resident_bps
from flashllm.device.reads import ReadOptions, ReadTimer, file_to_read
from flashllm.generate.session import SamplingOptions, Session, TokenRecord
from flashllm.hf.model import FlashModel

_EVICTING_NBYTES = 64 << 20  # about what a large model's layer touches
_SLICE_NBYTES = 16 << 20  # of the weights whose products run beside reads
_PROMPT = "Once upon a time there was a little dog who lived in a house by the sea."


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
    demo_tokens: int = 100


def measure_device(
    path: Path, *, threads: int, options: CalibrationOptions, progress: Progress | None = None
) -> DeviceCosts:
    """The costs of the drive on which `path` lies, and of this machine with `threads` compute threads.

    FlashIOError where the drive cannot be read, or a scratch file not be written.
    """
    report = progress if progress is not None else lambda what, done, total: None
    total = options.rounds * (len(options.reads.sizes) + 2) + 4
    report("preparing a file to read", 0, total)
    with file_to_read(path, options.scratch_nbytes) as file:
        pool = _core.ThreadPool(threads)
        slices = max(2, options.gemv_nbytes // _SLICE_NBYTES)
        reads = ReadTimer(file, options.reads, ResidentProducts("bfloat16", options.gemv_nbytes, pool, slices))
        again = reads.again()
        done = _read_rounds(reads, options, report, total)
        costs, sequential_bps, scatter = reads.costs(), statistics.median(reads.sequential_bps), reads.scatter()
        direct = reads.direct
        del reads  # and its memory
        report("memory", done, total)
        dram = _core.read_bandwidth(pool, options.dram_nbytes, options.memory_s)
        report("resident products", done + 1, total)
        gemv = {
            dtype: resident_bps(dtype, nbytes=options.gemv_nbytes, pool=pool, seconds=options.memory_s)
            for dtype in WEIGHT_DTYPES
        }
        report("products of gathered rows", done + 2, total)
        sparse = {
            dtype: gathered_bps(dtype, nbytes=options.gemv_nbytes, pool=pool, file=file, seconds=options.memory_s)
            for dtype in WEIGHT_DTYPES
        }
    report("the demo model", done + 3, total)
    overhead = _layer_overhead_s(threads, options.demo_tokens)
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


def _layer_overhead_s(threads: int, tokens: int) -> float:
    """Seconds of a token that are neither reads nor bytes, a layer: of the demo model, whose weights fit any cache.

    A large model's weights push the interpreter and our own code out of the processor's caches at every layer; here
    other memory does.
    """
    others, evicting_s = torch.zeros(_EVICTING_NBYTES // 8, dtype=torch.int64), [0.0]

    def evict(*_: object) -> None:
        start = time.perf_counter()
        others.sum()
        evicting_s[0] += time.perf_counter() - start

    tokenizer = AutoTokenizer.from_pretrained(demo_path(), local_files_only=True)
    model = FlashModel.from_pretrained(demo_path(), threads=threads, io_threads=8)
    layers = model.get_submodule(spec_of(str(model.config.model_type)).layers_module)
    for layer in layers.children():
        layer.register_forward_pre_hook(evict)
    rest_s = []
    with model.engine, Session(model, tokenizer, SamplingOptions(max_new_tokens=tokens)) as session:
        for record in session.stream(_PROMPT):
            if isinstance(record, TokenRecord):
                rest_s.append((record.times.total_ms - record.times.io_ms) / 1e3 - evicting_s[0])
            evicting_s[0] = 0.0
    return max(0.0, statistics.median(rest_s[1:])) / len(list(layers.children()))
