"""How often each neuron is active, learned from a trace: a small file of a model directory, `popularity.safetensors`.

One tensor, `popularity`, float32 [layers, d_ff]: the share of tokens for which a neuron was named, by original id. The
memory plan shares the cache out between layers by it, and the frequency policy starts from it. It decides what is
read and never what is computed, so a model directory works without it.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flashllm.errors import FormatError
from flashllm.format.install import install_file
from flashllm.format.manifest import Manifest
from flashllm.format.model_files import POPULARITY
from flashllm.format.safetensors import encode_header, open_safetensors
from flashllm.format.trace import Stream, Trace, unpack_bits

Popularity = NDArray[np.float32]  # [layers, d_ff]

_TENSOR = "popularity"


def measure_popularity(trace: Trace) -> Popularity:
    """The shares of `trace`, in one pass over it."""
    info = trace.info
    counts = np.zeros((info.num_layers, info.num_neurons), np.int64)
    for token in range(info.num_tokens):
        counts += unpack_bits(trace.token(token)[:, Stream.ACTIVE], info.num_neurons)
    return (counts / info.num_tokens).astype(np.float32)


def install_popularity(directory: Path, trace: Trace) -> Manifest:
    """Measure `trace` and put the result into a model directory; the new manifest. UsageError for a foreign trace."""
    manifest = Manifest.load(Path(directory))
    trace.check_model(manifest.architecture)
    shares = measure_popularity(trace)
    metadata = {"tokens": str(trace.info.num_tokens), "measured_on": trace.info.description}
    header = encode_header([(_TENSOR, "F32", shares.shape)], metadata)
    return install_file(Path(directory), POPULARITY, [header, shares.tobytes()])


def read_popularity(directory: Path, manifest: Manifest) -> Popularity | None:
    """The shares of a model directory; None where it has none. FormatError where they are damaged."""
    if POPULARITY not in manifest.files:
        return None
    path = Path(directory) / POPULARITY
    shape = (manifest.architecture.num_layers, manifest.rows.d_ff)
    shares = np.empty(shape, np.float32)
    with open_safetensors(path) as file:
        tensor = file.header.tensors.get(_TENSOR)
        if tensor is None or tensor.dtype != "F32" or tensor.shape != shape:
            message = f"{path}: must hold {_TENSOR}, F32 {list(shape)}; remove the file from the model directory"
            raise FormatError(message)
        file.read_into(tensor, 0, shares.reshape(-1).view(np.uint8).data)
    if not ((shares >= 0) & (shares <= 1)).all():
        raise FormatError(f"{path}: holds shares outside 0 to 1; the model directory is damaged")
    return shares
