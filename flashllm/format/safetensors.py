"""Safetensors files, strictly: the header is validated whole before any of it is used. Writes padded headers.

Reads with `pread`; never maps. Knows dtypes and byte ranges, not what the tensors mean. The rules:
 1. eight bytes: the header's length N, little endian; N bytes of JSON that begin with "{"; then the data;
 2. N is at most 100 MB and inside the file; the JSON may be followed by spaces up to N, and by nothing else;
 3. keys are unique; `__metadata__`, where present, maps strings to strings;
 4. every other key is a tensor: exactly `dtype`, `shape`, `data_offsets`;
 5. the byte range is what dtype and shape say; the ranges cover the data with no hole, no overlap, no rest;
 6. names may stand in any order in the JSON; the file's order is that of the offsets.
"""

import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashllm.base.files import file_status, open_for_reading, parse_json, pread_bytes, pread_into
from flashllm.errors import FormatError

MAX_HEADER_NBYTES = 100_000_000  # safetensors' own cap
MAX_NAME_LENGTH = 4096
MAX_RANK = 8
MAX_DATA_NBYTES = 2**63 - 1  # offsets are off_t
DATA_ALIGNMENT = 4096  # of our files' data: serves every direct-I/O device we know of
_LENGTH_NBYTES = 8
LFS_START = b"version https://git-lfs"

ITEMSIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip

NUMPY_DTYPES: dict[str, np.dtype[Any]] = {  # of tensors that are read as arrays
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),  # its bits: numpy has no bfloat16
    "U64": np.dtype("<u8"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),  # codes in groups (flashllm/base/group_codes.py)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor: where its bytes are in the file (absolute offset) and what they are."""

    name: str
    dtype: str  # safetensors' code, a key of ITEMSIZES
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @classmethod
    def made(cls, name: str, dtype: str, shape: tuple[int, ...]) -> "TensorInfo":
        """A tensor that is made as it is read, and lies in no file."""
        return cls(name=name, dtype=dtype, shape=shape, offset=0, nbytes=math.prod(shape) * ITEMSIZES[dtype])

    @property
    def itemsize(self) -> int:
        return ITEMSIZES[self.dtype]

    def position(self, start: int, nbytes: int) -> int:
        """Offset in the file of `nbytes` of the tensor from its byte `start`. ValueError where it has not as many."""
        if start < 0 or start + nbytes > self.nbytes:
            raise ValueError(f"bytes {start} to {start + nbytes} are outside {self.name} of {self.nbytes} bytes")
        return self.offset + start


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsHeader:
    """A validated header. `tensors` is in the order of offsets."""

    path: Path
    metadata: Mapping[str, str]
    tensors: Mapping[str, TensorInfo]
    data_start: int
    file_nbytes: int

    def expect(self, name: str, dtype: str, shape: Sequence[int]) -> TensorInfo:
        """Tensor `name`, of this dtype code and shape. FormatError where it is missing, or another."""
        info = self.tensors.get(name)
        if info is None:
            raise FormatError(f"{self.path}: tensor {name} is missing")
        if info.dtype != dtype or info.shape != tuple(shape):
            raise FormatError(f"{self.path}: {name} is {info.dtype} {list(info.shape)}, not {dtype} {list(shape)}")
        return info


def read_header(path: Path) -> SafetensorsHeader:
    """The validated header of the file `path`. FormatError with the broken rule, FlashIOError on a failed read."""
    with open_safetensors(path) as file:
        return file.header


class SafetensorsFile:
    """An open file with its validated header; made by `open_safetensors`."""

    def __init__(self, fd: int, header: SafetensorsHeader) -> None:
        self.fd = fd
        self.header = header

    def read_into(self, info: TensorInfo, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes of tensor `info` from its byte `start`."""
        pread_into(self.fd, buffer, info.position(start, len(buffer)), self.header.path)

    def array(self, info: TensorInfo) -> NDArray[Any]:
        """The values of a tensor of one of NUMPY_DTYPES."""
        values = np.empty(info.shape, NUMPY_DTYPES[info.dtype])
        self.read_into(info, 0, values.reshape(-1).view(np.uint8).data)
        return values


@contextmanager
def open_safetensors(path: Path) -> Iterator[SafetensorsFile]:
    """The file `path`, open, its header validated. Errors as in `read_header`."""
    fd = open_for_reading(path)
    try:
        yield SafetensorsFile(fd, _read_header(fd, path))
    finally:
        os.close(fd)


def _read_header(fd: int, path: Path) -> SafetensorsHeader:
    file_nbytes = file_status(fd, path).st_size
    start = read_start(fd, file_nbytes, path)
    if file_nbytes < _LENGTH_NBYTES:
        raise FormatError(f"{path}: {file_nbytes} bytes are too few for a safetensors file")
    header_nbytes = int.from_bytes(start[:_LENGTH_NBYTES], "little")
    if header_nbytes > MAX_HEADER_NBYTES:
        raise FormatError(f"{path}: a header of {header_nbytes} bytes; at most {MAX_HEADER_NBYTES} are allowed")
    if header_nbytes > file_nbytes - _LENGTH_NBYTES:
        left = file_nbytes - _LENGTH_NBYTES
        raise FormatError(f"{path}: truncated: the header has {header_nbytes} bytes, {left} are left in the file")
    if header_nbytes < 2:
        raise FormatError(f"{path}: a header of {header_nbytes} bytes is too short")
    raw = pread_bytes(fd, header_nbytes, _LENGTH_NBYTES, path)
    return parse_header(raw, path=path, file_nbytes=file_nbytes)


def read_start(fd: int, file_nbytes: int, path: Path) -> bytes:
    """The first bytes, some twenty, of the file `path`, open as `fd`. FormatError for a git-LFS pointer."""
    start = pread_bytes(fd, min(len(LFS_START), file_nbytes), 0, path)
    if start == LFS_START:
        raise FormatError(f"{path}: is a git-LFS pointer, not the weights; fetch them with `git lfs pull`")
    return start


def parse_header(raw: bytes, *, path: Path, file_nbytes: int) -> SafetensorsHeader:
    """Validate the `raw` JSON of a header in a file of `file_nbytes`. FormatError with the rule that is broken."""
    if not raw.startswith(b"{"):
        raise FormatError(f"{path}: the header must begin with '{{', not {raw[:1]!r}")
    body = raw.rstrip(b" ")
    if not body.endswith(b"}"):
        raise FormatError(f"{path}: the header must end with '}}' and spaces, not {body[-1:]!r}")
    entries = parse_json(body, f"{path}: the header")
    data_start = _LENGTH_NBYTES + len(raw)
    metadata = _check_metadata(entries.pop("__metadata__", {}), path)
    tensors = [_check_tensor(name, entry, path, data_start, file_nbytes) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    end = data_start
    for tensor in tensors:
        if tensor.offset != end:
            kind = "a hole" if tensor.offset > end else "an overlap"
            raise FormatError(f"{path}: {kind} in the data before tensor {_short(tensor.name)}")
        end += tensor.nbytes
    if end != file_nbytes:
        raise FormatError(f"{path}: {file_nbytes - end} bytes after the last tensor belong to nothing")
    return SafetensorsHeader(
        path=path,
        metadata=metadata,
        tensors=MappingProxyType({tensor.name: tensor for tensor in tensors}),
        data_start=data_start,
        file_nbytes=file_nbytes,
    )


def _check_metadata(value: Any, path: Path) -> Mapping[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise FormatError(f"{path}: __metadata__ must map strings to strings")
    return MappingProxyType(value)


def _check_tensor(name: str, entry: Any, path: Path, data_start: int, file_nbytes: int) -> TensorInfo:
    where = f"{path}: tensor {_short(name)}"
    if not 0 < len(name) <= MAX_NAME_LENGTH:
        raise FormatError(f"{where}: a name has 1 to {MAX_NAME_LENGTH} characters, not {len(name)}")
    if any(0xD800 <= ord(character) <= 0xDFFF for character in name):
        raise FormatError(f"{where}: the name is not valid Unicode")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise FormatError(f"{where}: must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEMSIZES:
        raise FormatError(f"{where}: unknown dtype {_short(dtype)}")
    if not isinstance(shape, list) or not all(_is_size(size) for size in shape):
        raise FormatError(f"{where}: the shape must be a list of integers from 0")
    if len(shape) > MAX_RANK:
        raise FormatError(f"{where}: {len(shape)} dimensions; at most {MAX_RANK} are allowed")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(offset) for offset in offsets):
        raise FormatError(f"{where}: data_offsets must be two integers from 0")
    nbytes = math.prod(shape) * ITEMSIZES[dtype]
    if nbytes > MAX_DATA_NBYTES:
        raise FormatError(f"{where}: the shape's product overflows")
    begin, end = offsets
    if end < begin:
        raise FormatError(f"{where}: data_offsets end ({end}) before they begin ({begin})")
    if end - begin != nbytes:
        raise FormatError(f"{where}: data_offsets hold {end - begin} bytes, dtype and shape say {nbytes}")
    if data_start + end > file_nbytes:
        missing = data_start + end - file_nbytes
        raise FormatError(f"{where}: truncated: the file ends {missing} bytes before the tensor does")
    return TensorInfo(name=name, dtype=dtype, shape=tuple(shape), offset=data_start + begin, nbytes=nbytes)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_DATA_NBYTES  # type(): JSON's true is an int to isinstance


def _short(value: Any) -> str:
    text = ascii(value)  # safe on any terminal, lone surrogates included
    return text if len(text) <= 120 else text[:117] + "..."


def encode_header(
    tensors: Sequence[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """The start of a file of `tensors` (name, dtype code, shape) stored in this order: length, JSON, padding.

    Trailing spaces make the data start at a multiple of 4096. ValueError for an unknown dtype or a repeated name.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    sizes = []
    for _, dtype, shape in tensors:
        if dtype not in ITEMSIZES:
            raise ValueError(f"dtype {dtype!r} is not one of safetensors'")
        sizes.append(math.prod(shape) * ITEMSIZES[dtype])
    ends = list(itertools.accumulate(sizes))
    for (name, dtype, shape), nbytes, end in zip(tensors, sizes, ends, strict=True):
        if name in entries:
            raise ValueError(f"name {name!r} occurs twice")
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end - nbytes, end]}
    raw = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    padded = -(-(_LENGTH_NBYTES + len(raw)) // DATA_ALIGNMENT) * DATA_ALIGNMENT - _LENGTH_NBYTES
    return padded.to_bytes(_LENGTH_NBYTES, "little") + raw.ljust(padded, b" ")
