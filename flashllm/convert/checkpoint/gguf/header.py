"""Whether a GGUF file's header is whole: lengths, counts and types lead from its start to its tensors, inside the file.

The gguf package believes what a file says and makes an object of every element of every array, in Python: of a torn
file it may read all the rest as one array before something does not fit. This walk looks at no element but the lengths
of strings, so that such a file is refused at once. Knows no names but those of vocabularies, and keeps nothing.

    magic, version u32, tensors u64, fields u64
    field:  name, type u32, value          string: length u64, bytes
    array:  type u32, elements u64, values
    tensor: name, dimensions u32, u64 each, kind u32, offset u64
"""

from pathlib import Path
from typing import NoReturn

from flashllm.base.files import pread_bytes
from flashllm.errors import FormatError, UnsupportedModelError

_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_NBYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # of a number, by its type
_MAX_DIMENSIONS = 4  # ggml.h, GGML_MAX_DIMS
_LEAST_FIELD, _LEAST_TENSOR = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8  # bytes
_VOCABULARY = b"tokenizer."  # whose arrays have an element a token, or a merge of tokens
_MAX_TOKENS, _MAX_ELEMENTS = 1 << 22, 1 << 16  # of one such array, of all others together
_WINDOW = 1 << 20  # bytes read at a time


def check_header(fd: int, file_nbytes: int, path: Path) -> None:
    """FormatError where the file's header is damaged; UnsupportedModelError where its bytes are in the other order.

    The caller has seen the magic number. A million strings take it less than half a second, and the package twenty.
    """
    walk = _Walk(fd, file_nbytes, path)
    walk.at = 4
    version = walk.number(4)
    if version & 0xFFFF == 0:
        raise UnsupportedModelError(f"{path}: is a big-endian GGUF file; get the little-endian one")
    if version not in _VERSIONS:
        walk.refuse(f"version {version}, where 2 and 3 can be read,")
    tensors, fields = walk.number(8), walk.number(8)
    walk.room_for(fields, _LEAST_FIELD, "fields of metadata")
    for _ in range(fields):
        name, kind = walk.name(), walk.number(4)
        if kind == _ARRAY:
            walk.array(name)
        else:
            walk.value(kind)
    walk.room_for(tensors, _LEAST_TENSOR, "tensors")
    for _ in range(tensors):
        walk.name()
        dimensions = walk.number(4)
        if dimensions > _MAX_DIMENSIONS:
            walk.refuse(f"a tensor has {dimensions} dimensions")
        walk.skip(8 * dimensions + 4 + 8)


class _Walk:
    """A place in the file, and a part of its bytes."""

    def __init__(self, fd: int, file_nbytes: int, path: Path) -> None:
        self.at = 0
        self._elements = 0  # of arrays that are no vocabulary's
        self._fd, self._file_nbytes, self._path = fd, file_nbytes, path
        self._window, self._start = b"", 0  # bytes of the file, from there

    def refuse(self, what: str) -> NoReturn:
        raise FormatError(f"{self._path}: truncated or damaged ({what} at byte {self.at}); get the file again")

    def room_for(self, count: int, nbytes: int, what: str) -> None:
        """FormatError where so many things of at least so many bytes each reach beyond the end of the file."""
        if count * nbytes > self._file_nbytes - self.at:
            self.refuse(f"{count} {what}, for which the file is too short,")

    def skip(self, nbytes: int) -> None:
        if nbytes > self._file_nbytes - self.at:
            self.refuse(f"{nbytes} bytes, for which the file is too short,")
        self.at += nbytes

    def number(self, nbytes: int) -> int:
        return int.from_bytes(self.taken(nbytes), "little")

    def taken(self, nbytes: int) -> bytes:
        """The next bytes, few."""
        begin = self.at - self._start
        self.skip(nbytes)
        if not 0 <= begin <= len(self._window) - nbytes:
            begin, self._start = 0, self.at - nbytes
            count = min(_WINDOW, self._file_nbytes - self._start)
            self._window = pread_bytes(self._fd, count, self._start, self._path)
        return self._window[begin : begin + nbytes]

    def name(self) -> bytes:
        """The first bytes of a string, and on behind it."""
        nbytes = self.number(8)
        start = self.taken(min(nbytes, len(_VOCABULARY)))
        self.skip(nbytes - len(start))
        return start

    def value(self, kind: int) -> None:
        """On behind a number or a string."""
        if kind == _STRING:
            self.skip(self.number(8))
        elif kind in _NBYTES:
            self.skip(_NBYTES[kind])
        else:
            self.refuse(f"a value of type {kind}")

    def array(self, name: bytes) -> None:
        """On behind an array."""
        kind, count = self.number(4), self.number(8)
        if name == _VOCABULARY:
            most, elements = _MAX_TOKENS, count
        else:
            most, elements = _MAX_ELEMENTS, self._elements + count
            self._elements = elements
        if elements > most:
            self.refuse(f"arrays of {elements} elements, where {most} are the most,")
        if kind in _NBYTES:
            self.skip(count * _NBYTES[kind])
        elif kind == _STRING:
            self.room_for(count, 8, "strings")
            for _ in range(count):
                self.skip(self.number(8))
        else:
            self.refuse(f"an array of type {kind}")
