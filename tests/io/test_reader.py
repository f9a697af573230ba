"""The direct reader against the file's bytes: offsets, sizes, threads, merging, file ends and faults."""

import errno
import gc
import os
import re
import subprocess
import sys
import time
from contextlib import nullcontext
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from scripts import run_python

from flashllm import _core
from flashllm.errors import ChecksumError, FlashIOError, FormatError

NBYTES = 200_003  # ends in the middle of a sector
FOREVER = 2**60
ROW = 1024


def _io_uring_is_missing():
    try:
        _core.Reader(backend="io_uring")
    except FlashIOError as error:
        return str(error)
    return ""


needs_io_uring = pytest.mark.skipif(_io_uring_is_missing() != "", reason=_io_uring_is_missing() or "io_uring is here")


@pytest.fixture(params=["threads", pytest.param("io_uring", marks=needs_io_uring)])
def reader_of(request):
    """A reader of each backend; `threads` reads at a time."""

    def make(threads=32, **options):
        return _core.Reader(threads=threads, queue_depth=threads, backend=request.param, **options)

    return make


@pytest.fixture(scope="module")
def data():
    return np.random.default_rng(0).integers(0, 256, NBYTES, dtype=np.uint8)


@pytest.fixture(scope="module")
def path(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("reader") / "data.bin"
    data.tofile(path)
    return path


def _read(reader, file, jobs):
    """Read (offset, destination) jobs in one batch; its statistics."""
    batch = _core.ReadBatch(reader, file)
    for offset, destination in jobs:
        batch.add(offset, destination)
    batch.submit()
    return batch.wait()


def _destinations(jobs, skew=0):
    """Disjoint memory for (offset, nbytes) jobs, `skew` bytes off alignment."""
    memory = _core.allocate(sum(nbytes + 1024 for _, nbytes in jobs))
    result, used = [], 0
    for offset, nbytes in jobs:
        start = -(-used // 512) * 512 + skew
        result.append((offset, memory[start : start + nbytes]))
        used = start + nbytes
    return result


def _check(jobs, data):
    for offset, destination in jobs:
        assert (destination == data[offset : offset + len(destination)]).all(), offset


def _read_right(reader, file, places, data, skew=0):
    """Read (offset, nbytes) places, whose bytes must be the file's; the batch's statistics."""
    jobs = _destinations(places, skew)
    stats = _read(reader, file, jobs)
    _check(jobs, data)
    return stats


def _told(code, *arguments):
    """A process of its own that runs this code."""
    command = [sys.executable, "-c", "import flashllm.errors\n" + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


TWENTY = [(8192 * i, 4096) for i in range(20)]


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("skew", [0, 1, 64])
def test_offsets_and_sizes(reader_of, path, data, direct, skew):
    reader, file = reader_of(threads=4), _core.DirectFile(str(path), direct)
    offsets, sizes = (0, 1, 511, 512, 4095, 4096, 65536, 77777), (1, 2, 511, 512, 513, 4096, 8192, 50000)
    stats = _read_right(reader, file, list(product(offsets, sizes)), data, skew)
    assert (stats["jobs"], stats["retries"]) == (64, 0)
    if not file.direct:
        assert (stats["bounced"], stats["bytes"]) == (0, len(offsets) * sum(sizes))
    if file.direct and skew % file.memory_alignment != 0:
        assert stats["bounced"] == stats["requests"]


def test_direct_and_buffered_agree_with_what_they_say(path):
    buffered = _core.DirectFile(str(path), direct=False)
    assert (buffered.direct, buffered.fallback_reason) == (False, "")
    assert (buffered.offset_alignment, buffered.memory_alignment) == (1, 1)
    assert (buffered.size, buffered.path) == (NBYTES, str(path))
    wanted = _core.DirectFile(str(path))
    assert wanted.direct == (wanted.fallback_reason == "")
    assert wanted.direct or wanted.offset_alignment == 1


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs a file system in memory")
def test_files_in_memory_are_not_called_direct(reader_of, data):
    path = Path(f"/dev/shm/flashllm-test-{os.getpid()}")
    try:
        data.tofile(path)
        file = _core.DirectFile(str(path))
        assert not file.direct
        assert file.fallback_reason != ""
        _read_right(reader_of(threads=2), file, [(0, 5000), (33333, 40000), (NBYTES - 7, 7)], data, 3)
    finally:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("direct", [True, False])
def test_end_of_file(reader_of, path, data, direct):
    reader, file = reader_of(threads=2), _core.DirectFile(str(path), direct)
    _read_right(reader, file, [(NBYTES - 1, 1), (NBYTES - 3000, 3000), (NBYTES - 67, 67), (0, NBYTES)], data)
    for offset, nbytes in [(NBYTES, 1), (NBYTES - 10, 11), (NBYTES + 4096, 512), (196608, 4096), (0, NBYTES + 512)]:
        with pytest.raises(FormatError, match=rf"{re.escape(str(path))} ends at byte .*expected at least .*shrank"):
            _read(reader, file, _destinations([(offset, nbytes)]))


def test_neighbours_merge_and_gaps_are_read_through(reader_of, path, data):
    file = _core.DirectFile(str(path))
    rows = [(offset, 1024) for offset in (0, 1024, 4096, 5120, 16384)]
    for max_gap, requests, gap_bytes in [(0, 3, 0), (2047, 3, 0), (2048, 2, 2048), (65536, 1, 2048 + 10240)]:
        stats = _read_right(reader_of(threads=3, max_gap=max_gap), file, rows[::-1], data)
        assert (stats["requests"], stats["gap_bytes"]) == (requests, gap_bytes)
        assert stats["bytes"] == 5 * 1024 + gap_bytes


@pytest.mark.parametrize(
    ("apart", "requests"),
    [(512, 3), (1024, 21)],  # neighbours: 512 pieces each; with gaps: 64 KiB each
)
def test_more_pieces_than_one_request_takes(reader_of, tmp_path, apart, requests):
    data = np.random.default_rng(1).integers(0, 256, 2 * 1300 * 512, dtype=np.uint8)
    path = tmp_path / "pieces"
    data.tofile(path)
    for direct in (True, False):
        reader, file = reader_of(threads=2, max_gap=512, max_request=4 << 20), _core.DirectFile(str(path), direct)
        stats = _read_right(reader, file, [(apart * i, 512) for i in range(1300)], data)
        assert stats["requests"] == requests


@pytest.mark.parametrize("max_request", [4096, 5000, 65536, 1 << 20])
@pytest.mark.parametrize("offset", [0, 100, 512])
@pytest.mark.parametrize("skew", [0, 8])
def test_long_jobs_are_split(*, reader_of, path, data, max_request, offset, skew):
    rows = (NBYTES - offset) // ROW
    whole = np.ascontiguousarray(data[offset : offset + rows * ROW]).reshape(rows, ROW)
    sums = _core.xxh3_64_rows(whole)
    reader, file = reader_of(threads=4, max_request=max_request), _core.DirectFile(str(path))
    for checksums in (None, sums):
        jobs = _destinations([(offset, rows * ROW)], skew)
        batch = _core.ReadBatch(reader, file)
        batch.add(offset, jobs[0][1], checksums, 0 if checksums is None else ROW)
        batch.submit()
        stats = batch.wait()
        _check(jobs, data)
        assert stats["requests"] >= rows * ROW / max_request
    bad = sums.copy()
    bad[rows // 2] ^= np.uint64(1)
    batch.add(offset, jobs[0][1], bad, ROW)
    batch.submit()
    with pytest.raises(ChecksumError, match=rf"offset {offset + rows // 2 * ROW} of {re.escape(str(path))}"):
        batch.wait()


# Faults


def test_three_failures_are_an_error_that_says_where(reader_of, path):
    file = _core.DirectFile(str(path))
    file.inject("error", 0, FOREVER, errno.EIO)
    pattern = rf"reading 8192 bytes at offset 4096 failed three times, {re.escape(str(path))}: .* \(errno {errno.EIO}\)"
    with pytest.raises(FlashIOError, match=pattern):
        _read(reader_of(threads=1), file, _destinations([(4096, 8192)]))


@pytest.mark.parametrize("count", [1, 50])
def test_an_interrupted_first_read_is_repeated(path, count):
    _core.interrupt_probes(count)
    file = _core.DirectFile(str(path))
    assert file.direct == _core.DirectFile(str(path)).direct
    assert file.fallback_reason == _core.DirectFile(str(path)).fallback_reason


@needs_io_uring
@pytest.mark.parametrize("refusals", [1, 500, 1001, FOREVER])
def test_a_ring_that_takes_no_reads(path, data, refusals):
    reader, file = _core.Reader(backend="io_uring", queue_depth=4), _core.DirectFile(str(path))
    _core.refuse_enters(refusals)
    try:
        for _ in range(3):
            _read_right(reader, file, TWENTY, data)
    finally:
        _core.refuse_enters(0)
    _read_right(reader, file, TWENTY, data)


@needs_io_uring
@pytest.mark.parametrize("which", [0, 3, 11])
def test_wrong_completions(path, data, which):
    """What the ring says of a read is not so: the right bytes, or a typed error. Of one whose name is wrong,
    tests/io/test_hung_reads.py tells."""
    wrong = {
        "twice": ("twice", 3, 0, None),
        "length": ("length", 1, -1000, None),
        "error": ("error", 1, errno.EIO, None),
        "cancelled": ("error", 50, errno.ECANCELED, None),
        "longer": ("length", 1, 1, r"gave more, 4097"),
        "for ever": ("error", FOREVER, errno.EBADF, f"errno {errno.EBADF}"),
        "cancelled for ever": ("error", FOREVER, errno.ECANCELED, f"errno {errno.ECANCELED}"),
    }
    file = _core.DirectFile(str(path))
    for kind, count, argument, said in wrong.values():
        reader = _core.Reader(backend="io_uring", queue_depth=4)
        _core.distort_completions(kind, which, count, argument)
        try:
            with nullcontext() if said is None else pytest.raises(FlashIOError, match=said):
                _read_right(reader, file, TWENTY, data)
        finally:
            _core.distort_completions("error", FOREVER, 0)
        _read_right(_core.Reader(backend="io_uring", queue_depth=4), file, TWENTY, data)


# Batches


def test_one_batch_fails_and_the_other_does_not(reader_of, path, data):
    reader = reader_of(threads=2)
    good, bad = _core.DirectFile(str(path)), _core.DirectFile(str(path))
    bad.inject("error", 0, FOREVER, errno.EIO)
    for _ in range(20):
        jobs = _destinations(TWENTY)
        failing, working = _core.ReadBatch(reader, bad), _core.ReadBatch(reader, good)
        for offset, destination in jobs:
            working.add(offset, destination)
            failing.add(offset, np.zeros(4096, np.uint8))
        failing.submit()
        working.submit()
        working.wait()
        _check(jobs, data)
        with pytest.raises(FlashIOError):
            failing.wait()


def test_a_dropped_batch_lands_before_its_memory_goes(reader_of, path):
    reader, file = reader_of(threads=2), _core.DirectFile(str(path))
    for _ in range(50):
        batch = _core.ReadBatch(reader, file)
        for i in range(40):
            batch.add(4096 * i, np.zeros(4096, np.uint8))
        batch.submit()
        del batch
    gc.collect()
    batch = _core.ReadBatch(reader, file)
    del reader, file  # the batch keeps them
    batch.add(0, np.zeros(4096, np.uint8))
    batch.submit()
    assert batch.wait()["jobs"] == 1


def test_a_batch_can_be_looked_after_without_waiting(reader_of, path, data):
    batch = _core.ReadBatch(reader_of(threads=1), _core.DirectFile(str(path)))
    with pytest.raises(ValueError, match="not submitted"):
        batch.poll()
    memory = np.zeros(4096, np.uint8)
    batch.add(8192, memory)
    batch.submit()
    until = time.monotonic() + 30
    while not batch.poll():
        assert time.monotonic() < until
    np.testing.assert_array_equal(memory, data[8192 : 8192 + 4096])
    assert batch.wait()["jobs"] == 1


def test_a_batch_refuses_what_cannot_be_read(reader_of, path):
    batch = _core.ReadBatch(reader_of(threads=1), _core.DirectFile(str(path)))
    memory = np.zeros(2048, np.uint8)
    with pytest.raises(ValueError, match="at least one byte"):
        batch.add(0, memory[:0])
    for sums, row in [(1, 1024), (3, 1024), (2, 1000), (4, 512 + 64), (32, 64), (2, 0)]:
        with pytest.raises(ValueError, match="one a row"):
            batch.add(0, memory, np.zeros(sums, np.uint64), row)
    readonly = memory.copy()
    readonly.flags.writeable = False
    for wrong in (readonly, np.zeros((2, 8), np.uint8)[:, ::2], np.zeros(4, np.int8)):
        with pytest.raises(TypeError):
            batch.add(0, wrong)
    batch.add(2**64 - 512, memory)
    with pytest.raises(ValueError, match="beyond any file"):
        batch.submit()


# Files, threads and memory that are not to be had


def test_files_that_cannot_be_opened(tmp_path):
    for path, reason in [(tmp_path / "missing", "No such file"), (tmp_path, "not a regular file")]:
        for direct in (True, False):
            with pytest.raises(FlashIOError, match=f"{re.escape(str(path))}.*{reason}"):
                _core.DirectFile(str(path), direct)
    assert not [link for link in os.listdir("/proc/self/fd") if _points_to(link, tmp_path)]


def _points_to(descriptor, path):
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}") == str(path)
    except OSError:
        return False


def test_an_empty_file_opens_and_ends_at_once(tmp_path):
    path = tmp_path / "empty"
    path.touch()
    file = _core.DirectFile(str(path))
    assert file.size == 0
    with pytest.raises(FormatError, match="ends at byte 0"):
        _read(_core.Reader(threads=1), file, _destinations([(0, 512)]))


def test_names_with_spaces_and_umlauts(tmp_path, data):
    path = tmp_path / ("Größe 漢字 " + "x" * 200)
    data[:4096].tofile(path)
    _read_right(_core.Reader(threads=1), _core.DirectFile(str(path)), [(0, 4096)], data)


@pytest.mark.parametrize(
    "options", [{"threads": 0}, {"threads": 1025}, {"max_request": 4095}, {"max_request": 2**30 + 1}]
)
def test_readers_that_cannot_be_are_refused(options):
    with pytest.raises(ValueError, match=r"threads must be|max_request must be"):
        _core.Reader(**options)


def test_a_gap_beyond_a_request_means_a_request(path, data):
    reader = _core.Reader(threads=1, max_gap=2**64 - 1, max_request=8192)
    places = [(offset, 512) for offset in (0, 7680, 16384, 100000)]
    assert _read_right(reader, _core.DirectFile(str(path)), places, data)["requests"] == 3


LIMITED = """
import resource, sys
from flashllm import _core
from flashllm.errors import FlashIOError
what, limit = sys.argv[1], int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_AS, (limit << 20, limit << 20))
try:
    _core.Reader(threads=1000) if what == "reader" else _core.ThreadPool(1000)
except (FlashIOError, MemoryError) as error:
    print(type(error).__name__, error)
_core.Reader(threads=1)
_core.ThreadPool(2)
print("alive")
"""


@pytest.mark.parametrize(("what", "option"), [("reader", "io_threads"), ("pool", "--threads")])
@pytest.mark.parametrize("spare_mib", [300, 3000])
def test_threads_that_cannot_start_are_an_error(what, option, spare_mib):
    """Address space for some threads only: an error, and a process that can go on with fewer."""
    out = run_python("-c", LIMITED, what, 200 + spare_mib, timeout=60).stdout
    assert out.endswith("alive\n")
    assert re.search(rf"FlashIOError cannot start 1000 .*{option}|MemoryError", out)


NO_MORE_THREADS = """
import os, resource, sys
from flashllm import _core
from flashllm.errors import FlashIOError
if os.geteuid() == 0:
    os.setuid(54321)  # root has no such limit
resource.setrlimit(resource.RLIMIT_NPROC, (4, 4))
for make, option in ((lambda: _core.Reader(threads=32), "io_threads"), (lambda: _core.ThreadPool(32), "--threads")):
    try:
        make()
    except FlashIOError as error:
        assert option in str(error), error
    else:
        sys.exit("32 threads started under a limit of 4")
print("ok")
"""


def test_the_users_limit_on_threads():
    result = _told(NO_MORE_THREADS)
    if "PermissionError" in result.stderr:
        pytest.skip("needs the right to become a user without threads")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "ok\n"


# Backends


def test_the_backend_is_told():
    assert _core.Reader().backend == "threads"
    for backend in ("uring", ""):
        with pytest.raises(ValueError, match="threads, io_uring, auto"):
            _core.Reader(backend=backend)
    for depth in (0, 1025):
        with pytest.raises(ValueError, match="queue_depth must be 1 to 1024"):
            _core.Reader(queue_depth=depth)
    automatic = _core.Reader(backend="auto", queue_depth=7)
    missing = _io_uring_is_missing()
    assert automatic.backend == ("threads" if missing else "io_uring")
    assert (automatic.backend_reason != "") == (missing != "")
    assert automatic.queue_depth == 7


NO_RING = """
import os, resource, sys
from flashllm import _core
from flashllm.errors import FlashIOError
if sys.argv[1] == "descriptors":
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, lowest_free))
else:  # enough for a small ring, not for this one
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (16 << 10, 16 << 10))
    if os.geteuid() == 0:
        os.setuid(65534)
automatic = _core.Reader(backend="auto", threads=2, queue_depth=1024)
assert automatic.backend == "threads" and automatic.backend_reason, automatic.backend
try:
    _core.Reader(backend="io_uring", queue_depth=1024)
except FlashIOError as error:
    print(error)
"""


@pytest.mark.parametrize("missing", ["descriptors", "locked memory"])
def test_where_there_is_no_ring(missing):
    """Asked for by name it is an error, chosen freely it is threads and a reason."""
    result = _told(NO_RING, missing)
    if missing == "locked memory" and "assert automatic.backend" in result.stderr:
        pytest.skip("needs a kernel whose rings are locked memory")
    assert result.returncode == 0, result.stderr
    assert re.match(r"io_uring is not available \(.+\); use threads\n", result.stdout)


AS_USER = """
import os, resource, sys
import numpy as np
from flashllm import _core
limit = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
data = np.frombuffer(sys.stdin.buffer.read(), np.uint8)
reader = _core.Reader(backend="io_uring", queue_depth=64)
file = _core.DirectFile(sys.argv[1])
batch = _core.ReadBatch(reader, file)
memory = _core.allocate(len(data))
for offset in range(0, len(data), 4096):
    batch.add(offset, memory[offset : offset + 4096])
batch.submit()
batch.wait()
assert (memory == data).all()
print(os.geteuid(), reader.backend)
"""


@needs_io_uring
@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to become an ordinary user")
@pytest.mark.parametrize("memlock", [8 << 20, 64 << 10])
def test_an_ordinary_user_has_a_ring(tmp_path_factory, data, memlock):
    """With the usual limit on locked memory, and with one far smaller than the memory read into."""
    folder = tmp_path_factory.mktemp("user")
    for directory in (folder, *folder.parents):  # every folder of pytest's own must let the user through
        if directory.name.startswith("pytest-") or directory in (folder, tmp_path_factory.getbasetemp()):
            directory.chmod(directory.stat().st_mode | 0o055)
    path = folder / "data.bin"
    data[: 32 * 4096].tofile(path)
    path.chmod(0o444)
    code, stored = "import flashllm.errors\n" + AS_USER, data[: 32 * 4096].tobytes()
    done = run_python("-c", code, path, memlock, input=stored, text=False, timeout=60)
    assert done.stdout == b"65534 io_uring\n"
