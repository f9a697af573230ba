"""One call a layer gives the bits of transformers' modules, and is taken where it may be and nowhere else."""

import dataclasses

import predictor_files
import pytest
import torch
from tiny_models import make_tiny_opt
from transformers import DynamicCache

from flashllm.arch import registry as architectures
from flashllm.convert.run import convert
from flashllm.engine.attention import ContextFull
from flashllm.engine.decoder import NativeDecoder
from flashllm.errors import UsageError

DTYPES = ("float32", "float16", "bfloat16")
K0 = 8


def ids_of(rows, length, seed=0):
    return torch.randint(5, 290, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def steps(monkeypatch):
    """The layers of the native steps taken, in order."""
    taken, step = [], NativeDecoder.step

    def record(self, layer, *args):
        taken.append(layer)
        return step(self, layer, *args)

    monkeypatch.setattr(NativeDecoder, "step", record)
    return taken


def token_by_token(flash, ids, *, prompt, modules=False, cache=None):
    """Logits of a prompt, then of one token a sequence at a time; `modules`: with hooks inside the layers."""
    cache = flash.new_cache() if cache is None else cache
    layers = flash.model.decoder.layers if modules else []
    handles = [layer.self_attn.register_forward_hook(lambda *_: None) for layer in layers]
    logits = []
    for start, end in ((0, prompt), *((t, t + 1) for t in range(prompt, ids.shape[1]))):
        if start < end:
            logits.append(flash(ids[:, start:end], past_key_values=cache, use_cache=True).logits)
    for handle in handles:
        handle.remove()
    return torch.cat(logits, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("batch", "prompt"), [(1, 0), (1, 20), (3, 5), (K0, 3)])
def test_same_bits_as_module_by_module(tiny, load, steps, dtype, threads, batch, prompt):  # noqa: PLR0917
    flash, ids = load(tiny(dtype).path("random"), threads=threads, batch=batch), ids_of(batch, 30)
    native = token_by_token(flash, ids, prompt=prompt)
    assert steps == [0, 1, 2] * (30 - prompt)
    assert torch.equal(token_by_token(flash, ids, prompt=prompt, modules=True), native)
    assert len(steps) == 3 * (30 - prompt)
    # One by one is as all together.
    alone = load(tiny(dtype).path("random"))
    if prompt == 0:
        for row in range(batch):
            assert torch.equal(token_by_token(alone, ids[row : row + 1], prompt=0), native[row : row + 1])


@pytest.mark.parametrize("config", [{"enable_bias": False}, {"layer_norm_elementwise_affine": False}], ids=str)
def test_variants_without_biases_or_norm_weights(tmp_path, load, steps, config):
    source = make_tiny_opt(tmp_path / "hf", dtype="bfloat16", **config)
    convert(source, tmp_path / "model")
    predictor_files.install("all", source, tmp_path / "model", tmp_path)
    flash, ids = load(tmp_path / "model"), ids_of(1, 12)
    native = token_by_token(flash, ids, prompt=4)
    assert len(steps) == 2 * 8
    own = token_by_token(flash, ids, prompt=4, cache=DynamicCache())
    assert torch.equal(own, native)


def test_what_goes_through_modules(tiny, load, steps):
    flash = load(tiny().path("random"), batch=K0 + 1)
    ids = ids_of(2, 6)
    token_by_token(flash, ids, prompt=6)  # several tokens
    token_by_token(flash, ids, prompt=3, cache=DynamicCache())  # a cache of one's own
    token_by_token(flash, ids_of(K0 + 1, 4), prompt=3)  # more sequences than few tokens
    mask = torch.ones((2, 7), dtype=torch.long)
    mask[0, 0] = 0
    cache = flash.new_cache()  # a padded batch
    flash(ids, attention_mask=mask[:, :6], past_key_values=cache, use_cache=True)
    flash(ids[:, :1], attention_mask=mask, past_key_values=cache, use_cache=True)
    assert steps == []
    for mode in ("dense", "oracle"):
        other = load(tiny().path("bare"), mode=mode)
        token_by_token(other, ids[:1], prompt=4)
        assert other.engine.decoding == "module by module"
    assert steps == []
    assert flash.engine.decoding == "one call a layer"


def test_another_models_cache_is_not_taken_for_ones_own(tiny, load, steps):
    one, other = load(tiny().path("random")), load(tiny().path("random"))
    ids = ids_of(1, 8)
    expected = token_by_token(one, ids, prompt=4, modules=True)
    steps.clear()
    assert torch.equal(token_by_token(one, ids, prompt=4, cache=other.new_cache()), expected)
    assert steps == []


def test_an_architecture_whose_layers_are_not_known(tiny, load, steps, monkeypatch):
    known = load(tiny().path("random"))
    ids = ids_of(1, 10)
    expected = token_by_token(known, ids, prompt=4)
    steps.clear()
    unknown = dataclasses.replace(architectures.OPT, decoder_block=None)
    monkeypatch.setitem(architectures.ARCHITECTURES, "opt", unknown)
    flash = load(tiny().path("random"))
    assert torch.equal(token_by_token(flash, ids, prompt=4), expected)
    assert flash.engine.decoding == "module by module"
    assert steps == []


def test_outputs_of_layers_are_recorded(tiny, load):
    flash, ids = load(tiny().path("random")), ids_of(1, 5)
    cache = flash.new_cache()
    flash(ids, past_key_values=cache, use_cache=True)
    out = flash(ids[:, :1], past_key_values=cache, use_cache=True, output_hidden_states=True)
    assert [state.shape for state in out.hidden_states] == [(1, 1, 64)] * 4


def test_a_full_context_and_a_closed_cache_say_so(tiny, load):
    flash, ids = load(tiny().path("random"), context=12), ids_of(1, 12)
    cache = flash.new_cache()
    token_by_token(flash, ids, prompt=4, cache=cache)
    with pytest.raises(ContextFull, match="12 tokens are cached, 1 more exceed"):
        flash(ids[:, :1], past_key_values=cache, use_cache=True)
    assert [layer.length for layer in cache.layers] == [12, 12, 12]
    flash.release_cache(cache)
    with pytest.raises(UsageError, match="this KV cache is closed"):
        flash(ids[:, :1], past_key_values=cache, use_cache=True)
