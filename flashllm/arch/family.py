"""Shared by architecture files: a decoder's tensors under the usual names, and a block from the usual config keys.

A file says where its model_type differs. Plain values; knows no model_type.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache, partial
from importlib import resources
from typing import Any, Literal, TypeVar

from flashllm.arch.mixers import Attention, Keeping, Rotary, check_size
from flashllm.arch.mixture import ExpertsSpec
from flashllm.arch.rotary import DEFAULT_THETA, rotary, said_context, trained_context
from flashllm.arch.spec import MAX_LAYERS, BlockSpec, Config, LayerSpec, check_number, known_activation
from flashllm.arch.tensors import ArchitectureSpec, Part, ResidentTensor, attentions, whole
from flashllm.errors import UnsupportedModelError

When = Callable[[Config], bool]
T = TypeVar("T")

ACTIVATION_NAMES = {  # transformers' names of what can be computed, and those of sparse models' own code
    "relu": "relu",
    "relu2": "squared_relu",
    "fatrelu": "fatrelu",
    "drelu": "drelu",
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}


def always(config: Config) -> bool:
    return True


def never(config: Config) -> bool:
    return False


def says(key: str) -> When:
    """Models whose config says so under `key`."""
    return lambda config: bool(config[key])


def is_untied(config: Config) -> bool:
    """Models with a head of their own."""
    return not config["tie_word_embeddings"]


@cache
def _all_defaults() -> dict[str, dict[str, Any]]:
    text = resources.files("flashllm.arch").joinpath("defaults.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = json.loads(text)
    return found


def defaults_of(model_type: str) -> Mapping[str, Any]:
    """Values of the keys that a config.json of this type may leave out: those of transformers' config class."""
    return _all_defaults()[model_type]


# Tensors


def norm_tensors(name: str, source: str, *, weight: When = always, bias: When = never) -> tuple[ResidentTensor, ...]:
    return (
        ResidentTensor(name=f"{name}.weight", source=f"{source}.weight", when=weight),
        ResidentTensor(name=f"{name}.bias", source=f"{source}.bias", when=bias),
    )


def linear_tensors(
    name: str, source: str, *, bias: When = never, part: Callable[[Config], Part] = whole
) -> tuple[ResidentTensor, ...]:
    """Weight and bias of a projection. `part`: the rows of the source's weight, and elements of its bias."""

    def of_bias(config: Config) -> Part:
        return replace(part(config), transposed=False, turned=False)

    return (
        ResidentTensor(name=f"{name}.weight", source=f"{source}.weight", part=part),
        ResidentTensor(name=f"{name}.bias", source=f"{source}.bias", when=bias, part=of_bias),
    )


def projections(
    query: When, out: When, source: str = "self_attn", names: Sequence[str] = ("q_proj", "k_proj", "v_proj", "o_proj")
) -> tuple[ResidentTensor, ...]:
    """Query, key, value, and out where `names` has four, below `source` in a layer; biases of the first three, and of
    the last."""
    return tuple(
        tensor
        for part, name in zip(("query", "key", "value", "out"), names, strict=False)
        for tensor in linear_tensors(f"layers.{{i}}.{part}", f"{source}.{name}", bias=out if part == "out" else query)
    )


def attending(tensors: Iterable[ResidentTensor]) -> tuple[ResidentTensor, ...]:
    """The same of those layers alone that attend to keys and values."""
    return tuple(replace(tensor, layers=attentions) for tensor in tensors)


FUSED = ("query", "key", "value")


def fused_tensors(
    source: str, part: Callable[[int], Callable[[Config], Part]], *, bias: When = never, names: Sequence[str] = FUSED
) -> tuple[ResidentTensor, ...]:
    """Projections of every layer that are in one tensor of it: `part(n)` are the rows of the n-th of `names`."""
    return tuple(
        tensor
        for number, name in enumerate(names)
        for tensor in linear_tensors(f"layers.{{i}}.{name}", source, bias=bias, part=part(number))
    )


def bias_tensors(matrices: Mapping[str, str], when: When) -> tuple[ResidentTensor, ...]:
    """Biases of the FFN's matrices, which are whole tensors."""
    return tuple(
        ResidentTensor(name=f"layers.{{i}}.ffn.{matrix}_bias", source=source.removesuffix("weight") + "bias", when=when)
        for matrix, source in matrices.items()
    )


def equal_part(part: int, key: str = "hidden_size", *, transposed: bool = False) -> Callable[[Config], Part]:
    """The `part`-th so many rows of a tensor as the config says under `key`."""

    def rows(config: Config) -> Part:
        count = check_size(key, config[key])
        return Part(first=part * count, count=count, transposed=transposed)

    return rows


def fused(part: int, heads: Callable[[Config], int] | None = None) -> Callable[[Config], Part]:
    """Query (0), key (1) or value (2) of one tensor: all queries, all keys, all values of as many `heads`; or, where
    `heads` is None, (query, key, value) of a head after a head."""

    def rows(config: Config) -> Part:
        width, own = head_size(config), check_size("num_attention_heads", config["num_attention_heads"])
        if heads is None:
            return Part(first=part * width, count=width, step=3 * width, repeats=own)
        shared = heads(config)
        first = (0, own, own + shared)[part] * width
        return Part(first=first, count=(own if part == 0 else shared) * width)

    return rows


_HEAD_NORMS = {"query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}


def decoder(
    model_type: str,
    *,
    block: Callable[[Config], BlockSpec],
    matrices: Mapping[str, str],
    attention: tuple[ResidentTensor, ...],
    norms: Mapping[str, tuple[str, When]],
    norm_bias: When = never,
    head_norms: Mapping[str, str] = _HEAD_NORMS,
    ffn_bias: When = never,
    ffn_tensors: tuple[ResidentTensor, ...] = (),
    names: Mapping[str, str] | None = None,
    final_norm: When = always,
    head_bias: When = never,
    matrix_parts: Mapping[str, Callable[[Config], Part]] | None = None,
    **others: Any,
) -> ArchitectureSpec:
    """A table with these tensors, and Llama's names where `names` (base, embedding, embedding_norm, positions, layer,
    final_norm) says nothing else. `norms`: canonical name -> state_dict name within a layer, and the models that have
    it there, in those layers that have it; a name with a dot behind it is the same norm under another name.
    `final_norm`: the models whose last norm has a weight.
    `ffn_tensors`: more of the FFN that is resident, by its name within a layer."""
    named = {"base": "model.", "embedding": "embed_tokens", "layer": "layers.{i}.", "final_norm": "norm"}
    named |= names or {}
    base, layer = named["base"], named["base"] + named["layer"]
    matrices = {matrix: f"{layer}{source}.weight" for matrix, source in matrices.items()}

    def norm_of(name: str, source: str, when: When) -> tuple[ResidentTensor, ...]:
        return norm_tensors(name, source, weight=when, bias=lambda config: when(config) and norm_bias(config))

    def norms_of(part: str, norms: Mapping[str, tuple[str, When]] = norms) -> tuple[ResidentTensor, ...]:
        return tuple(
            replace(tensor, layers=partial(LayerSpec.has_norm, name=name.rstrip(".")))
            for name, (source, when) in norms.items()
            if name.startswith(part)
            for tensor in norm_of(f"layers.{{i}}.{name.rstrip('.')}", layer + source, when)
        )

    positions, embedding_norm = named.get("positions"), named.get("embedding_norm")
    return ArchitectureSpec(
        model_type=model_type,
        base_prefix=base,
        matrices=matrices,
        matrix_parts=matrix_parts or {},
        resident=(
            ResidentTensor(name="embedding.weight", source=f"{base}{named['embedding']}.weight"),
            *([ResidentTensor(name="positions.weight", source=f"{base}{positions}.weight")] if positions else []),
            *(norm_of("embedding_norm", base + embedding_norm, always) if embedding_norm else ()),
            *norms_of("attention"),
            *(replace(tensor, source=layer + tensor.source) for tensor in attention),
            *norms_of("", {name: (source, always) for name, source in head_norms.items()}),
            *norms_of("ffn"),
            *(() if ffn_bias is never else bias_tensors(matrices, ffn_bias)),
            *(replace(tensor, source=layer + tensor.source) for tensor in ffn_tensors),
            *norm_of("final_norm", base + named["final_norm"], final_norm),
            ResidentTensor(name="head.weight", source="lm_head.weight", when=is_untied),
            ResidentTensor(name="head.bias", source="lm_head.bias", when=head_bias),
        ),
        defaults=defaults_of(model_type),
        block=block,
        **others,
    )


# The block


def head_size(config: Config) -> int:
    """Dimensions of a head: the config's, or what the heads share out. ValueError where they cannot."""
    d_model = check_size("hidden_size", config["hidden_size"])
    heads = check_size("num_attention_heads", config["num_attention_heads"])
    given = config.get("head_dim")
    if given is not None:
        return check_size("head_dim", given)
    if d_model % heads:
        raise ValueError(f"{heads} heads do not divide hidden_size {d_model}")
    return d_model // heads


def kv_heads(config: Config) -> int:
    """Key-value heads: the config's, or as many as there are heads."""
    given = config.get("num_key_value_heads")
    return check_size("num_key_value_heads", given if given is not None else config["num_attention_heads"])


def decoder_block(
    config: Config,
    *,
    epsilon: str = "rms_norm_eps",
    activation: str = "hidden_act",
    positions: Literal["rotary", "learned", "none"] = "rotary",
    theta: float = DEFAULT_THETA,
    rotary_share: float = 1.0,
    rotary_style: Literal["half", "interleaved"] = "half",
    rotary_of: Mapping[str, Rotary] | None = None,
    experts: ExpertsSpec | None = None,
    dense_layers: Collection[int] = (),
    **traits: Any,
) -> BlockSpec:
    """The block of a complete config with Llama's keys, rotary positions and RMS norms; `traits` say otherwise, of the
    block, of every layer or of every layer's attention.

    `epsilon` and `activation` are keys of the config, `theta` and `rotary_share` defaults of its rotary embedding;
    `rotary_of`: those of each type of layer. All layers but `dense_layers` are mixtures of `experts`, where it has any.
    """
    head_dim = head_size(config)
    is_alike = positions == "rotary" and rotary_of is None
    turned = rotary(config, head_dim, theta=theta, share=rotary_share) if is_alike else None
    mixer: dict[str, Any] = {
        "heads": config["num_attention_heads"],
        "kv_heads": kv_heads(config),
        "head_dim": head_dim,
        "query_scale": head_dim**-0.5,
        "rotary": None if turned is None else replace(turned, style=rotary_style),
        **_taken(Attention, traits),
    }
    layers = layer_specs(config, Attention(**mixer), rotary_of=rotary_of, **_taken(LayerSpec, traits))
    if experts is not None:
        layers = tuple(
            layer if i in dense_layers else replace(layer, neurons=experts.neurons, experts=experts)
            for i, layer in enumerate(layers)
        )
    values: dict[str, Any] = {
        "d_model": check_size("hidden_size", config["hidden_size"]),
        "embed_dim": config["hidden_size"],
        "vocab_size": check_size("vocab_size", config["vocab_size"], 2**30),
        "context": trained_context(config) if is_alike else said_context(config),
        "norm": "rms",
        "norm_epsilon": check_number(epsilon, config[epsilon]),
        "final_norm": True,
        "learned_positions": positions == "learned",
        "activation": known_activation(config, activation, ACTIVATION_NAMES),
        "gated": True,
        "tied_head": bool(config["tie_word_embeddings"]),
    }
    return BlockSpec(**{**values, "layers": layers, **traits})


def _taken(of: type[Any], traits: dict[str, Any]) -> dict[str, Any]:
    """Those of `traits` that are fields of a class; they are left there no more."""
    return {each.name: traits.pop(each.name) for each in fields(of) if each.name in traits}


def layer_specs(
    config: Config, mixer: Attention, *, rotary_of: Mapping[str, Rotary] | None = None, **traits: Any
) -> tuple[LayerSpec, ...]:
    """The layers: sliding windows by `layer_types` (all layers where there are none), FATReLU's thresholds, the rotary
    embedding by type, the neurons (one number, or a list of each layer's); `mixer` and `traits` are of all."""
    count = num_layers(config)
    window = config.get("sliding_window")
    if window is not None and check_size("sliding_window", window, 2**30) >= said_context(config):
        window = None  # every query sees all before it
    types = of_layers("layer_types", config, "names", ["sliding_attention"] * count)
    if unknown := [kind for kind in types if kind not in ("full_attention", "sliding_attention")]:
        model_type = config.get("model_type")
        raise UnsupportedModelError(f"layers of type {str(unknown[0])[:80]!r} are not supported for {model_type}")
    neurons = config["intermediate_size"]
    widths = neurons if isinstance(neurons, list) else [neurons] * count
    if len(widths) != count:
        raise ValueError(f"intermediate_size must be a number or a list of {count}, not {len(widths)} numbers")
    mixers = {
        kind: replace(
            mixer,
            rotary=mixer.rotary if rotary_of is None else rotary_of[kind],
            window=window if kind == "sliding_attention" else None,
        )
        for kind in set(types)
    }
    return tuple(
        LayerSpec(
            mixer=mixers[kind], neurons=check_size("intermediate_size", width), activation_threshold=threshold, **traits
        )
        for kind, width, threshold in zip(types, widths, _thresholds(config, count), strict=True)
    )


def _thresholds(config: Config, count: int) -> list[float]:
    """FATReLU's threshold of each layer: `hidden_act_param` is one for all, or a list."""
    if config.get("hidden_act") != "fatrelu":
        return [0.0] * count
    given = config.get("hidden_act_param", 0.0)
    values = given if isinstance(given, list) else [given] * count
    if len(values) != count:
        raise ValueError(f"hidden_act_param must be a number or a list of {count}, not {len(values)} numbers")
    return [check_number("hidden_act_param", value) for value in values]


def turning(block: BlockSpec, turns: Sequence[object]) -> BlockSpec:
    """The block with a rotation in those layers alone that `turns` has something true for."""
    return each_layer(block, turns, lambda layer, turned: layer if turned else with_attention(layer, rotary=None))


def keeping(
    config: Config, kinds: Any, kind: str, mixer: Keeping, make: Callable[[Config], BlockSpec], **changes: Any
) -> BlockSpec:
    """The block whose layers of this kind have a mixer that keeps a state, and `changes`. `make` gives the block of a
    config where those, too, attend to all before."""
    kinds = of_layers("layer_types", {**config, "layer_types": kinds}, "names")
    alike = ["full_attention" if each == kind else each for each in kinds]

    def layer(spec: LayerSpec, own: str) -> LayerSpec:
        return replace(spec, mixer=mixer, **changes) if own == kind else spec

    return each_layer(make({**config, "layer_types": alike}), kinds, layer)


def each_layer(block: BlockSpec, of: Iterable[T], change: Callable[[LayerSpec, T], LayerSpec]) -> BlockSpec:
    """The block with what `change` makes of each layer and its own value."""
    return replace(block, layers=tuple(change(*each) for each in zip(block.layers, of, strict=True)))


def with_attention(layer: LayerSpec, **changes: Any) -> LayerSpec:
    return replace(layer, mixer=replace(layer.attention, **changes))


def num_layers(config: Config) -> int:
    """Layers of the model. ValueError for a number that cannot be."""
    return check_size("num_hidden_layers", config["num_hidden_layers"], MAX_LAYERS)


def of_layers(key: str, config: Config, what: str = "numbers", usual: list[Any] | None = None) -> list[Any]:
    """The config's list under `key`, an entry for each layer; `usual` where there is none. ValueError for another."""
    given = usual if config.get(key) is None else config[key]
    if not isinstance(given, list) or len(given) != num_layers(config):
        raise ValueError(f"{key} must be a list of {num_layers(config)} {what}")
    return given


# Types of layers


def sliding(slides: Iterable[object]) -> list[str]:
    """Layer types: a window for each true value."""
    return ["sliding_attention" if each else "full_attention" for each in slides]


def alternating(count: int, period: int) -> list[str]:
    """Layer types where every `period`-th layer sees everything and the others slide."""
    return sliding((layer + 1) % period for layer in range(count))


def with_types(config: Config, period: int, *, first: bool = False) -> dict[str, Any]:
    """The config with its types of layers, or with the usual ones: every `period`-th layer sees everything, the
    `first` of each period or the last."""
    types, count = config.get("layer_types"), num_layers(config)
    if types is None:
        types = alternating(count + period - 1, period)[period - 1 :] if first else alternating(count, period)
    return {**config, "layer_types": types}


def if_asked(config: Config) -> dict[str, Any]:
    """The config with a window only where it asks for it."""
    return {**config, "sliding_window": config["sliding_window"] if config["use_sliding_window"] else None}


def slides(config: Config) -> list[bool]:
    """True for each layer that attends within a window; one longer than the context counts."""
    return [kind == "sliding_attention" and config["sliding_window"] is not None for kind in config["layer_types"]]
