"""Models under Llama's names that are sparse by nature: trained with ReLU, FATReLU, dReLU or the square of ReLU."""

from dataclasses import replace
from typing import Any

from flashllm.arch.family import always, decoder_block, says
from flashllm.arch.llama.names import BIASED, UNGATED, row
from flashllm.arch.spec import BlockSpec, Config
from flashllm.errors import UnsupportedModelError

# ProSparse (Song et al., 2024): FATReLU, its threshold in the config. The name is of the checkpoints' own code.
SPARSE_LLAMA = row("sparsellama", attention=BIASED, ffn_bias=says("mlp_bias"))


def _bamboo(config: Config) -> BlockSpec:
    block = decoder_block(config)
    if block.activation != "relu":
        raise UnsupportedModelError(f"activation {block.activation} is not supported for bamboo; supported: relu")
    return replace(block, activation="drelu")


# Bamboo (Song et al., 2024: TurboSparse): Mistral's shape, and ReLU on the gate and on the up projection.
BAMBOO = row("bamboo", block=_bamboo)

# Models without a gate and with the square of ReLU.
_UNGATED: dict[str, Any] = {"matrices": UNGATED, "attention": BIASED, "ffn_bias": says("mlp_bias")}
# Arcee (2025): Llama otherwise.
ARCEE = row("arcee", block=lambda config: decoder_block(config, gated=False), **_UNGATED)
# Nemotron and Minitron (Parmar et al., 2024): layer norms that keep weight - 1, half of each head turned.
NEMOTRON = row(
    "nemotron",
    block=lambda config: decoder_block(
        config, epsilon="norm_eps", rotary_share=0.5, norm="layer", norm_shift=1.0, gated=False
    ),
    norm_bias=always,
    **_UNGATED,
)
# Jais 2 (Inception, 2025): layer norms, biases everywhere.
JAIS2 = row(
    "jais2",
    block=lambda config: decoder_block(config, epsilon="layer_norm_eps", norm="layer", gated=False),
    norm_bias=always,
    **_UNGATED,
)

SPARSE = (SPARSE_LLAMA, BAMBOO, ARCEE, NEMOTRON, JAIS2)
