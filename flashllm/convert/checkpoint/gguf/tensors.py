"""A GGUF file's tensors under the names that transformers has, and the row of its architecture.

Tensors are found by the gguf package's own table of names, by the architecture's row, or by what they are.
"""

import importlib
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashllm.arch.registry import claims, resolve, source_shapes, spec_of
from flashllm.convert.checkpoint.gguf.experts import MIXTURES
from flashllm.convert.checkpoint.gguf.file import GgufContent, GgufTensor, StoredTensor
from flashllm.convert.checkpoint.gguf.models import MODELS, SPARSE_MODELS
from flashllm.convert.checkpoint.gguf.row import ARCHITECTURE, FACTOR_TENSORS, NEXT, GgufModel, own_key
from flashllm.convert.checkpoint.mixtures.gguf_experts import cut_apart, experts_apart
from flashllm.errors import FormatError, UnsupportedModelError

_LAYER = re.compile(r"blk\.(\d+)\.")
_OWN_KEYS = re.compile(r"blk\.(\d+)\.attn_(?:k|v|k_norm)\.")
_OF_WHOLE, _OF_INPUTS = ".scale", ".input_scale"  # of tensors in NVFP4; the latter are of processors that code inputs
_PREDICTORS = (".fc1.", ".fc2.")  # parts of their tensors' names there


def model_of(content: GgufContent) -> GgufModel:
    """The row of the file's architecture. UnsupportedModelError where there is none."""
    name = content.metadata.text(ARCHITECTURE)
    experts = content.metadata.integer(f"{name}.expert_count", 0, least=0)
    mixture = experts > 0 or name in MIXTURES.keys() - MODELS.keys()
    models = SPARSE_MODELS if content.sparse else MIXTURES if mixture else MODELS
    if name not in models or (mixture and content.sparse):
        raise UnsupportedModelError(
            f"{content.path}: GGUF architecture {name[:80]!r}{' with experts' if mixture else ''} is not "
            f"supported; supported: {', '.join(sorted(models))}. A Hugging Face folder of the model may be"
        )
    return models[name]


def assumed_line(content: GgufContent) -> str | None:
    """A line for the user where ReLU models of this kind exist: GGUF has no key for an FFN's activation."""
    model = model_of(content)
    if content.sparse or not model.relu:
        return None
    name = {"silu": "SiLU", "gelu": "GELU"}[model.constants.get("hidden_act") or model.constants["activation"]]
    return (
        f"{content.path.name} says no activation; {name} is assumed, as llama.cpp does. A model with ReLU: convert its "
        "Hugging Face folder"
    )


def named_tensors(content: GgufContent, config: Mapping[str, Any]) -> tuple[dict[str, GgufTensor], str | None]:
    """(the file's tensors by state_dict name, a line that says what is left out: layers that draft tokens).

    Those that no name claims keep the file's. Experts are cut apart. UnsupportedModelError for scales of whole tensors.
    """
    model = model_of(content)
    gguf = importlib.import_module("gguf")
    like = model.table or content.metadata.text(ARCHITECTURE)
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == like)
    layers, spec, shapes = config["num_hidden_layers"], spec_of(config), source_shapes(config)
    table = gguf.get_tensor_name_map(architecture, layers)
    left = {name: stored for name, stored in content.tensors.items() if name not in FACTOR_TENSORS}
    if content.sparse:
        left = {name: stored for name, stored in left.items() if not any(part in name for part in _PREDICTORS)}
    behind = {name for name in left if (match := _LAYER.match(name)) and int(match[1]) >= layers}
    if drafting := content.metadata.integer(own_key(content, NEXT), 0, least=0):
        left = {name: stored for name, stored in left.items() if name not in behind}
    said = f"left out: {drafting} layers that draft tokens ({len(behind)} tensors)" if drafting and behind else None
    left = _scaled(left, model)
    first = layers - config.get("num_kv_shared_layers", 0)
    in_vain = {name for name in left if (match := _OWN_KEYS.match(name)) and int(match[1]) >= first}
    if in_vain:
        left = {name: stored for name, stored in left.items() if name not in in_vain}
        said = f"left out: keys and values of layers that use another's ({len(in_vain)} tensors)"
    cut, left = experts_apart(left, spec, layers, resolve(config).experts)
    for whole, pattern in model.stacked.items():
        if (stacked := left.pop(whole, None)) is not None:
            cut |= {pattern.format(number): part for number, part in enumerate(cut_apart(stacked, stacked.shape[0]))}
    found = {name: GgufTensor(stored) for name, stored in cut.items()}
    own = {claim.source: claim.name for claim in claims(config).values()}
    for name, shape in shapes.items():
        if name in found:
            continue
        key = _own_name(name, own[name], model) or table.get_name(name, try_suffixes=(".weight", ".bias"))
        columns = key.replace(".ffn_down.", ".ffn_down_t.") if content.sparse and key is not None else key
        if columns != key and columns in left:  # a row a neuron; a bias is one as ever
            found[name] = GgufTensor(left.pop(columns), transposed=columns.endswith(".weight"))
        elif key in left:
            found[name] = _as_transformers(_shaped(left.pop(key), shape), key, model, config)
    if scale := next((name for name in left if name.endswith((_OF_WHOLE, _OF_INPUTS))), None):
        raise UnsupportedModelError(
            f"{content.path}: tensor {scale[:80]} scales a whole tensor, which is read of those in NVFP4 alone; give "
            "the model's Hugging Face folder, or a file of another kind (Q4_K_M, MXFP4)"
        )
    return found | {name: GgufTensor(stored) for name, stored in left.items()}, said


def _scaled(left: Mapping[str, StoredTensor], model: GgufModel) -> dict[str, StoredTensor]:
    """The tensors, those in NVFP4 with what their weights are multiplied by: one number, or one for each expert.

    A number that the model has a name for is left to it: of Gemma 4's experts it means the same.
    """
    found = dict(left)
    for name, stored in left.items():
        stem = name.removesuffix(".weight")
        if stored.kind != "NVFP4" or (stem + _OF_WHOLE).split(".", 2)[-1] in model.names.values():
            continue
        found.pop(stem + _OF_INPUTS, None)
        if (scales := found.pop(stem + _OF_WHOLE, None)) is None:
            continue
        values = scales.numbers(0, math.prod(scales.shape) // scales.shape[-1]).reshape(-1)
        if len(values) != 1 and (len(stored.shape) != 3 or len(values) != stored.shape[0]):
            raise FormatError(f"{scales.path}: {stem[:80]}{_OF_WHOLE} is of {len(values)} tensors; get the file again")
        if not np.isfinite(values).all():
            raise FormatError(f"{scales.path}: {stem[:80]}{_OF_WHOLE} is not finite; get the file again")
        found[name] = replace(stored, scales=tuple(values.tolist()))
    return found


def _shaped(stored: StoredTensor, shape: tuple[int, ...]) -> StoredTensor:
    """The same rows with other dimensions before them: a file drops those of 1, and has the heads' apart."""
    same = math.prod(shape) == math.prod(stored.shape) and (len(shape) == 1 or shape[-1] == stored.shape[-1])
    return replace(stored, shape=shape) if same else stored


def _own_name(name: str, canonical: str, model: GgufModel) -> str | None:
    """The file's name of a layer's tensor, by the model's row, or by what it is."""
    match = re.fullmatch(r"(?:model|backbone)\.layers\.(\d+)\.(.+)", name)
    if match is not None and canonical.endswith(".choice.bias"):
        return f"blk.{match[1]}.{model.names.get(match[2], 'exp_probs_b.bias')}"
    if match is not None and (shared := re.search(r"\.shared\.(up|gate|down)\.weight$", canonical)):
        return f"blk.{match[1]}.ffn_{shared[1]}_shexp.weight"
    if match is None or match[2] not in model.names:
        return None
    return f"blk.{match[1]}.{model.names[match[2]]}"


def _as_transformers(stored: StoredTensor, key: str, model: GgufModel, config: Mapping[str, Any]) -> GgufTensor:
    for part, order in model.orders.items():
        if part in key:
            try:
                return GgufTensor(stored, order=order(stored.shape[0], config))
            except ValueError as error:
                raise FormatError(
                    f"{stored.path}: tensor {key}: {stored.shape[0]} rows do not fit its heads"
                ) from error
    if model.shifted and key.endswith("norm.weight") and not key.endswith("ssm_norm.weight"):
        return GgufTensor(stored, change=lambda values: values - np.float32(1))
    if key.endswith(".ssm_a"):
        return GgufTensor(stored, change=_logarithm)
    return GgufTensor(stored)


def _logarithm(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """A_log of the decay that a file holds, -exp(A_log)."""
    return np.log(-values.astype(np.float64)).astype(np.float32)
