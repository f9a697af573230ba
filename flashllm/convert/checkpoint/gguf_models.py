"""What a GGUF file's metadata means: a config.json, and where its tensors differ from those of transformers.

One row an architecture, `MODELS`. Tensors are found by the gguf package's own table of names. llama.cpp stores the rows
of Llama's queries and keys in the order of interleaved rotary pairs; transformers, and so we, pair dimension j of a
head with j + half: those rows are put back. Reads plain values; knows neither bytes nor tokenizers.
"""

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashllm.convert.checkpoint.gguf_file import GgufContent, GgufTensor, StoredTensor
from flashllm.errors import FormatError, UnsupportedModelError

Metadata = Mapping[str, Any]
_ARCHITECTURE = "general.architecture"
_ROPE_FACTORS = "rope_freqs.weight"  # of Llama 3.1's rule: by how much each pair turns slower
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

_SIZES = {  # config.json's key -> the metadata's, after the architecture's name
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}
_GROUPED = _SIZES | {"num_key_value_heads": "attention.head_count_kv"}
_RMS = _GROUPED | {"rms_norm_eps": "attention.layer_norm_rms_epsilon"}
_OPTIONAL = {"num_key_value_heads": "num_attention_heads"}  # what a key is where the metadata lacks it


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufModel:
    """An architecture of GGUF files."""

    model_type: str  # transformers'
    keys: Mapping[str, str]  # config.json's key -> the metadata's
    constants: Mapping[str, Any] = field(default_factory=dict)  # config.json's, which the metadata does not say
    interleaved: bool = False  # rows of query and key lie in the order of interleaved rotary pairs
    norm_shift: float = 0.0  # what was added to the norms' weights
    finish: Callable[[dict[str, Any], GgufContent], None] | None = None  # what the keys alone do not say


def _llama(config: dict[str, Any], content: GgufContent) -> None:
    config["attention_bias"] = "blk.0.attn_q.bias" in content.tensors
    config["mlp_bias"] = "blk.0.ffn_up.bias" in content.tensors


MODELS: dict[str, GgufModel] = {
    "llama": GgufModel(
        model_type="llama", keys=_RMS, constants={"hidden_act": "silu"}, interleaved=True, finish=_llama
    ),
}


def model_of(content: GgufContent) -> GgufModel:
    """The row of the file's architecture. UnsupportedModelError where there is none, or it has experts."""
    name = content.metadata.get(_ARCHITECTURE)
    if name not in MODELS:
        known = ", ".join(sorted(MODELS))
        raise UnsupportedModelError(
            f"{content.path}: GGUF architecture {str(name)[:80]!r} is not supported; supported: {known}. A Hugging "
            "Face folder of the model may be"
        )
    if content.metadata.get(f"{name}.expert_count"):
        raise UnsupportedModelError(f"{content.path}: {name} with experts is not supported")
    return MODELS[name]


def model_config(content: GgufContent, vocabulary: Mapping[str, int]) -> dict[str, Any]:
    """The config.json that the file's metadata and tensors describe.

    `vocabulary` has the ids of special tokens by config.json's key ("eos_token_id").
    FormatError where the metadata lacks something or makes no sense, UnsupportedModelError for what we cannot run.
    """
    model, metadata = model_of(content), content.metadata
    prefix = metadata[_ARCHITECTURE]
    embedding = content.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise FormatError(f"{content.path}: has no token_embd.weight, so it holds no language model")
    config: dict[str, Any] = {"model_type": model.model_type, **model.constants}
    for key, name in model.keys.items():
        value = metadata.get(f"{prefix}.{name}")
        if value is None and key in _OPTIONAL:
            value = config[_OPTIONAL[key]]
        config[key] = _plain(value, f"{prefix}.{name}", content.path)
    config["vocab_size"] = embedding.shape[0]
    config["tie_word_embeddings"] = "output.weight" not in content.tensors
    heads = config["num_attention_heads"]
    head_dim = metadata.get(f"{prefix}.attention.key_length", config["hidden_size"] // max(heads, 1))
    if metadata.get(f"{prefix}.attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError(f"{content.path}: values of another size than keys are not supported")
    config["head_dim"] = head_dim
    config["rope_parameters"] = _rope(content, prefix, head_dim)
    if model.finish is not None:
        model.finish(config, content)
    return {**config, **vocabulary}


def _plain(value: Any, name: str, path: Path) -> Any:
    """A number of the metadata: of a list, its one value; a float as short as fp32 allows."""
    if value is None:
        raise FormatError(f"{path}: the metadata lacks {name}")
    if isinstance(value, list):
        if not value or any(one != value[0] for one in value):
            raise UnsupportedModelError(f"{path}: layers that differ ({name}) are not supported")
        value = value[0]
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _rope(content: GgufContent, prefix: str, head_dim: int) -> dict[str, Any]:
    """transformers' `rope_parameters`."""
    metadata = content.metadata
    theta = _plain(metadata.get(f"{prefix}.rope.freq_base", 10000.0), "rope.freq_base", content.path)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    dims = metadata.get(f"{prefix}.rope.dimension_count", head_dim)
    if dims != head_dim:
        rope["partial_rotary_factor"] = dims / head_dim
    kind = metadata.get(f"{prefix}.rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(f"{content.path}: rope scaling {str(kind)[:80]!r} is not supported")
    if kind != "none":
        name = f"{prefix}.rope.scaling.factor"
        rope |= {"rope_type": kind, "factor": _plain(metadata.get(name), name, content.path)}
        trained = metadata.get(f"{prefix}.rope.scaling.original_context_length")
        if kind == "yarn" and trained is not None:
            rope["original_max_position_embeddings"] = trained
    if _ROPE_FACTORS in content.tensors:
        rope |= _llama3(content.tensors[_ROPE_FACTORS], theta, dims, content.path)
    return rope


def _llama3(stored: StoredTensor, theta: float, dims: int, path: Path) -> dict[str, Any]:
    """Llama 3.1's parameters, from what they make of each pair's frequency. UnsupportedModelError for other factors."""
    factors = stored.rows(0, 1).reshape(-1).astype(np.float64)
    low, high, trained = (
        _LLAMA3["low_freq_factor"],
        _LLAMA3["high_freq_factor"],
        _LLAMA3["original_max_position_embeddings"],
    )
    factor = float(factors.max())
    frequencies = theta ** (-np.arange(0, dims, 2) / dims)
    waves = trained * frequencies / (2 * math.pi)  # within the trained context
    blend = np.clip((waves - low) / (high - low), 0, 1)
    expected = 1 / ((1 - blend) / factor + blend)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise UnsupportedModelError(
            f"{path}: {_ROPE_FACTORS} follows another rule than Llama 3.1's, the only one known"
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def named_tensors(content: GgufContent, names: Mapping[str, str], config: Mapping[str, Any]) -> dict[str, GgufTensor]:
    """The file's tensors by state_dict name; those that no name claims keep the file's.

    `names` maps the state_dict names the model expects to their canonical ones (flashllm/arch/spec.py); the FFN's
    matrices have any.
    """
    model = model_of(content)
    gguf = importlib.import_module("gguf")
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == content.metadata[_ARCHITECTURE])
    table = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    found, left = {}, {name: stored for name, stored in content.tensors.items() if name != _ROPE_FACTORS}
    for name, canonical in names.items():
        key = table.get_name(name, try_suffixes=(".weight", ".bias"))
        if key in left:
            found[name] = _as_transformers(left.pop(key), canonical, model, config)
    return found | {name: GgufTensor(stored) for name, stored in left.items()}


def _as_transformers(stored: StoredTensor, canonical: str, model: GgufModel, config: Mapping[str, Any]) -> GgufTensor:
    part = canonical.split(".")[-2]  # "query", "ffn_norm"
    if model.interleaved and part in ("query", "key"):
        rows = stored.shape[0]
        return GgufTensor(stored, order=paired_rows(rows, config["head_dim"]))
    return GgufTensor(stored, shift=model.norm_shift if part.endswith("norm") else 0.0)


def paired_rows(rows: int, head_dim: int) -> NDArray[np.int64]:
    """The stored row of each row, where a file has pair j of a head in rows 2 j and 2 j + 1."""
    within = np.arange(head_dim).reshape(-1, 2).T.reshape(-1)  # 0, 2, 4, ..., then 1, 3, 5, ...
    heads = np.arange(0, rows, head_dim)
    return (heads[:, None] + within).reshape(-1)
