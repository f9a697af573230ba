"""The engines to beat: every weight of the model used for every token, read from flash where it is not in memory.

Large sequential reads run ahead of the products that use them. Only the reading and the matrix-vector products of a
dense model are here (all of its bytes, through our own kernel), not the model's text: what bounds such an engine is
bytes over bandwidth, and this one is meant to reach the bandwidth.
"""

import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import core_testing  # noqa: F401 - the core's test build, whose readers have a clock

from flashllm import _core
from flashllm.base.dtypes import WEIGHT_DTYPES
from flashllm.engine.meter import StepTimes
from flashllm.format.manifest import Manifest
from flashllm.format.model_files import FFN, RESIDENT

BLOCK_NBYTES = 16 << 20
MAX_REQUEST = 1 << 20
READ_AHEAD = 4  # blocks in flight


@dataclass(frozen=True, slots=True)
class _Block:
    file: int
    offset: int
    nbytes: int


class DenseStream:
    """A token's pass over all weights of a model directory, `resident_share` of them in memory."""

    def __init__(self, directory: Path, resident_share: float, *, threads: int, io_threads: int, simd: str) -> None:
        manifest = Manifest.load(directory, check_files=False)
        self._pool, self._simd = _core.ThreadPool(threads), simd
        self._reader = _core.Reader(io_threads, max_request=MAX_REQUEST)
        self._files = [_core.DirectFile(str(directory / name), direct=True) for name in (RESIDENT, FFN)]
        self.direct_io = all(file.direct for file in self._files)
        self._dtype, self._width = WEIGHT_DTYPES[manifest.dtype], manifest.rows.d_model
        self._x = np.zeros((1, self._width), self._dtype.storage)
        blocks = [
            _Block(file, offset, min(BLOCK_NBYTES, nbytes - offset))
            for file, nbytes in enumerate(manifest.files[name].nbytes for name in (RESIDENT, FFN))
            for offset in range(0, nbytes, BLOCK_NBYTES)
        ]
        # Resident and streamed blocks alternate evenly, so that products of the ones cover reads of the others.
        self._streamed: list[_Block] = []
        self._steps: list[tuple[bool, int]] = []  # (streamed, index)
        resident: list[_Block] = []
        for index, block in enumerate(blocks):
            kept = int((index + 1) * resident_share) > int(index * resident_share)
            chosen = resident if kept else self._streamed
            self._steps.append((not kept, len(chosen)))
            chosen.append(block)
        self._staging = [_core.allocate(BLOCK_NBYTES) for _ in range(READ_AHEAD + 1)]
        self._weights = [_core.allocate(block.nbytes) for block in resident]
        self.resident_nbytes = sum(block.nbytes for block in resident)
        for block, weights in zip(resident, self._weights, strict=True):
            self._submit(block, weights).wait()
        self._resident = [self._linear(weights) for weights in self._weights]
        self._staged = [self._linear(staging) for staging in self._staging]
        row_nbytes = self._width * self._dtype.itemsize
        self._out = np.empty((1, BLOCK_NBYTES // row_nbytes), self._dtype.storage)

    def _linear(self, buffer: NDArray[np.uint8]) -> tuple[_core.Linear, int]:
        """The product by whole rows of the buffer, and how many they are."""
        row_nbytes = self._width * self._dtype.itemsize
        count = len(buffer) // row_nbytes
        rows = buffer[: count * row_nbytes].view(self._dtype.storage).reshape(count, self._width)
        return _core.Linear(rows, None, cast(Any, self._dtype.name), self._pool, self._simd), count

    def _submit(self, block: _Block, buffer: NDArray[np.uint8]) -> _core.ReadBatch:
        batch = _core.ReadBatch(self._reader, self._files[block.file])
        batch.add(block.offset, buffer[: block.nbytes])
        batch.submit()
        return batch

    def token(self) -> StepTimes:
        """Read and multiply every weight once."""
        started = time.perf_counter_ns()
        flying: deque[_core.ReadBatch] = deque()
        self._reader.take_busy_ns()
        submitted = io_ns = compute_ns = nbytes = requests = 0
        for streamed, index in self._steps:
            while submitted < len(self._streamed) and len(flying) < READ_AHEAD:
                flying.append(self._submit(self._streamed[submitted], self._staging[submitted % len(self._staging)]))
                submitted += 1
            if streamed:
                before = time.perf_counter_ns()
                stats = flying.popleft().wait()
                io_ns += time.perf_counter_ns() - before
                nbytes, requests = nbytes + stats["bytes"], requests + stats["requests"]
            linear, count = self._staged[index % len(self._staged)] if streamed else self._resident[index]
            before = time.perf_counter_ns()
            linear.forward(self._x, self._out[:, :count])
            compute_ns += time.perf_counter_ns() - before
        total_ns = time.perf_counter_ns() - started
        return StepTimes(
            io_ms=io_ns / 1e6,
            memory_ms=0.0,
            compute_ms=compute_ns / 1e6,
            other_ms=max(0, total_ns - io_ns - compute_ns) / 1e6,
            total_ms=total_ns / 1e6,
            io_busy_ms=self._reader.take_busy_ns() / 1e6,
            bytes_read=nbytes,
            requests=requests,
            retries=0,
            active=0,
            hits=0,
            misses=0,
        )
