"""Models under Llama's names whose neurons are never zero, unless their config names an activation of the ReLU kind."""

from dataclasses import replace
from functools import partial
from typing import Any

from flashllm.arch.family import (
    always,
    decoder_block,
    fused,
    fused_tensors,
    head_size,
    if_asked,
    kv_heads,
    linear_tensors,
    never,
    num_layers,
    of_layers,
    projections,
    says,
    sliding,
    turning,
)
from flashllm.arch.llama.names import BEFORE, BEHIND, BIASED, FUSED_GATE, GATE_PARTS, ONE_BEFORE, row
from flashllm.arch.mixers import check_size
from flashllm.arch.spec import BlockSpec, Config, check_number, check_usual
from flashllm.errors import UnsupportedModelError

LLAMA = row("llama", attention=BIASED, ffn_bias=says("mlp_bias"))
MISTRAL = row("mistral")


# Qwen 2, 2.5 and 3 (Yang et al., 2024, 2025): windows only where the config asks for them, from a layer on.


def _qwen(config: Config, **traits: Any) -> BlockSpec:
    config = if_asked(config)
    if config.get("layer_types") is None and config["sliding_window"] is not None:
        config["layer_types"] = sliding(i >= config["max_window_layers"] for i in range(num_layers(config)))
    return decoder_block(config, **traits)


QWEN2 = row("qwen2", block=_qwen, attention=projections(always, never))
QWEN3 = row("qwen3", block=lambda config: _qwen(config, query_key_norm="head"), attention=BIASED)

# Phi-3 (Abdin et al., 2024): query, key, value in one tensor; gate and up in one tensor.
PHI3 = row(
    "phi3",
    matrices=FUSED_GATE,
    matrix_parts=GATE_PARTS,
    attention=(
        *fused_tensors("self_attn.qkv_proj", partial(fused, heads=kv_heads)),
        *linear_tensors("layers.{i}.out", "self_attn.o_proj"),
    ),
)


# Granite (Mishra et al., 2024): multipliers.


def granite_block(config: Config, **traits: Any) -> BlockSpec:
    by = check_number("logits_scaling", config["logits_scaling"])
    if by == 0:
        raise ValueError("logits_scaling must not be 0")
    return decoder_block(
        config,
        query_scale=check_number("attention_multiplier", config["attention_multiplier"]),
        embedding_scale=check_number("embedding_multiplier", config["embedding_multiplier"]),
        residual_scale=check_number("residual_multiplier", config["residual_multiplier"]),
        logit_scale=1 / by,
        **traits,
    )


GRANITE = row("granite", block=granite_block, attention=BIASED, ffn_bias=says("mlp_bias"))

# OLMo 2 (OLMo Team, 2024): norms behind attention and FFN, and one over all queries, one over all keys.
OLMO2 = row(
    "olmo2",
    block=lambda config: decoder_block(config, norms="output", query_key_norm="projection"),
    attention=BIASED,
    norms=BEHIND,
)


# SmolLM3 (Bakouch et al., 2025): every fourth layer turns nothing.


def _smollm3(config: Config) -> BlockSpec:
    every = check_size("no_rope_layer_interval", config.get("no_rope_layer_interval", 4))
    usual = [(layer + 1) % every != 0 for layer in range(num_layers(config))]
    turns = of_layers("no_rope_layers", {**config, "no_rope_layers": config.get("no_rope_layers") or usual})
    return turning(decoder_block(if_asked(config), theta=2_000_000.0), turns)


SMOLLM3 = row("smollm3", block=_smollm3, attention=BIASED, ffn_bias=says("mlp_bias"))


# StableLM (Bellagente et al., 2024): layer norms, a quarter of each head turned; attention and FFN in parallel (12B).


def _stablelm(config: Config) -> BlockSpec:
    if config["qk_layernorm"]:
        raise UnsupportedModelError(
            "stablelm with qk_layernorm (StableLM 2 12B) is not supported: it keeps a norm of its own for every head"
        )
    parallel = bool(config["use_parallel_residual"])
    return decoder_block(
        config, epsilon="layer_norm_eps", rotary_share=0.25, norm="layer", parallel=parallel, shared_norm=parallel
    )


STABLELM = row("stablelm", block=_stablelm, attention=projections(says("use_qkv_bias"), never), norm_bias=always)
# StarCoder 2 (Lozhkov et al., 2024): layer norms, no gate, windows.
STARCODER2 = row(
    "starcoder2",
    block=lambda config: decoder_block(config, epsilon="norm_epsilon", norm="layer", gated=False),
    matrices={"up": "mlp.c_fc", "down": "mlp.c_proj"},
    norm_bias=always,
    attention=projections(says("use_bias"), says("use_bias")),
    ffn_bias=says("use_bias"),
)


# Cohere's Command R (2024): one layer norm without bias before attention and FFN, neighbours turned together.


def cohere_block(config: Config, theta: float = 500_000.0, **traits: Any) -> BlockSpec:
    """The block of Command R and later."""
    is_rms = config.get("rms_norm_eps") is not None
    return decoder_block(
        config,
        epsilon="rms_norm_eps" if is_rms else "layer_norm_eps",
        theta=theta,
        norm="rms" if is_rms else "layer",
        parallel=True,
        shared_norm=True,
        rotary_style="interleaved",
        query_key_norm="heads" if config["use_qk_norm"] else "none",
        logit_scale=check_number("logit_scale", config["logit_scale"]),
        **traits,
    )


COHERE = row("cohere", block=cohere_block, attention=BIASED, norms=ONE_BEFORE)

# GLM-4 9B (GLM Team, 2024): half of each head turned, neighbours together; gate and up in one tensor.
GLM = row(
    "glm",
    block=lambda config: decoder_block(config, rotary_share=0.5, rotary_style="interleaved"),
    matrices=FUSED_GATE,
    matrix_parts=GATE_PARTS,
    attention=projections(says("attention_bias"), never),
)

# GLM-4 0414 (Z.ai, 2025): the same, with norms behind attention and FFN, too.
GLM4_0414 = row(
    "glm4",
    block=lambda config: decoder_block(config, rotary_share=0.5, rotary_style="interleaved", norms="both"),
    matrices=FUSED_GATE,
    matrix_parts=GATE_PARTS,
    attention=projections(says("attention_bias"), never),
    norms={
        **BEFORE,
        "attention_output_norm": ("post_self_attn_layernorm", always),
        "ffn_output_norm": ("post_mlp_layernorm", always),
    },
)

# ERNIE 4.5 0.3B (Baidu, 2025): Llama, neighbours turned together.
ERNIE_DENSE = row(
    "ernie4_5",
    block=lambda config: decoder_block(config, theta=500_000.0, rotary_style="interleaved"),
    attention=projections(says("use_bias"), says("use_bias")),
    ffn_bias=says("use_bias"),
)

# Seed-OSS (ByteDance Seed, 2025): biases of queries, keys and values.
SEED_OSS = row(
    "seed_oss", attention=projections(says("attention_bias"), says("attention_out_bias")), ffn_bias=says("mlp_bias")
)


# The first OLMo (Groeneveld et al., 2024): layer norms without weights.


def _olmo(config: Config) -> BlockSpec:
    check_usual(config, {"clip_qkv": None})
    return decoder_block({**config, "norm_eps": 1e-5}, epsilon="norm_eps", norm="layer")


OLMO = row("olmo", block=_olmo, attention=BIASED, norms={}, final_norm=never)

# Helium (Kyutai, 2025): neighbours turned together.
HELIUM = row(
    "helium",
    block=lambda config: decoder_block(config, theta=100_000.0, rotary_style="interleaved"),
    attention=projections(says("attention_bias"), never),
    ffn_bias=says("mlp_bias"),
)


# HyperCLOVA X (NAVER Cloud, 2025): Granite's multipliers, the last as a factor; norms behind attention and FFN.


def _hyperclovax(config: Config) -> BlockSpec:
    by = config["attention_multiplier"]
    by = head_size(config) ** -0.5 if by is None else by
    factor = check_number("logits_scaling", config["logits_scaling"])
    full = {**config, "attention_multiplier": by, "logits_scaling": 1.0}
    block = granite_block(full, norms="both" if config["use_post_norm"] else "input")
    return replace(block, logit_scale=factor)


HYPERCLOVAX = row(
    "hyperclovax",
    block=_hyperclovax,
    attention=BIASED,
    ffn_bias=says("mlp_bias"),
    norms={
        **BEFORE,
        "attention_output_norm": ("post_norm1", says("use_post_norm")),
        "ffn_output_norm": ("post_norm2", says("use_post_norm")),
    },
)

# Hunyuan (Tencent, 2025): norms of each head behind the rotation.
HUNYUAN_NORMS = {"query_norm": "self_attn.query_layernorm", "key_norm": "self_attn.key_layernorm"}
HUNYUAN = row(
    "hunyuan_v1_dense",
    block=lambda config: decoder_block(config, query_key_norm="turned_head"),
    attention=BIASED,
    head_norms=HUNYUAN_NORMS,
)

DENSE = (
    *(LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, GRANITE, OLMO2, SMOLLM3, STABLELM, STARCODER2),
    *(COHERE, GLM, GLM4_0414, ERNIE_DENSE, SEED_OSS, OLMO, HELIUM, HYPERCLOVAX, HUNYUAN),
)
