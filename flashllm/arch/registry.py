"""The table of architectures by Hugging Face's `model_type`, and what a config.json means by it.

Reads plain config dictionaries; knows no files, no tensors and no transformers. A new architecture is a file beside
this one and a row here; tests/arch/test_contract.py then runs a tiny model of it.
"""

from collections.abc import Mapping
from typing import Any

from flashllm.arch.llama import LLAMA
from flashllm.arch.opt import OPT
from flashllm.arch.spec import (
    MAX_LAYERS,
    Architecture,
    ArchitectureSpec,
    BlockSpec,
    Shape,
    check_size,
    tensor_shape,
)
from flashllm.errors import FormatError, UnsupportedModelError

ARCHITECTURES: dict[str, ArchitectureSpec] = {spec.model_type: spec for spec in (OPT, LLAMA)}


def spec_of(model_type: object) -> ArchitectureSpec:
    """The table's entry. UnsupportedModelError where there is none."""
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedModelError(f"model_type {str(model_type)[:80]!r} is not supported; supported: {known}")
    return ARCHITECTURES[model_type]


def complete_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` (a config.json) with the architecture's defaults for the keys it leaves out."""
    return {**spec_of(config.get("model_type")).defaults, **config}


def block_spec(config: Mapping[str, Any]) -> BlockSpec:
    """How the model that a config.json describes computes.

    UnsupportedModelError for an unknown model_type or variant; FormatError for values that cannot be.
    """
    spec = spec_of(config.get("model_type"))
    try:
        return spec.block(complete_config(config))
    except ValueError as error:
        raise FormatError(f"config.json: {error}") from error


def resolve(config: Mapping[str, Any]) -> Architecture:
    """The architecture a config.json describes; errors as `block_spec`."""
    block, spec = block_spec(config), spec_of(config.get("model_type"))
    config = complete_config(config)
    names = [tensor.name for tensor in spec.present(config)]
    try:
        return Architecture(
            model_type=spec.model_type,
            num_layers=check_size(spec.num_layers_key, config[spec.num_layers_key], MAX_LAYERS),
            d_model=block.d_model,
            d_ff=check_size(spec.d_ff_key, config[spec.d_ff_key]),
            activation=block.activation,
            gated=block.gated,
            ffn_bias=any(name.startswith("layers.{i}.ffn.") for name in names),
        )
    except ValueError as error:
        raise FormatError(f"config.json: {error}") from error


def resident_sources(config: Mapping[str, Any]) -> dict[str, str]:
    """Canonical name -> state_dict name of every tensor that stays in DRAM; layer tensors are grouped by layer."""
    spec = spec_of(config.get("model_type"))
    config = complete_config(config)
    present = [(tensor.name, tensor.source) for tensor in spec.present(config)]
    of_layer = [pair for pair in present if "{i}" in pair[0]]
    first = present.index(of_layer[0]) if of_layer else len(present)
    result = dict(present[:first])
    for layer in range(config[spec.num_layers_key]):
        result |= {name.format(i=layer): source.format(i=layer) for name, source in of_layer}
    return result | {name: source for name, source in present[first:] if "{i}" not in name}


def resident_shapes(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Canonical name -> shape of every tensor that stays in DRAM."""
    spec, block, architecture = spec_of(config.get("model_type")), block_spec(config), resolve(config)
    patterns = [tensor.name for tensor in spec.present(complete_config(config))]
    shapes = {name: tensor_shape(name, block, architecture.d_ff) for name in patterns}
    layers = range(architecture.num_layers)
    return {name.format(i=layer): shape for name, shape in shapes.items() for layer in layers}
