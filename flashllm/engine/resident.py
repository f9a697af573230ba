"""Resident weights: a safetensors file read whole, past the page cache, into anonymous memory.

Never mapped: mapped weights are evicted under pressure and counted twice (design, "Model directory"). The tensors are
views into the one buffer, which lives as long as any of them.
"""

from pathlib import Path

import torch

from flashllm import _core
from flashllm.errors import FlashIOError
from flashllm.format.safetensors import read_header

_TORCH_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U64": torch.uint64,
    "I8": torch.int8,
}
_READ_BLOCK = 64 << 20  # bytes handed to the reader at a time


def read_tensors(path: Path, reader: _core.Reader, *, direct: bool) -> tuple[dict[str, torch.Tensor], bool]:
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
    tensors = {
        name: torch.from_numpy(buffer[info.offset : info.offset + info.nbytes])
        .view(_TORCH_DTYPES[info.dtype])
        .reshape(info.shape)
        for name, info in header.tensors.items()
    }
    return tensors, file.direct
