"""Shared by the rows of GGUF architectures: what a row says, the metadata's usual keys, and the orders of rows.

llama.cpp stores the rows of Llama's queries and keys in the order of interleaved rotary pairs; transformers, and so we,
pair dimension j of a head with j + half: those rows are put back. Knows no architecture.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashllm.arch.family import head_size
from flashllm.arch.spec import MAX_CONTEXT
from flashllm.convert.checkpoint.gguf.file import GgufContent

ARCHITECTURE = "general.architecture"
ROPE_FACTORS = "rope_freqs.weight"  # of Llama 3.1's rule: by how much each pair turns slower
LONGROPE = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}  # Phi-3's
NEXT = "nextn_predict_layers"  # how many of the layers draft tokens: they are the last
FACTOR_TENSORS = (ROPE_FACTORS, *LONGROPE.values())  # which the config says

LAYER_NORM, FACTOR = "attention.layer_norm_epsilon", "expert_weights_scale"
_FACTORS = ("routed_scaling_factor", "route_scale", "moe_routed_scaling_factor", "router_scaling_factor")  # its keys
NAMES = {  # config.json's key -> the metadata's, after the architecture's name
    key: name
    for name, keys in {
        "embedding_length": ("hidden_size",),
        "feed_forward_length": ("intermediate_size", "ffn_hidden_size"),
        "block_count": ("num_hidden_layers",),
        "context_length": ("max_position_embeddings", "model_max_length"),
        "attention.head_count": ("num_attention_heads", "num_attention_heads_per_layer", "linear_num_heads"),
        "attention.head_count_kv": ("num_key_value_heads", "num_kv_heads"),
        "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
        LAYER_NORM: ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
        "attention.sliding_window": ("sliding_window",),
        "attention.value_length": ("v_head_dim",),
        "attention.value_scale": ("attention_value_scale",),
        "attention.scale": ("attention_multiplier",),
        "embedding_scale": ("embedding_multiplier",),
        "residual_scale": ("residual_multiplier",),
        "logit_scale": ("logit_scale", "logits_scaling"),
        "attn_logit_softcapping": ("attn_logit_softcapping",),
        "final_logit_softcapping": ("final_logit_softcapping",),
        "use_parallel_residual": ("use_parallel_residual",),
        "rope.scaling.original_context_length": ("original_max_position_embeddings",),
        "attention.kv_lora_rank": ("kv_lora_rank",),
        "attention.q_lora_rank": ("q_lora_rank",),
        "attention.shared_kv_layers": ("num_kv_shared_layers",),
        "embedding_length_per_layer_input": ("hidden_size_per_layer_input",),
        "altup.num_inputs": ("altup_num_inputs",),
        "altup.active_idx": ("altup_active_idx",),
        "shortconv.l_cache": ("conv_L_cache",),
        "kda.head_dim": ("linear_head_dim",),
        "ssm.conv_kernel": ("linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel"),
        "ssm.state_size": ("linear_key_head_dim", "mamba_d_state", "ssm_state_size"),
        "ssm.group_count": ("linear_num_key_heads", "mamba_n_groups", "n_groups"),
        "ssm.time_step_rank": ("linear_num_value_heads", "mamba_n_heads", "mamba_num_heads"),
        "expert_count": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
        "expert_used_count": (*("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"),),
        "expert_feed_forward_length": ("moe_intermediate_size",),
        "expert_shared_feed_forward_length": (
            *("shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size"),
        ),
        "expert_shared_count": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
        "leading_dense_block_count": ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"),
        "interleave_moe_layer_step": ("moe_layer_interval",),
        "expert_group_count": ("n_group", "num_expert_group"),
        "expert_group_used_count": ("topk_group",),
        FACTOR: _FACTORS,
        "expert_weights_norm": ("norm_topk_prob",),
        "moe_latent_size": ("moe_latent_size",),
    }.items()
    for key in keys
}
ABSENT: dict[str, Any] = {  # what the metadata means that lacks a key which may be left out
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 0),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "num_kv_shared_layers"), 0),
    **dict.fromkeys(("n_group", "num_expert_group", "topk_group"), 1),
    **dict.fromkeys(_FACTORS, 1.0),
    "norm_topk_prob": False,
    **dict.fromkeys(("q_lora_rank", "attention_value_scale")),
}
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
GROUPED = (*SIZES, "num_key_value_heads")
RMS = (*GROUPED, "rms_norm_eps")
SILU = {"hidden_act": "silu"}
SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3  # expert_gating_func

Order = Callable[[int, Mapping[str, Any]], NDArray[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufModel:
    """An architecture of GGUF files."""

    model_type: str  # transformers'
    keys: Sequence[str] = RMS  # config.json's, which the metadata has (`NAMES`)
    optional: Sequence[str] = ()  # the same, of keys that a file may leave out (`ABSENT`)
    lists: Sequence[str] = ()  # the same, of a number for each layer
    elsewhere: Mapping[str, str] = field(default_factory=dict)  # config.json's key -> the metadata's, an unusual one
    constants: Mapping[str, Any] = field(default_factory=lambda: SILU)  # config.json's that the metadata does not say
    has: Mapping[str, str] = field(default_factory=dict)  # config.json's key -> a tensor that the first layer has if so
    of_share: bool = False  # whether a part of each head is turned where a config.json does not say how much
    orders: Mapping[str, Order] = field(default_factory=dict)  # of rows, by a part of the file's name of a tensor
    shifted: bool = False  # whether 1 was added to the norms' weights
    table: str | None = None  # architecture whose names the tensors have, where it is another
    dtype: str | None = None  # of a conversion of quantised weights, where the usual one would overflow
    names: Mapping[str, str] = field(default_factory=dict)  # a layer's, that the gguf package's table lacks
    stacked: Mapping[str, str] = field(default_factory=dict)  # of several: transformers' name of each, by number
    finish: Callable[[dict[str, Any], GgufContent], None] | None = None  # what the keys alone do not say
    score: int | None = SOFTMAX  # of its router, as the metadata numbers them; None: as the file says
    relu: bool = False  # whether models of this kind exist with ReLU, which their files do not say


def without(keys: Sequence[str], *left: str) -> tuple[str, ...]:
    """The keys but for those `left` out."""
    return tuple(key for key in keys if key not in left)


def paired_rows(rows: int, config: Mapping[str, Any]) -> NDArray[np.int64]:
    """The stored row of each row, where a file has pair j of a head in rows 2 j and 2 j + 1."""
    within = np.arange(config["head_dim"]).reshape(-1, 2).T.reshape(-1)  # 0, 2, 4, ..., then 1, 3, 5, ...
    heads = np.arange(0, rows, config["head_dim"])
    result: NDArray[np.int64] = (heads[:, None] + within).reshape(-1)
    return result


def halved_rows(rows: int, config: Mapping[str, Any]) -> NDArray[np.int64]:
    """The stored row of each row, where a file of positions in three dimensions has a head's turned pairs in halves.

    Pair j of a head in rows j and j + turned / 2, where transformers has them in 2 j and 2 j + 1. Other files have its.
    """
    within, rope = np.arange(config["head_dim"]), config["rope_parameters"]
    if "mrope_section" in rope:
        turned = int(len(within) * rope.get("partial_rotary_factor", 1.0))
        within[:turned] = within[:turned].reshape(2, -1).T.reshape(-1)  # 0, turned / 2, 1, turned / 2 + 1, ...
    heads = np.arange(0, rows, config["head_dim"])
    result: NDArray[np.int64] = (heads[:, None] + within).reshape(-1)
    return result


def grouped_rows(rows: int, config: Mapping[str, Any]) -> NDArray[np.int64]:
    """The stored row of each row of a fused projection: a file has all queries, then all keys, then all values.

    transformers has them by group: a group's queries, its key, its value (Falcon; GPT-NeoX, whose groups are heads).
    """
    heads, dim = config["num_attention_heads"], head_size(config)
    groups = rows // dim - heads >> 1
    queries = np.arange(heads).reshape(groups, -1)
    keys = heads + np.arange(groups)[:, None]
    blocks = np.concatenate([queries, keys, keys + groups], axis=1).reshape(-1)
    result: NDArray[np.int64] = (blocks[:, None] * dim + np.arange(dim)).reshape(-1)
    return result


INTERLEAVED: Mapping[str, Order] = {".attn_q.": paired_rows, ".attn_k.": paired_rows}


def has_tensor(content: GgufContent, name: str) -> bool:
    """True where the first layer has one of this name."""
    return f"blk.0.{name}" in content.tensors


def having(config: dict[str, Any], content: GgufContent, name: str) -> list[bool]:
    """The layers that have a tensor of this name."""
    return [f"blk.{layer}.{name}" in content.tensors for layer in range(config["num_hidden_layers"])]


def own_key(content: GgufContent, name: str) -> str:
    """The metadata's key of this name after the architecture's."""
    return f"{content.metadata.text(ARCHITECTURE)}.{name}"


def windows(
    config: dict[str, Any], content: GgufContent, *, first: int = 3, period: int = 4, drafting: bool = True
) -> None:
    """Types of layers: those that the metadata marks have a window, or all but every `period`-th from `first`; none
    without one. `drafting`: layers that draft tokens are marked too."""
    count, key = config["num_hidden_layers"], own_key(content, "attention.sliding_window_pattern")
    if not config.get("sliding_window"):
        slides = [False] * count
    elif key in content.metadata:
        more = content.metadata.integer(own_key(content, NEXT), 0, least=0) if drafting else 0
        slides = content.metadata.flags(key, count + more)
    else:
        slides = [(layer - first) % period != 0 for layer in range(count)]
    config["sliding_window"] = config.get("sliding_window") or None
    config["layer_types"] = ["sliding_attention" if each else "full_attention" for each in slides[:count]]


def latent_sizes(config: dict[str, Any], content: GgufContent) -> None:
    """Sizes of latent attention. Older files have plain keys' and values' under the names that newer ones use for the
    latent row's, and the projection of both in one tensor; newer ones have it as it is multiplied.

    What yarn multiplies scores by is 0.1 times the logarithm of its factor times a number that is stored times 0.1.
    """
    metadata, rotated = content.metadata, config["head_dim"]
    keys = metadata.integer(own_key(content, "attention.key_length"))
    values = metadata.integer(
        own_key(content, "attention.value_length"), config["hidden_size"] // config["num_attention_heads"]
    )
    config |= {
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": metadata.integer(own_key(content, "attention.key_length_mla"), keys) - rotated,
        "v_head_dim": metadata.integer(own_key(content, "attention.value_length_mla"), values),
        "num_key_value_heads": config["num_attention_heads"],
    }
    if any(name.endswith(".attn_k_b.weight") for name in content.tensors):
        config["kv_b_apart"] = True
    rope = config["rope_parameters"]
    if rope["rope_type"] == "yarn":
        scale = round(10 * metadata.number(own_key(content, "rope.scaling.yarn_log_multiplier"), 0.0), 6)
        rope |= {"mscale": scale, "mscale_all_dim": scale} if scale else {"attention_factor": 1.0}


def growing(config: dict[str, Any], content: GgufContent, rate: float = 0.0) -> bool:
    """Queries that grow with their position, at `rate` where the file does not say at which; whether they do.

    They take a step where the trained context is over. ValueError for another step.
    """
    rope, metadata = config["rope_parameters"], content.metadata
    rate = round(metadata.number(own_key(content, "attention.temperature_scale"), rate), 6)
    if rate:
        trained = metadata.integer(own_key(content, "rope.scaling.original_context_length"), most=MAX_CONTEXT)
        if metadata.integer(own_key(content, "attention.temperature_length"), trained) != trained:
            raise ValueError(f"its queries grow otherwise than every {trained} positions")
        rope |= {"llama_4_scaling_beta": rate, "original_max_position_embeddings": trained}
    return rate != 0


LATENT: dict[str, Any] = {"keys": (*RMS, "kv_lora_rank"), "optional": ("q_lora_rank",), "finish": latent_sizes}


def inner_size(content: GgufContent, heads: int) -> int:
    """Numbers of all value heads. ValueError where these do not share them out."""
    width = content.metadata.integer(own_key(content, "ssm.inner_size"))
    if width % heads:
        raise ValueError(f"{heads} value heads do not share out {width}")
    return width


def state_types(config: dict[str, Any], content: GgufContent) -> list[str]:
    """Types of layers: those that keep a state have a convolution."""
    return ["linear_attention" if each else "full_attention" for each in having(config, content, "ssm_conv1d.weight")]


def state_sizes(config: dict[str, Any], content: GgufContent) -> None:
    """Sizes and layout of the state's heads.

    Value heads that share a key head lie tiled, but not in Qwen3-Next; its projections are flat where the file has the
    gate apart.
    """
    heads = config["linear_num_value_heads"]
    config["linear_value_head_dim"] = inner_size(content, heads) // heads
    config["layer_types"] = state_types(config, content)
    if config["model_type"] != "qwen3_next":
        config["linear_value_heads_tiled"] = heads != config["linear_num_key_heads"]
    else:
        config["linear_projections_flat"] = any(name.endswith(".attn_gate.weight") for name in content.tensors)


STATES: dict[str, Any] = {
    "names": {"linear_attn.dt_bias": "ssm_dt.bias"},
    "shifted": True,
    "of_share": True,
    "finish": state_sizes,
}
DELTA = (*RMS, *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_key_heads", "linear_num_value_heads"))
MAMBA = ("mamba_d_conv", "mamba_d_state", "mamba_n_groups", "mamba_n_heads")  # Mamba-2's, as most configs call them


def convolving_layers(config: dict[str, Any], content: GgufContent) -> None:
    kinds = ("full_attention", "conv")
    config["layer_types"] = [kinds[convolves] for convolves in having(config, content, "shortconv.conv.weight")]


CONVOLUTION: dict[str, Any] = {
    "keys": (*GROUPED, "norm_eps", "conv_L_cache"),
    "elsewhere": {"norm_eps": NAMES["rms_norm_eps"]},
    "finish": convolving_layers,
}
