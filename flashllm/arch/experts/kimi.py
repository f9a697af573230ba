"""Kimi Linear (Kimi Team, 2025): a mixture of experts most of whose layers keep a state by a delta rule with a decay of
each channel; the others have latent attention, which turns nothing.
"""

from dataclasses import replace
from typing import Any

from flashllm.arch.experts.plain import W
from flashllm.arch.experts.row import grouped_router, in_layer, matrices, mixture_block, row
from flashllm.arch.family import attending, keeping, num_layers, turning
from flashllm.arch.llama.delta import CONVOLVED, of_rule
from flashllm.arch.llama.latent import LATENT, LATENT_NORMS, latent_block
from flashllm.arch.mixers import DeltaRule, check_size
from flashllm.arch.spec import BlockSpec, Config, check_usual

_USUAL = {  # the usual name of a key that these configs have under another
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}
_ALONE: dict[str, Any] = {"mla_use_nope": True, "moe_router_activation_func": "sigmoid", "moe_layer_freq": 1}


def _kinds(config: Config, count: int) -> Any:
    """Types of the layers: as transformers says, or by numbers from 1 on, as the model's own config does; transformers'
    where neither says."""
    types, own = config["layer_types"], config["linear_attn_config"]
    if types is None and own is None:
        types = ["full_attention" if layer and layer % 4 == 0 else "linear_attention" for layer in range(count)]
    elif types is None:
        full, keeps = ([each - 1 for each in own.get(key, ())] for key in ("full_attn_layers", "kda_layers"))
        if sorted(full + keeps) != list(range(count)):
            raise ValueError(f"linear_attn_config must name each of {count} layers once")
        types = ["full_attention" if layer in full else "linear_attention" for layer in range(count)]
    return types


def _rule(config: Config) -> DeltaRule:
    own = config["linear_attn_config"] or {}
    if not isinstance(own, dict):
        raise ValueError("linear_attn_config must be an object")
    heads, dim, kernel = (
        check_size(new, own.get(old, config[new]))
        for old, new in (
            ("num_heads", "linear_num_heads"),
            ("head_dim", "linear_head_dim"),
            ("short_conv_kernel_size", "linear_conv_kernel_dim"),
        )
    )
    return DeltaRule(key_heads=heads, value_heads=heads, key_dim=dim, value_dim=dim, kernel=kernel, channel_rank=dim)


def _block(config: Config) -> BlockSpec:
    check_usual(config, _ALONE)
    usual = {**config, **{new: config[old] for new, old in _USUAL.items()}}
    count = num_layers(config)

    def make(alike: Config) -> BlockSpec:
        block = mixture_block(alike, grouped_router(alike), shared="n_shared_experts", block=latent_block)
        return turning(block, [False] * count)

    return keeping(usual, _kinds(config, count), "linear_attention", _rule(config), make)


_ROW = row(
    "kimi_linear",
    experts=256,
    router="block_sparse_moe.gate",
    is_wide=True,
    choice="block_sparse_moe.gate.e_score_correction_bias",
    newer_choice="mlp.gate.e_score_correction_bias",
    block=_block,
    attention=(
        *attending(LATENT),
        *of_rule(
            {
                "decay_down.weight": "f_a_proj.weight",
                "decay.weight": "f_b_proj.weight",
                "gate_down.weight": "g_a_proj.weight",
                "out_gate.weight": "g_b_proj.weight",
                **CONVOLVED,
            },
            "self_attn",
        ),
    ),
    head_norms=LATENT_NORMS,
    matrices=W,
    shared_matrices=in_layer(matrices("block_sparse_moe.shared_experts")),
)
# As transformers 5.23 writes dense layers, too, and has what makes a decay in memory.
KIMI_LINEAR = replace(
    _ROW,
    renamed={
        **_ROW.renamed,
        **{
            f"model.layers.{{i}}.self_attn.forget_gate.{name}": f"model.layers.{{i}}.self_attn.{name}"
            for name in ("f_a_proj.weight", "f_b_proj.weight", "dt_bias", "A_log")
        },
        **{new: _ROW.dense_matrices[matrix] for matrix, new in in_layer(matrices("block_sparse_moe")).items()},
    },
)
