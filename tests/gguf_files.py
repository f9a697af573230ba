"""GGUF files as llama.cpp's converter would write them, of tiny Hugging Face folders."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

KINDS = gguf.GGMLQuantizationType


def interleaved(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key projection in llama.cpp's order: the two halves of a head alternate."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write_llama(
    folder: Path,
    path: Path,
    kind: str = "F32",
    *,
    metadata: Mapping[str, Any] | None = None,
    drop: str = "",
    split: int = 1,
    tokenizer: bool = True,
) -> Path:
    """The Llama in the Hugging Face folder `folder` as the GGUF file `path`, which is returned.

    Matrices are of `kind`, everything else fp32. `metadata` adds to what the config says; `drop` leaves out a tensor;
    `split` makes so many files, of which `path` is given the first's name.
    """
    config = json.loads((folder / "config.json").read_text())
    state = load_file(folder / "model.safetensors")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    tensors = {}
    for name, tensor in state.items():
        values = tensor.float()
        if ".q_proj" in name or ".k_proj" in name:
            values = interleaved(values, heads if ".q_proj" in name else kv_heads)
        tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] = values.numpy()
    rope = config["rope_parameters"]
    if rope["rope_type"] == "llama3":
        tensors["rope_freqs.weight"] = _rope_factors(config)
    tensors.pop(drop, None)
    paths = (
        [path] if split == 1 else [path.with_name(f"{path.stem}-{i + 1:05}-of-{split:05}.gguf") for i in range(split)]
    )
    for number, each in enumerate(paths):
        writer = gguf.GGUFWriter(each, "llama")
        if number == 0:
            _write_config(writer, config, rope)
            if tokenizer:
                write_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text()))
            for key, value in (metadata or {}).items():
                _write_value(writer, key, value)
        if split > 1:
            writer.add_uint16("split.count", split)
        for name in sorted(tensors)[number::split]:
            values = tensors[name]
            of_kind = KINDS[kind] if values.ndim > 1 else KINDS.F32
            writer.add_tensor(name, gguf.quantize(values, of_kind), raw_dtype=of_kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths[0]


def _write_config(writer: gguf.GGUFWriter, config: dict[str, Any], rope: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])


def _rope_factors(config: dict[str, Any]) -> np.ndarray:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**config), "cpu")
    dims = config["head_dim"]
    plain = config["rope_parameters"]["rope_theta"] ** (-torch.arange(0, dims, 2).double() / dims)
    return (plain / scaled.double()).float().numpy()


def _write_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)


def write_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict[str, Any], rule: str = "gpt-2") -> None:
    """The byte-level BPE of a tokenizer.json."""
    vocabulary = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    special = {token["content"] for token in tokenizer["added_tokens"] if token["special"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list(vocabulary)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in vocabulary]
    )
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(1)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
