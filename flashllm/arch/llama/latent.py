"""Models under Llama's names with multi-head latent attention (DeepSeek-AI, 2024: DeepSeek-V2).

A checkpoint's `kv_b_proj` has, head by head, the rows that make a plain key of the latent row and those that make a
value. The plain rows are read turned, so that they bring a query to the latent space.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

from flashllm.arch.family import decoder_block, linear_tensors, num_layers, says
from flashllm.arch.llama.names import row
from flashllm.arch.mixers import Latent, check_size
from flashllm.arch.rotary import rope_parameters
from flashllm.arch.spec import BlockSpec, Config, check_number
from flashllm.arch.tensors import ArchitectureSpec, Part, ResidentTensor

_EPSILON = 1e-6  # of the latent norms, whatever the config says of the others: the vendors' code has it


def latent_block(
    config: Config,
    *,
    norm_epsilon: float = _EPSILON,
    rotary_style: Literal["half", "interleaved"] | None = None,
    **traits: Any,
) -> BlockSpec:
    """`decoder_block` with latent attention. `norm_epsilon`: of the latent norms; `rotary_style`: where the config has
    no `rope_interleave`."""
    rank, rotated, plain = (check_size(key, config[key]) for key in _SIZES[:3])
    if rotary_style is None:
        rotary_style = "interleaved" if config["rope_interleave"] else "half"
    keys = ("rope_scaling", "rope_parameters", "partial_rotary_factor")
    bare = {key: value for key, value in config.items() if key not in keys}
    rope = {key: value for key, value in rope_parameters(config).items() if key != "partial_rotary_factor"}
    return decoder_block(
        {**bare, "rope_parameters": rope, "head_dim": rotated, "num_key_value_heads": 1},
        head_dim=rank + rotated,
        query_scale=(plain + rotated) ** -0.5 * _yarn_scale(rope) ** 2,
        rotary_style=rotary_style,
        latent=Latent(
            rank=rank,
            plain_dim=plain,
            value_dim=check_size("v_head_dim", config["v_head_dim"]),
            query_rank=config["q_lora_rank"],
            norm_epsilon=norm_epsilon,
        ),
        **traits,
    )


def _yarn_scale(rope: Mapping[str, Any]) -> float:
    """Factor of queries, and of keys, of a rope type that scales all of their dimensions; 1 of others."""
    if rope.get("rope_type", rope.get("type", "default")) == "default" or not rope.get("mscale_all_dim"):
        return 1.0
    factor, scale = check_number("factor", rope.get("factor")), check_number("mscale_all_dim", rope["mscale_all_dim"])
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


_SIZES = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "num_attention_heads")


def _plain_rows(config: Config) -> Part:
    """Rows of `kv_b_proj` that make the heads' plain keys, to be read turned."""
    _, _, plain, value, heads = (check_size(key, config[key]) for key in _SIZES)
    return Part(count=plain, step=plain + value, repeats=heads, turned=True)


def _value_rows(config: Config) -> Part:
    _, _, plain, value, heads = (check_size(key, config[key]) for key in _SIZES)
    return Part(first=plain, count=value, step=plain + value, repeats=heads)


def _has_two(config: Config) -> bool:
    """Models whose query's projection has two halves."""
    return config["q_lora_rank"] is not None


def _is_apart(config: Config) -> bool:
    """Models whose `kv_b_proj` is in two: as llama.cpp multiplies it (2025), so that codes stay what they are."""
    return bool(config.get("kv_b_apart"))


LATENT = (
    ResidentTensor(name="layers.{i}.query_down.weight", source="self_attn.q_a_proj.weight", when=_has_two),
    ResidentTensor(
        name="layers.{i}.query_down.bias",
        source="self_attn.q_a_proj.bias",
        when=lambda config: _has_two(config) and bool(config["attention_bias"]),
    ),
    ResidentTensor(
        name="layers.{i}.query.weight", source="self_attn.q_proj.weight", when=lambda config: not _has_two(config)
    ),
    ResidentTensor(name="layers.{i}.query.weight", source="self_attn.q_b_proj.weight", when=_has_two),
    *linear_tensors("layers.{i}.key", "self_attn.kv_a_proj_with_mqa", bias=says("attention_bias")),
    ResidentTensor(name="layers.{i}.key_up.weight", source="self_attn.k_b_proj.weight", when=_is_apart),
    ResidentTensor(name="layers.{i}.value.weight", source="self_attn.v_b_proj.weight", when=_is_apart),
    *(
        ResidentTensor(
            name=f"layers.{{i}}.{name}.weight",
            source="self_attn.kv_b_proj.weight",
            when=lambda config: not _is_apart(config),
            part=part,
        )
        for name, part in (("key_up", _plain_rows), ("value", _value_rows))
    ),
    *linear_tensors("layers.{i}.out", "self_attn.o_proj", bias=says("attention_bias")),
)
LATENT_NORMS = {"query_norm": "self_attn.q_a_layernorm", "key_norm": "self_attn.kv_a_layernorm"}


def _row(model_type: str, **others: Any) -> ArchitectureSpec:
    values: dict[str, Any] = {"block": latent_block, "attention": LATENT, "head_norms": LATENT_NORMS, **others}
    return row(model_type, **values)


# Youtu (Tencent, 2026).
YOUTU = _row("youtu")


# MiniCPM 3 (OpenBMB, 2024): embedding, residuals and logits are scaled.


def _minicpm3(config: Config) -> BlockSpec:
    width = check_size("hidden_size", config["hidden_size"])
    depth, base = config["scale_depth"], config["dim_model_base"]
    return latent_block(
        config,
        rotary_style="half",
        embedding_scale=check_number("scale_emb", config["scale_emb"]),
        residual_scale=1.0 if depth is None else check_number("scale_depth", depth) / math.sqrt(num_layers(config)),
        logit_scale=1.0 if base is None else check_size("dim_model_base", base) / width,
    )


def _of_width(config: Config) -> Mapping[str, Any]:
    if config["v_head_dim"] is not None:
        return {}
    width, heads = (check_size(key, config[key]) for key in ("hidden_size", "num_attention_heads"))
    return {"v_head_dim": width // heads}


MINICPM3 = _row("minicpm3", block=_minicpm3, derived=_of_width, ffn_bias=says("mlp_bias"))

LATENT_DENSE = (YOUTU, MINICPM3)
