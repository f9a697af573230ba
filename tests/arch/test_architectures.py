"""What a config.json means: sizes, variants, tensors and their shapes, and what is refused."""

import copy
import dataclasses

import pytest
import torch
from arch_models import VARIANTS, make_config
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from flashllm.arch.registry import (
    ARCHITECTURES,
    block_spec,
    complete_config,
    resident_shapes,
    resident_sources,
    resolve,
    spec_of,
)
from flashllm.arch.spec import Architecture, ResidentTensor
from flashllm.errors import FormatError, UnsupportedModelError

OPT = ARCHITECTURES["opt"]
TINY = {"model_type": "opt", "hidden_size": 64, "ffn_dim": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}


def test_an_opt_config_is_understood():
    assert resolve(TINY) == Architecture(
        model_type="opt", num_layers=2, d_model=64, d_ff=256, activation="relu", gated=False, ffn_bias=True
    )
    assert resolve({**TINY, "enable_bias": False}).ffn_bias is False
    assert resolve(TINY).sparse


def test_a_llama_config_is_understood():
    assert resolve({**LLAMA, "num_hidden_layers": 3}) == Architecture(
        model_type="llama", num_layers=3, d_model=64, d_ff=96, activation="silu", gated=True, ffn_bias=False
    )
    assert not resolve(LLAMA).sparse
    assert resolve({**LLAMA, "hidden_act": "relu", "mlp_bias": True}).ffn_bias
    assert resolve({**LLAMA, "hidden_act": "relu"}).matrices == ("up", "gate", "down")


@pytest.mark.parametrize(("model_type", "theirs"), [("opt", OPTConfig()), ("llama", LlamaConfig())])
def test_missing_keys_have_transformers_defaults(model_type, theirs):
    ours, block, spec = resolve({"model_type": model_type}), block_spec({"model_type": model_type}), spec_of(model_type)
    assert (ours.num_layers, ours.d_model) == (theirs.num_hidden_layers, theirs.hidden_size)
    assert ours.d_ff == getattr(theirs, spec.d_ff_key)
    assert (block.context, block.vocab_size) == (theirs.max_position_embeddings, theirs.vocab_size)
    assert block.heads == block.kv_heads == theirs.num_attention_heads
    assert block.tied_head == theirs.tie_word_embeddings
    for key, value in spec.defaults.items():
        assert value is None or getattr(theirs, key) == value
    assert resolve(theirs.to_dict()) == ours


def test_kv_bytes():
    # keys and values, 2 layers, 2 heads of 32, two bytes
    assert block_spec(TINY).kv_nbytes_per_token(2, 2) == 2 * 2 * 2 * 32 * 2
    assert block_spec({**LLAMA, "num_key_value_heads": 1}).kv_nbytes_per_token(2, 2) == 2 * 2 * 1 * 16 * 2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mamba"}, "'mamba' is not supported; supported: llama, opt"),
        ({"model_type": None}, "not supported"),
        ({"model_type": ["opt"]}, "not supported"),
        ({**TINY, "activation_function": "gelu"}, "activation 'gelu' is not supported for opt; supported: relu"),
        ({**TINY, "activation_function": {}}, "is not supported"),
        ({**LLAMA, "hidden_act": "gelu"}, "activation 'gelu' is not supported for llama"),
        ({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported"),
        ({**LLAMA, "rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "supported: default, linear, llama3"),
        ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
    ],
)
def test_unsupported_variants(config, message):
    with pytest.raises(UnsupportedModelError, match=message):
        resolve(config)


@pytest.mark.parametrize(
    ("config", "key", "value"),
    [
        (TINY, "num_hidden_layers", 0),
        (TINY, "num_hidden_layers", 10**6),
        (TINY, "num_hidden_layers", -1),
        (TINY, "num_hidden_layers", True),
        (TINY, "num_hidden_layers", None),
        (TINY, "hidden_size", "64"),
        (TINY, "hidden_size", 64.0),
        (TINY, "ffn_dim", 0),
        (TINY, "ffn_dim", 2**40),
        (TINY, "ffn_dim", [256]),
        (TINY, "num_attention_heads", 0),
        (TINY, "num_attention_heads", 7),
        (TINY, "max_position_embeddings", 0),
        (TINY, "word_embed_proj_dim", 0),
        (TINY, "vocab_size", "many"),
        (LLAMA, "num_key_value_heads", 3),
        (LLAMA, "num_key_value_heads", 0),
        (LLAMA, "num_attention_heads", 5),
        (LLAMA, "head_dim", 15),
        (LLAMA, "head_dim", -16),
        (LLAMA, "rms_norm_eps", None),
        (LLAMA, "rms_norm_eps", -1.0),
        (LLAMA, "rope_theta", 0),
        (LLAMA, "rope_theta", float("nan")),
        (LLAMA, "rope_scaling", 4),
        (LLAMA, "rope_scaling", {"type": "linear"}),
        (LLAMA, "rope_scaling", {"rope_type": "linear", "factor": -2.0}),
        (LLAMA, "rope_scaling", {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}),
        (
            LLAMA,
            "rope_scaling",
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
        ),
    ],
)
def test_impossible_values(config, key, value):
    with pytest.raises(FormatError, match=r"^config\.json: "):
        resolve({**config, key: value})


@pytest.mark.parametrize("name", VARIANTS)
def test_tensors_are_those_of_the_hugging_face_model(name):
    config = make_config(VARIANTS[name])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del expected["lm_head.weight"]
    sources, shapes = resident_sources(config.to_dict()), resident_shapes(config.to_dict())
    assert set(sources) == set(shapes)
    assert len(set(sources.values())) == len(sources)
    found = {source: shapes[canonical] for canonical, source in sources.items()}
    ffn = {
        pattern.format(i=layer)
        for layer in range(config.num_hidden_layers)
        for pattern in spec_of(config.model_type).matrices.values()
    }
    assert not set(found) & ffn
    assert found == {key: shape for key, shape in expected.items() if key not in ffn}
    assert ffn <= set(expected)


def test_tensors_come_in_the_order_of_a_forward_pass():
    names = list(resident_sources({**TINY, "word_embed_proj_dim": 32, "tie_word_embeddings": False}))
    assert names[:4] == [
        "embedding.weight",
        "positions.weight",
        "project_in.weight",
        "layers.0.attention_norm.weight",
    ]
    assert names[-4:] == ["final_norm.weight", "final_norm.bias", "project_out.weight", "head.weight"]
    layers = [int(name.split(".")[1]) for name in names if name.startswith("layers.")]
    assert layers == sorted(layers)


def test_the_prefix_is_added_where_a_checkpoint_lacks_it():
    bare = ["decoder.embed_tokens.weight", "decoder.layers.0.fc1.weight", "decoder.version", "lm_head.weight"]
    assert OPT.with_prefix(bare) == {
        "model.decoder.embed_tokens.weight": "decoder.embed_tokens.weight",
        "model.decoder.layers.0.fc1.weight": "decoder.layers.0.fc1.weight",
        "lm_head.weight": "lm_head.weight",
    }
    full = ["model.decoder.embed_tokens.weight", "extra.weight"]
    assert OPT.with_prefix(full) == {name: name for name in full}
    old = ["model.embed_tokens.weight", "model.layers.3.self_attn.rotary_emb.inv_freq"]
    assert list(spec_of("llama").with_prefix(old)) == old[:1]


def test_a_tensor_with_and_without_prefix_is_an_error():
    names = ["decoder.embed_tokens.weight", "decoder.x", "model.decoder.x"]
    with pytest.raises(FormatError, match="has both"):
        OPT.with_prefix(names)


def test_a_spec_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="matrices must be"):
        dataclasses.replace(OPT, matrices={"down": "a", "up": "b"})
    with pytest.raises(ValueError, match="fc1' is not a canonical name"):
        dataclasses.replace(OPT, resident=(ResidentTensor(name="layers.{i}.fc1", source="x"),))
    block = block_spec(LLAMA)
    for change, message in (
        ({"activation": "gelu"}, "activation must be one of"),
        ({"kv_heads": 3}, "3 key-value heads do not divide 4 heads"),
        ({"inverse_frequency": None}, "inverse_frequency belongs to rotary positions"),
        ({"rotary_dims": 8}, "8 rotary dimensions do not fit heads of 16"),
        ({"norm_epsilon": -1.0}, "norm_epsilon must be"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(block, **change)


# Rotary frequencies

_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES = [
    {},
    {"rope_theta": 500_000.0},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    {"rope_scaling": {"type": "linear", "factor": 4.0}},
    {"rope_theta": 5e5, "rope_scaling": {**_LLAMA3, "original_max_position_embeddings": 8192}},
    {"rope_theta": 5e5, "rope_scaling": _LLAMA3, "max_position_embeddings": 4096},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 7.0}},
]


@pytest.mark.parametrize("rope", ROPES, ids=str)
def test_rotary_frequencies_are_those_of_transformers(rope):
    config = {**LLAMA, "head_dim": 128, **rope}
    theirs = LlamaConfig(**{key: copy.deepcopy(value) for key, value in config.items() if key != "model_type"})
    kind = theirs.rope_parameters["rope_type"]
    compute = LlamaRotaryEmbedding.compute_default_rope_parameters if kind == "default" else ROPE_INIT_FUNCTIONS[kind]
    frequencies, scaling = compute(theirs)
    block = block_spec(config)
    assert (block.rotary_dims, block.rotary_scaling) == (128, scaling)
    torch.testing.assert_close(torch.tensor(block.inverse_frequency), frequencies, rtol=1e-6, atol=0)
    # As transformers saves it today, the config means the same.
    saved = block_spec(complete_config(theirs.to_dict()))
    assert saved == block


def test_llama_3s_rule_keeps_blends_and_stretches():
    plain = block_spec({**LLAMA, "head_dim": 128, "rope_theta": 5e5}).inverse_frequency
    scaled = block_spec({**LLAMA, "head_dim": 128, **ROPES[4]}).inverse_frequency
    ratios = [a / b for a, b in zip(plain, scaled, strict=True)]
    assert ratios[0] == 1
    assert ratios[-1] == pytest.approx(8)
    assert any(1.01 < ratio < 7.9 for ratio in ratios)
