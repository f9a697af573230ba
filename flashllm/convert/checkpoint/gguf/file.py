"""GGUF files: metadata, and tensors dequantised in ranges as they are read. Knows no architecture and no tokenizer.

The gguf package dequantises; the header is our own to read (header.py, layout.py). A model split over several files
(`-00001-of-00003.gguf`) is opened by its first.
"""

import math
import os
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashllm.base.files import CHUNK_NBYTES, drop_page_cache, file_status, open_for_reading, pread_bytes
from flashllm.convert.checkpoint.gguf.header import read_header
from flashllm.convert.checkpoint.gguf.layout import PLAIN, dequantized, placed_tensors
from flashllm.convert.checkpoint.gguf.metadata import Metadata
from flashllm.convert.checkpoint.source import Lying, check_start
from flashllm.convert.kept.blocks import KINDS
from flashllm.errors import FormatError
from flashllm.format.safetensors import TensorInfo

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_SPARSE_MAGIC = b"PWRI"  # PowerInfer's: ggml.h, GGUF_POWERINFER_MAGIC
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)
_MAX_FILES = 99_999  # of a split model, as its names count
_MAX_GAP = 64  # rows read and left out, rather than read around


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor as it lies in a GGUF file."""

    path: Path
    fd: int
    kind: str  # of ggml: "F16", "Q4_K"
    shape: tuple[int, ...]  # as in numpy, the rows' length last
    offset: int
    nbytes: int
    scales: tuple[float, ...] = (1.0,)  # by which its weights are multiplied, all or each expert's; of NVFP4

    @property
    def code(self) -> str:
        """safetensors' dtype code of what reading gives: fp32 for a quantised tensor."""
        return PLAIN[self.kind][0] if self.kind in PLAIN else "F32"

    @property
    def itemsize(self) -> int:
        """Bytes of an element of what reading gives."""
        return PLAIN[self.kind][1] if self.kind in PLAIN else 4

    @property
    def is_quantised(self) -> bool:
        """True where the file has codes and not numbers."""
        return self.kind not in PLAIN

    def raw(self, first: int, count: int) -> NDArray[np.uint8]:
        """The bytes of rows (of the tensor with all dimensions but the last made one): [count, bytes]."""
        nbytes = self.nbytes // (math.prod(self.shape) // self.shape[-1])  # of a row
        at = self.offset + first * nbytes
        raw = np.frombuffer(pread_bytes(self.fd, count * nbytes, at, self.path), np.uint8).reshape(count, nbytes)
        drop_page_cache(self.fd, at, count * nbytes)
        return raw

    def rows(self, first: int, count: int) -> NDArray[Any]:
        """The same as `code` says: [count, length]."""
        raw = self.raw(first, count)
        if self.kind in PLAIN:
            return raw.view(f"<u{self.itemsize}" if self.kind == "BF16" else f"<f{self.itemsize}")
        if self.kind == "NVFP4":  # as a model directory has them
            return KINDS[self.kind].quantised(raw, self.scales[0]).widened()
        return dequantized(raw, self.kind)

    def numbers(self, first: int, count: int) -> NDArray[np.float32]:
        """The same as fp32, whatever the kind."""
        rows = self.rows(first, count)
        return (rows.astype("<u4") << 16).view("<f4") if self.kind == "BF16" else rows.astype("<f4", copy=False)


class GgufTensor:
    """Reads one tensor as transformers has it: a `TensorFile`.

    `order[i]` is the stored row of row i, where rows lie in another order; `change` makes the values of those that the
    file has. The file has a `transposed` tensor's columns as rows.
    """

    def __init__(
        self,
        stored: StoredTensor,
        order: NDArray[np.int64] | None = None,
        change: Callable[[NDArray[np.float32]], NDArray[np.float32]] | None = None,
        *,
        transposed: bool = False,
    ) -> None:
        self._stored, self._order, self._change, self.transposed = stored, order, change, transposed
        self._whole: NDArray[Any] | None = None  # of a transposed tensor, while it is read
        self.path = stored.path
        self.shape = stored.shape[::-1] if transposed else stored.shape
        self._length = self.shape[-1] if order is None or len(stored.shape) > 1 else 1  # of a row, in elements

    @property
    def kind(self) -> str:
        return self._stored.kind

    @property
    def scale(self) -> float:
        return self._stored.scales[0]

    @property
    def is_quantised(self) -> bool:
        """True where the file has codes, whose values are the tensor's."""
        return self._stored.is_quantised and self._change is None

    def place(self) -> Lying | None:
        stored = self._stored
        whole = self._order is None and not self.transposed
        return Lying(self.path, stored.offset, stored.kind, stored.nbytes) if whole else None

    def raw(self, first: int, count: int) -> NDArray[np.uint8]:
        if self._order is None:
            return self._stored.raw(first, count)
        found: NDArray[np.uint8] = self._gathered(self._order[first : first + count], self._stored.raw)
        return found

    def info(self, name: str) -> TensorInfo:
        """The tensor's description, under this name."""
        stored = self._stored
        code, itemsize = ("F32", 4) if self._change else (stored.code, stored.itemsize)
        nbytes = math.prod(stored.shape) * itemsize
        return TensorInfo(name=name, dtype=code, shape=self.shape, offset=stored.offset, nbytes=nbytes)

    def read_into(self, info: TensorInfo, start: int, buffer: memoryview) -> None:
        info.position(start, len(buffer))
        row_nbytes = self._length * info.itemsize
        step = max(1, CHUNK_NBYTES // row_nbytes)
        done = 0
        while done < len(buffer):
            row, skip = divmod(start + done, row_nbytes)
            count = min(step, -(-(skip + len(buffer) - done) // row_nbytes))
            values = np.ascontiguousarray(self._rows(row, count)).reshape(-1).view(np.uint8)
            part = values[skip : skip + len(buffer) - done]
            buffer[done : done + len(part)] = part.data
            done += len(part)

    def extent(self, info: TensorInfo) -> int | None:
        plain = self._stored.kind in PLAIN and self._order is None and self._change is None and not self.transposed
        return info.offset if plain else None

    def _rows(self, first: int, count: int) -> NDArray[Any]:
        read = self._stored.numbers if self._change else self._stored.rows
        if self.transposed:
            if self._whole is None:
                self._whole = read(0, self._stored.shape[0])
            rows = np.ascontiguousarray(self._whole[:, first : first + count].T)
            if first + count == self.shape[0]:
                self._whole = None
        elif self._order is None:
            rows = read(first, count)
        elif self._length == 1:
            rows = read(0, 1).reshape(-1)[self._order[first : first + count]]
        else:
            rows = self._gathered(self._order[first : first + count], read)
        return self._change(rows) if self._change else rows

    def _gathered(self, wanted: NDArray[np.int64], read: Callable[[int, int], NDArray[Any]]) -> NDArray[Any]:
        """These stored rows, in this order; `read` gives neighbours together."""
        ascending = np.argsort(wanted, kind="stable")
        stored = wanted[ascending]
        runs = np.split(np.arange(len(stored)), np.flatnonzero(np.diff(stored) > _MAX_GAP) + 1)
        result: NDArray[Any] | None = None
        for run in runs:
            first, last = int(stored[run[0]]), int(stored[run[-1]])
            rows = read(first, last - first + 1)
            if result is None:
                result = np.empty((len(wanted), rows.shape[1]), rows.dtype)
            result[ascending[run]] = rows[stored[run] - first]
        if result is None:
            raise ValueError("no rows are wanted")
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufContent:
    """Contents of a model's GGUF files."""

    path: Path  # the first file
    metadata: Metadata
    tensors: Mapping[str, StoredTensor]  # by the file's own names
    sparse: bool = False  # PowerInfer's, with predictors


def open_gguf(path: Path, stack: ExitStack) -> GgufContent:
    """The GGUF file `path`, or the files it is the first of; `stack` closes them.

    FormatError for a file that is empty, truncated, damaged, a git-LFS pointer, or missing from a split model;
    UnsupportedModelError for a kind of tensor that cannot be dequantised.
    """
    metadata, tensors, sparse = _open_one(path, stack)
    count = metadata.integer("split.count", 1, least=0, most=_MAX_FILES)  # 0: of files that were merged again
    if count > 1:
        match = _SPLIT.fullmatch(path.name)
        if match is None or int(match[3]) != count or int(match[2]) != 1:
            raise FormatError(
                f"{path}: is one of the {count} files of a model; give the first, named …-00001-of-{count:05}.gguf"
            )
        for number in range(2, count + 1):
            other = path.with_name(f"{match[1]}-{number:05}-of-{count:05}{match[4]}")
            if not other.exists():
                raise FormatError(f"{other}: is missing; the model is split over {count} files")
            more = _open_one(other, stack)[1]
            if twice := min(more.keys() & tensors.keys(), default=None):
                raise FormatError(f"{other}: tensor {twice[:80]} is in {tensors[twice].path.name} too; get both again")
            tensors |= more
    return GgufContent(path=path, metadata=metadata, tensors=tensors, sparse=sparse)


def _open_one(path: Path, stack: ExitStack) -> tuple[Metadata, dict[str, StoredTensor], bool]:
    fd = open_for_reading(path)
    stack.callback(os.close, fd)
    file_nbytes = file_status(fd, path).st_size
    sparse = file_nbytes >= 4 and pread_bytes(fd, 4, 0, path) == _SPARSE_MAGIC
    check_start(fd, file_nbytes, _SPARSE_MAGIC if sparse else _MAGIC, "a GGUF file", path)
    header = read_header(fd, file_nbytes, path)
    tensors = {
        name: StoredTensor(path=path, fd=fd, **placed._asdict())
        for name, placed in placed_tensors(header, file_nbytes, path).items()
    }
    return Metadata(header.metadata, path), tensors, sparse
