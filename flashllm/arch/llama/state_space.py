"""Decoders whose layers, or most of them, are state-space models (Mamba-2: Dao and Gu, 2024); the others attend."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from flashllm.arch.experts.row import experts_of, grouped_router, in_layer
from flashllm.arch.experts.row import row as mixture
from flashllm.arch.family import always, decoder_block, linear_tensors, never, says
from flashllm.arch.llama.names import projections, row
from flashllm.arch.mixture import ExpertsSpec, RouterSpec
from flashllm.arch.spec import MAX_LAYERS, BlockSpec, Config, StateSpace, check_number, check_size
from flashllm.arch.tensors import Part, ResidentTensor, attentions, state_spaces
from flashllm.errors import UnsupportedModelError

Space = Callable[[Config], StateSpace]
_MAMBA, _ATTENTION, _DENSE, _EXPERTS = "linear_attention", "full_attention", "mlp", "moe"
_ONCE = {"mamba": _MAMBA, "attention": _ATTENTION}  # what older configs call them


def _sized(config: Config, *, key_heads: str, heads: str, dim: Any, state: str, kernel: str) -> StateSpace:
    """The mixer, its sizes under these keys; `dim`: of a value head."""
    limit = config["time_step_limit"]
    if limit not in (None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}]):  # as JSON has it in any release
        raise UnsupportedModelError(f"time_step_limit must be [0, Infinity], not {str(limit)[:80]}")
    return StateSpace(
        key_heads=check_size(key_heads, config[key_heads]),
        value_heads=check_size(heads, config[heads]),
        key_dim=check_size(state, config[state]),
        value_dim=check_size("mamba_d_head", dim),
        kernel=check_size(kernel, config[kernel]),
    )


def _space(config: Config, inner: int | None = None) -> StateSpace:
    """The mixer of a config whose keys begin with "mamba_"; `inner`: numbers of all value heads, where those are not
    `mamba_expand` times the width."""
    heads, dim = check_size("mamba_n_heads", config["mamba_n_heads"]), config["mamba_d_head"]
    width = config["mamba_expand"] * check_size("hidden_size", config["hidden_size"]) if inner is None else inner
    if config["hidden_act"] != "silu":
        raise UnsupportedModelError(f"activation {str(config['hidden_act'])[:80]!r} is not supported for this model")
    dim = width // heads if dim == "auto" else dim
    if dim * heads != width:
        raise ValueError(f"{heads} heads of {dim} are not {width} wide")
    return _sized(
        config,
        key_heads="mamba_n_groups",
        heads="mamba_n_heads",
        dim=dim,
        state="mamba_d_state",
        kernel="mamba_d_conv",
    )


# Where the tensors are


def _tensors(
    source: str, space: Space, *, bias: str, convolution_bias: str, normed: Callable[[Config], bool] = always
) -> tuple[ResidentTensor, ...]:
    """Tensors of the mixer of this name within a layer, in whose input projection the rows of the gate, values, keys,
    queries and decay lie one behind the other. The biases are of those models whose configs say so."""

    def rows_of(name: str) -> Callable[[Config], Part]:
        def part(config: Config) -> Part:
            rows, order = space(config).rows, ("out_gate", "value", "key", "query", "decay")
            return Part(first=sum(rows[each] for each in order[: order.index(name)]), count=rows[name])

        return part

    at, biased = "layers.{i}.state.", says(bias)
    tensors = (
        *(
            tensor
            for name in ("out_gate", "value", "key", "query", "decay")
            for tensor in linear_tensors(at + name, f"{source}.in_proj", bias=biased, part=rows_of(name))
        ),
        ResidentTensor(name=f"{at}conv.weight", source=f"{source}.conv1d.weight"),
        ResidentTensor(name=f"{at}conv.bias", source=f"{source}.conv1d.bias", when=says(convolution_bias)),
        ResidentTensor(name=f"{at}decay_log", source=f"{source}.A_log"),
        ResidentTensor(name=f"{at}decay_bias", source=f"{source}.dt_bias"),
        ResidentTensor(name=f"{at}skip", source=f"{source}.D"),
        ResidentTensor(name=f"{at}mixed_norm.weight", source=f"{source}.norm.weight", when=normed),
        *linear_tensors(f"{at}out", f"{source}.out_proj", bias=biased),
    )
    return tuple(replace(tensor, layers=state_spaces) for tensor in tensors)


def _attending(tensors: tuple[ResidentTensor, ...]) -> tuple[ResidentTensor, ...]:
    return tuple(replace(tensor, layers=attentions) for tensor in tensors)


def _mixed(block: BlockSpec, kinds: list[str], space: StateSpace) -> BlockSpec:
    """The block, whose layers of these kinds have the state-space mixer."""
    layers = zip(block.layers, kinds, strict=True)
    return replace(block, layers=tuple(replace(of, mixer=space) if kind == _MAMBA else of for of, kind in layers))


def _kinds(config: Config, given: Any, known: tuple[str, ...]) -> list[str]:
    """The kinds of all layers, in today's names."""
    if not isinstance(given, list) or not 0 < len(given) <= MAX_LAYERS:
        raise ValueError("the kinds of layers must be a list")
    kinds = [_ONCE.get(kind, kind) for kind in given]
    unknown = next((kind for kind in kinds if kind not in known), None)
    if unknown is not None:
        raise UnsupportedModelError(f"layers of type {str(unknown)[:80]!r} are not supported for this model")
    return kinds


def _alike(config: Config, **others: Any) -> Config:
    """The config of a decoder all of whose layers attend to all before."""
    return {**config, "layer_types": None, "sliding_window": None, **others}


# Bamba (IBM, Princeton, CMU and UIUC, 2024): half of each head is turned.


def _bamba(config: Config) -> BlockSpec:
    block = decoder_block(_alike(config), rotary_share=0.5)
    attends = config["attn_layer_indices"] or []
    kinds = [_ATTENTION if i in attends else _MAMBA for i in range(len(block.layers))]
    return _mixed(block, kinds, _space(config))


_SIZES: dict[str, Any] = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "time_step_limit": None,
    "attention_bias": False,
    "mlp_bias": False,
}


def _of_mamba(space: Space = _space, **others: Any) -> tuple[ResidentTensor, ...]:
    return _tensors("mamba", space, bias="mamba_proj_bias", convolution_bias="mamba_conv_bias", **others)


_BIASED = projections(says("attention_bias"), says("attention_bias"))
BAMBA = row(
    "bamba",
    defaults={
        **_SIZES,
        "vocab_size": 128000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "attn_layer_indices": None,
    },
    block=_bamba,
    attention=(*_attending(_BIASED), *_of_mamba()),
    matrices={matrix: f"feed_forward.{matrix}_proj" for matrix in ("up", "gate", "down")},
    norms={"attention_norm": ("input_layernorm", always), "ffn_norm": ("pre_ff_layernorm", always)},
    names={"final_norm": "final_layernorm"},
    ffn_bias=says("mlp_bias"),
)


STATE_SPACES = (BAMBA,)
