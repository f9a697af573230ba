"""Attention over a preallocated KV cache: one new token through the native kernel, several through torch's SDPA.

The cache is planned and allocated at load, so it can neither grow past the limit nor copy itself at every token.
"""

import weakref
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from flashllm import _core
from flashllm.engine.meter import Meter
from flashllm.errors import FlashError, UsageError

ATTENTION_NAME = "planned_kv"  # transformers takes any name with "flash" in it for FlashAttention


class ContextFull(FlashError):
    """The KV cache has no room for the tokens asked for."""


class PreallocatedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # transformers' cache is half typed
    """Keys and values of one layer: views [batch, kv_heads, context, head_dim] of memory allocated at load."""

    is_croppable = True

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:  # the base class sets what is computed here
        self._all_keys, self._all_values = keys, values
        self.length = 0
        self.batch = keys.shape[0]
        self.is_initialized = True
        self._closed = False

    @property
    def keys(self) -> torch.Tensor:  # type: ignore[override]
        """[batch, kv_heads, length, head_dim]: what transformers sees."""
        return self._span(self._all_keys, 0, self.length)

    @property
    def values(self) -> torch.Tensor:  # type: ignore[override]
        """As `keys`."""
        return self._span(self._all_values, 0, self.length)

    def lies_in(self, keys: torch.Tensor) -> bool:
        """Whether this layer's keys are kept in the tensor `keys`, and not let go of."""
        return self._all_keys is keys

    def _span(self, states: torch.Tensor, start: int, length: int) -> torch.Tensor:
        """View of some positions. Once a layer a token: `narrow` costs a fraction of an index expression."""
        if self.batch != states.shape[0]:
            states = states.narrow(0, 0, self.batch)
        return states.narrow(2, start, length)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the memory is there."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends [batch, kv_heads, tokens, head_dim]; returns views of all cached positions."""
        start = self.claim(key_states.shape[0], key_states.shape[2])
        self._span(self._all_keys, start, self.length - start).copy_(key_states)
        self._span(self._all_values, start, self.length - start).copy_(value_states)
        return self.keys, self.values

    def claim(self, batch: int, new: int) -> int:
        """Room for `new` more positions of `batch` sequences, theirs to fill; returns the first. Raises ContextFull."""
        if self._closed:
            raise UsageError("this KV cache is closed: its memory belongs to the plan; take a new one with new_cache()")
        capacity = self._all_keys.shape[2]
        self._check_batch(batch)
        if self.length > 0 and batch != self.batch:
            raise ValueError(f"a batch of {batch} sequences cannot go on from a KV cache of {self.batch}")
        if self.length + new > capacity:
            raise ContextFull(
                f"the context is full: {self.length} tokens are cached, {new} more exceed its limit of {capacity}; "
                "start a new conversation, shorten the prompt, or load with a larger --context if the model allows it"
            )
        self.batch = batch
        self.length += new
        return self.length - new

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return int(self._all_keys.shape[2])

    get_max_cache_shape = get_max_length  # its name in transformers 5.9

    def reset(self) -> None:
        self.length = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` positions (transformers 5 takes negative counts only)."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes a negative number of tokens to remove, not {tokens_to_remove}")
        self.length = max(0, self.length + tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """The sequences `beam_idx` of the cached ones, in that order."""
        if self.length == 0:
            return  # nothing is cached, not even a batch size
        self._check_batch(len(beam_idx))
        keys, values = self.keys.index_select(0, beam_idx), self.values.index_select(0, beam_idx)
        self.batch = len(beam_idx)
        self.keys.copy_(keys)
        self.values.copy_(values)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.reorder_cache(torch.arange(self.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.reorder_cache(torch.arange(self.batch)[indices])

    def _check_batch(self, batch: int) -> None:
        if batch > self._all_keys.shape[0]:
            raise ContextFull(
                f"a batch of {batch} sequences exceeds the KV cache planned for {self._all_keys.shape[0]}; "
                f"load the model with batch={batch}"
            )

    def close(self) -> None:
        """Let go of the memory; the layer cannot be used afterwards."""
        self._closed, self.length, self.batch = True, 0, 0
        self._all_keys = self._all_values = torch.empty((0, 0, 0, 0))


class KVMemory:
    """The KV cache's bytes for all layers, allocated once; every cache made from it uses the same memory."""

    def __init__(
        self, *, num_layers: int, batch: int, kv_heads: int, context: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        self.batch = batch
        shape = (num_layers, 2, batch, kv_heads, context, head_dim)
        itemsize = torch.empty((), dtype=dtype).element_size()
        nbytes = itemsize
        for extent in shape:
            nbytes *= extent
        memory = torch.from_numpy(_core.allocate(nbytes)).view(dtype).reshape(shape)
        self.keys = [layer[0] for layer in memory]  # one a layer: [batch, kv_heads, context, head_dim]
        self.values = [layer[1] for layer in memory]
        self._in_use: weakref.ref[Cache] | None = None

    def new_cache(self) -> Cache:
        """An empty cache over this memory. UsageError while another one lives: it would overwrite its keys."""
        if self._in_use is not None and self._in_use() is not None:
            raise UsageError(
                "the planned KV cache is in use by another conversation; close that session (or call "
                "model.release_cache), or pass your own past_key_values"
            )
        cache = Cache(layers=[PreallocatedLayer(*states) for states in zip(self.keys, self.values, strict=True)])
        self._in_use = weakref.ref(cache)
        return cache

    def release(self, cache: Cache) -> None:
        """Close a cache made here, whoever still refers to it; the memory is free for the next one."""
        for layer in cache.layers:
            if isinstance(layer, PreallocatedLayer):
                layer.close()
        if self._in_use is not None and self._in_use() is cache:
            self._in_use = None

    def close(self) -> None:
        """Let go of the memory, also where a cache still refers to it."""
        cache = None if self._in_use is None else self._in_use()
        if cache is not None:
            self.release(cache)
        self.keys, self.values = [], []


class PlannedAttention:
    """An attention function in transformers' form: (output [batch, tokens, heads, head_dim], no weights)."""

    def __init__(self, meter: Meter, native: _core.Attention, max_length: int) -> None:
        self._meter, self._native, self._max_length = meter, native, max_length

    def release(self) -> None:
        """Let go of the native threads."""
        del self._native

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,  # [batch, heads, tokens, head_dim]
        key: torch.Tensor,  # [batch, kv_heads, length, head_dim]
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        if query.shape[2] == 1 and attention_mask is None and key.shape[2] <= self._max_length:
            scale = scaling if scaling is not None else float(query.shape[-1]) ** -0.5
            return self._one_token(query, key, value, scale), None
        with self._meter.computing():
            output, _ = sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
            )
        return output, None

    def _one_token(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        strides = key.stride()
        if strides[3] != 1 or strides != value.stride():
            raise ValueError("keys and values must lie alike in memory, head_dim last")
        batch, heads, _, head_dim = query.shape
        query = query.contiguous()
        out = query.new_empty((batch, 1, heads, head_dim))
        itemsize = key.element_size()
        row = heads * head_dim * itemsize  # bytes of a sequence's queries and outputs
        at_query, at_key, at_value, at_out = query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr()
        for sequence in range(batch):
            self._native.forward(
                at_query + sequence * row,
                at_key + sequence * strides[0] * itemsize,
                at_value + sequence * strides[0] * itemsize,
                key.shape[2],
                strides[1] * itemsize,
                strides[2] * itemsize,
                scale,
                at_out + sequence * row,
            )
        return out


def register_attention() -> None:
    """Make `ATTENTION_NAME` known to transformers; each loaded model brings its own function as an attribute."""

    def dispatch(module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        output: tuple[torch.Tensor, None] = module.flash_attend(module, *args, **kwargs)  # type: ignore[operator]
        return output

    AttentionInterface.register(ATTENTION_NAME, dispatch)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
