"""Decoders most of whose layers keep a state by the gated delta rule (Yang et al., 2024) in the place of keys and
values: Qwen3-Next, and Qwen 3.5 and later (Qwen Team, 2025, 2026). Every other layer attends, its output gated.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from flashllm.arch.experts.plain import dense_layers
from flashllm.arch.experts.row import GATED_SHARED, experts_of, row
from flashllm.arch.family import (
    When,
    always,
    attending,
    decoder_block,
    head_size,
    keeping,
    kv_heads,
    linear_tensors,
    num_layers,
    says,
)
from flashllm.arch.llama.names import BEFORE, BEHIND, BIASED
from flashllm.arch.llama.names import row as dense
from flashllm.arch.mixers import DeltaRule, check_size
from flashllm.arch.mixture import ExpertsSpec, RouterSpec
from flashllm.arch.rotary import DEFAULT_THETA, rope_parameters
from flashllm.arch.spec import BlockSpec, Config, check_usual
from flashllm.arch.tensors import Part, ResidentTensor, delta_rules, whole


def _rule(config: Config) -> DeltaRule:
    def size(key: str) -> int:
        return check_size(f"linear_{key}", config[f"linear_{key}"])

    return DeltaRule(
        key_heads=size("num_key_heads"),
        value_heads=size("num_value_heads"),
        key_dim=size("key_head_dim"),
        value_dim=size("value_head_dim"),
        kernel=size("conv_kernel_dim"),
        tiled=bool(config.get("linear_value_heads_tiled")),
    )


# Where the tensors are


def _attention() -> tuple[ResidentTensor, ...]:
    """Tensors of the layers that attend. A query tensor has, head by head, the rows of the query, then the gate's."""

    def of_heads(part: int) -> Callable[[Config], Part]:
        def rows(config: Config) -> Part:
            width = head_size(config)
            return Part(first=part * width, count=width, step=2 * width, repeats=config["num_attention_heads"])

        return rows

    def of_keys(config: Config) -> Part:
        return Part(count=kv_heads(config) * head_size(config))

    bias = says("attention_bias")
    tensors = (
        *linear_tensors("layers.{i}.query", "self_attn.q_proj", bias=bias, part=of_heads(0)),
        *linear_tensors("layers.{i}.out_gate", "self_attn.q_proj", bias=bias, part=of_heads(1)),
        *linear_tensors("layers.{i}.key", "self_attn.k_proj", bias=bias, part=of_keys),
        *linear_tensors("layers.{i}.value", "self_attn.v_proj", bias=bias, part=of_keys),
        *linear_tensors("layers.{i}.out", "self_attn.o_proj", bias=bias),
    )
    return attending(tensors)


def _projections(
    sources: Mapping[str, tuple[str, Callable[[Config], Part]]], when: When = always
) -> tuple[ResidentTensor, ...]:
    """Projections of the other layers' input: each is some rows of a tensor within the layer."""
    return tuple(
        ResidentTensor(
            name=f"layers.{{i}}.{name}.weight",
            source=f"linear_attn.{source}.weight",
            when=when,
            layers=delta_rules,
            part=part,
        )
        for name, (source, part) in sources.items()
    )


def of_rule(names: Mapping[str, str], owner: str = "linear_attn") -> tuple[ResidentTensor, ...]:
    """Tensors of layers that keep a state: canonical name -> name below `owner`, both within a layer."""
    return tuple(
        ResidentTensor(name=f"layers.{{i}}.{name}", source=f"{owner}.{source}", layers=delta_rules)
        for name, source in names.items()
    )


_OF_DECAY = {"decay_log": "A_log", "decay_bias": "dt_bias"}
CONVOLVED = {  # where each of query, key and value has a convolution
    **{f"{part}.weight": f"{part[0]}_proj.weight" for part in ("query", "key", "value")},
    **{f"conv_{part}.weight": f"{part[0]}_conv1d.weight" for part in ("query", "key", "value")},
    **_OF_DECAY,
    "beta.weight": "b_proj.weight",
    "mixed_norm.weight": "o_norm.weight",
    "out.weight": "o_proj.weight",
}
_DELTA = of_rule(
    {"conv.weight": "conv1d.weight", **_OF_DECAY, "mixed_norm.weight": "norm.weight", "out.weight": "out_proj.weight"}
)


def _by_key_head(config: Config, names: tuple[str, ...], name: str) -> Part:
    """The rows of a projection in a tensor that has, of each key head, those of all of `names`."""
    rule = _rule(config)
    widths = [rule.rows[each] // rule.key_heads for each in names]
    at = names.index(name)
    return Part(first=sum(widths[:at]), count=widths[at], step=sum(widths), repeats=rule.key_heads)


def _flat(config: Config, names: tuple[str, ...], name: str) -> Part:
    """The rows of a projection in a tensor that has those of one of `names` behind another's."""
    rows = _rule(config).rows
    return Part(first=sum(rows[each] for each in names[: names.index(name)]), count=rows[name])


def _together(
    source: str, names: tuple[str, ...], part: Callable[[Config, tuple[str, ...], str], Part]
) -> dict[str, tuple[str, Callable[[Config], Part]]]:
    def of(name: str) -> Callable[[Config], Part]:
        return lambda config: part(config, names, name)

    return {name: (source, of(name)) for name in names}


# How they compute


def _block(config: Config, **traits: Any) -> BlockSpec:
    check_usual(config, {"hidden_act": "silu"})
    types, interval = config["layer_types"], check_size("full_attention_interval", config["full_attention_interval"])
    if types is None:
        types = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(num_layers(config))]
    attending: dict[str, Any] = {"query_key_norm": "head", "gate": "sigmoid", "norm_shift": 1.0, **traits}
    make = partial(decoder_block, rotary_share=0.25, **attending)
    return keeping(config, types, "linear_attention", _rule(config), make)


def _experts(config: Config, *, normalized: bool) -> ExpertsSpec:
    key = "shared_expert_intermediate_size"
    shared = check_size(key, config[key])
    return experts_of(config, RouterSpec(normalized=normalized), shared=shared)


def _qwen3_next(config: Config) -> BlockSpec:
    experts = _experts(config, normalized=bool(config["norm_topk_prob"]))
    return _block(config, experts=experts, dense_layers=dense_layers(config))


_FLAT = {**_together("in_proj_qkv", ("query", "key", "value"), _flat), "out_gate": ("in_proj_z", whole)}


def _is_flat(config: Config) -> bool:
    """Qwen3-Next as GGUF files have it: all queries, then all keys, then all values; and gates apart."""
    return bool(config.get("linear_projections_flat"))


QWEN3_NEXT = row(
    "qwen3_next",
    experts=512,
    block=_qwen3_next,
    attention=(
        *_attention(),
        *_projections(
            _together("in_proj_qkvz", ("query", "key", "value", "out_gate"), _by_key_head),
            lambda config: not _is_flat(config),
        ),
        *_projections(_FLAT, _is_flat),
        *_projections(_together("in_proj_ba", ("beta", "decay"), _by_key_head)),
        *_DELTA,
    ),
    **GATED_SHARED,
)

_APART = (
    *_attention(),
    *_projections({**_FLAT, **{name: (f"in_proj_{of}", whole) for name, of in (("beta", "b"), ("decay", "a"))}}),
    *_DELTA,
)
QWEN3_5 = dense("qwen3_5_text", block=_block, attention=_APART)
QWEN3_5_MOE = row(
    "qwen3_5_moe_text",
    experts=256,
    block=lambda config: _block(config, experts=_experts(config, normalized=True)),
    attention=_APART,
    **GATED_SHARED,
)


# OLMo Hybrid (Ai2, 2026): layers that attend have norms behind, over all heads, and may turn nothing; the others have
# norms before, and states that may turn round.


def _olmo(config: Config) -> BlockSpec:
    kinds, heads = config["layer_types"], config["num_attention_heads"]
    if kinds is None:
        kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(num_layers(config))]
        kinds[-1] = kinds[-1] if "full_attention" in kinds else "full_attention"
    turns = {**config, **rope_parameters(config)}.get("rope_theta", DEFAULT_THETA) is not None  # where it is null
    key_heads = check_size("linear_num_key_heads", config["linear_num_key_heads"] or heads)
    key_dim = config["linear_key_head_dim"] or int(0.75 * check_size("hidden_size", config["hidden_size"]) / key_heads)
    sizes = {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": config["linear_num_value_heads"] or heads,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": config["linear_value_head_dim"] or 2 * key_dim,
    }
    scale = 2.0 if config["linear_allow_neg_eigval"] else 1.0
    rule = replace(_rule({**config, **sizes}), beta_scale=scale, norm_epsilon=1e-5)
    make = partial(decoder_block, positions="rotary" if turns else "none", norms="output", query_key_norm="projection")
    return keeping(config, kinds, "linear_attention", rule, make, norms="input")


OLMO_HYBRID = dense(
    "olmo_hybrid",
    block=_olmo,
    attention=(
        *attending(BIASED),
        *of_rule({"decay.weight": "a_proj.weight", "out_gate.weight": "g_proj.weight", **CONVOLVED}),
    ),
    norms={**BEFORE, **BEHIND},
    renamed={  # as OLMo's own checkpoints have them
        f"model.layers.{{i}}.{own}.weight": f"model.layers.{{i}}.{name}.weight"
        for own, name in (
            ("attention_layer_norm", "input_layernorm"),
            ("feedforward_layer_norm", "post_attention_layernorm"),
        )
    },
)

WITH_STATES = (QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE, OLMO_HYBRID)
