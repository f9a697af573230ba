"""A second copy of the neurons, so ordered that those read together lie together: `placed.safetensors`.

`ffn.safetensors` keeps the order of ids: a dense pass reads it front to back and sums in that order, so its bits do not
depend on any placement. A token's misses are read from this copy instead, several in one request. The format:

 1. `layers.N.ffn` for each layer, of the dtype and shape it has in `ffn.safetensors`; row r is neuron order[r], and
    rows behind the last neuron are zero;
 2. behind them `layers.N.order` for each layer, int32 [d_ff]: a permutation of the neurons.

Checksums are by neuron, so those of the resident file serve both copies.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flashllm import _core
from flashllm.bundle import RowLayout, row_checksums
from flashllm.errors import FlashError, FlashIOError, FormatError
from flashllm.files import HashingWriter, Progress
from flashllm.manifest import FileEntry, Manifest, Permutation
from flashllm.model_files import FFN, PLACED, check_placed_header, ffn_tensor, order_tensor
from flashllm.placement import Order, place
from flashllm.safetensors_file import encode_header, open_safetensors, read_header
from flashllm.trace import Trace

Checksums = NDArray[np.uint64]  # [num_rows]


def placed_nbytes(layout: RowLayout, num_layers: int) -> int:
    """Size of the file."""
    return len(_header(layout, num_layers)) + num_layers * (layout.layer_nbytes + 4 * layout.d_ff)


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
        writer.write(memoryview(_header(layout, len(checksums))))
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
    """What the manifest says of an order learned from `trace`."""
    return Permutation(learned_on=trace.info.description, tokens=trace.info.num_tokens)


def read_orders(path: Path, layout: RowLayout, num_layers: int) -> list[Order]:
    """The neuron in each row, by layer. FormatError where one is no permutation."""
    orders = []
    with open_safetensors(path) as file:
        check_placed_header(file.header, layout, num_layers)
        for layer in range(num_layers):
            order = np.empty(layout.d_ff, "<i4")
            file.read_into(file.header.tensors[order_tensor(layer)], 0, order.view(np.uint8).data)
            if not np.array_equal(np.sort(order), np.arange(layout.d_ff)):
                raise FormatError(
                    f"{path}: {order_tensor(layer)} is no permutation of {layout.d_ff} neurons; "
                    "the model directory is damaged: check it with `flashllm verify`"
                )
            orders.append(order.astype(np.int32))
    return orders


def read_places(directory: Path, manifest: Manifest) -> list[Order] | None:
    """Each neuron's row in the copy, by layer; None where the model has none. FormatError as `read_orders`."""
    if manifest.permutation is None:
        return None
    places = []
    for order in read_orders(directory / PLACED, manifest.rows, manifest.architecture.num_layers):
        rows = np.empty_like(order)
        rows[order] = np.arange(len(order), dtype=order.dtype)
        places.append(rows)
    return places


def _header(layout: RowLayout, num_layers: int) -> bytes:
    layers = range(num_layers)
    tensors = [(ffn_tensor(layer), layout.safetensors_dtype, layout.shape) for layer in layers]
    return encode_header([*tensors, *((order_tensor(layer), "I32", (layout.d_ff,)) for layer in layers)])


def _blocks(order: Order, layout: RowLayout) -> Iterator[Order]:
    for first in range(0, len(order), layout.stream_block_rows):
        yield order[first : first + layout.stream_block_rows]


def _is_written(writer: HashingWriter, rows: NDArray[np.uint8], expected: Checksums) -> bool:
    """Whether an earlier run wrote these rows already; then they are behind the writer."""
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
