"""Llama 1 to 3 (Touvron et al., 2023; Grattafiori et al., 2024) and models under its names, a row each.

A gated FFN with ReLU, FATReLU or dReLU runs sparsely, and so does an ungated one with ReLU or its square (Nemotron,
Arcee, Jais 2); the others are never zero and run dense.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flashllm.arch.family import (
    When,
    alternating,
    always,
    decoder,
    decoder_block,
    fused,
    head_size,
    kv_heads,
    layer_specs,
    linear_tensors,
    never,
    says,
)
from flashllm.arch.rotary import rope_parameters, rotary_of
from flashllm.arch.spec import (
    ArchitectureSpec,
    BlockSpec,
    Config,
    LayerSpec,
    Part,
    ResidentTensor,
    check_number,
    check_size,
)
from flashllm.errors import UnsupportedModelError

_UNGATED = {"up": "mlp.up_proj", "down": "mlp.down_proj"}
_GATED = {"up": "mlp.up_proj", "gate": "mlp.gate_proj", "down": "mlp.down_proj"}
_BEFORE = {"attention_norm": ("input_layernorm", always), "ffn_norm": ("post_attention_layernorm", always)}
_BEHIND = {
    "attention_output_norm": ("post_attention_layernorm", always),
    "ffn_output_norm": ("post_feedforward_layernorm", always),
}
_AROUND = {
    "attention_norm": ("input_layernorm", always),
    "attention_output_norm": ("post_attention_layernorm", always),
    "ffn_norm": ("pre_feedforward_layernorm", always),
    "ffn_output_norm": ("post_feedforward_layernorm", always),
}
_HEAD_NORMS = {"query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}
_FUSED_GATE = {"up": "mlp.gate_up_proj", "gate": "mlp.gate_up_proj", "down": "mlp.down_proj"}
_GATE_PARTS = {  # the gate's rows come first
    "gate": lambda config: Part(count=check_size("intermediate_size", config["intermediate_size"])),
    "up": lambda config: Part(first=config["intermediate_size"], count=config["intermediate_size"]),
}
_DEFAULTS: dict[str, Any] = {  # of transformers' LlamaConfig, or of most
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def _projections(query: When, out: When, *, out_name: str = "o_proj") -> tuple[ResidentTensor, ...]:
    """Query, key, value, out; biases of the first three, and of the last."""
    names = (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"), ("out", out_name))
    return tuple(
        tensor
        for name, source in names
        for tensor in linear_tensors(
            f"layers.{{i}}.{name}", f"self_attn.{source}", bias=out if name == "out" else query
        )
    )


_BIASED = _projections(says("attention_bias"), says("attention_bias"))
_BARE = _projections(never, never)


def _row(model_type: str, *, defaults: Mapping[str, Any], **others: Any) -> ArchitectureSpec:
    """A model_type under Llama's names, RMS norms and a gated FFN, where `others` say nothing else."""
    values: dict[str, Any] = {
        "block": decoder_block,
        "matrices": _GATED,
        "attention": _BARE,
        "norms": _BEFORE,
        "head_norms": _HEAD_NORMS if "head_norm" in others else None,
        "ignored": ("model.layers.*.self_attn.rotary_emb.inv_freq",),
        **others,
    }
    return decoder(model_type, defaults={**_DEFAULTS, **defaults}, **values)


_LLAMA: dict[str, Any] = {
    "vocab_size": 32000,
    "rms_norm_eps": 1e-6,
    "head_dim": None,
    "attention_bias": False,
    "mlp_bias": False,
}
LLAMA = _row("llama", defaults=_LLAMA, attention=_BIASED, ffn_bias=says("mlp_bias"))
# ProSparse (Song et al., 2024): FATReLU, its threshold in the config. The name is of the checkpoints' own code.
SPARSE_LLAMA = _row(
    "sparsellama",
    defaults={**_LLAMA, "hidden_act": "fatrelu", "hidden_act_param": 0.01},
    attention=_BIASED,
    ffn_bias=says("mlp_bias"),
)

_MISTRAL: dict[str, Any] = {
    "vocab_size": 32000,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "head_dim": None,
    "sliding_window": 4096,
}
MISTRAL = _row("mistral", defaults=_MISTRAL)


def _bamboo(config: Config) -> BlockSpec:
    block = decoder_block(config)
    if block.activation != "relu":
        raise UnsupportedModelError(f"activation {block.activation} is not supported for bamboo; supported: relu")
    return replace(block, activation="drelu")


# Bamboo (Song et al., 2024: TurboSparse): Mistral's shape, and ReLU on the gate and on the up projection.
BAMBOO = _row("bamboo", defaults={**_MISTRAL, "hidden_act": "relu"}, block=_bamboo)


# Qwen 2, 2.5 and 3 (Yang et al., 2024, 2025): windows only where the config asks for them, from a layer on.


def _qwen(config: Config, **traits: Any) -> BlockSpec:
    window = config["sliding_window"] if config["use_sliding_window"] else None
    types = config.get("layer_types")
    if types is None and window is not None:
        first = config["max_window_layers"]
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(config["num_hidden_layers"])]
    return decoder_block({**config, "sliding_window": window, "layer_types": types}, **traits)


_QWEN: dict[str, Any] = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
QWEN2 = _row("qwen2", defaults=_QWEN, block=_qwen, attention=_projections(always, never))
QWEN3 = _row(
    "qwen3",
    defaults={**_QWEN, "head_dim": 128, "attention_bias": False},
    block=lambda config: _qwen(config, query_key_norm="head"),
    attention=_BIASED,
    head_norm=always,
)

# Phi-3 (Abdin et al., 2024): query, key, value in one tensor; gate and up in one tensor.
PHI3 = _row(
    "phi3",
    defaults={
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "original_max_position_embeddings": 4096,
        "sliding_window": None,
    },
    matrices=_FUSED_GATE,
    matrix_parts=_GATE_PARTS,
    attention=(
        *(
            tensor
            for part, name in enumerate(("query", "key", "value"))
            for tensor in linear_tensors(f"layers.{{i}}.{name}", "self_attn.qkv_proj", part=fused(part, kv_heads))
        ),
        *linear_tensors("layers.{i}.out", "self_attn.o_proj"),
    ),
)


# Gemma 1 to 3 (Gemma Team, 2024, 2025): norms keep weight - 1, the embedding is scaled by the root of its width.


def _gemma(config: Config, **traits: Any) -> BlockSpec:
    if config.get("use_bidirectional_attention"):
        raise UnsupportedModelError("attention to later tokens makes an encoder; it cannot generate")
    scale = math.sqrt(check_size("hidden_size", config["hidden_size"]))
    return decoder_block(config, norm_shift=1.0, embedding_scale=scale, **traits)


def _optional(config: Config, key: str) -> float | None:
    return None if config.get(key) is None else check_number(key, config[key])


def _gemma2(config: Config, **traits: Any) -> BlockSpec:
    if config.get("layer_types") is None:
        count = check_size("num_hidden_layers", config["num_hidden_layers"], 4096)
        config = {**config, "layer_types": alternating(count, config.get("sliding_window_pattern", 2))}
    scalar = check_number("query_pre_attn_scalar", config["query_pre_attn_scalar"])
    if scalar <= 0:
        raise ValueError(f"query_pre_attn_scalar must be above 0, not {scalar}")
    return _gemma(
        config,
        activation="hidden_activation",
        norms="both",
        query_scale=scalar**-0.5,
        logit_softcap=_optional(config, "final_logit_softcapping"),
        attention_softcap=_optional(config, "attn_logit_softcapping"),
        **{"layers": layer_specs(config), **traits},
    )


def _gemma3(config: Config) -> BlockSpec:
    """Layers that slide turn by one embedding, those that see everything by another."""
    if config.get("layer_types") is None:
        count = check_size("num_hidden_layers", config["num_hidden_layers"], 4096)
        config = {**config, "layer_types": alternating(count, config.get("sliding_window_pattern", 6))}
    rope, width = rope_parameters(config), head_size(config)
    nested = {kind: rope[kind] for kind in ("full_attention", "sliding_attention") if isinstance(rope.get(kind), dict)}
    everything = nested.get("full_attention", {} if nested else rope)
    window = nested.get("sliding_attention", {"rope_theta": config.get("rope_local_base_freq", 10_000.0)})
    bare = {key: value for key, value in config.items() if key not in ("rope_scaling", "rope_parameters")}
    local = {**bare, "rope_theta": None}
    return _gemma2(
        {**bare, "attn_logit_softcapping": None},
        query_key_norm="head",
        rotary=(rotary_of(everything, bare, width, theta=1_000_000.0), rotary_of(window, local, width)),
        layers=layer_specs(config, rotary_of={"full_attention": 0, "sliding_attention": 1}),
    )


_GEMMA: dict[str, Any] = {
    "vocab_size": 256000,
    "rms_norm_eps": 1e-6,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "attention_bias": False,
    "tie_word_embeddings": True,
}
_GEMMA2: dict[str, Any] = {
    **_GEMMA,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
GEMMA = _row(
    "gemma",
    defaults={
        **_GEMMA,
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "hidden_act": "gelu_pytorch_tanh",
    },
    block=_gemma,
    attention=_BIASED,
)
GEMMA2 = _row(
    "gemma2",
    defaults={**_GEMMA2, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
    block=_gemma2,
    attention=_BIASED,
    norms=_AROUND,
)
GEMMA3 = _row(
    "gemma3_text",
    defaults={**_GEMMA2, "vocab_size": 262208, "max_position_embeddings": 131072},
    block=_gemma3,
    attention=_BIASED,
    norms=_AROUND,
    head_norm=always,
)


# Granite (Mishra et al., 2024): multipliers.


def _granite(config: Config) -> BlockSpec:
    by = check_number("logits_scaling", config["logits_scaling"])
    if by == 0:
        raise ValueError("logits_scaling must not be 0")
    return decoder_block(
        config,
        query_scale=check_number("attention_multiplier", config["attention_multiplier"]),
        embedding_scale=check_number("embedding_multiplier", config["embedding_multiplier"]),
        residual_scale=check_number("residual_multiplier", config["residual_multiplier"]),
        logit_scale=1 / by,
    )


GRANITE = _row(
    "granite",
    defaults={
        **_LLAMA,
        "attention_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
    block=_granite,
    attention=_BIASED,
    ffn_bias=says("mlp_bias"),
)

# OLMo 2 (OLMo Team, 2024): norms behind attention and FFN, and one over all queries, one over all keys.
_OLMO2: dict[str, Any] = {"vocab_size": 50304, "rms_norm_eps": 1e-5, "attention_bias": False}
OLMO2 = _row(
    "olmo2",
    defaults=_OLMO2,
    block=lambda config: decoder_block(config, norms="output", query_key_norm="projection"),
    attention=_BIASED,
    norms=_BEHIND,
    head_norm=always,
)


# SmolLM3 (Bakouch et al., 2025): every fourth layer turns nothing.


def _smollm3(config: Config) -> BlockSpec:
    count = check_size("num_hidden_layers", config["num_hidden_layers"], 4096)
    every = config.get("no_rope_layer_interval", 4)
    turns = config.get("no_rope_layers") or [(layer + 1) % every != 0 for layer in range(count)]
    if len(turns) != count:
        raise ValueError(f"no_rope_layers must be a list of {count} numbers")
    window = config["sliding_window"] if config["use_sliding_window"] else None
    windows = layer_specs({**config, "sliding_window": window}) or (LayerSpec(),) * count
    layers = tuple(
        LayerSpec(rotary=0 if turned else None, window=layer.window)
        for turned, layer in zip(turns, windows, strict=True)
    )
    return decoder_block({**config, "sliding_window": None}, theta=2_000_000.0, layers=layers)


SMOLLM3 = _row(
    "smollm3",
    defaults={
        **_LLAMA,
        "vocab_size": 128256,
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": None,
    },
    block=_smollm3,
    attention=_BIASED,
    ffn_bias=says("mlp_bias"),
)

# Models without a gate and with the square of ReLU. Arcee (2025): Llama otherwise.
ARCEE = _row(
    "arcee",
    defaults={
        **_LLAMA,
        "hidden_size": 2560,
        "intermediate_size": 18432,
        "max_position_embeddings": 4096,
        "hidden_act": "relu2",
        "rms_norm_eps": 1e-5,
    },
    block=lambda config: decoder_block(config, gated=False),
    matrices=_UNGATED,
    attention=_BIASED,
    ffn_bias=says("mlp_bias"),
)
# Nemotron and Minitron (Parmar et al., 2024): layer norms that keep weight - 1, half of each head turned.
NEMOTRON = _row(
    "nemotron",
    defaults={
        "vocab_size": 256000,
        "hidden_size": 6144,
        "intermediate_size": 24576,
        "num_attention_heads": 48,
        "max_position_embeddings": 4096,
        "hidden_act": "relu2",
        "norm_eps": 1e-5,
        "head_dim": None,
        "attention_bias": False,
        "mlp_bias": False,
    },
    block=lambda config: decoder_block(
        config, epsilon="norm_eps", rotary_share=0.5, norm="layer", norm_shift=1.0, gated=False
    ),
    matrices=_UNGATED,
    norm_bias=always,
    attention=_BIASED,
    ffn_bias=says("mlp_bias"),
)
# Jais 2 (Inception, 2025): layer norms, biases everywhere.
JAIS2 = _row(
    "jais2",
    defaults={
        "vocab_size": 150272,
        "hidden_size": 3328,
        "intermediate_size": 26624,
        "num_attention_heads": 26,
        "max_position_embeddings": 8192,
        "hidden_act": "relu2",
        "layer_norm_eps": 1e-5,
        "head_dim": None,
        "attention_bias": True,
        "mlp_bias": True,
    },
    block=lambda config: decoder_block(config, epsilon="layer_norm_eps", norm="layer", gated=False),
    matrices=_UNGATED,
    norm_bias=always,
    attention=_BIASED,
    ffn_bias=says("mlp_bias"),
)


# StableLM (Bellagente et al., 2024): layer norms, a quarter of each head turned, in the 12B attention beside the FFN.


def _stablelm(config: Config) -> BlockSpec:
    if config["qk_layernorm"]:
        raise UnsupportedModelError(
            "stablelm with qk_layernorm (StableLM 2 12B) is not supported: it keeps a norm of its own for every head"
        )
    parallel = bool(config["use_parallel_residual"])
    return decoder_block(
        config, epsilon="layer_norm_eps", rotary_share=0.25, norm="layer", parallel=parallel, shared_norm=parallel
    )


STABLELM = _row(
    "stablelm",
    defaults={
        "vocab_size": 50304,
        "hidden_size": 2560,
        "intermediate_size": 6912,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
        "layer_norm_eps": 1e-5,
        "use_qkv_bias": False,
        "qk_layernorm": False,
        "use_parallel_residual": False,
    },
    block=_stablelm,
    attention=_projections(says("use_qkv_bias"), never),
    norms={
        "attention_norm": ("input_layernorm", always),
        "ffn_norm": ("post_attention_layernorm", lambda config: not config["use_parallel_residual"]),
    },
    norm_bias=always,
)
# StarCoder 2 (Lozhkov et al., 2024): layer norms, no gate, windows.
STARCODER2 = _row(
    "starcoder2",
    defaults={
        "vocab_size": 49152,
        "hidden_size": 3072,
        "intermediate_size": 12288,
        "num_hidden_layers": 30,
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096,
        "norm_epsilon": 1e-5,
        "use_bias": True,
        "sliding_window": None,
        "tie_word_embeddings": True,
    },
    block=lambda config: decoder_block(config, epsilon="norm_epsilon", norm="layer", gated=False),
    matrices={"up": "mlp.c_fc", "down": "mlp.c_proj"},
    norm_bias=always,
    attention=_projections(says("use_bias"), says("use_bias")),
    ffn_bias=says("use_bias"),
)


# Cohere's Command R (2024): one layer norm without bias before attention and FFN, neighbours turned together.


def _cohere(config: Config) -> BlockSpec:
    return decoder_block(
        config,
        epsilon="layer_norm_eps",
        theta=500_000.0,
        norm="layer",
        parallel=True,
        shared_norm=True,
        rotary_style="interleaved",
        query_key_norm="heads" if config["use_qk_norm"] else "none",
        logit_scale=check_number("logit_scale", config["logit_scale"]),
    )


COHERE = _row(
    "cohere",
    defaults={
        "vocab_size": 256000,
        "hidden_size": 8192,
        "intermediate_size": 22528,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "max_position_embeddings": 8192,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "attention_bias": False,
        "use_qk_norm": False,
        "tie_word_embeddings": True,
    },
    block=_cohere,
    attention=_BIASED,
    norms={"attention_norm": ("input_layernorm", always)},
    head_norm=says("use_qk_norm"),
)

# GLM-4 9B (GLM Team, 2024): half of each head turned, neighbours together; gate and up in one tensor.
GLM = _row(
    "glm",
    defaults={
        "vocab_size": 151552,
        "intermediate_size": 13696,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1.5625e-07,
        "attention_bias": True,
    },
    block=lambda config: decoder_block(config, rotary_share=0.5, rotary_style="interleaved"),
    matrices=_FUSED_GATE,
    matrix_parts=_GATE_PARTS,
    attention=_projections(says("attention_bias"), never),
)

LLAMA_LIKE = (
    *(LLAMA, SPARSE_LLAMA, MISTRAL, BAMBOO, QWEN2, QWEN3, PHI3, GEMMA, GEMMA2, GEMMA3, GRANITE, OLMO2, SMOLLM3),
    *(ARCEE, NEMOTRON, JAIS2, STABLELM, STARCODER2, COHERE, GLM),
)
