"""Resident weights: a safetensors file read whole, past the page cache, into anonymous memory.

Never mapped: mapped weights are evicted under pressure and counted twice (design, "Model directory"). The tensors are
views into the one buffer, which lives as long as any of them.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashllm import _core
from flashllm.errors import FlashIOError
from flashllm.format.safetensors import read_header

Tensors = dict[str, NDArray[Any]]

_NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),  # its bits: numpy has no bfloat16
    "U64": np.dtype("<u8"),
    "I8": np.dtype("i1"),
}
_READ_BLOCK = 64 << 20  # bytes handed to the reader at a time


def read_tensors(path: Path, reader: _core.Reader, *, direct: bool) -> tuple[Tensors, bool]:
    """Every tensor of `path` by name, and whether the reads were direct. Raises FormatError, FlashIOError."""
    header = read_header(path)
    file = _core.DirectFile(str(path), direct=direct)
    buffer = _core.allocate(file.size)
    for start in range(0, file.size, _READ_BLOCK):
        batch = _core.ReadBatch(reader, file)
        batch.add(start, buffer[start : min(start + _READ_BLOCK, file.size)])
        batch.submit()
        batch.wait()
    if file.size != path.stat().st_size:
        raise FlashIOError(f"{path} changed while it was read; try again")
    tensors: Tensors = {
        name: buffer[info.offset : info.offset + info.nbytes].view(_NUMPY_DTYPES[info.dtype]).reshape(info.shape)
        for name, info in header.tensors.items()
    }
    return tensors, file.direct
