"""Scratch files: what is written is read, nothing stays behind however a process ends, and a full disk is refused."""

import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from flashllm import _core
from flashllm.errors import FlashIOError
from flashllm.offload.runtime.tiers import scratch as module
from flashllm.offload.runtime.tiers.scratch import ALIGNMENT, Scratch, ScratchFile, open_reader, sweep


def aligned(nbytes, seed=0):
    memory = _core.allocate(nbytes)
    memory[:] = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    return memory


def read(file, offset, nbytes):
    memory = _core.allocate(nbytes)
    file.read([(offset, memory)])
    return memory


@pytest.mark.parametrize("blocks", [1, 3, 257])
def test_what_is_written_is_read(tmp_path, blocks):
    with Scratch(tmp_path, blocks * ALIGNMENT) as scratch:
        file = scratch.create("cache", blocks * ALIGNMENT, open_reader())
        data = aligned(blocks * ALIGNMENT)
        file.write([(0, data)])
        assert np.array_equal(read(file, 0, data.nbytes), data)
        file.write([((blocks - 1) * ALIGNMENT, data[:ALIGNMENT])])
        assert np.array_equal(read(file, (blocks - 1) * ALIGNMENT, ALIGNMENT), data[:ALIGNMENT])
    assert not list(tmp_path.iterdir())


def test_a_file_takes_its_space_at_once_and_has_no_name(tmp_path):
    with Scratch(tmp_path, 1 << 20) as scratch:
        file = scratch.create("cache", (1 << 20) - 5, open_reader())
        assert file.nbytes == 1 << 20
        assert file.file.size == 1 << 20
        taken = [
            int(fd)
            for fd in os.listdir("/proc/self/fd")
            if str(scratch.path) in os.path.realpath(f"/proc/self/fd/{fd}")
        ]
        assert max(os.fstat(fd).st_blocks for fd in taken) * 512 >= 1 << 20
        assert not list(scratch.path.iterdir())
        with pytest.raises(ValueError, match="are left"):
            scratch.create("more", 1, open_reader())


def test_a_disk_without_room_is_refused_with_numbers(tmp_path):
    with pytest.raises(FlashIOError, match=r"needs .*\(\d+ bytes\).*are free"):
        Scratch(tmp_path, 1 << 60)
    assert not list(tmp_path.iterdir())
    Scratch(tmp_path, 0).close()


def test_a_file_that_cannot_have_its_bytes_is_refused(tmp_path):
    with pytest.raises(FlashIOError, match="cache"):
        ScratchFile(tmp_path / "cache", 1 << 58, open_reader())
    assert not list(tmp_path.iterdir())
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(FlashIOError, match="cache"):
        ScratchFile(tmp_path / "cache", ALIGNMENT, open_reader())
    assert (tmp_path / "cache").exists()


CHILD = """
import sys, time
from pathlib import Path
from flashllm.offload.runtime.tiers.scratch import Scratch, open_reader
scratch = Scratch(Path(sys.argv[1]), 1 << 20)
scratch.create("cache", 1 << 20, open_reader())
(scratch.path / "left").write_bytes(b"as if killed between making a file and unlinking it")
print(scratch.path, flush=True)
time.sleep(60)
"""


def test_a_killed_process_leaves_nothing_after_the_next_start(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        path = child.stdout.readline().strip()
        sweep(tmp_path)
        Scratch(tmp_path, 0).close()
        assert [str(one) for one in tmp_path.iterdir()] == [path]  # it lives
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()
    with Scratch(tmp_path, 0) as scratch:
        assert list(tmp_path.iterdir()) == [scratch.path]
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_removed_is_left_to_the_next_start(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch, Scratch(tmp_path, 0) as scratch:
        patch.setattr(module.shutil, "rmtree", fail)
    assert scratch.path.exists()
    Scratch(tmp_path, 0).close()
    assert not list(tmp_path.iterdir())


def test_what_is_not_ours_is_left_alone(tmp_path):
    (tmp_path / "keep").mkdir()
    target = tmp_path / "target"
    target.mkdir()
    (target / "file").write_text("precious")
    link = tmp_path / f"{module._PREFIX}link"
    link.symlink_to(target)
    with Scratch(tmp_path, 0):
        pass
    assert (target / "file").read_text() == "precious"
    assert (tmp_path / "keep").exists()


def test_many_starts_at_once_do_not_take_each_others_directories(tmp_path):
    problems, reader = [], open_reader()

    def start():
        try:
            for _ in range(20):
                with Scratch(tmp_path, ALIGNMENT) as scratch:
                    assert scratch.path.is_dir()
                    scratch.create("cache", ALIGNMENT, reader).write([(0, aligned(ALIGNMENT))])
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert not list(tmp_path.iterdir())
