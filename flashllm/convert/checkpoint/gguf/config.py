"""The config.json that a GGUF file's metadata and tensors describe. The tables of architectures are in models.py and
experts.py."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from flashllm.arch.spec import MAX_CONTEXT
from flashllm.convert.checkpoint.gguf.file import GgufContent, StoredTensor
from flashllm.convert.checkpoint.gguf.metadata import Metadata
from flashllm.convert.checkpoint.gguf.row import (
    ABSENT,
    ARCHITECTURE,
    FACTOR,
    LONGROPE,
    NAMES,
    NEXT,
    ROPE_FACTORS,
    has_tensor,
)
from flashllm.convert.checkpoint.gguf.tensors import model_of
from flashllm.errors import FormatError, UnsupportedModelError

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_STILL = 1e20  # a factor as large as that: the pair does not turn
_OPTIONAL = {"num_key_value_heads": "num_attention_heads"}  # what a key is where the metadata lacks it
_MAX_EXPERTS = 1 << 20  # of all layers: each is a few objects
# Keys after the architecture's name whose values are no sizes: True for numbers that must be above 0.
_NUMBERS = {
    "attention.layer_norm_rms_epsilon": False,
    "attention.layer_norm_epsilon": False,
    "attn_logit_softcapping": True,
    "final_logit_softcapping": True,
    "attention.scale": False,
    "attention.value_scale": False,
    "embedding_scale": False,
    "residual_scale": False,
    "logit_scale": False,
    "rope.freq_base": True,
    "rope.scaling.factor": True,
    "rope.scaling.attn_factor": True,
    "rope.scaling.yarn_beta_fast": True,
    "rope.scaling.yarn_beta_slow": True,
    "expert_weights_scale": False,
}
_FLAGS = ("use_parallel_residual", "expert_weights_norm")
# Sizes that are 0 where there is none.
_OR_NONE = (
    "attention.sliding_window",
    "expert_count",
    "expert_shared_count",
    "leading_dense_block_count",
    "nextn_predict_layers",
    "attention.shared_kv_layers",
    "embedding_length_per_layer_input",
    "altup.active_idx",
)


def model_config(content: GgufContent) -> dict[str, Any]:
    """The config.json that the file's metadata and tensors describe, but for the ids of special tokens.

    FormatError where the metadata lacks something or makes no sense, UnsupportedModelError for what we cannot run.
    """
    model, metadata = model_of(content), content.metadata
    prefix = metadata.text(ARCHITECTURE)
    embedding = content.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise FormatError(f"{content.path}: has no token_embd.weight, so it holds no language model")
    absent = {key: ABSENT[key] for key in model.optional if key in ABSENT}
    config: dict[str, Any] = {"model_type": model.model_type, **absent, **model.constants}
    names = {**NAMES, **model.elsewhere}
    for key in model.keys:
        config[key] = _read(metadata, prefix, names[key], config.get(_OPTIONAL.get(key, "")))
    for key in model.optional:
        if f"{prefix}.{names[key]}" in metadata:
            value = _read(metadata, prefix, names[key])
            config[key] = 1.0 if names[key] == FACTOR and value == 0 else value  # a factor of 0 is none
    for key in model.lists:
        config[key] = metadata.integers_of_layers(f"{prefix}.{names[key]}", config["num_hidden_layers"])
    config |= {key: has_tensor(content, name) for key, name in model.has.items()}
    if "num_attention_heads" not in config:
        config["num_attention_heads"] = config["num_attention_heads_per_layer"][0]
    config["vocab_size"] = embedding.shape[0]
    config["tie_word_embeddings"] = "output.weight" not in content.tensors
    layers, experts = config["num_hidden_layers"], _read(metadata, prefix, "expert_count", 0) or 1
    if layers > len(content.tensors) or layers * experts > _MAX_EXPERTS:
        raise FormatError(
            f"{content.path}: {prefix}.block_count {layers} and {experts} experts are more than the file's "
            f"{len(content.tensors)} tensors can be; get the file again"
        )
    config["num_hidden_layers"] -= _read(metadata, prefix, NEXT, 0)
    if config["num_hidden_layers"] < 1:
        raise FormatError(f"{content.path}: all of its {layers} layers draft tokens; get the file again")
    latent = "kv_lora_rank" in config  # whose heads have two sizes: this is the rotated part's
    config["head_dim"] = head_dim = (
        _read(metadata, prefix, "rope.dimension_count") if latent else _head_size(content, prefix, config)
    )
    config["rope_parameters"] = _rope(content, prefix, head_dim, of_share=model.of_share)
    score = metadata.integer(f"{prefix}.expert_gating_func", 0, least=0)
    if model.score not in (None, score) and score:
        raise UnsupportedModelError(
            f"{content.path}: a router of {prefix} that scores by rule {score} is not supported"
        )
    if model.finish is not None:
        try:
            model.finish(config, content)
        except ValueError as error:  # sizes that do not fit each other
            raise FormatError(f"{content.path}: what its metadata says makes no model: {error}") from error
    return config


def _read(metadata: Metadata, prefix: str, name: str, default: Any = None) -> Any:
    """The value of an architecture's key, which is the same for all layers."""
    key = f"{prefix}.{name}"
    if name in _NUMBERS:
        return metadata.number(key, default, positive=_NUMBERS[name])
    if name in _FLAGS:
        return metadata.flag(key, default)
    return metadata.integer(key, default, least=0 if name in _OR_NONE else 1, most=MAX_CONTEXT)


def _head_size(content: GgufContent, prefix: str, config: dict[str, Any]) -> int:
    width, heads, keys = config["hidden_size"], config["num_attention_heads"], f"{prefix}.attention.key_length"
    if keys not in content.metadata and width % heads:
        raise FormatError(f"{content.path}: {heads} heads do not share out the width, {width}, and {keys} is not there")
    size: int = _read(content.metadata, prefix, "attention.key_length", width // heads)
    if _read(content.metadata, prefix, "attention.value_length", size) != config.get("v_head_dim", size):
        raise UnsupportedModelError(f"{content.path}: values of another size than keys are not supported")
    return size


def _rope(content: GgufContent, prefix: str, head_dim: int, *, of_share: bool) -> dict[str, Any]:
    """transformers' `rope_parameters`."""
    metadata = content.metadata
    theta = _read(metadata, prefix, "rope.freq_base", 10000.0)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    dims = _read(metadata, prefix, "rope.dimension_count", head_dim)
    if of_share or dims != head_dim:
        rope["partial_rotary_factor"] = dims / head_dim
    kind = metadata.text(f"{prefix}.rope.scaling.type", "none")
    if any(name in content.tensors for name in LONGROPE.values()):
        return rope | _longrope(content, prefix, kind, dims)
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(f"{content.path}: rope scaling {kind[:80]!r} is not supported")
    if kind != "none":
        rope |= {"rope_type": kind, "factor": _read(metadata, prefix, "rope.scaling.factor")}
        if kind == "yarn" and f"{prefix}.rope.scaling.original_context_length" in metadata:
            rope["original_max_position_embeddings"] = _read(metadata, prefix, "rope.scaling.original_context_length")
        for key in ("beta_fast", "beta_slow"):
            if kind == "yarn" and f"{prefix}.rope.scaling.yarn_{key}" in metadata:
                rope[key] = _read(metadata, prefix, f"rope.scaling.yarn_{key}")
    if ROPE_FACTORS in content.tensors:
        rope |= _factored(content.tensors[ROPE_FACTORS], theta, dims, content.path)
    return rope


def _longrope(content: GgufContent, prefix: str, kind: str, dims: int) -> dict[str, Any]:
    """LongRoPE's parameters: Phi-3's files have a factor for each pair, for short texts and for long ones, as tensors;
    MiniCPM 3's too, which scales no scores.

    UnsupportedModelError for other models, whose rule is not known.
    """
    path, metadata = content.path, content.metadata
    if prefix not in ("phi3", "phimoe", "minicpm3") or kind not in ("none", "longrope"):
        raise UnsupportedModelError(
            f"{path}: factors for long texts are known of Phi-3 and MiniCPM 3 alone, without other scaling; convert "
            "the model's Hugging Face folder"
        )
    rope: dict[str, Any] = {"rope_type": "longrope"}
    for key, name in LONGROPE.items():
        stored = content.tensors.get(name)
        if stored is None or stored.shape != (dims // 2,):
            found = "is missing" if stored is None else f"has shape {list(stored.shape)}"
            raise FormatError(f"{path}: tensor {name} {found}; the model turns {dims // 2} pairs. Get the file again")
        rope[key] = [float(str(factor)) for factor in _factors(stored, name, path)]  # as short as fp32 allows
    trained = _read(metadata, prefix, "context_length") if prefix == "minicpm3" else None
    for key, name, default in (
        ("attention_factor", "rope.scaling.attn_factor", None if trained is None else 1.0),
        ("original_max_position_embeddings", "rope.scaling.original_context_length", trained),
    ):
        rope[key] = _read(metadata, prefix, name, default)
    return rope


def _factored(stored: StoredTensor, theta: float, dims: int, path: Path) -> dict[str, Any]:
    """Llama 3.1's parameters, from what they make of each pair's frequency; or Gemma 4's, where some pairs do not turn.

    UnsupportedModelError for other factors.
    """
    factors = _factors(stored, ROPE_FACTORS, path).astype(np.float64)
    turning = int((factors == 1).sum())
    if turning < len(factors) == dims // 2 and (factors[:turning] == 1).all() and (factors[turning:] >= _STILL).all():
        return {"rope_type": "proportional", "partial_rotary_factor": turning / len(factors)}
    low, high, trained = _LLAMA3.values()
    factor = float(factors.max())
    frequencies = theta ** (-np.arange(0, dims, 2) / dims)
    waves = trained * frequencies / (2 * math.pi)  # within the trained context
    blend = np.clip((waves - low) / (high - low), 0, 1)
    expected = 1 / ((1 - blend) / factor + blend)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise UnsupportedModelError(f"{path}: {ROPE_FACTORS} follows another rule than Llama 3.1's, the only one known")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def _factors(stored: StoredTensor, name: str, path: Path) -> np.ndarray[Any, np.dtype[np.float32]]:
    """By how much each pair turns slower."""
    factors = stored.numbers(0, 1).reshape(-1)
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise FormatError(f"{path}: tensor {name} must hold finite numbers above 0; get the file again")
    return factors
