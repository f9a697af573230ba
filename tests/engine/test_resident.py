"""Resident weights: every tensor bit for bit, in anonymous memory, or a typed error."""

import hashlib
import os

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from flashllm import _core
from flashllm.engine.resident import read_tensors
from flashllm.errors import ChecksumError, FlashIOError, FormatError
from flashllm.format.manifest_values import FileEntry

TENSORS = {
    "f32": torch.randn(7, 5),
    "f16": torch.randn(3, 4, 5).half(),
    "bf16": torch.randn(129).bfloat16(),
    "u64": torch.tensor([0, 2**63, 2**64 - 1], dtype=torch.uint64),
    "large": torch.randn(300, 301),
}
EXPECTED = {  # numpy has no bfloat16: its bits
    name: tensor.view(torch.uint16).numpy() if name == "bf16" else tensor.numpy() for name, tensor in TENSORS.items()
}


@pytest.fixture
def path(tmp_path):
    save_file(TENSORS, tmp_path / "t.safetensors")
    return tmp_path / "t.safetensors"


def entry_of(path):
    return FileEntry(nbytes=path.stat().st_size, sha256=hashlib.sha256(path.read_bytes()).hexdigest())


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("threads", [1, 5])
@pytest.mark.parametrize("block", [64 << 20, 4096, 5000])
def test_every_tensor_bit_for_bit(path, monkeypatch, direct, threads, block):
    monkeypatch.setattr("flashllm.engine.resident._READ_BLOCK", block)
    tensors = read_tensors(path, _core.Reader(threads), direct=direct, expected=entry_of(path))
    assert tensors.keys() == EXPECTED.keys()
    for name, expected in EXPECTED.items():
        assert tensors[name].dtype == expected.dtype
        assert np.array_equal(tensors[name], expected)


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs /proc")
def test_weights_are_not_mapped_and_outlive_the_file(path):
    tensors = read_tensors(path, _core.Reader(2), direct=True, expected=entry_of(path))
    with open("/proc/self/maps") as maps:
        assert "t.safetensors" not in maps.read()
    path.write_bytes(b"")
    assert np.array_equal(tensors["large"], EXPECTED["large"])
    part = tensors.pop("f16")
    tensors.clear()
    assert np.array_equal(part, EXPECTED["f16"])  # the buffer lives as long as any view


def test_a_file_that_grows_while_it_is_read(path, monkeypatch):
    allocate = _core.allocate

    def grow(nbytes):
        with path.open("ab") as file:
            file.write(b"x")
        return allocate(nbytes)

    monkeypatch.setattr("flashllm.engine.resident._core.allocate", grow)
    with pytest.raises(FlashIOError, match="changed while it was read; try again"):
        read_tensors(path, _core.Reader(1), direct=False, expected=entry_of(path))


@pytest.mark.parametrize("block", [64 << 20, 4096])
@pytest.mark.parametrize("where", [0.1, 0.5, 1.0])
def test_a_flipped_bit(path, monkeypatch, block, where):
    monkeypatch.setattr("flashllm.engine.resident._READ_BLOCK", block)
    raw, entry = bytearray(path.read_bytes()), entry_of(path)
    header_nbytes = 8 + int.from_bytes(raw[:8], "little")
    raw[header_nbytes + int(where * (len(raw) - header_nbytes - 1))] ^= 0x40
    path.write_bytes(raw)
    with pytest.raises(ChecksumError, match=r"t\.safetensors: its bytes are not those of the conversion"):
        read_tensors(path, _core.Reader(2), direct=False, expected=entry)


def test_a_truncated_file(path):
    entry = entry_of(path)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(FormatError, match=r"t\.safetensors"):
        read_tensors(path, _core.Reader(1), direct=True, expected=entry)


def test_populated_memory_keeps_its_contents():
    memory = _core.allocate(5 << 20)
    memory[:] = np.arange(5 << 20, dtype=np.uint8)
    for part in (memory, memory[7:], memory[:3], memory[4096:8192], memory[:0]):
        _core.populate(part)
    assert np.array_equal(memory, np.arange(5 << 20, dtype=np.uint8))
