"""The predictor file that conversion writes: each layer's predictor from its weights, bias and the norm before it."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from flashllm.base.dtypes import WEIGHT_DTYPES, cast
from flashllm.convert.plan import ConversionPlan
from flashllm.convert.untrained.predictor import coded_gate, coded_gates_header, untrained_header, untrained_predictor
from flashllm.convert.untrained.svd import normed_inputs
from flashllm.convert.weights import Weights
from flashllm.format.predictors import margin_above, predictor_bytes

_Vector = NDArray[np.float32] | None


def made_predictors(plan: ConversionPlan, weights: Weights, model_sha256: str) -> Iterator[memoryview]:
    """The file's bytes: gates in 4 bits, or truncated SVDs of the plan's rank, for the FFN file of this hash."""
    if plan.coded_gates:
        yield memoryview(coded_gates_header(plan.architecture, model_sha256))
    else:
        yield memoryview(untrained_header(plan.architecture, plan.predictor_rank, model_sha256))
    for layer in (i for i, width in enumerate(plan.architecture.every_width) if width):
        driver = _Driver(plan, weights, layer)
        bias, inputs = driver.bias(), normed_inputs(*driver.norm(), plan.layout.d_model)
        if plan.coded_gates:
            codes, margin = coded_gate(driver.blocks, bias, inputs)
            yield from (stored.reshape(-1).view(np.uint8).data for stored in (margin_above(margin), codes))
        else:
            predictor, threshold = untrained_predictor(driver.blocks, bias, inputs, plan.predictor_rank)
            parts = predictor_bytes(predictor.a, predictor.b, predictor.bias, threshold)
            yield from (array.data for array in parts)


class _Driver:
    """The product that decides whether a layer's neurons fire: the gate's where there is one, else the up product."""

    def __init__(self, plan: ConversionPlan, weights: Weights, layer: int) -> None:
        self._plan, self._weights, self._layer = plan, weights, layer
        self._matrix = "gate" if plan.architecture.gated else "up"
        self._parts = [
            (weights.rows_of(claims[self._matrix]), claims[self._matrix].rows) for claims in plan.bundles(layer)
        ]

    def blocks(self) -> Iterator[NDArray[np.float32]]:
        """Its rows [n, d_model], some at a time; may be asked for again."""
        together = self._plan.layout.stream_block_rows
        for rows_of, neurons in self._parts:
            for first in range(0, neurons, together):
                rows = rows_of(first, min(together, neurons - first))
                yield cast(rows, self._plan.dtype, WEIGHT_DTYPES["float32"])

    def bias(self) -> _Vector:
        """The bias with which a neuron fires above 0: its own, less FATReLU's threshold."""
        bias = self._weights.vector(f"layers.{self._layer}.ffn.{self._matrix}_bias")
        layer = self._plan.block.layers[self._layer]
        threshold = np.float32(layer.activation_threshold)
        if not threshold:
            return bias
        return (np.zeros(layer.neurons, np.float32) if bias is None else bias) - threshold

    def norm(self) -> tuple[_Vector, _Vector]:
        """Weight and bias of the norm before the FFN, as they are used; of no norm, as of one that has none."""
        name = self._plan.block.layers[self._layer].ffn_input_norm
        weight, bias = (self._weights.vector(f"layers.{self._layer}.{name}.{part}") for part in ("weight", "bias"))
        shift = np.float32(self._plan.block.norm_shift)
        return weight + shift if weight is not None and shift else weight, bias
