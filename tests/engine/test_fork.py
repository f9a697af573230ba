"""A forked child that touches a model gets an error, and ends as other processes do: no fault, no hang."""

import pytest
from scripts import run_python

from flashllm.convert.named import demo_path

START = """
import os, sys, threading
from pathlib import Path
from flashllm.errors import FlashError

def in_child(use):
    pid = os.fork()
    if pid == 0:
        try:
            use()
        except FlashError as error:
            print(f"{type(error).__name__}: {error}", flush=True)
            sys.exit(7)
        sys.exit(8)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""

MODEL = """
from flashllm.config import RunConfig
from flashllm.engine.model import Model
model = Model.open(Path(sys.argv[1]), RunConfig(io_threads=4))
sequence = model.new_sequence()
before = model.step([(sequence, [5, 6, 7])])
used = {
    "step": lambda: model.step([(sequence, [8])]),
    "prompt": lambda: model.step([(sequence, list(range(5, 25)))]),
    "new": model.new_sequence,
    "cut": lambda: sequence.keep(1),
    "parts": lambda: model.parts,
}
for name, use in used.items():
    print(name, in_child(use), flush=True)
# One that leaves it alone, or only closes it, ends in peace; also where another thread of the parent computes.
print("closed", in_child(lambda: (sequence.close(), model.cancel(), model.close())), flush=True)
stop = threading.Event()
def compute():
    while not stop.is_set():
        with model.new_sequence() as other:
            model.step([(other, list(range(5, 60)))])
thread = threading.Thread(target=compute)
thread.start()
print("beside", [in_child(used["step"]) for _ in range(5)], flush=True)
stop.set()
thread.join()
after = model.step([(sequence, [8])])
again = model.new_sequence()
model.step([(again, [5, 6, 7])])
assert (model.step([(again, [8])]) == after).all()
model.close()
"""

ERROR = "UsageError: this process was forked from the one that loaded the model"


def run(script, *arguments):
    return run_python("-W", "ignore::DeprecationWarning", "-c", START + script, *arguments).stdout


def test_the_latency_engine():
    out = run(MODEL, demo_path())
    assert out.count(ERROR) == 5 + 5, out
    for name in ("step", "prompt", "new", "cut", "parts"):
        assert f"{name} 7" in out
    assert "closed 8" in out
    assert "beside [7, 7, 7, 7, 7]" in out


OFFLOAD = """
from flashllm.offload.engine import OffloadEngine
engine = OffloadEngine(sys.argv[1], memory="600MB", scratch=sys.argv[2])
before = engine.generate([[5, 6, 7]], max_new_tokens=3)
print("generate", in_child(lambda: engine.generate([[5, 6, 7]], max_new_tokens=3)), flush=True)
print("closed", in_child(engine.close), flush=True)
assert engine.generate([[5, 6, 7]], max_new_tokens=3) == before
engine.close()
assert not list(Path(sys.argv[2]).iterdir())
"""


@pytest.mark.usefixtures("tmp_path")
def test_the_throughput_engine(tmp_path):
    out = run(OFFLOAD, demo_path(), tmp_path)
    assert ERROR in out
    assert "generate 7" in out
    assert "closed 8" in out
