"""A decoder's computation: a `BlockSpec` is all that the native core knows of an architecture. And what a
manifest records of one (`Architecture`). Plain values: no tensors and no files.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from flashllm.arch.mixers import MAX_DIMENSION, Attention, Keeping, Mixer, StateSpace, check_cap, check_size
from flashllm.arch.mixture import ExpertsSpec
from flashllm.base.checks import check_from_zero, check_int, is_number, short
from flashllm.errors import UnsupportedModelError

# Those of the ReLU family are exactly zero for most inputs, so that a predictor can leave neurons out. "drelu" is
# relu(gate(x)) * relu(up(x)) (Song et al., 2024: TurboSparse); "fatrelu" keeps what is above a threshold (Kurtz et
# al., 2020; Song et al., 2024: ProSparse).
SPARSE_ACTIVATIONS = ("relu", "squared_relu", "drelu", "fatrelu")
# "clamped_swiglu" is gpt-oss's: g = min(gate, 7) and u = max(-7, min(up, 7)) make g * sigmoid(1.702 g) * (u + 1).
ACTIVATIONS = (*SPARSE_ACTIVATIONS, "silu", "gelu", "gelu_tanh", "quick_gelu", "clamped_swiglu")
MAX_LAYERS = 4096
MAX_CONTEXT = 2**30
SHARED_BESIDE = "shared_experts_beside"  # of a config.json that a conversion wrote: `with_shared_beside`

Config = Mapping[str, Any]  # a config.json, defaults filled in


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """A layer: its mixer, which lets tokens see earlier ones, its feed-forward part, and where its norms are. It may
    lack one of the two.

    `norms` says where it does h += f(h), for f the mixer and then the feed-forward part:

        input:  h += f(norm(h))           sum:  h = norm(h + f(h))
        output: h += output_norm(f(h))    both: h += output_norm(f(norm(h)))

    A `parallel` layer adds both of the same h.
    """

    mixer: Mixer | None
    second: StateSpace | None = None  # of the same inputs as the mixer; what both make is added
    norms: Literal["input", "sum", "output", "both"] = "input"
    parallel: bool = False
    shared_norm: bool = False  # of a parallel layer: the FFN reads what the mixer reads
    neurons: int  # of the feed-forward part; 0: there is none
    experts: ExpertsSpec | None = None  # that the neurons belong to; None: the feed-forward part is dense
    # Neurons of a dense part beside the experts, which is resident: the sum of both is what comes of the feed-forward
    # part. With `beside_norms` each has a norm of its own before it and behind it; else it is a shared expert, weighed
    # by the gate of those, if there is one (`with_shared_beside`).
    beside: int = 0
    beside_norms: bool = False
    activation_threshold: float = 0.0  # of fatrelu: what is not above it becomes zero
    activation_scale: float = 1.0  # of any: of what goes into it
    ffn_scale: float = 1.0  # of the feed-forward part's output
    activation_cut: float = 0.0  # of any: results of a smaller magnitude become zero (Lee et al., 2024: CATS)
    # Of a gated one whose activation of 0 is 0: a token's gates, before their activation, become max(0, gate - c), with
    # c their mean and so many of their standard deviations (Gemma Team, 2025: Gemma 3n's statistical top-k).
    gate_deviations: float | None = None

    def __post_init__(self) -> None:
        if self.parallel and self.norms != "input":
            raise ValueError("a parallel layer has its norms before attention and FFN")
        if self.shared_norm and not self.parallel:
            raise ValueError("only a parallel layer shares its norm")
        if self.neurons or self.mixer is None:
            check_size("a layer's neurons", self.neurons)
        if (self.mixer is None or not self.neurons) and (self.norms != "input" or self.parallel):
            raise ValueError("a layer without a mixer, or without a feed-forward part, has its norm before the other")
        if self.second is not None and not isinstance(self.mixer, Attention):
            raise ValueError("a layer's second mixer is beside attention")
        if self.experts is not None and self.neurons != self.experts.neurons:
            raise ValueError(f"{self.experts.neurons} neurons of experts are not {self.neurons}")
        if self.beside and self.experts is None:
            raise ValueError("a dense part lies beside experts")
        if self.beside_norms and (not self.beside or self.norms != "both"):
            raise ValueError("a dense part with norms of its own lies beside experts, with norms before and behind")
        if self.gate_deviations is not None:
            check_number("gate_deviations", self.gate_deviations)
            if self.experts is not None or self.activation_cut or not self.neurons:
                raise ValueError("gates are cut by their deviations in a dense feed-forward part without another cut")
        for name in ("activation_threshold", "activation_cut"):
            check_from_zero(name, getattr(self, name))

    @property
    def twice(self) -> bool:
        """True where its neurons' rows pass twice, for all gates and then for what is left of them."""
        return self.gate_deviations is not None

    @property
    def attention(self) -> Attention:
        """Its mixer. ValueError where that attends to no keys and values."""
        if not isinstance(self.mixer, Attention):
            raise ValueError("the layer attends to no keys and values")
        return self.mixer

    @property
    def recurrent(self) -> Keeping | None:
        """Its mixer that keeps a state; None: it has none."""
        return self.second if self.second is not None or isinstance(self.mixer, Attention) else self.mixer

    def has_norm(self, name: str) -> bool:
        before, behind = self.norms != "output", self.norms in ("output", "both")
        of_heads = self.mixer is not None and self.mixer.query_key_norm != "none"
        latent = None if self.mixer is None else self.mixer.latent
        return {
            "attention_norm": before and self.mixer is not None,
            "ffn_norm": before and bool(self.neurons) and not self.shared_norm,
            "attention_output_norm": behind,
            "ffn_output_norm": behind,
            "query_norm": of_heads or (latent is not None and latent.query_rank is not None),
            "key_norm": (of_heads and self._shared is None) or latent is not None,
            **dict.fromkeys(
                ("ffn_experts_output_norm", "ffn_beside_norm", "ffn_beside_output_norm"), self.beside_norms
            ),
        }.get(name, True)

    @property
    def _shared(self) -> int | None:
        return self.mixer.shared if isinstance(self.mixer, Attention) else None

    @property
    def ffn_input_norm(self) -> str | None:
        """Canonical name, within a layer, of the norm whose output the FFN reads; None where it reads the sum."""
        if self.norms == "output":
            return None
        return "attention_norm" if self.norms == "sum" or self.shared_norm else "ffn_norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class PerLayerEmbedding:
    """A table with a row for each token's id (Gemma Team, 2025: Gemma 3n), of which every layer adds its own `dim`
    numbers, and as many that come of the states before the first layer, through a gate that its own states make:

        e = (row * sqrt(dim) + norm(projection(embedded) / sqrt(d_model))) / sqrt(2)
        h += norm(out(activation(gate(h)) * e[layer]))
    """

    rows: int  # an id beyond them has the first one's
    dim: int

    def __post_init__(self) -> None:
        check_size("rows", self.rows, 2**30)
        check_size("dim", self.dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec:
    """How a decoder computes, handed to the native core as it is: what lies before and behind its layers, what they
    have in common, and each of them.

    A gated FFN is down(activation(gate(x)) * up(x)), any other down(activation(up(x))).
    """

    d_model: int
    embed_dim: int  # of the embedding and the head; project_in and project_out where it differs from d_model
    vocab_size: int
    context: int  # positions the model knows
    norm: Literal["layer", "rms"]
    norm_epsilon: float
    norm_shift: float = 0.0  # added to norms' weights when they are used: 1 where checkpoints keep weight - 1
    sub_norms: bool = False  # before the output projection and before the down projection, over all of their inputs
    # The inputs of a layer's products are rounded to 255 multiples of the token's largest (Ma et al., 2024: BitNet).
    rounded_inputs: bool = False
    embedding_norm: bool = False  # of the embedded tokens, before the first layer
    final_norm: bool  # before the head
    learned_positions: bool = False  # they are added to the embedding
    position_offset: int = 0  # row of positions.weight of the first token
    layers: tuple[LayerSpec, ...]  # every layer
    activation: str  # one of ACTIVATIONS
    gated: bool
    tied_head: bool  # the head is the embedding
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what a layer adds to h
    logit_scale: float = 1.0
    logit_softcap: float | None = None  # logits are cap * tanh(logit / cap)
    per_layer: PerLayerEmbedding | None = None
    # Alternating updates (Baykal et al., 2023): so many states of a token, the first of which is embedded, and the
    # others are as long as it. The layers compute on what they predict of the first; 0: one state, which they change.
    #
    #     m(h) = tanh(router(norm(h) / d_model));  h[j] += sum_i (predict m(h[0]))[j, i] h[i]
    #     y = layer(h[0]);                         h[j] += (y - h[0]) (1 + (correct m(y))[j])
    streams: int = 0
    laurel: int = 0  # rank of a map around each mixer: h = (h + f(x) + x + norm(out(in(x)))) / sqrt(2), x = norm(h)

    def __post_init__(self) -> None:
        for name in ("d_model", "embed_dim", "vocab_size"):
            check_size(name, getattr(self, name), 2**30 if name == "vocab_size" else MAX_DIMENSION)
        check_size("context", self.context, MAX_CONTEXT)
        check_from_zero("norm_epsilon", self.norm_epsilon)
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, not {str(self.activation)[:80]!r}")
        if self.activation in ("drelu", "clamped_swiglu") and not self.gated:
            raise ValueError(f"activation {self.activation} needs a gate")
        if not 0 < len(self.layers) <= MAX_LAYERS:
            raise ValueError(f"a model has from 1 to {MAX_LAYERS} layers, not {len(self.layers)}")
        if not any(isinstance(layer.mixer, Attention) for layer in self.layers):
            raise ValueError("a model needs a layer that attends to keys and values")
        for number, layer in enumerate(self.layers):
            if isinstance(layer.mixer, Attention) and layer.mixer.shared is not None:
                self._check_shared(number, layer.mixer)
        if len({layer.experts for layer in self.layers} - {None}) > 1:
            raise ValueError("layers that are mixtures of experts must be alike")
        check_cap("logit_softcap", self.logit_softcap)
        if self.laurel:
            check_size("laurel", self.laurel)
        if self.streams and not (2 <= self.streams <= 8 and all(layer.norms == "both" for layer in self.layers)):
            raise ValueError("alternating updates have 2 to 8 streams, and layers with norms before and behind")
        if any(layer.twice for layer in self.layers) and (not self.gated or self.sub_norms):
            raise ValueError("gates are cut where there are some, and no norm lies behind them")
        if self.rounded_inputs and (
            not self.sub_norms
            or any(layer.norms != "input" or layer.parallel for layer in self.layers)
            or any(layer.recurrent or layer.mixer is None or not layer.neurons for layer in self.layers)
        ):
            raise ValueError("inputs are rounded behind norms: those of attention and feed-forward part, and sub_norms")
        if self.sub_norms and (self.norm != "rms" or self.experts is not None):
            raise ValueError("sub_norms are RMS norms, and not of a mixture of experts")

    @property
    def state_width(self) -> int:
        """Numbers of a token's states as they go through the layers (csrc/model/block.h)."""
        return self.d_model * (self.streams + 1 if self.streams else 1)

    @property
    def waiting(self) -> int:
        """Values of a token in a layer that wait until those of all of its neurons are there, at most."""
        return max((1 if self.sub_norms else 2 if layer.twice else 0) * layer.neurons for layer in self.layers)

    @property
    def token_row(self) -> int:
        """Numbers of a row of per-layer embeddings; 0 where there are none."""
        return 0 if self.per_layer is None else len(self.layers) * self.per_layer.dim

    def _check_shared(self, number: int, mixer: Attention) -> None:
        other = self.layers[mixer.shared].mixer if mixer.shared is not None and mixer.shared < number else None
        if not isinstance(other, Attention) or other.shared is not None:
            raise ValueError(f"layer {number} needs an earlier layer with keys and values of its own")
        if (other.kv_heads, other.head_dim, other.window) != (mixer.kv_heads, mixer.head_dim, mixer.window):
            raise ValueError(f"the keys and values of layer {mixer.shared} do not fit layer {number}")

    @property
    def experts(self) -> ExpertsSpec | None:
        """The experts of those layers that are mixtures of them; None where no layer is."""
        return next((layer.experts for layer in self.layers if layer.experts is not None), None)

    @property
    def attentions(self) -> tuple[Attention, ...]:
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, Attention))

    @property
    def recurrent(self) -> tuple[Keeping, ...]:
        return tuple(layer.recurrent for layer in self.layers if layer.recurrent is not None)

    @property
    def heads(self) -> int:
        """Heads of the attention that has most."""
        return max(mixer.heads for mixer in self.attentions)

    @property
    def query_dim(self) -> int:
        """`Attention.query_dim` of the layer that has most."""
        return max(mixer.query_dim for mixer in self.attentions)

    @property
    def kv_dim(self) -> int:
        """`Attention.kv_dim` of the layer that has most."""
        return max(mixer.kv_dim for mixer in self.attentions)

    def kv_nbytes_per_token(self, itemsize: int) -> int:
        """Bytes of keys and values of one token over all layers."""
        return itemsize * sum(mixer.kv_rows * mixer.kv_dim for mixer in self.attentions if mixer.shared is None)

    def mixers_read_nbytes(self, positions: int, itemsize: int) -> int:
        """Bytes of keys, values and states that a token reads over all layers, with so many positions up to its own."""
        seen = (mixer.kv_rows * mixer.kv_dim * min(positions, mixer.window or positions) for mixer in self.attentions)
        return itemsize * sum(seen) + self.state_nbytes

    @property
    def state_nbytes(self) -> int:
        """Bytes of a sequence's state, however long it is, over all layers."""
        return 4 * sum(mixer.state_floats for mixer in self.recurrent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A model's architecture, as the manifest records it."""

    model_type: str
    num_layers: int
    d_model: int
    d_ff: int  # neurons of a layer; where layers differ, of a mixture of experts, else of the widest
    activation: str
    gated: bool
    ffn_bias: bool
    # Of a mixture of experts, whose neurons the d_ff are; all 0 of others.
    experts: int = 0
    chosen_experts: int = 0  # for a token
    shared_neurons: int = 0  # behind those of the experts
    widths: tuple[int, ...] = ()  # neurons of each layer, where layers differ
    dense_layers: tuple[int, ...] = ()  # of a mixture of experts: the layers that are none

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
        for name in ("experts", "chosen_experts", "shared_neurons"):
            check_int(name, getattr(self, name), 0, self.d_ff)
        if not self.experts and (self.chosen_experts or self.shared_neurons or self.dense_layers):
            raise ValueError("an FFN without experts chooses and shares none, and all its layers are dense")
        if self.widths and len(self.widths) != self.num_layers:
            raise ValueError(f"widths has {len(self.widths)} layers, not {self.num_layers}")
        for width in self.widths:
            check_size("widths", width + 1)  # layers may have none
        if any(type(layer) is not int or not 0 <= layer < self.num_layers for layer in self.dense_layers):
            raise ValueError(f"dense_layers must be layers of {self.num_layers}, not {self.dense_layers}")
        if self.experts and any(self.width(i) != self.d_ff for i in self.mixtures):
            raise ValueError(f"a mixture of experts must have {self.d_ff} neurons in each layer")
        if self.experts and (
            not 0 < self.chosen_experts <= self.experts or (self.d_ff - self.shared_neurons) % self.experts
        ):
            raise ValueError(
                f"{self.d_ff} neurons are no {self.experts} experts, of which {self.chosen_experts} chosen"
            )

    @property
    def expert_size(self) -> int:
        """Neurons of an expert; 0 where there are none."""
        return (self.d_ff - self.shared_neurons) // self.experts if self.experts else 0

    def width(self, layer: int) -> int:
        """Neurons of a layer."""
        return self.widths[layer] if self.widths else self.d_ff

    @property
    def every_width(self) -> tuple[int, ...]:
        return self.widths or (self.d_ff,) * self.num_layers

    @property
    def neurons(self) -> int:
        return sum(self.every_width)

    @property
    def mixtures(self) -> tuple[int, ...]:
        return tuple(i for i in range(self.num_layers) if i not in self.dense_layers) if self.experts else ()

    @property
    def cycle(self) -> int:
        """Neurons of a layer that a token of a mixture of experts reads; 0 where there are no experts."""
        return self.chosen_experts * self.expert_size + self.shared_neurons

    @property
    def unit_rows(self) -> int:
        """Neurons of a unit, which is what a neuron cache admits and evicts: those of an expert, or one where the
        neurons of experts, most of them zero, may be read apart. Shared neurons are units of as many, the last may be
        shorter."""
        return self.expert_size if self.experts and not self.sparse else 1

    @property
    def matrices(self) -> tuple[str, ...]:
        """The matrices of a row, in its order."""
        return ("up", "gate", "down") if self.gated else ("up", "down")

    @property
    def sparse(self) -> bool:
        """True where most neurons are exactly zero for a token, and may be read apart, so that modes sparse and oracle
        make sense. Experts of squared ReLU are read whole: to leave their zeros out would pay above 85 % of them."""
        return self.activation in SPARSE_ACTIVATIONS and not (self.experts and self.activation == "squared_relu")


def with_shared_beside(block: BlockSpec) -> BlockSpec:
    """The same model, whose shared experts are no rows behind the routed ones, but a resident part beside them.

    ValueError where it has none, or their values are more than an activation's, times what is behind a gate.
    """
    shared = 0 if block.experts is None else block.experts.shared
    if not shared or block.activation in ("drelu", "clamped_swiglu") or any(each.beside for each in block.layers):
        raise ValueError(f"{SHARED_BESIDE} is of a mixture with shared experts and a usual activation")

    def beside(layer: LayerSpec) -> LayerSpec:
        if layer.experts is None:
            return layer
        experts = replace(layer.experts, shared=0)
        return replace(layer, neurons=experts.neurons, experts=experts, beside=shared)

    return replace(block, layers=tuple(map(beside, block.layers)))


def check_number(name: str, value: Any) -> float:
    """`value`, a finite number. ValueError otherwise."""
    if not is_number(value):
        raise ValueError(f"{name} must be a number, not {str(value)[:80]!r}")
    return float(value)


def check_usual(config: Config, usual: Mapping[str, Any], part: str | None = None) -> None:
    """UnsupportedModelError where the config, or its object `part`, says something else under one of these keys. Null
    says what is false."""
    said = config if part is None else config.get(part)
    if said is not None and not isinstance(said, Mapping):
        raise ValueError(f"{part} must be an object")
    for key, value in usual.items():
        given = (said or {}).get(key, value)
        if given != value and (given is not None or value):
            name = key if part is None else f"{part}.{key}"
            raise UnsupportedModelError(
                f"{config['model_type']} with {name} {short(given)} is not supported; {short(value)} is"
            )


def known_activation(config: Config, key: str, known: Mapping[str, str]) -> str:
    """Our name of the activation that `config[key]` names. UnsupportedModelError for one not in `known`."""
    name = config.get(key)
    if not isinstance(name, str) or name not in known:
        model_type = config.get("model_type")
        raise UnsupportedModelError(
            f"activation {str(name)[:80]!r} is not supported for {model_type}; supported: {', '.join(known)}"
        )
    return known[name]
