"""A decoder layer at one new token a sequence as one native call, where the table of architectures knows its build.

Everything else goes through transformers' modules: several new tokens, padded batches, more sequences than few tokens,
KV caches of one's own, layers with hooks inside. Both ways give the same bits: the choice is one of time alone.
"""

from typing import Any, cast

import torch
from torch import nn
from transformers.cache_utils import Cache

from flashllm import _core
from flashllm.arch.registry import DecoderBlock
from flashllm.engine.attention import KVMemory, PreallocatedLayer
from flashllm.engine.ffn import FlashFFN
from flashllm.engine.linear import FlashLinear
from flashllm.engine.norm import FlashNorm


class NativeDecoder:
    """The layers of one model that `add` was called for, one after another."""

    def __init__(self, native: _core.Decoder, kv_memory: KVMemory, *, few_tokens: int) -> None:
        self._native, self._few_tokens = native, few_tokens
        self._keys, self._values = kv_memory.keys, kv_memory.values
        self._added = 0

    def release(self) -> None:
        """Let go of native threads and of the KV cache's memory."""
        self._keys, self._values = [], []
        del self._native

    def add(self, layer: nn.Module, block: DecoderBlock, ffn: FlashFFN) -> None:
        """The next layer, of a class with FlashLayerMixin, its weights in place."""

        def native_of(name: str) -> Any:
            return cast(FlashLinear | FlashNorm, layer.get_submodule(name)).native

        self._native.add_layer(
            norm=native_of(block.norm),
            query=native_of(block.query),
            key=native_of(block.key),
            value=native_of(block.value),
            out=native_of(block.out),
            ffn_norm=native_of(block.ffn_norm),
            ffn=ffn.native,
            keys=self._keys[self._added],
            values=self._values[self._added],
        )
        cast(FlashLayerMixin, layer).attach(self, self._added)
        self._added += 1

    def takes(self, layer: int, hidden_states: torch.Tensor, cache: Cache) -> bool:
        """Whether these are one new token a sequence, few sequences, over the planned KV cache."""
        if hidden_states.shape[1] != 1 or hidden_states.shape[0] > self._few_tokens or not self._keys:
            return False
        states = cache.layers[layer]
        return isinstance(states, PreallocatedLayer) and states.lies_in(self._keys[layer])

    def step(self, layer: int, hidden_states: torch.Tensor, cache: Cache) -> torch.Tensor:
        """[sequences, 1, d_model] -> the same. Raises ContextFull, FlashIOError, ChecksumError, FormatError."""
        sequences = hidden_states.shape[0]
        x = hidden_states.contiguous()
        out = torch.empty_like(x)
        position = cast(PreallocatedLayer, cache.layers[layer]).claim(sequences, 1)
        self._native.forward(layer, x.data_ptr(), sequences, position, out.data_ptr())
        return out


class FlashLayerMixin:
    """What a decoder layer's Hugging Face class gains."""

    def attach(self, decoder: NativeDecoder, index: int) -> None:
        self._decoder, self._index = decoder, index
        inner = [module for name, module in cast(nn.Module, self).named_modules() if name]
        self._hooks = [hooks for module in inner for hooks in (module._forward_pre_hooks, module._forward_hooks)]

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> Any:
        """As the Hugging Face class."""
        if (
            attention_mask is None
            and past_key_values is not None
            and self._decoder.takes(self._index, hidden_states, past_key_values)
            and not any(self._hooks)
        ):
            return self._decoder.step(self._index, hidden_states, past_key_values)
        return super().forward(  # type: ignore[misc]
            hidden_states, attention_mask=attention_mask, past_key_values=past_key_values, **kwargs
        )
