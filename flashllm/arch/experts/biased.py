"""Mixtures of experts whose routers choose by a bias that their weights do not have (Wang et al., 2024), a row each."""

from dataclasses import replace
from functools import partial
from typing import Any

from flashllm.arch.experts.plain import W
from flashllm.arch.experts.row import (
    SHARED,
    dense_first,
    experts_of,
    grouped_router,
    in_layer,
    matrices,
    mixture_block,
    row,
)
from flashllm.arch.family import (
    always,
    decoder_block,
    each_layer,
    fused,
    fused_tensors,
    head_size,
    kv_heads,
    linear_tensors,
    never,
    num_layers,
    of_layers,
    projections,
    says,
    slides,
    sliding,
    turning,
    with_attention,
    with_types,
)
from flashllm.arch.llama.names import AROUND, BARE, BIASED
from flashllm.arch.llama.windowed import exaone_block
from flashllm.arch.mixers import check_size
from flashllm.arch.mixture import RouterSpec
from flashllm.arch.rotary import rotary_by_type
from flashllm.arch.spec import MAX_LAYERS, BlockSpec, Config, LayerSpec, check_number, check_usual
from flashllm.arch.tensors import ResidentTensor
from flashllm.base.checks import check_int
from flashllm.errors import UnsupportedModelError

_BIAS = "mlp.gate.e_score_correction_bias"


def sigmoid_router(config: Config, factor: str, *, epsilon: float = 1e-20) -> RouterSpec:
    """Sigmoids as shares of their sum, times a factor of the config."""
    by = check_number(factor, config[factor])
    return RouterSpec(score="sigmoid", normalized=True, epsilon=epsilon, factor=by)


# ERNIE 4.5 (Baidu, 2025): a softmax, whose bias is of the choice alone.


def _ernie(config: Config) -> BlockSpec:
    count, every = num_layers(config), check_size("moe_layer_interval", config["moe_layer_interval"])
    first, last = config["moe_layer_start_index"], config["moe_layer_end_index"]
    check_int("moe_layer_start_index", first, 0, MAX_LAYERS)
    check_int("moe_layer_end_index", last, -1, MAX_LAYERS)
    mixtures = range(first, count if last == -1 else last + 1)
    router = RouterSpec(normalized=True, least_sum=check_number("moe_norm_min", config["moe_norm_min"]))
    return mixture_block(
        config,
        router,
        chosen="moe_k",
        shared="moe_num_shared_experts",
        first=None,
        theta=500_000.0,
        rotary_style="interleaved",
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
GLM4 = row(
    "glm4_moe",
    experts=128,
    is_wide=True,
    choice=_BIAS,
    block=lambda config: mixture_block(
        config,
        grouped_router(config),
        shared="n_shared_experts",
        rotary_share=0.5,
        query_key_norm="head" if config["use_qk_norm"] else "none",
    ),
    attention=projections(says("attention_bias"), never),
    shared_matrices=SHARED,
)


# dots.llm1 (rednote-hilab, 2025).


def _dots1(config: Config) -> BlockSpec:
    types, window = config["layer_types"], config["sliding_window"]
    if types is None:
        types = sliding(window is not None and i >= config["max_window_layers"] for i in range(num_layers(config)))
    full = {**config, "layer_types": types}
    return mixture_block(full, grouped_router(config), shared="n_shared_experts", query_key_norm="head")


DOTS1 = row("dots1", experts=None, is_wide=True, choice=_BIAS, block=_dots1, attention=BIASED, shared_matrices=SHARED)


# MiniMax-M2 (MiniMax, 2025): norms over all queries and over all keys.


def _minimax(config: Config) -> BlockSpec:
    dims = config.get("rotary_dim")
    return mixture_block(
        config,
        RouterSpec(score="sigmoid", normalized=True),
        size="intermediate_size",
        first=None,
        theta=5e6,
        rotary_share=1.0 if dims is None else check_size("rotary_dim", dims) / head_size(config),
        query_key_norm="projection",
    )


MINIMAX = row(
    "minimax_m2",
    experts=256,
    router="block_sparse_moe.gate",
    choice="block_sparse_moe.e_score_correction_bias",
    newer_choice="mlp.e_score_correction_bias",
    block=_minimax,
    attention=BARE,
    matrices=W,
)

# Solar Open (Upstage, 2026): GLM-4.5's router, and no dense layer.
SOLAR = row(
    "solar_open",
    experts=128,
    is_wide=True,
    choice=_BIAS,
    block=lambda config: mixture_block(
        {"intermediate_size": config["moe_intermediate_size"], **config},
        grouped_router(config),
        shared="n_shared_experts",
        first=None,
        theta=1e6,
    ),
    attention=projections(says("attention_bias"), never),
    shared_matrices=SHARED,
)


# EXAONE MoE (LG AI Research, 2026): EXAONE 4's windows and rotation, its norms before attention and FFN.
EXAONE = row(
    "exaone_moe",
    experts=64,
    is_wide=True,
    choice="mlp.e_score_correction_bias",
    newer_choice=_BIAS,
    block=lambda config: mixture_block(config, grouped_router(config), shared="num_shared_experts", block=exaone_block),
    attention=BARE,
    shared_matrices=SHARED,
)


# AFMoE (Arcee, 2025: Trinity): a gate behind attention, norms around; layers without a window turn nothing.


def _afmoe(config: Config) -> BlockSpec:
    full = with_types(config, config["global_attn_every_n_layers"])
    width = check_size("hidden_size", config["hidden_size"])
    block = mixture_block(
        full,
        sigmoid_router(config, "route_scale"),
        shared="num_shared_experts",
        first="num_dense_layers",
        query_key_norm="head",
        gate="sigmoid",
        norms="both",
        embedding_scale=width**0.5 if config["mup_enabled"] else 1.0,
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
    norms={**AROUND, "ffn_norm": ("pre_mlp_layernorm", always), "ffn_output_norm": ("post_mlp_layernorm", always)},
    shared_matrices=SHARED,
)


# Laguna (Poolside, 2026): a softplus of a gate, of each head or of each number; heads by layer.


def _laguna(config: Config) -> BlockSpec:
    check_usual(config, {"moe_apply_router_weight_on_input": False})
    count, key = num_layers(config), "shared_expert_intermediate_size"
    heads = of_layers("num_attention_heads_per_layer", config, usual=[config["num_attention_heads"]] * count)
    cap = check_number("moe_router_logit_softcapping", config["moe_router_logit_softcapping"])
    router = replace(sigmoid_router(config, "moe_routed_scaling_factor", epsilon=0.0), softcap=cap)
    block = decoder_block(
        {
            **config,
            "layer_types": config["layer_types"] or ["full_attention"] * count,
            "sliding_window": config["sliding_window"] or None,
        },
        query_key_norm="head",
        gate="head_softplus" if config["gating"] in (True, "per-head") else "softplus",
        rotary_of=rotary_by_type(config, head_size(config), theta=500_000.0),
        experts=experts_of(config, router, shared=check_size(key, config[key])),
        dense_layers=dense_first(config),
    )
    return each_layer(block, heads, lambda layer, own: with_attention(layer, heads=own))


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
HUNYUAN3 = row(
    "hy_v3",
    experts=192,
    router="mlp.router.gate",
    is_wide=True,
    choice="mlp.expert_bias",
    newer_choice="mlp.e_score_correction_bias",
    block=lambda config: mixture_block(
        config,
        sigmoid_router(config, "router_scaling_factor"),
        shared="num_shared_experts",
        theta=11158840.0,
        query_key_norm="head",
    ),
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
    check_usual(config, {"norm_head": False, "norm_softmax": False})
    dims = config["rotary_dim"]
    normalized = {**config, "norm_topk_prob": config["num_experts_per_tok"] != 1}
    return mixture_block(
        config,
        grouped_router(normalized),
        shared="num_shared_experts",
        rotary_share=1.0 if dims is None else check_size("rotary_dim", dims) / head_size(config),
        query_key_norm="head",
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
    count = num_layers(config)
    types = of_layers("layer_types", config, "names", sliding(i and (i + 1) % 6 for i in range(count)))
    window = config["sliding_window_size"]
    window = config["sliding_window"] if window is None else check_size("sliding_window_size", window) + 1
    kinds = config["mlp_layer_types"] or ["dense", *["sparse"] * (count - 1)]
    scale = config["attention_value_scale"]
    block = decoder_block(
        {**config, "layer_types": types, "sliding_window": window},
        rotary_of=rotary_by_type(config, head_size(config), theta=5e6, share=0.334, sliding={"rope_theta": 1e4}),
        value_dim=check_size("v_head_dim", config["v_head_dim"]),
        value_scale=1.0 if scale is None else check_number("attention_value_scale", scale),
        experts=experts_of(config, grouped_router(config)),
        dense_layers=dense_first({**config, "mlp_layer_types": kinds}),
    )

    def layer(spec: LayerSpec, kind: str) -> LayerSpec:
        return with_attention(spec, kv_heads=spec.attention.kv_heads * (2 if kind == "sliding_attention" else 1))

    return each_layer(block, types, layer)


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

BIASED_CHOICE = (*(LING, MIMO), *(ERNIE, GLM4, DOTS1, MINIMAX, SOLAR, EXAONE, AFMOE, LAGUNA, HUNYUAN3))
