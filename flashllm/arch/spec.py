"""The vocabulary of an architecture file: where a checkpoint's tensors are, and what one decoder block computes.

An `ArchitectureSpec` maps the tensors of a Hugging Face model_type to canonical names, which are the same for every
architecture; a `BlockSpec` is all that the native core knows of one. Plain values: no tensors and no files.

Canonical names, "{i}" for the layer; those a model has no use for are absent:

    embedding.weight [vocab, embed]             positions.weight [context + offset, d_model]
    project_in.weight [d_model, embed]          project_out.weight [embed, d_model]
    layers.{i}.attention_norm.weight, .bias     layers.{i}.ffn_norm.weight, .bias           [d_model]
    layers.{i}.query.weight [heads * head_dim, d_model], .bias; key and value with kv_heads
    layers.{i}.out.weight [d_model, heads * head_dim], .bias
    layers.{i}.ffn.up_bias, .gate_bias [d_ff]   layers.{i}.ffn.down_bias [d_model]
    final_norm.weight, .bias [d_model]          head.weight [vocab, embed], absent where tied to the embedding
"""

import fnmatch
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from flashllm.errors import FormatError, UnsupportedModelError

ACTIVATIONS = ("relu", "squared_relu", "silu")
SPARSE_ACTIVATIONS = ("relu", "squared_relu")  # exactly zero for most inputs, so that a predictor can leave them out
MAX_LAYERS = 4096
MAX_DIMENSION = 2**20
MAX_CONTEXT = 2**30

Config = Mapping[str, Any]  # a config.json, defaults filled in
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec:
    """How a decoder computes, handed to the native core as it is.

    A pre-norm block is h += out(attention(norm(h))), then h += FFN(ffn_norm(h)); a post-norm block is
    h = norm(h + out(attention(h))), then h = ffn_norm(h + FFN(h)). A gated FFN is down(activation(gate(x)) * up(x)),
    any other down(activation(up(x))).
    """

    d_model: int
    embed_dim: int  # of the embedding and the head; project_in and project_out where it differs from d_model
    vocab_size: int
    context: int  # positions the model knows
    heads: int
    kv_heads: int  # divides heads
    head_dim: int
    query_scale: float  # of the queries, after their bias and rotation
    norm: Literal["layer", "rms"]
    norm_epsilon: float
    pre_norm: bool
    final_norm: bool  # before the head
    positions: Literal["learned", "rotary", "none"]
    position_offset: int = 0  # row of positions.weight of the first token
    rotary_dims: int = 0  # of each head, from its first on
    rotary_style: Literal["half", "interleaved"] = "half"  # the partner of dimension j: j + dims / 2, or j + 1
    inverse_frequency: tuple[float, ...] | None = None  # [rotary_dims / 2]: radians a position
    rotary_scaling: float = 1.0  # of cosines and sines
    activation: str  # one of ACTIVATIONS
    gated: bool
    tied_head: bool  # the head is the embedding
    embedding_scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("d_model", "embed_dim", "vocab_size", "heads", "kv_heads", "head_dim"):
            check_size(name, getattr(self, name), 2**30 if name == "vocab_size" else MAX_DIMENSION)
        check_size("context", self.context, MAX_CONTEXT)
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.kv_heads} key-value heads do not divide {self.heads} heads")
        if not (math.isfinite(self.norm_epsilon) and self.norm_epsilon >= 0):
            raise ValueError(f"norm_epsilon must be a number from 0, not {self.norm_epsilon}")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, not {str(self.activation)[:80]!r}")
        if (self.positions == "rotary") != (self.inverse_frequency is not None):
            raise ValueError("inverse_frequency belongs to rotary positions, and they need it")
        frequencies = self.inverse_frequency or ()
        if self.rotary_dims != 2 * len(frequencies) or self.rotary_dims > self.head_dim:
            raise ValueError(f"{self.rotary_dims} rotary dimensions do not fit heads of {self.head_dim}")
        if not all(math.isfinite(frequency) for frequency in frequencies):
            raise ValueError("inverse_frequency must be finite numbers")

    @property
    def query_dim(self) -> int:
        """Outputs of the query projection, inputs of the output projection."""
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Outputs of the key projection, and of the value projection."""
        return self.kv_heads * self.head_dim

    def kv_nbytes_per_token(self, num_layers: int, itemsize: int) -> int:
        """Bytes of keys and values of one token over all layers."""
        return 2 * num_layers * self.kv_dim * itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What the manifest records of a model's architecture."""

    model_type: str
    num_layers: int
    d_model: int
    d_ff: int
    activation: str
    gated: bool
    ffn_bias: bool

    def __post_init__(self) -> None:
        if type(self.model_type) is not str or not 0 < len(self.model_type) <= 64:
            raise ValueError(f"model_type must be a short name, not {str(self.model_type)[:80]!r}")
        check_size("num_layers", self.num_layers, MAX_LAYERS)
        check_size("d_model", self.d_model, MAX_DIMENSION)
        check_size("d_ff", self.d_ff, MAX_DIMENSION)
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, not {str(self.activation)[:80]!r}")
        for name in ("gated", "ffn_bias"):
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"{name} must be true or false, not {getattr(self, name)!r}")

    @property
    def matrices(self) -> tuple[str, ...]:
        """The matrices of a row, in its order."""
        return ("up", "gate", "down") if self.gated else ("up", "down")

    @property
    def sparse(self) -> bool:
        """Whether most neurons are exactly zero for a token, so that modes sparse and oracle make sense."""
        return self.activation in SPARSE_ACTIVATIONS


def _always(config: Config) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentTensor:
    """A tensor kept in DRAM: its canonical name, its state_dict name, and the configs of models that have it."""

    name: str
    source: str
    when: Callable[[Config], bool] = _always


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchitectureSpec:
    """One architecture. Source names are the causal-LM class's state_dict names, with "{i}" for the layer."""

    model_type: str
    base_prefix: str  # what checkpoints of the headless base model leave out: "model."
    matrices: Mapping[str, str]  # FFN weights by their place in a row: up, gate (if any), down
    resident: tuple[ResidentTensor, ...]  # in the order of a forward pass
    num_layers_key: str
    d_ff_key: str
    defaults: Mapping[str, Any]  # values of keys a config.json may leave out
    block: Callable[[Config], BlockSpec]  # of a complete config; raises as `registry.block_spec`
    ignored: tuple[str, ...] = ()  # names ("*": any text) that old checkpoints carry and nothing reads

    def __post_init__(self) -> None:
        if tuple(self.matrices) not in (("up", "down"), ("up", "gate", "down")):
            raise ValueError(f"matrices must be up, down or up, gate, down, not {', '.join(self.matrices)}")
        for tensor in self.resident:
            if tensor.name not in _SHAPES:
                raise ValueError(f"{tensor.name!r} is not a canonical name")

    def source_of(self, name: str) -> str:
        """State_dict name (pattern) of the tensor of this canonical name (pattern). KeyError where it has none."""
        return {tensor.name: tensor.source for tensor in self.resident}[name]

    @property
    def embedding(self) -> str:
        """State_dict name of the embedding."""
        return self.source_of("embedding.weight")

    @property
    def head(self) -> str:
        """State_dict name of the head."""
        return self.source_of("head.weight")

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
            full = name if name == self.head or name.startswith(self.base_prefix) else prefix + name
            if full in result:
                raise FormatError(f"the checkpoint has both {name} and {result[full]}")
            if not any(fnmatch.fnmatchcase(full, pattern) for pattern in self.ignored):
                result[full] = name
        return result


def tensor_shape(name: str, block: BlockSpec, d_ff: int) -> Shape:
    """Shape of the tensor of a canonical name (pattern)."""
    return _SHAPES[name](block, d_ff)


def _projection(part: str, rows: Callable[[BlockSpec], int]) -> dict[str, Callable[[BlockSpec, int], Shape]]:
    return {
        f"layers.{{i}}.{part}.weight": lambda block, d_ff: (rows(block), block.d_model),
        f"layers.{{i}}.{part}.bias": lambda block, d_ff: (rows(block),),
    }


_NORMS = ("layers.{i}.attention_norm", "layers.{i}.ffn_norm", "final_norm")
_SHAPES: dict[str, Callable[[BlockSpec, int], Shape]] = {
    "embedding.weight": lambda block, d_ff: (block.vocab_size, block.embed_dim),
    "positions.weight": lambda block, d_ff: (block.context + block.position_offset, block.d_model),
    "project_in.weight": lambda block, d_ff: (block.d_model, block.embed_dim),
    "project_out.weight": lambda block, d_ff: (block.embed_dim, block.d_model),
    **{f"{norm}.{part}": lambda block, d_ff: (block.d_model,) for norm in _NORMS for part in ("weight", "bias")},
    **_projection("query", lambda block: block.query_dim),
    **_projection("key", lambda block: block.kv_dim),
    **_projection("value", lambda block: block.kv_dim),
    "layers.{i}.out.weight": lambda block, d_ff: (block.d_model, block.query_dim),
    "layers.{i}.out.bias": lambda block, d_ff: (block.d_model,),
    "layers.{i}.ffn.up_bias": lambda block, d_ff: (d_ff,),
    "layers.{i}.ffn.gate_bias": lambda block, d_ff: (d_ff,),
    "layers.{i}.ffn.down_bias": lambda block, d_ff: (block.d_model,),
    "head.weight": lambda block, d_ff: (block.vocab_size, block.embed_dim),
}


def check_size(name: str, value: Any, limit: int = MAX_DIMENSION) -> int:
    """`value`, an integer from 1 to `limit`. ValueError otherwise."""
    if type(value) is not int or not 0 < value <= limit:
        raise ValueError(f"{name} must be an integer from 1 to {limit}, not {str(value)[:80]!r}")
    return value


def check_number(name: str, value: Any) -> float:
    """`value`, a finite number. ValueError otherwise."""
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"{name} must be a number, not {str(value)[:80]!r}")
    return float(value)


def known_activation(config: Config, key: str, known: Mapping[str, str]) -> str:
    """Our name of the activation that `config[key]` names. UnsupportedModelError for one not in `known`."""
    name = config.get(key)
    if not isinstance(name, str) or name not in known:
        model_type = config.get("model_type")
        raise UnsupportedModelError(
            f"activation {str(name)[:80]!r} is not supported for {model_type}; supported: {', '.join(known)}"
        )
    return known[name]
