"""Tiny random checkpoints of every architecture file and variant, as Hugging Face folders, for the contract test."""

import copy
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import change_config, config_of, make_tokenizer
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.mistral4 import Mistral4Config, Mistral4ForCausalLM
from transformers.utils import logging as transformers_logging

from flashllm.arch.family import decoder_block
from flashllm.arch.llama.names import BEFORE, BEHIND, row
from flashllm.arch.registry import ARCHITECTURES
from flashllm.arch.spec import SHARED_BESIDE
from flashllm.convert.run import convert

AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)  # known there within a wrapper alone

VOCAB, CONTEXT, LAYERS = 300, 160, 3
_PLAIN = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
_GROUPED = {**_PLAIN, "num_key_value_heads": 2}
_WIDE = {"head_dim": 16}
_WIDE_HEADS = {**_GROUPED, **_WIDE}
_MOE, _FFN = {"moe_intermediate_size": 48}, {"intermediate_size": 48}
_SHARED = {**_MOE, "shared_expert_intermediate_size": 48}
_GPT2 = {"n_embd": 64, "n_inner": 96, "n_head": 4, "n_positions": CONTEXT}
_GPTJ = {**_GPT2, "rotary_dim": 8, "n_layer": LAYERS}


def _mixture(count: str = "num_experts", *sizes: dict[str, Any], **others: Any) -> dict[str, Any]:
    """Eight experts, under this key, of which a token goes to three."""
    sized = {key: value for each in sizes for key, value in each.items()}
    return {**_GROUPED, **sized, count: 8, "num_experts_per_tok": 3, **others}


_LATENT = {
    **_GROUPED,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
    "pad_token_id": None,  # whose embedding transformers' Youtu makes zero after it has read it
}
_LATENT_MIXTURE = _mixture(
    "n_routed_experts", _LATENT, _MOE, n_group=1, topk_group=1, first_k_dense_replace=1, pad_token_id=1
)
_MIXED = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_RULE = {
    **_MIXED,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
}
_MAMBA = {"mamba_n_heads": 6, "mamba_n_groups": 2, "mamba_d_state": 12, "mamba_expand": 3, "mamba_d_head": 32}
_CONVOLVING = {**_GROUPED, "block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention", "conv"]}
_SIZES = {  # of model_types whose config has other keys
    "opt": {"hidden_size": 64, "ffn_dim": 96, "num_attention_heads": 4},
    **dict.fromkeys(
        (
            *("qwen3", "gemma", "gemma2", "gemma3_text", "vaultgemma", "glm", "glm4", "ernie4_5", "seed_oss"),
            *("helium", "cwm", "hunyuan_v1_dense", "hyperclovax"),
        ),
        _WIDE_HEADS,
    ),
    **dict.fromkeys(("gpt_neox", "persimmon"), _PLAIN),
    "falcon": {"hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 4},
    "bloom": {"hidden_size": 64, "n_head": 4, "n_layer": LAYERS},
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": LAYERS, "max_seq_len": CONTEXT},
    **dict.fromkeys(("gpt2", "gpt_bigcode"), _GPT2),
    **dict.fromkeys(("gptj", "codegen"), _GPTJ),
    "gpt_neo": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 4,
        "num_layers": LAYERS,
        "attention_types": [[["global", "local", "local"], 1]],
    },
    **dict.fromkeys(("olmoe", "mixtral", "gpt_oss", "flex_olmo"), _mixture("num_experts", _FFN)),
    **dict.fromkeys(("qwen3_moe", "ernie4_5_moe", "exaone_moe"), _mixture("num_experts", _MOE)),
    **dict.fromkeys(("mellum", "afmoe", "hy_v3"), _mixture("num_experts", _MOE, _WIDE)),
    "minimax_m2": _mixture("num_experts", _FFN, _WIDE),
    "qwen2_moe": _mixture("num_experts", _SHARED),
    "laguna": _mixture("num_experts", _SHARED, _WIDE),
    "glm4_moe": _mixture("n_routed_experts", _MOE),
    "dots1": _mixture("n_routed_experts", _MOE, n_shared_experts=2, first_k_dense_replace=1),
    "solar_open": _mixture("n_routed_experts", _MOE, _WIDE),
    "bailing_moe": _mixture(
        "n_routed_experts", _MOE, _WIDE, n_shared_experts=1, first_k_dense_replace=1, use_qk_norm=True
    ),
    "mimo_v2_flash": _mixture(
        "n_routed_experts", _MOE, head_dim=24, v_head_dim=16, num_attention_heads=8, num_key_value_heads=2
    ),
    "phimoe": _mixture("num_local_experts", _FFN) | {"num_experts_per_tok": 2, "bos_token_id": 2, "lm_head_bias": True},
    "hunyuan_v1_moe": {**_GROUPED, **_FFN, **_WIDE, "num_experts": 8, "moe_topk": 3},
    **dict.fromkeys(("granitemoe", "granitemoe_swa"), _mixture("num_local_experts", _FFN)),
    "granitemoeshared": _mixture("num_local_experts", _FFN, shared_intermediate_size=48),
    "granitemoehybrid": _mixture("num_local_experts", _FFN, _MAMBA, _MIXED, shared_intermediate_size=80),
    "cohere2_moe": _mixture("num_experts", _WIDE, num_shared_experts=2, prefix_dense_intermediate_size=80),
    **dict.fromkeys(("youtu", "minicpm3"), _LATENT),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "mistral4"), _LATENT_MIXTURE),
    # Far from 1e-6: of all norms of GLM-4.7-Flash; transformers has another for two of them.
    "glm4_moe_lite": {key: value for key, value in _LATENT_MIXTURE.items() if key != "first_k_dense_replace"}
    | {"rms_norm_eps": 0.03},
    "kimi_linear": _mixture(
        "num_local_experts",
        *(_LATENT, _MOE, _MIXED),
        q_lora_rank=None,
        n_group=1,
        topk_group=1,
        linear_num_heads=4,
        linear_head_dim=20,
        rms_norm_eps=0.03,  # far from that of the latent norms
        pad_token_id=1,
    ),
    "qwen3_next": _mixture("num_experts", _SHARED, _RULE, head_dim=32),
    "qwen3_5_moe_text": _mixture("num_experts", _SHARED, _RULE, head_dim=32),
    "qwen3_5_text": {**_GROUPED, **_RULE, "head_dim": 32},
    "olmo_hybrid": {**_GROUPED, **_RULE, "rope_parameters": {"rope_theta": None, "rope_type": "default"}},
    "nemotron_h": {
        **_mixture("n_routed_experts", _MOE),
        "head_dim": 24,
        "mamba_num_heads": 6,
        "mamba_head_dim": 20,
        "ssm_state_size": 12,
        "n_groups": 2,
        "moe_shared_expert_intermediate_size": 80,
        "routed_scaling_factor": 2.5,
        "hybrid_override_pattern": "ME*EM-M",
    },
    "falcon_h1": {**_GROUPED, **_MAMBA, "mamba_d_ssm": 192},
    "bamba": {**_GROUPED, **_MAMBA, "attn_layer_indices": [1]},
    "lfm2": _CONVOLVING,
    "lfm2_moe": _mixture("num_experts", _CONVOLVING, _MOE, num_dense_layers=1, routed_scaling_factor=2.5),
    "gemma4_text": {
        **_GROUPED,
        **_WIDE,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 40,
    },
    "gemma3n_text": {
        **_GROUPED,
        **_WIDE,
        "sliding_window": 40,
        "num_hidden_layers": 5,
        "num_kv_shared_layers": 2,
        "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"],
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": VOCAB - 10,
        "laurel_rank": 16,
        "activation_sparsity_pattern": [0.95, 0.0, 0.3, 0.0, 0.5],
        "final_logit_softcapping": 5.0,
    },
}
_WIDTHS = [96, 160, 40]  # neurons of layers that differ
_TEACHERS = {
    "sparsellama": "llama",
    "bamboo": "mistral",
    "differing": "llama",
    "bailing_moe": "glm4_moe",  # whose code is the vendor's, under other names
}  # whose code computes them, but for the activation
_ROPE = {"rope_theta": 500.0}
_YARN = {**_ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40}
_MULTIPLIED = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}
_UNSCALED = ("gemma3n_text", "gemma4_text")  # scores of queries and keys
# That keep their norms' weight - 1.
_SHIFTED = ("gemma", "gemma2", "gemma3_text", "nemotron", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")

# An architecture of the tests' own: each layer is another family's, with heads, a head size and a rotation of its own.
_FAMILIES = {
    "llama": {},
    "olmo2": {"norms": "output", "query_key_norm": "projection"},
    "qwen3": {"query_key_norm": "head"},
}


def _layer_config(config: dict[str, Any], layer: int) -> dict[str, Any]:
    names = ("model_type", "num_attention_heads", "num_key_value_heads", "head_dim")
    of_layer = dict(zip(names, config["kinds"][layer], strict=True))
    return {**config, **of_layer, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0 * 10**layer}}


def _differing(config: dict[str, Any]) -> Any:
    configs = [_layer_config(config, layer) for layer in range(LAYERS)]
    blocks = [decoder_block(each, **_FAMILIES[each["model_type"]]) for each in configs]
    return replace(blocks[0], layers=tuple(block.layers[i] for i, block in enumerate(blocks)))


ARCHITECTURES["differing"] = replace(row("llama", block=_differing, norms={**BEFORE, **BEHIND}), model_type="differing")


def scale(checkpoint: Path, name: str, by: float | torch.Tensor) -> None:
    """Multiply a tensor of a checkpoint."""
    file = checkpoint / "model.safetensors"
    state = load_file(file)
    save_file(state | {name: state[name] * by}, file, {"format": "pt"})


@dataclass(frozen=True)
class Variant:
    """One kind of model: its model_type, and what its config says differently from the type's usual."""

    model_type: str
    config: dict[str, Any] = field(default_factory=dict)


VARIANTS = {
    "opt": Variant("opt"),
    "opt post-norm": Variant("opt", {"do_layer_norm_before": False}),
    "opt narrow embedding": Variant("opt", {"word_embed_proj_dim": 32}),
    "opt-350m": Variant("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "opt without biases": Variant("opt", {"enable_bias": False}),
    "opt without norm weights": Variant("opt", {"layer_norm_elementwise_affine": False}),
    "opt without final norm": Variant("opt", {"_remove_final_layer_norm": True}),
    "galactica": Variant("opt", {"activation_function": "gelu", "enable_bias": False}),
    "opt untied": Variant("opt", {"tie_word_embeddings": False}),
    "llama": Variant("llama", {"hidden_act": "silu"}),
    "llama relu": Variant("llama", {"hidden_act": "relu"}),
    "llama widths": Variant("llama", {"hidden_act": "silu", "intermediate_size": _WIDTHS}),
    "llama relu widths": Variant("llama", {"hidden_act": "relu", "mlp_bias": True, "intermediate_size": _WIDTHS}),
    "differing layers": Variant(
        "differing", {"hidden_act": "silu", "kinds": [["llama", 4, 2, 16], ["olmo2", 2, 1, 24], ["qwen3", 8, 4, 12]]}
    ),
    "differing relu layers": Variant(
        "differing", {"hidden_act": "relu", "kinds": [["qwen3", 2, 2, 40], ["qwen3", 6, 1, 8], ["olmo2", 4, 4, 16]]}
    ),
    "llama squared relu": Variant("llama", {"hidden_act": "relu2"}),
    "llama without grouped queries": Variant("llama", {"hidden_act": "relu", "num_key_value_heads": 4}),
    "llama one key-value head": Variant("llama", {"hidden_act": "relu", "num_key_value_heads": 1}),
    "llama biases": Variant("llama", {"hidden_act": "relu", "attention_bias": True, "mlp_bias": True}),
    "llama with windows that it does not know": Variant("llama", {"hidden_act": "silu", "sliding_window": 20}),
    "llama tied": Variant("llama", {"hidden_act": "relu", "tie_word_embeddings": True}),
    "llama wide heads": Variant("llama", {"hidden_act": "relu", "head_dim": 24}),
    "llama linear rope": Variant(
        "llama", {"hidden_act": "relu", "rope_parameters": {**_ROPE, "rope_type": "linear", "factor": 4.0}}
    ),
    "llama 3 rope": Variant(
        "llama",
        {
            "hidden_act": "relu",
            "rope_parameters": {
                **_ROPE,
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 40,
            },
        },
    ),
    "llama yarn rope": Variant("llama", {"hidden_act": "relu", "rope_parameters": _YARN}),
    "llama dynamic rope": Variant("llama", {"rope_parameters": {**_ROPE, "rope_type": "dynamic", "factor": 4.0}}),
    "mistral": Variant("mistral", {"sliding_window": None}),
    "mistral window": Variant("mistral", {"sliding_window": 37}),
    "mistral relu": Variant("mistral", {"hidden_act": "relu", "sliding_window": 200}),
    "qwen2": Variant("qwen2"),
    "qwen2 window": Variant("qwen2", {"use_sliding_window": True, "sliding_window": 70, "max_window_layers": 1}),
    "qwen3": Variant("qwen3"),
    "qwen3 wide heads": Variant("qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "prosparse": Variant("sparsellama", {"hidden_act": "fatrelu", "hidden_act_param": 0.3}),
    "fatrelu by layer": Variant("sparsellama", {"hidden_act": "fatrelu", "hidden_act_param": [0.0, 0.2, 0.5]}),
    "bamboo": Variant("bamboo", {"hidden_act": "relu", "sliding_window": None}),
    "phi3": Variant("phi3"),
    "phi3 window": Variant("phi3", {"sliding_window": 33}),
    "phi3 longrope": Variant(
        "phi3",
        {
            "rope_parameters": {
                **_ROPE,
                "rope_type": "longrope",
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
                "long_factor": [2.0] * 8,
            },
            "original_max_position_embeddings": CONTEXT,
            "max_position_embeddings": 4 * CONTEXT,
        },
    ),
    "gemma": Variant("gemma"),
    "gemma relu": Variant("gemma", {"hidden_act": "relu", "head_dim": 24}),
    "gemma2": Variant("gemma2", {"sliding_window": 50, "query_pre_attn_scalar": 12}),
    "gemma2 uncapped": Variant("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": Variant(
        "gemma3_text", {"sliding_window": 40, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]}
    ),
    "gemma4": Variant(
        "gemma4_text",
        {
            "attention_k_eq_v": True,
            "final_logit_softcapping": 5.0,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        },
    ),
    "gemma4 experts": Variant(
        "gemma4_text",
        {
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 48,
        },
    ),
    "gemma4 shared keys, rows of ids": Variant(
        "gemma4_text",
        {
            "num_hidden_layers": 5,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"],
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": VOCAB,
        },
    ),
    "gemma3n": Variant("gemma3n_text"),
    "granite": Variant("granite", {**_MULTIPLIED, "attention_bias": True, "mlp_bias": True}),
    "olmo2": Variant("olmo2"),
    "olmo2 relu": Variant("olmo2", {"hidden_act": "relu"}),
    "smollm3": Variant("smollm3", {"no_rope_layer_interval": 2}),
    "bitnet": Variant("bitnet"),
    "bitnet tied, biases": Variant("bitnet", {"attention_bias": True, "tie_word_embeddings": True}),
    "arcee": Variant("arcee"),
    "arcee biases": Variant("arcee", {"attention_bias": True, "mlp_bias": True}),
    "nemotron": Variant("nemotron"),
    "nemotron biases": Variant("nemotron", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "jais2": Variant("jais2"),
    "stablelm": Variant("stablelm"),
    "stablelm parallel": Variant("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True}),
    "starcoder2": Variant("starcoder2"),
    "starcoder2 window": Variant("starcoder2", {"sliding_window": 20, "use_bias": False}),
    "cohere": Variant("cohere", {"logit_scale": 0.5}),
    "cohere norms of heads": Variant("cohere", {"use_qk_norm": True, "logit_scale": 0.5}),
    "glm": Variant("glm"),
    "gpt_neox": Variant("gpt_neox"),
    "gpt_neox one after the other": Variant("gpt_neox", {"use_parallel_residual": False, "hidden_act": "relu"}),
    "falcon": Variant("falcon"),
    "falcon relu": Variant("falcon", {"activation": "relu", "bias": True}),
    "falcon new architecture": Variant("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon new architecture, one norm": Variant(
        "falcon",
        {
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
            "activation": "relu",
            "tie_word_embeddings": False,
        },
    ),
    "falcon one after the other": Variant("falcon", {"parallel_attn": False, "multi_query": False}),
    "persimmon": Variant("persimmon"),
    "persimmon without norms of heads": Variant("persimmon", {"qk_layernorm": False}),
    "phi": Variant("phi"),
    "phi norms of heads": Variant("phi", {"qk_layernorm": True, "hidden_act": "relu"}),
    "falcon alibi": Variant(
        "falcon", {"alibi": True, "num_attention_heads": 6, "hidden_size": 96, "parallel_attn": False, "bias": True}
    ),
    "falcon alibi, one key-value head": Variant("falcon", {"alibi": True, "activation": "relu"}),
    "bloom": Variant("bloom"),
    "bloom six heads": Variant("bloom", {"n_head": 6, "hidden_size": 96, "tie_word_embeddings": False}),
    "mpt": Variant("mpt"),
    "mpt six heads": Variant("mpt", {"n_heads": 6, "d_model": 96, "attn_config": {"softmax_scale": 0.2}}),
    "gpt2": Variant("gpt2"),
    "youtu": Variant("youtu"),
    "youtu one projection, biases": Variant("youtu", {"q_lora_rank": None, "attention_bias": True}),
    "youtu halves, relu": Variant("youtu", {"rope_interleave": False, "hidden_act": "relu", "v_head_dim": 16}),
    "youtu yarn rope": Variant("youtu", {"rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.7}}),
    "minicpm3": Variant("minicpm3", {"scale_depth": 1.1, "dim_model_base": 32}),
    "minicpm3 unscaled": Variant(
        "minicpm3", {"scale_emb": 1, "scale_depth": None, "dim_model_base": None, "mlp_bias": True}
    ),
    "olmoe": Variant("olmoe"),
    "olmoe normalized": Variant("olmoe", {"norm_topk_prob": True, "num_key_value_heads": 4}),
    "olmoe relu": Variant("olmoe", {"hidden_act": "relu"}),
    "mixtral": Variant("mixtral"),
    "mixtral window": Variant("mixtral", {"sliding_window": 37, "num_experts_per_tok": 1, "head_dim": 24}),
    "qwen2_moe": Variant("qwen2_moe", {"shared_expert_intermediate_size": 80}),
    "qwen2_moe shared beside": Variant("qwen2_moe", {"shared_expert_intermediate_size": 80, SHARED_BESIDE: True}),
    "qwen2_moe window": Variant(
        "qwen2_moe", {"use_sliding_window": True, "sliding_window": 70, "max_window_layers": 2, "qkv_bias": False}
    ),
    "qwen3_moe": Variant("qwen3_moe", {"norm_topk_prob": True, "head_dim": 24}),
    "qwen2_moe and a dense layer": Variant("qwen2_moe", {"mlp_only_layers": [1], "intermediate_size": 160}),
    "qwen3_moe and dense layers": Variant("qwen3_moe", {"decoder_sparse_step": 2, "norm_topk_prob": True}),
    "qwen3_moe window": Variant("qwen3_moe", {"use_sliding_window": True, "sliding_window": 50}),
    "qwen3_next": Variant("qwen3_next"),
    "qwen3_5": Variant("qwen3_5_text"),
    "qwen3_5 tied": Variant("qwen3_5_text", {"tie_word_embeddings": True, "linear_num_value_heads": 4}),
    "qwen3_5_moe": Variant("qwen3_5_moe_text", {"shared_expert_intermediate_size": 80}),
    "qwen3_next dense layers": Variant(
        "qwen3_next",
        {
            "mlp_only_layers": [0],
            "attention_bias": True,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 3,
            "norm_topk_prob": False,
        },
    ),
    "gpt_oss": Variant("gpt_oss", {"sliding_window": 37, "head_dim": 16}),
    "gpt_oss plain rope": Variant(
        "gpt_oss",
        {
            "head_dim": 24,
            "rope_parameters": {**_ROPE, "rope_type": "default"},
            "layer_types": ["full_attention"] * 3,
            "attention_bias": False,
        },
    ),
}

_GROUPS = {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
VARIANTS |= {
    "olmo_hybrid": Variant("olmo_hybrid"),
    "olmo_hybrid that turns": Variant(
        "olmo_hybrid", {"rope_parameters": _ROPE, "attention_bias": True, "linear_allow_neg_eigval": False}
    ),
    "lfm2": Variant("lfm2"),
    "lfm2 biases": Variant(
        "lfm2",
        {
            "conv_bias": True,
            "conv_L_cache": 4,
            "tie_word_embeddings": False,
            "block_auto_adjust_ff_dim": True,
            "block_ffn_dim_multiplier": 1.3,
            "block_multiple_of": 32,
            "layer_types": ["full_attention", "conv", "conv"],
        },
    ),
    "lfm2_moe": Variant("lfm2_moe"),
    "lfm2_moe without a bias": Variant(
        "lfm2_moe", {"use_expert_bias": False, "norm_topk_prob": False, "num_dense_layers": 0, "conv_bias": True}
    ),
    "bamba": Variant("bamba"),
    "bamba one group, biases": Variant(
        "bamba",
        {
            "mamba_n_groups": 1,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "mamba_d_conv": 3,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "attn_layer_indices": [0, 2],
        },
    ),
    "granitemoehybrid": Variant("granitemoehybrid", _MULTIPLIED),
    "granitemoehybrid dense, rope": Variant(
        "granitemoehybrid", {"num_local_experts": 0, "position_embedding_type": "rope", "tie_word_embeddings": True}
    ),
    "nemotron_h": Variant("nemotron_h"),
    "falcon_h1 biases": Variant(
        "falcon_h1",
        {
            "mamba_rms_norm": True,
            "attention_bias": True,
            "mamba_proj_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "falcon_h1 gate first": Variant(
        "falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "projectors_bias": True}
    ),
    "falcon_h1": Variant(
        "falcon_h1",
        {
            "lm_head_multiplier": 0.5,
            "embedding_multiplier": 3.0,
            "key_multiplier": 0.7,
            "attention_in_multiplier": 1.2,
            "attention_out_multiplier": 0.8,
            "ssm_in_multiplier": 1.3,
            "ssm_out_multiplier": 0.6,
            "ssm_multipliers": [0.9, 1.1, 0.7, 1.2, 0.5],
            "mlp_multipliers": [0.8, 1.4],
        },
    ),
    "nemotron_h shared beside": Variant("nemotron_h", {SHARED_BESIDE: True}),
    "nemotron_h dense, biases": Variant("nemotron_h", {"hybrid_override_pattern": "M-*-M-", "use_bias": True}),
    "nemotron_h neurons first": Variant(
        "nemotron_h", {"hybrid_override_pattern": "-E*MEE", "n_group": 2, "topk_group": 1, "use_conv_bias": False}
    ),
    "ernie4_5_moe": Variant("ernie4_5_moe"),
    "ernie4_5_moe every other layer": Variant(
        "ernie4_5_moe",
        {
            "moe_layer_interval": 2,
            "moe_layer_start_index": 0,
            "moe_num_shared_experts": 0,
            "use_bias": False,
            "tie_word_embeddings": False,
        },
    ),
    "ernie4_5_moe with a floor": Variant("ernie4_5_moe", {"moe_norm_min": 0.5, "moe_layer_end_index": 1}),
    "glm4_moe": Variant("glm4_moe"),
    "glm4_moe norms of heads, biases": Variant(
        "glm4_moe", {"use_qk_norm": True, "attention_bias": True, "first_k_dense_replace": 0, "norm_topk_prob": False}
    ),
    "glm4_moe groups": Variant("glm4_moe", _GROUPS | {"first_k_dense_replace": 2}),
    "dots1": Variant("dots1", {"norm_topk_prob": True, "routed_scaling_factor": 2.5}),
    "dots1 window": Variant("dots1", _GROUPS | {"sliding_window": 50, "max_window_layers": 1, "attention_bias": True}),
    "deepseek_v2": Variant("deepseek_v2", {"routed_scaling_factor": 2.5}),
    "deepseek_v2 groups": Variant(
        "deepseek_v2", _GROUPS | {"topk_method": "group_limited_greedy", "q_lora_rank": None}
    ),
    "deepseek_v2 yarn rope": Variant(
        "deepseek_v2", {"rope_parameters": {**_YARN, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707}}
    ),
    "deepseek_v3": Variant("deepseek_v3", _GROUPS),
    "deepseek_v3 biases": Variant("deepseek_v3", {"attention_bias": True, "norm_topk_prob": False}),
    "glm4_moe_lite": Variant("glm4_moe_lite"),
    "minimax_m2": Variant("minimax_m2"),
    "minimax_m2 half turned": Variant("minimax_m2", {"rotary_dim": 8, "num_key_value_heads": 4}),
}


_SOME = ["sparse", "dense", "sparse"]  # layers that are mixtures
_TYPES = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 50}
_TWO_ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 500.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
_GROWING = {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}  # of published models 0.1
VARIANTS |= {
    "ministral": Variant("ministral", _TYPES | {"head_dim": 24}),
    "ministral3": Variant("ministral3", {"head_dim": 24, "rope_parameters": _GROWING}),
    "mistral4": Variant("mistral4", {"rope_parameters": _GROWING}),
    "mistral4 groups": Variant("mistral4", _GROUPS | {"rope_parameters": _GROWING, "q_lora_rank": None}),
    "cwm": Variant("cwm", {"sliding_window": 37}),
    "olmo3": Variant(
        "olmo3",
        _TYPES
        | {
            "rope_parameters": {
                "full_attention": _YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            }
        },
    ),
    "cohere2": Variant("cohere2", _TYPES | {"logit_scale": 0.5}),
    "cohere2_moe": Variant(
        "cohere2_moe",
        {
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],  # the first turns, as it is dense
            "sliding_window": 50,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "logit_scale": 0.5,
        },
    ),
    "cohere2_moe shared beside": Variant("cohere2_moe", {SHARED_BESIDE: True, "logit_scale": 0.5}),
    "cohere2_moe sigmoid, summed": Variant(
        "cohere2_moe",
        {
            "expert_selection_fn": "sigmoid",
            "shared_expert_combination_strategy": "sum",
            "rms_norm_eps": 1e-5,
            "sliding_window": 50,
            "sliding_window_pattern": 2,
            "logit_scale": 0.5,
        },
    ),
    "exaone4": Variant("exaone4", {"sliding_window": 50, "sliding_window_pattern": 2}),
    "exaone4 without windows": Variant("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "granite_swa": Variant(
        "granite_swa", _MULTIPLIED | _TYPES | {"layer_rope_theta": [500.0, 0, 50.0], "tie_word_embeddings": False}
    ),
    "vaultgemma": Variant("vaultgemma", {"sliding_window": 50, "query_pre_attn_scalar": 12}),
    "glm4": Variant("glm4"),
    "ernie4_5": Variant("ernie4_5", {"use_bias": True}),
    "seed_oss": Variant("seed_oss", {"attention_out_bias": True, "mlp_bias": True}),
    "olmo": Variant("olmo"),
    "helium": Variant("helium", {"num_key_value_heads": 4}),
    "hyperclovax": Variant("hyperclovax", _MULTIPLIED),
    "hyperclovax without norms behind": Variant("hyperclovax", {"use_post_norm": False}),
    "hunyuan_v1_dense": Variant("hunyuan_v1_dense", {"attention_bias": True}),
    "hunyuan_v1_dense alpha rope": Variant(
        "hunyuan_v1_dense",
        {"rope_parameters": {**_ROPE, "rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}, "head_dim": 24},
    ),
    "flex_olmo": Variant("flex_olmo"),
    "mellum": Variant("mellum", _TYPES | {"rope_parameters": _TWO_ROPES, "mlp_layer_types": _SOME}),
    "phimoe": Variant("phimoe", {"attention_bias": True}),
    "phimoe much jitter": Variant("phimoe", {"router_jitter_noise": 0.3, "lm_head_bias": False}),
    "hunyuan_v1_moe": Variant("hunyuan_v1_moe"),
    "granitemoe": Variant("granitemoe", _MULTIPLIED),
    "granitemoeshared": Variant("granitemoeshared", _MULTIPLIED | {"shared_intermediate_size": 80}),
    "granitemoe_swa": Variant(
        "granitemoe_swa", _MULTIPLIED | _TYPES | {"layer_rope_theta": [50.0, 500.0, 0], "shared_intermediate_size": 32}
    ),
    "solar_open": Variant("solar_open", {"routed_scaling_factor": 2.5}),
    "exaone_moe": Variant("exaone_moe", {"sliding_window": 50, "sliding_window_pattern": 2}),
    "afmoe shared beside": Variant("afmoe", _TYPES | {SHARED_BESIDE: True}),
    "afmoe": Variant("afmoe", _TYPES | {"mup_enabled": True, "route_scale": 2.5}),
    "laguna": Variant(
        "laguna",
        _TYPES
        | {"num_attention_heads_per_layer": [4, 8, 2], "moe_routed_scaling_factor": 2.5, "rope_parameters": _TWO_ROPES},
    ),
    "laguna gate of every number": Variant(
        "laguna", {"gating": "per-element", "mlp_layer_types": _SOME, "moe_router_logit_softcapping": 0.2}
    ),
    "hy_v3": Variant("hy_v3", {"mlp_layer_types": _SOME}),
    "bailing_moe": Variant("bailing_moe", _GROUPS),
    "kimi_linear": Variant("kimi_linear"),
    "kimi_linear groups": Variant(
        "kimi_linear",
        {"num_local_experts": 16, "n_group": 4, "topk_group": 2, "q_lora_rank": 24, "linear_num_heads": 3},
    ),
    "mimo_v2_flash": Variant("mimo_v2_flash", _TYPES | {"rope_parameters": _TWO_ROPES, "attention_value_scale": 0.5}),
    "gpt_bigcode": Variant("gpt_bigcode"),
    "gpt_bigcode many key-value heads": Variant("gpt_bigcode", {"multi_query": False}),
    "gpt_neo": Variant("gpt_neo", {"window_size": 50}),
    "gptj": Variant("gptj"),
    "codegen": Variant("codegen"),
}


def tokens(count: int, seed: int = 0) -> list[int]:
    """So many ids, none of them special."""
    return torch.randint(4, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def make_config(variant: Variant) -> PreTrainedConfig:
    """The variant's config, as transformers completes it."""
    given = copy.deepcopy({**_SIZES.get(variant.model_type, _GROUPED), **variant.config})  # which it completes
    if variant.model_type in _TEACHERS and variant.model_type != "bailing_moe":
        given["hidden_act"] = "relu"
    if variant.model_type == "nemotron_h":
        given["num_hidden_layers"] = len(given["hybrid_override_pattern"])
    if isinstance(given.get("intermediate_size"), list):
        given["intermediate_size"] = given["intermediate_size"][0]
    return CONFIG_MAPPING[_TEACHERS.get(variant.model_type, variant.model_type)](
        **{
            "vocab_size": VOCAB,
            "num_hidden_layers": LAYERS,
            "max_position_embeddings": CONTEXT,
            "pad_token_id": 1,
            "bos_token_id": 2,
            "eos_token_id": 2,
            **given,
        }
    )


def full_config(variant: Variant) -> dict[str, Any]:
    """What the variant's config.json says."""
    config = make_config(variant).to_dict() | variant.config | {"model_type": variant.model_type}
    if variant.model_type == "bailing_moe":  # Ling 2.0
        config |= {"score_function": "sigmoid", "moe_router_enable_expert_bias": True, "use_qk_norm": True}
    return config


_CHOICES = ("correction_bias", "expert_bias")  # of experts alone


class _Fatrelu(torch.nn.Module):
    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = threshold

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (x > self.threshold)


def give_widths(model: PreTrainedModel, widths: list[int]) -> None:
    """Layers with as many neurons each: no config of transformers says so."""
    for layer, width in zip(model.model.layers, widths, strict=True):
        config = copy.deepcopy(model.config)
        config.intermediate_size = width
        layer.mlp = type(layer.mlp)(config)


def give_layers(model: PreTrainedModel, config: dict[str, Any]) -> None:
    """Layers of other families, each with its own heads and rotation."""
    for index in range(LAYERS):
        own = _layer_config(config, index)
        known = CONFIG_MAPPING[own["model_type"]].from_dict({**own, "layer_types": None})
        known._attn_implementation = model.config._attn_implementation
        other = AutoModel.from_config(known)
        model.model.layers[index] = other.layers[index]

        def turn(module: Any, args: Any, kwargs: Any, rotary: Any = other.rotary_emb) -> Any:
            return args, {**kwargs, "position_embeddings": rotary(args[0], kwargs["position_ids"])}

        model.model.layers[index].register_forward_pre_hook(turn, with_kwargs=True)


def open_model(path: Path) -> PreTrainedModel:
    """transformers' model of the checkpoint folder `path`. Model types that it lacks are computed by their teachers'
    code with another activation, layers of other widths by its own modules."""
    config = json.loads((path / "config.json").read_text())
    widths = config.get("intermediate_size")
    if isinstance(widths, list) and config["model_type"] != "gemma3n_text":  # whose config says so
        known = CONFIG_MAPPING[config["model_type"]].from_dict({**config, "intermediate_size": widths[0]})
        model = AutoModelForCausalLM.from_config(known).eval()
        give_widths(model, widths)
        model.load_state_dict(load_file(path / "model.safetensors"), strict=True)
        return model
    teacher = _TEACHERS.get(config["model_type"])
    if config["model_type"] == "differing":
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[teacher].from_dict({**config, "model_type": teacher}))
        give_layers(model, config)
        model.load_state_dict(load_file(path / "model.safetensors"), strict=True)
        return model.eval()
    if config["model_type"] == "bailing_moe":
        return AutoModelForCausalLM.from_pretrained(path / "teacher").eval()
    if teacher is None:
        model = AutoModelForCausalLM.from_pretrained(path).eval()
        if config["model_type"] == "glm4_moe_lite":  # as its vendor's later code, and other engines, have it
            for layer in model.model.layers:
                for norm in (layer.self_attn.q_a_layernorm, layer.self_attn.kv_a_layernorm):
                    norm.variance_epsilon = config["rms_norm_eps"]
        return model
    known = CONFIG_MAPPING[teacher].from_dict({**config, "model_type": teacher, "hidden_act": "relu"})
    model = AutoModelForCausalLM.from_pretrained(path, config=known).eval()
    for index, layer in enumerate(model.model.layers):
        if config["model_type"] == "sparsellama":
            by = config["hidden_act_param"]
            layer.mlp.act_fn = _Fatrelu(by[index] if isinstance(by, list) else by)
        else:
            layer.mlp.up_proj = torch.nn.Sequential(layer.mlp.up_proj, torch.nn.ReLU())
    return model


def give_names_of_ling(path: Path) -> None:
    """To the checkpoint of a GLM-4.5: the tensors of Ling 2.0, and the keys of its config."""
    tensors, renamed = load_file(path / "model.safetensors"), {}
    names = {
        "self_attn.o_proj": "attention.dense",
        "self_attn.q_norm": "attention.query_layernorm",
        "self_attn.k_norm": "attention.key_layernorm",
        "e_score_correction_bias": "expert_bias",
        "embed_tokens": "word_embeddings",
    }
    for name, tensor in tensors.items():
        if name.endswith("q_proj.weight"):
            at = name.removesuffix("self_attn.q_proj.weight")
            parts = [tensors[f"{at}self_attn.{part}_proj.weight"] for part in "qkv"]
            renamed[f"{at}attention.query_key_value.weight"] = torch.cat(parts)
        elif not name.endswith(("k_proj.weight", "v_proj.weight")):
            known = next((each for each in names if each in name), "")
            renamed[name.replace(known, names.get(known, ""))] = tensor
    save_file(renamed, path / "model.safetensors", metadata={"format": "pt"})
    config = config_of(path)
    counts = {"num_experts": config["n_routed_experts"], "num_shared_experts": config["n_shared_experts"]}
    change_config(path, **counts, score_function="sigmoid", moe_router_enable_expert_bias=True, rotary_dim=8)


def give_convolutions_apart(path: Path) -> None:
    """As OLMo's checkpoints have them: transformers writes three equal parts, however wide their projections are."""
    tensors = load_file(path / "model.safetensors")
    for at in [name.removesuffix("q_conv1d.weight") for name in tensors if name.endswith("q_conv1d.weight")]:
        names = [f"{at}{part}_conv1d.weight" for part in "qkv"]
        widths = [len(tensors[f"{at}{part}_proj.weight"]) for part in "qkv"]
        parts = torch.cat([tensors[name] for name in names]).split(widths)
        tensors |= {name: part.clone() for name, part in zip(names, parts, strict=True)}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def make_checkpoint(path: Path, variant: Variant, *, dtype: str = "float32", seed: int = 0) -> Path:
    """A random model of the variant, with a tokenizer, in the folder `path`, which is returned.

    Weights are large enough that tokens differ clearly, and about a third of the neurons of a ReLU fire.
    """
    model = AutoModelForCausalLM.from_config(make_config(variant)).eval()
    widths = variant.config.get("intermediate_size")
    if isinstance(widths, list):
        give_widths(model, widths)
    if variant.model_type == "differing":
        give_layers(model, {**model.config.to_dict(), **variant.config})
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        biases = [
            (name, buffer) for name, buffer in model.named_buffers() if name.endswith((*_CHOICES, "layer_scalar"))
        ]
        for name, parameter in [*sorted(model.named_parameters()), *biases]:
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith(_CHOICES):
                # By far below the scores where there are groups: what is left out must not count as zero.
                parameter.copy_((-3.0 if variant.config.get("n_group", 1) > 1 else 0.0) + 0.2 * noise)
            elif name.endswith("layer_scalar"):
                parameter.copy_(0.7 + 0.1 * noise)
            elif "norm" in name or ".ln_" in name:
                plain = variant.model_type not in _SHIFTED or ".linear_attn." in name
                middle = 1.0 if name.endswith("weight") and plain else 0.0
                if name.endswith(("q_norm.weight", "k_norm.weight")) and variant.model_type in _UNSCALED:
                    middle = 0.4  # whose scores are not scaled otherwise
                parameter.copy_(middle + 0.1 * noise)
            elif ".altup." in name:  # its router's inputs are small
                parameter.copy_((8.0 if "modality_router" in name else 0.4) * noise)
            elif name.endswith(("fc1.bias", "gate_proj.bias", "dense_h_to_4h.bias", "up_proj.bias")):
                parameter.copy_(0.3 * noise - 0.4)
            elif name.endswith(("sinks", "mamba.D", "mixer.D")):
                parameter.copy_(1.0 + noise)
            elif name.endswith("A_log"):
                parameter.copy_(noise - 2.0)
            elif name.endswith(("conv1d.weight", "conv.conv.weight")):
                parameter.copy_(0.5 * noise)
                if ".linear_attn." in name:  # a head's queries, no longer than the epsilon of their norm
                    parameter[: _RULE["linear_key_head_dim"]] *= 1e-3
            elif name.endswith("bias"):
                parameter.copy_(0.1 * noise)
            else:
                parameter.copy_(0.8 / 64**0.5 * noise)
    model.to(getattr(torch, dtype))
    transformers_logging.disable_progress_bar()
    model.save_pretrained(path)
    if variant.model_type == "bailing_moe":
        model.save_pretrained(path / "teacher")
        give_names_of_ling(path)
    if variant.model_type == "olmo_hybrid":
        give_convolutions_apart(path)
    make_tokenizer(VOCAB).save_pretrained(path)
    if variant.model_type in _TEACHERS or isinstance(widths, list):
        change_config(path, model_type=variant.model_type, **variant.config)
    return path


def make_model(root: Path, name: str, *, dtype: str = "float32") -> tuple[Path, Path]:
    """(Hugging Face folder, model directory converted from it) of the variant of this name, made below `root`."""
    source = make_checkpoint(root / "hf", VARIANTS[name], dtype=dtype)
    convert(source, root / "model", predictors=True)
    return source, root / "model"
