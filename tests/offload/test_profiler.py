"""Measuring a machine: the file is direct or says so, nothing stays behind, and every constant gets a curve."""

import dataclasses
import errno
import os
import subprocess
import sys

import pytest
import torch

from flashllm import _core
from flashllm.errors import FlashIOError, FormatError
from flashllm.offload.machine import store
from flashllm.offload.machine.measure_compute import ComputeProbe
from flashllm.offload.machine.measure_disk import open_probe
from flashllm.offload.machine.measure_native import NativeProbe
from flashllm.offload.machine.profile_cuda import profile_cuda
from flashllm.offload.machine.profiler import as_now, profile_machine
from flashllm.offload.machine.sampling import KIB, MIB, ProfileSizes
from flashllm.offload.runtime.tiers.scratch import REQUEST_NBYTES as PIECE

TINY = ProfileSizes(
    disk=(64 * KIB, 2 * MIB), copy=(64 * KIB, 1 * MIB), memory=(64 * KIB, 256 * KIB), gemm_rows=(1, 4),
    bmm_tokens=(8, 16), attention=(64 * KIB, 256 * KIB), elementwise=(64 * KIB, 128 * KIB), gemm_inner=64,
    gemm_outer=64, heads=2, head_dim=16, context=64, disk_file=4 * MIB, rounds=2, at_least_s=0.0, rotation=1 * MIB,
    beside_s=0.02,
)  # fmt: skip
MEASURED = ("gemm", "packed_gemm", "bmm", "cpu_attention", "packed_attention", "seal", "elementwise", "dtoc", "ctod")


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    """(the machine profiled at tiny sizes, what was reported)"""
    lines, folder = [], tmp_path_factory.mktemp("profile")
    hardware = profile_machine(folder, report=lines.append, sizes=TINY, dtype="float16")
    assert list(folder.iterdir()) == []
    return hardware, "\n".join(lines)


def test_a_profile_has_a_positive_curve_for_every_rate(profile):
    hardware, lines = profile
    assert hardware.direct_io is True or "refuses direct I/O" in lines
    assert [size for size, _ in hardware.dtoc.knots] == list(TINY.disk)
    assert [size for size, _ in hardware.gemm.knots] == list(TINY.gemm_rows)
    assert hardware.disk_capacity > 0
    assert hardware.device_memory > 0
    assert hardware.dtype == "float16"
    assert hardware.square_s > 0
    assert 0 <= hardware.read_takes < 1
    assert 0 <= hardware.read_loses < 1
    for name in MEASURED:
        assert getattr(hardware, name).at(100_000) > 0
        assert name in lines


def test_with_no_gpu_the_same_memory_is_not_planned_twice(profile):
    hardware, _ = profile
    assert hardware.device == "cpu"
    assert hardware.cpu_memory == 0


def test_a_profile_without_a_gpu_needs_no_torch(tmp_path):
    code = (
        "import sys; from pathlib import Path; from flashllm.offload.machine.profiler import as_now; "
        "print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_the_gpu_profile_runs_on_what_torch_has(tmp_path):
    hardware = profile_cuda(tmp_path, report=lambda line: None, sizes=TINY, device="cpu")
    assert list(tmp_path.iterdir()) == []
    for name in ("ctog", "gtoc", "ctod", "dtoc", "gemm", "bmm", "device_bandwidth", "cpu_attention", "cpu_bandwidth"):
        assert getattr(hardware, name).at(100_000) > 0


def test_profiles_are_kept_by_drive_and_dtype(profile, tmp_path, monkeypatch):
    hardware, _ = profile
    path = tmp_path / "cache" / "offload.json"
    assert store.find_profile(tmp_path, "float16", path) is None
    store.save_profile(tmp_path, hardware, path)
    store.save_profile(tmp_path, dataclasses.replace(hardware, dtype="bfloat16", name="other"), path)
    assert store.find_profile(tmp_path, "float16", path) == hardware
    assert store.find_profile(tmp_path, "bfloat16", path).name == "other"
    assert store.find_profile(tmp_path, "float32", path) is not None  # better than none
    store.save_profile(tmp_path, dataclasses.replace(hardware, name="again"), path)
    assert store.find_profile(tmp_path, "float16", path).name == "again"
    drive = dataclasses.replace(store.device_of(tmp_path), device="elsewhere")
    with monkeypatch.context() as patch:
        patch.setattr(store, "device_of", lambda folder: drive)
        assert store.find_profile(tmp_path, "float16", path) is None
    for damage in ("{}", "[", '{"format_version": 99, "profiles": []}'):
        path.write_text(damage)
        with pytest.raises(FormatError, match=r"offload\.json"):
            store.find_profile(tmp_path, "float16", path)
    store.save_profile(tmp_path, hardware, path)
    assert store.find_profile(tmp_path, "float16", path) == hardware


def test_a_stored_profile_has_the_space_of_now(profile, tmp_path):
    hardware, _ = profile
    now = as_now(dataclasses.replace(hardware, device_memory=1, disk_capacity=1), tmp_path)
    assert now.device_memory > 1
    assert now.disk_capacity > 1
    assert now.gemm == hardware.gemm


def test_native_samples_count_their_work():
    probe = NativeProbe("bfloat16", _core.ThreadPool(1), 0.0, 1 * MIB)
    assert probe.products(3, inner=64, outer=128).units == 4 * 3 * 64 * 128
    assert probe.products(3, inner=64, outer=128, bits=4).units == 4 * 3 * 64 * 128
    assert probe.prompt_attention(8, heads=2, head_dim=16).units == 4 * 2 * 8 * 8 * 16
    plain = 2 * 2 * 64 * 16 * 2  # keys and values, heads, positions, head_dim, bytes
    for packed in ({}, {"layout": "kivi", "bits": 4}, {"layout": "hidden", "bits": 8}):
        sample = probe.decode_attention(4 * plain, context=128, heads=2, head_dim=16, **packed)
        assert sample.units == 4 * plain
    assert probe.seal(3 * plain, heads=2, head_dim=16, layout="kivi", bits=4).units == 3 * plain
    assert probe.elementwise(64 * KIB, width=64).units == 5 * 64 * KIB
    assert probe.square_s() > 0


@pytest.mark.parametrize("size", [4096, PIECE - 4096, PIECE, PIECE + 4096, 3 * PIECE])
def test_transfers_of_every_shape_of_size_move_their_bytes(tmp_path, size):
    with open_probe(tmp_path, nbytes=3 * PIECE, largest=3 * PIECE) as probe:
        for sample in (probe.read(size, at_least_s=0), probe.write(size, at_least_s=0)):
            assert sample.units == sample.size == size
            assert sample.seconds > 0


@pytest.mark.parametrize("size", [0, -4096, 100, 4 * PIECE])
def test_impossible_transfers_are_refused(tmp_path, size):
    with open_probe(tmp_path, nbytes=PIECE, largest=2 * PIECE) as probe, pytest.raises(ValueError, match="size"):
        probe.read(size)


def test_a_file_system_without_direct_io_is_said_to_be_buffered(tmp_path, monkeypatch):
    real = os.open

    def refusing(path, flags, mode=0o777, **rest):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, mode, **rest)

    def buffered(path, direct=True):
        return real_file(path, False)

    real_file = _core.DirectFile
    monkeypatch.setattr(os, "open", refusing)
    monkeypatch.setattr(_core, "DirectFile", buffered)
    with open_probe(tmp_path, nbytes=PIECE, largest=PIECE) as probe:
        assert not probe.direct
        assert probe.read(4096, at_least_s=0).seconds > 0
        assert probe.write(4096, at_least_s=0).seconds > 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_an_error_that_names_it(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FlashIOError, match="file"), open_probe(tmp_path / "file", nbytes=PIECE, largest=PIECE):
        pass


def test_compute_samples_count_their_work():
    probe = ComputeProbe(torch.device("cpu"), torch.float32, 0.0, 1 * MIB)
    assert probe.gemm(3, inner=8, outer=16).units == 2 * 3 * 8 * 16
    assert probe.batched_gemm(8, heads=2, head_dim=4).units == 4 * 2 * 8 * 8 * 4
    assert probe.copy(4096, to_device=True).units == 4096
    assert probe.copy(4096, to_device=False).units == 4096
    assert probe.memory_read(64 * KIB).units == 64 * KIB
    assert probe.cpu_attention(64 * KIB, context=32, head_dim=16).units == 64 * KIB
