"""A GGUF file's header: its metadata as plain values, and its table of tensors. Knows no key, no kind of tensor.

Lengths, counts and types must lead from the file's start to its tensors, inside the file. Arrays and texts are
bounded, so that a damaged or hostile file is refused at once.

    magic, version u32, tensors u64, fields u64
    field:  name, type u32, value          string: length u64, bytes
    array:  type u32, elements u64, values
    tensor: name, dimensions u32, u64 each (the row's length first), kind u32, offset u64
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from flashllm.base.files import pread_bytes
from flashllm.errors import FormatError, UnsupportedModelError

_VERSIONS = (2, 3)
_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}
_DTYPES = {kind: np.dtype(name) for kind, name in (_NUMBERS | {_BOOL: "?"}).items()}
_MAX_DIMENSIONS = 4  # ggml.h, GGML_MAX_DIMS
_LEAST_FIELD, _LEAST_TENSOR = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8  # bytes
_MAX_FIELDS, _MAX_TENSORS = 1 << 16, 1 << 18
_VOCABULARY = "tokenizer."  # whose arrays have an element a token, or a merge of tokens
_MAX_TOKENS, _MAX_ELEMENTS = 1 << 22, 1 << 16  # of such arrays together, of all others
_MAX_TEXT_NBYTES = 256 << 20  # of all texts; the largest tokenizer.json has 35 MB
_WINDOW = 1 << 20  # bytes read at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class TableEntry:
    """A tensor as the table describes it, nothing of which is checked."""

    name: str
    kind: int  # ggml's number
    shape: tuple[int, ...]  # as in numpy, the row's length last
    offset: int  # from where the data begins


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    metadata: Mapping[str, Any]  # bool, int, float, str, or a list of one of them
    tensors: Sequence[TableEntry]
    nbytes: int


def read_header(fd: int, file_nbytes: int, path: Path) -> Header:
    """The file's header. FormatError where it is damaged; UnsupportedModelError where its bytes are in the other order.

    The caller has seen the magic number. A million strings take less than a second.
    """
    walk = _Walk(fd, file_nbytes, path)
    walk.at = 4
    version = walk.number(4)
    if version & 0xFFFF == 0:
        raise UnsupportedModelError(f"{path}: is a big-endian GGUF file; get the little-endian one")
    if version not in _VERSIONS:
        walk.refuse(f"version {version}, where 2 and 3 can be read,")
    num_tensors, num_fields = walk.number(8), walk.number(8)
    walk.room_for(num_fields, _LEAST_FIELD, "fields of metadata", _MAX_FIELDS)
    metadata: dict[str, Any] = {}
    for _ in range(num_fields):
        key = walk.text()
        if key in metadata:
            walk.refuse(f"the key {key[:80]!r} a second time")
        metadata[key] = walk.value(key)
    walk.room_for(num_tensors, _LEAST_TENSOR, "tensors", _MAX_TENSORS)
    tensors: dict[str, TableEntry] = {}
    for _ in range(num_tensors):
        name = walk.text()
        if name in tensors:
            walk.refuse(f"tensor {name[:80]} a second time")
        dimensions = walk.number(4)
        if dimensions > _MAX_DIMENSIONS:
            walk.refuse(f"tensor {name[:80]} has {dimensions} dimensions")
        shape = tuple(walk.number(8) for _ in range(dimensions))[::-1]
        tensors[name] = TableEntry(name=name, shape=shape, kind=walk.number(4), offset=walk.number(8))
    return Header(metadata=metadata, tensors=tuple(tensors.values()), nbytes=walk.at)


class _Walk:
    """A place in the file, and a part of its bytes."""

    def __init__(self, fd: int, file_nbytes: int, path: Path) -> None:
        self.at = 0
        self._tokens = self._elements = 0  # of arrays so far: of vocabularies, of others
        self._text_nbytes = 0
        self._fd, self._file_nbytes, self._path = fd, file_nbytes, path
        self._window, self._start = b"", 0  # bytes of the file, from there

    def refuse(self, what: str) -> NoReturn:
        raise FormatError(f"{self._path}: truncated or damaged ({what} at byte {self.at}); get the file again")

    def room_for(self, count: int, nbytes: int, what: str, most: int | None = None) -> None:
        """FormatError where so many things of at least so many bytes each reach beyond the end of the file."""
        if count * nbytes > self._file_nbytes - self.at:
            self.refuse(f"{count} {what}, for which the file is too short,")
        if most is not None and count > most:
            self.refuse(f"{count} {what}, where {most} are the most,")

    def number(self, nbytes: int) -> int:
        return int.from_bytes(self.taken(nbytes), "little")

    def taken(self, nbytes: int) -> bytes:
        if nbytes > self._file_nbytes - self.at:
            self.refuse(f"{nbytes} bytes, for which the file is too short,")
        begin = self.at - self._start
        if begin + nbytes > len(self._window):
            count = min(max(_WINDOW, nbytes), self._file_nbytes - self.at)
            begin, self._start = 0, self.at
            self._window = pread_bytes(self._fd, count, self._start, self._path)
        self.at += nbytes
        return self._window[begin : begin + nbytes]

    def text(self) -> str:
        nbytes = self.number(8)
        self._text_nbytes += nbytes
        if self._text_nbytes > _MAX_TEXT_NBYTES and nbytes <= self._file_nbytes - self.at:
            self.refuse(f"texts of {self._text_nbytes} bytes, where {_MAX_TEXT_NBYTES} are the most,")
        try:
            return self.taken(nbytes).decode()
        except UnicodeDecodeError:
            self.refuse("a text that is not UTF-8")

    def value(self, key: str) -> Any:
        kind = self.number(4)
        if kind == _ARRAY:
            return self._array(key)
        if kind == _STRING:
            return self.text()
        if kind not in _DTYPES:
            self.refuse(f"a value of type {kind}")
        return self._numbers(kind, 1)[0]

    def _numbers(self, kind: int, count: int) -> list[Any]:
        values: list[Any] = np.frombuffer(self.taken(count * _DTYPES[kind].itemsize), _DTYPES[kind]).tolist()
        return values

    def _array(self, key: str) -> list[Any]:
        kind, count = self.number(4), self.number(8)
        if key.startswith(_VOCABULARY):
            self._tokens += count
            elements, most = self._tokens, _MAX_TOKENS
        else:
            self._elements += count
            elements, most = self._elements, _MAX_ELEMENTS
        if elements > most:
            self.refuse(f"arrays of {elements} elements, where {most} are the most,")
        if kind in _DTYPES:
            return self._numbers(kind, count)
        if kind != _STRING:
            self.refuse(f"an array of type {kind}")
        self.room_for(count, 8, "strings")
        return [self.text() for _ in range(count)]
