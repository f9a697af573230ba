"""Models under Llama's names most of whose layers see a window, a row each."""

from typing import Any

from flashllm.arch.family import (
    always,
    decoder_block,
    each_layer,
    head_size,
    of_layers,
    says,
    slides,
    turning,
    with_attention,
    with_types,
)
from flashllm.arch.llama.dense import cohere_block, granite_block
from flashllm.arch.llama.gemma import gemma2_block
from flashllm.arch.llama.names import BARE, BEFORE, BEHIND, BIASED, ONE_BEFORE, row
from flashllm.arch.rotary import growth, rotary_by_type
from flashllm.arch.rotary import rotary as rotary_of_all
from flashllm.arch.spec import BlockSpec, Config, check_number
from flashllm.arch.tensors import ResidentTensor

# Ministral 8B (Mistral AI, 2024): Mistral, with types of layers.
MINISTRAL = row("ministral")

# Ministral 3 (Mistral AI, 2025): Mistral, whose queries grow with their position.
MINISTRAL3 = row("ministral3", block=lambda config: decoder_block(config, growth=growth(config)))

# Code World Model (FAIR, 2025): Llama 3, with windows.
CWM = row("cwm", block=lambda config: decoder_block(with_types(config, 4, first=True), theta=1e6))

# OLMo 3 (Team Olmo, 2025): OLMo 2, whose layers without a window may be turned otherwise.
OLMO3 = row(
    "olmo3",
    block=lambda config: decoder_block(
        with_types(config, 4),
        norms="output",
        query_key_norm="projection",
        rotary_of=rotary_by_type(config, head_size(config), theta=500_000.0),
    ),
    attention=BIASED,
    norms=BEHIND,
)


# Command R7B and Command A (Cohere, 2024, 2025): layers without a window turn nothing.


def _cohere2(config: Config) -> BlockSpec:
    full = with_types(config, config["sliding_window_pattern"])
    return turning(cohere_block(full, theta=10_000.0), slides(full))


COHERE2 = row("cohere2", block=_cohere2, attention=BIASED, norms=ONE_BEFORE)


# EXAONE 4 (LG AI Research, 2025): norms behind attention and FFN; layers without a window turn nothing, where others
# have one.


def exaone_block(config: Config, **traits: Any) -> BlockSpec:
    """The block of EXAONE's later models."""
    windowed = config["sliding_window"] is not None
    full = with_types(config, config["sliding_window_pattern"] if windowed else 1)
    block = decoder_block(full, query_key_norm="head", **traits)
    return turning(block, slides(full)) if windowed else block


EXAONE4 = row("exaone4", block=lambda config: exaone_block(config, norms="output"), attention=BARE, norms=BEHIND)


# Granite with windows (IBM, 2026): a sink of each head, a rotation of each layer, which may be none.


def granite_swa_block(config: Config, **traits: Any) -> BlockSpec:
    block = granite_block(with_types(config, 4, first=True), **traits)
    if config["layer_rope_theta"] is None:
        return block
    rope = config.get("rope_parameters") or {}

    def turned(theta: Any) -> Any:
        own = {**config, "rope_parameters": {**rope, "rope_theta": check_number("layer_rope_theta", theta)}}
        return rotary_of_all(own, head_size(config)) if theta else None

    thetas = of_layers("layer_rope_theta", config)
    return each_layer(block, thetas, lambda layer, theta: with_attention(layer, rotary=turned(theta)))


SINKS = ResidentTensor(name="layers.{i}.sinks", source="self_attn.sinks")
GRANITE_SWA = row("granite_swa", block=granite_swa_block, attention=(*BIASED, SINKS), ffn_bias=says("mlp_bias"))

# VaultGemma (Google, 2025): Gemma 2 without the norms behind attention and FFN.
VAULTGEMMA = row(
    "vaultgemma",
    block=lambda config: gemma2_block(config, norms="input"),
    attention=BIASED,
    norms={"attention_norm": BEFORE["attention_norm"], "ffn_norm": ("pre_feedforward_layernorm", always)},
)

WINDOWED = (MINISTRAL, MINISTRAL3, CWM, OLMO3, COHERE2, EXAONE4, GRANITE_SWA, VAULTGEMMA)
