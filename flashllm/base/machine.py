"""The process's share of the machine: cores, memory left, its control group's limit. Sets nothing unless asked to."""

import contextlib
import ctypes
import os
import platform
from pathlib import Path

import psutil

_FILE_PAGES: tuple[str, ...] = ("inactive_file", "active_file")  # of memory.stat
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_OWN_PAGES_NBYTES = 1 << 20  # arrays from here on; faults cost a hundredth of the products they are made for
_KEPT_NBYTES = 8 << 20  # of the end of a heap
_NICER = 10  # of 19
_NO_LIMIT = 2**60  # version 1 control groups report "no limit" as a huge number


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def system_name() -> str:
    """The processor's model and the kernel's release: what rates measured here hold for."""
    processor = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), processor)
    return f"{processor}, {platform.system()} {platform.release()}"


def process_nbytes() -> int:
    """Resident bytes of this process now."""
    return int(psutil.Process().memory_info().rss)


def peak_process_nbytes() -> int:
    """The most bytes this process ever held resident (VmHWM where the kernel tells it)."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS, where there is no /proc


def available_nbytes() -> int:
    """Bytes the process can still take: the system's available memory, or less where a control group says so, which
    psutil does not ask. What the group holds of files is not counted as used: the kernel gives it up first."""
    available = int(psutil.virtual_memory().available)
    for limit, used in _cgroup_limits():
        available = min(available, max(0, limit - used))
    return available


def default_limit(free: int) -> int:
    """Bytes that a process may hold where nobody says: four fifths of `free`, what it holds and can still take."""
    return free * 4 // 5


def return_freed_memory() -> None:
    """Let large arrays have pages of their own, which go back to the system when they are freed. For the whole process.

    glibc raises the size from which it does so to that of what was freed last, and keeps the room of everything below
    in a heap a thread: a process with a limit of its own would pay for it. Other C libraries have no such setting.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    for option, nbytes in ((_M_MMAP_THRESHOLD, _OWN_PAGES_NBYTES), (_M_TRIM_THRESHOLD, _KEPT_NBYTES)):
        mallopt(option, nbytes)


def return_heaps() -> None:
    """Give back to the system what is free in the C library's heaps now: up to some 70 MB behind a long prompt.

    Arrays freed later stay in them again, unlike with `return_freed_memory`, by which a mixture's prompts take longer.
    """
    with contextlib.suppress(OSError, AttributeError):  # libraries other than glibc have no such call
        ctypes.CDLL(None).malloc_trim(0)


def give_way() -> None:
    """Let other programs go first, for the rest of the process: its threads that begin from now on, and its reads."""
    os.nice(_NICER)
    with contextlib.suppress(AttributeError, psutil.Error, OSError):  # systems without classes of I/O
        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)


def cgroup_limit_nbytes() -> int | None:
    """The smallest memory limit of the process's control group and the groups above it; None without one."""
    return min((limit for limit, _ in _cgroup_limits()), default=None)


def _cgroup_limits(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> list[tuple[int, int]]:
    """(limit, used) in bytes of every limited memory group the process is in, versions 1 and 2; used without files."""
    found = []
    limit_names: tuple[str, ...]
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            # Beyond "high" the kernel does not kill, it makes the process wait.
            base, limit_names, used_name = root, ("memory.max", "memory.high"), "memory.current"
            file_names = _FILE_PAGES
        elif "memory" in controllers.split(","):
            base, limit_names, used_name = root / "memory", ("memory.limit_in_bytes",), "memory.usage_in_bytes"
            file_names = tuple(f"total_{name}" for name in _FILE_PAGES)
        else:
            continue
        group = base / path.lstrip("/")
        while True:
            limit = min(_limit(group / name) for name in limit_names)
            # A container shows its own group at the root, or the root has no such files.
            with contextlib.suppress(OSError, ValueError):
                if limit < _NO_LIMIT:
                    used = int((group / used_name).read_text()) - _reclaimable(group / "memory.stat", file_names)
                    found.append((limit, max(0, used)))
            if group == base:
                break
            group = group.parent
    return found


def _limit(file: Path) -> int:
    """The limit in a control group's file, or _NO_LIMIT."""
    try:
        text = file.read_text().strip()
        return _NO_LIMIT if text == "max" else int(text)
    except (OSError, ValueError):
        return _NO_LIMIT


def _reclaimable(stat: Path, names: tuple[str, ...]) -> int:
    """Bytes of files in the page cache of a group and the groups below it."""
    pairs = (line.split() for line in stat.read_text().splitlines())
    return sum(int(pair[1]) for pair in pairs if pair[0] in names)
