"""GGUF files as llama.cpp's converter would write them, of tiny Hugging Face folders."""

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf_families import ARCHITECTURES as FAMILIES
from gguf_families import (
    TABLES,
    WITH_LATENT,
    WITH_MAMBA,
    architecture_of,
    family_tensors,
    gemma3n_tensors,
    gemma4_tensors,
    mistral4_tensors,
    write_channels,
    write_convolutions,
    write_delta,
    write_gemma3n,
    write_gemma4,
    write_growth,
    write_latent,
    write_mamba,
    write_router,
    write_windows,
)
from safetensors.torch import load_file

KINDS = gguf.GGMLQuantizationType
ARCHITECTURES = {"mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss"} | {
    **FAMILIES,
    "phi": "phi2",
    "gemma3_text": "gemma3",
    "gpt_neox": "gptneox",
    "cohere": "command-r",
}  # other names
_INTERLEAVED = (
    *("llama", "bamboo", "granite", "granitemoe", "granitehybrid", "arcee", "smollm3"),
    *("nemotron_h", "nemotron_h_moe", "mistral3"),
)
_GEMMA4 = {"scale": "ffn_gate_inp.scale", "per_expert_scale": "ffn_down_exps.scale"}  # which its table lacks
_SHIFTED = ("gemma", "gemma2", "gemma3", "nemotron")


def interleaved(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key projection in llama.cpp's order: the two halves of a head alternate."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def halved(rows: torch.Tensor, heads: int, share: float) -> torch.Tensor:
    """Rows of GLM-4V's query or key projection in llama.cpp's order: the pairs that are turned lie in two halves."""
    within = rows.reshape(heads, -1, *rows.shape[1:]).clone()
    turned = int(within.shape[1] * share)
    within[:, :turned] = torch.cat([within[:, :turned:2], within[:, 1:turned:2]], dim=1)
    return within.reshape(rows.shape)


def ungrouped(rows: torch.Tensor, heads: int, groups: int) -> torch.Tensor:
    """Rows of a fused projection in llama.cpp's order: from groups of queries, key, value to all of each."""
    dim = rows.shape[0] // (heads + 2 * groups)
    grouped = rows.reshape(groups, heads // groups + 2, dim, *rows.shape[1:])
    parts = (grouped[:, :-2], grouped[:, -2], grouped[:, -1])
    return torch.cat([part.reshape(-1, *rows.shape[1:]) for part in parts])


# Where a block has an fp16 scale or minimum, and about what its largest weight is beside that.
HALVES = {
    "Q4_K": ((0, 2), 32 * 8),
    "Q5_K": ((0, 2), 32 * 8),
    "Q6_K": ((208,), 64 * 16),
    "Q2_K": ((80, 82), 32),
    "Q3_K": ((108,), 64),
    "IQ4_NL": ((0,), 100),
    "IQ4_XS": ((0,), 100 * 16),
    "IQ3_S": ((0,), 15 * 16),
    "IQ3_XXS": ((0,), 15 * 8),
    "IQ2_XXS": ((0,), 5 * 16),
    "IQ2_XS": ((0,), 5 * 16),
    "IQ2_S": ((0,), 5 * 16),
    "IQ1_S": ((0,), 8),
    "IQ1_M": ((48,), 8),
    "TQ1_0": ((52,), 1),
    "TQ2_0": ((64,), 2),
}


def coded(values: np.ndarray, kind: str) -> np.ndarray:
    """`values` in this kind; random blocks of about their size where the gguf package cannot quantise."""
    if kind == "NVFP4":
        return nvfp4_blocks(values)
    if kind not in HALVES:
        return gguf.quantize(values, KINDS[kind])
    weights, nbytes = gguf.GGML_QUANT_SIZES[KINDS[kind]]
    random = np.random.default_rng(values.size)
    blocks = random.integers(0, 256, (values.size // weights, nbytes), np.uint8)
    places, largest = HALVES[kind]
    for at in places:
        put_halves(blocks, kind, at, values.std() * random.uniform(0.5, 1.5, len(blocks)) / largest)
    return blocks.reshape(*values.shape[:-1], -1)


def put_halves(blocks: np.ndarray, kind: str, at: int, values: np.ndarray) -> None:
    """A number of each block in fp16; IQ1_M has it in the upper four bits of four others."""
    halves = values.astype("<f2").reshape(-1, 1)
    if kind != "IQ1_M":
        blocks[:, at : at + 2] = halves.view(np.uint8)
        return
    words = blocks[:, at : at + 8].view("<u2")
    words[:] = words & 0xFFF | (halves.view("<u2") >> [0, 4, 8, 12] & 15) << 12


def nvfp4_blocks(values: np.ndarray) -> np.ndarray:
    """`values` in NVFP4, whose largest of 16 become 6 times a number in E4M3."""
    rule = gguf.quants.NVFP4
    groups = values.reshape(-1, 4, 16)
    bytes_of = rule.fp32_to_ue4m3(np.abs(groups).max(axis=2) / 6)
    scales = rule.ue4m3_to_fp32(bytes_of)[:, :, None]
    steps = groups / np.where(scales > 0, scales, 1)
    table = np.asarray(rule.kvalues, np.float32)
    codes = np.abs(steps[..., None] - table).argmin(axis=-1).astype(np.uint8)
    packed = (codes[:, :, :8] | codes[:, :, 8:] << 4).reshape(len(groups), 32)
    return np.concatenate([bytes_of.astype(np.uint8), packed], axis=1).reshape(*values.shape[:-1], -1)


def whole_scales(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(a scale of a tensor, or of each expert, no power of two; the values that are multiplied by it)."""
    every = tuple(range(values.ndim - 2, values.ndim))
    scales = np.asarray(np.abs(values).max(axis=every) / 2000, np.float32).reshape(-1)
    return scales, (values / scales.reshape(-1, *[1] * (values.ndim - 1))).astype(np.float32)


def write_gguf(
    folder: Path,
    path: Path,
    kind: str | Callable[[str], str] = "F32",
    *,
    metadata: Mapping[str, Any] | None = None,
    drop: str = "",
    split: int = 1,
    tokenizer: bool = True,
    predictors: Mapping[str, np.ndarray] | None = None,
    vectors: str = "F32",
    alignment: int = 32,
    whole_latent: bool = False,
    fused_experts: bool = False,
    drafting: bool = False,
    architecture: str | None = None,
) -> Path:
    """The model in the Hugging Face folder `folder` as the GGUF file `path`, which is returned.

    Matrices are of `kind`, or of what it says of their name in the file; everything else is of `vectors`. `metadata`
    adds to what the config says, and `alignment` is the data's; `predictors` (fc1, fc2) make it a file of PowerInfer's;
    `whole_latent`: latent attention, and Qwen3-Next's projections, in their old form; `fused_experts`: gate and up in
    one; `drafting`: one layer more, which drafts tokens; `architecture`: another name of the model's, as a wrapper of
    it has; `drop` leaves out a tensor; `split` makes so many files, of which `path` is given the first's name.
    """
    config = json.loads((folder / "config.json").read_text())
    config.setdefault("num_hidden_layers", len(config.get("layers_block_type") or ()))
    architecture = architecture or name_of(config)
    state = load_file(folder / "model.safetensors")
    tensors = {name: tensor.numpy() for name, tensor in file_tensors(state, config, whole_latent).items()}
    tensors |= _rope_tensors(config)
    if predictors is not None:  # its convert.py, postprocess_transpose
        tensors = {
            name.replace("ffn_down.", "ffn_down_t."): np.ascontiguousarray(values.T) if "ffn_down." in name else values
            for name, values in tensors.items()
        } | dict(predictors)
    tensors.pop(drop, None)
    if drafting:
        layers, own = config["num_hidden_layers"], (metadata or {})
        last = f"blk.{layers - 1}."
        tensors |= {f"blk.{layers}." + name.removeprefix(last): tensors[name] for name in tensors if last in name}
        tensors[f"blk.{layers}.nextn.enorm.weight"] = np.ones(config["hidden_size"], np.float32)
        metadata = {**own, f"{architecture}.nextn_predict_layers": 1}
        config["num_hidden_layers"] += 1
    for name in [name for name in tensors if fused_experts and "ffn_gate_exps" in name]:
        both = [tensors.pop(name), tensors.pop(name.replace("gate", "up"))]
        tensors[name.replace("gate", "gate_up")] = np.concatenate(both, axis=1)
    paths = [path]
    if split > 1:
        paths = [path.with_name(f"{path.stem}-{number:05}-of-{split:05}.gguf") for number in range(1, split + 1)]
    for number, each in enumerate(paths):
        writer = gguf.GGUFWriter(each, architecture)
        writer.data_alignment = alignment
        if number == 0:
            write_config(writer, architecture, config, whole_latent)
            if tokenizer:
                write_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text()))
            for key, value in (metadata or {}).items():
                _write_value(writer, key, value)
        if split > 1:
            writer.add_uint16("split.count", split)
        for name in sorted(tensors)[number::split]:
            values = tensors[name]
            vectors_of = (".bias", ".ssm_a", ".ssm_d", ".ssm_norm.weight", "shortconv.conv.weight")
            is_matrix = values.ndim > 1 and not name.endswith(vectors_of)
            of_kind = (kind if isinstance(kind, str) else kind(name)) if is_matrix else vectors
            if of_kind == "NVFP4":
                scales, values = whole_scales(values)
                writer.add_tensor(name.replace(".weight", ".scale"), scales)
                writer.add_tensor(name.replace(".weight", ".input_scale"), np.full_like(scales, 0.7))
            writer.add_tensor(name, coded(values, of_kind), raw_dtype=KINDS[of_kind])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        if predictors is not None:
            with open(each, "r+b") as file:
                file.write(b"PWRI")
    return paths[0]


def name_of(config: dict[str, Any]) -> str:
    """The architecture's name in files."""
    return ARCHITECTURES.get(config["model_type"]) or architecture_of(config)


def file_tensors(
    state: dict[str, torch.Tensor], config: dict[str, Any], whole: bool = False
) -> dict[str, torch.Tensor]:
    """The state dict under the file's names, in fp32; tensors without data ("meta") stay so."""
    architecture = name_of(config)
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    if architecture == "falcon":
        groups = config["num_kv_heads"] if config["new_decoder_architecture"] else 1 if config["multi_query"] else heads
    table, rope = TABLES.get(architecture, architecture), config.get("rope_parameters", {})
    key = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == table)
    names = gguf.get_tensor_name_map(key, config["num_hidden_layers"])
    tensors = {}
    if architecture == "gemma4":
        state = gemma4_tensors(state, config)
    if architecture == "gemma3n":
        state = gemma3n_tensors(state, config)
    if config["model_type"] == "mistral4":
        state = mistral4_tensors(state, apart=architecture == "deepseek2")
    for name, tensor in family_tensors(_merged(state), config, whole).items():
        values = tensor.float()
        if architecture in _INTERLEAVED and (".q_proj" in name or ".k_proj" in name):
            values = interleaved(values, heads if ".q_proj" in name else groups)
        if architecture == "glm4" and "mrope_section" in rope and (".q_proj" in name or ".k_proj" in name):
            values = halved(values, heads if ".q_proj" in name else groups, rope["partial_rotary_factor"])
        if architecture in ("falcon", "gptneox") and ".query_key_value" in name:
            values = ungrouped(values, heads, groups)
        if architecture in _SHIFTED and name.endswith("norm.weight"):
            values = values + 1
        stored = _GEMMA4.get(name.rpartition("router.")[2]) if architecture == "gemma4" else None
        if stored is not None:
            stored = f"blk.{name.split('.')[2]}.{stored}"
        else:
            is_stored = name.startswith(("blk.", "rope_"))
            stored = name if is_stored else names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        tensors[stored + ".weight" if name.endswith((".sinks", "sink_bias")) else stored] = values
    return tensors


def _rope_tensors(config: dict[str, Any]) -> dict[str, np.ndarray]:
    tensors = {}
    if config.get("rope_parameters", {}).get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = _rope_factors(config)
    if config.get("rope_parameters", {}).get("rope_type") == "longrope":
        for length in ("short", "long"):
            factors = config["rope_parameters"][f"{length}_factor"]
            tensors[f"rope_factors_{length}.weight"] = np.array(factors, np.float32)
    return tensors


def _merged(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each expert's matrices together, as llama.cpp's converter has them before it looks at names."""
    for name in [
        name for name in state if ".experts." in name and "_proj" in name and not name.endswith((".weight", ".bias"))
    ]:
        owner, _, kind = name.rpartition(".")  # gpt-oss's: all together, inputs first, gate and up one in turn
        tensor = state.pop(name)
        ending = "bias" if kind.endswith("_bias") else "weight"
        rows = tensor if ending == "bias" else tensor.transpose(1, 2)
        parts = {"down_proj": rows} if "down" in kind else {"gate_proj": rows[:, ::2], "up_proj": rows[:, 1::2]}
        state |= {f"{owner}.{part}.{ending}": values.contiguous() for part, values in parts.items()}
    single = re.compile(r".*\.experts\.\d+\..*")
    merged = {name: tensor for name, tensor in state.items() if single.fullmatch(name) is None}
    for name in state:
        match = re.fullmatch(r"(.*\.experts\.)0\.(\w+)\.weight", name)
        if match is not None:
            count = sum(other.startswith(match[1]) and other.endswith(f".{match[2]}.weight") for other in state)
            merged[f"{match[1]}{match[2]}.weight"] = torch.stack(
                [state[f"{match[1]}{expert}.{match[2]}.weight"] for expert in range(count)]
            )
    return {
        name: tensor.squeeze(0) if name.endswith("shared_expert_gate.weight") else tensor
        for name, tensor in merged.items()
    }


def write_config(writer: gguf.GGUFWriter, architecture: str, config: dict[str, Any], whole: bool = False) -> None:
    """The metadata of what the config says."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config.get("max_position_embeddings") or config["model_max_length"])
    writer.add_embedding_length(config["hidden_size"])
    if width := config.get("intermediate_size") or config.get("ffn_hidden_size"):
        writer.add_feed_forward_length(width)
    writer.add_head_count(config.get("num_attention_heads_per_layer") or heads)
    kv_heads = config.get("num_key_value_heads") or config.get("num_kv_heads") or heads
    one = config.get("multi_query") and not config.get("new_decoder_architecture")
    if "conv_L_cache" in config:
        write_convolutions(writer, config)
    elif architecture == "kimi-linear":
        write_channels(writer, config)
    elif architecture != "mimo2":  # whose are of each layer
        writer.add_head_count_kv(1 if one or (architecture in ("deepseek2", "mistral4") and not whole) else kv_heads)
    write_router(writer, config)
    write_windows(writer, config)
    if "linear_num_value_heads" in config:
        write_delta(writer, config)
    if config["model_type"] in WITH_MAMBA:
        write_mamba(writer, config)
    for key in ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"):
        if (
            key in config
            and "conv_L_cache" not in config
            and not (key == "layer_norm_eps" and config.get("rms_norm_eps"))
        ):
            writer.add_layer_norm_eps(config[key])
    if config.get("rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    usual = 0.334 if architecture == "mimo2" else 1.0
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", usual))
    share = (config.get("rotary_dim") or share * head_dim) / head_dim
    if architecture in WITH_LATENT:
        write_latent(writer, config, whole or architecture == "minicpm3")
    else:
        writer.add_key_length(head_dim)
        writer.add_value_length(config.get("v_head_dim") or head_dim)
        writer.add_rope_dimension_count(int(head_dim * share))
    if architecture == "gemma4":
        write_gemma4(writer, config)
    if architecture == "gemma3n":
        write_gemma3n(writer, config)
    writer.add_rope_freq_base(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if "original_max_position_embeddings" in rope:
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "attention_factor" in rope:
            writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])
    write_growth(writer, rope)
    if architecture == "phi3" or (architecture == "phimoe" and rope.get("rope_type") == "longrope"):
        trained = config["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(trained)
        if rope.get("rope_type") == "longrope":
            scale = config["max_position_embeddings"] / trained
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(trained)))
    for key, add in (
        ("sliding_window", writer.add_sliding_window),
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
        ("use_parallel_residual", writer.add_parallel_residual),
        ("attention_multiplier", writer.add_attention_scale),
        ("embedding_multiplier", writer.add_embedding_scale),
        ("residual_multiplier", writer.add_residual_scale),
        ("logits_scaling", writer.add_logit_scale),
        ("logit_scale", writer.add_logit_scale),
    ):
        if config.get(key) is not None:
            add(config[key])


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
            (writer.add_uint32 if value >= 0 else writer.add_int32)(key, value)
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
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list(vocabulary)
    writer.add_token_types([control if token in special else normal for token in vocabulary])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(1)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
