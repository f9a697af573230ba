"""A layer's rows in file order, block by block, for dense products: the next block is read while one is used.

The length of a block is a constant of the model directory, so that dense sums do not depend on the machine (design
contract 2). Knows rows and blocks; not what is computed from them.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flashllm import _core


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
    """Double-buffered sequential reads of whole layers through two staging buffers."""

    def __init__(
        self, reader: _core.Reader, file: _core.DirectFile, layers: list[LayerRows], *, stride: int, block_rows: int
    ) -> None:
        self._reader, self._file, self._layers = reader, file, layers
        self._stride, self._block_rows = stride, block_rows
        self._staging = [_core.allocate(block_rows * stride) for _ in range(2)]
        self._ahead: _Pending | None = None
        self.times = StreamTimes()

    def blocks(self, layer: int, *, then: int | None = None) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """(first row, rows [count, stride] uint8) over `layer`; a block is valid until the next is asked for.

        `then`: the layer wanted next, whose first block is read while the caller works on other things.
        """
        rows = self._layers[layer].num_rows
        current = self._take_ahead(layer)
        while current is not None:
            following = current.first_row + current.count
            if following < rows:
                self._ahead = self._submit(layer, following, 1 - current.buffer)
            elif then is not None:
                self._ahead = self._submit(then, 0, 1 - current.buffer)
            self._wait(current)
            nbytes = current.count * self._stride
            yield current.first_row, self._staging[current.buffer][:nbytes].reshape(current.count, self._stride)
            current = self._take_ahead(layer) if following < rows else None

    def drain(self) -> None:
        """Wait for whatever is still being read, and forget it."""
        pending, self._ahead = self._ahead, None
        if pending is not None:
            self._wait(pending)

    def take_times(self) -> StreamTimes:
        """The times since the last call."""
        times, self.times = self.times, StreamTimes()
        return times

    def _take_ahead(self, layer: int) -> _Pending:
        pending, self._ahead = self._ahead, None
        if pending is None:
            return self._submit(layer, 0, 0)
        if pending.layer == layer:
            return pending
        self._wait(pending)  # another layer was expected: an earlier pass was interrupted
        return self._submit(layer, 0, 0)

    def _submit(self, layer: int, first_row: int, buffer: int) -> _Pending:
        rows = self._layers[layer]
        count = min(self._block_rows, rows.num_rows - first_row)
        batch = _core.ReadBatch(self._reader, self._file)
        batch.add(
            rows.offset + first_row * self._stride,
            self._staging[buffer][: count * self._stride],
            rows.checksums[first_row : first_row + count],
            self._stride,
        )
        batch.submit()
        return _Pending(layer, first_row, count, buffer, batch)

    def _wait(self, pending: _Pending) -> None:
        start = time.perf_counter_ns()
        try:
            stats = pending.batch.wait()
        except Exception as error:
            self._ahead, ahead = None, self._ahead
            if ahead is not None and ahead is not pending:
                del ahead  # a dropped batch waits for its own reads
            raise type(error)(f"layer {pending.layer}: {error}") from error
        self.times.wait_ns += time.perf_counter_ns() - start
        self.times.busy_ns += stats["wall_ns"]
        self.times.nbytes += stats["bytes"]
        self.times.requests += stats["requests"]
        self.times.retries += stats["retries"]
