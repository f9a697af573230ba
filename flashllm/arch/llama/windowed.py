"""Models under Llama's names most of whose layers see a window, a row each."""

from dataclasses import replace
from typing import Any

from flashllm.arch.family import alternating, always, decoder_block, head_size, says, turning
from flashllm.arch.llama.dense import COHERE_DEFAULTS, MULTIPLIERS, cohere_block, granite_block
from flashllm.arch.llama.gemma import gemma2_block
from flashllm.arch.llama.names import (
    BARE,
    BEFORE,
    BEHIND,
    BIASED,
    LLAMA_DEFAULTS,
    MISTRAL_DEFAULTS,
    row,
)
from flashllm.arch.mixers import check_size
from flashllm.arch.rotary import growth, rotary_by_type
from flashllm.arch.rotary import rotary as rotary_of_all
from flashllm.arch.spec import MAX_LAYERS, BlockSpec, Config, check_number
from flashllm.arch.tensors import ResidentTensor


def with_types(config: Config, period: int, *, first: bool = False) -> dict[str, Any]:
    """The config with its types of layers, or with the usual ones: every `period`-th layer sees everything, the
    `first` of each period or the last."""
    types = config.get("layer_types")
    if types is None:
        count = check_size("num_hidden_layers", config["num_hidden_layers"], MAX_LAYERS)
        types = alternating(count + period - 1, period)[period - 1 :] if first else alternating(count, period)
    return {**config, "layer_types": types}


def slides(config: Config) -> list[bool]:
    """True for each layer that attends within a window; one longer than the context counts."""
    return [kind == "sliding_attention" and config["sliding_window"] is not None for kind in config["layer_types"]]


# Ministral 8B (Mistral AI, 2024): Mistral, with types of layers.
MINISTRAL = row("ministral", defaults={**MISTRAL_DEFAULTS, "layer_types": None})

# Ministral 3 (Mistral AI, 2025): Mistral, whose queries grow with their position.
_MINISTRAL3_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
MINISTRAL3 = row(
    "ministral3",
    defaults={
        **MISTRAL_DEFAULTS,
        "vocab_size": 131072,
        "num_hidden_layers": 34,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "rope_parameters": _MINISTRAL3_ROPE,
    },
    block=lambda config: decoder_block(config, growth=growth(config)),
)

# Code World Model (FAIR, 2025): Llama 3, with windows.
CWM = row(
    "cwm",
    defaults={
        "vocab_size": 128256,
        "hidden_size": 6144,
        "intermediate_size": 21504,
        "num_hidden_layers": 64,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "sliding_window": 8192,
        "layer_types": None,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e6,
            "factor": 16.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
    },
    block=lambda config: decoder_block(with_types(config, 4, first=True), theta=1e6),
)


# OLMo 3 (Team Olmo, 2025): OLMo 2, whose layers without a window may be turned otherwise.


def _olmo3(config: Config) -> BlockSpec:
    return decoder_block(
        with_types(config, 4),
        norms="output",
        query_key_norm="projection",
        rotary_of=rotary_by_type(config, head_size(config), theta=500_000.0),
    )


OLMO3 = row(
    "olmo3",
    defaults={"vocab_size": 50304, "rms_norm_eps": 1e-5, "attention_bias": False, "sliding_window": 4096},
    block=_olmo3,
    attention=BIASED,
    norms=BEHIND,
)


# Command R7B and Command A (Cohere, 2024, 2025): layers without a window turn nothing.


def _cohere2(config: Config) -> BlockSpec:
    full = with_types(config, config["sliding_window_pattern"])
    return turning(cohere_block(full, theta=10_000.0), slides(full))


COHERE2 = row(
    "cohere2",
    defaults={
        **COHERE_DEFAULTS,
        "sliding_window": 4096,
        "layer_types": None,
        "sliding_window_pattern": 4,
    },
    block=_cohere2,
    attention=BIASED,
    norms={"attention_norm": ("input_layernorm", always)},
)


# EXAONE 4 (LG AI Research, 2025): norms behind attention and FFN; layers without a window turn nothing, where others
# have one.


def exaone_block(config: Config, **traits: Any) -> BlockSpec:
    """The block of EXAONE's later models."""
    windowed = config["sliding_window"] is not None
    full = with_types(config, config["sliding_window_pattern"] if windowed else 1)
    block = decoder_block(full, query_key_norm="head", **traits)
    return turning(block, slides(full)) if windowed else block


EXAONE_DEFAULTS: dict[str, Any] = {
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "layer_types": None,
}
EXAONE4 = row(
    "exaone4",
    defaults=EXAONE_DEFAULTS,
    block=lambda config: exaone_block(config, norms="output"),
    attention=BARE,
    norms=BEHIND,
)


# Granite with windows (IBM, 2026): a sink of each head, a rotation of each layer, which may be none.


def granite_swa_block(config: Config, **traits: Any) -> BlockSpec:
    """The block with Granite's multipliers and windows."""
    block = granite_block(with_types(config, 4, first=True), **traits)
    thetas = config["layer_rope_theta"]
    if thetas is None:
        return block
    if not isinstance(thetas, list) or len(thetas) != len(block.layers):
        raise ValueError(f"layer_rope_theta must be a list of {len(block.layers)} numbers")
    rope = config.get("rope_parameters") or {}

    def turned(theta: Any) -> Any:
        own = {**config, "rope_parameters": {**rope, "rope_theta": check_number("layer_rope_theta", theta)}}
        return rotary_of_all(own, head_size(config)) if theta else None

    layers = (
        replace(layer, mixer=replace(layer.attention, rotary=turned(theta)))
        for layer, theta in zip(block.layers, thetas, strict=True)
    )
    return replace(block, layers=tuple(layers))


SINKS = ResidentTensor(name="layers.{i}.sinks", source="self_attn.sinks")
GRANITE_SWA_DEFAULTS: dict[str, Any] = {
    **LLAMA_DEFAULTS,
    **MULTIPLIERS,
    "sliding_window": 128,
    "layer_types": None,
    "layer_rope_theta": None,
}
GRANITE_SWA = row(
    "granite_swa",
    defaults={
        **GRANITE_SWA_DEFAULTS,
        "vocab_size": 100352,
        "hidden_size": 2560,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    block=granite_swa_block,
    attention=(*BIASED, SINKS),
    ffn_bias=says("mlp_bias"),
)

# VaultGemma (Google, 2025): Gemma 2 without the norms behind attention and FFN.
VAULTGEMMA = row(
    "vaultgemma",
    defaults={
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    block=lambda config: gemma2_block(config, norms="input"),
    attention=BIASED,
    norms={"attention_norm": BEFORE["attention_norm"], "ffn_norm": ("pre_feedforward_layernorm", always)},
)

WINDOWED = (MINISTRAL, MINISTRAL3, CWM, OLMO3, COHERE2, EXAONE4, GRANITE_SWA, VAULTGEMMA)
