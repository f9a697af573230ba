"""What llama.cpp's converter makes of families with latent attention, states and routers: tensors and metadata.

By its conversion/*.py of 2026. Knows nothing of flashllm.
"""

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
}
WITH_LATENT = ("deepseek2", "minicpm3")
_SIGMOID = ("deepseek_v3", "glm4_moe_lite", "glm4_moe", "dots1", "minimax_m2")
_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")


def family_tensors(state: dict[str, torch.Tensor], config: dict[str, Any], whole: bool) -> dict[str, torch.Tensor]:
    """The state dict as the converter has it before it looks at names. `whole`: latent attention's old form."""
    result = {}
    for name, tensor in state.items():
        if name.endswith("kv_b_proj.weight") and ARCHITECTURES.get(config["model_type"]) == "deepseek2" and not whole:
            heads, plain = config["num_attention_heads"], config["qk_nope_head_dim"]
            both = tensor.reshape(heads, plain + config["v_head_dim"], -1)
            result[name.replace("kv_b_proj", "k_b_proj")] = both[:, :plain].transpose(1, 2).contiguous()
            result[name.replace("kv_b_proj", "v_b_proj")] = both[:, plain:].contiguous()
        elif name.endswith("e_score_correction_bias"):
            result[name.removesuffix("_bias") + ".bias"] = tensor.reshape(-1)
        else:
            result[name] = tensor
    return result


def write_latent(writer: gguf.GGUFWriter, config: dict[str, Any], whole: bool) -> None:
    """Sizes of latent attention: those of the plain heads in the old form."""
    rotated, rank = config["qk_rope_head_dim"], config["kv_lora_rank"]
    keys, values = config["qk_nope_head_dim"] + rotated, config["v_head_dim"]
    writer.add_kv_lora_rank(rank)
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_rope_dimension_count(rotated)
    if whole:
        writer.add_key_length(keys)
        if config["model_type"] != "minicpm3":  # whose values are as wide as the heads share out the width
            writer.add_value_length(values)
    else:
        writer.add_key_length(rank + rotated)
        writer.add_value_length(rank)
        writer.add_key_length_mla(keys)
        writer.add_value_length_mla(values)
    scale = config["rope_parameters"].get("mscale_all_dim")
    if scale is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * scale)


def write_router(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """What there is of experts' number, choice and weights."""
    count = next((config[key] for key in _COUNTS if config.get(key)), None)
    if count is None:
        if ARCHITECTURES.get(config["model_type"]) == "deepseek2":  # Youtu: all layers are dense
            writer.add_leading_dense_block_count(config["num_hidden_layers"])
            writer.add_expert_feed_forward_length(config["intermediate_size"])
            writer.add_expert_shared_count(0)
        return
    writer.add_expert_count(count)
    writer.add_expert_used_count(config["moe_k"] if "moe_k" in config else config["num_experts_per_tok"])
    for key, add in (
        ("moe_intermediate_size", writer.add_expert_feed_forward_length),
        ("n_shared_experts", writer.add_expert_shared_count),
        ("moe_num_shared_experts", writer.add_expert_shared_count),
        ("shared_expert_intermediate_size", writer.add_expert_shared_feed_forward_length),
        ("first_k_dense_replace", writer.add_leading_dense_block_count),
        ("moe_layer_start_index", writer.add_leading_dense_block_count),
        ("moe_layer_interval", writer.add_interleave_moe_layer_step),
        ("n_group", writer.add_expert_group_count),
        ("topk_group", writer.add_expert_group_used_count),
        ("routed_scaling_factor", writer.add_expert_weights_scale),
    ):
        if config.get(key) is not None:
            add(config[key])
    if config.get("mlp_layer_types"):
        writer.add_leading_dense_block_count(config["mlp_layer_types"].count("dense"))
    if config["model_type"] in _SIGMOID:
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if config["model_type"] == "minimax_m2":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if config["model_type"] in (*_SIGMOID, "deepseek_v2") and config.get("norm_topk_prob"):
        writer.add_expert_weights_norm(True)
