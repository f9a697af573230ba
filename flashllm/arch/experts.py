"""Mixtures of experts (Shazeer et al., 2017): decoders under Llama's names whose FFNs are many, a row each.

A router names the experts of a token exactly, so these models run sparsely whatever their activation.
"""

from collections.abc import Mapping
from typing import Any

from flashllm.arch.family import When, always, decoder, decoder_block, linear_tensors, says
from flashllm.arch.mixture import ExpertsSpec
from flashllm.arch.spec import ArchitectureSpec, BlockSpec, Config, ResidentTensor, check_size
from flashllm.errors import UnsupportedModelError

_MATRICES = {
    "up": "mlp.experts.{e}.up_proj",
    "gate": "mlp.experts.{e}.gate_proj",
    "down": "mlp.experts.{e}.down_proj",
}
_NORMS = {"attention_norm": ("input_layernorm", always), "ffn_norm": ("post_attention_layernorm", always)}
_HEAD_NORMS = {"query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}
_DEFAULTS: dict[str, Any] = {
    "num_attention_heads": 16,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "num_experts": None,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
}


def _projections(query: When, out: When) -> tuple[ResidentTensor, ...]:
    """Query, key, value, out; biases of the first three, and of the last."""
    return tuple(
        tensor
        for name in ("query", "key", "value", "out")
        for tensor in linear_tensors(
            f"layers.{{i}}.{name}", f"self_attn.{name[0]}_proj", bias=out if name == "out" else query
        )
    )


def _row(model_type: str, *, defaults: Mapping[str, Any], experts: int, router: str, **others: Any) -> ArchitectureSpec:
    """A model_type whose config says `num_experts`, or `num_local_experts`, or means `experts`. `router`: its name
    within a layer."""

    def derived(config: Config) -> Mapping[str, Any]:
        given = config["num_experts"] if config["num_experts"] is not None else config.get("num_local_experts")
        return {"num_experts": experts if given is None else given}

    values: dict[str, Any] = {"matrices": _MATRICES, "norms": _NORMS, **others}
    one = {matrix: f"model.layers.{{i}}.{name}.weight" for matrix, name in values["matrices"].items()}
    return decoder(
        model_type,
        defaults={**_DEFAULTS, **defaults},
        derived=derived,
        ffn_tensors=linear_tensors("layers.{i}.router", router),
        stacked={  # as transformers 5 has them in memory
            "model.layers.{i}.mlp.experts.gate_up_proj": (one["gate"], one["up"]),
            "model.layers.{i}.mlp.experts.down_proj": (one["down"],),
        },
        ignored=("model.layers.*.self_attn.rotary_emb.inv_freq",),
        **values,
    )


def _experts(config: Config, size: str, **others: Any) -> ExpertsSpec:
    """Those of a config that names the neurons of one under `size`."""
    return ExpertsSpec(
        count=check_size("num_experts", config["num_experts"]),
        chosen=check_size("num_experts_per_tok", config["num_experts_per_tok"]),
        size=check_size(size, config[size]),
        **{"normalized": bool(config["norm_topk_prob"]), **others},
    )


# OLMoE (Muennighoff et al., 2024): norms over all queries and over all keys.


def _olmoe(config: Config) -> BlockSpec:
    if config.get("clip_qkv") is not None:
        raise UnsupportedModelError("clip_qkv, which limits queries, keys and values, is not supported for olmoe")
    return decoder_block(config, query_key_norm="projection", experts=_experts(config, "intermediate_size"))


OLMOE = _row(
    "olmoe",
    defaults={
        "vocab_size": 50304,
        "hidden_size": 2048,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
    experts=64,
    router="mlp.gate",
    block=_olmoe,
    attention=_projections(says("attention_bias"), says("attention_bias")),
    head_norms=_HEAD_NORMS,
    head_norm=always,
)

MIXTURES = (OLMOE,)
