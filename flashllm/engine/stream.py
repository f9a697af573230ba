"""A layer's rows in file order, block by block, for dense products: the next ones are read while one is used.

The length of a block is a constant of the model directory, so that dense sums do not depend on the machine (design
contract 2). Knows rows and blocks; not what is computed from them.
"""

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flashllm import _core
from flashllm.errors import FlashError, FormatError
from flashllm.format.rows import PAGE_NBYTES

_DAMAGED = "; the model directory is damaged: check it with `flashllm verify`, then convert the model again"
_FAILED = "; check the drive (the system's log says more), then try again"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRows:
    """Where a layer's rows lie: byte offset of row 0, their number, and one checksum each."""

    offset: int
    num_rows: int
    checksums: NDArray[np.uint64]


@dataclass(slots=True)
class StreamTimes:
    """Bytes and waits since the last `take`."""

    wait_ns: int = 0
    busy_ns: int = 0
    nbytes: int = 0
    requests: int = 0
    retries: int = 0


@dataclass(slots=True)
class _Pending:
    layer: int
    first_row: int
    count: int
    buffer: int
    batch: _core.ReadBatch


class RowStream:
    """Sequential reads of whole layers through a ring of staging buffers: `ahead` blocks fly while one is used."""

    def __init__(
        self,
        reader: _core.Reader,
        file: _core.DirectFile,
        layers: list[LayerRows],
        *,
        stride: int,
        block_rows: int,
        ahead: int,
    ) -> None:
        self._reader, self._file, self._layers = reader, file, layers
        self._stride, self._block_rows, self._blocks_ahead = stride, block_rows, ahead
        # One allocation: in ordinary pages, which small ones are in, direct reads ran at half the speed.
        slot = -(-block_rows * stride // PAGE_NBYTES) * PAGE_NBYTES
        memory = _core.allocate((ahead + 1) * slot)
        self._staging = [memory[start : start + slot] for start in range(0, len(memory), slot)]
        self._in_flight: list[_core.ReadBatch | None] = [None] * len(self._staging)  # the reads into each buffer
        self._ahead: deque[_Pending] = deque()  # in the order they will be wanted
        self._next_buffer = 0
        self.times = StreamTimes()

    def blocks(self, layer: int, *, then: int | None = None) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """(first row, rows [count, stride] uint8) over `layer`; a block is valid until the next is asked for.

        `then`: the layer wanted next, whose first blocks are read while the caller works on other things.
        """
        own = self._positions(layer)
        wanted = own if then is None else own + self._positions(then)
        if [(pending.layer, pending.first_row) for pending in self._ahead] != wanted[: len(self._ahead)]:
            self._ahead.clear()  # an earlier pass was interrupted
        submitted = len(self._ahead)
        if not submitted:
            self._reader.take_busy_ns()  # what the reader did for others
        for _ in own:
            # The block to use, and the ones behind it: the buffer of the block before is free by now.
            while len(self._ahead) <= self._blocks_ahead and submitted < len(wanted):
                self._ahead.append(self._submit(*wanted[submitted]))
                submitted += 1
            current = self._ahead.popleft()
            self._wait(current)
            nbytes = current.count * self._stride
            yield current.first_row, self._staging[current.buffer][:nbytes].reshape(current.count, self._stride)

    def drain(self) -> None:
        """Wait for whatever is still being read, and forget it, its errors too."""
        self._ahead.clear()
        for buffer in range(len(self._in_flight)):
            self._settle(buffer)

    def take_times(self) -> StreamTimes:
        """The times since the last call."""
        times, self.times = self.times, StreamTimes()
        return times

    def _positions(self, layer: int) -> list[tuple[int, int]]:
        return [(layer, first_row) for first_row in range(0, self._layers[layer].num_rows, self._block_rows)]

    def _submit(self, layer: int, first_row: int) -> _Pending:
        buffer, self._next_buffer = self._next_buffer, (self._next_buffer + 1) % len(self._staging)
        self._settle(buffer)
        rows = self._layers[layer]
        count = min(self._block_rows, rows.num_rows - first_row)
        batch = _core.ReadBatch(self._reader, self._file)
        batch.add(
            rows.offset + first_row * self._stride,
            self._staging[buffer][: count * self._stride],
            rows.checksums[first_row : first_row + count],
            self._stride,
        )
        self._in_flight[buffer] = batch
        batch.submit()
        return _Pending(layer, first_row, count, buffer, batch)

    def _settle(self, buffer: int) -> None:
        """No read may still fly into a buffer that is given to another: after an interrupted pass one might."""
        batch = self._in_flight[buffer]
        if batch is not None:
            with contextlib.suppress(FlashError, ValueError):  # ValueError: it never came to be submitted
                batch.wait()
        self._in_flight[buffer] = None

    def _wait(self, pending: _Pending) -> None:
        start = time.perf_counter_ns()
        try:
            stats = pending.batch.wait()
        except FlashError as error:
            self._in_flight[pending.buffer] = None
            raise self._placed(error, pending.layer) from error
        self._in_flight[pending.buffer] = None
        self.times.wait_ns += time.perf_counter_ns() - start
        self.times.busy_ns += self._reader.take_busy_ns()
        self.times.nbytes += stats["bytes"]
        self.times.requests += stats["requests"]
        self.times.retries += stats["retries"]

    def _placed(self, error: FlashError, layer: int) -> FlashError:
        """The error with the layer, the neuron and what to do in its message."""
        where = f"layer {layer}"
        if error.offset is not None:
            where += f", neuron {(error.offset - self._layers[layer].offset) // self._stride}"
        advice = _DAMAGED if isinstance(error, FormatError) else _FAILED
        placed = type(error)(f"{where}: {error}{advice}")
        placed.offset = error.offset
        return placed
