"""Writes the second copy of the neurons (flashllm/format/placed.py), in the orders learned from a trace.

Checks every row as it reads it; keeps what an interrupted run left, as far as it is right.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flashllm import _core
from flashllm.base.files import HashingWriter, Progress
from flashllm.convert.placement import place
from flashllm.errors import FlashError, FlashIOError
from flashllm.format.manifest_values import FileEntry, Permutation
from flashllm.format.model_files import FFN, PLACED
from flashllm.format.placed import Order, placed_header, placed_nbytes
from flashllm.format.rows import RowLayout, row_checksums
from flashllm.format.safetensors import read_header
from flashllm.format.trace import Trace

Checksums = NDArray[np.uint64]  # [num_rows]


def write_placed(
    directory: Path,
    layout: RowLayout,
    checksums: Sequence[Checksums],
    trace: Trace,
    progress: Progress | None = None,
) -> FileEntry:
    """Write the copy beside the finished `ffn.safetensors` in `directory`, in the orders learned from `trace`.

    What an interrupted run left is kept as far as it is right. Each row is checked when it is read. `progress` gets the
    bytes of this file. Raises FormatError and FlashIOError; OSErrors of writing pass through.
    """
    nbytes = placed_nbytes(layout, len(checksums))
    path = directory / PLACED
    begun = path.is_file() and path.stat().st_size == nbytes
    with HashingWriter(path, preallocate=nbytes) as writer:
        writer.write(memoryview(placed_header(layout, len(checksums))))
        rows = _Rows(directory / FFN, layout)
        orders = []
        for layer, expected in enumerate(checksums):
            order = place(trace.masks(layer))
            orders.append(order)
            for neurons in _blocks(order, layout):
                begun = begun and _is_written(writer, rows.block(len(neurons)), expected[neurons])
                if not begun:
                    writer.write(rows.read(layer, neurons, expected).data)
                if progress is not None:
                    progress(PLACED, writer.position, nbytes)
            writer.write(np.zeros((layout.num_rows - layout.d_ff) * layout.stride, np.uint8).data)
        for order in orders:
            writer.write(order.astype("<i4").data)
        return FileEntry(sha256=writer.finish(), nbytes=writer.position)


def permutation_of(trace: Trace) -> Permutation:
    """The manifest's entry for an order learned from `trace`."""
    return Permutation(learned_on=trace.info.description, tokens=trace.info.num_tokens)


def _blocks(order: Order, layout: RowLayout) -> Iterator[Order]:
    for first in range(0, len(order), layout.stream_block_rows):
        yield order[first : first + layout.stream_block_rows]


def _is_written(writer: HashingWriter, rows: NDArray[np.uint8], expected: Checksums) -> bool:
    """True where an earlier run wrote these rows already; then they are behind the writer."""
    mark = writer.mark()
    writer.reread(rows.reshape(-1).data)
    if np.array_equal(row_checksums(rows), expected):
        return True
    writer.rewind(mark)
    return False


class _Rows:
    """Scattered rows of the file in the order of ids, a block at a time, through one buffer."""

    def __init__(self, path: Path, layout: RowLayout) -> None:
        self._path, self._stride = path, layout.stride
        header = read_header(path)
        self._offsets = [info.offset for info in header.tensors.values()]
        self._reader = _core.Reader(max_request=max(layout.stride, 1 << 19))
        self._file = _core.DirectFile(str(path))
        self._memory = _core.allocate(layout.stream_block_rows * layout.stride)

    def block(self, count: int) -> NDArray[np.uint8]:
        """The buffer's first `count` rows [count, stride]."""
        return self._memory[: count * self._stride].reshape(count, self._stride)

    def read(self, layer: int, neurons: Order, checksums: Checksums) -> NDArray[np.uint8]:
        """The rows of these neurons [n, stride]; valid until the next call."""
        rows = self.block(len(neurons))
        batch = _core.ReadBatch(self._reader, self._file)
        for row, neuron in zip(rows, neurons.tolist(), strict=True):
            offset = self._offsets[layer] + neuron * self._stride
            batch.add(offset, row, checksums[neuron : neuron + 1], self._stride)
        batch.submit()
        try:
            batch.wait()
        except FlashError as error:
            advice = "check the drive" if isinstance(error, FlashIOError) else "convert the model again"
            raise type(error)(f"layer {layer}: {error}; {advice}") from error
        return rows
