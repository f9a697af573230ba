"""Exact reads and writes, strict JSON, atomic replacement."""

import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack

import pytest
from scripts import run_python

from flashllm.base import files
from flashllm.base.files import (
    HashingWriter,
    iterate_chunks,
    locked_directory,
    naming,
    open_for_reading,
    parse_json,
    pread_bytes,
    read_json_object,
    write_atomically,
)
from flashllm.base.units import format_size
from flashllm.errors import FlashIOError, FormatError


@pytest.fixture
def reading(tmp_path):
    """`pread_bytes` (nbytes, offset) of the file f with this content."""
    with ExitStack() as stack:

        def open_file(content):
            path = tmp_path / "f"
            path.write_bytes(content)
            fd = open_for_reading(path)
            stack.callback(os.close, fd)
            return lambda nbytes, offset: pread_bytes(fd, nbytes, offset, path)

        yield open_file


def test_pread_names_the_byte_where_the_file_ends(reading):
    read = reading(b"0123456789")
    assert read(4, 3) == b"3456"
    assert read(0, 10) == b""
    with pytest.raises(FormatError, match="ends at byte 10, 2 bytes too early"):
        read(6, 6)


def test_short_reads_are_continued(reading, monkeypatch):
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:7]], offset))
    assert reading(bytes(range(200)))(150, 11) == bytes(range(11, 161))


def test_a_failing_read_names_file_and_offset(tmp_path, monkeypatch):
    path = tmp_path / "f"
    path.write_bytes(b"0123")

    def fail(fd, buffers, offset):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(FlashIOError, match=r"f: reading 4 bytes at 0 failed: Input/output error"):
        list(iterate_chunks(path))


@pytest.fixture
def hanging(monkeypatch):
    """From now on reads at offset 4096 wait for a pipe into which nobody writes."""
    waiting, writing = os.pipe()
    preadv = os.preadv

    def hang(fd, buffers, offset):
        return os.readv(waiting, buffers) if offset == 4096 else preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", hang)
    yield
    os.close(writing)  # the thread that was left behind ends
    os.close(waiting)


def test_a_read_that_never_ends_is_an_error_and_the_next_one_works(reading, monkeypatch, hanging):
    read = reading(bytes(8192))
    monkeypatch.setattr(files, "PATIENCE_S", 0.2)
    with pytest.raises(FlashIOError, match=r"f: a read of 100 bytes at 4096 did not end within 0.2 s; check"):
        read(100, 4096)
    assert read(100, 0) == bytes(100)


STOPPED = """
import os, sys
from pathlib import Path
from flashllm.base import files
files.PATIENCE_S = 1.0
os.preadv = lambda fd, buffers, offset: os.readv(0, buffers)  # a drive that answers when the parent writes
print("waiting", flush=True)
print(files.pread_bytes(0, 5, 0, Path("f")).decode())
"""


def test_the_time_in_which_the_process_was_stopped_does_not_count():
    command = [sys.executable, "-c", STOPPED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "waiting\n"
        time.sleep(0.3)  # so that it waits
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.2)
        process.send_signal(signal.SIGCONT)
        time.sleep(0.2)
        assert process.communicate("bytes", timeout=60)[0] == "bytes\n"


def test_ctrl_c_ends_a_read_that_never_ends(reading, hanging):
    read = reading(bytes(8192))
    timer = threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT])
    began = time.monotonic()
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            read(100, 4096)
        assert time.monotonic() - began < 10
        assert read(100, 0) == bytes(100)
    finally:
        timer.join()


def test_a_forked_child_reads(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"0123")
    script = """if True:
        import os, sys
        from pathlib import Path
        from flashllm.base.files import read_bounded
        path = Path(sys.argv[1])
        read_bounded(path, 9)
        pid = os.fork()
        if pid == 0:
            os._exit(0 if read_bounded(path, 9) == b"0123" else 1)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """
    run_python("-W", "ignore", "-c", script, path)


@pytest.mark.parametrize("kind", ["absent", "directory", "fifo"])
def test_only_regular_files_are_opened(tmp_path, kind):
    path = tmp_path / "f"
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    with pytest.raises((FormatError, FlashIOError), match="f: "):
        open_for_reading(path)


def test_short_writes_are_continued_and_hashed(tmp_path, monkeypatch):
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:3], offset))
    with HashingWriter(tmp_path / "f", preallocate=100) as writer:
        writer.write(memoryview(b"hello, "))
        writer.write(memoryview(b"world"))
        assert writer.finish() == hashlib.sha256(b"hello, world").hexdigest()
    assert (tmp_path / "f").read_bytes() == b"hello, world"


def test_rewind_forgets_what_followed_the_mark(tmp_path):
    (tmp_path / "f").write_bytes(b"abcXXXXXX")
    with HashingWriter(tmp_path / "f") as writer:
        kept = bytearray(3)
        writer.reread(memoryview(kept))
        mark = writer.mark()
        writer.reread(memoryview(bytearray(3)))
        writer.rewind(mark)
        writer.write(memoryview(b"de"))
        assert writer.finish() == hashlib.sha256(b"abcde").hexdigest()
    assert kept == b"abc"
    assert (tmp_path / "f").read_bytes() == b"abcde"


def test_a_writer_does_not_follow_links(tmp_path):
    (tmp_path / "target").write_bytes(b"precious")
    (tmp_path / "f").symlink_to("target")
    with pytest.raises(OSError):
        HashingWriter(tmp_path / "f")
    assert (tmp_path / "target").read_bytes() == b"precious"


def test_atomic_writes_leave_the_old_file_when_they_fail(tmp_path, monkeypatch):
    path = tmp_path / "f"
    write_atomically(path, b"old")

    def fail(source, target):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail)
        with pytest.raises(OSError):
            write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    write_atomically(path, b"newer")
    assert path.read_bytes() == b"newer"
    assert os.listdir(tmp_path) == ["f"]


@pytest.mark.parametrize("call", ["pwrite", "fsync", "ftruncate"])
def test_a_failing_write_names_its_file(tmp_path, monkeypatch, call):
    def fail(*_):
        raise OSError(28, "No space left on device")

    def write_all(path):
        with HashingWriter(path) as writer:
            writer.write(memoryview(b"abc"))
            writer.finish()

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match=re.escape(f"No space left on device: '{tmp_path / 'f'}'")):
        write_all(tmp_path / "f")


def test_only_a_name_that_is_missing_is_given(tmp_path):
    given = [OSError(5, "it failed", "other"), OSError("it says all")]
    for error in given:
        said = str(error)
        with pytest.raises(OSError, match=re.escape(said)) as raised, naming(tmp_path):
            raise error
        assert str(raised.value) == said


def test_a_directory_is_locked_once(tmp_path):
    with (
        locked_directory(tmp_path, "busy"),
        pytest.raises(FlashIOError, match="busy"),
        locked_directory(tmp_path, "busy"),
    ):
        pass
    with locked_directory(tmp_path, "busy"):
        pass


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b'{"a":1,"a":2}', "'a' occurs twice"),
        (b'{"x":{"b":1,"b":1}}', "'b' occurs twice"),
        (b'{"a":NaN}', "NaN is not JSON"),
        (b'{"a":-Infinity}', "-Infinity is not JSON"),
        (b'{"a":-1e999}', "-1e999 is more than a number can be"),
        (b"\xef\xbb\xbf{}", "is not JSON"),
        (b'{"a":"\xff"}', "is not UTF-8 at byte 6"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"[" + b"[]," * 2_000_001 + b"[]]", "holds more than 2000000 values"),
        (b'{"a":' + b"1" * 10_000 + b"}", "holds an integer of more than 4300 digits"),
        (b"", "is not JSON"),
    ],
)
def test_json_is_strict(raw, message):
    with pytest.raises(FormatError, match=f"^here: .*{message}"):
        parse_json(raw, "here")


def test_json_files_are_objects_of_bounded_size(tmp_path):
    path = tmp_path / "f.json"
    path.write_text("[1]")
    with pytest.raises(FormatError, match="must hold a JSON object, not list"):
        read_json_object(path)
    path.write_text('{"a": 1}')
    assert read_json_object(path) == {"a": 1}
    with pytest.raises(FormatError, match="8 bytes; at most 7"):
        read_json_object(path, max_nbytes=7)


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (999, "999 B"), (999_499, "999 kB"), (999_600, "1 MB"), (1.234e12, "1.23 TB")]
)
def test_sizes_have_three_digits(nbytes, text):
    assert format_size(nbytes) == text
