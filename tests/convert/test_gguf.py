"""GGUF files: bit for bit what the same weights give as safetensors, by any kind of tensor; each fault is named."""

import json
import math
import os
import shutil
from contextlib import ExitStack
from dataclasses import replace

import gguf
import gguf_files
import numpy as np
import pytest
import torch
from arch_models import VARIANTS as VARIANTS_OF_FOLDERS
from arch_models import Variant, make_checkpoint, tokens
from gguf_files import KINDS, write_gguf
from planned import logits_of
from tiny_models import SENTENCES, config_of
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from weights_of_folders import digests, tensors_of, try_to_open

from flashllm import FlashModel
from flashllm.arch.registry import block_spec
from flashllm.base.dtypes import WEIGHT_DTYPES
from flashllm.cli import main
from flashllm.convert import locate
from flashllm.convert.checkpoint.gguf import file as gguf_file
from flashllm.convert.checkpoint.gguf.config import model_config
from flashllm.convert.checkpoint.gguf.experts import MIXTURES
from flashllm.convert.checkpoint.gguf.file import GgufTensor, StoredTensor, open_gguf
from flashllm.convert.checkpoint.gguf.header import read_header
from flashllm.convert.checkpoint.gguf.models import MODELS
from flashllm.convert.checkpoint.gguf.row import paired_rows
from flashllm.convert.checkpoint.gguf.tensors import named_tensors
from flashllm.convert.checkpoint.opened import open_checkpoint
from flashllm.convert.locate import find_checkpoint, find_folder
from flashllm.convert.named import source_key
from flashllm.convert.run import convert
from flashllm.errors import FormatError, UnsupportedModelError, UsageError
from flashllm.format.model_files import FFN

QUANTISED = [kind for kind in KINDS if kind.name in gguf.quants.__dict__ and kind.name not in ("F32", "F16", "BF16")]
ROPE = {"rope_theta": 500.0}
VARIANTS = {
    "plain": {},
    "one key-value head": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "wide heads": {"head_dim": 24},
    "linear rope": {"rope_parameters": {**ROPE, "rope_type": "linear", "factor": 4.0}},
    "llama 3 rope": {
        "head_dim": 64,
        "rope_parameters": {
            "rope_theta": 500_000.0,
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
}


def _source(path, config=None, dtype="float32"):
    return make_checkpoint(path, Variant("llama", {"hidden_act": "silu", **(config or {})}), dtype=dtype)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return _source(tmp_path_factory.mktemp("gguf") / "llama")


def _variant(name):
    return VARIANTS_OF_FOLDERS.get(name) or Variant(name)


@pytest.fixture(scope="module")
def file_of(tmp_path_factory):
    """The GGUF file of a variant by name, made on first use. Not to be changed."""
    made = {}

    def get(name):
        if name not in made:
            root = tmp_path_factory.mktemp("file")
            made[name] = write_gguf(make_checkpoint(root / "hf", _variant(name)), root / "model.gguf")
        return made[name]

    return get


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_converts_to_the_same_weights_as_its_folder(tmp_path, variant):
    source = _source(tmp_path / "hf", VARIANTS[variant])
    path = write_gguf(source, tmp_path / "model.gguf")
    expected, found = convert(source, tmp_path / "expected"), convert(path, tmp_path / "found")
    assert digests(found) == digests(expected)
    assert found.architecture == expected.architecture
    ours = config_of(tmp_path / "found")
    theirs = config_of(source)
    for key in ours.keys() - {"mlp_bias", "attention_bias", "bos_token_id"}:
        assert ours[key] == pytest.approx(theirs[key]), key


WRAPPERS = {name: name for name in ("qwen2vl", "qwen3vl", "qwen3vlmoe")}  # names of a plain model's text
WITH_STATES = (  # whose tensors have another form, or whose value heads another order: see below
    *("qwen35", "qwen35moe", "qwen3next", "nemotron_h", "nemotron_h_moe", "granitehybrid", "falcon-h1", "kimi-linear"),
)


IN_CODES = ("bitnet", "bitnet-b1.58", "bitnet-25")  # whose folders hold codes: tests/arch/test_bitnet.py
PLAIN = [one for one in sorted(MODELS) if one not in ("llama", *WITH_STATES, *IN_CODES)]
MIXED = [name for name in MIXTURES if name not in WITH_STATES]
CHOSEN = {  # what a file cannot say otherwise
    **{name: {"query_pre_attn_scalar": 16} for name in ("gemma2", "gemma3")},
    **{name: {"norm_topk_prob": True} for name in ("qwen3moe", "qwen3vlmoe", "mellum")},
    "minicpm3": {"v_head_dim": 16},
    "afmoe": {"mup_enabled": True},
    "cohere2moe": {"expert_selection_fn": "sigmoid"},
}


@pytest.mark.parametrize(
    ("architecture", "model_type"),
    [*((name, MODELS[name].model_type) for name in PLAIN), *((name, MIXTURES[name].model_type) for name in MIXED)],
)
def test_every_architecture_converts_to_the_same_weights_and_block(tmp_path, architecture, model_type):
    """Every row of both tables; in bf16, to whose norms 1 can be added and taken from without rounding."""
    source = make_checkpoint(tmp_path / "hf", Variant(model_type, CHOSEN.get(architecture, {})), dtype="bfloat16")
    path = write_gguf(source, tmp_path / "model.gguf", "BF16", architecture=WRAPPERS.get(architecture))
    _same_model(tmp_path, source, path)


@pytest.mark.parametrize("architecture", MIXED)
def test_mixtures_in_codes_convert_to_the_values_that_these_mean(tmp_path, architecture):
    """Experts' widths are whole blocks. Codes of resident matrices may be kept."""
    sizes = dict.fromkeys(("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 64)
    if architecture in ("deepseek2", "mistral4"):
        sizes |= dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"), 32)
    variant = Variant(MIXTURES[architecture].model_type, {**sizes, **CHOSEN.get(architecture, {})})
    source = make_checkpoint(tmp_path / "hf", variant)
    path = write_gguf(source, tmp_path / "model.gguf", "Q8_0", architecture=WRAPPERS.get(architecture))
    with tensors_of(source) as state:
        for name, tensor in state.items():
            if tensor.ndim > 1 and tensor.shape[0] > 1 and not name.endswith(("_bias", "conv.conv.weight")):
                turned = architecture == "gpt-oss" and tensor.ndim == 3
                values = _as_q8_0(tensor.mT.contiguous() if turned else tensor)
                state[name] = values.mT.contiguous() if turned else values
    expected = convert(source, tmp_path / "expected", dtype="float32")
    found = convert(path, tmp_path / "found", dtype="float32")
    assert found.architecture == expected.architecture
    assert found.files[FFN] == expected.files[FFN]
    blocks = _blocks(tmp_path)
    assert blocks[0] == blocks[1]
    _check_config(tmp_path / "found")


def _as_q8_0(tensor):
    return torch.from_numpy(gguf.dequantize(gguf.quantize(tensor.numpy(), KINDS.Q8_0), KINDS.Q8_0))


_LONGROPE_OF_4 = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.25, 1.5, 2.0],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 160,
}
LATENT = {
    name: VARIANTS_OF_FOLDERS[name]
    for name in (
        *("youtu", "deepseek_v2", "deepseek_v2 groups", "deepseek_v2 yarn rope", "deepseek_v3"),
        *("glm4_moe_lite", "mistral4", "mistral4 groups"),
    )
}
LATENT["minicpm3"] = Variant("minicpm3", {"v_head_dim": 16})
LATENT["minicpm3 longrope"] = Variant("minicpm3", {"v_head_dim": 16, "rope_parameters": _LONGROPE_OF_4})


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("variant", LATENT)
def test_latent_attention_in_both_forms(tmp_path, variant, whole):
    source = make_checkpoint(tmp_path / "hf", LATENT[variant])
    path = write_gguf(source, tmp_path / "model.gguf", whole_latent=whole)
    _same_model(tmp_path, source, path)


ROUTED = [
    *("glm4_moe groups", "glm4_moe norms of heads, biases", "dots1", "minimax_m2 half turned", "granitemoe", "phimoe"),
    *("ernie4_5_moe every other layer", "granitemoeshared", "exaone_moe", "bailing_moe", "laguna", "hy_v3"),
    "mimo_v2_flash",
]
# Windows in all layers but every fourth, and scaled embeddings, are not stored.
WINDOWED = {
    name: Variant(name, {"num_hidden_layers": 5, "layer_types": None, "sliding_window": 50, **config})
    for name, config in (("afmoe", {"mup_enabled": True, "route_scale": 2.5}), ("cohere2", {"logit_scale": 0.5}))
}
_COMMAND = {"expert_selection_fn": "sigmoid", "sliding_window": 50, "logit_scale": 0.5, "num_hidden_layers": 6}
WINDOWED["cohere2_moe sigmoid"] = Variant("cohere2_moe", {**_COMMAND, "first_k_dense_replace": 2, "rms_norm_eps": 1e-5})
_THREE = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
WINDOWED["glm4, positions in three dimensions"] = Variant("glm4", {"rope_parameters": _THREE})
WINDOWED["laguna, all full"] = Variant("laguna", {"gating": "per-element", "sliding_window": 0})
_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 16}
WINDOWED["laguna, two rotations"] = Variant(
    "laguna",
    {
        "num_hidden_layers": 5,
        "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"],
        "num_attention_heads_per_layer": [4, 8, 8, 8, 4],
        "sliding_window": 50,
        "rope_parameters": {
            "full_attention": _YARN | {"attention_factor": 1.5, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    },
)
WINDOWED["mellum, two rotations"] = Variant(
    "mellum",
    WINDOWED["laguna, two rotations"].config
    | {
        "num_attention_heads_per_layer": None,
        "layer_types": [*["sliding_attention"] * 3, "full_attention", "sliding_attention"],
        "rope_parameters": {"full_attention": _YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}},
    },
)
WINDOWED["mimo_v2_flash, unscaled, half turned"] = Variant(
    "mimo_v2_flash",
    VARIANTS_OF_FOLDERS["mimo_v2_flash"].config
    | {
        "attention_value_scale": None,
        "attention_bias": True,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "rope_parameters": {
            each: {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": 0.5}
            for each, base in (("full_attention", 500.0), ("sliding_attention", 50.0))
        },
    },
)
WINDOWED["phimoe, long"] = Variant(
    "phimoe",
    {
        "rope_parameters": VARIANTS_OF_FOLDERS["phi3 longrope"].config["rope_parameters"]
        | {"short_mscale": 1.243163121016122, "long_mscale": 1.243163121016122},
        "original_max_position_embeddings": 160,
    },
)
# Whose usual share of a head is a part.
_TURNED_WHOLE = {"rope_parameters": {**ROPE, "partial_rotary_factor": 1.0}}
WINDOWED |= {f"{name}, turned whole": Variant(name, _TURNED_WHOLE) for name in ("stablelm", "phi", "gpt_neox")}
MORE = [*WINDOWED, "gemma4", "gemma4 experts", "gemma4 shared keys, rows of ids", "exaone4", "exaone4 without windows"]
MORE += ["seed_oss", "ernie4_5", "hunyuan_v1_dense", "ministral3", "falcon new architecture"]


@pytest.mark.parametrize("variant", ROUTED + MORE)
def test_routers_dense_layers_windows_and_biases(tmp_path, variant):
    source = make_checkpoint(tmp_path / "hf", WINDOWED.get(variant) or VARIANTS_OF_FOLDERS[variant])
    _same_model(tmp_path, source, write_gguf(source, tmp_path / "model.gguf"))


def test_keys_and_values_that_no_layer_uses_are_left_out_and_said(tmp_path):
    """Of layers that use another's, published Gemma 4 has them all the same."""
    source = make_checkpoint(tmp_path / "hf", VARIANTS_OF_FOLDERS["gemma4 shared keys, rows of ids"])
    expected = convert(write_gguf(source, tmp_path / "model.gguf"), tmp_path / "expected")
    with tensors_of(source) as state:
        for part in ("k_proj", "v_proj", "k_norm"):
            state[f"model.layers.3.self_attn.{part}.weight"] = state[f"model.layers.2.self_attn.{part}.weight"].clone()
    lines = []
    found = convert(write_gguf(source, tmp_path / "more.gguf"), tmp_path / "found", say=lines.append)
    assert digests(found) == digests(expected)
    assert lines[0] == "left out: keys and values of layers that use another's (3 tensors)"


@pytest.mark.parametrize(
    ("variant", "whole"),
    [("qwen3_next", False), ("qwen3_next", True), ("qwen3_5", False), ("qwen3_5 tied", False), ("qwen3_5_moe", False)],
)
def test_value_heads_are_computed_as_they_lie(tmp_path, variant, whole):
    """Tiled, but for Qwen3-Next's, whose older files have the gate among the other projections; and what is stored in
    another form has the same meaning."""
    blocks = _converted_both_ways(tmp_path, VARIANTS_OF_FOLDERS[variant], whole_latent=whole)
    assert [layer.mixer.kind == "delta_rule" and layer.mixer.tiled for layer in blocks[0].layers] == [
        variant != "qwen3_next" and layer.mixer.kind == "delta_rule" for layer in blocks[1].layers
    ]


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("variant", ["kimi_linear", "kimi_linear groups"])
def test_decays_of_each_channel(tmp_path, variant, whole):
    """With as many heads that keep a state as attend: a file has one number for both."""
    config = VARIANTS_OF_FOLDERS[variant].config | {"linear_num_heads": 4}
    blocks = _converted_both_ways(tmp_path, Variant("kimi_linear", config), whole_latent=whole)
    assert blocks[0] == blocks[1]


MAMBA = {
    "nemotron_h_moe": Variant(
        "nemotron_h", {"hybrid_override_pattern": "E*MEE", "n_group": 2, "topk_group": 1, "use_conv_bias": False}
    ),
    "nemotron_h": Variant("nemotron_h", {"hybrid_override_pattern": "M-*-M-"}),
    "granitehybrid": VARIANTS_OF_FOLDERS["granitemoehybrid"],
    "granitehybrid biases": Variant("granitemoehybrid", {"attention_bias": True, "mamba_conv_bias": False}),
    "granitehybrid dense": Variant("granitemoehybrid", {"num_local_experts": 0, "tie_word_embeddings": True}),
    "falcon-h1": VARIANTS_OF_FOLDERS["falcon_h1"],
    "bamba": Variant("bamba", {"partial_rotary_factor": 0.5}),
    "bamba turned whole": Variant("bamba", {"rope_parameters": {**ROPE, "partial_rotary_factor": 1.0}}),
    "falcon-h1 normed": Variant(
        "falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "attention_bias": True, "mlp_bias": True}
    ),
}


@pytest.mark.parametrize("name", MAMBA)
def test_mixers_of_mamba_are_computed_as_they_lie(tmp_path, name):
    """Falcon-H1's multipliers are in its file's weights."""
    blocks = _converted_both_ways(tmp_path, MAMBA[name])
    if name != "falcon-h1":
        assert blocks[0] == blocks[1]


def test_squared_neurons_of_codes_are_in_bfloat16(tmp_path):
    sizes = {"hybrid_override_pattern": "ME*E", "moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 64}
    source = make_checkpoint(tmp_path / "hf", Variant("nemotron_h", {**sizes, "mamba_head_dim": 16, "head_dim": 16}))
    path = write_gguf(source, tmp_path / "model.gguf", lambda name: "F32" if "conv1d" in name else "Q8_0")
    assert convert(path, tmp_path / "model").dtype == "bfloat16"


def _same_logits(root, source):
    """The file's, the folder's and transformers'."""
    _check_config(root / "found")
    found, expected = (logits_of(root / name, "dense") for name in ("found", "expected"))
    np.testing.assert_allclose(found, expected, atol=2e-4, rtol=0)
    transformers = AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        np.testing.assert_allclose(found[:40], transformers(torch.tensor([tokens(40)])).logits[0], atol=5e-4, rtol=0)


def _blocks(root):
    """Of the file, and of its folder."""
    return [block_spec(config_of(root / name)) for name in ("found", "expected")]


def _converted_both_ways(root, variant, **layout):
    """The block of a GGUF file's conversion and of its folder's, whose logits are the same."""
    source = make_checkpoint(root / "hf", variant)
    convert(source, root / "expected")
    convert(write_gguf(source, root / "model.gguf", **layout), root / "found")
    _same_logits(root, source)
    return _blocks(root)


@pytest.mark.parametrize("variant", ["glm4_moe", "qwen3_5_moe", "hy_v3", "mimo_v2_flash"])
def test_layers_that_draft_are_left_out_and_said(tmp_path, variant):
    """A file counts them among its blocks."""
    source = make_checkpoint(tmp_path / "hf", VARIANTS_OF_FOLDERS[variant])
    expected = convert(write_gguf(source, tmp_path / "model.gguf"), tmp_path / "expected")
    lines = []
    path = write_gguf(source, tmp_path / "more.gguf", drafting=True)
    found = convert(path, tmp_path / "found", say=lines.append)
    assert digests(found) == digests(expected)
    assert lines[0].startswith("left out: 1 layers that draft tokens (")
    assert config_of(tmp_path / "found")["num_hidden_layers"] == 3


_BY_GROUPS = {"expert_group_count": 4, "expert_group_used_count": 2}


@pytest.mark.parametrize(
    ("variant", "metadata", "expected"),
    [
        ("deepseek_v3", {"expert_gating_func": None, "expert_weights_norm": None}, {"model_type": "deepseek_v2"}),
        ("deepseek_v3", {"expert_weights_scale": None}, {"routed_scaling_factor": 1.0}),
        ("deepseek_v3", {"expert_weights_scale": 0.0}, {"routed_scaling_factor": 1.0}),
        ("deepseek_v3", {"expert_weights_norm": None}, {"norm_topk_prob": False}),
        ("glm4_moe_lite", {"leading_dense_block_count": 2}, {"mlp_layer_types": ["dense", "dense", "sparse"]}),
        ("glm4_moe_lite", {"attention.layer_norm_rms_epsilon": 1e-6}, {"model_type": "deepseek_v3"}),
        ("deepseek_v2", {"attention.q_lora_rank": None}, {"q_lora_rank": None}),
        ("deepseek_v2", _BY_GROUPS, {"topk_method": "group_limited_greedy", "n_group": 4}),
    ],
)
def test_what_the_metadata_leaves_out_is_as_llama_cpp_has_it(file_of, monkeypatch, variant, metadata, expected):
    _patch_metadata(monkeypatch, {f"deepseek2.{key}": value for key, value in metadata.items()})
    with open_checkpoint(file_of(variant)) as checkpoint:
        assert {key: checkpoint.config[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("layers", "vocab", "model_type"),
    [(47, 154880, "glm4_moe_lite"), (48, 154880, "glm4_moe_lite"), (47, 154881, "deepseek_v2")],
)
def test_a_router_of_glm_4_7_flash_is_told_by_its_shape(file_of, monkeypatch, layers, vocab, model_type):
    """Files of January 2026 do not say how it scores."""
    changes = {"expert_gating_func": None, "expert_weights_norm": None, "block_count": layers}
    _patch_metadata(monkeypatch, {f"deepseek2.{key}": value for key, value in changes.items()})
    with ExitStack() as stack:
        content = open_gguf(file_of("glm4_moe_lite"), stack)
        embedding = replace(content.tensors["token_embd.weight"], shape=(vocab, 64))
        config = model_config(replace(content, tensors={**content.tensors, "token_embd.weight": embedding}))
    assert config["model_type"] == model_type


def test_scales_of_whole_tensors_are_refused(file_of):
    """Of others than NVFP4: without them every weight would be another."""
    with ExitStack() as stack:
        content = open_gguf(file_of("qwen2"), stack)
        scale = replace(content.tensors["blk.0.attn_norm.weight"], shape=(1,))
        content = replace(content, tensors={**content.tensors, "blk.0.attn_q.scale": scale})
        with pytest.raises(UnsupportedModelError, match=r"blk.0.attn_q.scale scales a whole tensor.*Q4_K_M, MXFP4"):
            named_tensors(content, model_config(content))


@pytest.mark.parametrize(("scale", "expected"), [(None, {"attention_factor": 1.0}), (0.1, {"mscale_all_dim": 1.0})])
def test_what_yarn_multiplies_scores_by(file_of, monkeypatch, scale, expected):
    _patch_metadata(monkeypatch, {"deepseek2.rope.scaling.yarn_log_multiplier": scale})
    with open_checkpoint(file_of("deepseek_v2 yarn rope")) as checkpoint:
        rope = checkpoint.config["rope_parameters"]
    assert {key: rope[key] for key in expected} == expected
    assert ("mscale" in rope) == (scale is not None)


@pytest.mark.parametrize("name", ["mistral4", "deepseek2"])
def test_how_queries_grow(tmp_path, monkeypatch, name):
    """Mistral 4's files do not say it; Mistral Large 3's are DeepSeek's, and do."""
    monkeypatch.setitem(gguf_files.ARCHITECTURES, "mistral4", name)
    source = VARIANTS_OF_FOLDERS["mistral4"]
    rope = {**source.config["rope_parameters"], "llama_4_scaling_beta": 0.1}
    source = make_checkpoint(tmp_path / "hf", Variant("mistral4", {"rope_parameters": rope}))
    _same_model(tmp_path, source, write_gguf(source, tmp_path / "model.gguf"))
    path = write_gguf(source, tmp_path / "odd.gguf", metadata={f"{name}.attention.temperature_length": 41})
    with pytest.raises(FormatError, match="every 40 positions"):
        try_to_open(path)


def test_gates_and_ups_in_one_tensor(tmp_path):
    """Of each expert, the gate's rows come first."""
    source = make_checkpoint(tmp_path / "hf", Variant("qwen3_moe", {"norm_topk_prob": True}))
    expected = convert(write_gguf(source, tmp_path / "apart.gguf"), tmp_path / "expected")
    found = convert(write_gguf(source, tmp_path / "fused.gguf", fused_experts=True), tmp_path / "found")
    assert digests(found) == digests(expected)


def _same_model(root, source, path):
    """The file says what the folder says."""
    expected, found = convert(source, root / "expected"), convert(path, root / "found")
    assert found.architecture == expected.architecture
    blocks = _blocks(root)
    assert blocks[0] == blocks[1]
    assert digests(found) == digests(expected)
    _check_config(root / "found")


def _check_config(path):
    """transformers' config class takes every key as it is, where it has one."""
    config = config_of(path)
    if config["model_type"] not in CONFIG_MAPPING:
        return
    taken = AutoConfig.from_pretrained(path)
    taken.allow_global_per_layer_attribute_access = True
    for key, said in config.items():
        found = getattr(taken, key) if key != "per_layer_config" else taken.to_dict()[key]
        assert ({**found, **said} if isinstance(said, dict) else said) == found, key  # it may add to a dict


LONGROPE = VARIANTS_OF_FOLDERS["phi3 longrope"].config


@pytest.mark.parametrize("share", [1.0, 0.75])
@pytest.mark.parametrize("said", [None, "longrope"])
def test_phi3s_long_contexts_answer_as_transformers(tmp_path, share, said):
    """Factors in tensors of their own; Phi-4-mini turns a part of its heads' dimensions."""
    rope = LONGROPE["rope_parameters"] | {"partial_rotary_factor": share}
    rope |= {key: rope[key][: int(8 * share)] for key in ("short_factor", "long_factor")}
    source = make_checkpoint(tmp_path / "hf", Variant("phi3", LONGROPE | {"rope_parameters": rope}))
    metadata = {} if said is None else {"phi3.rope.scaling.type": said}
    path = write_gguf(source, tmp_path / "model.gguf", metadata=metadata)
    manifest = convert(path, tmp_path / "model")
    assert digests(manifest) == digests(convert(source, tmp_path / "expected"))
    _check_config(tmp_path / "model")
    ours, theirs = config_of(tmp_path / "model"), config_of(source)
    for key in ("max_position_embeddings", "original_max_position_embeddings"):
        assert ours[key] == theirs[key]
    for key in ("short_factor", "long_factor"):
        assert ours["rope_parameters"][key] == rope[key]
    assert block_spec(ours).context == block_spec(theirs).context == LONGROPE["original_max_position_embeddings"]
    ids = torch.randint(4, 300, (1, 150), generator=torch.Generator().manual_seed(5))
    with FlashModel.from_pretrained(tmp_path / "model", threads=1) as model, torch.no_grad():
        found = model(ids).logits
        expected = AutoModelForCausalLM.from_pretrained(source)(ids).logits
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


def test_long_contexts_of_other_rules_and_a_window_of_nothing(file_of, tmp_path, monkeypatch):
    rope = {"rope_parameters": LONGROPE["rope_parameters"] | {"original_max_position_embeddings": 40}}
    llama = write_gguf(_source(tmp_path / "llama", rope), tmp_path / "llama.gguf")
    with pytest.raises(UnsupportedModelError, match=r"of Phi-3 and MiniCPM 3 alone.*convert the model's Hugging"):
        try_to_open(llama)
    _patch_metadata(monkeypatch, {"phi3.attention.sliding_window": 0})
    with open_checkpoint(file_of("phi3")) as checkpoint:
        assert checkpoint.config["sliding_window"] is None
        assert checkpoint.config["rope_parameters"]["rope_type"] == "default"


def test_long_contexts_without_their_factors(tmp_path):
    source = make_checkpoint(tmp_path / "hf", VARIANTS_OF_FOLDERS["phi3 longrope"])
    path = write_gguf(source, tmp_path / "model.gguf", drop="rope_factors_short.weight")
    with pytest.raises(FormatError, match=r"tensor rope_factors_short\.weight is missing; .*8 pairs"):
        try_to_open(path)


def test_experts_in_a_tensor_each_and_stacks_of_another_number(file_of, tmp_path, monkeypatch):
    path = file_of("olmoe")
    expected = convert(path, tmp_path / "expected")

    def apart(*arguments):
        header = read_header(*arguments)
        tensors = []
        for entry in header.tensors:
            if "_exps." not in entry.name:
                tensors.append(entry)
                continue
            count, *shape = entry.shape
            for expert in range(count):
                name = entry.name.replace("_exps", f".{expert}")
                offset = entry.offset + expert * math.prod(shape) * 4
                tensors.append(replace(entry, name=name, shape=tuple(shape), offset=offset))
        return replace(header, tensors=tensors)

    with monkeypatch.context() as patch:
        patch.setattr(gguf_file, "read_header", apart)
        assert digests(convert(path, tmp_path / "found")) == digests(expected)
    _patch_metadata(monkeypatch, {"olmoe.expert_count": 4})
    with pytest.raises(FormatError, match=r"a tensor of experts is .*though there are 4"):
        try_to_open(path)


def test_a_directory_of_a_file_has_its_tokenizer(source, tmp_path):
    path = write_gguf(source, tmp_path / "model.gguf")
    manifest = convert(path, tmp_path / "model")
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"} <= set(
        manifest.files
    )
    assert manifest.source.name == "model.gguf"


@pytest.mark.parametrize(("kind", "dtype"), [("F16", "float16"), ("BF16", "bfloat16")])
def test_half_precision_stays_as_it_is_beside_fp32_norms(tmp_path, kind, dtype):
    source = _source(tmp_path / "hf", dtype=dtype)
    manifest = convert(write_gguf(source, tmp_path / "model.gguf", kind), tmp_path / "found")
    assert manifest.dtype == dtype
    assert digests(manifest) == digests(convert(source, tmp_path / "expected"))


def test_quantised_weights_are_the_dequantised_ones(source, tmp_path):
    path = write_gguf(source, tmp_path / "model.gguf", "Q8_0")
    folder = shutil.copytree(source, tmp_path / "dequantised")
    with tensors_of(folder) as state:
        state |= {name: _as_q8_0(tensor) for name, tensor in state.items() if tensor.ndim > 1}
    for dtype in ("float32", "float16"):
        found = convert(path, tmp_path / f"found-{dtype}", dtype=dtype)
        assert digests(found) == digests(convert(folder, tmp_path / f"expected-{dtype}", dtype=dtype))


@pytest.fixture
def stored(tmp_path):
    """A tensor [rows, length] of a kind, whose bytes are these."""
    with ExitStack() as stack:

        def store(kind, shape, values):
            path = tmp_path / "tensor"
            values.tofile(path)
            fd = stack.enter_context(open(path, "rb")).fileno()
            return StoredTensor(path=path, fd=fd, kind=kind, shape=shape, offset=0, nbytes=values.nbytes)

        yield store


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_every_kind_is_read_in_any_range(stored, kind, monkeypatch):
    """Random blocks, so that every bit pattern of the kind occurs; in steps of a few rows; in another order."""
    monkeypatch.setattr(gguf_file, "CHUNK_NBYTES", 5 * 512 * 4)
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    rows, length = 24, 512
    raw = np.random.default_rng(kind.value).integers(0, 256, (rows, length // block * nbytes), np.uint8)
    tensor, order = stored(kind.name, (rows, length), raw), paired_rows(rows, {"head_dim": 8})
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(raw, kind)
        for read, values in ((GgufTensor(tensor), expected), (GgufTensor(tensor, order), expected[order])):
            for first, last in ((0, rows * length), (1, 3), (511, 513), (3 * length + 7, 19 * length + 100)):
                out = np.empty(last - first, np.float32)
                read.read_into(read.info("x"), first * 4, memoryview(out).cast("B"))
                assert np.array_equal(out, values.reshape(-1)[first:last], equal_nan=True)


def test_far_rows_are_read_apart(stored):
    values = np.arange(1000 * 4, dtype=np.float32).reshape(1000, 4)
    whole, order = stored("F32", (1000, 4), values), np.random.default_rng(0).permutation(1000)
    tensor, out = GgufTensor(whole, order, lambda values: values - 1), np.empty((10, 4), np.float32)
    tensor.read_into(tensor.info("x"), 16 * 100, memoryview(out).cast("B"))
    assert np.array_equal(out, values[order[100:110]] - 1)
    assert tensor.extent(tensor.info("x")) is None
    assert GgufTensor(whole).extent(tensor.info("x")) == 0
    with pytest.raises(ValueError, match="outside"):
        tensor.read_into(tensor.info("x"), values.nbytes, memoryview(out).cast("B"))


def test_bfloat16_is_read_as_its_bits(stored):
    bits = np.arange(64, dtype=np.uint16)
    tensor = stored("BF16", (8, 8), bits)
    assert tensor.code == WEIGHT_DTYPES["bfloat16"].code
    assert np.array_equal(tensor.rows(2, 3), bits.reshape(8, 8)[2:5])


def test_a_model_split_over_files(source, tmp_path):
    first = write_gguf(source, tmp_path / "model.gguf", split=3)
    assert digests(convert(first, tmp_path / "found")) == digests(convert(source, tmp_path / "expected"))
    second = tmp_path / "model-00002-of-00003.gguf"
    with pytest.raises(FormatError, match=r"one of the 3 files.*00001-of-00003"):
        try_to_open(second)
    second.unlink()
    with pytest.raises(FormatError, match=r"00002-of-00003\.gguf: is missing"):
        try_to_open(first)


def test_names_in_capitals(source, tmp_path):
    write_gguf(source, tmp_path / "model.gguf", split=2)
    first, second = (path.rename(path.with_suffix(".GGUF")) for path in sorted(tmp_path.glob("model-*.gguf")))
    assert find_checkpoint(str(first)) == (first, None)
    assert digests(convert(first, tmp_path / "found")) == digests(convert(source, tmp_path / "expected"))
    before = source_key(first)
    os.utime(second, (0, 0))
    assert source_key(first) != before
    second.unlink()
    with pytest.raises(FormatError, match=r"00002-of-00002\.GGUF: is missing"):
        try_to_open(first)


def test_tensors_that_are_missing_or_that_nothing_claims(source, tmp_path):
    with pytest.raises(FormatError, match=r"layers\.1\.self_attn\.v_proj\.weight is missing"):
        convert(write_gguf(source, tmp_path / "a.gguf", drop="blk.1.attn_v.weight"), tmp_path / "a")
    biased = _source(tmp_path / "hf", {"attention_bias": True})
    path = write_gguf(biased, tmp_path / "b.gguf", drop="blk.0.attn_q.bias")
    with pytest.raises(UnsupportedModelError, match=r"tensor blk\.\d\.attn_\w+\.bias: is no part of the llama model"):
        convert(path, tmp_path / "b")


_NARROW = {"falcon.attention.key_length": 8, "falcon.attention.value_length": 8}
_NORMALISED = {"afmoe": "afmoe", "bailing_moe": "bailingmoe2", "laguna": "laguna", "hy_v3": "hy_v3"}


@pytest.mark.parametrize(
    ("variant", "metadata", "message"),
    [
        ("llama", {"general.architecture": "mamba"}, r"GGUF architecture 'mamba' is not supported; .*llama"),
        (
            "llama",
            {"general.architecture": "gemma2", "gemma2.expert_count": 8},
            "gemma2.*with experts.*gpt-oss, .*llama",
        ),
        ("llama", {"llama.rope.scaling.type": "longrope"}, "rope scaling 'longrope'"),
        ("llama", {"llama.attention.value_length": 8}, "values of another size"),
        ("llama", {"llama.feed_forward_length": [96, 64, 96]}, "layers that differ"),
        ("phi3 longrope", {"phi3.rope.scaling.type": "yarn"}, "without other scaling"),
        ("falcon", _NARROW, r"heads of 8 dimensions; Falcon's share out the width, 16 each"),
        (
            "mimo_v2_flash",
            {"mimo2.attention.head_count_kv": [4, 2, 2]},
            r"\[4, 2, 2\] key-value heads is not supported",
        ),
        ("granitemoehybrid", {"granitehybrid.rope.scaling.finetuned": True}, "rotates and is not Bamba"),
        ("olmoe", {"olmoe.expert_gating_func": 2}, "a router of olmoe that scores by rule 2"),
        ("deepseek_v2", {"deepseek2.expert_weights_norm": True}, "a router of DeepSeek's that scores so"),
        *(
            (name, {f"{stored}.expert_weights_norm": None}, f"{stored} with weights that are not normalised")
            for name, stored in _NORMALISED.items()
        ),
    ],
)
def test_what_cannot_be_run_is_said(file_of, variant, metadata, message, monkeypatch):
    _patch_metadata(monkeypatch, metadata)
    with pytest.raises(UnsupportedModelError, match=message):
        try_to_open(file_of(variant))


_SHARED_KEYS = "gemma4 shared keys, rows of ids"


@pytest.mark.parametrize(
    ("variant", "metadata", "message"),
    [
        (_SHARED_KEYS, {"gemma4.feed_forward_length": [96, 96, 96, 96, 192]}, ""),
        (_SHARED_KEYS, {"gemma4.attention.head_count_kv": [2, 2, 2, 2]}, ""),
        (_SHARED_KEYS, {"gemma4.attention.shared_kv_layers": 9}, ""),
        ("granitemoehybrid", {"granitehybrid.ssm.inner_size": 193}, "do not share out 193"),
        ("granitemoehybrid", {"granitehybrid.ssm.inner_size": 192 + 6}, "no multiple of the width"),
        ("hy_v3", {"hy_v3.expert_shared_feed_forward_length": 49}, "shared experts of 48 neurons do not share out 49"),
        ("phi3 longrope", {"phi3.rope.dimension_count": 12}, r"has shape \[8\]; the model turns 6 pairs"),
        ("phi3 longrope", {"phi3.rope.scaling.attn_factor": None}, r"lacks phi3\.rope\.scaling\.attn_factor"),
        ("phi3 longrope", {"phi3.rope.scaling.original_context_length": None}, "lacks phi3.*original_context"),
    ],
)
def test_layers_experts_and_rotations_that_do_not_fit(file_of, variant, metadata, message, monkeypatch):
    _patch_metadata(monkeypatch, metadata)
    with pytest.raises((FormatError, UnsupportedModelError), match=rf"model\.gguf.*{message}"):
        try_to_open(file_of(variant))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.block_count": "three"}, "must be an integer from 1 to"),
        ({"llama.expert_count": 8}, "lacks llama.expert_used_count"),
        ({"llama.attention.key_length": None, "llama.embedding_length": 1}, "4 heads do not share out the width, 1"),
        ({"llama.attention.key_length": 15, "llama.rope.dimension_count": 15}, "do not fit its heads|even"),
        ({"tokenizer.ggml.tokens": ["x"] * 301}, "301 tokens, but an embedding of 300"),
        ({"llama.embedding_length": 0}, "embedding_length must be an integer from 1"),
        ({"llama.embedding_length": 1}, r"has shape \[300, 64\], the config says \[300, 1\]"),
        ({"llama.attention.head_count": 2**31}, "head_count must be an integer from 1"),
        ({"llama.attention.head_count": True}, "head_count must be an integer from 1 to .*, not True"),
        ({"llama.attention.layer_norm_rms_epsilon": math.nan}, "epsilon must be a finite number, not nan"),
        ({"llama.rope.freq_base": math.inf}, "freq_base must be a finite number above 0, not inf"),
        ({"llama.rope.freq_base": 0.0}, "freq_base must be a finite number above 0"),
        ({"llama.block_count": 4000}, "block_count 4000 and 1 experts are more than the file's"),
        ({"tokenizer.ggml.eos_token_id": "2"}, "eos_token_id must be an integer from -1"),
        ({"tokenizer.ggml.eos_token_id": 300}, "eos_token_id must be an integer from 0 to 299, not 300"),
        ({"tokenizer.ggml.add_bos_token": "yes"}, "add_bos_token must be true or false, not 'yes'"),
        ({"general.architecture": 7}, "general.architecture must be a text, not 7"),
        *(
            ({f"llama.{name}": None}, f"lacks llama.{name}")
            for name in ("block_count", "attention.head_count", "context_length")
        ),
    ],
)
def test_what_makes_no_sense_is_said(file_of, tmp_path, metadata, message, monkeypatch):
    _patch_metadata(monkeypatch, {"llama.attention.value_length": None, **metadata})
    with pytest.raises(FormatError, match=rf"model\.gguf: .*({message})"):
        convert(file_of("llama"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def _patch_metadata(monkeypatch, changes):
    def patched(*arguments):
        header = read_header(*arguments)
        metadata = {**header.metadata, **changes}
        return replace(header, metadata={name: value for name, value in metadata.items() if value is not None})

    monkeypatch.setattr(gguf_file, "read_header", patched)


def test_other_rope_factors_than_llama_3s(tmp_path):
    source = _source(tmp_path / "hf", VARIANTS["llama 3 rope"])
    path = write_gguf(source, tmp_path / "model.gguf")
    raw = bytearray(path.read_bytes())
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.config["rope_parameters"]["factor"] == pytest.approx(8)
    reader = gguf.GGUFReader(path)
    offset = next(tensor.data_offset for tensor in reader.tensors if tensor.name == "rope_freqs.weight")
    raw[offset : offset + 4] = np.float32(3).tobytes()
    path.write_bytes(raw)
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight follows another rule"):
        try_to_open(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git-LFS pointer.*git lfs pull"),
        (b"<!DOCTYPE html>", "is not a GGUF file"),
        (b"GGUF", "truncated or damaged"),
    ],
)
def test_files_that_are_no_gguf(tmp_path, content, message):
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(FormatError, match=rf"model\.gguf: .*{message}"):
        try_to_open(tmp_path / "model.gguf")


def test_commands_take_a_file(source, tmp_path, monkeypatch, capsys):
    """Converted by name, and on first use; the throughput engine reads what was converted."""
    monkeypatch.setattr(locate, "user_cache_dir", lambda: tmp_path / "cache")
    path = write_gguf(source, tmp_path / "model.gguf")
    assert main(["convert", str(path), str(tmp_path / "out")]) == 0
    assert main(["generate", str(tmp_path / "out"), "--prompt", "The cat", "--max-new-tokens", "8", "--json"]) == 0
    expected = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert expected["model"]["mode"] == "dense"
    assert any("is ever exactly zero" in notice for notice in expected["notices"])
    said = []
    for verbose in ([], ["-v"]):  # first converted, with a closing line; then run, with what is asked for
        assert main(["generate", str(path), "--prompt", "The cat", "--max-new-tokens", "8", "--json", *verbose]) == 0
        output = capsys.readouterr()
        assert json.loads(output.out.splitlines()[-1])["token_ids"] == expected["token_ids"]
        said.append(output.err.splitlines())
    assert [line.split(":")[0] for line in said[0]] == ["convert", "flashllm"]
    assert "as garbage does" in said[0][1]  # its weights are random
    assert len(said[1]) == 1
    assert "is ever exactly zero" in said[1][0]
    folder = find_folder(str(path))
    assert folder.parent == tmp_path / "cache" / "models"
    assert find_folder(str(folder)) == folder


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        *(("llama", "SiLU"), ("mixtral", "SiLU"), ("olmoe", "SiLU"), ("falcon", "GELU")),
        *(("qwen2", None), ("nemotron", None), ("qwen3_moe", None)),
    ],
)
def test_an_activation_that_the_file_leaves_open_is_said_once(tmp_path, model_type, name):
    """Where models of the kind have ReLU: such a file looks the same. The folder says what it has."""
    source = make_checkpoint(tmp_path / "hf", Variant(model_type))
    path = write_gguf(source, tmp_path / "model.gguf")
    lines = []
    convert(path, tmp_path / "model", say=lines.append)
    line = f"model.gguf says no activation; {name} is assumed, as llama.cpp does. A model with ReLU:"
    assert [each.startswith(line) for each in lines] == ([] if name is None else [True])
    lines.clear()
    convert(source, tmp_path / "expected", say=lines.append)
    convert(path, tmp_path / "known", source_name="smollm2", say=lines.append)  # whose activation is known
    assert lines == []


@pytest.mark.parametrize("option", ["--sparsify", "--calibrate"])
def test_every_way_of_converting_says_what_is_assumed(source, tmp_path, capsys, option):
    path = write_gguf(source, tmp_path / "model.gguf", "F16")
    text = tmp_path / "text.txt"
    text.write_text(" ".join(SENTENCES * 40))
    how = ["--sparsify", "0.5", "--text", str(text)] if option == "--sparsify" else ["--bits", "8", option, str(text)]
    assert main(["convert", str(path), str(tmp_path / "model"), *how]) == 0
    assert capsys.readouterr().err.count("says no activation; SiLU is assumed") == 1


def test_a_file_of_another_kind(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"x")
    with pytest.raises(UsageError, match="neither a Hugging Face folder nor a GGUF file"):
        try_to_open(tmp_path / "model.onnx")
