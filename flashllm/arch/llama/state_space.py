"""Decoders whose layers, or most of them, are state-space models (Mamba-2: Dao and Gu, 2024); the others attend."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from flashllm.arch.experts.granite import granite
from flashllm.arch.experts.row import experts_of, grouped_router, matrices
from flashllm.arch.experts.row import row as mixture
from flashllm.arch.family import (
    always,
    attending,
    decoder_block,
    fused_tensors,
    head_size,
    keeping,
    linear_tensors,
    never,
    num_layers,
    projections,
    says,
)
from flashllm.arch.llama.dense import granite_block
from flashllm.arch.llama.names import BIASED, row
from flashllm.arch.mixers import StateSpace, check_size
from flashllm.arch.spec import MAX_LAYERS, BlockSpec, Config, check_number, check_usual
from flashllm.arch.tensors import Part, ResidentTensor, state_spaces
from flashllm.errors import UnsupportedModelError

Space = Callable[[Config], StateSpace]
_MAMBA, _ATTENTION, _DENSE, _EXPERTS = "linear_attention", "full_attention", "mlp", "moe"
_ONCE = {"mamba": _MAMBA, "attention": _ATTENTION}  # what older configs call them


def _sized(config: Config, *, key_heads: str, heads: str, dim: Any, state: str, kernel: str) -> StateSpace:
    """The mixer, its sizes under these keys; `dim`: of a value head."""
    limit = config["time_step_limit"]
    infinite = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])  # as JSON has it in any release
    if limit is not None and not (isinstance(limit, list | tuple) and list(limit) in infinite):
        raise UnsupportedModelError(f"time_step_limit must be [0, Infinity], not {str(limit)[:80]}")
    return StateSpace(
        key_heads=check_size(key_heads, config[key_heads]),
        value_heads=check_size(heads, config[heads]),
        key_dim=check_size(state, config[state]),
        value_dim=check_size("a head's dimensions", dim),
        kernel=check_size(kernel, config[kernel]),
    )


def _space(config: Config, inner: int | None = None) -> StateSpace:
    """The mixer of a config whose keys begin with "mamba_"; `inner`: numbers of all value heads, where those are not
    `mamba_expand` times the width."""
    heads, dim = check_size("mamba_n_heads", config["mamba_n_heads"]), config["mamba_d_head"]
    width = check_size("hidden_size", config["hidden_size"])
    width = check_size("mamba_expand", config["mamba_expand"]) * width if inner is None else inner
    check_usual(config, {"hidden_act": "silu"})
    dim = width // heads if dim == "auto" else check_size("mamba_d_head", dim)
    if dim * heads != width:
        raise ValueError(f"{heads} heads of {dim} are not {width} wide")
    return _sized(
        config, key_heads="mamba_n_groups", heads="mamba_n_heads", dim=dim, state="mamba_d_state", kernel="mamba_d_conv"
    )


# Where the tensors are


def _tensors(
    source: str,
    space: Space,
    *,
    bias: str,
    convolution_bias: str,
    out_bias: str | None = None,
    normed: Callable[[Config], bool] = always,
) -> tuple[ResidentTensor, ...]:
    """Tensors of the mixer of this name within a layer, in whose input projection the rows of the gate, values, keys,
    queries and decay lie one behind the other. The biases are of those models whose configs say so."""

    order = ("out_gate", "value", "key", "query", "decay")

    def part_of(number: int) -> Callable[[Config], Part]:
        def part(config: Config) -> Part:
            counts = [space(config).rows[name] for name in order[: number + 1]]
            return Part(first=sum(counts[:-1]), count=counts[-1])

        return part

    at, names = "layers.{i}.state.", [f"state.{name}" for name in order]
    tensors = (
        *fused_tensors(f"{source}.in_proj", part_of, bias=says(bias), names=names),
        ResidentTensor(name=f"{at}conv.weight", source=f"{source}.conv1d.weight"),
        ResidentTensor(name=f"{at}conv.bias", source=f"{source}.conv1d.bias", when=says(convolution_bias)),
        ResidentTensor(name=f"{at}decay_log", source=f"{source}.A_log"),
        ResidentTensor(name=f"{at}decay_bias", source=f"{source}.dt_bias"),
        ResidentTensor(name=f"{at}skip", source=f"{source}.D"),
        ResidentTensor(name=f"{at}mixed_norm.weight", source=f"{source}.norm.weight", when=normed),
        *linear_tensors(f"{at}out", f"{source}.out_proj", bias=says(out_bias or bias)),
    )
    return tuple(replace(tensor, layers=state_spaces) for tensor in tensors)


def _kinds(given: Any, known: tuple[str, ...]) -> list[str]:
    """The kinds of all layers, in today's names."""
    if not isinstance(given, list) or not 0 < len(given) <= MAX_LAYERS:
        raise ValueError("the kinds of layers must be a list")
    kinds = [_ONCE.get(str(kind), str(kind)) for kind in given]
    unknown = next((kind for kind in kinds if kind not in known), None)
    if unknown is not None:
        raise UnsupportedModelError(f"layers of type {unknown[:80]!r} are not supported for this model")
    return kinds


def _alike(config: Config, **others: Any) -> Config:
    """The config of a decoder all of whose layers attend to all before."""
    return {**config, "layer_types": None, "sliding_window": None, **others}


# Bamba (IBM, Princeton, CMU and UIUC, 2024): half of each head is turned.


def _bamba(config: Config) -> BlockSpec:
    attends = config["attn_layer_indices"] or []
    if not isinstance(attends, list):
        raise ValueError("attn_layer_indices must be a list of layers")
    kinds = [_ATTENTION if i in attends else _MAMBA for i in range(num_layers(config))]
    return keeping(_alike(config), kinds, _MAMBA, _space(config), partial(decoder_block, rotary_share=0.5))


def _of_mamba(space: Space = _space, **others: Any) -> tuple[ResidentTensor, ...]:
    return _tensors("mamba", space, bias="mamba_proj_bias", convolution_bias="mamba_conv_bias", **others)


_FEED_FORWARD: dict[str, Any] = {
    "matrices": matrices("feed_forward"),
    "norms": {"attention_norm": ("input_layernorm", always), "ffn_norm": ("pre_ff_layernorm", always)},
    "names": {"final_norm": "final_layernorm"},
    "ffn_bias": says("mlp_bias"),
}
BAMBA = row("bamba", block=_bamba, attention=(*attending(BIASED), *_of_mamba()), **_FEED_FORWARD)


# Granite 4 (IBM, 2025): nothing is turned, four multipliers, and a mixture of experts, or shared neurons alone.


def _granite(config: Config, **traits: Any) -> BlockSpec:
    positions = config["position_embedding_type"]
    if positions not in (None, "nope", "rope"):
        raise UnsupportedModelError(f"position_embedding_type {str(positions)[:80]!r} is not supported for this model")
    alike = _alike(config, intermediate_size=config["shared_intermediate_size"])
    kinds = _kinds(config["layer_types"] or [_MAMBA] * num_layers(config), (_MAMBA, _ATTENTION))
    make = partial(granite_block, positions="rotary" if positions == "rope" else "none", **traits)
    return keeping(alike, kinds, _MAMBA, _space(config), make)


GRANITE = granite("granitemoehybrid", _granite, attention=(*attending(BIASED), *_of_mamba()))


# Nemotron-H (NVIDIA, 2025) and Nemotron 3: each layer has one of a mixer, attention, neurons of squared ReLU and a
# mixture of such experts; nothing is turned. transformers holds steps of a prompt above `time_step_min`, and those of
# single tokens not, as other engines all: so neither is here.


def _nemotron_space(config: Config) -> StateSpace:
    return _sized(
        config,
        key_heads="n_groups",
        heads="mamba_num_heads",
        dim=config["mamba_head_dim"],
        state="ssm_state_size",
        kernel="conv_kernel",
    )


def _nemotron_kinds(config: Config) -> list[str]:
    pattern, kinds = config["hybrid_override_pattern"], config["layers_block_type"]
    if kinds is None and isinstance(pattern, str):
        of_sign = {"M": _MAMBA, "*": _ATTENTION, "-": _DENSE, "E": _EXPERTS}
        kinds = [of_sign.get(sign, sign) for sign in pattern]
    if kinds is None:
        kinds = [_MAMBA, _EXPERTS, _ATTENTION, _DENSE]
    return _kinds(kinds, (_MAMBA, _ATTENTION, _DENSE, _EXPERTS))


def _nemotron(config: Config) -> BlockSpec:
    if config["moe_latent_size"] is not None:
        raise UnsupportedModelError(
            "experts that compute in a narrower space of their own (moe_latent_size: Nemotron 3 Super and Ultra) are "
            "not supported; Nemotron 3 Nano has none"
        )
    check_usual(config, {"mlp_bias": False, "mamba_hidden_act": "silu"})
    kinds = _nemotron_kinds(config)
    block = decoder_block(
        _alike(config, num_hidden_layers=len(kinds)),
        epsilon="layer_norm_epsilon",
        activation="mlp_hidden_act",
        positions="none",
        gated=False,
    )
    plain, space = block.layers[0], _nemotron_space(config)
    of_kind = {
        _MAMBA: replace(plain, mixer=space, neurons=0),
        _ATTENTION: replace(plain, neurons=0),
        _DENSE: replace(plain, mixer=None),
    }
    if _EXPERTS in kinds:
        key = "moe_shared_expert_intermediate_size"
        shared = check_size(key, config[key])
        experts = experts_of(config, grouped_router(config), shared=shared)
        of_kind[_EXPERTS] = replace(plain, mixer=None, neurons=experts.neurons, experts=experts)
    return replace(block, layers=tuple(of_kind[kind] for kind in kinds))


def _of_nemotron(names: Mapping[str, str]) -> dict[str, str]:
    return {matrix: f"backbone.layers.{{i}}.mixer.{name}.weight" for matrix, name in names.items()}


_UNGATED = {"up": "up_proj", "down": "down_proj"}
NEMOTRON_H = mixture(
    "nemotron_h",
    experts=8,
    is_wide=True,
    router="mixer.gate",
    choice="mixer.gate.e_score_correction_bias",
    block=_nemotron,
    attention=(
        *attending(projections(never, never, "mixer")),
        *_tensors("mixer", _nemotron_space, bias="use_bias", convolution_bias="use_conv_bias"),
    ),
    norms={"attention_norm": ("norm", always), "ffn_norm": ("norm", always)},
    names={"base": "backbone.", "embedding": "embeddings", "final_norm": "norm_f"},
    matrices={matrix: f"mixer.experts.{{e}}.{name}" for matrix, name in _UNGATED.items()},
    shared_matrices=_of_nemotron({matrix: f"shared_experts.{name}" for matrix, name in _UNGATED.items()}),
    dense_matrices=_of_nemotron(_UNGATED),
    renamed={},
    stacked={
        f"backbone.layers.{{i}}.mixer.experts.{name}": (f"backbone.layers.{{i}}.mixer.experts.{{e}}.{name}.weight",)
        for name in _UNGATED.values()
    },
)


# Falcon-H1 (Zuo et al., 2025): every layer attends and has the mixer, side by side; a multiplier of each product.


def _multipliers(config: Config, key: str, count: int) -> list[float]:
    given = config[key] if config[key] is not None else [1.0] * count
    if not isinstance(given, list) or len(given) != count:
        raise ValueError(f"{key} must be a list of {count} numbers")
    return [check_number(key, each) for each in given]


def _falcon_space(config: Config) -> StateSpace:
    gate, value, key, query, decay = _multipliers(config, "ssm_multipliers", 5)
    by = check_number("ssm_in_multiplier", config["ssm_in_multiplier"])
    if config["mamba_proj_bias"] and by != 1.0:
        raise UnsupportedModelError("mamba_proj_bias with an ssm_in_multiplier is not supported for falcon_h1")
    return replace(
        _space(config, config["mamba_d_ssm"]),
        gate_first=not config["mamba_norm_before_gate"],
        gate_scale=gate * by,
        value_scale=value * by,
        key_scale=key * by,
        query_scale=query * by,
        decay_scale=decay * by,
        out_scale=check_number("ssm_out_multiplier", config["ssm_out_multiplier"]),
    )


def _falcon(config: Config) -> BlockSpec:
    of_gate, of_down = _multipliers(config, "mlp_multipliers", 2)
    names = ("attention_in_multiplier", "key_multiplier", "attention_out_multiplier")
    of_input, of_keys, of_output = (check_number(name, config[name]) for name in names)
    if config["attention_bias"] and of_input != 1.0:
        raise UnsupportedModelError("attention_bias with an attention_in_multiplier is not supported for falcon_h1")
    return decoder_block(
        _alike(config),
        query_scale=head_size(config) ** -0.5 * of_input**2 * of_keys,
        out_scale=of_input * of_output,
        second=_falcon_space(config),
        activation_scale=of_gate,
        ffn_scale=of_down,
        embedding_scale=check_number("embedding_multiplier", config["embedding_multiplier"]),
        logit_scale=check_number("lm_head_multiplier", config["lm_head_multiplier"]),
    )


FALCON_H1 = row(
    "falcon_h1",
    block=_falcon,
    attention=(*BIASED, *_of_mamba(_falcon_space, out_bias="projectors_bias", normed=says("mamba_rms_norm"))),
    **_FEED_FORWARD,
)

STATE_SPACES = (BAMBA, GRANITE, NEMOTRON_H, FALCON_H1)
