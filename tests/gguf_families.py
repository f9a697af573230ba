"""What llama.cpp's converter makes of families with latent attention, states and routers: tensors and metadata.

By its conversion/*.py of 2026. Knows nothing of flashllm.
"""

import re
from typing import Any

import gguf
import torch

ARCHITECTURES = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu"), "deepseek2"),
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "glm4_moe": "glm4moe",
    "ernie4_5_moe": "ernie4_5-moe",
    "minimax_m2": "minimax-m2",
    "granitemoeshared": "granitemoe",
    "hunyuan_v1_moe": "hunyuan-moe",
    "hunyuan_v1_dense": "hunyuan-dense",
    "exaone_moe": "exaone-moe",
    "ministral3": "mistral3",
    "gemma3n_text": "gemma3n",
    "gemma4_text": "gemma4",
    "bailing_moe": "bailingmoe2",
    "granitemoehybrid": "granitehybrid",
    "falcon_h1": "falcon-h1",
    "lfm2_moe": "lfm2moe",
    "kimi_linear": "kimi-linear",
    "cohere2_moe": "cohere2moe",
    "mimo_v2_flash": "mimo2",
    "bamba": "granitehybrid",
}
TABLES = {
    "bamboo": "llama",
    "laguna": "dots1",
    "cohere2moe": "dots1",
    "hy_v3": "dots1",
    "mellum": "qwen3moe",
}  # architectures that the gguf package lacks -> one with such names
WITH_LATENT = ("deepseek2", "kimi-linear", "mistral4", "minicpm3")
_DELTA = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_SIGMOID = ("deepseek_v3", "glm4_moe_lite", "glm4_moe", "dots1", "minimax_m2", "exaone_moe", "afmoe", "laguna")
_SIGMOID = (*_SIGMOID, "bailing_moe", "kimi_linear", "lfm2_moe", "cohere2_moe", "hy_v3", "mimo_v2_flash")
WITH_MAMBA = ("granitemoehybrid", "falcon_h1", "nemotron_h", "bamba")
_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")


def architecture_of(config: dict[str, Any]) -> str:
    """The file's name of an architecture, where more than the model_type says it."""
    if config["model_type"] == "nemotron_h":
        return "nemotron_h_moe" if "moe" in config["layers_block_type"] else "nemotron_h"
    return ARCHITECTURES.get(config["model_type"], config["model_type"])


def family_tensors(state: dict[str, torch.Tensor], config: dict[str, Any], whole: bool) -> dict[str, torch.Tensor]:
    """The state dict as the converter has it before it looks at names. `whole`: latent attention's and
    Qwen3-Next's old form."""
    result = {}
    for name, tensor in state.items():
        architecture = ARCHITECTURES.get(config["model_type"], config["model_type"])
        if name.endswith("kv_b_proj.weight") and architecture in WITH_LATENT[:3] and not whole:
            heads, plain = config["num_attention_heads"], config["qk_nope_head_dim"]
            both = tensor.reshape(heads, plain + config["v_head_dim"], -1)
            result[name.replace("kv_b_proj", "k_b_proj")] = both[:, :plain].transpose(1, 2).contiguous()
            result[name.replace("kv_b_proj", "v_b_proj")] = both[:, plain:].contiguous()
        elif ".linear_attn." in name or (config["model_type"] in _DELTA and name.endswith("norm.weight")):
            kept = whole and name.endswith("in_proj_qkvz.weight")
            result |= {name: tensor} if kept else _delta_tensors(name, tensor, config)
        elif name.endswith("e_score_correction_bias"):
            stem = name.replace(".experts.e_score", ".gate.e_score")  # Laguna's
            result[stem.removesuffix("_bias") + ".bias"] = tensor.reshape(-1)
        elif name.endswith("self_attn.A_log"):
            result[name] = -torch.exp(tensor)
        elif name.endswith("self_attn.dt_bias"):
            result[name.replace("dt_bias", "dt_proj.bias")] = tensor
        elif name.endswith("_sub_norm.weight"):
            result[f"blk.{name.split('.')[2]}.{name.split('.')[-2]}.weight"] = tensor
        elif name.endswith("_conv1d.weight"):
            result[name] = tensor.reshape(1, len(tensor), 1, -1)
        elif re.search(r"block_sparse_moe\.(up|gate|down)_proj", name):  # a dense layer's
            result[name.replace("block_sparse_moe", "mlp")] = tensor
        elif name.endswith("self_attn.g_proj.weight"):
            result[f"blk.{name.split('.')[2]}.attn_gate.weight"] = tensor
        elif name.endswith("conv.conv.weight"):
            result[name] = tensor.squeeze(1)
        elif ".feed_forward.experts." in name:
            result[name.removeprefix("model.")] = tensor
        elif name.endswith("expert_bias"):
            result[name if config["model_type"] == "hy_v3" else f"{name}.bias"] = tensor
        elif name.endswith("_linear.weight") and (part := name.rpartition(".input_linear")[0]):  # Granite's
            gate, up = tensor.chunk(2, dim=-2)
            shared = "mlp.shared_experts" if config.get("num_local_experts") else "mlp"
            owner = part.replace("block_sparse_moe", "mlp.experts").replace("shared_mlp", shared)
            result |= {f"{owner}.gate_proj.weight": gate.contiguous(), f"{owner}.up_proj.weight": up.contiguous()}
        elif name.endswith("shared_mlp.output_linear.weight") and not config["num_local_experts"]:
            result[name.replace("shared_mlp.output_linear", "mlp.down_proj")] = tensor
        elif config["model_type"] in WITH_MAMBA:
            result |= _mamba_tensors(name, tensor, config)
        else:
            result[name] = tensor
    return result


def _mamba_tensors(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Vectors of a head have a dimension more, the mixed norm is by groups; Falcon-H1's multipliers are multiplied."""
    groups = config.get("mamba_n_groups") or config["n_groups"]
    owner, _, part = name.rpartition(".")
    experts = re.match(r"backbone\.(layers\.\d+\.)mixer\.(experts\..+)", name)
    if part == "A_log":
        tensor = -torch.exp(tensor)[:, None]
    elif part == "D":
        tensor = tensor[:, None]
    elif part == "dt_bias":
        name = f"{owner}.dt_proj.bias"
    elif name.endswith("conv1d.weight"):
        tensor = tensor.squeeze(1)
    elif name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        tensor = tensor.reshape(groups, -1)
    elif experts:
        name = f"model.{experts[1]}mlp.{experts[2]}"
    if config["model_type"] == "falcon_h1":
        tensor = tensor * _falcon_factor(name, tensor, config)
    return {name: tensor}


def _falcon_factor(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """By which the converter multiplies a tensor: of the mixer's input a column."""
    of_gate, of_down = config["mlp_multipliers"]
    into = config["attention_in_multiplier"]
    factors = {
        "down_proj.weight": of_down,
        "gate_proj.weight": of_gate,
        "k_proj.weight": config["key_multiplier"] * into,
        "q_proj.weight": into,
        "v_proj.weight": into,
        "o_proj.weight": config["attention_out_multiplier"],
        "out_proj.weight": config["ssm_out_multiplier"],
        "lm_head.weight": config["lm_head_multiplier"],
        "embed_tokens.weight": config["embedding_multiplier"],
    }
    if name.endswith("mamba.in_proj.weight"):
        inner, states = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        rows = torch.tensor([inner, inner, states, states, config["mamba_n_heads"]])
        return torch.tensor(config["ssm_multipliers"]).repeat_interleave(rows)[:, None] * config["ssm_in_multiplier"]
    return torch.tensor(next((by for end, by in factors.items() if name.endswith("." + end) or name == end), 1.0))


def write_mamba(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Sizes of the mixer, and layers without attention or neurons."""
    kinds = config.get("layer_types") or config.get("layers_block_type") or []
    if config["model_type"] == "nemotron_h":
        names = ("conv_kernel", "ssm_state_size", "n_groups", "mamba_num_heads", "mamba_head_dim")
        of_kind = "mlp" if writer.arch == "nemotron_h" else "moe"
        size = config["intermediate_size" if of_kind == "mlp" else "moe_intermediate_size"]
        writer.add_feed_forward_length([size if kind == of_kind else 0 for kind in kinds])
        writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
        if of_kind == "moe":
            writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
    else:
        names = tuple(f"mamba_{name}" for name in ("d_conv", "d_state", "n_groups", "n_heads", "d_head"))
    if config.get("shared_intermediate_size"):
        writer.add_rope_scaling_finetuned(False)
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    kernel, state, groups, heads, dim = (config[name] for name in names)
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_state_size(state)
    writer.add_ssm_group_count(groups)
    writer.add_ssm_inner_size(heads * dim)
    writer.add_ssm_time_step_rank(heads)
    if config["model_type"] == "bamba":
        writer.add_rope_scaling_finetuned(True)
        attends = config["attn_layer_indices"]
        kinds = ["full_attention" if i in attends else "" for i in range(config["num_hidden_layers"])]
    if config["model_type"] != "falcon_h1":
        writer.add_head_count_kv([config["num_key_value_heads"] * (kind == "full_attention") for kind in kinds])


def _delta_tensors(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Norms have 1 added but for the mixed one. Value heads that share a key head lie tiled, but for Qwen3-Next's."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]

    def tiled(rows: torch.Tensor, dim: int) -> torch.Tensor:
        if config["model_type"] == "qwen3_next":
            return rows
        return rows.reshape(keys, values // keys, dim, -1).swapaxes(0, 1).reshape(rows.shape)

    def behind_keys(rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([rows[: 2 * keys * key_dim], tiled(rows[2 * keys * key_dim :], value_dim)])

    owner, _, part = name.partition(".linear_attn.")
    match part:
        case "":
            return {name: tensor + 1}
        case "A_log":
            return {name: tiled(-torch.exp(tensor), 1)}
        case "dt_bias":
            return {f"{owner}.linear_attn.dt_proj.bias": tiled(tensor, 1)}
        case "conv1d.weight":
            return {name: behind_keys(tensor.squeeze(1))}
        case "in_proj_qkv.weight":
            return {name: behind_keys(tensor)}
        case "in_proj_z.weight":
            return {name: tiled(tensor, value_dim)}
        case "in_proj_a.weight" | "in_proj_b.weight":
            return {name: tiled(tensor, 1)}
        case "out_proj.weight":
            return {name: tiled(tensor.T, value_dim).T.contiguous()}
        case "in_proj_qkvz.weight":
            shared = values // keys * value_dim
            parts = tensor.reshape(keys, -1, tensor.shape[1]).split([key_dim, key_dim, shared, shared], dim=1)
            query, key, value, gate = (each.reshape(-1, tensor.shape[1]) for each in parts)
            flat = f"{owner}.linear_attn.in_proj"
            return {f"{flat}_qkv.weight": torch.cat([query, key, value]), f"{flat}_z.weight": gate.contiguous()}
    return {name: tensor}


def write_delta(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Sizes of layers that keep a state."""
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    kinds = config["layer_types"]
    writer.add_array(f"{writer.arch}.attention.recurrent_layers", [kind == "linear_attention" for kind in kinds])
    if config["model_type"] != "qwen3_next":
        writer.add_rope_dimension_sections([11, 11, 10, 0])


def write_convolutions(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Layers that convolve have no key-value heads."""
    heads = config["num_key_value_heads"]
    writer.add_head_count_kv([heads if kind == "full_attention" else 0 for kind in config["layer_types"]])
    writer.add_shortconv_l_cache(config["conv_L_cache"])
    writer.add_layer_norm_rms_eps(config["norm_eps"])


def write_windows(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Which layers have one: EXAONE's, and Laguna's, Mellum's and MiMo's, which turn by another rule."""
    if writer.arch in ("exaone4", "exaone-moe", "laguna", "cohere2moe", "mellum") and config.get("sliding_window"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if writer.arch in ("mellum", "mimo2"):
        writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    if writer.arch == "mimo2":
        count, heads = config["num_hidden_layers"], config["num_key_value_heads"]
        slides = [int(kind == "sliding_attention") for kind in config["layer_types"]]
        slides += [1] * (count - len(slides))  # of those that draft
        writer.add_sliding_window_pattern(slides)
        writer.add_head_count_kv([heads * (1 + each) for each in slides])
        if (scale := config.get("attention_value_scale")) is not None:
            writer.add_float32("mimo2.attention.value_scale", scale)
    if sections := config.get("rope_parameters", {}).get("mrope_section"):
        writer.add_rope_dimension_sections([*sections, 0])
    if writer.arch.startswith(("qwen2vl", "qwen3vl")):
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        pairs = head_dim // 2  # in turn: llama.cpp stills those of no section
        writer.add_rope_dimension_sections([-(-pairs // 3), -(-(pairs - 1) // 3), pairs // 3, 0])
    if writer.arch == "laguna":
        rope = config["rope_parameters"]["sliding_attention"]
        writer.add_rope_freq_base_swa(rope["rope_theta"])
        writer.add_rope_dimension_count_swa(int(config["head_dim"] * rope.get("partial_rotary_factor", 1.0)))


def gemma3n_tensors(state: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The state dict with its streams' maps in one tensor each, and with keys and values of layers that use another's,
    which published files have in vain."""
    result = {
        f"{name}.weight" if name.endswith("_scale") else name: tensor
        for name, tensor in state.items()
        if "projections." not in name
    }
    for name in ("altup_projections", "altup_unembed_projections"):
        parts = [state[f"model.{name}.{stream}.weight"] for stream in range(config["altup_num_inputs"] - 1)]
        result[f"model.{name}.weight"] = torch.stack(parts)
    count = config["num_hidden_layers"]
    for layer in range(count - config["num_kv_shared_layers"], count):
        for part in ("k_proj.weight", "v_proj.weight", "k_norm.weight"):
            result[f"model.layers.{layer}.self_attn.{part}"] = state[f"model.layers.0.self_attn.{part}"]
    return result


def write_gemma3n(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Streams, shared keys, cut gates."""
    writer.add_altup_active_idx(config["altup_active_idx"])
    writer.add_altup_num_inputs(config["altup_num_inputs"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    shares = torch.tensor(config["activation_sparsity_pattern"])
    writer.add_activation_sparsity_scale(torch.distributions.Normal(0, 1).icdf(shares).tolist())
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])


def _gemma4_full(config: dict[str, Any]) -> dict[str, int]:
    """Sizes of layers that see everything, as the last layer does."""
    return config["per_layer_config"][str(config["num_hidden_layers"] - 1)]


def write_gemma4(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Sizes of layers with a window and of those that see everything."""
    count, shared, full = config["num_hidden_layers"], config["num_kv_shared_layers"], _gemma4_full(config)
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_sliding_window_pattern(slides)
    writer.add_key_length(full["head_dim"])
    writer.add_value_length(full["head_dim"])
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    writer.add_rope_dimension_count(full["head_dim"])
    writer.add_rope_dimension_count_swa(config["head_dim"])
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    width, heads = config["intermediate_size"], config["num_key_value_heads"]
    if config["use_double_wide_mlp"]:
        writer.add_feed_forward_length([width] * (count - shared) + [2 * width] * shared)
    if "num_key_value_heads" in full:
        writer.add_head_count_kv([heads if each else full["num_key_value_heads"] for each in slides])


def gemma4_tensors(state: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The state dict, and by how much each pair turns slower in layers that see everything: the last ones do not."""
    bare = ("layer_scalar", ".experts.gate_up_proj", ".experts.down_proj")
    pairs = _gemma4_full(config)["head_dim"] // 2
    turning = int(pairs * config["rope_parameters"]["full_attention"]["partial_rotary_factor"])
    factors = {"rope_freqs.weight": torch.tensor([1.0] * turning + [1e30] * (pairs - turning))}
    return {f"{name}.weight" if name.endswith(bare) else name: tensor for name, tensor in state.items()} | factors


def mistral4_tensors(state: dict[str, torch.Tensor], apart: bool) -> dict[str, torch.Tensor]:
    """The state dict, whose experts are in one tensor each, outputs first; `apart`: gate and up in two."""
    result = {}
    for name, tensor in state.items():
        if apart and name.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, dim=1)
            result |= {name.replace("gate_up", part) + ".weight": each for part, each in (("gate", gate), ("up", up))}
        else:
            result[name + ".weight" * name.endswith(("experts.gate_up_proj", "experts.down_proj"))] = tensor
    return result


def write_channels(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Kimi Linear's layers that keep a state have no heads of keys and values."""
    writer.add_head_count_kv([int(kind == "full_attention") for kind in config["layer_types"]])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_kda_head_dim(config["linear_head_dim"])


def write_latent(writer: gguf.GGUFWriter, config: dict[str, Any], whole: bool) -> None:
    """Sizes of latent attention: those of the plain heads in the old form."""
    rotated, rank = config["qk_rope_head_dim"], config["kv_lora_rank"]
    keys, values = config["qk_nope_head_dim"] + rotated, config["v_head_dim"]
    writer.add_kv_lora_rank(rank)
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_rope_dimension_count(rotated)
    if whole and config["model_type"] != "kimi_linear":
        writer.add_key_length(keys)
        if config["model_type"] != "minicpm3":  # whose values are as wide as the heads share out the width
            writer.add_value_length(values)
    else:
        writer.add_key_length(rank + rotated)
        writer.add_value_length(rank)
        writer.add_key_length_mla(keys)
        writer.add_value_length_mla(values)
    scale = (config.get("rope_parameters") or {}).get("mscale_all_dim")
    if scale is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * scale)


def write_growth(writer: gguf.GGUFWriter, rope: dict[str, Any]) -> None:
    """How Mistral's queries grow; of Mistral 4 the converter says nothing, whatever the config has."""
    if (rate := rope.get("llama_4_scaling_beta")) is not None and (writer.arch != "mistral4" or rate != 0.1):
        writer.add_attn_temperature_scale(rate)
        if writer.arch != "mistral3":
            writer.add_attn_temperature_length(rope["original_max_position_embeddings"])
    if writer.arch == "mistral3" and "mscale_all_dim" in rope:
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])


def write_router(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """What there is of experts' number, choice and weights."""
    count = next((config[key] for key in _COUNTS if config.get(key)), None)
    if count is None or writer.arch == "nemotron_h":
        if ARCHITECTURES.get(config["model_type"]) == "deepseek2":  # Youtu: all layers are dense
            writer.add_leading_dense_block_count(config["num_hidden_layers"])
            writer.add_expert_feed_forward_length(config["intermediate_size"])
            writer.add_expert_shared_count(0)
        return
    writer.add_expert_count(count)
    keys = ("moe_k", "moe_topk", "top_k_experts", "num_experts_per_tok", "num_experts_per_token")
    writer.add_expert_used_count(next(config[key] for key in keys if key in config))
    if writer.arch == "gpt-oss":  # llama.cpp asks for it
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    for key, add in (
        ("moe_intermediate_size", writer.add_expert_feed_forward_length),
        ("n_shared_experts", writer.add_expert_shared_count),
        ("moe_num_shared_experts", writer.add_expert_shared_count),
        ("num_shared_experts", writer.add_expert_shared_count),
        ("num_dense_layers", writer.add_leading_dense_block_count),
        ("route_scale", writer.add_expert_weights_scale),
        ("shared_intermediate_size", writer.add_expert_shared_feed_forward_length),
        ("shared_expert_intermediate_size", writer.add_expert_shared_feed_forward_length),
        ("first_k_dense_replace", writer.add_leading_dense_block_count),
        ("moe_layer_start_index", writer.add_leading_dense_block_count),
        ("moe_layer_interval", writer.add_interleave_moe_layer_step),
        ("n_group", writer.add_expert_group_count),
        ("num_expert_group", writer.add_expert_group_count),
        ("topk_group", writer.add_expert_group_used_count),
        ("routed_scaling_factor", writer.add_expert_weights_scale),
        ("moe_routed_scaling_factor", writer.add_expert_weights_scale),
        ("router_scaling_factor", writer.add_expert_weights_scale),
    ):
        if config.get(key) is not None:
            add(config[key])
    if config.get("moe_num_shared_experts"):
        size = config["moe_num_shared_experts"] * config["moe_intermediate_size"]
        writer.add_expert_shared_feed_forward_length(size)
    if config.get("mlp_layer_types") and "first_k_dense_replace" not in config:
        writer.add_leading_dense_block_count(config["mlp_layer_types"].count("dense"))
    if config["model_type"] in _SIGMOID:
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if config["model_type"] == "hy_v3":
        writer.add_expert_shared_feed_forward_length(config["num_shared_experts"] * config["moe_intermediate_size"])
    if config["model_type"] == "hunyuan_v1_moe":
        writer.add_expert_shared_feed_forward_length(config["intermediate_size"])
    if config["model_type"] in ("minimax_m2", "hunyuan_v1_moe", "cohere2_moe"):
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    norms = config.get("norm_topk_prob") or config["model_type"] in ("afmoe", "laguna", "bailing_moe", "hy_v3")
    if config["model_type"] in (*_SIGMOID, "deepseek_v2", "mistral4", "nemotron_h") and norms:
        writer.add_expert_weights_norm(True)
