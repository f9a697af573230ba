"""What the kernel says about this process: cores, bytes, control groups of both versions."""

import os
import platform

import psutil
import pytest
from scripts import run_python

from flashllm.base import machine


def make_group(root, path, **files):
    group = root / path.lstrip("/")
    group.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (group / name.replace("__", ".")).write_text(f"{text}\n")


def limits(tmp_path, membership):
    (tmp_path / "membership").write_text(membership)
    return machine._cgroup_limits(tmp_path / "cgroup", tmp_path / "membership")


STAT_V2 = "anon 100\nfile 60\nkernel 9\ninactive_file 30\nactive_file 20\nunevictable 0"
STAT_V1 = "cache 5\ninactive_file 1\nactive_file 1\ntotal_cache 60\ntotal_inactive_file 30\ntotal_active_file 20"


def test_version_2_groups_and_the_groups_above(tmp_path):
    root = tmp_path / "cgroup"
    make_group(root, "/", **{"cgroup.procs": ""})  # the root has no limit file
    make_group(root, "/a", memory__max="5000", memory__current="900", **{"memory.stat": STAT_V2})
    make_group(root, "/a/b", memory__max="max", memory__current="800", **{"memory.stat": STAT_V2})
    make_group(root, "/a/b/c", memory__max="7000", memory__current="40", **{"memory.stat": STAT_V2})
    assert limits(tmp_path, "0::/a/b/c\n") == [(7000, 0), (5000, 850)]
    make_group(root, "/a/b", memory__high="3000")
    make_group(root, "/a", memory__high="max")
    assert limits(tmp_path, "0::/a/b/c\n") == [(7000, 0), (3000, 750), (5000, 850)]


def test_version_1_groups(tmp_path):
    root = tmp_path / "cgroup"
    huge = 9223372036854771712
    make_group(
        root / "memory", "/x", memory__limit_in_bytes=str(huge), memory__usage_in_bytes="1", **{"memory.stat": STAT_V1}
    )
    make_group(
        root / "memory", "/x/y", memory__limit_in_bytes="4000", memory__usage_in_bytes="950", **{"memory.stat": STAT_V1}
    )
    assert limits(tmp_path, "3:cpuset:/\n5:cpu,memory:/x/y\n1:name=systemd:/z\n") == [(4000, 900)]


@pytest.mark.parametrize("membership", ["", "0::/gone\n", "4:memory:/gone\n"])
def test_groups_that_cannot_be_read_limit_nothing(tmp_path, membership):
    assert limits(tmp_path, membership) == []


def test_without_membership_nothing_is_limited(tmp_path):
    assert machine._cgroup_limits(tmp_path, tmp_path / "none") == []


def test_available_is_the_least_of_machine_and_groups(monkeypatch):
    monkeypatch.setattr(machine, "_cgroup_limits", lambda: [(10**15, 0), (5000, 900), (7000, 100)])
    assert machine.available_nbytes() == 4100
    assert machine.cgroup_limit_nbytes() == 5000
    monkeypatch.setattr(machine, "_cgroup_limits", lambda: [(5000, 9000)])
    assert machine.available_nbytes() == 0
    monkeypatch.setattr(machine, "_cgroup_limits", list)
    assert 0 < machine.available_nbytes() <= psutil.virtual_memory().total
    assert machine.cgroup_limit_nbytes() is None


def test_bytes_of_this_process():
    before, peak_before = machine.process_nbytes(), machine.peak_process_nbytes()
    assert before > 10_000_000
    assert peak_before >= before - 10_000_000
    block = bytearray(os.urandom(1)) * 64_000_000
    assert machine.process_nbytes() > before + 50_000_000
    assert machine.peak_process_nbytes() >= machine.process_nbytes() - 10_000_000
    del block


def test_cores_are_those_this_process_may_use():
    assert 1 <= machine.num_cores() <= (os.cpu_count() or 1)
    if hasattr(os, "sched_setaffinity"):
        before = os.sched_getaffinity(0)
        try:
            os.sched_setaffinity(0, {min(before)})
            assert machine.num_cores() == 1
        finally:
            os.sched_setaffinity(0, before)


_FREED = """
import ctypes, psutil
from flashllm.base.machine import return_heaps
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
blocks = [libc.malloc(1 << 16) for _ in range(1000)]  # below the size that has pages of its own
for block in blocks:
    libc.memset(block, 1, 1 << 16)
for block in blocks[:-1]:  # the last one holds the end of the heap
    libc.free(block)
before = psutil.Process().memory_info().rss
return_heaps()
print(before - psutil.Process().memory_info().rss)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries have no such call")
def test_what_is_free_in_a_heap_goes_back():
    assert int(run_python("-c", _FREED).stdout) > 50 * 2**20
