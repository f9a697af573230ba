"""Files as bytes: exact positional reads and writes, hashes, durability, and keeping out of the page cache.

Knows nothing of tensors or of the model format. Every read is a plain `pread`: nothing here maps a file. One that
never ends (a drive that is gone, a server that does not answer) is an error after a minute.
Whatever is read or written once is dropped from the page cache, so that a conversion of 100 GB does not evict
what the user had cached.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import queue
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flashllm.errors import Busy, FlashIOError, FormatError, UsageError

CHUNK_NBYTES = 8 * 2**20  # one read or write; large enough for full sequential speed, small compared with any limit
_SYNC_NBYTES = 64 * 2**20  # dirty pages cannot be dropped, so they are forced out this often
_STEP_NBYTES = 4 * 2**20  # one system call; a drive that works ends it long before PATIENCE_S
_PARTS = 60  # of patience
_LOCK_POLL_S = 0.05
PATIENCE_S = 60.0  # for one system call, as for the native reader's (csrc/io/reader.h)
_JSON_DEPTH_ERROR = "is nested too deeply"
_MAX_JSON_VALUES = 2_000_000  # a value takes up to 100 bytes of memory, and as little as 3 of the file

Progress = Callable[[str, int, int], None]  # (what, bytes done, bytes in all)


class Closing:
    """Base of what holds files, threads or memory: a `with` statement closes it."""

    def close(self) -> None:
        """Give back what is held; again, nothing."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError raised inside names the file `path` where it names none, as those of calls on a descriptor."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = os.fspath(path)
        raise


def open_for_reading(path: Path) -> int:
    """A descriptor of the regular file `path`. FlashIOError where it cannot be opened, FormatError for other kinds."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # O_NONBLOCK: never hang on a FIFO
    except OSError as error:
        raise FlashIOError(f"{path}: cannot be opened: {error.strerror}") from error
    try:
        if not stat.S_ISREG(file_status(fd, path).st_mode):
            raise FormatError(f"{path}: is not a regular file")
        if hasattr(fcntl, "F_NOCACHE"):  # macOS has no posix_fadvise
            fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)
    except BaseException:
        os.close(fd)
        raise
    return fd


def file_status(fd: int, path: Path) -> os.stat_result:
    """`os.fstat`. FlashIOError, which names the file, where it fails."""
    try:
        return os.fstat(fd)
    except OSError as error:
        raise FlashIOError(f"{path}: cannot be read: {error.strerror}") from error


def is_there(path: Path) -> bool:
    """True for a file or folder that exists. FlashIOError where that cannot be told, UsageError where none can be.

    `Path.exists` takes a failing call for "no" in newer Pythons.
    """
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except ValueError as error:
        raise UsageError(f"{path}: a file's name holds no NUL character") from error
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            raise UsageError(f"{path}: there is no such file: {error.strerror}") from error
        raise FlashIOError(f"{path}: cannot be looked at: {error.strerror}") from error
    return True


class _Caller:
    """A thread that makes system calls for others, and is left behind with one that does not return.

    The kernel takes no call back. What the call may still change lives as long as it does.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], int], queue.SimpleQueue[int | BaseException]] | None]
        self._calls = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="flashllm reads", daemon=True).start()

    def call(self, function: Callable[[], int]) -> int:
        """Return or raise what `function` does; queue.Empty where it has done neither after PATIENCE_S."""
        result: queue.SimpleQueue[int | BaseException] = queue.SimpleQueue()
        self._calls.put((function, result))
        try:
            found = _patiently(result)
        except BaseException:  # ctrl-C too
            self._calls.put(None)
            raise
        _idle_callers.append(self)
        if isinstance(found, BaseException):
            raise found
        return found

    def _serve(self) -> None:
        while (wanted := self._calls.get()) is not None:
            function, result = wanted
            try:
                result.put(function())
            except BaseException as error:
                result.put(error)
            del wanted, function, result  # the buffer is its owner's again


def _patiently(result: queue.SimpleQueue[int | BaseException]) -> int | BaseException:
    """The next item; queue.Empty after PATIENCE_S, of which a time in which the process was stopped is one part."""
    for _ in range(_PARTS - 1):
        with contextlib.suppress(queue.Empty):
            return result.get(timeout=PATIENCE_S / _PARTS)
    return result.get(timeout=PATIENCE_S / _PARTS)


_idle_callers: list[_Caller] = []
os.register_at_fork(after_in_child=_idle_callers.clear)  # their threads are the parent's


def _pread(fd: int, buffer: memoryview, offset: int) -> int:
    try:
        caller = _idle_callers.pop()
    except IndexError:
        caller = _Caller()
    return caller.call(lambda: os.preadv(fd, [buffer], offset))


def pread_into(fd: int, buffer: memoryview, offset: int, path: Path) -> None:
    """Fill `buffer` (bytes) from `offset`. FormatError where the file ends before, FlashIOError where a read fails, or
    does not end within PATIENCE_S."""
    done = 0
    while done < len(buffer):
        part = buffer[done : done + _STEP_NBYTES]
        try:
            count = _pread(fd, part, offset + done)
        except OSError as error:
            message = f"{path}: reading {len(buffer) - done} bytes at {offset + done} failed: {error.strerror}"
            raise FlashIOError(message) from error
        except queue.Empty:
            message = f"{path}: a read of {len(part)} bytes at {offset + done} did not end within {PATIENCE_S:g} s"
            raise FlashIOError(f"{message}; check the drive") from None
        if count == 0:
            raise FormatError(f"{path}: the file ends at byte {offset + done}, {len(buffer) - done} bytes too early")
        done += count


def pread_bytes(fd: int, nbytes: int, offset: int, path: Path) -> bytes:
    """`nbytes` bytes from `offset`; errors as in `pread_into`."""
    buffer = bytearray(nbytes)
    pread_into(fd, memoryview(buffer), offset, path)
    return bytes(buffer)


def drop_page_cache(fd: int, offset: int = 0, nbytes: int = 0) -> None:
    """Ask the kernel to forget clean pages of the range (0 bytes: to the end). Advice: a refusal is not an error."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def fsync_directory(path: Path) -> None:
    """Make the names in the directory `path` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with naming(path):
            os.fsync(fd)
    finally:
        os.close(fd)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace `path` by `data`: a reader sees the old file or the new one, also after a power cut."""
    temporary = path.with_name(f".{path.name}.tmp")
    with HashingWriter(temporary) as writer:
        writer.write(memoryview(data))
        writer.finish()
    os.rename(temporary, path)
    fsync_directory(path.parent)


def iterate_chunks(path: Path) -> Iterator[bytes]:
    """The file's bytes, a chunk at a time, leaving nothing in the page cache."""
    fd = open_for_reading(path)
    try:
        drop_page_cache(fd)  # what is read is what the device holds
        nbytes = file_status(fd, path).st_size
        for offset in range(0, nbytes, CHUNK_NBYTES):
            length = min(CHUNK_NBYTES, nbytes - offset)
            yield pread_bytes(fd, length, offset, path)
            drop_page_cache(fd, offset, length)
        drop_page_cache(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def locked_directory(
    path: Path, busy: str, *, wait_s: float = 0.0, waits: Callable[[], None] | None = None
) -> Iterator[None]:
    """Hold an exclusive `flock` on the directory itself; Busy(`busy`) where another process holds it, and has not let
    go of it after `wait_s`, or did something to the directory meanwhile. `waits` is called once it is waited for.

    The directory is its own lock file: nothing is left behind by a kill, and the lock follows a rename.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        end = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise FlashIOError(f"{path}: this file system cannot lock: {error.strerror}") from error
                if time.monotonic() >= end:
                    raise Busy(busy) from error
            if waits is not None:
                waits()
                waits = None
            time.sleep(_LOCK_POLL_S)
        if not path.exists() or not os.path.samestat(os.stat(path), os.fstat(fd)):
            raise Busy(busy)  # renamed between open and lock: the other process has just finished
        yield
    finally:
        os.close(fd)


def parse_json(raw: bytes, what: str) -> Any:
    """JSON, strictly: UTF-8, no byte-order mark, no duplicate keys, no NaN or Infinity, not too many values.

    FormatError names `what`.
    """

    def reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise FormatError(f"{what}: the key {twice[:80]!r} occurs twice")
        return result

    def reject_constant(name: str) -> Any:
        raise FormatError(f"{what}: {name} is not JSON")

    def finite(number: str) -> float:
        value = float(number)
        if math.isinf(value):
            raise FormatError(f"{what}: {number[:80]} is more than a number can be")
        return value

    if sum(raw.count(mark) for mark in (b",", b"[", b"{")) > _MAX_JSON_VALUES:  # an upper bound, before any is made
        raise FormatError(f"{what}: holds more than {_MAX_JSON_VALUES} values")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"{what}: is not UTF-8 at byte {error.start}") from error
    try:
        return json.loads(text, object_pairs_hook=reject_duplicates, parse_constant=reject_constant, parse_float=finite)
    except RecursionError as error:
        raise FormatError(f"{what}: {_JSON_DEPTH_ERROR}") from error
    except json.JSONDecodeError as error:
        raise FormatError(f"{what}: is not JSON: {error}") from error
    except ValueError as error:
        raise FormatError(f"{what}: holds an integer of more than {sys.get_int_max_str_digits()} digits") from error


def read_bounded(path: Path, max_nbytes: int) -> bytes:
    """The whole file. FormatError where it is larger than `max_nbytes`, FlashIOError where it cannot be read."""
    fd = open_for_reading(path)
    try:
        nbytes = file_status(fd, path).st_size
        if nbytes > max_nbytes:
            raise FormatError(f"{path}: {nbytes} bytes; at most {max_nbytes} are allowed here")
        return pread_bytes(fd, nbytes, 0, path)
    finally:
        os.close(fd)


def read_json_object(path: Path, max_nbytes: int = 64 * 2**20) -> dict[str, Any]:
    """The JSON object in the file `path`. FormatError where it is anything else or larger than `max_nbytes`."""
    return parse_json_object(read_bounded(path, max_nbytes), str(path))


def parse_json_object(raw: bytes, what: str) -> dict[str, Any]:
    """As `parse_json`, and an object. FormatError where it is anything else."""
    value = parse_json(raw, what)
    if not isinstance(value, dict):
        raise FormatError(f"{what}: must hold a JSON object, not {type(value).__name__}")
    return value


class HashingWriter(Closing):
    """Writes one file front to back with its SHA-256, synced and dropped from the page cache as it grows.

    With `preallocate` the space is reserved first, so that a full disk shows at the start. An existing file is kept:
    `reread` advances over bytes that are already right, `write` overwrites. OSErrors name the file.
    """

    def __init__(self, path: Path, *, preallocate: int = 0) -> None:
        self.path = path
        self.position = 0
        self._synced = 0
        self._sha256 = hashlib.sha256()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            if preallocate and hasattr(os, "posix_fallocate"):
                with naming(path):
                    os.posix_fallocate(self._fd, 0, preallocate)
        except BaseException:
            os.close(self._fd)
            raise

    def close(self) -> None:
        os.close(self._fd)

    def write(self, data: memoryview) -> None:
        """Append `data` (contiguous, of any item type)."""
        data = data.cast("B")
        self._sha256.update(data)
        done = 0
        with naming(self.path):
            while done < len(data):
                done += os.pwrite(self._fd, data[done : done + CHUNK_NBYTES], self.position + done)
        self.position += len(data)
        if self.position - self._synced >= _SYNC_NBYTES:
            self.sync()

    def reread(self, buffer: memoryview) -> None:
        """Advance over bytes written by an earlier run, filling `buffer` with them."""
        pread_into(self._fd, buffer, self.position, self.path)
        self._sha256.update(buffer)
        drop_page_cache(self._fd, self.position, len(buffer))
        self.position += len(buffer)
        self._synced = self.position

    def mark(self) -> "tuple[int, hashlib._Hash]":
        """A place to `rewind` to."""
        return self.position, self._sha256.copy()

    def rewind(self, mark: "tuple[int, hashlib._Hash]") -> None:
        """Go back to a `mark`; what follows it is overwritten by the next writes."""
        self.position, self._sha256 = mark[0], mark[1].copy()
        self._synced = self.position

    def sync(self) -> None:
        """Force what was written to the device and drop it from the page cache."""
        with naming(self.path):
            os.fsync(self._fd)
        drop_page_cache(self._fd, 0, self.position)
        self._synced = self.position

    def finish(self) -> str:
        """Cut the file at the position, make it durable, and return its SHA-256 in hexadecimal."""
        with naming(self.path):
            os.ftruncate(self._fd, self.position)
        self.sync()
        return self._sha256.hexdigest()
