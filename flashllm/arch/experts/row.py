"""Shared by mixtures of experts: a row under Llama's names, and the values of the usual config keys.

Knows no model_type.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from flashllm.arch.family import decoder, decoder_block, num_layers, of_layers
from flashllm.arch.llama.names import BEFORE
from flashllm.arch.mixers import check_size
from flashllm.arch.mixture import ExpertsSpec, RouterSpec
from flashllm.arch.spec import MAX_LAYERS, BlockSpec, Config, check_number
from flashllm.arch.tensors import ArchitectureSpec, ResidentTensor, mixtures
from flashllm.base.checks import check_int

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def matrices(of: str) -> dict[str, str]:
    """The FFN's matrices under Llama's names below `of`."""
    return {matrix: f"{of}.{matrix}_proj" for matrix in ("up", "gate", "down")}


def in_layer(names: Mapping[str, str]) -> dict[str, str]:
    """The weights' state_dict names of names within a layer."""
    return {matrix: f"model.layers.{{i}}.{name}.weight" for matrix, name in names.items()}


def row(
    model_type: str,
    *,
    experts: int | None,
    router: str = "mlp.gate",
    is_wide: bool = False,
    stack: str = "mlp.experts",
    choice: str | None = None,
    newer_choice: str | None = None,
    derived: Callable[[Config], Mapping[str, Any]] = lambda config: {},
    **others: Any,
) -> ArchitectureSpec:
    """A model_type whose config says how many experts there are, or means `experts`. Names within a layer: of the
    `router`, which computes in fp32 where it `is_wide`, of the bias of the `choice`, if there is one, which
    transformers 5 may call `newer_choice`, and of what has the `stack` of all experts' matrices."""

    def counted(config: Config) -> Mapping[str, Any]:
        given = (config.get(key) for key in _COUNTS)
        return {**derived(config), "num_experts": next((count for count in given if count is not None), experts)}

    values: dict[str, Any] = {
        "matrices": matrices("mlp.experts.{e}"),
        "dense_matrices": in_layer(matrices("mlp")),
        "norms": BEFORE,
        **others,
    }
    one = in_layer(values["matrices"])
    halves = tuple(one[matrix] for matrix in ("gate", "up") if matrix in one)
    # transformers 5's names of the router, its bias and shared experts, within a layer, and the checkpoints'.
    newer = {"mlp.gate.weight": f"{router}.weight"} | ({newer_choice: choice} if choice and newer_choice else {})
    renamed = {f"model.layers.{{i}}.{new}": f"model.layers.{{i}}.{old}" for new, old in newer.items() if new != old}
    renamed |= {
        new: shared[matrix]
        for matrix, new in in_layer(matrices("mlp.shared_experts")).items()
        if (shared := values.get("shared_matrices")) and shared.get(matrix, new) != new
    }
    named = [ResidentTensor(name=f"layers.{{i}}.{'wide_' if is_wide else ''}router.weight", source=f"{router}.weight")]
    named += [] if choice is None else [ResidentTensor(name="layers.{i}.choice.bias", source=choice)]
    return decoder(
        model_type,
        derived=counted,
        ffn_tensors=tuple(replace(tensor, layers=mixtures) for tensor in (*named, *values.pop("ffn_tensors", ()))),
        **{
            "ignored": ("model.layers.*.self_attn.rotary_emb.inv_freq",),
            "renamed": renamed,
            "stacked": {  # as transformers 5 has them in memory
                f"model.layers.{{i}}.{stack}.gate_up_proj": halves,
                f"model.layers.{{i}}.{stack}.down_proj": (one["down"],),
            },
            **values,
        },
    )


_SIZE = "moe_intermediate_size"


def mixture_block(
    config: Config,
    router: RouterSpec,
    *,
    size: str = _SIZE,
    chosen: str = "num_experts_per_tok",
    shared: str | None = None,
    first: str | None = "first_k_dense_replace",
    block: Callable[..., BlockSpec] = decoder_block,
    **traits: Any,
) -> BlockSpec:
    """A block with the experts that the config describes: keys of it say the neurons of one, how many are chosen, how
    many are `shared`, and how many layers are dense, the `first` ones (None: none is)."""
    neurons = 0 if shared is None else shared_neurons(config, shared, size)
    dense = {} if first is None else {"dense_layers": dense_first(config, first)}
    return block(config, experts=experts_of(config, router, size, chosen=chosen, shared=neurons), **dense, **traits)


def experts_of(
    config: Config, router: RouterSpec, size: str = _SIZE, *, chosen: str = "num_experts_per_tok", shared: int = 0
) -> ExpertsSpec:
    """Those of a config that names the neurons of one under `size`."""
    return ExpertsSpec(
        count=check_size("num_experts", config["num_experts"]),
        chosen=check_size(chosen, config[chosen]),
        size=check_size(size, config[size]),
        shared=shared,
        router=router,
    )


def shared_neurons(config: Config, key: str, size: str = _SIZE) -> int:
    """Neurons that every token uses: as many experts as the config says under `key`, if any."""
    return check_size(key, config[key]) * check_size(size, config[size]) if config[key] else 0


def grouped_router(config: Config) -> RouterSpec:
    """DeepSeek-V3's router (2024): sigmoids, groups by the sum of two, a factor of the weights."""
    factor = config["routed_scaling_factor"]
    return RouterSpec(
        score="sigmoid",
        groups=check_size("n_group", config.get("n_group") or 1),
        chosen_groups=check_size("topk_group", config.get("topk_group") or 1),
        normalized=bool(config["norm_topk_prob"]),
        epsilon=1e-20,
        factor=check_number("routed_scaling_factor", 1.0 if factor is None else factor),
    )


def dense_first(config: Config, key: str = "first_k_dense_replace") -> frozenset[int]:
    """The layers that are no mixtures: those that `mlp_layer_types` calls so, or as many from the first on."""
    count = num_layers(config)
    if config.get("mlp_layer_types") is None:
        first = config.get(key) or 0
        check_int(key, first, 0, MAX_LAYERS)
        return frozenset(range(min(first, count)))
    kinds = of_layers("mlp_layer_types", config, "names")
    if any(kind not in ("dense", "sparse") for kind in kinds):
        raise ValueError(f"mlp_layer_types must be a list of {count} names, each dense or sparse")
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "dense")


SHARED = in_layer(matrices("mlp.shared_experts"))
# Qwen's: one shared expert, which a gate weighs.
GATED_SHARED: dict[str, Any] = {
    "shared_matrices": in_layer(matrices("mlp.shared_expert")),
    "ffn_tensors": (ResidentTensor(name="layers.{i}.shared_gate.weight", source="mlp.shared_expert_gate.weight"),),
}
