"""Reads that never end: a typed error that names file and offset, or ctrl-C; then a clean end. In processes of their
own, because memory that such a read may still change is never given back."""

import json
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from scripts import run_python

from flashllm import _core
from flashllm.errors import FlashIOError

TESTS = Path(__file__).parent.parent

START = """
import json, signal, sys, threading, time
sys.path.insert(0, sys.argv[1])
import core_testing
from flashllm import _core
from flashllm.errors import FlashError

def hang(backend, count=1):
    (_core.hang_reads if backend == "threads" else _core.lose_completions)(count)

said = {}
def ends(name, use):
    began = time.monotonic()
    try:
        use()
        said[name] = ["nothing", ""]
    except (FlashError, KeyboardInterrupt) as error:
        said[name] = [type(error).__name__, str(error)]
    said[name].append(time.monotonic() - began)
"""

READER = """
import numpy as np
path, backend = sys.argv[2:]
file = _core.DirectFile(path)
reader = _core.Reader(4, backend=backend, queue_depth=4, patience_ms=400)
other = _core.Reader(4, backend=backend, queue_depth=4)
def read(reader, offset, count=8):
    batch = _core.ReadBatch(reader, file)
    for i in range(count):
        batch.add(offset + 4096 * i, np.zeros(4096, np.uint8))
    batch.submit()
    batch.wait()
hang(backend)
ends("hung", lambda: read(reader, 40960, 1))
ends("again", lambda: read(reader, 0))
ends("other", lambda: read(other, 0))
late = _core.ReadBatch(reader, file)
del late, reader, other
print(json.dumps(said))
"""

LOST = """
import numpy as np
path, which = sys.argv[2:]
def read(patience_ms):
    reader = _core.Reader(backend="io_uring", queue_depth=4, patience_ms=patience_ms)
    batch, destination = _core.ReadBatch(reader, _core.DirectFile(path)), _core.allocate(20 * 4096)
    for i in range(20):
        batch.add(8192 * i, destination[4096 * i : 4096 * (i + 1)])
    batch.submit()
    batch.wait()
    data = np.fromfile(path, np.uint8, 20 * 8192).reshape(20, 2, 4096)
    assert (destination.reshape(20, 4096) == data[:, 0]).all()
for name in (1, 1 << 9, 1 << 40):
    _core.distort_completions("id", int(which), 1, name)
    ends(name, lambda: read(200))
    _core.distort_completions("error", 2**60, 0)
    read(60_000)
print(json.dumps(said))
"""

STOPPED = """
import numpy as np
path, backend = sys.argv[2:]
batch = _core.ReadBatch(_core.Reader(4, backend=backend, queue_depth=4, patience_ms=2000), _core.DirectFile(path))
batch.add(0, np.zeros(4096, np.uint8))
hang(backend)
batch.submit()
print("waiting", flush=True)
ends("hung", batch.wait)
print(json.dumps([*said["hung"], time.monotonic()]))
"""

MODEL = """
from pathlib import Path
path, backend, length, patience = sys.argv[2:]
Reader = _core.Reader
_core.Reader = lambda *args, **kwargs: Reader(*args, **{**kwargs, "patience_ms": int(patience)})
from flashllm.config import RunConfig
from flashllm.engine.model import Model
model = Model.open(Path(path), RunConfig(threads=2, io_threads=4, io_backend=backend, memory=400_000_000))
ids = [5 + i for i in range(int(length))]
with model.new_sequence() as sequence:
    if int(patience) > 5000:
        threading.Timer(2.5, lambda: signal.raise_signal(signal.SIGINT)).start()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    hang("threads" if int(length) > 10 else backend)
    ends("hung", lambda: model.step([(sequence, ids)]))
ends("again", lambda: model.step([(model.new_sequence(), ids)]))
ends("close", model.close)
print(json.dumps(said), flush=True)
"""


def run(script, *arguments):
    return json.loads(run_python("-c", START + script, TESTS, *arguments, timeout=60).stdout)


def run_each(script, cases):
    """What a process of each case says, all at once: they wait more than they compute."""
    with ThreadPoolExecutor(len(cases)) as pool:
        return list(pool.map(lambda case: run(script, *case), cases))


BACKENDS = ["threads"] + ["io_uring"] * (_core.Reader(1, backend="auto", queue_depth=1).backend == "io_uring")
LENGTHS = (4, 20)  # of a pass over few tokens, which is sparse, and of a prompt's
needs_io_uring = pytest.mark.skipif("io_uring" not in BACKENDS, reason="no io_uring here")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("hung") / "data.bin"
    np.random.default_rng(0).integers(0, 256, 200_003, np.uint8).tofile(path)
    return path


def test_a_read_that_never_ends_is_an_error_that_says_where(path):
    for said in run_each(READER, [(path, backend) for backend in BACKENDS]):
        kind, message, seconds = said["hung"]
        expected = f"a read of 4096 bytes at offset 40960 did not end within 400 ms, {path}"
        assert (kind, message) == ("FlashIOError", expected)
        assert 0.4 <= seconds < 5
        assert said["again"][0] == "FlashIOError"
        assert "nothing more can be read; load the model again" in said["again"][1]
        assert said["other"][0] == "nothing"


@needs_io_uring
def test_a_completion_that_names_another_read_is_one_that_never_comes(path):
    """By its index, by one that no read has, or by another number; the next reader reads."""
    for said in run_each(LOST, [(path, which) for which in (0, 3, 11)]):
        assert len(said) == 3
        for kind, message, _ in said.values():
            assert kind == "FlashIOError"
            assert "did not end within 200 ms" in message


def test_the_time_in_which_the_process_was_stopped_does_not_count(path):
    """A read that was under way when ctrl-Z came has all of its patience once the process goes on."""
    command = [sys.executable, "-c", START + STOPPED, str(TESTS), str(path)]
    with ExitStack() as stack:
        started = [
            stack.enter_context(subprocess.Popen([*command, backend], stdout=subprocess.PIPE, text=True))
            for backend in BACKENDS
        ]
        for process in started:
            assert process.stdout.readline() == "waiting\n"
        time.sleep(0.3)  # so that they wait
        for process in started:
            process.send_signal(signal.SIGSTOP)
        time.sleep(2.5)
        went_on = time.monotonic()
        for process in started:
            process.send_signal(signal.SIGCONT)
        for process in started:
            kind, message, _, ended = json.loads(process.communicate(timeout=60)[0])
            assert kind == "FlashIOError"
            assert "did not end within 2000 ms" in message
            assert ended - went_on > 1.5


def test_a_model_whose_read_never_ends(tiny):
    path = tiny("bfloat16").path("random")
    for said in run_each(MODEL, [(path, *case, 500) for case in product(BACKENDS, LENGTHS)]):
        kind, message, seconds = said["hung"]
        assert kind == "FlashIOError", said
        assert "layer " in message
        assert f"did not end within 500 ms, {path}" in message
        assert 0.5 <= seconds < 5
        assert said["again"][0] == "FlashIOError"
        assert said["close"][0] == "nothing"
        assert said["close"][2] < 2


def test_ctrl_c_ends_a_read_that_never_ends(tiny):
    """Once the pass waits for it: the signal comes so late that it does, also on a busy machine. Of a signal that is
    seen before, between two layers, tests/native/test_model.cpp tells."""
    path = tiny("bfloat16").path("random")
    for said in run_each(MODEL, [(path, *case, 60_000) for case in product(BACKENDS, LENGTHS)]):
        assert said["hung"][0] == "KeyboardInterrupt", said
        assert said["hung"][2] < 2.5 + 1.5  # of which a second is a busy machine's
        assert said["close"][0] == "nothing"
        assert said["close"][2] < 2


def test_patience_is_positive():
    with pytest.raises(ValueError, match="patience"):
        _core.Reader(1, patience_ms=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_file_replaced_or_deleted_while_it_is_open(tmp_path, backend):
    """What was opened is read on."""
    path, data = tmp_path / "data.bin", np.random.default_rng(0).integers(0, 256, 1 << 16, dtype=np.uint8)
    data.tofile(path)
    file, reader = _core.DirectFile(str(path)), _core.Reader(4, backend=backend, queue_depth=4)

    def read():
        destination = _core.allocate(1 << 16)
        batch = _core.ReadBatch(reader, file)
        batch.add(0, destination)
        batch.submit()
        batch.wait()
        return destination

    np.zeros(1 << 16, np.uint8).tofile(tmp_path / "other.bin")
    (tmp_path / "other.bin").replace(path)
    assert np.array_equal(read(), data)
    path.unlink()
    assert np.array_equal(read(), data)
    with pytest.raises(FlashIOError, match="cannot open"):
        _core.DirectFile(str(path))
