"""A second copy of the neurons, so ordered that those read together lie together: `placed.safetensors`.

`ffn.safetensors` keeps the order of ids: a dense pass reads it front to back and sums in that order, so its bits do not
depend on any placement. A token's misses are read from this copy instead, several in one request. The format:

 1. `layers.N.ffn` for each layer, of the dtype and shape it has in `ffn.safetensors`; row r is neuron order[r], and
    rows behind the last neuron are zero;
 2. behind them `layers.N.order` for each layer, int32 [d_ff]: a permutation of the neurons.

Checksums are by neuron, so those of the resident file serve both copies.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flashllm.errors import FormatError
from flashllm.format.manifest import Manifest
from flashllm.format.model_files import PLACED, check_placed_header, ffn_tensor, order_tensor
from flashllm.format.rows import RowLayout
from flashllm.format.safetensors import encode_header, open_safetensors

Order = NDArray[np.int32]  # [d_ff]: the neuron in each row of the file


def placed_nbytes(layout: RowLayout, num_layers: int) -> int:
    """Size of the file."""
    return len(placed_header(layout, num_layers)) + num_layers * (layout.layer_nbytes + 4 * layout.d_ff)


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


def placed_header(layout: RowLayout, num_layers: int) -> bytes:
    """The file's header: its length does not depend on the orders."""
    layers = range(num_layers)
    tensors = [(ffn_tensor(layer), layout.safetensors_dtype, layout.shape) for layer in layers]
    return encode_header([*tensors, *((order_tensor(layer), "I32", (layout.d_ff,)) for layer in layers)])
