"""The table: what a config.json means, which variants are refused, and that other architectures are data."""

import dataclasses

import pytest
import torch
from tiny_models import GATED
from transformers import OPTConfig, OPTForCausalLM

from flashllm.arch.registry import (
    ARCHITECTURES,
    OPT,
    Architecture,
    attention_shape,
    canonical_names,
    resident_names,
    resolve,
)
from flashllm.errors import FormatError, UnsupportedModelError

TINY = {"model_type": "opt", "hidden_size": 64, "ffn_dim": 256, "num_hidden_layers": 2, "num_attention_heads": 2}


def test_an_opt_config_is_understood():
    assert resolve(TINY) == Architecture(
        model_type="opt", num_layers=2, d_model=64, d_ff=256, activation="relu", gated=False, ffn_bias=True
    )
    assert resolve({**TINY, "enable_bias": False}).ffn_bias is False


def test_missing_keys_have_transformers_defaults():
    config = OPTConfig()
    architecture, attention = resolve({"model_type": "opt"}), attention_shape({"model_type": "opt"})
    assert (architecture.num_layers, architecture.d_model) == (config.num_hidden_layers, config.hidden_size)
    assert (architecture.d_ff, architecture.activation) == (config.ffn_dim, config.activation_function)
    assert attention.context == config.max_position_embeddings
    assert attention.num_kv_heads == config.num_attention_heads
    for key, value in OPT.defaults.items():
        assert getattr(config, key) == value


def test_kv_bytes():
    # keys and values, 2 layers, 2 heads of 32, two bytes
    assert attention_shape(TINY).kv_nbytes_per_token(2) == 2 * 2 * 2 * 32 * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "'llama' is not supported; supported: opt"),
        ({"model_type": None}, "not supported"),
        ({"model_type": ["opt"]}, "not supported"),
        ({"do_layer_norm_before": False}, "do_layer_norm_before is false"),
        ({"_remove_final_layer_norm": True}, "no final norm"),
        ({"activation_function": "gelu"}, "activation 'gelu' is not supported"),
        ({"activation_function": {}}, "is not supported"),
    ],
)
def test_unsupported_variants(change, message):
    with pytest.raises(UnsupportedModelError, match=message):
        resolve({**TINY, **change})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 0),
        ("num_hidden_layers", 10**6),
        ("num_hidden_layers", -1),
        ("num_hidden_layers", True),
        ("num_hidden_layers", None),
        ("hidden_size", "64"),
        ("hidden_size", 64.0),
        ("ffn_dim", 0),
        ("ffn_dim", 2**40),
        ("ffn_dim", [256]),
        ("num_attention_heads", 0),
        ("num_attention_heads", 7),
        ("max_position_embeddings", 0),
    ],
)
def test_impossible_sizes(key, value):
    with pytest.raises(FormatError, match=r"^config\.json: "):
        resolve({**TINY, key: value})


@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"word_embed_proj_dim": 32},
        {"word_embed_proj_dim": 64},
        {"enable_bias": False},
        {"layer_norm_elementwise_affine": False},
        {"tie_word_embeddings": False},
    ],
    ids=str,
)
def test_resident_and_ffn_names_are_those_of_the_hugging_face_model(variant):
    config = OPTConfig(vocab_size=300, max_position_embeddings=16, **TINY | variant)
    with torch.device("meta"):
        model = OPTForCausalLM(config)
    expected = set(model.state_dict())
    if config.tie_word_embeddings:
        expected.remove("lm_head.weight")
    names = resident_names(config.to_dict())
    ffn = {pattern.format(i=layer) for layer in range(2) for pattern in OPT.matrices().values()}
    assert len(names) == len(set(names))
    assert set(names) | ffn == expected
    assert not set(names) & ffn


def test_the_prefix_is_added_where_a_checkpoint_lacks_it():
    bare = ["decoder.embed_tokens.weight", "decoder.layers.0.fc1.weight", "decoder.version", "lm_head.weight"]
    assert canonical_names(OPT, bare) == {
        "model.decoder.embed_tokens.weight": "decoder.embed_tokens.weight",
        "model.decoder.layers.0.fc1.weight": "decoder.layers.0.fc1.weight",
        "lm_head.weight": "lm_head.weight",
    }
    full = ["model.decoder.embed_tokens.weight", "extra.weight"]
    assert canonical_names(OPT, full) == {name: name for name in full}


def test_a_tensor_with_and_without_prefix_is_an_error():
    names = ["decoder.embed_tokens.weight", "decoder.x", "model.decoder.x"]
    with pytest.raises(FormatError, match="has both"):
        canonical_names(OPT, names)


def test_a_gated_parallel_architecture_is_data(monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, GATED.model_type, GATED)
    config = {"model_type": "gated", "hidden_act": "relu2", "layers": 1, "dim": 48, "inner": 96, "heads": 5}
    config |= {"kv_heads": 1, "head_dim": 16, "context": 8}
    architecture = resolve(config)
    assert (architecture.activation, architecture.gated, architecture.ffn_bias) == ("squared_relu", True, False)
    assert architecture.matrices == tuple(GATED.matrices()) == ("up", "gate", "down")
    assert attention_shape(config).kv_nbytes_per_token(2) == 2 * 1 * 1 * 16 * 2
    assert resident_names(config) == ["model.embed.weight", "model.layers.0.norm.weight", "lm_head.weight"]
    with pytest.raises(ValueError, match="'gelu' is not one of"):
        dataclasses.replace(GATED, activations={"gelu": "gelu"})
    with pytest.raises(ValueError, match="without a gate_weight"):
        dataclasses.replace(GATED, gate_weight=None, gate_bias="x")
