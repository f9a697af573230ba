"""Resident weights: a safetensors file read whole, past the page cache, into anonymous memory.

Never mapped: mapped weights are evicted under pressure and counted twice (design, "Model directory"). The tensors are
views into the one buffer, which lives as long as any of them.
"""

import hashlib
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from flashllm import _core
from flashllm.errors import FlashIOError
from flashllm.format.manifest_values import FileEntry
from flashllm.format.model_dir import check_hash
from flashllm.format.safetensors import NUMPY_DTYPES, read_header

Tensors = dict[str, NDArray[Any]]

_READ_BLOCK = 64 << 20  # bytes handed to the reader at a time


def read_tensors(path: Path, reader: _core.Reader, *, direct: bool, expected: FileEntry | None) -> Tensors:
    """Every tensor of `path` by name.

    With `expected`, the manifest's entry, the bytes are hashed as they come, each block while the next one is read.
    Raises FormatError, ChecksumError where they are others, FlashIOError.
    """
    header = read_header(path)
    file = _core.DirectFile(str(path), direct=direct)
    buffer = _core.allocate(file.size)
    sha256 = hashlib.sha256()
    blocks = [buffer[start : start + _READ_BLOCK] for start in range(0, file.size, _READ_BLOCK)]
    before = None
    for number, block in enumerate(blocks):
        batch = _core.ReadBatch(reader, file)
        batch.add(number * _READ_BLOCK, block)
        batch.submit()
        if before is not None and expected is not None:
            sha256.update(before.data)
        batch.wait()
        before = block
    if file.size != path.stat().st_size:
        raise FlashIOError(f"{path} changed while it was read; try again")
    if expected is not None:
        if before is not None:
            sha256.update(before.data)
        check_hash(path, expected, sha256.hexdigest())
    return {
        name: buffer[info.offset : info.offset + info.nbytes].view(NUMPY_DTYPES[info.dtype]).reshape(info.shape)
        for name, info in header.tensors.items()
    }
