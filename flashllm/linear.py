"""Resident linears: few tokens through the native kernel, many through torch.

The native kernel gives each token the same bits however many are computed together and whatever the threads. Many
tokens are a matrix product, which torch does well in fp32 and bf16; fp16 weights are widened block by block, because
torch's own fp16 product is twelve times slower on some processors, and a choice by machine would change results.
"""

import torch
from torch import nn

from flashllm import _core
from flashllm.meter import Meter

_WIDEN_ROWS = 1024  # rows of fp16 weights widened at a time: bounds the workspace


def dense_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [tokens, k] times weight [n, k] transposed, in fp32 for fp16 and fp32 weights, in bf16 for bf16."""
    if weight.dtype == torch.float16:
        return x.float() @ weight.float().T
    return x @ weight.T


class FlashLinear(nn.Linear):
    """`nn.Linear` over resident weights. `attach` must be called once the weights are in place."""

    def attach(self, pool: _core.ThreadPool, meter: Meter, max_native_tokens: int) -> None:
        self._meter, self._max_native_tokens = meter, max_native_tokens
        self._bias32 = None if self.bias is None else self.bias.detach().float().contiguous()
        self._dtype = self.weight.dtype
        bias = None if self._bias32 is None else self._bias32.numpy()
        self._native = _core.Linear(self.weight.detach(), bias, pool, meter.native)

    def release(self) -> None:
        """Let go of the native threads and the fp32 bias."""
        del self._native, self._bias32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] -> [..., out_features], same dtype."""
        flat = x.reshape(-1, self.in_features).contiguous()
        if flat.dtype != self._dtype or self.weight.dtype != self._dtype:
            raise TypeError(f"inputs and weights must be {self._dtype}, as the model was loaded, not {flat.dtype}")
        if flat.shape[0] <= self._max_native_tokens:
            out = torch.empty((flat.shape[0], self.out_features), dtype=x.dtype)
            self._native.forward(flat.data_ptr(), flat.shape[0], out.data_ptr())
        else:
            with self._meter.computing():
                out = self._dense(flat)
        return out.reshape(*x.shape[:-1], self.out_features)

    def _dense(self, flat: torch.Tensor) -> torch.Tensor:
        out = torch.empty((flat.shape[0], self.out_features), dtype=flat.dtype)
        for start in range(0, self.out_features, _WIDEN_ROWS):
            block = dense_product(flat, self.weight[start : start + _WIDEN_ROWS])
            if self._bias32 is not None:
                block = block + self._bias32[start : start + _WIDEN_ROWS]
            out[:, start : start + _WIDEN_ROWS] = block
        return out
