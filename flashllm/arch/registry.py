"""The table of architectures by Hugging Face's `model_type`, and what a config.json means by it.

Reads plain config dictionaries; knows no files, no tensors and no transformers. A new architecture is a file beside
this one and a row here; tests/arch/test_contract.py then runs a tiny model of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flashllm.arch.alibi import WITH_ALIBI
from flashllm.arch.experts import MIXTURES
from flashllm.arch.gpt import GPT_LIKE
from flashllm.arch.llama.bitnet import BITNET
from flashllm.arch.llama.convolution import WITH_CONVOLUTIONS
from flashllm.arch.llama.delta import WITH_STATES
from flashllm.arch.llama.dense import DENSE
from flashllm.arch.llama.gemma import GEMMAS
from flashllm.arch.llama.latent import LATENT_DENSE
from flashllm.arch.llama.sparse import SPARSE
from flashllm.arch.llama.state_space import STATE_SPACES
from flashllm.arch.llama.windowed import WINDOWED
from flashllm.arch.opt import OPT
from flashllm.arch.refused import describe_refused
from flashllm.arch.spec import SHARED_BESIDE, Architecture, BlockSpec, with_shared_beside
from flashllm.arch.tensors import TOKEN_TABLE, ArchitectureSpec, Part, ResidentTensor, Shape, tensor_shape, whole
from flashllm.base.checks import check_int
from flashllm.errors import FormatError, UnsupportedModelError

_MAX_LABELS = 10_000

ARCHITECTURES: dict[str, ArchitectureSpec] = {
    spec.model_type: spec
    for spec in (
        OPT,
        *DENSE,
        *GEMMAS,
        *WINDOWED,
        *LATENT_DENSE,
        *SPARSE,
        BITNET,
        *GPT_LIKE,
        *WITH_ALIBI,
        *MIXTURES,
        *WITH_STATES,
        *STATE_SPACES,
        *WITH_CONVOLUTIONS,
    )
}


def spec_of(config: Mapping[str, Any]) -> ArchitectureSpec:
    """The table's entry for a config.json. UnsupportedModelError where there is none."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"config.json: model_type {str(model_type)[:80]!r} is not supported: it is "
            f"{describe_refused(config, ARCHITECTURES)}; supported: {', '.join(sorted(ARCHITECTURES))}"
        )
    return ARCHITECTURES[model_type]


def complete_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` (a config.json) with the architecture's defaults for the keys it leaves out, and without windows that
    the architecture does not know: transformers passes over them, too."""
    spec = spec_of(config)
    full = {**spec.defaults, **config}
    if "sliding_window" not in spec.defaults:
        full = {key: value for key, value in full.items() if key not in ("sliding_window", "layer_types")}
    return {**full, **spec.derived(full)}


def block_spec(config: Mapping[str, Any]) -> BlockSpec:
    """How the model that a config.json describes computes.

    UnsupportedModelError for an unknown model_type or variant; FormatError for values that cannot be.
    """
    spec = spec_of(config)
    try:
        _check_labels(config)
        block = spec.block(complete_config(config))
        return with_shared_beside(block) if config.get(SHARED_BESIDE) else block
    except ValueError as error:
        raise FormatError(f"config.json: {error}") from error
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"config.json: {error}") from error


def _check_labels(config: Mapping[str, Any]) -> None:
    """Libraries make a name of each label, of which a language model has none: ValueError where that would be long."""
    labels = config.get("num_labels")
    if labels is not None:
        check_int("num_labels", labels, 0, _MAX_LABELS)


def resolve(config: Mapping[str, Any]) -> Architecture:
    """The architecture a config.json describes; errors as `block_spec`."""
    block, spec = block_spec(config), spec_of(config)
    config = complete_config(config)
    names = [tensor.name for tensor in spec.present(config)]
    experts = block.experts
    try:
        widths = tuple(layer.neurons for layer in block.layers)
        return Architecture(
            model_type=spec.model_type,
            num_layers=len(block.layers),
            d_model=block.d_model,
            d_ff=max(widths) if experts is None else experts.neurons,
            activation=block.activation,
            gated=block.gated,
            ffn_bias=any(name.startswith("layers.{i}.ffn.") for name in names),
            experts=0 if experts is None else experts.count,
            chosen_experts=0 if experts is None else experts.chosen,
            shared_neurons=0 if experts is None else experts.shared,
            widths=widths if len(set(widths)) > 1 else (),
            dense_layers=tuple(
                i for i, layer in enumerate(block.layers) if experts is not None and layer.experts is None
            ),
        )
    except ValueError as error:
        raise FormatError(f"config.json: {error}") from error


def resident_shapes(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Canonical name -> shape of every tensor that stays in DRAM; those of a layer follow each other."""
    return {name: shape for name, _, shape, _ in _outside_ffn(config) if name != TOKEN_TABLE}


def _outside_ffn(config: Mapping[str, Any]) -> list[tuple[str, str, Shape, ResidentTensor]]:
    """(canonical name, state_dict name, shape, entry of the table) of those, and of the table that lies on flash."""
    block, present = block_spec(config), spec_of(config).present(complete_config(config))
    first = next((at for at, tensor in enumerate(present) if "{i}" in tensor.name), len(present))
    layered = [tensor for tensor in present if "{i}" in tensor.name]
    around = [
        (tensor.name, tensor.source, tensor_shape(tensor.name, block, block.layers[0]), tensor)
        for tensor in present
        if "{i}" not in tensor.name
    ]
    of_layers = [
        (tensor.name.format(i=i), tensor.source.format(i=i), tensor_shape(tensor.name, block, layer), tensor)
        for i, layer in enumerate(block.layers)
        for tensor in layered
        if tensor.layers(layer)
    ]
    return [*around[:first], *of_layers, *around[first:]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A canonical tensor, and which part of which tensor of a checkpoint it is."""

    name: str  # canonical; of an FFN matrix layers.{i}.up.weight, gate or down; see `bundle_names`
    source: str  # state_dict name
    part: Part
    shape: Shape  # canonical

    @property
    def rows(self) -> int:
        return self.shape[0]


def claims(config: Mapping[str, Any]) -> dict[str, Claim]:
    """Every tensor of a checkpoint that a model needs, by canonical name; the FFN's matrices are the last. Errors as
    `block_spec`."""
    spec, architecture, full = spec_of(config), resolve(config), complete_config(config)
    resident = _outside_ffn(config)
    try:
        result = {
            name: Claim(name=name, source=source, part=tensor.part(full), shape=shape)
            for name, source, shape, tensor in resident
        }
        matrix_parts = {matrix: spec.matrix_parts.get(matrix, whole)(full) for matrix in spec.matrices}
    except ValueError as error:
        raise FormatError(f"config.json: {error}") from error
    for layer in range(architecture.num_layers):
        for name, neurons, matrices in _bundles(spec, architecture, layer):
            for matrix, source in matrices.items():
                shape = (neurons, architecture.d_model)
                result[f"{name}{matrix}.weight"] = Claim(
                    name=f"{name}{matrix}.weight",
                    source=source,
                    part=matrix_parts[matrix],
                    shape=shape[::-1] if matrix == "down" else shape,
                )
    return result


def bundle_names(architecture: Architecture, layer: int) -> list[str]:
    """How the canonical names of a layer's FFN matrices begin, in the order of its neurons: one of all, or one of each
    expert and one of the shared neurons."""
    if layer not in architecture.mixtures:
        return [f"layers.{layer}."] if architecture.width(layer) else []
    experts = [f"layers.{layer}.experts.{expert}." for expert in range(architecture.experts)]
    return [*experts, *([f"layers.{layer}.shared."] if architecture.shared_neurons else [])]


def _bundles(
    spec: ArchitectureSpec, architecture: Architecture, layer: int
) -> list[tuple[str, int, Mapping[str, str]]]:
    """(name, neurons, state_dict names of its matrices) of each of `bundle_names`."""
    names = bundle_names(architecture, layer)
    if not names:
        return []
    if layer not in architecture.mixtures:
        dense = spec.dense_matrices or spec.matrices
        return [(names[0], architecture.width(layer), {key: text.format(i=layer) for key, text in dense.items()})]
    result: list[tuple[str, int, Mapping[str, str]]] = [
        (names[e], architecture.expert_size, {key: text.format(i=layer, e=e) for key, text in spec.matrices.items()})
        for e in range(architecture.experts)
    ]
    if architecture.shared_neurons:
        shared = {key: text.format(i=layer) for key, text in spec.shared_matrices.items()}
        result.append((names[-1], architecture.shared_neurons, shared))
    return result


def source_shapes(config: Mapping[str, Any]) -> dict[str, Shape]:
    """State_dict name -> shape of every tensor that a checkpoint of the model has. Errors as `block_spec`."""
    return shapes_of(claims(config))


def shapes_of(claimed: Mapping[str, Claim]) -> dict[str, Shape]:
    """The same of `claims`: their rows together."""
    shapes: dict[str, Shape] = {}
    for claim in claimed.values():
        rows, rest = claim.rows, claim.shape[1:]
        if claim.part.turned:
            rows, rest = claim.part.repeats * claim.shape[1], (rows // claim.part.repeats,)
        if claim.source in shapes:
            rows += shapes[claim.source][1 if claim.part.transposed else 0]
        shapes[claim.source] = (*rest, rows) if claim.part.transposed else (rows, *rest)
    return shapes
