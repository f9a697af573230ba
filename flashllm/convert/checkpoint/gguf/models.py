"""The table of GGUF architectures without experts, `MODELS`, and of PowerInfer's files, `SPARSE_MODELS`.

Where config.json's values are in the metadata, and where tensors differ from those of transformers. Reads plain
values; knows neither bytes nor tokenizers.
"""

from collections.abc import Mapping
from dataclasses import replace
from statistics import NormalDist
from typing import Any

from flashllm.arch.family import head_size
from flashllm.convert.checkpoint.gguf.file import GgufContent
from flashllm.convert.checkpoint.gguf.row import (
    CONVOLUTION,
    DELTA,
    GROUPED,
    INTERLEAVED,
    LATENT,
    MAMBA,
    NAMES,
    RMS,
    SILU,
    SIZES,
    STATES,
    GgufModel,
    Order,
    grouped_rows,
    growing,
    halved_rows,
    has_tensor,
    having,
    inner_size,
    own_key,
    state_types,
    windows,
    without,
)
from flashllm.errors import UnsupportedModelError

_GELU = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
_SHARING = ("num_kv_shared_layers", "hidden_size_per_layer_input", "final_logit_softcapping")
_FUSED: Mapping[str, Order] = {".attn_qkv.": grouped_rows}
MULTIPLIERS = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")  # Granite's
_BIASES = {"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"}


def _gemma2(config: dict[str, Any], content: GgufContent) -> None:
    """The largest model scales queries by the width, the others by the head; the metadata has no key for it."""
    large = config["num_hidden_layers"] == 46
    config["query_pre_attn_scalar"] = (
        config["hidden_size"] // config["num_attention_heads"] if large else config["head_dim"]
    )


def _gemma3(config: dict[str, Any], content: GgufContent) -> None:
    """As Gemma 2's, in the largest of this family; layers that slide turn by another base."""
    of_width = config["hidden_size"] // config["num_attention_heads"]
    config["query_pre_attn_scalar"] = of_width if config["num_hidden_layers"] == 62 else config["head_dim"]
    _by_type(config, content)


def _by_type(config: dict[str, Any], content: GgufContent) -> None:
    """Rotary parameters of layers with a window, beside those of the others."""
    metadata, size = content.metadata, config["head_dim"]
    theta = metadata.number(own_key(content, "rope.freq_base_swa"), 10000.0, positive=True)
    sliding = {"rope_type": "default", "rope_theta": theta}
    if (turned := metadata.integer(own_key(content, "rope.dimension_count_swa"), size)) != size:
        sliding["partial_rotary_factor"] = turned / size
    config["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": sliding}


def _rows_of_ids(config: dict[str, Any], content: GgufContent) -> None:
    rows = content.tensors.get("per_layer_token_embd.weight")
    config["vocab_size_per_layer_input"] = config["vocab_size"] if rows is None else rows.shape[0]


def _gemma3n(config: dict[str, Any], content: GgufContent) -> None:
    """The gates' share that is cut is said by how many deviations it is; a map's rank by its tensor."""
    windows(config, content, first=4, period=5)
    _by_type(config, content)
    _rows_of_ids(config, content)
    count, low = config["num_hidden_layers"], content.tensors.get("blk.0.laurel_l.weight")
    if low is None:
        raise ValueError("blk.0.laurel_l.weight is missing")
    config["laurel_rank"] = low.shape[0]
    config["intermediate_size"] = content.metadata.integers_of_layers(own_key(content, "feed_forward_length"), count)
    scales = content.metadata.deviations(own_key(content, "activation_sparsity_scale"), count)
    config["activation_sparsity_pattern"] = [round(NormalDist().cdf(scale), 6) for scale in scales]


def _gemma4(config: dict[str, Any], content: GgufContent) -> None:
    """Layers that see everything have heads of another size and number, whose keys may be their values; the last ones
    attend to the keys of others, and may be twice as wide. The head's size that all files say is that of the former.

    UnsupportedModelError where layers' widths differ otherwise.
    """
    windows(config, content)
    metadata, count, full_size = content.metadata, config["num_hidden_layers"], config["head_dim"]
    full = [kind == "full_attention" for kind in config["layer_types"]]
    config["head_dim"] = size = metadata.integer(own_key(content, "attention.key_length_swa"), full_size)
    heads = metadata.integers_of_layers(own_key(content, "attention.head_count_kv"), count, least=0)
    config["num_key_value_heads"] = heads[full.index(False)] if False in full else heads[0]
    sizes = [
        {"head_dim": full_size if each else size, "num_key_value_heads": of}
        for each, of in zip(full, heads, strict=True)
    ]
    own_sizes = [{key: value for key, value in each.items() if value != config[key]} for each in sizes]
    config["per_layer_config"] = {str(layer): each for layer, each in enumerate(own_sizes) if each}
    widths = metadata.integers_of_layers(own_key(content, "feed_forward_length"), count, least=0)
    own = count - config["num_kv_shared_layers"]
    config["intermediate_size"] = widths[0]
    config["use_double_wide_mlp"] = double = own < count and widths[-1] == 2 * widths[0]
    if widths != widths[:1] * own + [(1 + double) * widths[0]] * (count - own):
        raise UnsupportedModelError(f"{content.path}: Gemma 4 whose layers differ in other ways is not supported")
    config["attention_k_eq_v"] = any(
        each and f"blk.{layer}.attn_v.weight" not in content.tensors for layer, each in enumerate(full[:own])
    )
    config["enable_moe_block"] = "num_experts" in config
    _rows_of_ids(config, content)
    _by_type(config, content)


def _glm4(config: dict[str, Any], content: GgufContent) -> None:
    """A GLM-4V's text has positions in three dimensions, which are the same in text (`halved_rows`)."""
    if (key := own_key(content, "rope.dimension_sections")) in content.metadata:
        config["rope_parameters"]["mrope_section"] = content.metadata.integers(key, 4)[:3]


def _phi3(config: dict[str, Any], content: GgufContent) -> None:
    """A window of 0 is none (Phi-4)."""
    if config.get("sliding_window") == 0:
        config["sliding_window"] = None


def _mistral3(config: dict[str, Any], content: GgufContent) -> None:
    """Mistral 3, whose queries grow with the position; those of older models of this name do not."""
    growing(config, content)
    rope, key = config["rope_parameters"], own_key(content, "rope.scaling.yarn_log_multiplier")
    if rope["rope_type"] == "yarn" and key in content.metadata:  # not times 0.1, as latent attention's is
        rope |= {"mscale": 1.0, "mscale_all_dim": round(content.metadata.number(key), 6)}


def _falcon(config: dict[str, Any], content: GgufContent) -> None:
    config["multi_query"] = config["num_kv_heads"] == 1
    config["parallel_attn"] = not has_tensor(content, "ffn_norm.weight")
    given = config.pop("head_dim")  # which transformers' config computes, and takes from nobody
    if given != head_size(config):
        raise UnsupportedModelError(
            f"{content.path}: heads of {given} dimensions; Falcon's share out the width, {head_size(config)} each"
        )


def _falcon_h1(config: dict[str, Any], content: GgufContent) -> None:
    """The multipliers are in the weights."""
    config["mamba_d_ssm"] = inner_size(content, config["mamba_n_heads"])
    config["mamba_d_head"] = config["mamba_d_ssm"] // config["mamba_n_heads"]


def granite_hybrid(config: dict[str, Any], content: GgufContent) -> None:
    """Which layers keep a state. Where nothing is routed, all neurons are what are shared otherwise.

    One that rotates, as it does if the file does not say otherwise, is Bamba. Its rows lie as if heads were rotated
    whole, where half of each is: so llama.cpp, but not Bamba's own code nor we, turns other pairs than were trained.
    UnsupportedModelError for another that rotates.
    """
    inner = inner_size(content, config["mamba_n_heads"])
    if inner % config["hidden_size"]:
        raise ValueError(f"a mixer of {inner} is no multiple of the width {config['hidden_size']}")
    config["mamba_expand"] = inner // config["hidden_size"]
    config["mamba_conv_bias"] = any(having(config, content, "ssm_conv1d.bias"))
    config["attention_bias"] = any(having(config, content, "attn_q.bias"))
    config["layer_types"] = state_types(config, content)
    routed = config["num_local_experts"] > 0
    if content.metadata.flag(own_key(content, "rope.scaling.finetuned"), True):
        if routed or config.keys() & set(MULTIPLIERS):
            raise UnsupportedModelError(f"{content.path}: a hybrid that rotates and is not Bamba is not supported")
        config["model_type"], kinds = "bamba", enumerate(config.pop("layer_types"))
        config["attn_layer_indices"] = [layer for layer, kind in kinds if kind == "full_attention"]
        return
    config.setdefault("shared_intermediate_size", 0 if routed else config["intermediate_size"])


GRANITE_HYBRID: dict[str, Any] = {
    "model_type": "granitemoehybrid",
    "optional": (*MULTIPLIERS, "shared_intermediate_size"),
    "constants": {**SILU, "num_local_experts": 0, "position_embedding_type": "nope"},
    "of_share": True,
    "orders": INTERLEAVED,
    "names": {"mamba.dt_bias": "ssm_dt.bias"}
    | {f"shared_mlp.{matrix}_proj.weight": f"ffn_{matrix}.weight" for matrix in ("up", "gate", "down")},
    "finish": granite_hybrid,
}


def nemotron_h(config: dict[str, Any], content: GgufContent) -> None:
    """The kind of each layer, which its tensors say. Nothing is turned, whatever the metadata says of rotation."""
    heads = config["mamba_num_heads"]
    config["mamba_head_dim"] = inner_size(content, heads) // heads
    kinds = {"linear_attention": "ssm_in", "full_attention": "attn_q", "mlp": "ffn_up", "moe": "ffn_up_exps"}
    found = {kind: having(config, content, f"{name}.weight") for kind, name in kinds.items()}
    config["layers_block_type"] = [
        next((kind for kind in kinds if found[kind][layer]), "none") for layer in range(config["num_hidden_layers"])
    ]
    for key, name in (("use_conv_bias", "ssm_conv1d"), ("use_bias", "ssm_in"), ("mlp_bias", "ffn_up")):
        config[key] = any(having(config, content, f"{name}.bias"))


NEMOTRON_H: dict[str, Any] = {
    "model_type": "nemotron_h",
    "elsewhere": {"layer_norm_epsilon": NAMES["rms_norm_eps"]},
    "constants": {"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu"},
    "orders": INTERLEAVED,
    "names": {"mixer.dt_bias": "ssm_dt.bias"},
    "dtype": "bfloat16",  # squares of more than 255 are no numbers in float16
    "finish": nemotron_h,
}
NEMOTRON_KEYS = (
    *without(GROUPED, "intermediate_size"),
    *("layer_norm_epsilon", "conv_kernel", "ssm_state_size", "n_groups", "mamba_num_heads"),
)


_BITNET: dict[str, Any] = {  # inputs are rounded, as these models were trained
    "model_type": "bitnet",
    "names": {
        "self_attn.attn_sub_norm.weight": "attn_sub_norm.weight",
        "mlp.ffn_sub_norm.weight": "ffn_sub_norm.weight",
    },
    "table": "bitnet",
}
_TERNARY = {
    "quantization_config": {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"}
}

_WITHOUT_WINDOWS = {**SILU, "use_sliding_window": False}

MODELS: dict[str, GgufModel] = {
    "llama": GgufModel(model_type="llama", orders=INTERLEAVED, has=_BIASES, relu=True),
    **dict.fromkeys(("qwen2", "qwen2vl"), GgufModel(model_type="qwen2", table="qwen2", constants=_WITHOUT_WINDOWS)),
    **dict.fromkeys(("qwen3", "qwen3vl"), GgufModel(model_type="qwen3", table="qwen3", constants=_WITHOUT_WINDOWS)),
    "gemma": GgufModel(model_type="gemma", constants=_GELU, shifted=True, dtype="bfloat16"),
    "gemma2": GgufModel(
        model_type="gemma2",
        keys=(*RMS, "sliding_window"),
        optional=("attn_logit_softcapping", "final_logit_softcapping"),
        constants=_GELU,
        shifted=True,
        dtype="bfloat16",
        finish=_gemma2,
    ),
    "gemma3": GgufModel(
        model_type="gemma3_text",
        keys=(*RMS, "sliding_window"),
        constants=_GELU | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
        shifted=True,
        dtype="bfloat16",
        finish=_gemma3,
    ),
    "gemma3n": GgufModel(
        model_type="gemma3n_text",
        keys=(*without(RMS, "intermediate_size"), "sliding_window"),
        optional=(*_SHARING, "altup_num_inputs", "altup_active_idx"),
        constants=_GELU,
        names={"altup.correct_output_scale": "altup_correct_scale.weight"},
        stacked={
            "altup_proj.weight": "model.altup_projections.{}.weight",
            "altup_unembd_proj.weight": "model.altup_unembed_projections.{}.weight",
        },
        dtype="bfloat16",
        finish=_gemma3n,
    ),
    "gemma4": GgufModel(
        model_type="gemma4_text",
        keys=(*without(RMS, "intermediate_size", "num_key_value_heads"), "sliding_window"),
        optional=_SHARING,
        constants=_GELU | {"hidden_size_per_layer_input": 0},
        names={
            "layer_scalar": "layer_output_scale.weight",
            "router.scale": "ffn_gate_inp.scale",
            "router.per_expert_scale": "ffn_down_exps.scale",
        },
        dtype="bfloat16",
        finish=_gemma4,
    ),
    "phi3": GgufModel(model_type="phi3", optional=("sliding_window", "original_max_position_embeddings"), finish=_phi3),
    "phi2": GgufModel(
        model_type="phi", keys=(*GROUPED, "layer_norm_eps"), constants={"hidden_act": "gelu_new"}, of_share=True
    ),
    "mistral3": GgufModel(model_type="ministral3", orders=INTERLEAVED, finish=_mistral3),
    "starcoder2": GgufModel(
        model_type="starcoder2",
        keys=(*GROUPED, "norm_epsilon"),
        constants={"hidden_act": "gelu_pytorch_tanh", "use_bias": True, "sliding_window": None},
    ),
    "stablelm": GgufModel(
        model_type="stablelm",
        keys=(*GROUPED, "layer_norm_eps"),
        optional=("use_parallel_residual",),
        has={"use_qkv_bias": "attn_q.bias", "qk_layernorm": "attn_q_norm.weight"},
        of_share=True,
    ),
    "falcon": GgufModel(
        model_type="falcon",
        keys=(*without(SIZES, "intermediate_size"), "ffn_hidden_size", "layer_norm_epsilon", "num_kv_heads"),
        constants={"activation": "gelu", "alibi": False},
        has={"new_decoder_architecture": "attn_norm_2.weight", "bias": "attn_qkv.bias"},
        orders=_FUSED,
        finish=_falcon,
        relu=True,
    ),
    "gptneox": GgufModel(
        model_type="gpt_neox",
        keys=(*SIZES, "layer_norm_eps", "use_parallel_residual"),
        constants={"hidden_act": "gelu"},
        of_share=True,
        orders=_FUSED,
    ),
    "nemotron": GgufModel(
        model_type="nemotron",
        keys=(*GROUPED, "norm_eps"),
        constants={"hidden_act": "relu2"},
        of_share=True,
        shifted=True,
    ),
    "arcee": GgufModel(model_type="arcee", constants={"hidden_act": "relu2"}, orders=INTERLEAVED, has=_BIASES),
    "smollm3": GgufModel(
        model_type="smollm3", constants={**SILU, "no_rope_layer_interval": 4}, orders=INTERLEAVED, has=_BIASES
    ),
    "command-r": GgufModel(
        model_type="cohere", keys=(*GROUPED, "layer_norm_eps", "logit_scale"), has={"use_qk_norm": "attn_q_norm.weight"}
    ),
    "olmo2": GgufModel(model_type="olmo2"),
    "granite": GgufModel(model_type="granite", optional=MULTIPLIERS, orders=INTERLEAVED, has=_BIASES),
    "deepseek2": GgufModel(model_type="youtu", **LATENT),
    "minicpm3": GgufModel(model_type="minicpm3", **LATENT),
    "cohere2": GgufModel(
        model_type="cohere2", keys=(*GROUPED, "layer_norm_eps", "logit_scale", "sliding_window"), finish=windows
    ),
    "exaone4": GgufModel(model_type="exaone4", optional=("sliding_window",), finish=windows),
    "glm4": GgufModel(
        model_type="glm4",
        has={"attention_bias": "attn_q.bias"},
        of_share=True,
        orders={".attn_q.": halved_rows, ".attn_k.": halved_rows},
        finish=_glm4,
    ),
    "seed_oss": GgufModel(model_type="seed_oss", has=_BIASES | {"attention_out_bias": "attn_output.bias"}),
    "ernie4_5": GgufModel(model_type="ernie4_5", has={"use_bias": "attn_q.bias"}),
    "hunyuan-dense": GgufModel(model_type="hunyuan_v1_dense", has={"attention_bias": "attn_q.bias"}),
    "lfm2": GgufModel(model_type="lfm2", constants={"block_auto_adjust_ff_dim": False}, **CONVOLUTION),
    "bitnet": GgufModel(constants=SILU | _TERNARY, relu=True, **_BITNET),  # the older models, and llama.cpp
    # Microsoft's own files: BitNet b1.58 2B4T
    **dict.fromkeys(("bitnet-b1.58", "bitnet-25"), GgufModel(constants={"hidden_act": "relu2"} | _TERNARY, **_BITNET)),
    "qwen35": GgufModel(model_type="qwen3_5_text", keys=DELTA, **STATES),
    "falcon-h1": GgufModel(
        model_type="falcon_h1",
        keys=(*RMS, *MAMBA),
        constants={**SILU, "mamba_norm_before_gate": False},
        has=_BIASES | {"mamba_conv_bias": "ssm_conv1d.bias", "mamba_rms_norm": "ssm_norm.weight"},
        names={"mamba.dt_bias": "ssm_dt.bias"},
        finish=_falcon_h1,
    ),
    "granitehybrid": GgufModel(keys=(*RMS, *MAMBA), **GRANITE_HYBRID),
    "nemotron_h": GgufModel(keys=(*NEMOTRON_KEYS, "intermediate_size"), **NEMOTRON_H),
}


# PowerInfer's files (github.com/SJTU-IPADS/PowerInfer, llama.cpp): the same, whose FFNs have ReLU. Of Bamboo it is on
# the up projection too.
SPARSE_MODELS: dict[str, GgufModel] = {
    "llama": replace(MODELS["llama"], constants={"hidden_act": "relu"}),
    "bamboo": GgufModel(model_type="bamboo", constants={"hidden_act": "relu"}, orders=INTERLEAVED, table="llama"),
    "falcon": replace(MODELS["falcon"], constants={"activation": "relu", "alibi": False}),
}
