"""Mixtures of experts with multi-head latent attention (DeepSeek-AI, 2024), a row each."""

from dataclasses import replace
from functools import partial
from typing import Any

from flashllm.arch.experts.row import SHARED, grouped_router, mixture_block, row
from flashllm.arch.family import num_layers
from flashllm.arch.llama.latent import LATENT, LATENT_NORMS, latent_block
from flashllm.arch.mixers import check_size
from flashllm.arch.mixture import RouterSpec
from flashllm.arch.rotary import growth
from flashllm.arch.spec import BlockSpec, Config, check_number
from flashllm.errors import UnsupportedModelError

_COMMON: dict[str, Any] = {"is_wide": True, "attention": LATENT, "head_norms": LATENT_NORMS, "shared_matrices": SHARED}


_latent_experts = partial(mixture_block, shared="n_shared_experts", block=latent_block)


# DeepSeek-V2 and V2-Lite (DeepSeek-AI, 2024): a softmax, never normalised; groups by their highest.


def _deepseek_v2(config: Config) -> BlockSpec:
    method = config["topk_method"]
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedModelError(f"topk_method {str(method)[:80]!r} is not supported for deepseek_v2")
    grouped = method == "group_limited_greedy"
    router = RouterSpec(
        groups=check_size("n_group", config["n_group"]) if grouped else 1,
        chosen_groups=check_size("topk_group", config["topk_group"]) if grouped else 1,
        groups_by="one",
        factor=check_number("routed_scaling_factor", config["routed_scaling_factor"]),
    )
    return _latent_experts({**config, "rope_interleave": True}, router)


DEEPSEEK_V2 = row("deepseek_v2", experts=64, block=_deepseek_v2, **_COMMON)

# DeepSeek-V3 (DeepSeek-AI, 2024), R1, and Kimi K2 (Moonshot AI, 2025), which is the same.
DEEPSEEK_V3 = row(
    "deepseek_v3",
    experts=256,
    choice="mlp.gate.e_score_correction_bias",
    block=lambda config: _latent_experts(config, grouped_router(config)),
    **_COMMON,
)

# GLM-4.7-Flash (Z.ai, 2026). Its latent norms have the epsilon of all others: so the vendor's later code and other
# engines have it, while transformers 5.23 has DeepSeek's.


def _glm4_lite(config: Config) -> BlockSpec:
    if config["mlp_layer_types"] is None:
        config = {**config, "mlp_layer_types": ["dense", *["sparse"] * (num_layers(config) - 1)]}
    epsilon = check_number("rms_norm_eps", config["rms_norm_eps"])
    return _latent_experts(config, grouped_router(config), norm_epsilon=epsilon)


GLM4_LITE = row("glm4_moe_lite", experts=64, choice="mlp.gate.e_score_correction_bias", block=_glm4_lite, **_COMMON)

# Mistral 4 (Mistral AI, 2026): a softmax, groups by the sum of two; queries grow with their position.
MISTRAL4 = row(
    "mistral4",
    experts=128,
    block=lambda config: _latent_experts(
        config, replace(grouped_router(config), score="softmax"), growth=growth(config)
    ),
    **{**_COMMON, "is_wide": False},
)

WITH_LATENT = (DEEPSEEK_V2, DEEPSEEK_V3, GLM4_LITE, MISTRAL4)
