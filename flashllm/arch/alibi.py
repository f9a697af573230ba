"""Decoders that add distances to their scores (Press et al., 2022: ALiBi): BLOOM and MPT; slopes for Falcon-RW.

Their neurons are GELU's and never zero, so they run dense.
"""

import math
from collections.abc import Mapping
from typing import Any

from flashllm.arch.family import always, decoder, decoder_block, equal_part, fused, fused_tensors, linear_tensors
from flashllm.arch.llama.names import BEFORE
from flashllm.arch.mixers import Alibi, check_size
from flashllm.arch.spec import BlockSpec, Config, check_number, check_usual


def bloom_slopes(heads: int) -> tuple[float, ...]:
    """Slopes of the power of two of heads that is next below; of the rest, every other one of twice so many."""
    below = 2 ** math.floor(math.log2(heads))

    def slopes(count: int) -> list[float]:
        return [2.0 ** (-8.0 * (i + 1) / count) for i in range(count)]

    return tuple([*slopes(below), *slopes(2 * below)[::2]][:heads])


def falcon_alibi(heads: int, head_dim: int) -> Alibi:
    """Falcon-RW's: BLOOM's slopes in bf16, and what they make of positions too, scaled as the scores are."""
    return Alibi(slopes=tuple(map(_to_bf16, bloom_slopes(heads))), scale=head_dim**-0.5, rounded=True)


def _to_bf16(value: float) -> float:
    fraction, exponent = math.frexp(value)
    return math.ldexp(round(fraction * 256), exponent - 8)


def _mpt_slopes(heads: int) -> tuple[float, ...]:
    """Slopes of the power of two that is next above: its odd slopes, then its even ones, as many as there are heads."""
    above = 2 ** math.ceil(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / above) for i in range(above)]
    return tuple(slopes if above == heads else [*slopes[1::2], *slopes[::2]][:heads])


# BLOOM (Workshop, 2022): a norm behind the embedding, biases everywhere.


def _bloom(config: Config) -> BlockSpec:
    check_usual(config, {"apply_residual_connection_post_layernorm": False})
    return decoder_block(
        config,
        epsilon="layer_norm_epsilon",
        norm="layer",
        gated=False,
        positions="none",
        embedding_norm=True,
        alibi=Alibi(slopes=bloom_slopes(check_size("n_head", config["n_head"]))),
    )


def _bloom_keys(config: Config) -> Mapping[str, Any]:
    width = check_size("hidden_size", config.get("n_embed", config["hidden_size"]))
    return {
        "hidden_size": width,
        "num_attention_heads": config["n_head"],
        "num_hidden_layers": config["n_layer"],
        "intermediate_size": 4 * width,
        "max_position_embeddings": config["seq_length"],
        "hidden_act": "gelu_pytorch_tanh",
    }


BLOOM = decoder(
    "bloom",
    derived=_bloom_keys,
    block=_bloom,
    matrices={"up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h"},
    attention=(
        *fused_tensors("self_attention.query_key_value", fused, bias=always),
        *linear_tensors("layers.{i}.out", "self_attention.dense", bias=always),
    ),
    norms=BEFORE,
    norm_bias=always,
    ffn_bias=always,
    names={
        "base": "transformer.",
        "embedding": "word_embeddings",
        "embedding_norm": "word_embeddings_layernorm",
        "layer": "h.{i}.",
        "final_norm": "ln_f",
    },
)


# MPT (MosaicML, 2023): layer norms without biases, no biases at all.


_MPT_ATTENTION: dict[str, Any] = {
    "attn_type": "multihead_attention",
    "clip_qkv": None,
    "prefix_lm": False,
    "qk_ln": False,
    "attn_uses_sequence_id": False,
    "alibi": True,
    "alibi_bias_max": 8,
}


def _mpt(config: Config) -> BlockSpec:
    check_usual(config, _MPT_ATTENTION, "attn_config")
    check_usual(config, {"expansion_ratio": 4, "logit_scale": None, "no_bias": True})
    scale = (config.get("attn_config") or {}).get("softmax_scale")
    traits: dict[str, Any] = {} if scale is None else {"query_scale": check_number("softmax_scale", scale)}
    return decoder_block(
        config,
        epsilon="layer_norm_epsilon",
        norm="layer",
        gated=False,
        positions="none",
        alibi=Alibi(slopes=_mpt_slopes(check_size("n_heads", config["n_heads"]))),
        **traits,
    )


def _mpt_keys(config: Config) -> Mapping[str, Any]:
    width = check_size("d_model", config["d_model"])
    return {
        "hidden_size": width,
        "num_attention_heads": config["n_heads"],
        "num_hidden_layers": config["n_layers"],
        "intermediate_size": 4 * width,
        "max_position_embeddings": config["max_seq_len"],
        "hidden_act": "gelu",
    }


MPT = decoder(
    "mpt",
    derived=_mpt_keys,
    block=_mpt,
    matrices={"up": "ffn.up_proj", "down": "ffn.down_proj"},
    attention=(*fused_tensors("attn.Wqkv", equal_part), *linear_tensors("layers.{i}.out", "attn.out_proj")),
    norms={"attention_norm": ("norm_1", always), "ffn_norm": ("norm_2", always)},
    names={"base": "transformer.", "embedding": "wte", "layer": "blocks.{i}.", "final_norm": "norm_f"},
)

WITH_ALIBI = (BLOOM, MPT)
