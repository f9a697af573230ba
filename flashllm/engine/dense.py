"""A layer's FFN over every neuron for many tokens, the neurons handed in block by block: what a prompt goes through.

By our own kernels, in fp32, or in bf16 where weights and processor are; or by torch in bf16 (`multiplied_by_torch`).
Sums over blocks are fp32 and in the order of blocks.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from flashllm import _core
from flashllm.engine.linear import dense_product
from flashllm.engine.meter import Meter
from flashllm.format.rows import RowLayout

TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "squared_relu": lambda h: torch.relu(h).square(),
}
Rows = NDArray[np.uint8]  # [neurons, stride]


def matrices(layout: RowLayout, rows: Rows, count: int) -> dict[str, torch.Tensor]:
    """[count, d_model] views of a block's matrices (down transposed: one row a neuron)."""
    elements = torch.from_numpy(rows[:count]).view(TORCH_DTYPES[layout.encoding])
    width = layout.d_model
    return {name: elements[:, part * width : (part + 1) * width] for part, name in enumerate(layout.matrices)}


def activations(
    x: torch.Tensor,
    block: dict[str, torch.Tensor],
    bias: torch.Tensor | None,
    activation: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """h [tokens, count] of a block's neurons, for x [tokens, d_model]. `bias`: their up biases; none with a gate."""
    driver = dense_product(x, block.get("gate", block["up"]))
    if "gate" in block:
        return activation(driver) * dense_product(x, block["up"])
    if bias is not None:
        driver = driver + bias.to(driver.dtype)
    return activation(driver)


class DenseFFN(Protocol):
    """One pass: `begin`, `add` for every block in order, `finish`."""

    def begin(self, x: torch.Tensor) -> None:
        """x: [tokens, d_model]."""

    def add(self, rows: Rows, first: int, count: int) -> None:
        """`count` neurons from `first` on."""

    def activations(self) -> torch.Tensor:
        """Those of the last block, fp32 [tokens, count]."""

    def finish(self) -> torch.Tensor:
        """y [tokens, d_model], in x's dtype."""

    def release(self) -> None:
        """Let go of native threads."""


class NativeDenseFFN:
    """By our kernels."""

    def __init__(self, native: _core.DenseFfn) -> None:
        self._native = native

    def begin(self, x: torch.Tensor) -> None:
        self._x, self._count = x, 0
        self._native.begin(x.data_ptr(), x.shape[0])

    def add(self, rows: Rows, first: int, count: int) -> None:
        self._count = count
        self._native.add(rows, first, count)

    def activations(self) -> torch.Tensor:
        h = torch.empty((self._x.shape[0], self._count))
        self._native.activations(h.data_ptr())
        return h

    def finish(self) -> torch.Tensor:
        y = torch.empty_like(self._x)
        self._native.finish(y.data_ptr())
        del self._x
        return y

    def release(self) -> None:
        del self._native


class TorchDenseFFN:
    """By torch, in the weights' dtype."""

    def __init__(
        self,
        layout: RowLayout,
        activation: str,
        up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
        meter: Meter,
    ) -> None:
        self._layout, self._activation, self._meter = layout, ACTIVATIONS[activation], meter
        self._up_bias, self._down_bias = up_bias, down_bias  # fp32

    def begin(self, x: torch.Tensor) -> None:
        self._x = x
        self._y = torch.zeros(x.shape, dtype=torch.float32)

    def add(self, rows: Rows, first: int, count: int) -> None:
        with self._meter.computing():
            block = matrices(self._layout, rows, count)
            bias = None if self._up_bias is None else self._up_bias[first : first + count]
            self._h = activations(self._x, block, bias, self._activation)
            self._y += self._h @ block["down"]

    def activations(self) -> torch.Tensor:
        return self._h.float()

    def finish(self) -> torch.Tensor:
        with self._meter.computing():
            if self._down_bias is not None:
                self._y += self._down_bias
            y = self._y.to(self._x.dtype)
        del self._x, self._y, self._h
        return y

    def release(self) -> None:
        """There are none."""
