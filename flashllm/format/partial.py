"""A directory under construction: `DST.partial`, locked, with a journal, published as `DST` by one rename.

Knows steps and names, not models. A kill at any moment leaves `DST` absent or complete: everything is durable
before the rename, and the journal says which steps need not be done again.
"""

import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flashllm.base.files import fsync_directory, locked_directory, naming, parse_json
from flashllm.base.units import format_size
from flashllm.errors import FlashIOError, FormatError, UsageError

_JOURNAL = ".journal"
_SPACE_MARGIN = 0.05  # of the output: file system metadata, and neighbours that write too


class PartialDirectory:
    """A locked directory under construction; made by `open_partial`."""

    def __init__(self, path: Path, steps: list[dict[str, Any]], journal_fd: int) -> None:
        self.path = path
        self.steps = steps  # finished in earlier runs, in order
        self._journal_fd = journal_fd

    def record(self, step: Mapping[str, Any]) -> None:
        """Append a finished step to the journal. What it stands for must be durable already."""
        line = (json.dumps(dict(step), separators=(",", ":")) + "\n").encode()
        with naming(self.path / _JOURNAL):
            offset = os.lseek(self._journal_fd, 0, os.SEEK_END)
            while line:
                count = os.pwrite(self._journal_fd, line, offset)
                line, offset = line[count:], offset + count
            os.fsync(self._journal_fd)

    def restart_journal(self, identity: Mapping[str, Any], steps: list[dict[str, Any]]) -> None:
        """Keep only these steps: the others turned out to be damaged."""
        with naming(self.path / _JOURNAL):
            os.ftruncate(self._journal_fd, 0)
        for line in (identity, *steps):
            self.record(line)
        self.steps = steps

    def publish(self, target: Path, names: Collection[str]) -> None:
        """Make the finished directory appear as `target`, holding only `names`, whose contents are durable already."""
        if os.path.lexists(target):
            raise UsageError(f"{target}: exists by now; remove it and run the same conversion again")
        for stray in sorted(set(os.listdir(self.path)) - {*names, _JOURNAL}):  # of earlier, interrupted runs
            os.unlink(self.path / stray)
        os.unlink(self.path / _JOURNAL)
        fsync_directory(self.path)
        os.rename(self.path, target)
        fsync_directory(target.parent)


@contextmanager
def open_partial(path: Path, target: Path, identity: Mapping[str, Any]) -> Iterator[PartialDirectory]:
    """Create or resume `path`, to become `target`, and lock it.

    `identity` (JSON values) says what is being made and from what. UsageError where `target` exists or `path` was
    made for another identity; FlashIOError where another process is at work on it.
    """
    created = False
    try:
        os.mkdir(path)
        created = True
    except FileExistsError:
        if path.is_symlink() or not path.is_dir():
            raise UsageError(f"{path}: is in the way; remove it") from None
    if created:
        fsync_directory(path.parent)
    with locked_directory(path, f"{path}: another conversion is at work here; wait for it to finish"):
        if os.path.lexists(target):  # looked at again: it may have appeared while we waited for the lock
            if created:
                os.rmdir(path)
            raise UsageError(f"{target}: exists; remove it or choose another destination")
        fd = os.open(path / _JOURNAL, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            with naming(path / _JOURNAL):
                partial = _read_journal(path, fd, identity)
            yield partial
        finally:
            os.close(fd)


def _read_journal(path: Path, fd: int, identity: Mapping[str, Any]) -> PartialDirectory:
    raw = b""
    while chunk := os.read(fd, 1 << 20):
        raw += chunk
    complete, newline, _ = raw.rpartition(b"\n")  # a line cut by a kill is a step that was not finished
    lines = [_parse_line(line, path) for line in complete.split(b"\n")] if newline else []
    os.ftruncate(fd, len(complete) + len(newline))
    if lines and lines[0] != dict(identity):
        message = "was begun from another source, or with other options or another version of flashllm"
        raise UsageError(f"{path}: {message}; remove it to start again")
    partial = PartialDirectory(path, lines[1:], fd)
    if not lines:
        partial.restart_journal(identity, [])
    return partial


def _parse_line(line: bytes, path: Path) -> dict[str, Any]:
    value = parse_json(line, f"{path / _JOURNAL}")
    if not isinstance(value, dict):
        raise FormatError(f"{path / _JOURNAL}: is damaged; remove {path} to start again")
    return value


def check_space(parent: Path, partial: Path, nbytes: int) -> None:
    """FlashIOError unless `parent`'s file system has room for `nbytes` and 5 %; what `partial` holds counts as room."""
    held = 0
    if partial.is_dir():
        held = sum(os.lstat(path).st_blocks * 512 for path in partial.iterdir())
    needed = int(nbytes * (1 + _SPACE_MARGIN)) - held
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise FlashIOError(
            f"{parent}: not enough space: {format_size(needed)} ({needed} bytes) are needed, "
            f"{format_size(free)} ({free} bytes) are free"
        )
