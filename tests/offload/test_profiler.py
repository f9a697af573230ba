"""Measuring a machine: the file is direct or says so, nothing stays behind, and every constant gets a curve."""

import errno
import os

import pytest
import torch

from flashllm.errors import FlashIOError
from flashllm.offload.machine import measure_disk
from flashllm.offload.machine.measure_compute import ComputeProbe
from flashllm.offload.machine.measure_disk import PIECE, open_probe
from flashllm.offload.machine.profiler import KIB, MIB, ProfileSizes, profile_machine

TINY = ProfileSizes(
    disk=(64 * KIB, 2 * MIB), copy=(64 * KIB, 1 * MIB), memory=(64 * KIB, 256 * KIB), gemm_rows=(1, 4),
    bmm_tokens=(8, 16), attention=(64 * KIB, 256 * KIB), gemm_inner=64, gemm_outer=64, heads=2, head_dim=16, context=32,
    disk_file=4 * MIB, rounds=2, at_least_s=0.0, rotation=1 * MIB,
)  # fmt: skip


def test_a_profile_has_a_positive_curve_for_every_rate(tmp_path):
    lines = []
    hardware = profile_machine(tmp_path, report=lines.append, sizes=TINY)
    assert list(tmp_path.iterdir()) == []
    assert hardware.device == ("cuda" if torch.cuda.is_available() else "cpu")
    assert hardware.direct_io is True or "refuses direct I/O" in "\n".join(lines)
    assert [size for size, _ in hardware.dtoc.knots] == list(TINY.disk)
    assert [size for size, _ in hardware.gemm.knots] == list(TINY.gemm_rows)
    assert hardware.disk_capacity > 0
    assert hardware.device_memory > 0
    for name in ("ctog", "gtoc", "ctod", "bmm", "device_bandwidth", "cpu_attention", "cpu_bandwidth"):
        assert getattr(hardware, name).at(100_000) > 0


def test_with_no_gpu_the_same_memory_is_not_planned_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("psutil.virtual_memory", type("Memory", (), {"available": 1000}))
    hardware = profile_machine(tmp_path, report=lambda line: None, sizes=TINY)
    assert hardware.device_memory + hardware.cpu_memory == 1000


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

    def refusing(path, flags, mode=0o777):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, mode)

    monkeypatch.setattr(measure_disk.os, "open", refusing)
    with open_probe(tmp_path, nbytes=PIECE, largest=PIECE) as probe:
        assert not probe.direct
        assert probe.read(4096, at_least_s=0).seconds > 0
        assert probe.write(4096, at_least_s=0).seconds > 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_an_error_that_names_it(tmp_path):
    absent = tmp_path / "absent"
    with pytest.raises(FlashIOError, match="absent"), open_probe(absent, nbytes=PIECE, largest=PIECE):
        pass


def test_a_short_write_is_an_error_and_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(measure_disk.os, "pwritev", lambda fd, views, offset: 512)
    with pytest.raises(FlashIOError, match="512 of"), open_probe(tmp_path, nbytes=PIECE, largest=PIECE):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_failing_disk_is_an_error_and_leaves_no_file(tmp_path, monkeypatch):
    with open_probe(tmp_path, nbytes=PIECE, largest=PIECE):
        pass

    def failing(fd, views, offset):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(measure_disk.os, "preadv", failing)
    with (
        pytest.raises(FlashIOError, match="Input/output error"),
        open_probe(tmp_path, nbytes=PIECE, largest=PIECE) as probe,
    ):
        probe.read(4096)
    assert list(tmp_path.iterdir()) == []


def test_compute_samples_count_their_work():
    probe = ComputeProbe(torch.device("cpu"), torch.float32, 0.0, 1 * MIB)
    assert probe.gemm(3, inner=8, outer=16).units == 2 * 3 * 8 * 16
    assert probe.batched_gemm(8, heads=2, head_dim=4).units == 4 * 2 * 8 * 8 * 4
    assert probe.copy(4096, to_device=True).units == 4096
    assert probe.copy(4096, to_device=False).units == 4096
    assert probe.memory_read(64 * KIB).units == 64 * KIB
    assert probe.cpu_attention(64 * KIB, context=32, head_dim=16).units == 64 * KIB
