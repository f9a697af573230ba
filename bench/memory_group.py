"""Runs a command under a memory limit that the kernel enforces, from a cold page cache.

Everything the command holds counts, the page cache it causes included; going over the limit is a SIGKILL. Needs root
and a memory control group of version 1 or 2, and refuses without: a run that nothing caps must not look like one that
was. Swap is part of the limit where the kernel counts it. Pages that another running process has mapped stay cached
and are charged to nobody here: for shared libraries that is a few hundred megabytes at most, and it is why the peak is
reported and not assumed.
"""

import contextlib
import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from flashllm.base.files import Closing
from flashllm.errors import FlashError

_V1 = {
    "limit": "memory.limit_in_bytes",
    "swap": "memory.memsw.limit_in_bytes",  # of both together
    "peak": "memory.max_usage_in_bytes",
    "events": "memory.oom_control",
}
_V2 = {"limit": "memory.max", "swap": "memory.swap.max", "peak": "memory.peak", "events": "memory.events"}
_ROOTS: tuple[tuple[Path, Mapping[str, str]], ...] = (
    (Path("/sys/fs/cgroup/memory"), _V1),
    (Path("/sys/fs/cgroup"), _V2),
)
_EMPTY_WAIT_S = 5.0  # a killed process leaves its group only when the kernel has torn it down


class GroupError(FlashError):
    """No limit can be enforced here; the message says why."""


class MemoryGroup(Closing):
    """A control group with a limit in bytes; a context manager that removes it, with whatever still runs in it."""

    def __init__(self, limit_nbytes: int) -> None:
        reasons = []
        for root, names in _ROOTS:
            path = root / f"flashllm-{uuid.uuid4().hex}"
            try:
                path.mkdir()
            except OSError as error:
                reasons.append(f"{root}: {error.strerror}")
                continue
            self.path, self._names = path, names
            try:
                self.limit_to(limit_nbytes)
            except OSError as error:
                path.rmdir()
                reasons.append(f"{root}: {error.strerror}")
                continue
            return
        who = "" if os.geteuid() == 0 else "; run it as root"
        raise GroupError(f"no memory control group can be made here ({'; '.join(reasons)}){who}")

    def limit_to(self, nbytes: int) -> None:
        """Set the limit. OSError where the kernel refuses it."""
        (self.path / self._names["limit"]).write_text(str(nbytes))
        swap = self.path / self._names["swap"]
        if swap.exists():  # not where the kernel does not count it
            swap.write_text("0" if self._names is _V2 else str(nbytes))

    @property
    def peak_nbytes(self) -> int:
        """The most the group ever held, page cache included."""
        return int((self.path / self._names["peak"]).read_text())

    @property
    def kills(self) -> int:
        """Processes of the group that the kernel killed for the limit."""
        for line in (self.path / self._names["events"]).read_text().splitlines():
            name, value = line.split()
            if name == "oom_kill":
                return int(value)
        return 0

    def entering(self, command: Sequence[str]) -> list[str]:
        """`command`, put into the group before its first instruction."""
        script = 'echo $$ > "$1" && shift && exec "$@"'
        return ["sh", "-c", script, "memory_group", str(self.path / "cgroup.procs"), *command]

    def close(self) -> None:
        """Kill what still runs in the group and remove it."""
        end = time.monotonic() + _EMPTY_WAIT_S
        while True:
            for pid in (self.path / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            try:
                self.path.rmdir()
                return
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.01)


def drop_page_cache() -> None:
    """Forget every clean page of the machine's page cache. GroupError where that is not allowed.

    Pages already cached are charged to whoever read them first: without this, libraries and models come free.
    """
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError as error:
        raise GroupError(f"the page cache cannot be dropped: {error.strerror}; run it as root") from error


def document_of(command: Sequence[str], limit_nbytes: int | None) -> dict[str, Any]:
    """The JSON document in the last line that `command` prints, or {"failed": its exit status}; under a limit from a
    cold page cache, and with `group_peak_bytes`. GroupError where the limit cannot be enforced."""
    if limit_nbytes is None:
        return _printed(command)
    with MemoryGroup(limit_nbytes) as group:
        drop_page_cache()
        return _printed(group.entering(command)) | {"group_peak_bytes": group.peak_nbytes}


def _printed(command: Sequence[str]) -> dict[str, Any]:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        return {"failed": done.returncode}
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return document


@dataclass(frozen=True, slots=True, kw_only=True)
class CappedRun:
    """The outcome of a command under a limit."""

    limit_bytes: int
    peak_bytes: int
    read_bytes: int  # from storage, by the command and the children it waited for
    returncode: int  # of the command; negative: the signal that ended it
    kills: int  # by the kernel, for the limit
    seconds: float


def run_capped(command: Sequence[str], limit_nbytes: int, *, stdout: IO[Any] | None = None) -> CappedRun:
    """Run `command` in a group of its own, from a cold page cache; its output goes to `stdout` (None: ours).

    Raises GroupError where the limit cannot be enforced. A command that cannot be started returns 126 or 127.
    """
    with MemoryGroup(limit_nbytes) as group:
        drop_page_cache()
        start = time.monotonic()
        with subprocess.Popen(group.entering(command), stdout=stdout) as child:
            _, status, usage = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)  # it is waited for: Popen must not try again
        return CappedRun(
            limit_bytes=limit_nbytes,
            peak_bytes=group.peak_nbytes,
            read_bytes=usage.ru_inblock * 512,
            returncode=child.returncode,
            kills=group.kills,
            seconds=time.monotonic() - start,
        )
