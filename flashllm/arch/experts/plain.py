"""Mixtures of experts (Shazeer et al., 2017) whose routers take a softmax of their products, a row each."""

from dataclasses import replace
from typing import Any

from flashllm.arch.experts.row import GATED_SHARED, experts_of, row
from flashllm.arch.family import decoder_block, never, says
from flashllm.arch.llama.names import projections
from flashllm.arch.mixture import RouterSpec
from flashllm.arch.spec import MAX_LAYERS, BlockSpec, Config, check_size
from flashllm.arch.tensors import ResidentTensor
from flashllm.errors import UnsupportedModelError


def _softmax(config: Config) -> RouterSpec:
    return RouterSpec(normalized=bool(config["norm_topk_prob"]))


# OLMoE (Muennighoff et al., 2024): norms over all queries and over all keys.


def _olmoe(config: Config) -> BlockSpec:
    if config.get("clip_qkv") is not None:
        raise UnsupportedModelError("clip_qkv, which limits queries, keys and values, is not supported for olmoe")
    return decoder_block(
        config, query_key_norm="projection", experts=experts_of(config, "intermediate_size", _softmax(config))
    )


OLMOE = row(
    "olmoe",
    defaults={
        "vocab_size": 50304,
        "hidden_size": 2048,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
    experts=64,
    block=_olmoe,
    attention=projections(says("attention_bias"), says("attention_bias")),
)


# Qwen 1.5 MoE, 2 and 3 (Qwen Team, 2024, 2025). The former have shared neurons, which a gate weighs.


def dense_layers(config: Config) -> frozenset[int]:
    """The layers that are no mixtures: those that are named, and all but every `decoder_sparse_step`-th."""
    count = check_size("num_hidden_layers", config["num_hidden_layers"], MAX_LAYERS)
    step = check_size("decoder_sparse_step", config["decoder_sparse_step"], 2**30)
    named = config["mlp_only_layers"] or []
    if not isinstance(named, list) or any(type(layer) is not int for layer in named):
        raise ValueError(f"mlp_only_layers must be a list of layers, not {str(named)[:80]}")
    return frozenset(layer for layer in range(count) if layer in named or (layer + 1) % step != 0)


def _qwen2_moe(config: Config) -> BlockSpec:
    types, windowed = config.get("layer_types"), config["use_sliding_window"]
    if types is None:
        slides = [
            windowed and i % 2 == 0 and i < config["max_window_layers"] for i in range(config["num_hidden_layers"])
        ]
        types = ["sliding_attention" if each else "full_attention" for each in slides]
    window = config["sliding_window"] if windowed else None
    key = "shared_expert_intermediate_size"
    return decoder_block(
        {**config, "sliding_window": window, "layer_types": types},
        experts=experts_of(config, "moe_intermediate_size", _softmax(config), shared=check_size(key, config[key])),
        dense_layers=dense_layers(config),
    )


def _qwen3_moe(config: Config) -> BlockSpec:
    window = config["sliding_window"] if config["use_sliding_window"] else None
    return decoder_block(
        {**config, "sliding_window": window},
        query_key_norm="head",
        experts=experts_of(config, "moe_intermediate_size", _softmax(config)),
        dense_layers=dense_layers(config),
    )


_QWEN: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
}
QWEN2_MOE = row(
    "qwen2_moe",
    defaults={
        **_QWEN,
        "num_key_value_heads": 16,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts_per_tok": 4,
        "max_window_layers": 28,
        "qkv_bias": True,
    },
    experts=60,
    block=_qwen2_moe,
    attention=projections(says("qkv_bias"), never),
    **GATED_SHARED,
)
QWEN3_MOE = row(
    "qwen3_moe",
    defaults={
        **_QWEN,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
    },
    experts=128,
    block=_qwen3_moe,
    attention=projections(says("attention_bias"), says("attention_bias")),
)

# Mixtral (Jiang et al., 2024).
MIXTRAL = row(
    "mixtral",
    defaults={
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "num_experts_per_tok": 2,
    },
    experts=8,
    router="block_sparse_moe.gate",
    block=lambda config: decoder_block(
        config, theta=1e6, experts=experts_of(config, "intermediate_size", RouterSpec(normalized=True))
    ),
    attention=projections(never, never),
    matrices={
        "up": "block_sparse_moe.experts.{e}.w3",
        "gate": "block_sparse_moe.experts.{e}.w1",
        "down": "block_sparse_moe.experts.{e}.w2",
    },
)


# gpt-oss (OpenAI, 2025): sinks, every other layer with a window, biases everywhere. Checkpoints have the experts' gate
# and up rows one in turn with the other; convert/checkpoint/mixtures/gpt_oss.py takes them apart.


def _gpt_oss(config: Config) -> BlockSpec:
    for key, value in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if config[key] != value:
            raise UnsupportedModelError(f"{key} must be {value} for gpt_oss, not {str(config[key])[:80]}")
    if config["hidden_act"] != "silu":
        raise UnsupportedModelError(f"activation {str(config['hidden_act'])[:80]!r} is not supported for gpt_oss")
    if config.get("layer_types") is None:
        count = check_size("num_hidden_layers", config["num_hidden_layers"], MAX_LAYERS)
        config = {**config, "layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in range(count)]}
    experts = experts_of(config, "intermediate_size", RouterSpec(score="softmax_of_chosen"))
    return replace(decoder_block(config, theta=150_000.0, experts=experts), activation="clamped_swiglu")


GPT_OSS = row(
    "gpt_oss",
    defaults={
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "attention_bias": True,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    experts=128,
    router="mlp.router",
    renamed={},
    stacked={},
    block=_gpt_oss,
    attention=(
        *projections(says("attention_bias"), says("attention_bias")),
        ResidentTensor(name="layers.{i}.sinks", source="self_attn.sinks"),
    ),
    ffn_tensors=(
        ResidentTensor(name="layers.{i}.router.bias", source="mlp.router.bias"),
        ResidentTensor(name="layers.{i}.ffn.up_bias", source="mlp.experts.up_bias"),
        ResidentTensor(name="layers.{i}.ffn.gate_bias", source="mlp.experts.gate_bias"),
        ResidentTensor(name="layers.{i}.ffn.expert_down_bias", source="mlp.experts.down_proj_bias"),
    ),
)

PLAIN = (OLMOE, QWEN2_MOE, QWEN3_MOE, MIXTRAL, GPT_OSS)
