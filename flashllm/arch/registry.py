"""The one table of differences between architectures, keyed by Hugging Face's `model_type`.

Says where a model's FFN matrices, biases and sizes are, which activation it has, and which variants we refuse.
Reads plain config dictionaries; knows no files, no tensors and no transformers.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from flashllm.errors import FormatError, UnsupportedModelError

ACTIVATIONS = ("relu", "squared_relu", "fatrelu")
MAX_LAYERS = 4096
MAX_DIMENSION = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class When:
    """A condition on the config: `key` equals `equals`, or, with `differs_from`, is set and unlike that other key."""

    key: str
    equals: object = True
    differs_from: str | None = None

    def holds(self, config: Mapping[str, Any]) -> bool:
        """Whether `config` (defaults filled in) meets the condition."""
        value = config.get(self.key)
        if self.differs_from is not None:
            return value is not None and value != config.get(self.differs_from)
        return value == self.equals


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentTensor:
    """A tensor kept in DRAM, under its state_dict name; "{i}" stands for the layer. Absent where `when` fails."""

    name: str
    when: When | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A variant of the architecture that cannot be run, and what to tell the user."""

    when: When
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderBlock:
    """Submodules of a decoder layer that computes h += out(attention(q, k, v of norm(h))), then h += FFN(ffn_norm(h)).

    With layer norms, queries scaled by head_dim^-0.5 before their products and positions that are part of h: what the
    native core runs in one call (flashllm/csrc/model/decoder.h).
    """

    norm: str
    query: str
    key: str
    value: str
    out: str
    ffn_norm: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchitectureSpec:
    """One architecture. Tensor names are the causal-LM class's state_dict names with "{i}" for the layer."""

    model_type: str
    base_prefix: str  # what checkpoints of the headless base model leave out: "model."
    head: str  # the head's weight; not stored where it is tied to the embedding
    embedding: str
    up_weight: str  # [d_ff, d_model]
    gate_weight: str | None
    down_weight: str  # [d_model, d_ff]
    up_bias: str | None
    gate_bias: str | None
    down_bias: str | None
    ffn_bias_when: When | None  # None: always, where a bias is named at all
    resident: tuple[ResidentTensor, ...]  # without the FFN biases and the head
    ffn_norm: str | None = None  # the module whose normed output the FFN reads
    ignored: tuple[str, ...] = ()  # names that old checkpoints carry and nothing reads
    activation_key: str
    activations: Mapping[str, str]  # Hugging Face's name -> one of ACTIVATIONS
    activation_threshold_key: str | None = None  # fatrelu's threshold
    layers_module: str  # where the decoder layers are in the causal-LM class
    ffn_module: str  # the submodule of a layer that the streaming FFN replaces
    silenced_modules: tuple[str, ...] = ()  # submodules whose work it does too
    parallel_attention: bool = False  # the FFN reads the same input as the attention
    decoder_block: DecoderBlock | None = None  # None: a layer's modules run one by one
    num_layers_key: str
    d_model_key: str
    d_ff_key: str
    num_heads_key: str
    num_kv_heads_key: str | None = None  # None: as many as query heads
    head_dim_key: str | None = None  # None: d_model / heads
    context_key: str
    defaults: Mapping[str, Any]  # values of keys a config.json may leave out
    refusals: tuple[Refusal, ...] = ()

    def __post_init__(self) -> None:
        for name in self.activations.values():
            if name not in ACTIVATIONS:
                raise ValueError(f"activations: {name!r} is not one of {', '.join(ACTIVATIONS)}")
        if self.gate_weight is None and self.gate_bias is not None:
            raise ValueError(f"gate_bias {self.gate_bias!r} without a gate_weight")

    def matrices(self) -> dict[str, str]:
        """Name pattern of each FFN matrix, in the order of a row: up, gate (if any), down."""
        gate = {} if self.gate_weight is None else {"gate": self.gate_weight}
        return {"up": self.up_weight, **gate, "down": self.down_weight}

    @property
    def decoding(self) -> str:
        """How a layer runs at one new token, with predictors: for people and records."""
        return "module by module" if self.decoder_block is None else "one call a layer"

    def ffn_biases(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Name patterns of the FFN biases a model of this (complete) config has."""
        if self.ffn_bias_when is not None and not self.ffn_bias_when.holds(config):
            return ()
        return tuple(name for name in (self.up_bias, self.gate_bias, self.down_bias) if name is not None)


_LINEAR_BIAS = When(key="enable_bias")
_NORM_AFFINE = When(key="layer_norm_elementwise_affine")
_PROJECTED = When(key="word_embed_proj_dim", differs_from="hidden_size")
_OPT_LAYER = "model.decoder.layers.{i}."

OPT = ArchitectureSpec(
    model_type="opt",
    base_prefix="model.",
    head="lm_head.weight",
    embedding="model.decoder.embed_tokens.weight",
    up_weight=_OPT_LAYER + "fc1.weight",
    gate_weight=None,
    down_weight=_OPT_LAYER + "fc2.weight",
    up_bias=_OPT_LAYER + "fc1.bias",
    gate_bias=None,
    down_bias=_OPT_LAYER + "fc2.bias",
    ffn_bias_when=_LINEAR_BIAS,
    resident=(
        ResidentTensor(name="model.decoder.embed_tokens.weight"),
        ResidentTensor(name="model.decoder.embed_positions.weight"),
        ResidentTensor(name="model.decoder.project_in.weight", when=_PROJECTED),
        ResidentTensor(name="model.decoder.project_out.weight", when=_PROJECTED),
        *(ResidentTensor(name=f"{_OPT_LAYER}self_attn.{p}_proj.weight") for p in ("q", "k", "v", "out")),
        *(
            ResidentTensor(name=f"{_OPT_LAYER}self_attn.{p}_proj.bias", when=_LINEAR_BIAS)
            for p in ("q", "k", "v", "out")
        ),
        ResidentTensor(name=_OPT_LAYER + "self_attn_layer_norm.weight", when=_NORM_AFFINE),
        ResidentTensor(name=_OPT_LAYER + "self_attn_layer_norm.bias", when=_NORM_AFFINE),
        ResidentTensor(name=_OPT_LAYER + "final_layer_norm.weight", when=_NORM_AFFINE),
        ResidentTensor(name=_OPT_LAYER + "final_layer_norm.bias", when=_NORM_AFFINE),
        ResidentTensor(name="model.decoder.final_layer_norm.weight", when=_NORM_AFFINE),
        ResidentTensor(name="model.decoder.final_layer_norm.bias", when=_NORM_AFFINE),
    ),
    ffn_norm=_OPT_LAYER + "final_layer_norm",
    ignored=("model.decoder.version",),
    layers_module="model.decoder.layers",
    ffn_module="fc1",  # OPT keeps fc1, activation_fn and fc2 inline in the layer
    silenced_modules=("activation_fn", "fc2"),
    decoder_block=DecoderBlock(
        norm="self_attn_layer_norm",
        query="self_attn.q_proj",
        key="self_attn.k_proj",
        value="self_attn.v_proj",
        out="self_attn.out_proj",
        ffn_norm="final_layer_norm",
    ),
    activation_key="activation_function",
    activations={"relu": "relu"},
    num_layers_key="num_hidden_layers",
    d_model_key="hidden_size",
    d_ff_key="ffn_dim",
    num_heads_key="num_attention_heads",
    context_key="max_position_embeddings",
    defaults={  # of transformers' OPTConfig
        "num_hidden_layers": 12,
        "hidden_size": 768,
        "ffn_dim": 3072,
        "num_attention_heads": 12,
        "max_position_embeddings": 2048,
        "activation_function": "relu",
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "do_layer_norm_before": True,
        "_remove_final_layer_norm": False,
        "tie_word_embeddings": True,
    },
    refusals=(
        Refusal(
            when=When(key="do_layer_norm_before", equals=False),
            reason="it normalises after each block (do_layer_norm_before is false, as in opt-350m)",
        ),
        Refusal(
            when=When(key="_remove_final_layer_norm"),
            reason="it has no final norm (_remove_final_layer_norm is true)",
        ),
    ),
)

ARCHITECTURES: dict[str, ArchitectureSpec] = {OPT.model_type: OPT}


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
        _check_size("num_layers", self.num_layers, MAX_LAYERS)
        _check_size("d_model", self.d_model, MAX_DIMENSION)
        _check_size("d_ff", self.d_ff, MAX_DIMENSION)
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, not {str(self.activation)[:80]!r}")
        for name in ("gated", "ffn_bias"):
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"{name} must be true or false, not {getattr(self, name)!r}")

    @property
    def matrices(self) -> tuple[str, ...]:
        """The matrices of a row, in its order."""
        return ("up", "gate", "down") if self.gated else ("up", "down")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """What the KV cache's size depends on."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    context: int  # tokens

    def kv_nbytes_per_token(self, itemsize: int) -> int:
        """Bytes of keys and values of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize


def spec_of(model_type: object) -> ArchitectureSpec:
    """The table's entry. UnsupportedModelError where there is none."""
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedModelError(f"model_type {str(model_type)[:80]!r} is not supported; supported: {known}")
    return ARCHITECTURES[model_type]


def complete_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` (a config.json) with the architecture's defaults for the keys it leaves out."""
    return {**spec_of(config.get("model_type")).defaults, **config}


def resolve(config: Mapping[str, Any]) -> Architecture:
    """The architecture a config.json describes.

    UnsupportedModelError for an unknown model_type, an unsupported variant or activation; FormatError for sizes that
    cannot be.
    """
    spec = spec_of(config.get("model_type"))
    config = complete_config(config)
    for refusal in spec.refusals:
        if refusal.when.holds(config):
            raise UnsupportedModelError(f"this {spec.model_type} model is not supported: {refusal.reason}")
    activation = config.get(spec.activation_key)
    if not isinstance(activation, str) or activation not in spec.activations:
        known = ", ".join(spec.activations)
        message = f"activation {str(activation)[:80]!r} is not supported for {spec.model_type}; supported: {known}."
        raise UnsupportedModelError(f"{message} Only FFNs of the ReLU family are sparse enough to stream")
    attention_shape(config)  # its sizes are checked with the others
    try:
        return Architecture(
            model_type=spec.model_type,
            num_layers=config[spec.num_layers_key],
            d_model=config[spec.d_model_key],
            d_ff=config[spec.d_ff_key],
            activation=spec.activations[activation],
            gated=spec.gate_weight is not None,
            ffn_bias=bool(spec.ffn_biases(config)),
        )
    except (KeyError, ValueError) as error:
        raise FormatError(f"config.json: {error}") from error


def attention_shape(config: Mapping[str, Any]) -> AttentionShape:
    """The KV cache's shape from a config.json. FormatError for sizes that cannot be."""
    spec = spec_of(config.get("model_type"))
    config = complete_config(config)
    limits = {
        spec.num_layers_key: MAX_LAYERS,
        spec.d_model_key: MAX_DIMENSION,
        spec.num_heads_key: MAX_DIMENSION,
        spec.context_key: 2**30,
    }
    try:
        for key, limit in limits.items():
            _check_size(key, config.get(key), limit)
        d_model, num_heads = config[spec.d_model_key], config[spec.num_heads_key]
        if spec.head_dim_key is None and d_model % num_heads:
            raise ValueError(f"{num_heads} heads do not divide {spec.d_model_key} {d_model}")
        head_dim: Any = d_model // num_heads if spec.head_dim_key is None else config.get(spec.head_dim_key)
        num_kv_heads: Any = num_heads if spec.num_kv_heads_key is None else config.get(spec.num_kv_heads_key)
        _check_size("head dimension", head_dim, MAX_DIMENSION)
        _check_size("number of key-value heads", num_kv_heads, MAX_DIMENSION)
    except ValueError as error:
        raise FormatError(f"config.json: {error}") from error
    return AttentionShape(
        num_layers=config[spec.num_layers_key],
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        context=config[spec.context_key],
    )


def resident_names(config: Mapping[str, Any]) -> list[str]:
    """State_dict names of every tensor that stays in DRAM, FFN biases included, the tied head left out.

    In the order of a forward pass; layer tensors are grouped by layer.
    """
    spec = spec_of(config.get("model_type"))
    config = complete_config(config)
    present = [tensor.name for tensor in spec.resident if tensor.when is None or tensor.when.holds(config)]
    of_layer = [name for name in present if "{i}" in name] + list(spec.ffn_biases(config))
    outside = [name for name in present if "{i}" not in name]
    head = [] if config.get("tie_word_embeddings") else [spec.head]
    layers = range(config[spec.num_layers_key])
    return outside + [name.format(i=layer) for layer in layers for name in of_layer] + head


def canonical_names(spec: ArchitectureSpec, names: Collection[str]) -> dict[str, str]:
    """State_dict name -> checkpoint name. Base-model checkpoints leave `base_prefix` out; the ignored are left out.

    FormatError where a checkpoint carries a tensor both with and without the prefix.
    """
    bare = spec.embedding.removeprefix(spec.base_prefix)
    prefix = spec.base_prefix if bare in names and spec.embedding not in names else ""
    result: dict[str, str] = {}
    for name in names:
        full = name if name == spec.head or name.startswith(spec.base_prefix) else prefix + name
        if full in result:
            raise FormatError(f"the checkpoint has both {name} and {result[full]}")
        if full not in spec.ignored:
            result[full] = name
    return result


def _check_size(name: str, value: Any, limit: int) -> None:
    if type(value) is not int or not 0 < value <= limit:
        raise ValueError(f"{name} must be an integer from 1 to {limit}, not {str(value)[:80]!r}")
