"""Places of a checkpoint's tensors: their canonical names, which are the same for every architecture, and an
`ArchitectureSpec`, which maps those of a Hugging Face model_type to them. Plain values: no tensors and no files.

Canonical names, "{i}" for the layer; those a model has no use for are absent:

    embedding.weight [vocab, embed]             positions.weight [context + offset, d_model]
    project_in.weight [d_model, embed]          project_out.weight [embed, d_model]
    embedding_norm.weight, .bias [d_model]
    layers.{i}.attention_norm.weight, .bias     layers.{i}.ffn_norm.weight, .bias           [d_model]
    layers.{i}.attention_output_norm, layers.{i}.ffn_output_norm: the same
    layers.{i}.query.weight [heads * head_dim, d_model], .bias; key and value with kv_heads
    layers.{i}.query_norm.weight, .bias; key_norm: of the width that `Attention.query_key_norm` says
    layers that attend to another's keys and values have no key, value and key_norm; see `Attention.key_is_value`, too
    of a dense part beside experts (`LayerSpec.beside`): layers.{i}.beside_up.weight, beside_gate [beside, d_model],
        beside_down [d_model, beside]; layers.{i}.ffn_beside_norm.weight, ffn_beside_output_norm,
        ffn_experts_output_norm [d_model]
    layers.{i}.router_scale [d_model]: see `RouterSpec.norm_epsilon`; expert_scale [experts]: of their weights
    layers.{i}.scale [1]: of the states that leave the layer
    of per-layer embeddings (`PerLayerEmbedding`): per_layer_embedding.weight [rows, layers * dim], which lies on flash;
        per_layer_projection.weight [layers * dim, d_model], per_layer_projection_norm.weight [dim];
        layers.{i}.per_layer_gate.weight [dim, d_model], per_layer_out.weight [d_model, dim], per_layer_norm [d_model]
    of streams (`BlockSpec.streams`): streams.{s}.enter.weight, streams.{s}.leave.weight [d_model, d_model], s from 0,
        of those but the first; layers.{i}.stream_router.weight [streams, d_model], stream_router_norm.weight
        [d_model], stream_predict [streams^2, streams], stream_correct [streams, streams]; layers.{i}.stream_scale
        [d_model]: of the first, before per_layer_gate
    of `BlockSpec.laurel`: layers.{i}.laurel_in.weight [laurel, d_model], laurel_out.weight [d_model, laurel],
        laurel_norm.weight [d_model]
    layers.{i}.out_gate.weight: the product of `Attention.gate`, of the queries' shape
    layers.{i}.out.weight [d_model, heads * head_dim], .bias
    layers whose mixer is a `DeltaRule`, with r = value_heads * value_dim: query, key, value, out_gate, out as it says;
        layers.{i}.beta.weight, decay.weight [value_heads, d_model]     layers.{i}.conv.weight [channels, 1, kernel]
        layers.{i}.decay_log, decay_bias [value_heads], in fp32;                layers.{i}.mixed_norm.weight [value_dim]
        with a decay of each channel: decay.weight [key_heads * key_dim, channel_rank], decay_bias of as many,
        decay_log [1, 1, value_heads, 1], out_gate.weight [r, channel_rank]; decay_down.weight, gate_down.weight
        [channel_rank, d_model]; conv_query.weight, conv_key.weight, conv_value.weight in place of conv.weight
    of a `StateSpace`: layers.{i}.state.NAME, for all of these names but beta, with biases; conv.bias [channels];
        skip [value_heads], in fp32; mixed_norm.weight [r]. Channels are those of values, keys, queries
    of a `ShortConvolution`: layers.{i}.state.query, key, value, out, conv, the same
    of latent attention (`Latent`): layers.{i}.query_down.weight [query_rank, d_model], .bias; query_norm [query_rank];
        layers.{i}.query.weight [heads * (plain + rotated), query_rank or d_model]; key_norm [rank];
        layers.{i}.key.weight [rank + rotated, d_model], .bias: of the row that is kept;
        layers.{i}.key_up.weight [heads * rank, plain]: from a head's query to the keys' space;
        layers.{i}.value.weight [heads * value_dim, rank]: out of it; out.weight [d_model, heads * value_dim]
    layers.{i}.attention_sub_norm.weight [heads * head_dim]  layers.{i}.ffn_sub_norm.weight [d_ff]: see `sub_norms`
    layers.{i}.sinks [heads]: a score of each head that softmax counts and that belongs to no position
    layers.{i}.ffn.up_bias, .gate_bias [d_ff]   layers.{i}.ffn.down_bias [d_model]
    layers.{i}.ffn.expert_down_bias [experts, d_model]: what each expert adds, times its weight
    layers.{i}.gate.weight [d_ff, d_model], where it is resident (format/manifest.py) and not in the neurons' rows
    layers.{i}.router.weight [experts, d_model], .bias [experts]; or of a router that computes in fp32
    layers.{i}.wide_router.weight [experts, d_model], in fp32 whatever the model's dtype, as is
    layers.{i}.choice.bias [experts]: of the scores by which experts are chosen (`RouterSpec`)
    layers.{i}.shared_gate.weight [1, d_model]: its sigmoid is the weight of the shared neurons
    final_norm.weight, .bias [d_model]          head.weight [vocab, embed], absent where tied to the embedding
    head.bias [vocab]
"""

import fnmatch
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from flashllm.arch.mixers import Attention, DeltaRule, HeadStates, Keeping, Latent, Mixer, ShortConvolution, StateSpace
from flashllm.arch.mixture import ExpertsSpec
from flashllm.arch.spec import BlockSpec, Config, LayerSpec, PerLayerEmbedding
from flashllm.errors import FormatError

Shape = tuple[int, ...]
EMBEDDING = "embedding.weight"
TOKEN_TABLE = "per_layer_embedding.weight"  # the only tensor but the FFN's that lies on flash


def is_wide(name: str) -> bool:
    """True for the canonical name of a tensor that is in fp32 whatever the model's dtype."""
    return name.endswith((".wide_router.weight", ".choice.bias", ".decay_log", ".decay_bias", ".skip"))


def _always(config: Config) -> bool:
    return True


def every_layer(layer: LayerSpec) -> bool:
    """Every layer has it."""
    return True


def mixtures(layer: LayerSpec) -> bool:
    """Layers that are mixtures of experts have it."""
    return layer.experts is not None


def attentions(layer: LayerSpec) -> bool:
    """Layers that attend to keys and values have it."""
    return isinstance(layer.mixer, Attention)


def own_keys(layer: LayerSpec) -> bool:
    """Layers that attend to keys of their own have it."""
    return isinstance(layer.mixer, Attention) and layer.mixer.shared is None


def own_values(layer: LayerSpec) -> bool:
    """Layers that project values of their own have it."""
    return own_keys(layer) and not layer.attention.key_is_value


def delta_rules(layer: LayerSpec) -> bool:
    """Layers that keep a state by the delta rule have it."""
    return isinstance(layer.mixer, DeltaRule)


def state_spaces(layer: LayerSpec) -> bool:
    """Layers with a state-space mixer have it."""
    return isinstance(layer.recurrent, StateSpace)


def short_convolutions(layer: LayerSpec) -> bool:
    """Layers with a convolution between two gates have it."""
    return isinstance(layer.mixer, ShortConvolution)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Which rows of a checkpoint's tensor are a canonical one: `repeats` runs of `count` rows, `step` rows apart.

    Several projections in one tensor are that: (query, key, value) of a head after a head, gate after up. Of a
    `transposed` tensor, [inputs, outputs], the rows are its columns.
    """

    first: int = 0
    count: int | None = None  # None: all there are
    step: int = 0
    repeats: int = 1
    transposed: bool = False
    turned: bool = False  # each run is a matrix whose columns are the rows, one run's after another's


def _whole(config: Config) -> Part:
    return Part()


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentTensor:
    """A tensor kept in DRAM: its canonical name, its state_dict name, the configs of models and the layers that have
    it, and which part of the named tensor it is."""

    name: str
    source: str
    when: Callable[[Config], bool] = _always
    layers: Callable[[LayerSpec], bool] = every_layer  # of a model that has it
    part: Callable[[Config], Part] = _whole


def _nothing(config: Config) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchitectureSpec:
    """One architecture. Source names are the causal-LM class's state_dict names, with "{i}" for the layer."""

    model_type: str
    base_prefix: str  # what checkpoints of the headless base model leave out: "model."
    matrices: Mapping[str, str]  # FFN weights by their place in a row: up, gate (if any), down
    resident: tuple[ResidentTensor, ...]  # in the order of a forward pass
    defaults: Mapping[str, Any]  # values of keys a config.json may leave out
    block: Callable[[Config], BlockSpec]  # of a complete config; raises as `registry.block_spec`
    matrix_parts: Mapping[str, Callable[[Config], Part]] = field(default_factory=dict)  # of those that are not whole
    # The same of the shared neurons of a mixture of experts, whose `matrices` have "{e}" for the expert; and of those
    # of its layers that are no mixtures.
    shared_matrices: Mapping[str, str] = field(default_factory=dict)
    dense_matrices: Mapping[str, str] = field(default_factory=dict)
    # Other forms in which checkpoints have these: tensors that hold all experts of a layer, [experts, rows, columns],
    # or the shared neurons, [rows, columns], each with the names of the equal parts of an expert's rows; and names of
    # tensors that have another here.
    stacked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    derived: Callable[[Config], Mapping[str, Any]] = _nothing  # the usual keys, for configs that have others
    aliases: Mapping[str, str] = field(default_factory=dict)  # a name that checkpoints have: the state_dict's
    ignored: tuple[str, ...] = ()  # names ("*": any text) that old checkpoints carry and nothing reads

    def __post_init__(self) -> None:
        if tuple(self.matrices) not in (("up", "down"), ("up", "gate", "down")):
            raise ValueError(f"matrices must be up, down or up, gate, down, not {', '.join(self.matrices)}")
        for tensor in self.resident:
            if tensor.name not in _SHAPES:
                raise ValueError(f"{tensor.name!r} is not a canonical name")

    def source_of(self, name: str) -> str:
        """State_dict name (pattern) of the tensor of this canonical name (pattern), of any variant. KeyError where it
        has none."""
        return {tensor.name: tensor.source for tensor in self.resident}[name]

    @property
    def embedding(self) -> str:
        """State_dict name of the embedding."""
        return self.source_of("embedding.weight")

    @property
    def _outer(self) -> tuple[str, ...]:
        """State_dict names of what the base model lacks."""
        return tuple(tensor.source for tensor in self.resident if tensor.name.startswith("head."))

    @property
    def head(self) -> str:
        """State_dict name of the head."""
        return self.source_of("head.weight")

    def matrix_part(self, matrix: str, config: Config) -> Part:
        """Which rows of its tensor an FFN matrix is."""
        return self.matrix_parts.get(matrix, _whole)(config)

    def present(self, config: Config) -> list[ResidentTensor]:
        """The resident tensors a model of this complete config has."""
        return [tensor for tensor in self.resident if tensor.when(config)]

    def with_prefix(self, names: Collection[str]) -> dict[str, str]:
        """State_dict name -> checkpoint name of a checkpoint's `names`; the ignored are left out.

        FormatError where a checkpoint carries a tensor both with and without `base_prefix`.
        """
        bare = self.embedding.removeprefix(self.base_prefix)
        prefix = self.base_prefix if bare in names and self.embedding not in names else ""
        result: dict[str, str] = {}
        for name in names:
            full = self.aliases.get(name, name)
            full = full if full.startswith((*self._outer, self.base_prefix)) else prefix + full
            if full in result:
                raise FormatError(f"the checkpoint has both {name} and {result[full]}")
            if not any(fnmatch.fnmatchcase(full, pattern) for pattern in self.ignored):
                result[full] = name
        return result


def tensor_shape(name: str, block: BlockSpec, layer: LayerSpec) -> Shape:
    """Shape of the tensor of a canonical name (pattern); `layer`: its own, or any where it belongs to none."""
    return _SHAPES[name](block, layer)


_ShapeOf = Callable[[BlockSpec, LayerSpec], Shape]


def _projection(part: str) -> dict[str, _ShapeOf]:
    return {
        f"layers.{{i}}.{part}.weight": lambda block, layer: (_mixer(layer).rows[part], _inputs(part, block, layer)),
        f"layers.{{i}}.{part}.bias": lambda block, layer: (_mixer(layer).rows[part],),
    }


def _mixer(layer: LayerSpec) -> Mixer:
    if layer.mixer is None:
        raise ValueError("the layer has no mixer")
    return layer.mixer


def _recurrent(layer: LayerSpec) -> Keeping:
    if layer.recurrent is None:
        raise ValueError("the layer keeps no state")
    return layer.recurrent


def _heads(layer: LayerSpec) -> HeadStates:
    if not isinstance(layer.recurrent, HeadStates):
        raise ValueError("no heads of the layer keep a state")
    return layer.recurrent


def _has_channels(layer: LayerSpec) -> bool:
    """Layers with a decay of each channel."""
    return isinstance(layer.mixer, DeltaRule) and layer.mixer.channel_rank is not None


def _recurrence(prefix: str) -> dict[str, _ShapeOf]:
    """Shapes of a recurrent mixer's tensors that are no projections."""

    def of_heads(block: BlockSpec, layer: LayerSpec) -> Shape:
        return (_heads(layer).value_heads,)

    def decay_log(block: BlockSpec, layer: LayerSpec) -> Shape:
        return (1, 1, *of_heads(block, layer), 1) if _has_channels(layer) else of_heads(block, layer)

    def decay_bias(block: BlockSpec, layer: LayerSpec) -> Shape:
        return (layer.mixer.decays,) if isinstance(layer.mixer, DeltaRule) else of_heads(block, layer)

    def taps(part: str) -> _ShapeOf:
        return lambda block, layer: (_recurrent(layer).rows[part], 1, _recurrent(layer).kernel)

    return {
        **{f"{prefix}conv_{part}.weight": taps(part) for part in ("query", "key", "value")},
        f"{prefix}conv.weight": lambda block, layer: (_recurrent(layer).channels, 1, _recurrent(layer).kernel),
        f"{prefix}conv.bias": lambda block, layer: (_recurrent(layer).channels,),
        f"{prefix}decay_log": decay_log,
        f"{prefix}decay_bias": decay_bias,
        f"{prefix}skip": of_heads,
        f"{prefix}mixed_norm.weight": lambda block, layer: (_heads(layer).norm_dim,),
    }


def _state(part: str) -> dict[str, _ShapeOf]:
    """A projection of a mixer whose tensors have names of their own."""
    return {
        f"layers.{{i}}.state.{part}.weight": lambda block, layer: (_recurrent(layer).rows[part], block.d_model),
        f"layers.{{i}}.state.{part}.bias": lambda block, layer: (_recurrent(layer).rows[part],),
    }


def _latent(layer: LayerSpec) -> Latent:
    if layer.attention.latent is None:
        raise ValueError("these tensors belong to latent attention")
    return layer.attention.latent


def _per_layer(block: BlockSpec) -> PerLayerEmbedding:
    if block.per_layer is None:
        raise ValueError("the model has no per-layer embeddings")
    return block.per_layer


def _inputs(part: str, block: BlockSpec, layer: LayerSpec) -> int:
    """Inputs of a projection: d_model, or a rank of latent attention, or of a decay of each channel."""
    mixer = _mixer(layer)
    latent, rank = mixer.latent, mixer.channel_rank if isinstance(mixer, DeltaRule) else None
    if rank is not None and part in ("decay", "out_gate"):
        return rank
    if latent is None or part not in ("query", "value"):
        return block.d_model
    return latent.rank if part == "value" else latent.query_rank or block.d_model


_NORMS = (
    "embedding_norm",
    "layers.{i}.attention_norm",
    "layers.{i}.attention_output_norm",
    "layers.{i}.ffn_norm",
    "layers.{i}.ffn_output_norm",
    "layers.{i}.ffn_experts_output_norm",
    "layers.{i}.ffn_beside_norm",
    "layers.{i}.ffn_beside_output_norm",
    "final_norm",
)


def _head_norm(part: str, heads: Callable[[Attention], int]) -> dict[str, _ShapeOf]:
    def shape(block: BlockSpec, layer: LayerSpec) -> Shape:
        mixer = layer.attention
        if mixer.latent is not None:
            return (mixer.latent.rank if part == "key" else mixer.latent.query_rank or 0,)
        if mixer.query_key_norm in ("head", "turned_head"):
            return (mixer.head_dim,)
        own = (heads(mixer), mixer.head_dim)
        return own if mixer.query_key_norm == "heads" else (math.prod(own),)

    return {f"layers.{{i}}.{part}_norm.{kind}": shape for kind in ("weight", "bias")}


def _norm(name: str, shape: _ShapeOf) -> dict[str, _ShapeOf]:
    return dict.fromkeys((f"{name}.weight", f"{name}.bias"), shape)


def _experts(layer: LayerSpec) -> ExpertsSpec:
    if layer.experts is None:
        raise ValueError("a router belongs to a mixture of experts")
    return layer.experts


_SHAPES: dict[str, _ShapeOf] = {
    "embedding.weight": lambda block, layer: (block.vocab_size, block.embed_dim),
    "positions.weight": lambda block, layer: (block.context + block.position_offset, block.d_model),
    "project_in.weight": lambda block, layer: (block.d_model, block.embed_dim),
    "project_out.weight": lambda block, layer: (block.embed_dim, block.d_model),
    **{f"{norm}.{part}": lambda block, layer: (block.d_model,) for norm in _NORMS for part in ("weight", "bias")},
    **{
        name: shape
        for part in ("query_down", "query", "key", "value", "out_gate", "beta", "decay", "decay_down", "gate_down")
        for name, shape in _projection(part).items()
    },
    "layers.{i}.key_up.weight": lambda block, layer: (
        layer.attention.heads * _latent(layer).rank,
        _latent(layer).plain_dim,
    ),
    **_recurrence("layers.{i}."),
    **_recurrence("layers.{i}.state."),
    **{name: shape for part in ("query", "key", "value", "out_gate", "decay") for name, shape in _state(part).items()},
    "layers.{i}.state.out.weight": lambda block, layer: (block.d_model, _recurrent(layer).mixed_dim),
    "layers.{i}.state.out.bias": lambda block, layer: (block.d_model,),
    **_head_norm("query", lambda mixer: mixer.heads),
    **_head_norm("key", lambda mixer: mixer.kv_heads),
    "layers.{i}.out.weight": lambda block, layer: (block.d_model, _mixer(layer).mixed_dim),
    "layers.{i}.out.bias": lambda block, layer: (block.d_model,),
    **_norm("layers.{i}.attention_sub_norm", lambda block, layer: (_mixer(layer).mixed_dim,)),
    **_norm("layers.{i}.ffn_sub_norm", lambda block, layer: (layer.neurons,)),
    "layers.{i}.scale": lambda block, layer: (1,),
    "layers.{i}.beside_up.weight": lambda block, layer: (layer.beside, block.d_model),
    "layers.{i}.beside_gate.weight": lambda block, layer: (layer.beside, block.d_model),
    "layers.{i}.beside_down.weight": lambda block, layer: (block.d_model, layer.beside),
    "layers.{i}.router_scale": lambda block, layer: (block.d_model,),
    "layers.{i}.expert_scale": lambda block, layer: (_experts(layer).count,),
    TOKEN_TABLE: lambda block, layer: (_per_layer(block).rows, block.token_row),
    "per_layer_projection.weight": lambda block, layer: (block.token_row, block.d_model),
    "per_layer_projection_norm.weight": lambda block, layer: (_per_layer(block).dim,),
    "layers.{i}.per_layer_gate.weight": lambda block, layer: (_per_layer(block).dim, block.d_model),
    "layers.{i}.per_layer_out.weight": lambda block, layer: (block.d_model, _per_layer(block).dim),
    "layers.{i}.per_layer_norm.weight": lambda block, layer: (block.d_model,),
    **{
        f"streams.{stream}.{way}.weight": lambda block, layer: (block.d_model, block.d_model)
        for way in ("enter", "leave")
        for stream in range(7)
    },
    "layers.{i}.stream_router.weight": lambda block, layer: (block.streams, block.d_model),
    "layers.{i}.stream_router_norm.weight": lambda block, layer: (block.d_model,),
    "layers.{i}.stream_predict": lambda block, layer: (block.streams**2, block.streams),
    "layers.{i}.stream_correct": lambda block, layer: (block.streams, block.streams),
    "layers.{i}.stream_scale": lambda block, layer: (block.d_model,),
    "layers.{i}.laurel_in.weight": lambda block, layer: (block.laurel, block.d_model),
    "layers.{i}.laurel_out.weight": lambda block, layer: (block.d_model, block.laurel),
    "layers.{i}.laurel_norm.weight": lambda block, layer: (block.d_model,),
    "layers.{i}.sinks": lambda block, layer: (layer.attention.heads,),
    "layers.{i}.ffn.expert_down_bias": lambda block, layer: (_experts(layer).count, block.d_model),
    "layers.{i}.ffn.up_bias": lambda block, layer: (layer.neurons,),
    "layers.{i}.ffn.gate_bias": lambda block, layer: (layer.neurons,),
    "layers.{i}.ffn.down_bias": lambda block, layer: (block.d_model,),
    "layers.{i}.router.weight": lambda block, layer: (_experts(layer).count, block.d_model),
    "layers.{i}.router.bias": lambda block, layer: (_experts(layer).count,),
    "layers.{i}.wide_router.weight": lambda block, layer: (_experts(layer).count, block.d_model),
    "layers.{i}.choice.bias": lambda block, layer: (_experts(layer).count,),
    "layers.{i}.shared_gate.weight": lambda block, layer: (1, block.d_model),
    "head.weight": lambda block, layer: (block.vocab_size, block.embed_dim),
    "head.bias": lambda block, layer: (block.vocab_size,),
}
