"""Resident linears: few tokens through the kernel that reads fast, many through the one that multiplies fast.

Few tokens get the same bits however many are computed together and whatever the threads; sums are fp32. So do many,
except of bf16 weights where the processor has AMX: torch uses it, and our products do not.
"""

import torch
from torch import nn

from flashllm import _core
from flashllm.engine.meter import Meter


def multiplied_by_torch(dtype: torch.dtype) -> bool:
    """Whether many tokens go through torch: only there is it faster than our own products (bench/LOG.md)."""
    return dtype == torch.bfloat16 and _core.has_amx()


def dense_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [tokens, k] times weight [n, k] transposed, in fp32 for fp16 and fp32 weights, in bf16 for bf16."""
    if weight.dtype == torch.float16:
        return x.float() @ weight.float().T
    return x @ weight.T


class FlashLinear(nn.Linear):
    """`nn.Linear` over resident weights. `attach` must be called once the weights are in place."""

    native: _core.Linear

    def attach(self, pool: _core.ThreadPool, meter: Meter, few_tokens: int) -> None:
        self._few_tokens, self._meter = few_tokens, meter
        self._dtype = self.weight.dtype
        self._by_torch = multiplied_by_torch(self._dtype)
        bias = None if self.bias is None else self.bias.detach().float().contiguous().numpy()
        self.native = _core.Linear(self.weight.detach(), bias, pool, meter.native)

    def release(self) -> None:
        """Let go of the native threads."""
        del self.native

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] -> [..., out_features], same dtype."""
        if x.dtype != self._dtype or self.weight.dtype != self._dtype:
            raise TypeError(f"inputs and weights must be {self._dtype}, as the model was loaded, not {x.dtype}")
        if x.shape[-1] != self.in_features:
            raise ValueError(f"inputs must have {self.in_features} features, not {x.shape[-1]}")
        # Once a linear a token: every tensor operation here counts.
        tokens = x.numel() // self.in_features
        x = x.contiguous()
        out = x.new_empty((*x.shape[:-1], self.out_features))
        if tokens <= self._few_tokens:
            self.native.forward(x.data_ptr(), tokens, out.data_ptr())
        elif self._by_torch:
            with self._meter.computing():
                return nn.functional.linear(x, self.weight, self.bias)
        else:
            self.native.forward_many(x.data_ptr(), tokens, out.data_ptr())
        return out
