"""The weights of one layer that decide what its neurons do, in fp32: rows streamed from flash, vectors from memory.

Knows a loaded model's layers; not what is computed with them.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashllm.engine.model import Model
from flashllm.format.model_dir import read_plane, read_resident
from flashllm.format.rows import widened_rows
from flashllm.pack.gates import Gates

Floats = NDArray[np.float32]


class LayerWeights:
    """One layer of a loaded model. Only one stream of rows of a model is read at a time."""

    def __init__(self, model: Model, layer: int) -> None:
        self.model, self.layer = model, layer
        self.layout = model.manifest.layout(layer)
        self.activation, self.gated = model.manifest.architecture.activation, model.manifest.architecture.gated
        spec = model.directory.block.layers[layer]
        self.threshold, self.cut = np.float32(spec.activation_threshold), np.float32(spec.activation_cut)
        driver = "gate" if self.gated else "up"
        bias = self._vector(f"ffn.{driver}_bias")
        if self.threshold:
            bias = (np.zeros(self.layout.d_ff, np.float32) if bias is None else bias) - self.threshold
        # Added to the products of the driver matrix, so that a neuron fires above 0; None: nothing is.
        self.bias = bias

    def blocks(self) -> Iterator[tuple[int, dict[str, NDArray[Any]]]]:
        """(first neuron, {"up", "gate" if any, "down"}: [neurons, d_model] in fp32), each valid until the next."""
        stream = self.model.parts.stream
        plane = read_plane(self.model.directory.path, self.model.manifest, self.layer)
        stream.begin(self.layer)
        while (block := stream.next()) is not None:
            first, rows = block
            yield first, widened_rows(self.layout, rows[: self.layout.d_ff - first], plane, first)

    def drivers(self) -> Iterator[Floats]:
        """The matrix whose products decide which neurons fire (the gate where there is one), some rows at a time."""
        if self.model.manifest.resident_gate:
            yield from Gates(self.model).blocks(self.layer)
            return
        for _, block in self.blocks():
            yield np.ascontiguousarray(block.get("gate", block["up"]))

    def ups(self) -> Iterator[Floats]:
        """The up matrix of a gated model, some rows at a time."""
        for _, block in self.blocks():
            yield np.ascontiguousarray(block["up"])

    def up_bias(self) -> Floats | None:
        """Bias of a gated model's up projection."""
        return self._vector("ffn.up_bias")

    def down_norms(self) -> Floats:
        """[d_ff]: the norm of each neuron's down column."""
        return np.concatenate([np.linalg.norm(block["down"], axis=1) for _, block in self.blocks()])

    def norm(self) -> tuple[Floats | None, Floats | None]:
        """(scale, shift) [d_model] of the norm before the FFN; None where it has none."""
        block = self.model.directory.block
        name = block.layers[self.layer].ffn_input_norm
        weight, bias = (self._vector(f"{name}.{part}") for part in ("weight", "bias"))
        return weight if weight is None else weight + np.float32(block.norm_shift), bias

    def _vector(self, name: str) -> Floats | None:
        return read_resident(self.model.directory, f"layers.{self.layer}.{name}")
