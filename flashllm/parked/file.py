"""The file of a parked conversation. What is read back has the bits that were written, or is an error.

- Eight bytes `flashkv2`; four, little-endian, the header's length; the header, JSON.
- The header: `model` (`identity`), `tokens` and `computed` (counts), `nbytes` of keys and values and their `pages` (of
  each kind of layer), `note` (whatever the writer wants back).
- The token ids, 64-bit little-endian. The last pages of keys and values of the first `computed` of them.
- The SHA-256 of all before it, 32 bytes. Nothing behind it.
- A file is written under another name, synced and renamed, so a torn one does not get a valid name.
- The same model run in another mode, or by a processor with other instructions, has another identity: its bits differ.
"""

import contextlib
import hashlib
import itertools
import json
import os
import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashllm import _core
from flashllm.base.files import (
    HashingWriter,
    drop_page_cache,
    fsync_directory,
    open_for_reading,
    parse_json_object,
    pread_bytes,
    pread_into,
    read_bounded,
)
from flashllm.errors import FlashIOError, FormatError, UsageError
from flashllm.format.manifest import MANIFEST
from flashllm.format.model_files import CONFIG
from flashllm.generate.session import Session

_MAGIC, _OLD_MAGIC = b"flashkv2", b"flashkv1"
_MAX_HEADER_NBYTES = 64 << 20  # the note has a conversation's text
_MAX_NAMED_NBYTES = 64 << 20  # of the manifest and the config
_CHUNK_NBYTES = 16 << 20
_START = struct.Struct("<8sI")
_DIGEST_NBYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Parked:
    """A file's header, known before its keys and values are read."""

    path: Path
    model: str
    tokens: "array[int]"
    computed: int  # of them, from the first, with keys and values
    pages: tuple[int, ...]  # of keys and values, of each kind of layer
    note: dict[str, Any]
    nbytes: int  # of the file
    kv_nbytes: int  # of its keys and values
    kv_offset: int  # where they begin


def identity(directory: Path, mode: str) -> str:
    """Hash of what the bits of keys and values depend on besides tokens: the model, the mode, the instruction set."""
    digest = hashlib.sha256()
    for name in (MANIFEST, CONFIG):
        digest.update(hashlib.sha256(read_bounded(directory / name, _MAX_NAMED_NBYTES)).digest())
    digest.update(json.dumps([mode, _core.best_simd_level()]).encode())
    return digest.hexdigest()


def write_parked(path: Path, session: Session, model: str, note: dict[str, Any]) -> int:
    """Write `session` as the file `path`, which is replaced; the bytes written. FlashIOError."""
    kinds = session.save()
    tokens = session.tokens
    header = {
        "model": model,
        "tokens": len(tokens),
        "computed": session.computed,
        "nbytes": sum(page.nbytes for pages in kinds for page in pages),
        "pages": [len(pages) for pages in kinds],
        "note": note,
    }
    raw = json.dumps(header).encode()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with HashingWriter(temporary) as writer:
            os.chmod(temporary, 0o600)  # what was said is the user's own
            writer.write(memoryview(_START.pack(_MAGIC, len(raw)) + raw))
            writer.write(memoryview(np.asarray(tokens, "<i8").tobytes()))
            for piece in _pieces(kinds):
                writer.write(piece)
            _, digest = writer.mark()
            writer.write(memoryview(digest.digest()))
            writer.finish()
            nbytes = writer.position
        os.rename(temporary, path)
        fsync_directory(path.parent)
    except BaseException as error:  # ctrl-C too
        with contextlib.suppress(OSError):
            temporary.unlink()
        if not isinstance(error, OSError):
            raise
        raise FlashIOError(f"{path}: cannot be written: {error.strerror}; make room, or use another place") from error
    return nbytes


def read_header(path: Path) -> Parked:
    """The file's header; its digest is not compared yet. FormatError, FlashIOError."""
    fd = open_for_reading(path)
    try:
        return _header(fd, path)
    finally:
        os.close(fd)


def read_parked(path: Path, session: Session, model: str, *, prompted: int = 0) -> Parked:
    """Make `session` what was parked; `prompted` as of the session that was.

    FormatError, FlashIOError, ContextFull: the session is then empty.
    """
    fd = open_for_reading(path)
    try:
        parked = _header(fd, path)
        if parked.model != model:
            raise FormatError(f"{path}: was saved with another model, mode or processor; load it with that one")
        if parked.computed > session.context_limit:
            raise FormatError(f"{path}: has {parked.computed} tokens, more than the context; use a larger --context")

        def fill(kinds: list[list[NDArray[np.uint8]]]) -> None:
            if sum(page.nbytes for pages in kinds for page in pages) != parked.kv_nbytes:
                raise FormatError(f"{path}: its keys and values are of another size than this model's")
            digest, at = hashlib.sha256(pread_bytes(fd, parked.kv_offset, 0, path)), parked.kv_offset
            for piece in _pieces(kinds):
                pread_into(fd, piece, at, path)
                digest.update(piece)
                at += piece.nbytes
            if pread_bytes(fd, _DIGEST_NBYTES, parked.nbytes - _DIGEST_NBYTES, path) != digest.digest():
                raise FormatError(f"{path}: is damaged: its checksum is another; delete it")

        try:
            session.restore(parked.tokens, parked.computed, parked.pages, fill, prompted=prompted)
        except UsageError as error:
            raise FormatError(f"{path}: {error}; delete it") from error
        drop_page_cache(fd)
        return parked
    finally:
        os.close(fd)


def _pieces(kinds: list[list[NDArray[np.uint8]]]) -> Iterator[memoryview]:
    """All bytes of the pages, some at a time."""
    for page in itertools.chain(*kinds):
        for first in range(0, page.nbytes, _CHUNK_NBYTES):
            yield page[first : first + _CHUNK_NBYTES].data


def _header(fd: int, path: Path) -> Parked:
    nbytes = os.fstat(fd).st_size
    torn = FormatError(f"{path}: is no saved conversation, or a torn one; delete it")
    if nbytes < _START.size + _DIGEST_NBYTES:
        raise torn
    magic, length = _START.unpack(pread_bytes(fd, _START.size, 0, path))
    if magic == _OLD_MAGIC:
        raise FormatError(f"{path}: was saved by an earlier version, which kept all keys and values; delete it")
    if magic != _MAGIC or not 0 < length <= min(_MAX_HEADER_NBYTES, nbytes - _START.size):
        raise torn
    header = parse_json_object(pread_bytes(fd, length, _START.size, path), str(path))
    counts = [header.get(name) for name in ("tokens", "computed", "nbytes")]
    if not all(type(count) is int and 0 <= count < 2**48 for count in counts):
        raise torn
    count, computed, kv_nbytes = (int(each or 0) for each in counts)
    kv_offset = _START.size + length + 8 * count
    model, note, pages = header.get("model"), header.get("note"), header.get("pages")
    if (
        not isinstance(model, str)
        or not isinstance(pages, list)
        or not all(type(each) is int and 0 <= each <= computed for each in pages)
        or not isinstance(note, dict)
        or not 0 < computed <= count
        or kv_offset + kv_nbytes + _DIGEST_NBYTES != nbytes
    ):
        raise torn
    tokens = array("q", np.frombuffer(pread_bytes(fd, 8 * count, kv_offset - 8 * count, path), "<i8").tolist())
    return Parked(
        path=path,
        model=model,
        tokens=tokens,
        computed=computed,
        pages=tuple(pages),
        note=note,
        nbytes=nbytes,
        kv_nbytes=kv_nbytes,
        kv_offset=kv_offset,
    )
