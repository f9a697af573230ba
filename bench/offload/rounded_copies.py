"""Copies of a Hugging Face folder whose layers' matrices are rounded, for offload_quality.py.

In the paper's groups, or in ours with error feedback. A copy keeps the folder's dtype.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, from_numpy

from flashllm.arch.registry import claims
from flashllm.arch.tensors import Part
from flashllm.base.dtypes import WEIGHT_DTYPES, cast
from flashllm.base.group_codes import GROUP_CODES
from flashllm.base.machine import num_cores
from flashllm.offload.runtime.tiers.source import WeightSource, matrix_name, open_weights
from flashllm.offload.runtime.tiers.weight_plan import weight_packing
from flashllm.pack.calibrated import SPAN, calibration_tokens, code_matrix
from flashllm.pack.layers import Calibration, Sums
from flashllm.pack.score import read_text

Floats = NDArray[np.float32]
_GROUP = 64


def in_the_papers_groups(weights: Floats, bits: int) -> Floats:
    """Weights [outputs, inputs] rounded as FlexGen's section 5 has it: 64 outputs of an input share an fp16 scale and
    minimum, those of the smallest and the largest."""
    top = np.float32(2**bits - 1)
    outputs = len(weights)
    padded = np.pad(weights, ((0, -outputs % _GROUP), (0, 0)), mode="edge").reshape(-1, _GROUP, weights.shape[1])
    low, high = padded.min(axis=1, keepdims=True), padded.max(axis=1, keepdims=True)
    scale = ((high - low) / top).astype(np.float16).astype(np.float32)
    minimum = low.astype(np.float16).astype(np.float32)
    steps = np.divide(padded - minimum, scale, out=np.zeros_like(padded), where=scale > 0)
    rounded: Floats = np.clip(np.rint(steps), 0, top) * scale + minimum
    return rounded.reshape(-1, weights.shape[1])[:outputs]


def copy_in_the_papers_groups(model: Path, out: Path, bits: int) -> Path:
    """`model` with every matrix of its layers in the paper's groups."""
    with open_weights(model) as source:
        changed = {}
        for name in (matrix_name(layer, one) for layer in range(source.num_layers) for one in source.matrices(layer)):
            stored = np.empty(source.shapes[name], source.dtype.storage)
            source.read({name: stored})
            changed[name] = in_the_papers_groups(cast(stored, source.dtype, WEIGHT_DTYPES["float32"]), bits)
        return _copy(model, out, source, changed)


def copy_with_feedback(model: Path, out: Path, bits: int, text: Path) -> Path:
    """`model` with the weights that `--compress weights` has, but for codes chosen by error feedback on a text."""
    sequences = calibration_tokens(model, read_text(text))
    with open_weights(model) as source:
        packing = weight_packing(source, bits)
        calibration = Calibration(source, sequences, threads=num_cores(), span=SPAN)
        changed: dict[str, Floats] = {}
        for number in range(source.num_layers):
            layer = calibration.read(number)

            def rounder(name: str, values: Floats, sums: Sums | None, number: int = number) -> Floats:
                matrix = name.rpartition(".")[2]
                code = GROUP_CODES[packing.made(matrix, number, bits).encoding]
                changed[matrix_name(number, name)] = rounded = code_matrix(matrix, values, sums, code)[1]
                return rounded

            calibration.round(layer, rounder)
            calibration.advance(layer)
        return _copy(model, out, source, changed)


def _copy(model: Path, out: Path, source: WeightSource, changed: Mapping[str, NDArray[Any]]) -> Path:
    names = claims(source.config)
    if any(names[name].part != Part() for name in changed):
        raise SystemExit(f"{model}: holds several matrices in one tensor; a copy needs a tensor each")
    mine = {names[name].source: values for name, values in changed.items()}
    out.mkdir()
    for path in model.iterdir():
        if path.suffix != ".safetensors":
            shutil.copyfile(path, out / path.name)
            continue
        tensors: dict[str, Tensor] = load_file(path)
        for name, tensor in tensors.items():
            if name in mine:
                tensors[name] = from_numpy(np.ascontiguousarray(mine[name])).to(tensor.dtype)
        save_file(tensors, out / path.name, metadata={"format": "pt"})
    return out
