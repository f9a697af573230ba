"""How often each neuron is named: a small file of a model directory, `popularity.safetensors`.

A tensor a layer, `layers.N.popularity`, float32 [neurons of the layer]: the share of tokens in which each neuron was
named, by original id. `flashllm train` measures it with the predictors, `convert --sparsify` with the thresholds. The
memory plan shares the cache out between layers by it, and the frequency policy starts from it. It decides what is read
and never what is computed, so a model directory works without it.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flashllm.errors import FormatError
from flashllm.format.manifest import Manifest
from flashllm.format.model_files import POPULARITY
from flashllm.format.safetensors import encode_header, open_safetensors, read_header

Popularity = tuple[NDArray[np.float32], ...]  # [neurons] by layer

_OF_ALL = "popularity"  # [layers, d_ff]: the one tensor of files from before layers could differ in width


def encode_popularity(shares: Sequence[NDArray[np.float32]], *, tokens: int, measured_on: str) -> Iterator[bytes]:
    """The file's bytes, for `format.install`; `measured_on` names the text."""
    tensors = [(_of_layer(layer), "F32", values.shape) for layer, values in enumerate(shares)]
    yield encode_header(tensors, {"tokens": str(tokens), "measured_on": measured_on})
    for values in shares:
        yield values.astype(np.float32).tobytes()


def describe_popularity(directory: Path, manifest: Manifest) -> dict[str, str] | None:
    """On how many `tokens` the shares were `measured_on` which text; None where a model directory has none."""
    if POPULARITY not in manifest.files:
        return None
    return dict(read_header(Path(directory) / POPULARITY).metadata)


def popularity_line(facts: Mapping[str, str]) -> str:
    """The facts of `describe_popularity` for a person."""
    return f"of every neuron, on {facts.get('tokens', '?')} tokens: {facts.get('measured_on', 'of an unknown text')}"


def read_popularity(directory: Path, manifest: Manifest) -> Popularity | None:
    """The shares of a model directory; None where it has none. FormatError where they are damaged."""
    if POPULARITY not in manifest.files:
        return None
    path, widths = Path(directory) / POPULARITY, manifest.architecture.every_width
    found: list[NDArray[np.float32]] = []
    with open_safetensors(path) as file:
        shapes: dict[str, tuple[int, ...]] = {_of_layer(layer): (width,) for layer, width in enumerate(widths)}
        if _OF_ALL in file.header.tensors and len(set(widths)) == 1:
            shapes = {_OF_ALL: (len(widths), widths[0])}
        for name, shape in shapes.items():
            tensor = file.header.tensors.get(name)
            if tensor is None or tensor.dtype != "F32" or tensor.shape != shape:
                message = f"{path}: must hold {name}, F32 {list(shape)}; remove the file from the model directory"
                raise FormatError(message)
            found.append(file.array(tensor).reshape(-1))
    shares = np.concatenate(found)
    if not ((shares >= 0) & (shares <= 1)).all():
        raise FormatError(f"{path}: holds shares outside 0 to 1; the model directory is damaged")
    return tuple(np.split(shares, np.cumsum(widths)[:-1]))


def _of_layer(layer: int) -> str:
    return f"layers.{layer}.popularity"
