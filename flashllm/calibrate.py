"""Measures a drive and this machine: what batches of direct random reads cost through each backend, sequential reads,
memory bandwidth, the rates of resident products and of gathered rows, and what a layer costs besides.

Reads are issued as the engine issues them: a batch of scattered requests of one size, then a barrier. Rounds go over
all figures, so that a busy neighbour slows every figure and not one. Stores nothing: see `device_store`.
"""

import contextlib
import itertools
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoTokenizer

from flashllm import _core
from flashllm.architectures import spec_of
from flashllm.demo import demo_path
from flashllm.dense import TORCH_DTYPES
from flashllm.device_costs import (
    Backend,
    BatchSample,
    DeviceCosts,
    GapSample,
    ReaderChoice,
    ReaderCosts,
    fit_reader,
    scatter_of,
)
from flashllm.dtypes import WEIGHT_DTYPES
from flashllm.errors import FlashIOError
from flashllm.files import Progress, drop_page_cache
from flashllm.generate import SamplingOptions, Session, TokenRecord
from flashllm.manifest import MANIFEST
from flashllm.model import FlashModel
from flashllm.model_files import FFN
from flashllm.reader import backends, open_reader
from flashllm.units import format_size

_LEAST_FILE = 1 << 30  # bytes: of a smaller one too much lies in caches that we cannot see (of the drive, of a host)
_DISK_MARGIN = 1 << 30  # bytes that stay free
_D_MODEL = 4096  # of the products that are timed: a row of two 16-bit vectors is 16 KiB
_EVICTING_NBYTES = 64 << 20  # about what a large model's layer touches
_ACTIVE_SHARE = 0.1  # of the rows cached (paper A, section 3.1)
_PROMPT = "Once upon a time there was a little dog who lived in a house by the sea."


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationOptions:
    """What is measured, and for how long. The defaults take under two minutes; smaller ones are for tests."""

    sizes: tuple[int, ...] = tuple(4096 << i for i in range(9))  # bytes of a request: 4 KiB to 1 MiB
    requests: tuple[int, ...] = (8, 64, 256)  # of a batch
    batch_nbytes: int = 64 << 20  # at most
    gaps: tuple[int, ...] = (4096, 8192, 16384, 32768)  # bytes between two rows
    pairs: int = 32  # of rows, with a gap between them
    scratch_nbytes: int = 4 << 30
    dram_nbytes: int = 256 << 20
    gemv_nbytes: int = 512 << 20  # of weights
    read_s: float = 40.0
    memory_s: float = 2.0  # of each figure of memory and products
    rounds: int = 40  # at most
    demo_tokens: int = 100

    def __post_init__(self) -> None:
        for name in ("sizes", "requests", "gaps"):
            values = getattr(self, name)
            if len(values) == 0 or list(values) != sorted(set(values)) or values[0] < 1:
                raise ValueError(f"{name} must be ascending, from 1, not {values}")


@contextlib.contextmanager
def file_to_read(path: Path, nbytes: int) -> Iterator[Path]:
    """A file on the drive of `path` to read at random: the model's own where `path` is a model directory that is large
    enough, else a scratch file of `nbytes`, removed at the end, also of a run that was interrupted.

    FlashIOError where there is no room, or the file cannot be written.
    """
    own = path / FFN
    if (path / MANIFEST).exists() and own.exists() and own.stat().st_size >= _LEAST_FILE:
        yield own
        return
    folder = path if path.is_dir() else path.parent
    scratch = folder / f".flashllm-calibrate-{os.getpid()}"
    free = shutil.disk_usage(folder).free
    if free < nbytes + _DISK_MARGIN:
        raise FlashIOError(
            f"{folder}: {format_size(free)} are free, but a scratch file of {format_size(nbytes)} is needed for a "
            "minute; free some space, or name a folder elsewhere on the same drive"
        )
    try:
        _write_scratch(scratch, nbytes)
        yield scratch
    except OSError as error:
        raise FlashIOError(f"{scratch}: {error.strerror}; nothing was kept") from error
    finally:
        scratch.unlink(missing_ok=True)


def _write_scratch(path: Path, nbytes: int) -> None:
    """Bytes that no file system can compress, on the drive and out of the page cache."""
    block = np.random.default_rng(0).bytes(min(nbytes, 16 << 20))
    with path.open("xb", buffering=0) as file:
        for start in range(0, nbytes, len(block)):
            file.write(block[: nbytes - start])
            os.fsync(file.fileno())
            drop_page_cache(file.fileno(), start, len(block))


@dataclass(frozen=True, slots=True)
class _Measured:
    """A backend and what was seen of it."""

    backend: Backend
    depth: int
    reader: _core.Reader
    merging: _core.Reader  # reads through any gap that is measured
    batches: list[BatchSample]
    gaps: list[GapSample]


class _Reads:
    """Batches of reads from one file through all backends."""

    def __init__(self, path: Path, options: CalibrationOptions) -> None:
        self._file = _core.DirectFile(str(path))
        self._path, self._options = path, options
        self._memory = _core.allocate(max(options.batch_nbytes, options.sizes[-1]))
        self._random = np.random.default_rng(0)
        self.direct = self._file.direct
        self._measured = [
            _Measured(
                backend, depth, self._open(backend, depth, 0), self._open(backend, depth, options.gaps[-1]), [], []
            )
            for backend, depth in backends()
        ]
        self.sequential_bps: list[float] = []

    def _open(self, backend: Backend, depth: int, max_gap: int) -> _core.Reader:
        choice = ReaderChoice(backend=backend, depth=depth, max_gap=max_gap, source="argument")
        return open_reader(choice, max_request=max(self._options.sizes[-1], 4096))

    def round(self, size: int) -> None:
        """One batch of each length at `size` through each backend."""
        for one in self._measured:
            for requests in self._options.requests:
                places = self._file.size // size
                if requests > places or requests * size > self._memory.nbytes:
                    break
                offsets = self._random.choice(places, requests, replace=False) * size
                one.batches.append(self._timed(one.reader, offsets, size))

    def gaps(self) -> None:
        """Pairs of rows at each gap, read apart and through, by each backend."""
        row, pairs = self._options.sizes[0], self._options.pairs
        apart = 2 * row + 2 * self._options.gaps[-1]  # no two pairs are near enough to be read as one
        pairs = min(pairs, self._file.size // apart)
        for one in self._measured:
            for gap in self._options.gaps:
                starts = self._random.choice(self._file.size // apart, pairs, replace=False) * apart
                offsets = np.stack([starts, starts + row + gap], axis=1).reshape(-1)
                two, through = (self._timed(reader, offsets, row) for reader in (one.reader, one.merging))
                one.gaps.append(GapSample(gap_nbytes=gap, apart_s=two.wall_s, through_s=through.wall_s))

    def sequential(self) -> None:
        """As much as a batch holds in a row, through each backend; the best is kept."""
        size = self._options.sizes[-1]
        count = max(1, min(self._memory.nbytes, self._file.size) // size // 2)
        first = int(self._random.integers(0, self._file.size // size - count + 1))
        offsets = np.arange(first, first + count) * size
        timed = [self._timed(one.reader, offsets, size) for one in self._measured]
        self.sequential_bps.append(count * size / min(sample.wall_s for sample in timed))

    def _timed(self, reader: _core.Reader, offsets: NDArray[np.int64], size: int) -> BatchSample:
        if not self.direct:
            fd = os.open(self._path, os.O_RDONLY)
            drop_page_cache(fd)
            os.close(fd)
        batch = _core.ReadBatch(reader, self._file)
        for slot, offset in enumerate(offsets.tolist()):
            batch.add(offset, self._memory[slot * size : (slot + 1) * size])
        cpu, start = time.process_time(), time.perf_counter()
        batch.submit()
        batch.wait()
        wall_s = time.perf_counter() - start
        return BatchSample(requests=len(offsets), nbytes=size, wall_s=wall_s, cpu_s=time.process_time() - cpu)

    def costs(self) -> tuple[ReaderCosts, ...]:
        """The fitted costs of each backend."""
        return tuple(fit_reader(one.batches, one.gaps, backend=one.backend, depth=one.depth) for one in self._measured)

    def scatter(self) -> float:
        """Of the backend that scatters most."""
        return max(scatter_of(one.batches) for one in self._measured)


def measure_device(
    path: Path, *, threads: int, options: CalibrationOptions, progress: Progress | None = None
) -> DeviceCosts:
    """The costs of the drive on which `path` lies, and of this machine with `threads` compute threads.

    FlashIOError where the drive cannot be read, or a scratch file not be written.
    """
    report = progress if progress is not None else lambda what, done, total: None
    total = options.rounds * (len(options.sizes) + 2) + 4
    report("preparing a file to read", 0, total)
    with file_to_read(path, options.scratch_nbytes) as file:
        reads = _Reads(file, options)
        done = _read_rounds(reads, options, report, total)
        report("memory", done, total)
        pool = _core.ThreadPool(threads)
        dram = _core.read_bandwidth(pool, options.dram_nbytes, options.memory_s)
        report("resident products", done + 1, total)
        gemv = {dtype: _gemv_bps(dtype, options, pool) for dtype in WEIGHT_DTYPES}
        report("products of gathered rows", done + 2, total)
        sparse = {dtype: _sparse_bps(dtype, options, pool, file) for dtype in WEIGHT_DTYPES}
    report("the demo model", done + 3, total)
    overhead = _layer_overhead_s(threads, options.demo_tokens)
    report("done", done + 4, done + 4)
    return DeviceCosts(
        readers=reads.costs(),
        sequential_bps=statistics.median(reads.sequential_bps),
        direct=reads.direct,
        dram_bps=statistics.median(dram),
        gemv_bps=gemv,
        sparse_bps=sparse,
        layer_overhead_s=overhead,
        scatter=reads.scatter(),
        threads=threads,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _read_rounds(reads: _Reads, options: CalibrationOptions, report: Progress, total: int) -> int:
    """Rounds until the time is up, one at least; the steps done."""
    start, done = time.monotonic(), 0
    for round_ in range(options.rounds):
        for size in options.sizes:
            if round_ > 0 and time.monotonic() - start > options.read_s:
                return done
            reads.round(size)
            done += 1
            report(f"reads of {format_size(size)}", done, total)
        reads.gaps()
        report("gaps", done + 1, total)
        reads.sequential()
        done += 2
        report("sequential reads", done, total)
    return done


def _gemv_bps(dtype: str, options: CalibrationOptions, pool: _core.ThreadPool) -> float:
    """Bytes of weights a second in products of one token, over weights that no cache holds."""
    torch_dtype = TORCH_DTYPES[dtype]
    rows = options.gemv_nbytes // (_D_MODEL * torch_dtype.itemsize)
    memory = _core.allocate(rows * _D_MODEL * torch_dtype.itemsize)
    weight = torch.from_numpy(memory).view(torch_dtype).reshape(rows, _D_MODEL)
    weight.copy_(torch.randn(_D_MODEL))
    linear = _core.Linear(weight, None, pool, _core.Counters())
    x = torch.full((1, _D_MODEL), 0.01, dtype=torch_dtype)
    out = torch.empty((1, rows), dtype=torch_dtype)
    return memory.nbytes / _median_s(lambda: linear.forward(x.data_ptr(), 1, out.data_ptr()), options.memory_s)


def _sparse_bps(dtype: str, options: CalibrationOptions, pool: _core.ThreadPool, file: Path) -> float:
    """Bytes of rows a second in an FFN layer's products of one token, over neurons that are all cached and all fire.

    Nothing is read from `file`: a layer must have one.
    """
    torch_dtype = TORCH_DTYPES[dtype]
    stride = 2 * _D_MODEL * torch_dtype.itemsize
    neurons = max(1, options.gemv_nbytes // stride)
    layer = _core.FfnLayer(
        layer=0,
        dtype=cast(Any, dtype),
        stride=stride,
        d_model=_D_MODEL,
        num_neurons=neurons,
        up=0,
        gate=-1,
        down=_D_MODEL,
        activation="relu",
        cache_policy="window",
        window=2**30,  # nothing leaves
        popularity=None,
        file_offset=0,
        up_bias=None,
        down_bias=None,
        checksums=np.zeros(neurons, np.uint64),
        rows=_core.allocate(neurons * stride),
        bypass_rows=None,
        reader=_core.Reader(1),
        file=_core.DirectFile(str(file)),
        pool=pool,
        counters=_core.Counters(),
    )
    # A predictor that names every neuron, so that all rows are taken over into the cache.
    a, b = torch.zeros((1, _D_MODEL), dtype=torch.float16), torch.zeros((neurons, 1), dtype=torch.float16)
    layer.set_predictor(a, b, np.ones(neurons, np.float32), 0.0)
    x, y = torch.full((_D_MODEL,), 0.01, dtype=torch_dtype), torch.empty(_D_MODEL, dtype=torch_dtype)
    block = torch.full((min(neurons, 256), 2 * _D_MODEL), 0.01, dtype=torch_dtype).view(torch.uint8).numpy()
    layer.begin_fill(x.data_ptr(), 1)
    for first in range(0, neurons, len(block)):
        count = min(len(block), neurons - first)
        layer.fill_from(block[:count], first, count)
    random, count = np.random.default_rng(0), max(1, int(_ACTIVE_SHARE * neurons))
    active = [np.sort(random.choice(neurons, count, replace=False)).astype(np.int32) for _ in range(10)]
    turn = itertools.cycle(active)
    seconds = _median_s(lambda: layer.forward_active(x.data_ptr(), next(turn), y.data_ptr()), options.memory_s)
    return count * stride / seconds


def _median_s(run: Callable[[], object], seconds: float) -> float:
    """Median time of `run`, called three times at least and until `seconds` are over."""
    times: list[float] = []
    while len(times) < 3 or sum(times) < seconds:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


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
