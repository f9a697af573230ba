"""The n-th system call on a model's files misbehaves, for every n: the right answer, or one typed error, as SQLite
tests I/O errors. Afterwards a clean run gives the right answer.

    python tests/faults/harness.py                 every call of every operation, with every fault: minutes
    python tests/faults/harness.py --sample 40     some of them

An operation (operations.py) runs in a child forked from a process that has imported everything and runs nothing; the
shim (shim.c) is preloaded there. The last line is one JSON document: operation by fault, what was tried and what came
of it.
"""

import argparse
import contextlib
import ctypes
import errno
import importlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from operations import CommandError, Operations

HERE = Path(__file__).parent

ERROR, SHORT, ZERO, FLIP = range(4)
EVER = 1 << 40
# name -> (kind, errno, calls in a row)
FAULTS = {
    "EIO once": (ERROR, errno.EIO, 1),
    "EIO for ever": (ERROR, errno.EIO, EVER),
    "EINTR": (ERROR, errno.EINTR, 3),
    "EMFILE": (ERROR, errno.EMFILE, 1),
    "ENOSPC for ever": (ERROR, errno.ENOSPC, EVER),
    "short": (SHORT, 0, 1),
    "zero bytes": (ZERO, 0, 1),
    "a flipped bit": (FLIP, 0, 1),
}
# They read checkpoints, texts and scratch files, which have no checksums: of a flipped bit there they may answer with
# something else ("other"). They still end well, and what they leave is whole.
UNKNOWN_BITS = ("convert", "offload", "offload run", "train")
GOOD = ("right", "error", "other")
LIMIT_S = 60  # of one operation: beyond it, it hangs


def build_shim(folder: Path) -> Path:
    """The shim as a shared library in `folder`."""
    shim = folder / "shim.so"
    command = ["cc", "-std=c11", "-shared", "-fPIC", "-O1", str(HERE / "shim.c"), "-o", str(shim), "-ldl"]
    subprocess.run(command, check=True)
    return shim


Operation = Callable[[], str | Callable[[], str]]


def in_child(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `run` returns in a forked child; {"died": signal or status} or {"hangs": true}."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reading)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 2)
            os.write(writing, json.dumps(run()).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    said = b""
    for _ in range(LIMIT_S):  # not by the clock: a machine that was stopped meanwhile is no hang
        if select.select([reading], [], [], 1.0)[0]:
            part = os.read(reading, 1 << 16)
            if not part:
                break
            said += part
    else:
        os.kill(pid, signal.SIGKILL)
    os.close(reading)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status == -signal.SIGKILL:
        return {"hangs": True}
    return json.loads(said) if status == 0 and said else {"died": status}


def elsewhere(work: Callable[[], None]) -> None:
    """Do `work` in a forked child: what it imports would make every later fork dearer."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except Exception:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0:
        raise RuntimeError("the files could not be made")


Files = dict[str, tuple[int, int, int]]


def state_of(root: Path) -> Files:
    """Which files there are, each with its inode, size and time of change."""
    found: Files = {}
    for folder, _, names in os.walk(root):
        for path in (folder, *(os.path.join(folder, name) for name in names)):
            status = os.stat(path)
            found[path] = (status.st_ino, status.st_size, status.st_mtime_ns)
    return found


class Trials:
    """Runs operations under faults. In a process with the shim preloaded."""

    def __init__(self, operations: Operations, shim: Path) -> None:
        self.operations = operations
        self.counted: int | None = None  # calls, once `calm` was called
        self.shim = ctypes.CDLL(str(shim))
        self.shim.fault_calls.restype = ctypes.c_long
        self.shim.fault_arm.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_int, ctypes.c_int]

    def calm(self) -> None:
        """From now on nothing fails, and no call is counted."""
        if self.counted is None:
            self.counted = self.shim.fault_calls()
        self.shim.fault_arm(-1, 0, 0, 0)

    def outcome(self, name: str, operation: Operation, first: int, fault: str, right: str) -> dict[str, Any]:
        """One run; then, without faults, one that must be right ("after").

        A run that left every file as it was is not followed by another: there is nothing that could disturb it.
        """
        from flashllm.errors import FlashError

        kind, number, count = FAULTS[fault]

        def faulty() -> dict[str, Any]:
            self.shim.fault_arm(first, count, kind, number)
            try:
                answer = operation()
                self.calm()
                modules = sorted(sys.modules) if first < 0 else []
                return {"answer": text_of(answer), "calls": self.counted, "modules": modules}
            except (FlashError, CommandError) as error:
                found = {"error": type(error).__name__, "message": str(error)}
            except OSError as error:  # the command line says it in a line of its own
                found = {"error": type(error).__name__, "message": str(error), "number": error.errno}
            except Exception as error:
                found = {"untyped": type(error).__name__, "message": str(error)}
            self.calm()
            return found

        def clean() -> dict[str, Any]:
            try:
                return {"answer": text_of(operation())}
            except Exception as error:
                return {"answer": f"{type(error).__name__}: {error}"}

        def whole() -> dict[str, Any]:
            return {"problem": self.operations.problem(name)}

        before = state_of(self.operations.root)
        found = in_child(faulty)
        if fault == "a flipped bit" and name in UNKNOWN_BITS and found.get("answer", right) != right:
            found["problem"] = in_child(whole).get("problem", "died")
            self.operations.clear()
        elif state_of(self.operations.root) == before:
            return {**found, "after": right}
        after = in_child(clean)
        return {**found, "after": after.get("answer", after)}

    def all(self, name: str, operation: Operation, sample: int | None, faults: list[str]) -> list[dict[str, Any]]:
        """The trials of an operation: of every call, or of a sample, with every one of `faults`."""
        self.operations.clear()
        undisturbed = self.outcome(name, operation, -1, "EIO once", "")
        if "answer" not in undisturbed:
            raise RuntimeError(f"{name} fails without faults: {undisturbed}")
        for module in undisturbed["modules"]:  # what it imports late, so that the next children need not
            with contextlib.suppress(Exception):
                importlib.import_module(module)
        right, calls = undisturbed["answer"], undisturbed["calls"]
        if name == "serve":
            self.operations.right = right
        points = [(first, fault) for first in range(calls) for fault in faults]
        if sample is not None:
            points = random.Random(0).sample(points, min(sample, len(points)))
        print(f"{name}: {calls} calls, {len(points)} trials", file=sys.stderr, flush=True)
        trials = []
        for first, fault in points:
            self.operations.clear()
            outcome = self.outcome(name, operation, first, fault, right)
            found = {"operation": name, "fault": fault, "call": first, **outcome}
            trials.append({**found, "verdict": verdict(found, right)})
            if trials[-1]["verdict"] not in GOOD:
                print(json.dumps(trials[-1]), file=sys.stderr, flush=True)
            if len(trials) % 100 == 0:
                print(f"{name}: {len(trials)}", file=sys.stderr, flush=True)
        return trials


def text_of(answer: str | Callable[[], str]) -> str:
    return answer if isinstance(answer, str) else answer()


def verdict(found: dict[str, Any], right: str) -> str:
    """Whether a trial ended well ("right", "error") or how it did not."""
    if "hangs" in found or "died" in found or "untyped" in found:
        return next(key for key in ("hangs", "died", "untyped") if key in found)
    if found["after"] != right:
        return "wrong afterwards"
    if "error" in found:
        return "error"
    if found["answer"] == right:
        return "right"
    if "problem" in found:
        return "other" if found["problem"] is None else "not whole"
    return "error" if found["operation"] == "verify" else "wrong"  # `verify` answers with what it finds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--sample", type=int, help="trials of an operation (default: all)")
    parser.add_argument("--all", action="store_true", help="print every trial, not only those that ended badly")
    parser.add_argument("--only", nargs="*", help="operations")
    parser.add_argument("--fault", nargs="*", default=list(FAULTS), choices=FAULTS, help="default: all")
    parser.add_argument("--shim", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--root", type=Path, help="a folder with `Operations.lay_down`'s files (default: made anew)")
    args = parser.parse_args()
    if args.shim is None:
        with tempfile.TemporaryDirectory() as folder:
            shim, root = build_shim(Path(folder)), args.root or Path(folder) / "files"
            root.mkdir(exist_ok=True)
            environment = {**os.environ, "LD_PRELOAD": str(shim), "FAULT_PREFIX": str(root)}
            again = [sys.executable, __file__, *sys.argv[1:], "--shim", str(shim), "--root", str(root)]
            return subprocess.run(again, env=environment, check=False).returncode
    os.environ.pop("LD_PRELOAD")  # not for the children's children
    trials = Trials(Operations(args.root), args.shim)
    operations = trials.operations
    operations.calm = trials.calm
    chosen = {name: each for name, each in operations.names().items() if not args.only or name in args.only}
    if not operations.model.exists():
        elsewhere(operations.lay_down)
    operations.load(chosen)
    rows: list[dict[str, Any]] = []
    for name, operation in chosen.items():
        with contextlib.redirect_stdout(sys.stderr):
            rows += trials.all(name, operation, args.sample, args.fault)
    bad = [row for row in rows if row["verdict"] not in GOOD]
    for row in rows if args.all else ():
        print(json.dumps(row), file=sys.stderr)
    counts = Counter((row["operation"], row["fault"], row["verdict"]) for row in rows)
    table = [[*key, count] for key, count in sorted(counts.items())]
    print(json.dumps({"trials": len(rows), "bad": len(bad), "table": table, "arguments": sys.argv[1:-4]}))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
