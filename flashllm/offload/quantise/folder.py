"""A Hugging Face folder whose matrices lie on the grid of packed weights, written a layer at a time.

The weights keep their dtype and their names, so that every engine can read them; packed (`--compress weights`) they
lose nothing more. A folder under way is OUT.partial: started again, it goes on behind its last whole layer.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashllm.arch.registry import claims
from flashllm.arch.tensors import Part
from flashllm.base.files import fsync_directory, read_json_object, write_atomically
from flashllm.convert.checkpoint.source import companion_files
from flashllm.errors import UnsupportedModelError, UsageError
from flashllm.format.safetensors import encode_header, open_safetensors
from flashllm.offload.quantise.calibrate import NEAREST, Calibration, Floats, Layer, Sums
from flashllm.offload.quantise.feedback import round_to_nearest, round_with_feedback
from flashllm.offload.runtime.ops import Packing, WeightGroups
from flashllm.offload.runtime.tiers.source import WeightSource, matrix_name, open_weights
from flashllm.offload.runtime.tiers.weight_plan import weight_packing

RECORD = "quantised.json"
Array = NDArray[Any]


def quantise(
    model: Path,
    out: Path,
    sequences: Sequence[Sequence[int]],
    *,
    bits: int,
    groups: WeightGroups = "mixed",
    threads: int,
    report: Callable[[int, int], None] = lambda done, layers: None,
) -> None:
    """Write the model in `model` to `out`, the matrices of its layers rounded to `bits`, with error feedback.

    `groups`: along what weights share a scale. `sequences`: calibration tokens, equally long. `report(layers
    done, layers)` follows. The embedding, the head and vectors stay as they are. UsageError where `out` exists or a
    half-written one is of other settings; UnsupportedModelError for a model whose matrices share tensors; else what
    `open_weights` raises.
    """
    if out.exists():
        raise UsageError(f"{out} exists; choose another folder, or remove it")
    partial = out.with_name(out.name + ".partial")
    partial.mkdir(exist_ok=True)
    with open_weights(model) as source:
        names = _state_dict_names(source)
        record = {
            "bits": bits,
            "groups": groups,
            "method": "error feedback",
            "tokens": _digest(sequences),
            "model": _identity(source),
        }
        _claim(partial, record)
        count = source.num_layers + 1
        files = [f"model-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]
        calibration, packing = Calibration(source, sequences, threads=threads), weight_packing(source, bits, groups)
        for number in range(source.num_layers):
            layer = calibration.read(number)
            path = partial / files[number]
            of_layer = {name: names[name] for name in names if name.startswith(f"layers.{number}.")}
            if path.exists():
                done = {matrix_name(number, name): array for name, array in layer.matrices.items()}
                _read_back(path, {of_layer[name]: array for name, array in done.items()})
            else:
                calibration.round(layer, lambda name, *of, at=number: _rounded(of, name, packing.of(name, at)))
                _write(path, source, of_layer, layer, number)
            calibration.advance(layer)
            report(number + 1, source.num_layers)
        rest = {name: names[name] for name in names if not name.startswith("layers.")}
        _write(partial / files[-1], source, rest, None, -1)
        shards = {names[name]: files[int(name.split(".")[1]) if name.startswith("layers.") else -1] for name in names}
    write_atomically(
        partial / "model.safetensors.index.json", json.dumps({"metadata": {}, "weight_map": shards}).encode()
    )
    for path in companion_files(model):
        shutil.copyfile(path, partial / path.name)
    fsync_directory(partial)
    partial.rename(out)
    fsync_directory(out.parent)


def _rounded(of: tuple[Floats, Sums], name: str, packing: Packing) -> Floats:
    values, sums = of
    if name in NEAREST:
        return round_to_nearest(values, bits=packing.bits, along=packing.along)
    return round_with_feedback(values, sums[0], bits=packing.bits, along=packing.along)


def _state_dict_names(source: WeightSource) -> dict[str, str]:
    """Canonical name -> state_dict name of every tensor."""
    wanted = {name: claim for name, claim in claims(source.config).items() if name in source.shapes}
    for name, claim in wanted.items():
        if claim.part != Part():
            raise UnsupportedModelError(
                f"{source.path}: {claim.source} holds {name} among others, or transposed; rounding with feedback knows "
                "checkpoints with a tensor a matrix only"
            )
    return {name: claim.source for name, claim in wanted.items()}


def _digest(sequences: Sequence[Sequence[int]]) -> str:
    return hashlib.sha256(np.asarray(sequences, np.int64).tobytes()).hexdigest()


def _identity(source: WeightSource) -> dict[str, Any]:
    return {"folder": source.path.name, "dtype": source.dtype.name, "shapes": len(source.shapes)}


def _claim(partial: Path, record: dict[str, Any]) -> None:
    """That what lies in `partial` was made by the same settings."""
    path = partial / RECORD
    if not path.exists():
        write_atomically(path, json.dumps(record).encode())
    elif read_json_object(path) != record:
        raise UsageError(f"{partial} is half of another run (other bits, text or model); remove it to start again")


def _write(path: Path, source: WeightSource, names: dict[str, str], layer: Layer | None, number: int) -> None:
    """A safetensors file of the tensors of these canonical names, changed ones from `layer`."""
    changed = {} if layer is None else {matrix_name(number, name): array for name, array in layer.matrices.items()}
    header = encode_header([(names[name], source.dtype.code, source.shapes[name]) for name in names])
    draft = path.with_suffix(".draft")
    with draft.open("wb") as file:
        file.write(header)
        for name in names:
            array = changed.get(name)
            if array is None:
                array = np.empty(source.shapes[name], source.dtype.storage)
                source.read({name: array})
            file.write(array.reshape(-1).view(np.uint8).data)
    draft.rename(path)


def _read_back(path: Path, targets: dict[str, Array]) -> None:
    """Fill arrays with the tensors of these state_dict names."""
    with open_safetensors(path) as file:
        for name, array in targets.items():
            file.read_into(file.header.tensors[name], 0, array.reshape(-1).view(np.uint8).data)
