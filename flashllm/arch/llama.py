"""Llama 1 to 3 (Touvron et al., 2023; Grattafiori et al., 2024) and models of its shape, ReLU-fied ones among them.

RMS norms, rotary positions, grouped queries, a gated FFN. With ReLU it runs sparsely; with SiLU, whose neurons are
never zero, in mode dense only. Rotary frequencies are computed here, so that the native core knows no scaling rule.
"""

import math
from typing import Any

from flashllm.arch.spec import (
    MAX_CONTEXT,
    ArchitectureSpec,
    BlockSpec,
    Config,
    ResidentTensor,
    check_number,
    check_size,
    known_activation,
)
from flashllm.errors import UnsupportedModelError

_LAYER = "model.layers.{i}."
_DEFAULT_THETA = 10_000.0
_ACTIVATIONS = {"relu": "relu", "relu2": "squared_relu", "silu": "silu", "swish": "silu"}


def _has_attention_bias(config: Config) -> bool:
    return bool(config["attention_bias"])


def _has_ffn_bias(config: Config) -> bool:
    return bool(config["mlp_bias"])


def _is_untied(config: Config) -> bool:
    return not config["tie_word_embeddings"]


def _block(config: Config) -> BlockSpec:
    d_model = check_size("hidden_size", config["hidden_size"])
    heads = check_size("num_attention_heads", config["num_attention_heads"])
    if d_model % heads:
        raise ValueError(f"{heads} heads do not divide hidden_size {d_model}")
    kv_heads, head_dim = config["num_key_value_heads"], config["head_dim"]
    head_dim = check_size("head_dim", head_dim if head_dim is not None else d_model // heads)
    frequencies = inverse_frequencies(config, head_dim)
    return BlockSpec(
        d_model=d_model,
        embed_dim=d_model,
        vocab_size=check_size("vocab_size", config["vocab_size"], 2**30),
        context=check_size("max_position_embeddings", config["max_position_embeddings"], MAX_CONTEXT),
        heads=heads,
        kv_heads=check_size("num_key_value_heads", kv_heads if kv_heads is not None else heads),
        head_dim=head_dim,
        query_scale=head_dim**-0.5,
        norm="rms",
        norm_epsilon=check_number("rms_norm_eps", config["rms_norm_eps"]),
        pre_norm=True,
        final_norm=True,
        positions="rotary",
        rotary_dims=2 * len(frequencies),
        rotary_style="half",
        inverse_frequency=frequencies,
        activation=known_activation(config, "hidden_act", _ACTIVATIONS),
        gated=True,
        tied_head=bool(config["tie_word_embeddings"]),
    )


def inverse_frequencies(config: Config, head_dim: int) -> tuple[float, ...]:
    """Radians a position of each of the head_dim / 2 rotated pairs (Su et al., 2021), scaled as the config says.

    Understands transformers' rope types default, linear and llama3, under `rope_parameters` or, before transformers 5,
    `rope_scaling` and `rope_theta`. UnsupportedModelError for another type; ValueError for values that cannot be.
    """
    rope = _rope(config)
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = check_number("rope_theta", rope.get("rope_theta", config.get("rope_theta", _DEFAULT_THETA)))
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if kind not in ("default", "linear", "llama3"):
        raise UnsupportedModelError(
            f"rope type {str(kind)[:80]!r} is not supported for llama; supported: default, linear, llama3"
        )
    if share not in (None, 1.0):
        raise UnsupportedModelError(f"partial_rotary_factor {str(share)[:80]} is not supported for llama")
    if theta <= 0 or head_dim % 2:
        raise ValueError(f"rotary positions need rope_theta above 0 and an even head_dim, not {theta} and {head_dim}")
    plain = [theta ** (-pair / head_dim) for pair in range(0, head_dim, 2)]
    if kind == "default":
        return tuple(plain)
    factor = _positive(rope, "factor")
    if kind == "linear":
        return tuple(frequency / factor for frequency in plain)
    return tuple(_llama3(frequency, rope, factor, config["max_position_embeddings"]) for frequency in plain)


def _rope(config: Config) -> dict[str, Any]:
    for key in ("rope_scaling", "rope_parameters"):  # in transformers' order of precedence
        rope = config.get(key)
        if rope:
            if not isinstance(rope, dict):
                raise ValueError(f"{key} must be an object, not {str(rope)[:80]!r}")
            return rope
    return {}


def _positive(rope: dict[str, Any], key: str) -> float:
    value = check_number(key, rope.get(key))
    if value <= 0:
        raise ValueError(f"{key} must be above 0, not {value}")
    return value


def _llama3(frequency: float, rope: dict[str, Any], factor: float, context: int) -> float:
    """Llama 3.1's rule: waves longer than the trained context are stretched by `factor`, short ones kept, those
    between blended."""
    low, high = _positive(rope, "low_freq_factor"), _positive(rope, "high_freq_factor")
    trained = _positive({"original_max_position_embeddings": context, **rope}, "original_max_position_embeddings")
    if high <= low:
        raise ValueError(f"high_freq_factor must be above low_freq_factor, not {high} and {low}")
    waves = trained * frequency / (2 * math.pi)  # within the trained context
    if waves < low:
        return frequency / factor
    if waves > high:
        return frequency
    blend = (waves - low) / (high - low)
    return (1 - blend) * frequency / factor + blend * frequency


def _linear(name: str, source: str) -> tuple[ResidentTensor, ...]:
    return (
        ResidentTensor(name=f"{name}.weight", source=f"{source}.weight"),
        ResidentTensor(name=f"{name}.bias", source=f"{source}.bias", when=_has_attention_bias),
    )


LLAMA = ArchitectureSpec(
    model_type="llama",
    base_prefix="model.",
    matrices={
        "up": _LAYER + "mlp.up_proj.weight",
        "gate": _LAYER + "mlp.gate_proj.weight",
        "down": _LAYER + "mlp.down_proj.weight",
    },
    resident=(
        ResidentTensor(name="embedding.weight", source="model.embed_tokens.weight"),
        ResidentTensor(name="layers.{i}.attention_norm.weight", source=_LAYER + "input_layernorm.weight"),
        *_linear("layers.{i}.query", _LAYER + "self_attn.q_proj"),
        *_linear("layers.{i}.key", _LAYER + "self_attn.k_proj"),
        *_linear("layers.{i}.value", _LAYER + "self_attn.v_proj"),
        *_linear("layers.{i}.out", _LAYER + "self_attn.o_proj"),
        ResidentTensor(name="layers.{i}.ffn_norm.weight", source=_LAYER + "post_attention_layernorm.weight"),
        *(
            ResidentTensor(
                name=f"layers.{{i}}.ffn.{part}_bias", source=f"{_LAYER}mlp.{part}_proj.bias", when=_has_ffn_bias
            )
            for part in ("up", "gate", "down")
        ),
        ResidentTensor(name="final_norm.weight", source="model.norm.weight"),
        ResidentTensor(name="head.weight", source="lm_head.weight", when=_is_untied),
    ),
    num_layers_key="num_hidden_layers",
    d_ff_key="intermediate_size",
    defaults={  # of transformers' LlamaConfig
        "vocab_size": 32000,
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "head_dim": None,
        "max_position_embeddings": 2048,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    },
    block=_block,
    ignored=("model.layers.*.self_attn.rotary_emb.inv_freq",),
)
