"""The table of GGUF architectures: where config.json's values are, and where tensors differ from those of transformers.

One row an architecture, `MODELS`. Tensors are found by the gguf package's own table of names. llama.cpp stores the rows
of Llama's queries and keys in the order of interleaved rotary pairs; transformers, and so we, pair dimension j of a
head with j + half: those rows are put back. Reads plain values; knows neither bytes nor tokenizers.
"""

import importlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashllm.arch.family import head_size
from flashllm.arch.registry import ARCHITECTURES, claims, resolve, source_shapes, spec_of
from flashllm.convert.checkpoint.gguf.file import GgufContent, GgufTensor, StoredTensor
from flashllm.convert.checkpoint.mixtures.gguf_experts import experts_apart
from flashllm.errors import FormatError, UnsupportedModelError

ARCHITECTURE = "general.architecture"
ROPE_FACTORS = "rope_freqs.weight"  # of Llama 3.1's rule: by how much each pair turns slower
LONGROPE = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}  # Phi-3's
NEXT = "nextn_predict_layers"  # how many of the layers draft tokens: they are the last
_LAYER = re.compile(r"blk\.(\d+)\.")
FACTOR_TENSORS = (ROPE_FACTORS, *LONGROPE.values())  # which the config says

_SIZES = {  # config.json's key -> the metadata's, after the architecture's name
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}
_GROUPED = _SIZES | {"num_key_value_heads": "attention.head_count_kv"}
_RMS = _GROUPED | {"rms_norm_eps": "attention.layer_norm_rms_epsilon"}
_LAYER_NORM = "attention.layer_norm_epsilon"
_FALCON = {key if key != "intermediate_size" else "ffn_hidden_size": name for key, name in _SIZES.items()} | {
    "layer_norm_epsilon": _LAYER_NORM,
    "num_kv_heads": "attention.head_count_kv",
}
_GELU = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}

_SOFTMAX, _SIGMOID, _SOFTMAX_OF_CHOSEN = 1, 2, 3  # expert_gating_func

Order = Callable[[int, Mapping[str, Any]], NDArray[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufModel:
    """An architecture of GGUF files."""

    model_type: str  # transformers'
    keys: Mapping[str, str]  # config.json's key -> the metadata's
    optional: Mapping[str, str] = field(default_factory=dict)  # the same, of keys a config.json may leave out
    constants: Mapping[str, Any] = field(default_factory=dict)  # config.json's, which the metadata does not say
    orders: Mapping[str, Order] = field(default_factory=dict)  # of rows, by a part of the file's name of a tensor
    norm_shift: float = 0.0  # what was added to the norms' weights
    table: str | None = None  # architecture whose names the tensors have, where it is another
    dtype: str | None = None  # of a conversion of quantised weights, where the usual one would overflow
    names: Mapping[str, str] = field(default_factory=dict)  # a layer's, that the gguf package's table lacks
    finish: Callable[[dict[str, Any], GgufContent], None] | None = None  # what the keys alone do not say
    score: int | None = _SOFTMAX  # of its router, as the metadata numbers them; None: as the file says
    relu: bool = False  # whether models of this kind exist with ReLU, which their files do not say


def paired_rows(rows: int, config: Mapping[str, Any]) -> NDArray[np.int64]:
    """The stored row of each row, where a file has pair j of a head in rows 2 j and 2 j + 1."""
    within = np.arange(config["head_dim"]).reshape(-1, 2).T.reshape(-1)  # 0, 2, 4, ..., then 1, 3, 5, ...
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


_INTERLEAVED: Mapping[str, Order] = {".attn_q.": paired_rows, ".attn_k.": paired_rows}
_FUSED: Mapping[str, Order] = {".attn_qkv.": grouped_rows}


def _has(content: GgufContent, name: str) -> bool:
    return f"blk.0.{name}" in content.tensors


def _key(content: GgufContent, name: str) -> str:
    """The metadata's key of this name after the architecture's."""
    return f"{content.metadata.text(ARCHITECTURE)}.{name}"


def _llama(config: dict[str, Any], content: GgufContent) -> None:
    config["attention_bias"] = _has(content, "attn_q.bias")
    config["mlp_bias"] = _has(content, "ffn_up.bias")


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
    local = content.metadata.number("gemma3.rope.freq_base_swa", 10000.0, positive=True)
    config["rope_parameters"] = {
        "full_attention": config["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }


def _phi3(config: dict[str, Any], content: GgufContent) -> None:
    """A window of 0 is none (Phi-4)."""
    if config.get("sliding_window") == 0:
        config["sliding_window"] = None


def _cohere(config: dict[str, Any], content: GgufContent) -> None:
    config["use_qk_norm"] = _has(content, "attn_q_norm.weight")


def _stablelm(config: dict[str, Any], content: GgufContent) -> None:
    config["use_qkv_bias"] = _has(content, "attn_q.bias")
    config["qk_layernorm"] = _has(content, "attn_q_norm.weight")


def _falcon(config: dict[str, Any], content: GgufContent) -> None:
    config["new_decoder_architecture"] = _has(content, "attn_norm_2.weight")
    config["multi_query"] = config["num_kv_heads"] == 1
    config["parallel_attn"] = not _has(content, "ffn_norm.weight")
    config["bias"] = _has(content, "attn_qkv.bias")
    given = config.pop("head_dim")  # which transformers' config computes, and takes from nobody
    if given != head_size(config):
        raise UnsupportedModelError(
            f"{content.path}: heads of {given} dimensions; Falcon's share out the width, {head_size(config)} each"
        )


def _latent(config: dict[str, Any], content: GgufContent) -> None:
    """Sizes of latent attention. Older files have plain keys' and values' under the names that newer ones use for the
    latent row's, and the projection of both in one tensor; newer ones have it as it is multiplied.

    What yarn multiplies scores by is 0.1 times the logarithm of its factor times a number that is stored times 0.1.
    """
    metadata, rotated = content.metadata, config["head_dim"]
    keys = metadata.integer(_key(content, "attention.key_length"))
    values = metadata.integer(
        _key(content, "attention.value_length"), config["hidden_size"] // config["num_attention_heads"]
    )
    config |= {
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": metadata.integer(_key(content, "attention.key_length_mla"), keys) - rotated,
        "v_head_dim": metadata.integer(_key(content, "attention.value_length_mla"), values),
        "num_key_value_heads": config["num_attention_heads"],
    }
    if _has(content, "attn_k_b.weight"):
        config["kv_b_apart"] = True
    rope = config["rope_parameters"]
    if rope["rope_type"] == "yarn":
        scale = round(10 * metadata.number(_key(content, "rope.scaling.yarn_log_multiplier"), 0.0), 6)
        rope |= {"mscale": scale, "mscale_all_dim": scale} if scale else {"attention_factor": 1.0}


_LATENT: dict[str, Any] = {
    "keys": _RMS | {"kv_lora_rank": "attention.kv_lora_rank"},
    "optional": {"q_lora_rank": "attention.q_lora_rank"},
    "constants": {"hidden_act": "silu", "q_lora_rank": None},
    "finish": _latent,
}


MODELS: dict[str, GgufModel] = {
    "llama": GgufModel(
        model_type="llama", keys=_RMS, constants={"hidden_act": "silu"}, orders=_INTERLEAVED, finish=_llama, relu=True
    ),
    "qwen2": GgufModel(model_type="qwen2", keys=_RMS, constants={"hidden_act": "silu", "use_sliding_window": False}),
    "qwen3": GgufModel(model_type="qwen3", keys=_RMS, constants={"hidden_act": "silu", "use_sliding_window": False}),
    "gemma": GgufModel(model_type="gemma", keys=_RMS, constants=_GELU, norm_shift=1.0, dtype="bfloat16"),
    "gemma2": GgufModel(
        model_type="gemma2",
        keys=_RMS | {"sliding_window": "attention.sliding_window"},
        optional={
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        constants=_GELU,
        norm_shift=1.0,
        dtype="bfloat16",
        finish=_gemma2,
    ),
    "gemma3": GgufModel(
        model_type="gemma3_text",
        keys=_RMS | {"sliding_window": "attention.sliding_window"},
        constants=_GELU | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
        norm_shift=1.0,
        dtype="bfloat16",
        finish=_gemma3,
    ),
    "phi3": GgufModel(
        model_type="phi3",
        keys=_RMS,
        optional={
            "sliding_window": "attention.sliding_window",
            "original_max_position_embeddings": "rope.scaling.original_context_length",
        },
        constants={"hidden_act": "silu"},
        finish=_phi3,
    ),
    "phi2": GgufModel(
        model_type="phi", keys=_GROUPED | {"layer_norm_eps": _LAYER_NORM}, constants={"hidden_act": "gelu_new"}
    ),
    "starcoder2": GgufModel(
        model_type="starcoder2",
        keys=_GROUPED | {"norm_epsilon": _LAYER_NORM},
        constants={"hidden_act": "gelu_pytorch_tanh", "use_bias": True, "sliding_window": None},
    ),
    "stablelm": GgufModel(
        model_type="stablelm",
        keys=_GROUPED | {"layer_norm_eps": _LAYER_NORM},
        optional={"use_parallel_residual": "use_parallel_residual"},
        constants={"hidden_act": "silu"},
        finish=_stablelm,
    ),
    "falcon": GgufModel(
        model_type="falcon",
        keys=_FALCON,
        constants={"activation": "gelu", "alibi": False},
        orders=_FUSED,
        finish=_falcon,
        relu=True,
    ),
    "gptneox": GgufModel(
        model_type="gpt_neox",
        keys=_SIZES | {"layer_norm_eps": _LAYER_NORM, "use_parallel_residual": "use_parallel_residual"},
        constants={"hidden_act": "gelu"},
        orders=_FUSED,
    ),
    "nemotron": GgufModel(
        model_type="nemotron",
        keys=_GROUPED | {"norm_eps": _LAYER_NORM},
        constants={"hidden_act": "relu2"},
        norm_shift=1.0,
    ),
    "arcee": GgufModel(
        model_type="arcee", keys=_RMS, constants={"hidden_act": "relu2"}, orders=_INTERLEAVED, finish=_llama
    ),
    "smollm3": GgufModel(
        model_type="smollm3",
        keys=_RMS,
        constants={"hidden_act": "silu", "no_rope_layer_interval": 4},
        orders=_INTERLEAVED,
        finish=_llama,
    ),
    "command-r": GgufModel(
        model_type="cohere",
        keys=_GROUPED | {"layer_norm_eps": _LAYER_NORM, "logit_scale": "logit_scale"},
        constants={"hidden_act": "silu"},
        finish=_cohere,
    ),
    "olmo2": GgufModel(model_type="olmo2", keys=_RMS, constants={"hidden_act": "silu"}),
    "granite": GgufModel(
        model_type="granite",
        keys=_RMS,
        optional={
            "attention_multiplier": "attention.scale",
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
        },
        constants={"hidden_act": "silu"},
        orders=_INTERLEAVED,
        finish=_llama,
    ),
    "deepseek2": GgufModel(model_type="youtu", **_LATENT),
    "minicpm3": GgufModel(model_type="minicpm3", **_LATENT),
}


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
    size = content.metadata.integer(_key(content, "expert_feed_forward_length"), 0, least=0)
    if size and _has(content, "ffn_gate_up_exps.weight"):
        config["moe_intermediate_size"] = size
    if config["model_type"] in ("olmoe", "mixtral", "gpt_oss"):
        config["intermediate_size"] = config.pop("moe_intermediate_size", config["intermediate_size"])


def _gpt_oss(config: dict[str, Any], content: GgufContent) -> None:
    _mixture(config, content)
    if config["rope_parameters"]["rope_type"] == "yarn":
        config["rope_parameters"] |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    config["attention_bias"] = _has(content, "attn_q.bias")


def _routed(config: dict[str, Any], content: GgufContent) -> None:
    """A factor of 0 is none."""
    config["routed_scaling_factor"] = config.get("routed_scaling_factor") or 1.0


def _deepseek2(config: dict[str, Any], content: GgufContent) -> None:
    """DeepSeek V2, V3, or GLM-4.7-Flash: the last is told by its shape where the file does not say how it scores, and
    by an epsilon of its norms that DeepSeek's latent ones do not have."""
    _latent(config, content)
    _routed(config, content)
    dense = config.pop("first_k_dense_replace")
    is_flash = config["num_hidden_layers"] in (47, 48) and config["vocab_size"] == 154880  # llama.cpp's rule
    score = content.metadata.integer(_key(content, "expert_gating_func"), 0, least=0)
    if (score or (_SIGMOID if is_flash else _SOFTMAX)) == _SIGMOID:
        if config["rms_norm_eps"] == 1e-6:
            config |= {"model_type": "deepseek_v3", "first_k_dense_replace": dense}
        else:
            kinds = ["dense" if layer < dense else "sparse" for layer in range(config["num_hidden_layers"])]
            config |= {"model_type": "glm4_moe_lite", "mlp_layer_types": kinds}
    elif score > _SOFTMAX or config["norm_topk_prob"]:
        raise UnsupportedModelError(f"{content.path}: a router of DeepSeek's that scores so is not supported")
    else:
        grouped = config["n_group"] > 1
        config |= {"first_k_dense_replace": dense, "topk_method": "group_limited_greedy" if grouped else "greedy"}


_EXPERTS = _RMS | {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
_ROUTED: dict[str, Any] = {
    "keys": _RMS
    | {
        "n_routed_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
    },
    "optional": {
        "n_shared_experts": "expert_shared_count",
        "first_k_dense_replace": "leading_dense_block_count",
        "n_group": "expert_group_count",
        "topk_group": "expert_group_used_count",
        "routed_scaling_factor": "expert_weights_scale",
        "norm_topk_prob": "expert_weights_norm",
    },
    "constants": {
        "hidden_act": "silu",
        "n_shared_experts": 0,
        "first_k_dense_replace": 0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
    },
}
_NORMALIZED = {"norm_topk_prob": "expert_weights_norm"}
_WHOLE = {"hidden_act": "silu", "use_sliding_window": False}

# Mixtures of experts, by the same names: Mixtral's is Llama's. What is said of weights is llama.cpp's rule.
MIXTURES: dict[str, GgufModel] = {
    "llama": GgufModel(
        model_type="mixtral",
        keys=_EXPERTS,
        constants={"hidden_act": "silu", "sliding_window": None},
        orders=_INTERLEAVED,
        finish=_mixture,
        relu=True,
    ),
    "olmoe": GgufModel(
        model_type="olmoe",
        keys=_EXPERTS,
        optional=_NORMALIZED,
        constants={"hidden_act": "silu", "norm_topk_prob": False},
        finish=_mixture,
        relu=True,
    ),
    "qwen2moe": GgufModel(
        model_type="qwen2_moe",
        keys=_EXPERTS,
        optional=_NORMALIZED,
        constants=_WHOLE | {"norm_topk_prob": False},
        finish=_mixture,
    ),
    "qwen3moe": GgufModel(
        model_type="qwen3_moe",
        keys=_EXPERTS,
        optional=_NORMALIZED,
        constants=_WHOLE | {"norm_topk_prob": True},
        finish=_mixture,
    ),
    "gpt-oss": GgufModel(
        model_type="gpt_oss",
        keys=_EXPERTS | {"sliding_window": "attention.sliding_window"},
        constants={"hidden_act": "silu"},
        names={
            "self_attn.sinks": "attn_sinks.weight",
            "mlp.experts.up_bias": "ffn_up_exps.bias",
            "mlp.experts.gate_bias": "ffn_gate_exps.bias",
            "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
        },
        dtype="bfloat16",
        finish=_gpt_oss,
        score=_SOFTMAX_OF_CHOSEN,
    ),
    "deepseek2": GgufModel(
        model_type="deepseek_v2",
        keys=_LATENT["keys"] | _ROUTED["keys"],
        optional=_LATENT["optional"] | _ROUTED["optional"],
        constants=_LATENT["constants"] | _ROUTED["constants"],
        finish=_deepseek2,
        score=None,
    ),
}


# PowerInfer's files (github.com/SJTU-IPADS/PowerInfer, llama.cpp): the same, whose FFNs have ReLU. Of Bamboo it is on
# the up projection too.
SPARSE_MODELS: dict[str, GgufModel] = {
    "llama": replace(MODELS["llama"], constants={"hidden_act": "relu"}),
    "bamboo": GgufModel(
        model_type="bamboo", keys=_RMS, constants={"hidden_act": "relu"}, orders=_INTERLEAVED, table="llama"
    ),
    "falcon": replace(MODELS["falcon"], constants={"activation": "relu", "alibi": False}),
}
_PREDICTORS = (".fc1.", ".fc2.")  # parts of their tensors' names there


def supported() -> list[str]:
    """The GGUF architectures that can be run."""
    return sorted(name for name, model in MODELS.items() if model.model_type in ARCHITECTURES)


def model_of(content: GgufContent) -> GgufModel:
    """The row of the file's architecture. UnsupportedModelError where there is none."""
    name = content.metadata.text(ARCHITECTURE)
    experts = content.metadata.integer(f"{name}.expert_count", 0, least=0)
    mixture = experts > 0 or name in MIXTURES.keys() - MODELS.keys()
    models, all_of_them = (SPARSE_MODELS, sorted(SPARSE_MODELS)) if content.sparse else (MODELS, supported())
    if mixture and not content.sparse:
        models, all_of_them = MIXTURES, sorted(MIXTURES)
    if name not in all_of_them or (mixture and content.sparse):
        known = ", ".join(all_of_them)
        raise UnsupportedModelError(
            f"{content.path}: GGUF architecture {name[:80]!r}{' with experts' if mixture else ''} is not "
            f"supported; supported: {known}. A Hugging Face folder of the model may be"
        )
    return models[name]


def assumed_line(content: GgufContent) -> str | None:
    """A line for the user where ReLU models of this kind exist: GGUF has no key for an FFN's activation."""
    model = model_of(content)
    if content.sparse or not model.relu:
        return None
    name = {"silu": "SiLU", "gelu": "GELU"}[model.constants.get("hidden_act") or model.constants["activation"]]
    return (
        f"{content.path.name} says no activation; {name} is assumed, as llama.cpp does. A model with ReLU: convert its "
        "Hugging Face folder"
    )


def named_tensors(content: GgufContent, config: Mapping[str, Any]) -> tuple[dict[str, GgufTensor], str | None]:
    """(the file's tensors by state_dict name, a line that says what is left out: layers that draft tokens).

    Those that no name claims keep the file's. Experts are cut apart.
    """
    model = model_of(content)
    gguf = importlib.import_module("gguf")
    like = model.table or content.metadata.text(ARCHITECTURE)
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == like)
    layers, spec, shapes = config["num_hidden_layers"], spec_of(config), source_shapes(config)
    table = gguf.get_tensor_name_map(architecture, layers)
    left = {name: stored for name, stored in content.tensors.items() if name not in FACTOR_TENSORS}
    if content.sparse:
        left = {name: stored for name, stored in left.items() if not any(part in name for part in _PREDICTORS)}
    behind = {name for name in left if (match := _LAYER.match(name)) and int(match[1]) >= layers}
    if drafting := content.metadata.integer(_key(content, NEXT), 0, least=0):
        left = {name: stored for name, stored in left.items() if name not in behind}
    said = f"left out: {drafting} layers that draft tokens ({len(behind)} tensors)" if drafting and behind else None
    cut, left = experts_apart(left, spec, layers, resolve(config).experts)
    found = {name: GgufTensor(stored) for name, stored in cut.items()}
    own = {claim.source: claim.name for claim in claims(config).values()}
    for name, shape in shapes.items():
        if name in found:
            continue
        key = _own_name(name, own[name], model) or table.get_name(name, try_suffixes=(".weight", ".bias"))
        columns = key.replace(".ffn_down.", ".ffn_down_t.") if content.sparse and key is not None else key
        if columns != key and columns in left:  # a row a neuron; a bias is one as ever
            found[name] = GgufTensor(left.pop(columns), transposed=columns.endswith(".weight"))
        elif key in left:
            found[name] = _as_transformers(_shaped(left.pop(key), shape), key, model, config)
    return found | {name: GgufTensor(stored) for name, stored in left.items()}, said


def _shaped(stored: StoredTensor, shape: tuple[int, ...]) -> StoredTensor:
    """The same rows with other dimensions before them: a file drops those of 1, and has the heads' apart."""
    same = math.prod(shape) == math.prod(stored.shape) and (len(shape) == 1 or shape[-1] == stored.shape[-1])
    return replace(stored, shape=shape) if same else stored


def _own_name(name: str, canonical: str, model: GgufModel) -> str | None:
    """The file's name of a layer's tensor, by the model's row, or by what it is."""
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    if match is not None and canonical.endswith(".choice.bias"):
        return f"blk.{match[1]}.exp_probs_b.bias"
    if match is None or match[2] not in model.names:
        return None
    return f"blk.{match[1]}.{model.names[match[2]]}"


def _as_transformers(stored: StoredTensor, key: str, model: GgufModel, config: Mapping[str, Any]) -> GgufTensor:
    for part, order in model.orders.items():
        if part in key:
            try:
                return GgufTensor(stored, order=order(stored.shape[0], config))
            except ValueError as error:
                raise FormatError(
                    f"{stored.path}: tensor {key}: {stored.shape[0]} rows do not fit its heads"
                ) from error
    return GgufTensor(stored, shift=model.norm_shift if key.endswith("norm.weight") else 0.0)
