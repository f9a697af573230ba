"""Mixtures of experts whose routers choose by a bias that their weights do not have (Wang et al., 2024), a row each."""

from typing import Any

from flashllm.arch.experts.row import SHARED, dense_first, experts_of, grouped_router, row, shared_neurons
from flashllm.arch.family import decoder_block, never, says
from flashllm.arch.llama.names import BARE, BIASED, projections
from flashllm.arch.mixture import RouterSpec
from flashllm.arch.spec import MAX_LAYERS, BlockSpec, Config, check_number, check_size

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
    defaults={
        "vocab_size": 103424,
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "num_hidden_layers": 28,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "use_bias": False,
        "moe_intermediate_size": 1536,
        "moe_k": 6,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
        "moe_norm_min": 1e-12,
    },
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


_GROUPED: dict[str, Any] = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True}
GLM4 = row(
    "glm4_moe",
    defaults={
        **_GROUPED,
        "vocab_size": 151552,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "use_qk_norm": False,
    },
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
    defaults={
        **_GROUPED,
        "vocab_size": 152064,
        "hidden_size": 4608,
        "intermediate_size": 10944,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": None,
        "n_shared_experts": None,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "sliding_window": 4096,
        "max_window_layers": 62,
        "layer_types": None,
    },
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
    defaults={
        "vocab_size": 200064,
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "num_hidden_layers": 62,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 196608,
        "rms_norm_eps": 1e-6,
    },
    experts=256,
    router="block_sparse_moe.gate",
    choice="block_sparse_moe.e_score_correction_bias",
    newer_choice="mlp.e_score_correction_bias",
    block=_minimax,
    attention=BARE,
    matrices={matrix: f"block_sparse_moe.experts.{{e}}.w{i}" for matrix, i in (("up", 3), ("gate", 1), ("down", 2))},
)

BIASED_CHOICE = (ERNIE, GLM4, DOTS1, MINIMAX)
