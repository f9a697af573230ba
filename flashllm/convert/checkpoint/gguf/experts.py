"""The table of GGUF architectures that are mixtures of experts, `MIXTURES`. Reads plain values."""

from dataclasses import replace
from typing import Any

from flashllm.convert.checkpoint.gguf.file import GgufContent
from flashllm.convert.checkpoint.gguf.models import GRANITE_HYBRID, MODELS, MULTIPLIERS, NEMOTRON_H, NEMOTRON_KEYS
from flashllm.convert.checkpoint.gguf.row import (
    ARCHITECTURE,
    CONVOLUTION,
    DELTA,
    GROUPED,
    INTERLEAVED,
    LATENT,
    MAMBA,
    NAMES,
    NEXT,
    RMS,
    SIGMOID,
    SILU,
    SOFTMAX,
    SOFTMAX_OF_CHOSEN,
    STATES,
    GgufModel,
    growing,
    has_tensor,
    having,
    latent_sizes,
    own_key,
    windows,
    without,
)
from flashllm.errors import UnsupportedModelError


def _mixture(config: dict[str, Any], content: GgufContent) -> None:
    """Sizes that the tensors say, and in newer files the metadata."""
    for key, names in (
        ("moe_intermediate_size", ("ffn_up_exps", "ffn_up.0")),
        ("shared_expert_intermediate_size", ("ffn_up_shexp",)),
    ):
        for name in names:
            stored = content.tensors.get(f"blk.0.{name}.weight")
            if stored is not None and len(stored.shape) > 1:
                config[key] = stored.shape[-2]
    size = content.metadata.integer(own_key(content, "expert_feed_forward_length"), 0, least=0)
    if size and has_tensor(content, "ffn_gate_up_exps.weight"):
        config["moe_intermediate_size"] = size
    if config["model_type"] in ("olmoe", "mixtral", "gpt_oss"):
        config["intermediate_size"] = config.pop("moe_intermediate_size", config["intermediate_size"])


def _gpt_oss(config: dict[str, Any], content: GgufContent) -> None:
    _mixture(config, content)
    if config["rope_parameters"]["rope_type"] == "yarn":
        config["rope_parameters"] |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}


def _granite(config: dict[str, Any], content: GgufContent) -> None:
    if has_tensor(content, "ffn_up_shexp.weight"):
        config["model_type"] = "granitemoeshared"
    else:
        config.pop("shared_intermediate_size", None)


def _exaone(config: dict[str, Any], content: GgufContent) -> None:
    windows(config, content)
    _dense_first(config)


def _must_normalize(config: dict[str, Any], content: GgufContent) -> None:
    """UnsupportedModelError where the file does not say that the experts' weights are normalised."""
    if not content.metadata.flag(own_key(content, "expert_weights_norm"), False):
        name = content.metadata.text(ARCHITECTURE)
        raise UnsupportedModelError(f"{content.path}: {name} with weights that are not normalised is not supported")


def _afmoe(config: dict[str, Any], content: GgufContent) -> None:
    """Embeddings are scaled, though no key says so."""
    _must_normalize(config, content)
    windows(config, content)


def _phimoe(config: dict[str, Any], content: GgufContent) -> None:
    """By the model's own code. llama.cpp reads these files otherwise: root mean squares for layer norms, and weights
    of both experts from one softmax."""
    config["lm_head_bias"] = "output.bias" in content.tensors
    rope = config["rope_parameters"]
    if rope["rope_type"] == "longrope":
        del rope["attention_factor"]  # computed by Phi-3's rule; Phi-3.5-MoE's config.json says another
        rope |= {"short_mscale": 1.243163121016122, "long_mscale": 1.243163121016122}


def _laguna(config: dict[str, Any], content: GgufContent) -> None:
    """Layers without a window are the first and every fourth, where the file does not say; the others turn by a rule of
    their own. The gate's shape says whether it is each head's or each number's."""
    _must_normalize(config, content)
    windows(config, content, first=0)
    if config["sliding_window"] is None:
        del config["sliding_window"]  # which transformers takes as a number alone
    _dense_first(config)
    gate = content.tensors.get("blk.0.attn_gate.weight")
    each = gate is not None and gate.shape[0] != config["num_attention_heads"]
    config["gating"] = "per-element" if each else True
    metadata, full = content.metadata, config["rope_parameters"]
    if full["rope_type"] == "yarn" and (scale := own_key(content, "rope.scaling.yarn_attn_factor")) in metadata:
        full["attention_factor"] = metadata.number(scale)
    _turned_by_type(config, content)


def _cohere2(config: dict[str, Any], content: GgufContent) -> None:
    """Dense layers, whose width their tensors say, turn with a window or without; shared experts are averaged."""
    windows(config, content, first=0, drafting=False)
    _dense_first(config)
    if (dense := content.tensors.get("blk.0.ffn_up.weight")) is not None:
        config["prefix_dense_intermediate_size"] = dense.shape[0]


def _mellum(config: dict[str, Any], content: GgufContent) -> None:
    windows(config, content, drafting=False)
    _turned_by_type(config, content)


def _hunyuan3(config: dict[str, Any], content: GgufContent) -> None:
    """How many shared experts there are their width says."""
    _must_normalize(config, content)
    width = config["moe_intermediate_size"]
    shared = content.metadata.integer(own_key(content, "expert_shared_feed_forward_length"), width)
    if shared % width:
        raise ValueError(f"shared experts of {width} neurons do not share out {shared}")
    config["num_shared_experts"] = shared // width
    _dense_otherwise(config, content)


def _mimo2(config: dict[str, Any], content: GgufContent) -> None:
    """Values that the file says no scale of have none, and a window is as long as it says: llama.cpp's meaning.

    UnsupportedModelError where layers with a window do not have twice the others' key-value heads.
    """
    windows(config, content)
    _turned_by_type(config, content, base=10_000.0)
    _dense_otherwise(config, content)
    metadata, count = content.metadata, config["num_hidden_layers"]
    drafting = metadata.integer(own_key(content, NEXT), 0, least=0)
    heads = metadata.integers_of_layers(own_key(content, "attention.head_count_kv"), count + drafting)[:count]
    twice = [1 + (kind == "sliding_attention") for kind in config["layer_types"]]
    config["num_key_value_heads"] = heads[0] // twice[0]
    if heads != [config["num_key_value_heads"] * each for each in twice]:
        raise UnsupportedModelError(
            f"{content.path}: mimo2 whose layers have {str(heads)[:80]} key-value heads is not supported; those with a "
            "window must have twice the others'"
        )


def _turned_by_type(config: dict[str, Any], content: GgufContent, base: float | None = None) -> None:
    """Layers with a window turn by the plain rule, and otherwise where the file says so; `base`: where it does not."""
    metadata, full, dim = content.metadata, config["rope_parameters"], config["head_dim"]
    dims = metadata.integer(own_key(content, "rope.dimension_count"), dim)
    usual = full["rope_theta"] if base is None else base
    config["rope_parameters"] = {
        "full_attention": full,
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": metadata.number(own_key(content, "rope.freq_base_swa"), usual, positive=True),
            "partial_rotary_factor": metadata.integer(own_key(content, "rope.dimension_count_swa"), dims) / dim,
        },
    }


def _dense_otherwise(config: dict[str, Any], content: GgufContent) -> None:
    """Layers without a router are dense."""
    routed = having(config, content, "ffn_gate_inp.weight")
    config["mlp_layer_types"] = ["sparse" if each else "dense" for each in routed]


def _dense_first(config: dict[str, Any]) -> None:
    dense = config.pop("first_k_dense_replace")
    config["mlp_layer_types"] = ["dense" if layer < dense else "sparse" for layer in range(config["num_hidden_layers"])]


def _deepseek2(config: dict[str, Any], content: GgufContent) -> None:
    """DeepSeek V2, V3, Mistral's, whose queries grow, or GLM-4.7-Flash, which is told by its shape where the file does
    not say how it scores, and by an epsilon of its norms that DeepSeek's latent ones do not have."""
    latent_sizes(config, content)
    if growing(config, content):  # Mistral Large 3, which is Mistral 4
        config["model_type"] = "mistral4"
        return
    is_flash = config["num_hidden_layers"] in (47, 48) and config["vocab_size"] == 154880  # llama.cpp's rule
    score = content.metadata.integer(own_key(content, "expert_gating_func"), 0, least=0)
    if (score or (SIGMOID if is_flash else SOFTMAX)) == SIGMOID:
        if config["rms_norm_eps"] == 1e-6:
            config["model_type"] = "deepseek_v3"
        else:
            config["model_type"] = "glm4_moe_lite"
            _dense_first(config)
    elif score > SOFTMAX or config["norm_topk_prob"]:
        raise UnsupportedModelError(f"{content.path}: a router of DeepSeek's that scores so is not supported")
    else:
        config["topk_method"] = "group_limited_greedy" if config["n_group"] > 1 else "greedy"


def _mistral4(config: dict[str, Any], content: GgufContent) -> None:
    """Queries grow as the model's own config has it: llama.cpp's converter leaves that out."""
    latent_sizes(config, content)
    if config["rope_parameters"]["rope_type"] == "yarn":
        growing(config, content, 0.1)


def _kimi_linear(config: dict[str, Any], content: GgufContent) -> None:
    """Layers without heads of keys and values keep a state, a head as wide as the rank of its decay."""
    latent_sizes(config, content)
    _dense_first(config)
    heads = content.metadata.integers_of_layers(
        own_key(content, "attention.head_count_kv"), config["num_hidden_layers"], least=0
    )
    config["layer_types"] = ["full_attention" if each else "linear_attention" for each in heads]


_EXPERTS = (*RMS, "num_experts", "num_experts_per_tok")
_SIZED = (*_EXPERTS, "moe_intermediate_size")
_GROUPS = ("n_group", "topk_group", "routed_scaling_factor")
_ROUTED: dict[str, Any] = {
    "keys": (*RMS, "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"),
    "optional": ("n_shared_experts", "first_k_dense_replace", *_GROUPS, "norm_topk_prob"),
}
_LATENT_ROUTED: dict[str, Any] = {part: (*LATENT[part], *_ROUTED[part]) for part in ("keys", "optional")}
_DELTA_EXPERTS = (
    *without(DELTA, "intermediate_size"),  # of no layer, and so not in every file
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"),
)
_BIASED = {"attention_bias": "attn_q.bias"}
_OF_EXPERTS = {"intermediate_size": NAMES["moe_intermediate_size"]}  # of models without dense layers of their own

# Mixtures of experts, by the same names: Mixtral's is Llama's. What is said of weights is llama.cpp's rule.
MIXTURES: dict[str, GgufModel] = {
    "llama": GgufModel(
        model_type="mixtral",
        keys=_EXPERTS,
        constants={**SILU, "sliding_window": None},
        orders=INTERLEAVED,
        finish=_mixture,
        relu=True,
    ),
    "olmoe": GgufModel(model_type="olmoe", keys=_EXPERTS, optional=("norm_topk_prob",), finish=_mixture, relu=True),
    "qwen2moe": GgufModel(
        model_type="qwen2_moe",
        keys=_EXPERTS,
        optional=("norm_topk_prob",),
        constants={**SILU, "use_sliding_window": False},
        finish=_mixture,
    ),
    **dict.fromkeys(
        ("qwen3moe", "qwen3vlmoe"),
        GgufModel(
            model_type="qwen3_moe",
            keys=_EXPERTS,
            optional=("norm_topk_prob",),
            constants={**SILU, "use_sliding_window": False, "norm_topk_prob": True},
            table="qwen3moe",
            finish=_mixture,
        ),
    ),
    "mellum": GgufModel(
        model_type="mellum",
        keys=_SIZED,
        optional=("sliding_window",),
        constants={**SILU, "norm_topk_prob": True},
        table="qwen3moe",
        finish=_mellum,
    ),
    "hy_v3": GgufModel(
        model_type="hy_v3",
        keys=_SIZED,
        optional=("router_scaling_factor",),
        table="dots1",
        names={"mlp.expert_bias": "exp_probs_b"},
        finish=_hunyuan3,
        score=SIGMOID,
    ),
    "gemma4": replace(
        MODELS["gemma4"], keys=(*MODELS["gemma4"].keys, "num_experts", "top_k_experts", "moe_intermediate_size")
    ),
    "gpt-oss": GgufModel(
        model_type="gpt_oss",
        keys=(*_EXPERTS, "sliding_window"),
        has=_BIASED,
        names={
            "self_attn.sinks": "attn_sinks.weight",
            "mlp.experts.up_bias": "ffn_up_exps.bias",
            "mlp.experts.gate_bias": "ffn_gate_exps.bias",
            "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
        },
        dtype="bfloat16",
        finish=_gpt_oss,
        score=SOFTMAX_OF_CHOSEN,
    ),
    "deepseek2": GgufModel(model_type="deepseek_v2", **_LATENT_ROUTED, finish=_deepseek2, score=None),
    "mistral4": GgufModel(model_type="mistral4", **_LATENT_ROUTED, finish=_mistral4),
    "qwen3next": GgufModel(
        model_type="qwen3_next",
        keys=_DELTA_EXPERTS,
        optional=("norm_topk_prob", "intermediate_size"),
        constants={**SILU, "norm_topk_prob": True},
        **STATES,
    ),
    "qwen35moe": GgufModel(
        model_type="qwen3_5_moe_text", keys=_DELTA_EXPERTS, optional=("intermediate_size",), **STATES
    ),
    "glm4moe": GgufModel(
        model_type="glm4_moe",
        **_ROUTED,
        has=_BIASED | {"use_qk_norm": "attn_q_norm.weight"},
        of_share=True,
        score=SIGMOID,
    ),
    "dots1": GgufModel(
        model_type="dots1", **_ROUTED, constants={**SILU, "sliding_window": None}, has=_BIASED, score=SIGMOID
    ),
    "mimo2": GgufModel(
        model_type="mimo_v2_flash",
        keys=(
            *without(RMS, "num_key_value_heads"),
            *("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "v_head_dim", "sliding_window"),
        ),
        optional=("attention_value_scale", *_GROUPS),
        constants={**SILU, "norm_topk_prob": True},
        has=_BIASED,
        of_share=True,
        names={"self_attn.attention_sink_bias": "attn_sinks.weight"},
        finish=_mimo2,
        score=SIGMOID,
    ),
    "minimax-m2": GgufModel(
        model_type="minimax_m2",
        keys=(*RMS, "num_local_experts", "num_experts_per_tok"),
        elsewhere=_OF_EXPERTS,
        score=SIGMOID,
    ),
    "ernie4_5-moe": GgufModel(
        model_type="ernie4_5_moe",
        keys=(*RMS, "moe_num_experts", "moe_k", "moe_intermediate_size"),
        optional=("moe_layer_interval", "moe_layer_start_index", "moe_num_shared_experts"),
        has={"use_bias": "attn_q.bias"},
    ),
    "granitemoe": GgufModel(
        model_type="granitemoe",
        keys=(*RMS, "num_local_experts", "num_experts_per_tok"),
        optional=(*MULTIPLIERS, "shared_intermediate_size"),
        has=_BIASED,
        orders=INTERLEAVED,
        finish=_granite,
    ),
    "hunyuan-moe": GgufModel(model_type="hunyuan_v1_moe", keys=(*RMS, "num_experts", "moe_topk"), has=_BIASED),
    "exaone-moe": GgufModel(
        model_type="exaone_moe",
        keys=_SIZED,
        optional=("num_shared_experts", "first_k_dense_replace", *_GROUPS, "norm_topk_prob", "sliding_window"),
        finish=_exaone,
        score=SIGMOID,
    ),
    "afmoe": GgufModel(
        model_type="afmoe",
        keys=_SIZED,
        optional=("num_shared_experts", "num_dense_layers", "route_scale", "sliding_window"),
        constants={**SILU, "mup_enabled": True},
        has=_BIASED,
        finish=_afmoe,
        score=SIGMOID,
    ),
    "bailingmoe2": GgufModel(
        model_type="bailing_moe",
        keys=_SIZED,
        optional=("num_shared_experts", "first_k_dense_replace", *_GROUPS),
        constants={**SILU, "score_function": "sigmoid", "moe_router_enable_expert_bias": True, "use_qk_norm": True},
        finish=_must_normalize,
        score=SIGMOID,
    ),
    "phimoe": GgufModel(
        model_type="phimoe", keys=(*RMS, "num_local_experts", "num_experts_per_tok"), has=_BIASED, finish=_phimoe
    ),
    "kimi-linear": GgufModel(
        model_type="kimi_linear",
        keys=(
            *without(RMS, "num_key_value_heads", "max_position_embeddings"),
            *("model_max_length", "kv_lora_rank", "num_experts", "num_experts_per_token", "moe_intermediate_size"),
            *("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"),
        ),
        optional=(
            *("q_lora_rank", "num_shared_experts", "first_k_dense_replace"),
            *("routed_scaling_factor", "num_expert_group", "topk_group"),
        ),
        names={"self_attn.dt_bias": "ssm_dt.bias"},
        finish=_kimi_linear,
        score=SIGMOID,
    ),
    "laguna": GgufModel(
        model_type="laguna",
        keys=(*without(_SIZED, "num_attention_heads"), "shared_expert_intermediate_size"),
        lists=("num_attention_heads_per_layer",),
        optional=("first_k_dense_replace", "moe_routed_scaling_factor", "sliding_window"),
        table="dots1",
        names={"self_attn.g_proj.weight": "attn_gate.weight"},
        finish=_laguna,
        score=SIGMOID,
    ),
    "cohere2moe": GgufModel(
        model_type="cohere2_moe",
        keys=(*GROUPED, "num_experts", "num_experts_per_tok", "logit_scale", "sliding_window"),
        elsewhere=_OF_EXPERTS,
        optional=(
            *("norm_topk_prob", "layer_norm_eps", "rms_norm_eps"),
            *("num_shared_experts", "first_k_dense_replace"),
        ),
        constants={**SILU, "expert_selection_fn": "sigmoid"},
        table="dots1",
        finish=_cohere2,
        score=SIGMOID,
    ),
    "granitehybrid": GgufModel(keys=(*RMS, *MAMBA, "num_local_experts", "num_experts_per_tok"), **GRANITE_HYBRID),
    "nemotron_h_moe": GgufModel(
        keys=(
            *(*NEMOTRON_KEYS, "n_routed_experts", "num_experts_per_tok"),
            *("moe_intermediate_size", "moe_shared_expert_intermediate_size"),
        ),
        optional=(*_GROUPS, "norm_topk_prob", "moe_latent_size"),
        score=SIGMOID,
        **NEMOTRON_H,
    ),
    "lfm2moe": GgufModel(
        model_type="lfm2_moe",
        **CONVOLUTION
        | {
            "keys": (
                *(*CONVOLUTION["keys"], "num_experts", "num_experts_per_tok"),
                *("moe_intermediate_size", "num_dense_layers"),
            )
        },
        optional=("routed_scaling_factor",),
        constants={"norm_topk_prob": True},
        score=SIGMOID,
    ),
}
