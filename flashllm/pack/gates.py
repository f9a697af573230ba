"""A layer's gate: its products, what its activation makes of them, and how far its 4-bit form is off.

Arithmetic over a loaded model's weights, some rows at a time; chooses nothing.
"""

from collections.abc import Iterator
from typing import cast

import numpy as np
from numpy.typing import NDArray

from flashllm import _core
from flashllm.engine.model import Model
from flashllm.format.model_dir import read_resident
from flashllm.format.model_files import PREDICTORS, RESIDENT, gate_tensor
from flashllm.format.predictors import GATE_CODE
from flashllm.format.rows import ROW_ENCODINGS, unpack_rows
from flashllm.format.safetensors import open_safetensors

Floats = NDArray[np.float32]


class Gates:
    """The gates of a loaded model, which computes nothing meanwhile."""

    def __init__(self, model: Model) -> None:
        self._model, self._manifest = model, model.manifest
        self._pool = _core.ThreadPool(model.plan.threads)

    def products(self, layer: int, x: Floats) -> Floats:
        """gate(x) [tokens, d_ff] of inputs x [tokens, d_model], in fp32."""
        products = np.concatenate([x @ block.T for block in self.blocks(layer)], axis=1)
        return self._biased(layer, products)

    def coded_products(self, layer: int, x: Floats) -> Floats:
        """The same of the gate in 4 bits, of a model that has one."""
        with open_safetensors(self._model.directory.path / PREDICTORS) as file:
            codes = file.array(file.header.tensors[f"layers.{layer}.gate"])
        rows = self._manifest.stream_block_rows
        parts = [
            x @ GATE_CODE.decode(codes[first : first + rows], x.shape[1]).T for first in range(0, len(codes), rows)
        ]
        return self._biased(layer, np.concatenate(parts, axis=1))

    def magnitudes(self, layer: int, products: Floats) -> Floats:
        """|activation(products)|, nothing cut."""
        values = np.ascontiguousarray(products).copy()
        block = self._model.directory.block
        _core.activate(values, block.activation, block.layers[layer].activation_threshold)
        return np.abs(values, out=values)

    def distances(self, layer: int, products: Floats, cut: float | None = None) -> Floats:
        """How far each product is from the nearest one whose neuron fires under `cut`, by default the layer's own; 0
        where it fires itself."""
        block = self._model.directory.block
        cut = block.layers[layer].activation_cut if cut is None else cut
        above, low, high = _core.firing_range(block.activation, block.layers[layer].activation_threshold, cut)
        away: Floats = np.maximum(np.float32(above) - products, 0)
        if low < high:
            beside = np.maximum(np.maximum(np.float32(low) - products, products - np.float32(high)), 0)
            away = np.minimum(away, beside)
        return away

    def blocks(self, layer: int) -> Iterator[Floats]:
        """The gate's rows [n, d_model] in fp32, some at a time."""
        rows, together = self._manifest.layout(layer), self._manifest.stream_block_rows
        encoding = ROW_ENCODINGS[rows.encoding]
        if self._manifest.resident_gate:
            with open_safetensors(self._model.directory.path / RESIDENT) as file:
                stored = file.array(file.header.tensors[gate_tensor(layer)])
            for first in range(0, len(stored), together):
                yield encoding.widened(stored[first : first + together], rows.d_model)
            return
        stream = self._model.parts.stream
        stream.begin(layer)
        while (block := cast(tuple[int, NDArray[np.uint8]] | None, stream.next())) is not None:
            first, packed = block
            yield encoding.widened(unpack_rows(rows, packed[: rows.d_ff - first])["gate"], rows.d_model)

    def _biased(self, layer: int, products: Floats) -> Floats:
        bias = read_resident(self._model.directory, f"layers.{layer}.ffn.gate_bias")
        return products if bias is None else np.add(products, bias, out=products)
