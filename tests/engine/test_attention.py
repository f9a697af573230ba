"""The planned KV cache: lengths, batches, beams, who owns it; one token's attention against many tokens'."""

import pytest
import torch
from transformers import DynamicCache

from flashllm import _core
from flashllm.engine.attention import ContextFull, KVMemory, PlannedAttention
from flashllm.engine.meter import Meter
from flashllm.errors import UsageError


def memory(*, layers=2, batch=3, context=6):
    return KVMemory(num_layers=layers, batch=batch, kv_heads=2, context=context, head_dim=4, dtype=torch.float32)


def states(batch, tokens, seed=0):
    return torch.randn((2, batch, 2, tokens, 4), generator=torch.Generator().manual_seed(seed))


def test_tokens_are_appended_in_place():
    cache = memory().new_cache()
    first, second = states(1, 4), states(1, 2, seed=1)
    keys, values = cache.update(*first, 0)
    assert torch.equal(keys, first[0])
    address = keys.data_ptr()
    keys, values = cache.update(*second, 0)
    assert torch.equal(keys, torch.cat([first[0], second[0]], 2))
    assert torch.equal(values, torch.cat([first[1], second[1]], 2))
    assert keys.data_ptr() == address
    assert cache.layers[0].get_seq_length() == 6
    assert cache.layers[1].get_seq_length() == 0
    assert cache.layers[0].get_max_length() == 6


def test_what_does_not_fit_changes_nothing():
    cache = memory().new_cache()
    first = states(1, 4)
    cache.update(*first, 0)
    with pytest.raises(ContextFull, match="4 tokens are cached, 3 more exceed its limit of 6"):
        cache.update(*states(1, 3), 0)
    with pytest.raises(ContextFull, match=r"batch of 4 .* planned for 3; load the model with batch=4"):
        cache.update(*states(4, 1), 0)
    with pytest.raises(ContextFull, match="batch of 4"):
        cache.batch_repeat_interleave(4)
    with pytest.raises(ValueError, match="a batch of 2 sequences cannot go on from a KV cache of 1"):
        cache.update(*states(2, 1), 0)
    assert cache.get_seq_length() == 4
    assert torch.equal(cache.layers[0].keys, first[0])


def test_crop_and_reset():
    cache = memory().new_cache()
    first = states(2, 5)
    for layer in range(2):
        cache.update(*first, layer)
    cache.crop(-2)
    assert torch.equal(cache.layers[1].values, first[1][:, :, :3])
    with pytest.raises(ValueError, match="negative number of tokens"):
        cache.layers[0].crop(2)
    cache.crop(-100)
    assert cache.get_seq_length() == 0
    cache.update(*first, 0)
    cache.reset()
    assert cache.get_seq_length() == 0


def test_batches_are_reordered_repeated_and_selected_as_in_transformers():
    ours, theirs = memory(batch=4).new_cache(), DynamicCache()
    for cache in (ours, theirs):
        cache.update(*states(2, 3), 0)
        cache.reorder_cache(torch.tensor([1, 1]))
        cache.batch_repeat_interleave(2)
        cache.update(*states(4, 1, seed=1), 0)
        cache.reorder_cache(torch.tensor([3, 0, 2, 1]))
        cache.batch_select_indices(torch.tensor([2, 0]))
    assert torch.equal(ours.layers[0].keys, theirs.layers[0].keys)
    assert torch.equal(ours.layers[0].values, theirs.layers[0].values)


def test_one_cache_at_a_time_until_it_is_released_or_gone():
    kv = memory()
    first = kv.new_cache()
    with pytest.raises(UsageError, match="in use by another conversation; close that session"):
        kv.new_cache()
    kv.release(first)
    second = kv.new_cache()
    kv.release(first)  # once more is harmless, and does not free the second's
    with pytest.raises(UsageError, match="in use"):
        kv.new_cache()
    with pytest.raises(UsageError, match="this KV cache is closed"):
        first.update(*states(1, 1), 0)
    del second
    kv.new_cache()


@pytest.mark.parametrize("heads", [2, 4], ids=["as many heads as keys", "grouped"])
@pytest.mark.parametrize("threads", [1, 3])
def test_one_token_equals_the_last_of_many(heads, threads):
    length = 70
    native = _core.Attention(
        heads=heads,
        kv_heads=2,
        head_dim=4,
        max_length=80,
        dtype="float32",
        pool=_core.ThreadPool(threads),
        counters=_core.Counters(),
    )
    attend = PlannedAttention(Meter(), native, 80)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn((2, heads, length, 4), generator=generator)
    key, value = (torch.randn((2, 2, length, 4), generator=generator) for _ in range(2))
    out, _ = attend(torch.nn.Module(), query[:, :, -1:], key, value, None)
    repeated = (t.repeat_interleave(heads // 2, dim=1) for t in (key, value))
    expected = torch.nn.functional.scaled_dot_product_attention(query, *repeated, is_causal=True)[:, :, -1:]
    assert out.shape == (2, 1, heads, 4)
    assert (out.transpose(1, 2) - expected).abs().max() < 1e-6
    # Keys that lie with gaps between the positions, as in the planned cache.
    spread = torch.zeros((2, 2, 2, 80, 4))
    spread[0, :, :, :length], spread[1, :, :, :length] = key, value
    again, _ = attend(torch.nn.Module(), query[:, :, -1:], spread[0, :, :, :length], spread[1, :, :, :length], None)
    assert torch.equal(again, out)
    with pytest.raises(ValueError, match="head_dim last"):
        attend(torch.nn.Module(), query[:, :, -1:], key.transpose(1, 2).contiguous().transpose(1, 2), value, None)
