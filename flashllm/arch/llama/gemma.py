"""Gemma 1 to 4 (Gemma Team, 2024, 2025, 2026): the embedding is scaled by the root of its width."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import NormalDist
from typing import Any

from flashllm.arch.experts.row import experts_of, in_layer, matrices
from flashllm.arch.family import decoder_block, each_layer, head_size, num_layers, of_layers, says, with_types
from flashllm.arch.llama.names import AROUND, BIASED, GATED, row
from flashllm.arch.mixers import check_size
from flashllm.arch.mixture import ExpertsSpec, RouterSpec
from flashllm.arch.rotary import rope_parameters, rotary_by_type, rotary_of
from flashllm.arch.spec import BlockSpec, Config, LayerSpec, PerLayerEmbedding, check_number
from flashllm.arch.tensors import TOKEN_TABLE, ArchitectureSpec, ResidentTensor, mixtures, own_keys, own_values
from flashllm.errors import UnsupportedModelError

# Gemma 1 to 3: norms keep weight - 1.


def _check_causal(config: Config) -> None:
    if config.get("use_bidirectional_attention") not in (None, False, "vision"):  # "vision": within a picture
        raise UnsupportedModelError("attention to later tokens makes an encoder; it cannot generate")


def _width(config: Config) -> float:
    """The root of the embedding's width."""
    return math.sqrt(check_size("hidden_size", config["hidden_size"]))


def _gemma(config: Config, **traits: Any) -> BlockSpec:
    _check_causal(config)
    return decoder_block(config, norm_shift=1.0, embedding_scale=_width(config), **traits)


def _optional(config: Config, key: str) -> float | None:
    return None if config.get(key) is None else check_number(key, config[key])


def gemma2_block(config: Config, **traits: Any) -> BlockSpec:
    config = with_types(config, config.get("sliding_window_pattern", 2))
    scalar = check_number("query_pre_attn_scalar", config["query_pre_attn_scalar"])
    if scalar <= 0:
        raise ValueError(f"query_pre_attn_scalar must be above 0, not {scalar}")
    return _gemma(
        config,
        activation="hidden_activation",
        query_scale=scalar**-0.5,
        logit_softcap=_optional(config, "final_logit_softcapping"),
        softcap=_optional(config, "attn_logit_softcapping"),
        **{"norms": "both", **traits},
    )


def _gemma3(config: Config) -> BlockSpec:
    """Layers that slide turn by one embedding, those that see everything by another."""
    config = with_types(config, config.get("sliding_window_pattern", 6))
    theta = {"rope_theta": config.get("rope_local_base_freq", 10_000.0)}
    return gemma2_block(
        {**config, "attn_logit_softcapping": None},
        query_key_norm="head",
        rotary_of=rotary_by_type(config, head_size(config), theta=1_000_000.0, sliding=theta),
    )


GEMMA = row("gemma", block=_gemma, attention=BIASED)
GEMMA2 = row("gemma2", block=gemma2_block, attention=BIASED, norms=AROUND)
GEMMA3 = row("gemma3_text", block=_gemma3, attention=BIASED, norms=AROUND)


# Gemma 4: layers that see everything have heads of another size, whose keys may be their values; the last layers attend
# to the keys and values of the last one of their type that has any.


def _gemma4(config: Config) -> BlockSpec:
    types = of_layers("layer_types", with_types(config, 6), "names")
    return _gemma4_block(config, [*types[:-1], "full_attention"], rope_parameters(config) or _GEMMA4_ROPE)


def _gemma4_block(config: Config, types: list[str], rope: Mapping[str, Any]) -> BlockSpec:
    _check_causal(config)
    bare = {key: value for key, value in config.items() if key != "rope_parameters"}
    block = decoder_block(
        {**bare, "layer_types": types},
        activation="hidden_activation",
        positions="none",
        norms="both",
        query_scale=1.0,
        query_key_norm="head",
        value_norm=True,
        embedding_scale=_width(config),
        logit_softcap=_optional(config, "final_logit_softcapping"),
        per_layer=_per_layer(config),
    )
    own, shared, experts = _own_config(config, types), _shared_layers(config, types), _experts(config)
    if not all(isinstance(rope.get(kind), dict) for kind in types):
        raise ValueError("rope_parameters must have those of every type of layer")

    def layer(spec: LayerSpec, number: int) -> LayerSpec:
        mixer, kind = {**bare, **own.get(number, {})}, types[number]
        attention = replace(
            spec.attention,
            head_dim=head_size(mixer),
            kv_heads=check_size("num_key_value_heads", mixer["num_key_value_heads"]),
            rotary=rotary_of(rope[kind], bare, head_size(mixer)),
            key_is_value=bool(config["attention_k_eq_v"]) and kind == "full_attention",
            shared=shared.get(number),
        )
        wide = bool(config["use_double_wide_mlp"]) and number in shared
        neurons = spec.neurons * (2 if wide else 1)
        if experts is None:
            return replace(spec, mixer=attention, neurons=neurons)
        spec = replace(spec, mixer=attention, neurons=experts.neurons, experts=experts)
        return replace(spec, beside=neurons, beside_norms=True)

    return each_layer(block, range(len(types)), layer)


def _own_config(config: Config, types: list[str]) -> Mapping[int, Mapping[str, Any]]:
    """Entries that replace the config's for some layers, by a layer's number."""
    given = config.get("per_layer_config")
    if given is not None:
        if not isinstance(given, dict) or not all(isinstance(each, dict) for each in given.values()):
            raise ValueError("per_layer_config must be an object of objects")
        return {int(number): own for number, own in given.items()}
    own = {"head_dim": config.get("global_head_dim", 512)}
    heads = config.get("num_global_key_value_heads")
    own |= {"num_key_value_heads": heads} if heads is not None and config["attention_k_eq_v"] else {}
    return {number: own for number, kind in enumerate(types) if kind == "full_attention"}


def _shared_layers(config: Config, types: list[str]) -> dict[int, int]:
    """The layers that attend to another's keys and values: that layer."""
    key = "num_kv_shared_layers"
    sharing = check_size(key, config[key]) if config[key] else 0
    first = len(types) - sharing
    last = {kind: number for number, kind in enumerate(types[: max(first, 0)])}
    if missing := set(types) - set(last):
        raise ValueError(f"num_kv_shared_layers {sharing} leaves no layer of type {missing.pop()} that has any")
    return {number: last[types[number]] for number in range(first, len(types))}


def _experts(config: Config) -> ExpertsSpec | None:
    if not config["enable_moe_block"]:
        return None
    router = RouterSpec(normalized=True, norm_epsilon=check_number("rms_norm_eps", config["rms_norm_eps"]))
    return experts_of(config, router, chosen="top_k_experts")


def _per_layer(config: Config) -> PerLayerEmbedding | None:
    dim, rows = (config[key] for key in ("hidden_size_per_layer_input", "vocab_size_per_layer_input"))
    return PerLayerEmbedding(rows=rows, dim=dim) if dim else None


def _with_rows(spec: ArchitectureSpec) -> ArchitectureSpec:
    """With the tensors of per-layer embeddings, where the config says that there are any."""
    names = {
        TOKEN_TABLE: "model.embed_tokens_per_layer.weight",
        "per_layer_projection.weight": "model.per_layer_model_projection.weight",
        "per_layer_projection_norm.weight": "model.per_layer_projection_norm.weight",
        "layers.{i}.per_layer_gate.weight": "model.layers.{i}.per_layer_input_gate.weight",
        "layers.{i}.per_layer_out.weight": "model.layers.{i}.per_layer_projection.weight",
        "layers.{i}.per_layer_norm.weight": "model.layers.{i}.post_per_layer_input_norm.weight",
    }
    has = says("hidden_size_per_layer_input")
    tensors = [ResidentTensor(name=name, source=source, when=has) for name, source in names.items()]
    return replace(spec, resident=(*spec.resident[:1], *tensors, *spec.resident[1:]))


def _own(tensor: ResidentTensor) -> ResidentTensor:
    part = tensor.name.split(".")[2]
    return replace(tensor, layers={"key": own_keys, "value": own_values}.get(part, tensor.layers))


_EXPERT = matrices("experts.{e}")
_GEMMA4_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
GEMMA4 = row(
    "gemma4_text",
    block=_gemma4,
    attention=(*map(_own, BIASED), ResidentTensor(name="layers.{i}.scale", source="layer_scalar")),
    # Where there are experts, the norms around the dense part are others than those around both.
    norms={
        **AROUND,
        "ffn_norm": ("pre_feedforward_layernorm", lambda config: not config["enable_moe_block"]),
        "ffn_norm.": ("pre_feedforward_layernorm_2", says("enable_moe_block")),
        "ffn_beside_norm": ("pre_feedforward_layernorm", says("enable_moe_block")),
        "ffn_beside_output_norm": ("post_feedforward_layernorm_1", says("enable_moe_block")),
        "ffn_experts_output_norm": ("post_feedforward_layernorm_2", says("enable_moe_block")),
    },
    matrices=_EXPERT,
    dense_matrices=in_layer(GATED),
    stacked={
        "model.layers.{i}.experts.gate_up_proj": (in_layer(_EXPERT)["gate"], in_layer(_EXPERT)["up"]),
        "model.layers.{i}.experts.down_proj": (in_layer(_EXPERT)["down"],),
    },
    ffn_tensors=tuple(
        ResidentTensor(name=f"layers.{{i}}.{name}", source=source, layers=mixtures)
        for name, source in {
            "router.weight": "router.proj.weight",
            "router_scale": "router.scale",
            "expert_scale": "router.per_expert_scale",
            **{f"beside_{matrix}.weight": f"{source}.weight" for matrix, source in GATED.items()},
        }.items()
    ),
)

# Gemma 3n: Gemma 4's per-layer embeddings and shared keys, heads that are alike, states that alternate.


def _gemma3n(config: Config) -> BlockSpec:
    if config["altup_active_idx"] != 0 or not config["altup_correct_scale"]:
        raise UnsupportedModelError("alternating updates are supported of the first state, scaled where it is read")
    count, types = num_layers(config), of_layers("layer_types", with_types(config, 5), "names")
    rope = {
        "full_attention": {"rope_theta": config.get("rope_theta", 1_000_000.0)},
        "sliding_attention": {"rope_theta": config.get("rope_local_base_freq", 10_000.0)},
    }
    for kind, own in rope_parameters(config).items():
        if kind in rope and isinstance(own, dict):
            rope[kind] |= own
    block = _gemma4_block({**config, **_LIKE_GEMMA4}, types, rope)
    usual = [0.95 if count > 10 and layer < 10 else 0.0 for layer in range(count)]
    shares = of_layers("activation_sparsity_pattern", config, usual=usual)
    block = each_layer(block, shares, lambda layer, share: replace(layer, gate_deviations=_deviations(share)))
    return replace(
        block,
        streams=check_size("altup_num_inputs", config["altup_num_inputs"]),
        laurel=check_size("laurel_rank", config["laurel_rank"]),
    )


def _deviations(share: float) -> float | None:
    """How many standard deviations above the mean lies what so large a share is below; None of a share of 0."""
    if not 0 <= check_number("activation_sparsity_pattern", share) < 1:
        raise ValueError(f"activation_sparsity_pattern has shares below 1, not {share}")
    return NormalDist().inv_cdf(share) if share else None


def _of_streams(ends: str) -> tuple[ResidentTensor, ...]:
    def more(stream: int) -> Callable[[Config], bool]:
        return lambda config: bool(check_size("altup_num_inputs", config["altup_num_inputs"]) > stream + 1)

    sources = {"enter": "altup_projections", "leave": "altup_unembed_projections"}
    return tuple(
        ResidentTensor(name=f"streams.{s}.{ends}.weight", source=f"model.{sources[ends]}.{s}.weight", when=more(s))
        for s in range(7)
    )


_LIKE_GEMMA4 = {
    "attention_k_eq_v": False,
    "use_double_wide_mlp": False,
    "enable_moe_block": False,
    "per_layer_config": {},
}
_OF_GEMMA3N = {
    "stream_router.weight": "altup.modality_router.weight",
    "stream_router_norm.weight": "altup.router_norm.weight",
    "stream_predict": "altup.prediction_coefs.weight",
    "stream_correct": "altup.correction_coefs.weight",
    "stream_scale": "altup.correct_output_scale",
    "laurel_in.weight": "laurel.linear_left.weight",
    "laurel_out.weight": "laurel.linear_right.weight",
    "laurel_norm.weight": "laurel.post_laurel_norm.weight",
}
GEMMA3N = row(
    "gemma3n_text",
    block=_gemma3n,
    attention=(
        *map(_own, BIASED),
        *(ResidentTensor(name=f"layers.{{i}}.{name}", source=source) for name, source in _OF_GEMMA3N.items()),
    ),
    norms=AROUND,
)

GEMMAS = (
    GEMMA,
    GEMMA2,
    GEMMA3,
    _with_rows(GEMMA4),
    _with_rows(replace(GEMMA3N, resident=(*GEMMA3N.resident, *_of_streams("enter"), *_of_streams("leave")))),
)
