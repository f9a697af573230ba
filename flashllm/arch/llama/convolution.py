"""Decoders most of whose layers are a short convolution between two gates, with the last inputs as their state; the
others attend: LFM2, dense and as a mixture of experts (Liquid AI, 2025).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from flashllm.arch.experts.row import dense_first, experts_of, in_layer
from flashllm.arch.experts.row import row as mixture
from flashllm.arch.family import always, decoder_block, linear_tensors, says
from flashllm.arch.llama.names import row
from flashllm.arch.mixers import ShortConvolution, check_size
from flashllm.arch.mixture import RouterSpec
from flashllm.arch.spec import MAX_LAYERS, BlockSpec, Config, LayerSpec, check_number
from flashllm.arch.tensors import Part, ResidentTensor, attentions, short_convolutions

_CONVOLUTION, _ATTENTION = "conv", "full_attention"


def _rows(part: int) -> Callable[[Config], Part]:
    """One of the three parts of the input projection's rows."""
    return lambda config: Part(first=part * config["hidden_size"], count=config["hidden_size"])


def _tensors() -> tuple[ResidentTensor, ...]:
    at, biased = "layers.{i}.state.", says("conv_bias")
    attention = (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"), ("out", "out_proj"))
    convolution = (
        *(
            tensor
            for part, name in enumerate(("key", "query", "value"))
            for tensor in linear_tensors(at + name, "conv.in_proj", bias=biased, part=_rows(part))
        ),
        ResidentTensor(name=f"{at}conv.weight", source="conv.conv.weight"),
        ResidentTensor(name=f"{at}conv.bias", source="conv.conv.bias", when=biased),
        *linear_tensors(f"{at}out", "conv.out_proj", bias=biased),
    )
    return (
        *(
            ResidentTensor(name=f"layers.{{i}}.{name}.weight", source=f"self_attn.{source}.weight", layers=attentions)
            for name, source in attention
        ),
        *(replace(tensor, layers=short_convolutions) for tensor in convolution),
    )


def _block(config: Config, **traits: Any) -> BlockSpec:
    count = check_size("num_hidden_layers", config["num_hidden_layers"], MAX_LAYERS)
    kinds, attending = config["layer_types"], config.get("full_attn_idxs")
    if kinds is None:
        kinds = [_ATTENTION if attending is None or i in attending else _CONVOLUTION for i in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count:
        raise ValueError(f"layer_types must be a list of {count} names")
    types = [_ATTENTION if kind == _CONVOLUTION else kind for kind in kinds]
    block = decoder_block(
        {**config, "layer_types": types, "sliding_window": None, "hidden_act": "silu"},
        epsilon="norm_eps",
        theta=1_000_000.0,
        query_key_norm="head",
        **traits,
    )
    mixer = ShortConvolution(width=block.d_model, kernel=check_size("conv_L_cache", config["conv_L_cache"]))

    def layer(spec: LayerSpec, kind: str) -> LayerSpec:
        return replace(spec, mixer=mixer) if kind == _CONVOLUTION else spec

    return replace(block, layers=tuple(layer(spec, kind) for spec, kind in zip(block.layers, kinds, strict=True)))


def _derived(config: Config) -> Mapping[str, Any]:
    """Released configs have names of their own for two keys."""
    tied = config.get("tie_embedding", config["tie_word_embeddings"])
    return {"tie_word_embeddings": tied, "intermediate_size": config.get("block_ff_dim", config["intermediate_size"])}


def _neurons(config: Config) -> int:
    """Those of a dense layer: of the config's width two thirds, times a factor, up to a multiple, if it says so."""
    width = check_size("intermediate_size", config["intermediate_size"])
    if not config["block_auto_adjust_ff_dim"]:
        return width
    width, factor = int(2 * width / 3), config["block_ffn_dim_multiplier"]
    if factor is None:
        return width
    multiple = check_size("block_multiple_of", config["block_multiple_of"])
    return multiple * (int(check_number("block_ffn_dim_multiplier", factor) * width + multiple - 1) // multiple)


_NAMED: dict[str, Any] = {
    "attention": _tensors(),
    "norms": {"attention_norm": ("operator_norm", always), "ffn_norm": ("ffn_norm", always)},
    "head_norms": {"query_norm": "self_attn.q_layernorm", "key_norm": "self_attn.k_layernorm"},
    "names": {"final_norm": "embedding_norm"},
    "derived": _derived,
}
_MATRICES = {"up": "w3", "gate": "w1", "down": "w2"}


def _of(place: str) -> dict[str, str]:
    return {matrix: f"{place}.{name}" for matrix, name in _MATRICES.items()}


LFM2 = row(
    "lfm2",
    block=lambda config: _block({**config, "intermediate_size": _neurons(config)}),
    matrices=_of("feed_forward"),
    **_NAMED,
)


# The mixture: a sigmoid, whose bias is of the choice alone; its first layers are dense.


def _mixture(config: Config) -> BlockSpec:
    factor = check_number("routed_scaling_factor", config["routed_scaling_factor"])
    router = RouterSpec(score="sigmoid", normalized=bool(config["norm_topk_prob"]), epsilon=1e-6, factor=factor)
    return _block(
        config,
        experts=experts_of(config, "moe_intermediate_size", router),
        dense_layers=dense_first(config, "num_dense_layers"),
    )


LFM2_MOE = mixture(
    "lfm2_moe",
    experts=32,
    router="feed_forward.gate",
    ffn_tensors=(
        ResidentTensor(name="layers.{i}.choice.bias", source="feed_forward.expert_bias", when=says("use_expert_bias")),
    ),
    block=_mixture,
    matrices=_of("feed_forward.experts.{e}"),
    dense_matrices=in_layer(_of("feed_forward")),
    renamed={},
    stacked={
        "model.layers.{i}.feed_forward.experts.gate_up_proj": tuple(
            in_layer(_of("feed_forward.experts.{e}"))[matrix] for matrix in ("gate", "up")
        ),
        "model.layers.{i}.feed_forward.experts.down_proj": (in_layer(_of("feed_forward.experts.{e}"))["down"],),
    },
    **_NAMED,
)

WITH_CONVOLUTIONS = (LFM2, LFM2_MOE)
