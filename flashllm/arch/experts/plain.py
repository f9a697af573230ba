"""Mixtures of experts (Shazeer et al., 2017) whose routers take a softmax of their products, a row each."""

from dataclasses import replace
from functools import partial

from flashllm.arch.experts.row import (
    GATED_SHARED,
    SHARED,
    dense_first,
    experts_of,
    in_layer,
    matrices,
    mixture_block,
    row,
    shared_neurons,
)
from flashllm.arch.family import (
    alternating,
    always,
    decoder_block,
    head_size,
    if_asked,
    never,
    num_layers,
    projections,
    says,
    slides,
    sliding,
    turning,
    with_types,
)
from flashllm.arch.llama.dense import HUNYUAN_NORMS, cohere_block
from flashllm.arch.llama.names import BARE, BEHIND, BIASED, ONE_BEFORE
from flashllm.arch.llama.windowed import SINKS
from flashllm.arch.mixers import check_size
from flashllm.arch.mixture import RouterSpec
from flashllm.arch.rotary import rope_parameters, rotary_by_type
from flashllm.arch.spec import BlockSpec, Config, check_number, check_usual
from flashllm.arch.tensors import ResidentTensor
from flashllm.errors import UnsupportedModelError

_all_mixtures = partial(mixture_block, size="intermediate_size", first=None)


def _softmax(config: Config) -> RouterSpec:
    return RouterSpec(normalized=bool(config["norm_topk_prob"]))


# OLMoE (Muennighoff et al., 2024): norms over all queries and over all keys.


def _olmoe(config: Config) -> BlockSpec:
    check_usual(config, {"clip_qkv": None})
    return _all_mixtures(config, _softmax(config), query_key_norm="projection")


OLMOE = row("olmoe", experts=64, block=_olmoe, attention=BIASED)

# FlexOlmo (Shi et al., 2025): the same with OLMo 2's norms.
FLEX_OLMO = row(
    "flex_olmo",
    experts=7,
    block=lambda config: _all_mixtures(
        config, _softmax(config), theta=500_000.0, norms="output", query_key_norm="projection"
    ),
    attention=BIASED,
    norms=BEHIND,
)

# Qwen 1.5 MoE, 2 and 3 (Qwen Team, 2024, 2025). The former have shared neurons, which a gate weighs.


def dense_layers(config: Config) -> frozenset[int]:
    """The layers that are no mixtures: those that are named, and all but every `decoder_sparse_step`-th."""
    count = num_layers(config)
    step = check_size("decoder_sparse_step", config["decoder_sparse_step"], 2**30)
    named = config["mlp_only_layers"] or []
    if not isinstance(named, list) or any(type(layer) is not int for layer in named):
        raise ValueError(f"mlp_only_layers must be a list of layers, not {str(named)[:80]}")
    return frozenset(layer for layer in range(count) if layer in named or (layer + 1) % step != 0)


def _qwen2_moe(config: Config) -> BlockSpec:
    full = if_asked(config)
    if full.get("layer_types") is None:
        most = config["max_window_layers"] if config["use_sliding_window"] else 0
        full["layer_types"] = sliding(i % 2 == 0 and i < most for i in range(num_layers(config)))
    key = "shared_expert_intermediate_size"
    experts = experts_of(config, _softmax(config), shared=check_size(key, config[key]))
    return decoder_block(full, experts=experts, dense_layers=dense_layers(config))


def _qwen3_moe(config: Config) -> BlockSpec:
    experts, dense = experts_of(config, _softmax(config)), dense_layers(config)
    return decoder_block(if_asked(config), query_key_norm="head", experts=experts, dense_layers=dense)


QWEN2_MOE = row(
    "qwen2_moe", experts=60, block=_qwen2_moe, attention=projections(says("qkv_bias"), never), **GATED_SHARED
)
QWEN3_MOE = row("qwen3_moe", experts=128, block=_qwen3_moe, attention=BIASED)

# Mellum 2 (JetBrains, 2026): Qwen 3's, with a rotation of its own for layers with a window.


def _mellum(config: Config) -> BlockSpec:
    types = config["layer_types"] or ["full_attention"] * num_layers(config)
    return mixture_block(
        {**config, "layer_types": types},
        _softmax(config),
        query_key_norm="head",
        rotary_of=rotary_by_type(config, head_size(config), theta=500_000.0, sliding={"rope_theta": 10_000.0}),
    )


MELLUM = row("mellum", experts=64, block=_mellum, attention=BIASED)

# Mixtral (Jiang et al., 2024).
W = {matrix: f"block_sparse_moe.experts.{{e}}.w{i}" for matrix, i in (("up", 3), ("gate", 1), ("down", 2))}
MIXTRAL = row(
    "mixtral",
    experts=8,
    router="block_sparse_moe.gate",
    block=lambda config: _all_mixtures(config, RouterSpec(normalized=True), theta=1e6),
    attention=BARE,
    matrices=W,
)


# Phi-3.5-MoE (Abdin et al., 2024): SparseMixer; layer norms, biases, also of the head.


def _phimoe(config: Config) -> BlockSpec:
    check_usual(config, {"num_experts_per_tok": 2})
    router = RouterSpec(score="sparse_mixer", jitter=check_number("router_jitter_noise", config["router_jitter_noise"]))
    rope = rope_parameters(config)
    if rope.get("short_mscale") is not None:  # within the trained context
        config = {**config, "rope_scaling": {**rope, "attention_factor": rope["short_mscale"]}}
    return decoder_block(config, theta=1e6, norm="layer", experts=experts_of(config, router, "intermediate_size"))


PHIMOE = row(
    "phimoe",
    experts=16,
    router="block_sparse_moe.gate",
    renamed={"model.layers.{i}.mlp.router.weight": "model.layers.{i}.block_sparse_moe.gate.weight"},
    block=_phimoe,
    attention=BIASED,
    norm_bias=always,
    head_bias=says("lm_head_bias"),
    matrices=W,
)


# Hunyuan A13B (Tencent, 2025): a shared expert, norms of each head behind the rotation.


def _hunyuan_moe(config: Config) -> BlockSpec:
    def alike(key: str) -> int:
        given = config[key]
        if isinstance(given, list) and len(set(given)) != 1:
            raise UnsupportedModelError(f"hunyuan_v1_moe with {key} that differs by layer is not supported")
        return check_size(key, given[0] if isinstance(given, list) else given)

    one = {**config, "num_experts": alike("num_experts"), "moe_topk": alike("moe_topk")}
    size = check_size("intermediate_size", config["intermediate_size"])
    experts = experts_of(one, RouterSpec(normalized=True), "intermediate_size", chosen="moe_topk", shared=size)
    return decoder_block(config, query_key_norm="turned_head", experts=experts)


HUNYUAN_MOE = row(
    "hunyuan_v1_moe",
    experts=1,
    router="mlp.gate.wg",
    is_wide=True,
    renamed={},
    block=_hunyuan_moe,
    attention=BIASED,
    head_norms=HUNYUAN_NORMS,
    shared_matrices=in_layer(matrices("mlp.shared_mlp")),
)


# gpt-oss (OpenAI, 2025): sinks, every other layer with a window, biases everywhere. Checkpoints have the experts' gate
# and up rows one in turn with the other; convert/checkpoint/mixtures/gpt_oss.py takes them apart.


def _gpt_oss(config: Config) -> BlockSpec:
    check_usual(config, {"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "hidden_act": "silu"})
    experts = experts_of(config, RouterSpec(score="softmax_of_chosen"), "intermediate_size")
    block = decoder_block(with_types(config, 2), theta=150_000.0, experts=experts)
    return replace(block, activation="clamped_swiglu")


GPT_OSS = row(
    "gpt_oss",
    experts=128,
    router="mlp.router",
    renamed={},
    stacked={},
    block=_gpt_oss,
    attention=(*BIASED, SINKS),
    ffn_tensors=(
        ResidentTensor(name="layers.{i}.router.bias", source="mlp.router.bias"),
        ResidentTensor(name="layers.{i}.ffn.up_bias", source="mlp.experts.up_bias"),
        ResidentTensor(name="layers.{i}.ffn.gate_bias", source="mlp.experts.gate_bias"),
        ResidentTensor(name="layers.{i}.ffn.expert_down_bias", source="mlp.experts.down_proj_bias"),
    ),
)


# Command A+ (Cohere, 2026): Command A's layers, with experts of which the shared count as much as the routed together.


def _cohere2(config: Config) -> BlockSpec:
    strategy, score = config["shared_expert_combination_strategy"], config["expert_selection_fn"]
    if strategy not in ("average", "sum"):
        raise UnsupportedModelError(f"shared_expert_combination_strategy {str(strategy)[:80]!r} is not supported")
    if score not in ("softmax", "sigmoid"):
        raise UnsupportedModelError(f"expert_selection_fn {str(score)[:80]!r} is not supported")
    first = min(config.get("first_k_dense_replace") or 0, num_layers(config))
    patterns = (config["prefix_dense_sliding_window_pattern"], config["sliding_window_pattern"])
    own, rest = (check_size("sliding_window_pattern", pattern) for pattern in patterns)
    dense, width = dense_first(config), config["prefix_dense_intermediate_size"] or config["intermediate_size"]
    types = config["layer_types"] or [*alternating(first, own), *alternating(num_layers(config) - first, rest)]
    full = {**config, "layer_types": types, "intermediate_size": width}
    is_softmax = score == "softmax"
    router = RouterSpec(
        score="softmax_of_chosen" if is_softmax else "sigmoid", normalized=not is_softmax and config["norm_topk_prob"]
    )
    shared = shared_neurons(config, "num_shared_experts", "intermediate_size")
    experts = experts_of(config, router, "intermediate_size", shared=shared)
    block = cohere_block(full, 10_000.0, experts=experts, dense_layers=dense)
    half = 0.5 if shared and strategy == "average" else 1.0
    layers = (layer if layer.experts is None else replace(layer, ffn_scale=half) for layer in block.layers)
    turns = [slid or (i in dense and own == 1) for i, slid in enumerate(slides(full))]
    return turning(replace(block, layers=tuple(layers)), turns)


COHERE2 = row("cohere2_moe", experts=8, block=_cohere2, attention=BIASED, norms=ONE_BEFORE, shared_matrices=SHARED)

PLAIN = (COHERE2, OLMOE, FLEX_OLMO, QWEN2_MOE, QWEN3_MOE, MELLUM, MIXTRAL, PHIMOE, HUNYUAN_MOE, GPT_OSS)
