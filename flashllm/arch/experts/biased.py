"""Mixtures of experts whose routers choose by a bias that their weights do not have (Wang et al., 2024), a row each."""

from dataclasses import replace
from functools import partial
from typing import Any

from flashllm.arch.experts.row import (
    SHARED,
    dense_first,
    experts_of,
    grouped_router,
    in_layer,
    matrices,
    row,
    shared_neurons,
)
from flashllm.arch.family import (
    always,
    decoder_block,
    fused,
    fused_tensors,
    head_size,
    kv_heads,
    linear_tensors,
    never,
    says,
    turning,
)
from flashllm.arch.llama.names import AROUND, BARE, BIASED, projections
from flashllm.arch.llama.windowed import exaone_block, slides, with_types
from flashllm.arch.mixers import check_size
from flashllm.arch.mixture import RouterSpec
from flashllm.arch.rotary import rotary_by_type
from flashllm.arch.spec import MAX_LAYERS, BlockSpec, Config, LayerSpec, check_number
from flashllm.arch.tensors import ResidentTensor
from flashllm.errors import UnsupportedModelError

_BIAS = "mlp.gate.e_score_correction_bias"


# ERNIE 4.5 (Baidu, 2025): a softmax, whose bias is of the choice alone.


def _ernie(config: Config) -> BlockSpec:
    count = check_size("num_hidden_layers", config["num_hidden_layers"], MAX_LAYERS)
    first, last, step = (config[f"moe_layer_{name}"] for name in ("start_index", "end_index", "interval"))
    every = check_size("moe_layer_interval", step)
    mixtures = range(first, count if last == -1 else last + 1)
    router = RouterSpec(normalized=True, least_sum=check_number("moe_norm_min", config["moe_norm_min"]))
    shared = shared_neurons(config, "moe_num_shared_experts")
    return decoder_block(
        config,
        theta=500_000.0,
        rotary_style="interleaved",
        experts=experts_of(config, "moe_intermediate_size", router, chosen="moe_k", shared=shared),
        dense_layers={i for i in range(count) if i not in mixtures or (i + 1) % every},
    )


ERNIE = row(
    "ernie4_5_moe",
    experts=64,
    is_wide=True,
    choice="mlp.moe_statics.e_score_correction_bias",
    newer_choice="mlp.gate.moe_statics.e_score_correction_bias",
    block=_ernie,
    attention=projections(says("use_bias"), says("use_bias")),
    shared_matrices=SHARED,
)


# GLM-4.5 (GLM-4.5 Team, 2025), 4.6 and Air: half of each head is turned.


def _glm4(config: Config) -> BlockSpec:
    shared = shared_neurons(config, "n_shared_experts")
    return decoder_block(
        config,
        rotary_share=0.5,
        query_key_norm="head" if config["use_qk_norm"] else "none",
        experts=experts_of(config, "moe_intermediate_size", grouped_router(config), shared=shared),
        dense_layers=dense_first(config),
    )


GLM4 = row(
    "glm4_moe",
    experts=128,
    is_wide=True,
    choice=_BIAS,
    block=_glm4,
    attention=projections(says("attention_bias"), never),
    shared_matrices=SHARED,
)


# dots.llm1 (rednote-hilab, 2025).


def _dots1(config: Config) -> BlockSpec:
    types, window = config["layer_types"], config["sliding_window"]
    if types is None:
        slides = [window is not None and i >= config["max_window_layers"] for i in range(config["num_hidden_layers"])]
        types = ["sliding_attention" if each else "full_attention" for each in slides]
    shared = shared_neurons(config, "n_shared_experts")
    return decoder_block(
        {**config, "layer_types": types},
        query_key_norm="head",
        experts=experts_of(config, "moe_intermediate_size", grouped_router(config), shared=shared),
        dense_layers=dense_first(config),
    )


DOTS1 = row(
    "dots1",
    experts=None,
    is_wide=True,
    choice=_BIAS,
    block=_dots1,
    attention=BIASED,
    shared_matrices=SHARED,
)


# MiniMax-M2 (MiniMax, 2025): norms over all queries and over all keys.


def _minimax(config: Config) -> BlockSpec:
    dims = config.get("rotary_dim")
    return decoder_block(
        config,
        theta=5e6,
        rotary_share=1.0 if dims is None else check_size("rotary_dim", dims) / config["head_dim"],
        query_key_norm="projection",
        experts=experts_of(config, "intermediate_size", RouterSpec(score="sigmoid", normalized=True)),
    )


MINIMAX = row(
    "minimax_m2",
    experts=256,
    router="block_sparse_moe.gate",
    choice="block_sparse_moe.e_score_correction_bias",
    newer_choice="mlp.e_score_correction_bias",
    block=_minimax,
    attention=BARE,
    matrices={matrix: f"block_sparse_moe.experts.{{e}}.w{i}" for matrix, i in (("up", 3), ("gate", 1), ("down", 2))},
)

# Solar Open (Upstage, 2026): GLM-4.5's router.


def _solar(config: Config) -> BlockSpec:
    shared = shared_neurons(config, "n_shared_experts")
    experts = experts_of(config, "moe_intermediate_size", grouped_router(config), shared=shared)
    return decoder_block({"intermediate_size": experts.neurons, **config}, theta=1e6, experts=experts)


SOLAR = row(
    "solar_open",
    experts=128,
    is_wide=True,
    choice=_BIAS,
    block=_solar,
    attention=projections(says("attention_bias"), never),
    shared_matrices=SHARED,
)


# EXAONE MoE (LG AI Research, 2026): EXAONE 4's windows and rotation, its norms before attention and FFN.


def _exaone(config: Config) -> BlockSpec:
    shared = shared_neurons(config, "num_shared_experts")
    experts = experts_of(config, "moe_intermediate_size", grouped_router(config), shared=shared)
    return exaone_block(config, experts=experts, dense_layers=dense_first(config))


EXAONE = row(
    "exaone_moe",
    experts=64,
    is_wide=True,
    choice="mlp.e_score_correction_bias",
    newer_choice=_BIAS,
    block=_exaone,
    attention=BARE,
    shared_matrices=SHARED,
)


# AFMoE (Arcee, 2025: Trinity): a gate behind attention, norms around; layers without a window turn nothing.


def _afmoe(config: Config) -> BlockSpec:
    full = with_types(config, config["global_attn_every_n_layers"])
    router = RouterSpec(
        score="sigmoid", normalized=True, epsilon=1e-20, factor=check_number("route_scale", config["route_scale"])
    )
    shared = shared_neurons(config, "num_shared_experts")
    block = decoder_block(
        full,
        query_key_norm="head",
        gate="sigmoid",
        norms="both",
        embedding_scale=config["hidden_size"] ** 0.5 if config["mup_enabled"] else 1.0,
        experts=experts_of(config, "moe_intermediate_size", router, shared=shared),
        dense_layers=dense_first(config, "num_dense_layers"),
    )
    return turning(block, slides(full))


AFMOE = row(
    "afmoe",
    experts=64,
    router="mlp.router.gate",
    renamed={},
    choice="mlp.expert_bias",
    block=_afmoe,
    attention=(*BIASED, ResidentTensor(name="layers.{i}.out_gate.weight", source="self_attn.gate_proj.weight")),
    norms={
        **AROUND,
        "ffn_norm": ("pre_mlp_layernorm", always),
        "ffn_output_norm": ("post_mlp_layernorm", always),
    },
    shared_matrices=SHARED,
)


# Laguna (Poolside, 2026): a softplus of a gate, of each head or of each number; heads by layer.


def _laguna(config: Config) -> BlockSpec:
    for key in ("moe_apply_router_weight_on_input", "moe_router_logit_softcapping"):
        if config[key]:
            raise UnsupportedModelError(f"laguna with {key} is not supported")
    count = check_size("num_hidden_layers", config["num_hidden_layers"], MAX_LAYERS)
    heads = config["num_attention_heads_per_layer"] or [config["num_attention_heads"]] * count
    if not isinstance(heads, list) or len(heads) != count:
        raise ValueError(f"num_attention_heads_per_layer must be a list of {count} numbers")
    factor = check_number("moe_routed_scaling_factor", config["moe_routed_scaling_factor"])
    key = "shared_expert_intermediate_size"
    block = decoder_block(
        {
            **config,
            "layer_types": config["layer_types"] or ["full_attention"] * count,
            "sliding_window": config["sliding_window"] or None,
        },
        query_key_norm="head",
        gate="head_softplus" if config["gating"] in (True, "per-head") else "softplus",
        rotary_of=rotary_by_type(config, head_size(config), theta=500_000.0),
        experts=experts_of(
            config,
            "moe_intermediate_size",
            RouterSpec(score="sigmoid", normalized=True, factor=factor),
            shared=check_size(key, config[key]),
        ),
        dense_layers=dense_first(config, "first_k_dense_replace"),
    )
    layers = (
        replace(layer, mixer=replace(layer.attention, heads=own))
        for layer, own in zip(block.layers, heads, strict=True)
    )
    return replace(block, layers=tuple(layers))


LAGUNA = row(
    "laguna",
    experts=256,
    choice="mlp.experts.e_score_correction_bias",
    newer_choice=_BIAS,
    block=_laguna,
    attention=(*BIASED, ResidentTensor(name="layers.{i}.out_gate.weight", source="self_attn.g_proj.weight")),
    shared_matrices=in_layer(matrices("mlp.shared_expert")),
)


# Hunyuan 3 (Tencent, 2026).


def _hunyuan3(config: Config) -> BlockSpec:
    factor = check_number("router_scaling_factor", config["router_scaling_factor"])
    router = RouterSpec(score="sigmoid", normalized=True, epsilon=1e-20, factor=factor)
    shared = shared_neurons(config, "num_shared_experts")
    return decoder_block(
        config,
        theta=11158840.0,
        query_key_norm="head",
        experts=experts_of(config, "moe_intermediate_size", router, shared=shared),
        dense_layers=dense_first(config),
    )


HUNYUAN3 = row(
    "hy_v3",
    experts=192,
    router="mlp.router.gate",
    is_wide=True,
    choice="mlp.expert_bias",
    newer_choice="mlp.e_score_correction_bias",
    block=_hunyuan3,
    attention=BIASED,
    shared_matrices=in_layer(matrices("mlp.shared_mlp")),
)

# Ling and Ring 2.0 (Ling Team, 2025), by the vendor's code (inclusionAI/Ling-V2, modeling_bailing_moe_v2.py):
# transformers lacks it. Ling 1 has the same model_type.


def _ling(config: Config) -> BlockSpec:
    usual: dict[str, Any] = {"score_function": "sigmoid", "moe_router_enable_expert_bias": True, "use_qk_norm": True}
    for key, value in usual.items():
        if config[key] != value:
            raise UnsupportedModelError(
                f"bailing_moe whose {key} is {str(config[key])[:80]} (Ling 1) is not supported; Ling 2.0 runs"
            )
    dims = config["rotary_dim"]
    shared = shared_neurons(config, "num_shared_experts")
    normalized = {**config, "norm_topk_prob": config["num_experts_per_tok"] != 1}
    return decoder_block(
        config,
        rotary_share=1.0 if dims is None else check_size("rotary_dim", dims) / head_size(config),
        query_key_norm="head",
        experts=experts_of(config, "moe_intermediate_size", grouped_router(normalized), shared=shared),
        dense_layers=dense_first(config),
    )


LING = row(
    "bailing_moe",
    experts=256,
    is_wide=True,
    choice="mlp.gate.expert_bias",
    newer_choice=_BIAS,
    block=_ling,
    attention=(
        *fused_tensors("attention.query_key_value", partial(fused, heads=kv_heads), bias=says("use_qkv_bias")),
        *linear_tensors("layers.{i}.out", "attention.dense", bias=says("use_bias")),
    ),
    head_norms={"query_norm": "attention.query_layernorm", "key_norm": "attention.key_layernorm"},
    names={"embedding": "word_embeddings"},
    shared_matrices=SHARED,
    ignored=("model.layers.*.attention.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"),
)


# MiMo-V2-Flash (Xiaomi, 2025): values narrower than keys, and scaled; of layers with a window twice the key-value
# heads, and a sink of each head.


def _mimo(config: Config) -> BlockSpec:
    count = check_size("num_hidden_layers", config["num_hidden_layers"], MAX_LAYERS)
    types = config["layer_types"]
    if types is None:
        types = ["full_attention" if i == 0 or (i + 1) % 6 == 0 else "sliding_attention" for i in range(count)]
    window = config["sliding_window_size"]
    window = config["sliding_window"] if window is None else check_size("sliding_window_size", window) + 1
    kinds = config["mlp_layer_types"] or ["dense", *["sparse"] * (count - 1)]
    scale = config["attention_value_scale"]
    block = decoder_block(
        {**config, "layer_types": types, "sliding_window": window},
        rotary_of=rotary_by_type(config, head_size(config), theta=5e6, share=0.334, sliding={"rope_theta": 1e4}),
        value_dim=check_size("v_head_dim", config["v_head_dim"]),
        value_scale=1.0 if scale is None else check_number("attention_value_scale", scale),
        experts=experts_of(config, "moe_intermediate_size", grouped_router(config)),
        dense_layers=dense_first({**config, "mlp_layer_types": kinds}),
    )

    def layer(spec: LayerSpec, kind: str) -> LayerSpec:
        mixer = spec.attention
        return replace(spec, mixer=replace(mixer, kv_heads=2 * mixer.kv_heads)) if kind[0] == "s" else spec

    return replace(block, layers=tuple(layer(spec, kind) for spec, kind in zip(block.layers, types, strict=True)))


MIMO = row(
    "mimo_v2_flash",
    experts=256,
    is_wide=True,
    choice=_BIAS,
    renamed={"model.layers.{i}.self_attn.sinks": "model.layers.{i}.self_attn.attention_sink_bias"},
    block=_mimo,
    attention=(
        *projections(says("attention_bias"), never),
        ResidentTensor(
            name="layers.{i}.sinks",
            source="self_attn.attention_sink_bias",
            layers=lambda layer: layer.attention.window is not None,
        ),
    ),
)

BIASED_CHOICE = (
    *(LING, MIMO),
    *(ERNIE, GLM4, DOTS1, MINIMAX, SOLAR, EXAONE, AFMOE, LAGUNA, HUNYUAN3),
)
