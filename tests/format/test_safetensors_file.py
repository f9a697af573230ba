"""The header's rules, one by one; literal bytes of ours; agreement with the safetensors library."""

import json
import random
import struct

import numpy as np
import pytest
import safetensors.numpy
from safetensors import safe_open

from flashllm.errors import FlashError, FormatError
from flashllm.format.safetensors import encode_header, open_safetensors, read_header


def _file(header, data=b"", *, length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def _tensor(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def _one(data=bytes(8), **kwargs):
    return _file({"a": _tensor(**kwargs)}, data)


MALFORMED = {
    "empty file": (b"", "0 bytes are too few"),
    "seven bytes": (b"\1\0\0\0\0\0\0", "7 bytes are too few"),
    "length zero": (_file(b""), "header of 0 bytes is too short"),
    "length beyond the file": (_file(b"{}", length=3), "truncated: the header has 3 bytes, 2 are left"),
    "length over the cap": (_file(b"{}", length=100_000_001), "at most 100000000"),
    "length 2^64-1": (_file(b"{}", length=2**64 - 1), "header of 18446744073709551615 bytes"),
    "git-LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "git-LFS pointer"),
    "not UTF-8": (_file(b'{"\xff":1}'), "not UTF-8"),
    "not JSON": (_file(b"{a:1}"), "not JSON"),
    "an array": (_file(b"[]"), "must begin with"),
    "nested too deeply": (_file(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "nested too deeply"),
    "NaN": (_file(b'{"a":NaN}'), "NaN is not JSON"),
    "duplicate key": (_file(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},' * 1 + b'"a":1}'), "occurs twice"),
    "duplicate key inside": (
        _file(b'{"a":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
        "occurs twice",
    ),
    "byte-order mark": (_file(b"\xef\xbb\xbf{}"), "must begin with"),
    "leading space": (_file(b" {}"), "must begin with"),
    "NUL padding": (_file(b"{}\0\0"), "must end with"),
    "newline padding": (_file(b"{}\n"), "must end with"),
    "text after the object": (_file(b"{}{}"), "not JSON"),
    "empty name": (_file({"": _tensor()}, bytes(8)), "1 to 4096 characters"),
    "name of a megabyte": (_file({"n" * 2**20: _tensor()}, bytes(8)), "1 to 4096 characters"),
    "lone surrogate": (_file(b'{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'), "not valid Unicode"),
    "metadata with a number": (_file({"__metadata__": {"a": 1}}), "map strings to strings"),
    "metadata a list": (_file({"__metadata__": []}), "map strings to strings"),
    "tensor a number": (_file({"a": 1}), "exactly dtype, shape and data_offsets"),
    "key missing": (_file({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)), "exactly dtype, shape"),
    "key unknown": (_file({"a": {**_tensor(), "stride": 1}}, bytes(8)), "exactly dtype, shape"),
    "dtype unknown": (_one(dtype="F31"), "unknown dtype 'F31'"),
    "dtype lower case": (_one(dtype="f32"), "unknown dtype"),
    "dtype a list": (_one(dtype=["F32"]), "unknown dtype"),
    "shape a number": (
        _file({"a": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}}, bytes(8)),
        "list of integers",
    ),
    "shape negative": (_one(shape=(-2,)), "list of integers"),
    "shape float": (_one(shape=(2.0,)), "list of integers"),
    "shape true": (_one(shape=(True, 2)), "list of integers"),
    "shape 2^63": (_one(shape=(2**63,)), "list of integers"),
    "shape overflows": (_one(shape=(2**40, 2**40, 2**40)), "overflows"),
    "shape of many dimensions": (_one(shape=(1,) * 9 + (2,)), "at most 8"),
    "offsets one": (_one(offsets=(0,)), "two integers"),
    "offsets negative": (_one(offsets=(-8, 0)), "two integers"),
    "offsets float": (_one(offsets=(0, 8.0)), "two integers"),
    "offsets 2^64": (_one(offsets=(0, 2**64)), "two integers"),
    "offsets reversed": (_one(offsets=(8, 0)), "end .0. before they begin .8."),
    "size and shape disagree": (_one(shape=(3,)), "hold 8 bytes, dtype and shape say 12"),
    "beyond the file": (_one(bytes(7)), "truncated: the file ends 1 bytes before"),
    "far beyond the file": (_one(shape=(2**60,), offsets=(0, 2**62)), "truncated"),
    "trailing bytes": (_one(bytes(9)), "1 bytes after the last tensor"),
    "bytes and no tensor": (_file(b"{}", b"x"), "1 bytes after the last tensor"),
    "hole at the start": (_one(bytes(12), offsets=(4, 12)), "a hole in the data before tensor 'a'"),
    "hole between": (_file({"a": _tensor(), "b": _tensor(offsets=(12, 20))}, bytes(20)), "a hole .* 'b'"),
    "overlap": (_file({"a": _tensor(), "b": _tensor(offsets=(4, 12))}, bytes(12)), "an overlap .* 'b'"),
    "same bytes twice": (_file({"a": _tensor(), "b": _tensor()}, bytes(8)), "an overlap"),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_headers_are_named(tmp_path, kind):
    content, message = MALFORMED[kind]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=message) as caught:
        read_header(path)
    assert str(caught.value).startswith(str(path))
    assert len(str(caught.value)) < 500 + len(str(path))


def test_literal_bytes_of_a_padded_header():
    header = encode_header([("layers.0.ffn", "F16", (2, 3)), ("b", "U8", (5,))], {"format": "pt"})
    text = (
        b'{"__metadata__":{"format":"pt"},"layers.0.ffn":{"dtype":"F16","shape":[2,3],"data_offsets":[0,12]},'
        b'"b":{"dtype":"U8","shape":[5],"data_offsets":[12,17]}}'
    )
    assert header == b"\xf8\x0f\0\0\0\0\0\0" + text + b" " * (4088 - len(text))
    assert len(header) == 4096


@pytest.mark.parametrize("name_length", [3950, 3990, 4000, 4010, 4096])
def test_the_data_starts_at_a_multiple_of_4096(name_length):
    header = encode_header([("n" * name_length, "U8", (1,))])
    assert len(header) % 4096 == 0
    assert int.from_bytes(header[:8], "little") == len(header) - 8
    assert len(header.rstrip(b" ")) > len(header) - 4096


def test_the_library_reads_what_we_write(tmp_path):
    path = tmp_path / "t.safetensors"
    a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(3, dtype=np.uint64)
    path.write_bytes(
        encode_header([("a", "F32", a.shape), ("é", "U64", b.shape)], {"k": "v"}) + a.tobytes() + b.tobytes()
    )
    loaded = safetensors.numpy.load_file(path)
    assert np.array_equal(loaded["a"], a)
    assert np.array_equal(loaded["é"], b)
    with safe_open(path, "np") as file:
        assert file.metadata() == {"k": "v"}
    header = read_header(path)
    assert header.metadata == {"k": "v"}
    assert [(info.name, info.offset, info.nbytes) for info in header.tensors.values()] == [
        ("a", 4096, 24),
        ("é", 4120, 24),
    ]


def test_we_read_what_the_library_writes(tmp_path):
    path = tmp_path / "t.safetensors"
    arrays = {
        "x": np.arange(5, dtype=np.float16),
        "scalar": np.array(3, np.int32),
        "none": np.zeros((0, 4), np.float32),
    }
    safetensors.numpy.save_file(arrays, path)
    with open_safetensors(path) as file:
        for name, array in arrays.items():
            info = file.header.tensors[name]
            assert info.shape == array.shape
            buffer = bytearray(info.nbytes)
            file.read_into(info, 0, memoryview(buffer))
            assert buffer == array.tobytes()


def test_the_order_of_names_is_free_and_offsets_give_the_order(tmp_path):
    path = tmp_path / "t.safetensors"
    path.write_bytes(_file({"second": _tensor(offsets=(8, 16)), "first": _tensor()}, bytes(16)))
    assert list(read_header(path).tensors) == ["first", "second"]


def test_reads_outside_a_tensor_are_refused(tmp_path):
    path = tmp_path / "t.safetensors"
    path.write_bytes(_file({"a": _tensor(), "b": _tensor(offsets=(8, 16))}, bytes(16)))
    with open_safetensors(path) as file:
        for start, length in ((-1, 4), (0, 9), (8, 1)):
            with pytest.raises(ValueError, match="outside a of 8 bytes"):
                file.read_into(file.header.tensors["a"], start, memoryview(bytearray(length)))


def test_the_writer_refuses_what_the_reader_would():
    with pytest.raises(ValueError, match="occurs twice"):
        encode_header([("a", "U8", (1,)), ("a", "U8", (1,))])
    with pytest.raises(ValueError, match="'F31'"):
        encode_header([("a", "F31", (1,))])


def test_mutated_files_give_a_typed_error_or_a_consistent_header(tmp_path):
    """2,000 seeded mutations, most of them in the header: no crash, and nothing accepted that reaches outside."""
    rng = random.Random(0)
    base = _file({"a": _tensor(), "b": _tensor("BF16", (3, 2), (8, 20))}, bytes(20))
    path = tmp_path / "t.safetensors"
    rejected = 0
    for _ in range(2000):
        content = bytearray(base)
        for _ in range(rng.randint(1, 3)):
            place = rng.randrange(len(base) if rng.random() < 0.2 else len(base) - 20)
            content[place] = rng.choice(b'0123456789{}[]",:- \0\xff')
        if rng.random() < 0.1:
            del content[rng.randrange(len(content)) :]
        path.write_bytes(content)
        try:
            header = read_header(path)
        except FlashError:
            rejected += 1
        else:
            assert all(info.offset + info.nbytes <= len(content) for info in header.tensors.values())
    assert rejected > 1000
