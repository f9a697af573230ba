"""The direct writer: what is read back, every kind of failed call, and room on the drive."""

import errno
import os
import stat

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashllm import _core
from flashllm.errors import FlashIOError

PAGE = 4096
PIECE = 2 << 20  # bytes of a system call


@pytest.fixture
def make(tmp_path):
    """Writers of one file each, closed at the end."""
    made = []

    def make(nbytes, threads=3):
        made.append(_core.DirectWriter(str(tmp_path / f"scratch{len(made)}"), nbytes, threads))
        return made[-1]

    yield make
    for writer in made:
        writer.close()


def memory(nbytes, seed=0):
    """Aligned random bytes."""
    array = _core.allocate(nbytes)[:nbytes]
    array[:] = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    return array


def contents(writer):
    with open(writer.path, "rb") as file:
        return np.frombuffer(file.read(), np.uint8)


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([1, 2, 7, 511, 512, 513, 1100]), min_size=1, max_size=8),
    threads=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_what_is_written_is_read_back(tmp_path_factory, sizes, threads, seed):
    total = sum(sizes) * PAGE
    data = memory(total, seed)
    writer = _core.DirectWriter(str(tmp_path_factory.mktemp("writer") / "scratch"), total, threads)
    places = np.cumsum([0, *sizes]) * PAGE
    writer.write(
        [(int(places[i]), data[places[i] : places[i + 1]]) for i in np.random.default_rng(seed).permutation(len(sizes))]
    )
    assert np.array_equal(contents(writer), data)
    reader = _core.DirectFile(writer.path)
    assert (reader.direct, reader.size) == (writer.direct, total)
    writer.close()
    writer.close()
    os.remove(writer.path)


def test_the_file_is_its_owners_and_as_large_as_it_will_be(make):
    writer = make(10 * PAGE)
    status = os.stat(writer.path)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == writer.size == 10 * PAGE
    assert status.st_blocks * 512 >= 10 * PAGE
    assert writer.direct == (writer.fallback_reason == "")
    assert not contents(writer).any()


def test_memory_files_say_why_they_are_not_direct():
    path = f"/dev/shm/flashllm-test-{os.getpid()}"
    if not os.path.isdir("/dev/shm"):
        pytest.skip("needs /dev/shm")
    writer = _core.DirectWriter(path, 3 * PAGE)
    try:
        assert not writer.direct
        assert "memory" in writer.fallback_reason
        data = memory(3 * PAGE)
        writer.write([(0, data)])
        assert np.array_equal(contents(writer), data)
    finally:
        writer.close()
        os.remove(path)


@pytest.mark.parametrize(
    ("fault", "count", "argument"),
    [
        *(("short_read", 6, nbytes) for nbytes in (0, 1, 4095, 4096, 5000, 8192)),
        *(("error", 20, error) for error in (errno.EINTR, errno.EAGAIN)),
    ],
)
def test_short_and_interrupted_writes_go_on(make, fault, count, argument):
    data = memory(3 * PIECE + 5 * PAGE)
    writer = make(data.size)
    writer.inject(fault, 0, count, argument)
    writer.write([(0, data)])
    assert np.array_equal(contents(writer), data)


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_a_failed_write_says_where(make, error):
    writer = make(8 * PAGE, threads=1)
    data = memory(2 * PAGE)
    writer.inject("error", 1, 1, error)
    with pytest.raises(FlashIOError, match=f"writing 8192 bytes at offset 16384 failed.*errno {error}") as caught:
        writer.write([(offset, data) for offset in (0, 4 * PAGE, 6 * PAGE)])
    assert caught.value.offset == 4 * PAGE
    assert writer.path in str(caught.value)
    assert np.array_equal(contents(writer)[: 2 * PAGE], data)
    assert not contents(writer)[6 * PAGE :].any()  # the rest is not tried
    writer.write([(4 * PAGE, data)])
    assert np.array_equal(contents(writer)[4 * PAGE : 6 * PAGE], data)


def test_of_a_long_write_that_failed_the_rest_is_not_tried(make):
    writer = make(8 * PIECE, threads=1)
    writer.inject("error", 1, 1, errno.EIO)
    with pytest.raises(FlashIOError, match=f"offset {PIECE} "):
        writer.write([(0, memory(8 * PIECE))])
    assert not contents(writer)[2 * PIECE :].any()


@pytest.mark.parametrize("kind", ["error", "end_of_file"])
def test_a_drive_that_takes_nothing_does_not_hang(make, kind):
    writer = make(PAGE)
    writer.inject(kind, 0, 10**6, errno.EAGAIN)
    with pytest.raises(FlashIOError, match="offset 0 failed"):
        writer.write([(0, memory(PAGE))])


def test_what_cannot_be_written_is_refused(make, tmp_path):
    writer, data = make(4 * PAGE), memory(4 * PAGE)
    for offset, array in ((1, data), (0, data[:100]), (0, data[:0])):
        with pytest.raises(ValueError, match="multiples of 4096"):
            writer.write([(0, data), (offset, array)])
    for offset, array in ((PAGE, data), (8 * PAGE, data[:PAGE])):
        with pytest.raises(ValueError, match="beyond the file's 16384"):
            writer.write([(0, data), (offset, array)])
    if writer.direct and _core.DirectFile(writer.path).memory_alignment > 1:
        with pytest.raises(ValueError, match="memory at a multiple"):
            writer.write([(0, data[1 : PAGE + 1])])
    assert not contents(writer).any()
    writer.close()
    with pytest.raises(ValueError, match="it is closed"):
        writer.write([(0, data)])
    for nbytes in (0, 100):
        with pytest.raises(ValueError, match="positive multiple"):
            _core.DirectWriter(str(tmp_path / "x"), nbytes)
    with pytest.raises(ValueError, match="1 to 1024"):
        _core.DirectWriter(str(tmp_path / "x"), PAGE, 0)
    with pytest.raises(FlashIOError, match="cannot create"):
        _core.DirectWriter(writer.path, PAGE)
    with pytest.raises(FlashIOError, match="cannot create"):
        _core.DirectWriter(str(tmp_path / "none" / "x"), PAGE)
    assert not (tmp_path / "x").exists()


def test_a_drive_without_room_is_said_with_sizes_and_never_filled(tmp_path):
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    wanted = (2 * free + (1 << 30)) // PAGE * PAGE
    untouched = tmp_path.stat().st_mtime_ns  # a file that is made and removed changes it
    with pytest.raises(FlashIOError, match=rf"{wanted} bytes on the drive.*of which \d+ bytes are free: .*errno"):
        _core.DirectWriter(str(tmp_path / "scratch"), wanted)
    assert tmp_path.stat().st_mtime_ns == untouched
