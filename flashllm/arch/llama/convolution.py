"""Decoders most of whose layers are a short convolution between two gates, with the last inputs as their state; the
others attend: LFM2, dense and as a mixture of experts (Liquid AI, 2025).
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from flashllm.arch.experts.row import in_layer, mixture_block
from flashllm.arch.experts.row import row as mixture
from flashllm.arch.family import (
    always,
    attending,
    decoder_block,
    equal_part,
    fused_tensors,
    keeping,
    linear_tensors,
    never,
    num_layers,
    projections,
    says,
)
from flashllm.arch.llama.names import HEAD_LAYERNORMS, row
from flashllm.arch.mixers import ShortConvolution, check_size
from flashllm.arch.mixture import RouterSpec
from flashllm.arch.spec import BlockSpec, Config, check_number
from flashllm.arch.tensors import ResidentTensor, short_convolutions


def _tensors() -> tuple[ResidentTensor, ...]:
    at, biased = "layers.{i}.state.", says("conv_bias")
    attention = projections(never, never, names=("q_proj", "k_proj", "v_proj", "out_proj"))
    convolution = (
        *fused_tensors("conv.in_proj", equal_part, bias=biased, names=("state.key", "state.query", "state.value")),
        ResidentTensor(name=f"{at}conv.weight", source="conv.conv.weight"),
        ResidentTensor(name=f"{at}conv.bias", source="conv.conv.bias", when=biased),
        *linear_tensors(f"{at}out", "conv.out_proj", bias=biased),
    )
    return (*attending(attention), *(replace(tensor, layers=short_convolutions) for tensor in convolution))


def _block(config: Config, **traits: Any) -> BlockSpec:
    kinds, attending = config["layer_types"], config.get("full_attn_idxs")
    if kinds is None:
        of_kind = [attending is None or i in attending for i in range(num_layers(config))]
        kinds = ["full_attention" if attends else "conv" for attends in of_kind]
    mixer = ShortConvolution(
        width=check_size("hidden_size", config["hidden_size"]),
        kernel=check_size("conv_L_cache", config["conv_L_cache"]),
    )
    alike = {**config, "sliding_window": None, "hidden_act": "silu"}
    usual = partial(decoder_block, epsilon="norm_eps", theta=1_000_000.0, query_key_norm="head", **traits)
    return keeping(alike, kinds, "conv", mixer, usual)


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
    "head_norms": HEAD_LAYERNORMS,
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
    return mixture_block(config, router, first="num_dense_layers", block=_block)


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
    stack="feed_forward.experts",
    renamed={},
    **_NAMED,
)

WITH_CONVOLUTIONS = (LFM2, LFM2_MOE)
