"""Layer norms, in fp32 and in an order of sums of our own: the same bits however many tokens and threads."""

from typing import Any

import torch
from torch import nn

from flashllm import _core
from flashllm.engine.meter import Meter


class FlashNorm(nn.LayerNorm):
    """`nn.LayerNorm` over the last dimension. `attach` must be called once the weights are in place."""

    native: _core.LayerNorm

    def attach(self, dtype: torch.dtype, pool: _core.ThreadPool, meter: Meter) -> None:
        (self._width,) = self.normalized_shape
        self._dtype = dtype
        weight, bias = (
            None if parameter is None else parameter.detach().float().contiguous().numpy()
            for parameter in (self.weight, self.bias)
        )
        name: Any = str(dtype).removeprefix("torch.")  # the core checks it
        self.native = _core.LayerNorm(self._width, self.eps, weight, bias, name, pool, meter.native)

    def release(self) -> None:
        """Let go of the native threads."""
        del self.native

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., width] -> the same shape and dtype."""
        if x.dtype != self._dtype or x.shape[-1] != self._width:
            raise TypeError(f"inputs must be {self._dtype} [..., {self._width}], not {x.dtype} {list(x.shape)}")
        x = x.contiguous()
        out = torch.empty_like(x)
        self.native.forward(x.data_ptr(), x.numel() // self._width, out.data_ptr())
        return out
