"""The check of a GGUF file's header, by literal bytes and by files that the gguf package writes."""

import os
import struct

import gguf
import pytest
from arch_models import Variant, make_checkpoint
from gguf_files import write_gguf

from flashllm.convert.checkpoint.gguf.header import read_header
from flashllm.convert.checkpoint.opened import open_checkpoint
from flashllm.errors import FormatError, UnsupportedModelError

U8, I32, BOOL, STRING, ARRAY, U64 = 0, 5, 7, 8, 9, 10


def u32(value):
    return struct.pack("<I", value)


def u64(value):
    return struct.pack("<Q", value)


def text(value):
    return u64(len(value)) + value


def array(name, kind, count, values=b""):
    return text(name) + u32(ARRAY) + u32(kind) + u64(count) + values


def header(*fields, tensors=(), version=3):
    return b"".join((b"GGUF", u32(version), u64(len(tensors)), u64(len(fields)), *fields, *tensors))


def tensor(dimensions=(2, 3), name=b"a"):
    return text(name) + u32(len(dimensions)) + b"".join(map(u64, dimensions)) + u32(0) + u64(0)


def check(path, raw):
    path.write_bytes(raw)
    fd = os.open(path, os.O_RDONLY)
    try:
        return read_header(fd, len(raw), path)
    finally:
        os.close(fd)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A file of the gguf package's writer, and how long its header is."""
    root = tmp_path_factory.mktemp("gguf")
    path = write_gguf(make_checkpoint(root / "llama", Variant("llama", {"hidden_act": "silu"})), root / "a.gguf")
    return path, min(tensor.data_offset for tensor in gguf.GGUFReader(path).tensors)


def test_a_shorter_header_is_refused(real):
    whole, first = real
    fd = os.open(whole, os.O_RDONLY)
    try:
        read_header(fd, whole.stat().st_size, whole)
        read_header(fd, first, whole)
        for nbytes in range(4, first - 32, 3):  # up to 32 bytes are padding
            with pytest.raises(FormatError, match=r"a\.gguf: truncated or damaged"):
                read_header(fd, nbytes, whole)
    finally:
        os.close(fd)


@pytest.mark.parametrize("window", [16, 24, 64])
def test_the_window_is_nothing_but_speed(real, tmp_path, window, monkeypatch):
    raw = header(array(b"tokenizer.x", STRING, 3, text(b"aa") + text(b"") + text(b"c" * 99)), tensors=[tensor()])
    monkeypatch.setattr("flashllm.convert.checkpoint.gguf.header._WINDOW", window)
    check(tmp_path / "a.gguf", raw)
    check(tmp_path / "b.gguf", real[0].read_bytes())
    with pytest.raises(FormatError):
        check(tmp_path / "a.gguf", raw[:-1])


@pytest.mark.parametrize("raw", [
    header(),
    header(version=2),
    header(text(b"k") + u32(BOOL) + b"\1", text(b"") + u32(U64) + u64(1), text(b"s") + u32(STRING) + text(b"v")),
    header(array(b"a", U8, 3, b"abc"), array(b"b", STRING, 0), tensors=[tensor(()), tensor((1, 2, 3, 4), b"b")]),
    header(array(b"tokenizer.ggml.token_type", I32, 70_000, bytes(4 * 70_000))),
])  # fmt: skip
def test_whole_headers(raw, tmp_path):
    check(tmp_path / "a.gguf", raw + b"data")
    with pytest.raises(FormatError):
        check(tmp_path / "a.gguf", raw[:-1])


@pytest.mark.parametrize(("raw", "says"), [
    (header(array(b"a", U8, 100)), "100 bytes, for which the file is too short"),
    (header(array(b"a", U8, 1 << 63)), f"arrays of {1 << 63} elements, where 65536 are the most"),
    (header(array(b"a", U8, 65_537, bytes(65_537))), "arrays of 65537 elements"),
    (header(*(array(name, U8, 40_000, bytes(40_000)) for name in (b"a", b"b"))), "arrays of 80000 elements"),
    (header(array(b"tokenizer.x", U8, (1 << 22) + 1, bytes((1 << 22) + 1))), "arrays of 4194305 elements"),
    # Half a megabyte that a flipped type makes one array, and what comes then.
    (header(array(b"tokenizer.x", U8, 1 << 19, bytes(1 << 19)), header()), "bytes, for which the file is too short"),
    (header(array(b"tokenizer.x", STRING, 100)), "100 strings, for which the file is too short"),
    (header(array(b"a", ARRAY, 1, u32(U8) + u64(0))), "an array of type 9"),
    (header(array(b"a", 13, 0)), "an array of type 13"),
    (header(text(b"a") + u32(13) + bytes(8)), "a value of type 13"),
    (header(u64(1 << 40) + b"more than a field"), " bytes, for which the file is too short"),
    (header(text(b"a") + u32(STRING) + u64(1 << 63)), f"{1 << 63} bytes, for which"),
    (header(tensors=[tensor((1,) * 5)]), "tensor a has 5 dimensions"),
    (b"GGUF" + u32(3) + u64(0) + u64(1 << 62) + bytes(99), f"{1 << 62} fields of metadata"),
    (b"GGUF" + u32(3) + u64(1 << 62) + u64(0) + bytes(99), f"{1 << 62} tensors"),
    (header(tensors=[tensor(), tensor()]), "tensor a a second time"),
    (header(text(b"k") + u32(U8) + b"\1", text(b"k") + u32(U8) + b"\2"), "the key 'k' a second time"),
    (header(text(b"\xff") + u32(U8) + b"\1"), "a text that is not UTF-8"),
    (header(version=1), "version 1, where 2 and 3 can be read"),
], ids=lambda value: value.split(",")[0] if isinstance(value, str) else "")  # fmt: skip
def test_damaged_headers(raw, says, tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(raw)
    with pytest.raises(FormatError, match=rf"{path}: .*{says}"), open_checkpoint(path):
        pass


def test_the_other_order_of_bytes(tmp_path):
    with pytest.raises(UnsupportedModelError, match="big-endian"):
        check(tmp_path / "a.gguf", b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
