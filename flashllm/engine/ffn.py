"""The FFN that streams from flash: what replaces a decoder layer's up projection, activation and down projection.

Three ways through it, chosen by mode and by the number of new tokens (design contract 2), never by the cache:
sparse (predicted neurons, one native call), oracle (the exact ReLU mask) and dense (every neuron, block by block).
"""

from collections.abc import Callable, Iterator
from enum import StrEnum

import numpy as np
import torch
from torch import nn

from flashllm import _core
from flashllm.engine.dense import ACTIVATIONS, DenseFFN, activations, matrices
from flashllm.engine.meter import Meter
from flashllm.engine.stream import RowStream
from flashllm.format.rows import RowLayout


class Mode(StrEnum):
    """Which neurons are computed while decoding."""

    SPARSE = "sparse"  # those the predictor names
    ORACLE = "oracle"  # those that fire: exact, and as slow as dense
    DENSE = "dense"  # all


# (first token, first neuron, activations [tokens, neurons])
Observer = Callable[[int, int, torch.Tensor], None]


class FlashFFN(nn.Module):
    """y = down(activation(up(x))) of one layer, its neurons on flash."""

    def __init__(
        self,
        layer: int,
        *,
        num_layers: int,
        mode: Mode,
        layout: RowLayout,
        activation: str,
        native: _core.FfnLayer,
        dense: DenseFFN,
        stream: RowStream,
        meter: Meter,
        up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
        window: int,
    ) -> None:
        super().__init__()
        self.layer, self.num_layers, self.mode = layer, num_layers, mode
        self.native, self._dense_ffn = native, dense
        self.observer: Observer | None = None  # sees every block of a dense pass; for collecting activity
        self.few_tokens = True  # the model says so before each pass: at most K0 new tokens a sequence
        self._layout, self._activation = layout, ACTIVATIONS[activation]
        self._stream, self._meter = stream, meter
        self._up_bias, self._down_bias = up_bias, down_bias  # fp32
        self._window = window

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., d_model] -> y, same shape and dtype. Raises FlashIOError, ChecksumError, FormatError."""
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        if self.mode is Mode.DENSE or not self.few_tokens:
            y = self._dense(flat)
        elif self.mode is Mode.ORACLE:
            y = self._oracle(flat)
        else:
            y = torch.empty_like(flat)
            self.native.forward(flat.data_ptr(), flat.shape[0], y.data_ptr())
        return y.reshape(x.shape)

    def release(self) -> None:
        """Let go of native memory, files and threads."""
        self._dense_ffn.release()
        del self.native, self._stream

    def weight_blocks(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """(first neuron, {"up", "gate" if any, "down"}: [neurons, d_model]) over the layer; valid until the next."""
        for first, rows in self._stream.blocks(self.layer):
            count = self._neurons_in(rows, first)
            yield first, matrices(self._layout, rows, count)

    @property
    def up_bias(self) -> torch.Tensor | None:
        """fp32 [d_ff], or None."""
        return self._up_bias

    @property
    def down_bias(self) -> torch.Tensor | None:
        """fp32 [d_model], or None."""
        return self._down_bias

    def _dense(self, x: torch.Tensor) -> torch.Tensor:
        """Every neuron; the rows of the last tokens' active neurons stay in the cache."""
        fill = self.mode is Mode.SPARSE
        if fill:
            recent = x[-self._window :]
            self.native.begin_fill(recent.data_ptr(), recent.shape[0])
        dense = self._dense_ffn
        dense.begin(x)
        try:
            for first, rows in self._stream.blocks(self.layer, then=self._next_layer()):
                count = self._neurons_in(rows, first)
                if fill:
                    self.native.fill_from(rows, first, count)
                dense.add(rows, first, count)
                if self.observer is not None:
                    self.observer(0, first, dense.activations())
        finally:
            self.native.abandon_fill()  # nothing, unless a read failed
        return dense.finish()

    def activations(self, x: torch.Tensor, first: int, count: int, block: dict[str, torch.Tensor]) -> torch.Tensor:
        """h [tokens, count] of the neurons from `first` on, whose matrices are `block`, for x [tokens, d_model]."""
        bias = None if self._up_bias is None else self._up_bias[first : first + count]
        return activations(x, block, bias, self._activation)

    def _oracle(self, x: torch.Tensor) -> torch.Tensor:
        active: list[list[torch.Tensor]] = [[] for _ in range(x.shape[0])]
        for first, rows in self._stream.blocks(self.layer, then=self._next_layer()):
            count = self._neurons_in(rows, first)
            with self._meter.computing():
                block = {name: matrix.float() for name, matrix in matrices(self._layout, rows, count).items()}
                fires = self.activations(x.float(), first, count, block) > 0
                for token, mask in enumerate(fires):
                    active[token].append(mask.nonzero().flatten() + first)
        y = torch.empty_like(x)
        for token, ids in enumerate(active):
            exact = torch.cat(ids).to(torch.int32).numpy()
            self.native.forward_active(x[token].data_ptr(), exact, y[token].data_ptr())
        return y

    def _neurons_in(self, rows: np.ndarray[tuple[int, ...], np.dtype[np.uint8]], first: int) -> int:
        """How many of a block's rows are neurons: the last block may end with padding."""
        return min(rows.shape[0], self._layout.d_ff - first)

    def _next_layer(self) -> int | None:
        return self.layer + 1 if self.layer + 1 < self.num_layers else None
