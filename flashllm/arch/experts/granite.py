"""Granite's mixtures of experts (IBM, 2024 to 2026), a row each: multipliers, a softmax over the chosen."""

from collections.abc import Callable
from typing import Any

from flashllm.arch.experts.row import experts_of, in_layer, matrices, row
from flashllm.arch.llama.dense import granite_block
from flashllm.arch.llama.names import BIASED
from flashllm.arch.llama.windowed import SINKS, granite_swa_block
from flashllm.arch.mixers import check_size
from flashllm.arch.mixture import ExpertsSpec, RouterSpec
from flashllm.arch.spec import BlockSpec, Config
from flashllm.arch.tensors import ArchitectureSpec

_MOE = "model.layers.{i}.block_sparse_moe."
_MATRICES, _SHARED = matrices("block_sparse_moe.experts.{e}"), in_layer(matrices("shared_mlp"))


def _experts(config: Config) -> ExpertsSpec | None:
    if config["num_experts"] == 0:
        return None
    key = "shared_intermediate_size"
    shared = check_size(key, config[key]) if config[key] else 0
    return experts_of(config, RouterSpec(score="softmax_of_chosen"), "intermediate_size", shared=shared)


def granite(model_type: str, block: Callable[..., BlockSpec], **others: Any) -> ArchitectureSpec:
    """A row: without experts, their shared neurons are all there are."""
    one = in_layer(_MATRICES)
    return row(
        model_type,
        experts=8,
        router="block_sparse_moe.router.layer",
        block=lambda config: block(config, experts=_experts(config)),
        matrices=_MATRICES,
        shared_matrices=_SHARED,
        dense_matrices=_SHARED,
        renamed={
            f"{_MOE}experts.gate_up_proj": f"{_MOE}input_linear.weight",
            f"{_MOE}experts.down_proj": f"{_MOE}output_linear.weight",
            f"{_MOE}router.weight": f"{_MOE}router.layer.weight",
        },
        stacked={
            f"{_MOE}input_linear.weight": (one["gate"], one["up"]),
            f"{_MOE}output_linear.weight": (one["down"],),
            "model.layers.{i}.shared_mlp.input_linear.weight": (_SHARED["gate"], _SHARED["up"]),
            "model.layers.{i}.shared_mlp.output_linear.weight": (_SHARED["down"],),
        },
        **others,
    )


GRANITE = (
    granite("granitemoe", granite_block, attention=BIASED),
    granite("granitemoeshared", granite_block, attention=BIASED),
    granite("granitemoe_swa", granite_swa_block, attention=(*BIASED, SINKS)),
)
