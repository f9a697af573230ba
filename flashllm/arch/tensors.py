"""Places of a checkpoint's tensors: their canonical names and shapes (`_SHAPES`), which are the same for every
architecture, and an `ArchitectureSpec`, which maps those of a Hugging Face model_type to them. Plain values: no tensors
and no files.
"""

import fnmatch
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from flashllm.arch.mixers import Attention, DeltaRule, ShortConvolution, StateSpace
from flashllm.arch.spec import SHARED_BESIDE, BlockSpec, Config, LayerSpec
from flashllm.errors import FormatError

Shape = tuple[int, ...]
EMBEDDING = "embedding.weight"
TOKEN_TABLE = "per_layer_embedding.weight"  # the only tensor but the FFN's that lies on flash


def is_wide(name: str) -> bool:
    """True for the canonical name of a tensor that is in fp32 whatever the model's dtype."""
    return name.endswith((".wide_router.weight", ".choice.bias", ".decay_log", ".decay_bias", ".skip"))


# Layers that have a tensor.


def every_layer(layer: LayerSpec) -> bool:
    return True


def mixtures(layer: LayerSpec) -> bool:
    return layer.experts is not None


def attentions(layer: LayerSpec) -> bool:
    return isinstance(layer.mixer, Attention)


def own_keys(layer: LayerSpec) -> bool:
    return isinstance(layer.mixer, Attention) and layer.mixer.shared is None


def own_values(layer: LayerSpec) -> bool:
    return own_keys(layer) and not layer.attention.key_is_value


def delta_rules(layer: LayerSpec) -> bool:
    return isinstance(layer.mixer, DeltaRule)


def state_spaces(layer: LayerSpec) -> bool:
    return isinstance(layer.recurrent, StateSpace)


def short_convolutions(layer: LayerSpec) -> bool:
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


def whole(config: Config) -> Part:
    return Part()


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentTensor:
    """A tensor kept in DRAM: its canonical name, its state_dict name, the configs of models and the layers that have
    it, and which part of the named tensor it is."""

    name: str
    source: str
    when: Callable[[Config], bool] = lambda config: True
    layers: Callable[[LayerSpec], bool] = every_layer  # of a model that has it
    part: Callable[[Config], Part] = whole


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
        return self.source_of("embedding.weight")

    @property
    def _outer(self) -> tuple[str, ...]:
        """State_dict names of what the base model lacks."""
        return tuple(tensor.source for tensor in self.resident if tensor.name.startswith("head."))

    @property
    def head(self) -> str:
        return self.source_of("head.weight")

    def present(self, config: Config) -> list[ResidentTensor]:
        """The resident tensors a model of this complete config has."""
        found = [tensor for tensor in self.resident if tensor.when(config)]
        if config.get(SHARED_BESIDE):
            found += [
                ResidentTensor(
                    name=f"layers.{{i}}.beside_{matrix}.weight",
                    source=source,
                    layers=lambda layer: layer.beside > 0,
                    part=self.matrix_parts.get(matrix, whole),
                )
                for matrix, source in self.shared_matrices.items()
            ]
        return found

    def with_prefix(self, names: Collection[str]) -> dict[str, str]:
        """State_dict name -> checkpoint name of a checkpoint's `names`; the ignored are left out.

        FormatError where a checkpoint carries a tensor both with and without `base_prefix`.
        """
        bare = self.embedding.removeprefix(self.base_prefix)
        prefix = self.base_prefix if bare in names and self.embedding not in names else ""
        begins = (*self._outer, self.base_prefix)
        result: dict[str, str] = {}
        for name in names:
            full = self.aliases.get(name, name)
            full = full if full.startswith(begins) else prefix + full
            if full in result:
                raise FormatError(f"the checkpoint has both {name} and {result[full]}")
            if not any(fnmatch.fnmatchcase(full, pattern) for pattern in self.ignored):
                result[full] = name
        return result


def tensor_shape(name: str, block: BlockSpec, layer: LayerSpec) -> Shape:
    """Shape of the tensor of a canonical name (pattern); `layer`: its own, or any where it belongs to none."""
    return _SHAPES[name](block, layer)


_ShapeOf = Callable[[Any, Any], Shape]  # of a BlockSpec, and of a LayerSpec that has the tensor


def _vectors(*names: str) -> dict[str, _ShapeOf]:
    """Shapes of vectors of d_model numbers."""
    return dict.fromkeys(names, lambda block, layer: (block.d_model,))


def _projections(prefix: str, *parts: str) -> dict[str, _ShapeOf]:
    """Projections of a mixer, with their biases."""

    def rows(part: str, layer: Any) -> int:
        return int((layer.recurrent if prefix else layer.mixer).rows[part])

    def inputs(part: str, block: Any, layer: Any) -> int:
        latent, rank = layer.mixer.latent, getattr(layer.mixer, "channel_rank", None)
        if rank is not None and part in ("decay", "out_gate"):
            return int(rank)
        if latent is None or part not in ("query", "value"):
            return int(block.d_model)
        return int(latent.rank if part == "value" else latent.query_rank or block.d_model)

    def shape(part: str, kind: str) -> _ShapeOf:
        if kind == "bias":
            return lambda block, layer: (rows(part, layer),)
        return lambda block, layer: (rows(part, layer), inputs(part, block, layer))

    return {f"{prefix}{part}.{kind}": shape(part, kind) for part in parts for kind in ("weight", "bias")}


def _recurrence(prefix: str) -> dict[str, _ShapeOf]:
    """Shapes of the other tensors of a mixer with a state.

    Where each channel decays, the convolution's taps are three tensors.
    """

    def decay_log(block: Any, layer: Any) -> Shape:
        heads = layer.recurrent.value_heads
        return (heads,) if getattr(layer.recurrent, "channel_rank", None) is None else (1, 1, heads, 1)

    def taps(part: str) -> _ShapeOf:
        return lambda block, layer: (layer.recurrent.rows[part], 1, layer.recurrent.kernel)

    return {
        **{f"{prefix}conv_{part}.weight": taps(part) for part in ("query", "key", "value")},
        f"{prefix}conv.weight": lambda block, layer: (layer.recurrent.channels, 1, layer.recurrent.kernel),
        f"{prefix}conv.bias": lambda block, layer: (layer.recurrent.channels,),
        f"{prefix}decay_log": decay_log,
        f"{prefix}decay_bias": lambda block, layer: (layer.recurrent.rows["decay"],),
        f"{prefix}skip": lambda block, layer: (layer.recurrent.value_heads,),
        f"{prefix}mixed_norm.weight": lambda block, layer: (layer.recurrent.norm_dim,),
    }


def _head_norm(part: str) -> dict[str, _ShapeOf]:
    """The norm of queries or keys, as wide as `Attention.query_key_norm` says; of latent attention, of a low rank."""

    def shape(block: Any, layer: Any) -> Shape:
        mixer = layer.mixer
        if mixer.latent is not None:
            return (mixer.latent.rank if part == "key" else mixer.latent.query_rank or 0,)
        of_one, heads = mixer.head_dim, mixer.kv_heads if part == "key" else mixer.heads
        widths = {"heads": (heads, of_one), "projection": (heads * of_one,)}
        return widths.get(mixer.query_key_norm, (of_one,))

    return dict.fromkeys((f"{part}_norm.weight", f"{part}_norm.bias"), shape)


_OF_MODEL: dict[str, _ShapeOf] = {
    "embedding.weight": lambda block, layer: (block.vocab_size, block.embed_dim),
    "positions.weight": lambda block, layer: (block.context + block.position_offset, block.d_model),
    "project_in.weight": lambda block, layer: (block.d_model, block.embed_dim),
    "project_out.weight": lambda block, layer: (block.embed_dim, block.d_model),
    **_vectors("embedding_norm.weight", "embedding_norm.bias", "final_norm.weight", "final_norm.bias"),
    "head.weight": lambda block, layer: (block.vocab_size, block.embed_dim),  # absent where tied to the embedding
    "head.bias": lambda block, layer: (block.vocab_size,),
    # Of `PerLayerEmbedding`; the table lies on flash.
    TOKEN_TABLE: lambda block, layer: (block.per_layer.rows, block.token_row),
    "per_layer_projection.weight": lambda block, layer: (block.token_row, block.d_model),
    "per_layer_projection_norm.weight": lambda block, layer: (block.per_layer.dim,),
    # Of `BlockSpec.streams`, of all but the first.
    **{
        f"streams.{stream}.{way}.weight": lambda block, layer: (block.d_model, block.d_model)
        for way in ("enter", "leave")
        for stream in range(7)
    },
}
# Of a layer, where "layers.{i}." comes before the names; those a layer has no use for are absent.
_OF_LAYER: dict[str, _ShapeOf] = {
    **_vectors(
        *(
            f"{norm}.{kind}"
            for norm in (
                *("attention_norm", "attention_output_norm", "ffn_norm", "ffn_output_norm"),
                *("ffn_experts_output_norm", "ffn_beside_norm", "ffn_beside_output_norm"),
            )
            for kind in ("weight", "bias")
        )
    ),
    # Of attention, whose layers that attend to another's keys and values have no key, value and key_norm. Of latent
    # attention the key is the row that is kept, key_up brings a head's query to its space, and value out of it.
    **_projections("", "query_down", "query", "key", "value", "out_gate"),
    "key_up.weight": lambda block, layer: (layer.mixer.heads * layer.mixer.latent.rank, layer.mixer.latent.plain_dim),
    **_head_norm("query"),
    **_head_norm("key"),
    "sinks": lambda block, layer: (layer.mixer.heads,),  # scores that softmax counts and that belong to no position
    "out.weight": lambda block, layer: (block.d_model, layer.mixer.mixed_dim),
    **_vectors("out.bias"),
    # Of a `DeltaRule`, as it says; of a `StateSpace`, whose channels are values, keys, queries, and of a
    # `ShortConvolution` "state." comes before the names.
    **_projections("", "beta", "decay", "decay_down", "gate_down"),
    **_recurrence(""),
    **_projections("state.", "query", "key", "value", "out_gate", "decay"),
    **_recurrence("state."),
    "state.out.weight": lambda block, layer: (block.d_model, layer.recurrent.mixed_dim),
    **_vectors("state.out.bias"),
    # Of `BlockSpec.sub_norms`.
    **dict.fromkeys(
        ("attention_sub_norm.weight", "attention_sub_norm.bias"), lambda block, layer: (layer.mixer.mixed_dim,)
    ),
    **dict.fromkeys(("ffn_sub_norm.weight", "ffn_sub_norm.bias"), lambda block, layer: (layer.neurons,)),
    # Of the feed-forward part, whose gates are here where they are resident (format/manifest.py) and not in rows.
    **dict.fromkeys(("ffn.up_bias", "ffn.gate_bias"), lambda block, layer: (layer.neurons,)),
    **_vectors("ffn.down_bias"),
    "scale": lambda block, layer: (1,),  # of the states that leave the layer
    # Of experts. A router that computes in fp32 is wide, whatever the model's dtype; choice.bias is of the scores by
    # which experts are chosen (`RouterSpec`), router_scale as its `norm_epsilon` says; expert_scale is of their
    # weights, times which each adds its expert_down_bias. The shared neurons' weight is the sigmoid of their gate.
    **dict.fromkeys(
        ("router.weight", "wide_router.weight", "ffn.expert_down_bias"),
        lambda block, layer: (layer.experts.count, block.d_model),
    ),
    **dict.fromkeys(("router.bias", "choice.bias", "expert_scale"), lambda block, layer: (layer.experts.count,)),
    **_vectors("router_scale"),
    "shared_gate.weight": lambda block, layer: (1, block.d_model),
    # Of a dense part beside experts (`LayerSpec.beside`).
    **dict.fromkeys(("beside_up.weight", "beside_gate.weight"), lambda block, layer: (layer.beside, block.d_model)),
    "beside_down.weight": lambda block, layer: (block.d_model, layer.beside),
    # Of `PerLayerEmbedding`, of `BlockSpec.streams` (stream_scale: of the first, before per_layer_gate), of `laurel`.
    "per_layer_gate.weight": lambda block, layer: (block.per_layer.dim, block.d_model),
    "per_layer_out.weight": lambda block, layer: (block.d_model, block.per_layer.dim),
    "stream_router.weight": lambda block, layer: (block.streams, block.d_model),
    "stream_predict": lambda block, layer: (block.streams**2, block.streams),
    "stream_correct": lambda block, layer: (block.streams, block.streams),
    "laurel_in.weight": lambda block, layer: (block.laurel, block.d_model),
    "laurel_out.weight": lambda block, layer: (block.d_model, block.laurel),
    **_vectors("per_layer_norm.weight", "stream_router_norm.weight", "stream_scale", "laurel_norm.weight"),
}
_SHAPES = _OF_MODEL | {f"layers.{{i}}.{name}": shape for name, shape in _OF_LAYER.items()}
