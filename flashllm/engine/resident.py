"""Resident weights: a safetensors file read whole, past the page cache, into anonymous memory.

Never mapped: mapped weights are evicted under pressure and counted twice (design, "Model directory"). The tensors are
views into the one buffer, which lives as long as any of them.
"""

import hashlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashllm import _core
from flashllm.errors import FlashIOError
from flashllm.format.manifest_values import FileEntry
from flashllm.format.model_dir import check_hash
from flashllm.format.safetensors import NUMPY_DTYPES, TensorInfo, read_header

Tensors = dict[str, NDArray[Any]]

_READ_BLOCK = 64 << 20  # bytes handed to the reader at a time
_PASSED_BLOCK = 1 << 20  # the same of a tensor of which checksums alone stay


def read_tensors(
    path: Path, reader: _core.Reader, *, direct: bool, expected: FileEntry, rows: str | None = None
) -> Tensors:
    """Every tensor of `path` by name; of `rows`, where it is given, the checksums [rows] of its rows in its place.

    The bytes are hashed as they come, each block while the next one is read. Raises FormatError, ChecksumError where
    they are not the `expected` ones, FlashIOError.
    """
    header = read_header(path)
    file = _core.DirectFile(str(path), direct=direct)
    buffer = _core.allocate(file.size)
    sha256 = hashlib.sha256()
    passed = None if rows is None else header.tensors[rows]
    sums: list[NDArray[np.uint64]] = []
    before = None
    for start, block in _blocks(buffer, passed):
        batch = _core.ReadBatch(reader, file)
        batch.add(start, block)
        batch.submit()
        if before is not None:
            sha256.update(before.data)
        batch.wait()
        if passed is not None and passed.offset <= start < passed.offset + passed.nbytes:
            sums.append(_core.xxh3_64_rows(block.reshape(-1, passed.nbytes // passed.shape[0])))
        before = block
    if file.size != path.stat().st_size:
        raise FlashIOError(f"{path} changed while it was read; try again")
    if before is not None:
        sha256.update(before.data)
    check_hash(path, expected, sha256.hexdigest())
    tensors = {
        name: buffer[info.offset : info.offset + info.nbytes].view(NUMPY_DTYPES[info.dtype]).reshape(info.shape)
        for name, info in header.tensors.items()
        if name != rows
    }
    return tensors if rows is None else {**tensors, rows: np.concatenate(sums)}


def _blocks(buffer: NDArray[np.uint8], passed: TensorInfo | None) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Parts of a file with their offsets. Those of the tensor that is `passed` lie in two places in turn, so that the
    buffer's pages for it are never made."""
    if passed is None:
        yield from _between(buffer, 0, len(buffer))
        return
    end, row = passed.offset + passed.nbytes, passed.nbytes // passed.shape[0]
    step = max(1, _PASSED_BLOCK // row) * row
    places = itertools.cycle([_core.allocate(step), _core.allocate(step)])
    yield from _between(buffer, 0, passed.offset)
    for start in range(passed.offset, end, step):
        yield start, next(places)[: min(step, end - start)]
    yield from _between(buffer, end, len(buffer))


def _between(buffer: NDArray[np.uint8], first: int, last: int) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    for start in range(first, last, _READ_BLOCK):
        yield start, buffer[start : min(start + _READ_BLOCK, last)]
