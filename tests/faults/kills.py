"""Processes that die before, or in the middle of, every change they make to the disk; then the power fails.

    python tests/faults/kills.py                every change of every operation
    python tests/faults/kills.py --sample 20    some of them

The shim (shim.c) kills a forked child at its n-th change and keeps a list of those before. Two things may be on the
disk afterwards: all of it, or what the list says was forced there. For the latter, bytes written after a file's last
fsync become zeros, and names made or changed after their folder's last fsync are as they were. Either way the target
must be absent or whole, and the same work done again must give the bytes of an undisturbed run. The last line is one
JSON document.
"""

import argparse
import ctypes
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from harness import build_shim
from operations import Operations, tree_hash

NEVER = -1
LIMIT_S = 900  # of the clock; the machine may be stopped meanwhile


@dataclass(frozen=True)
class Change:
    """A line of the shim's list."""

    what: str
    path: Path
    to: Path
    at: int
    nbytes: int


def read_changes(log: Path) -> list[Change]:
    """The changes that were begun, in their order."""
    changes = []
    for line in log.read_text().splitlines():
        what, path, to, at, nbytes = line.split("\t")
        changes.append(Change(what, Path(path), Path(to), int(at), int(nbytes)))
    return changes


@dataclass
class _File:
    """What of a file is not on the disk for certain."""

    unsynced: list[tuple[int, int]] = field(default_factory=list)


def lose_cache(changes: list[Change], old: Path) -> int:
    """Make of the files what a power cut may leave; how many changes were lost.

    Names are undone where their folder's fsync has not followed, the last one first. `old`: the folder with the files
    that were replaced or deleted, by their change's number.
    """
    lost = 0
    # 1. Contents: by the name that a file has now.
    files: dict[Path, _File] = {}
    for change in changes:
        file = files.setdefault(change.path, _File())
        match change.what:
            case "write":
                file.unsynced.append((change.at, change.nbytes))
            case "fsync":
                file.unsynced.clear()
            case "rename":
                inside = [path for path in files if path == change.path or change.path in path.parents]
                for path in inside:
                    files[change.to / path.relative_to(change.path)] = files.pop(path)
            case "unlink":
                files.pop(change.path, None)
    for path, file in files.items():
        if path.is_file():
            with path.open("r+b") as opened:
                for at, nbytes in file.unsynced:
                    opened.seek(at)
                    opened.write(bytes(nbytes))
                    lost += 1
    # 2. Names.
    for index in range(len(changes) - 1, -1, -1):
        change = changes[index]
        folder = change.path.parent
        if any(later.what == "fsync" and later.path == folder for later in changes[index + 1 :]):
            continue
        match change.what:
            case "rename" if change.to.exists() and not change.path.exists():
                change.to.rename(change.path)
                if change.at >= 0:
                    os.link(old / str(change.at), change.to)
                lost += 1
            case "unlink" if change.at >= 0 and not change.path.exists() and folder.is_dir():
                os.link(old / str(change.at), change.path)
                lost += 1
            case "create" if change.path.is_file():
                change.path.unlink()
                lost += 1
            case "mkdir" if change.path.is_dir():
                shutil.rmtree(change.path)
                lost += 1
    return lost


@dataclass(frozen=True)
class Operation:
    """Work that changes the disk."""

    run: Callable[[], None]
    result: Callable[[], str]  # once it is done
    whole: Callable[[], str | None]  # what is wrong with the target; None: it is absent, or whole
    clear: Callable[[], None]


def make_operations(root: Path) -> dict[str, Operation]:
    """Conversion, predictors put into a model, a batch job, training."""
    works = Operations(root)
    if not works.model.exists():
        works.lay_down()
    works.load(["train", "offload run"])
    from flashllm.format.install import install_predictors
    from flashllm.format.manifest import open_model_dir
    from flashllm.format.report.verify import verify

    model, out = root / "mutable", root / "out.jsonl"

    def whole(path: Path) -> str | None:
        if not path.exists():
            return None
        report = verify(path)
        return None if report.ok else "; ".join(each.message for each in report.problems)

    def loads(path: Path) -> None:
        """It loads, with predictors or without."""
        open_model_dir(path)

    def clear() -> None:
        works.clear()
        shutil.rmtree(model, ignore_errors=True)
        shutil.copytree(works.without, model)

    def job_answers() -> str:
        values = [json.loads(line) for line in out.read_text().splitlines()]
        return json.dumps(sorted((value["custom_id"], value["text"]) for value in values))

    def job_problem() -> None:
        """Every line but a torn last one is an answer."""
        for line in out.read_bytes().split(b"\n")[:-1] if out.exists() else ():
            if line.strip(b"\0"):
                json.loads(line)

    converted, training = root / "converted", works.training
    return {
        "convert": Operation(works.convert, lambda: tree_hash(converted), lambda: whole(converted), clear),
        "predictors": Operation(
            lambda: install_predictors(model, root / "exact.safetensors"),
            lambda: (tree_hash(model), whole(model))[0],
            lambda: loads(model),
            clear,
        ),
        "offload run": Operation(works.offload_run, job_answers, job_problem, clear),
        "train": Operation(works.train, lambda: tree_hash(training), lambda: loads(training), clear),
    }


class Shim:
    """The preloaded library."""

    def __init__(self, path: Path, log: Path, old: Path) -> None:
        """`log`: the file for the list of changes; `old`: as in `lose_cache`."""
        self._library, self._log, self.old = ctypes.CDLL(str(path)), log, old
        self._library.fault_changes.restype = ctypes.c_long
        self._library.fault_kill.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_int]

    def run(self, work: Callable[[], None], at: int, *, torn: bool = False) -> tuple[int, list[Change]]:
        """Do `work` in a child that dies at change number `at`. Its exit status, and its changes."""
        shutil.rmtree(self.old, ignore_errors=True)
        self.old.mkdir()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, 1)
                if at != NEVER:
                    os.dup2(null, 2)
                signal.alarm(LIMIT_S)
                self._library.fault_kill(at, int(torn), os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
                work()
                status = 0
            finally:
                os._exit(status)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), read_changes(self._log)


def trial(shim: Shim, operation: Operation, at: int, kind: str, right: str) -> tuple[str, int]:
    """One death, and what the work came to when it was done again: "whole", or what is wrong; changes lost."""
    operation.clear()
    status, changes = shim.run(operation.run, at, torn=kind != "before")
    if status != -signal.SIGKILL:
        return f"ended with status {status}", 0
    lost = lose_cache(changes, shim.old) if kind == "lost cache" else 0
    try:
        problem = operation.whole()
        if problem is not None:
            return f"neither absent nor whole: {problem}", lost
    except Exception as error:
        return f"afterwards: {type(error).__name__}: {error}", lost
    status, _ = shim.run(operation.run, NEVER)
    if status != 0:
        return f"done again, it ends with status {status}", lost
    return ("whole" if operation.result() == right else "done again, it gives something else"), lost


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--sample", type=int, help="deaths of an operation (default: all)")
    parser.add_argument("--only", nargs="*", help="operations")
    parser.add_argument("--folder", type=Path, help="where files are made (default: the temporary folder)")
    parser.add_argument("--shim", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--root", type=Path, help="a folder with `Operations.lay_down`'s files (default: made anew)")
    args = parser.parse_args(argv)
    if args.shim is None:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            shim, root = build_shim(Path(folder)), args.root or Path(folder) / "files"
            root.mkdir(exist_ok=True)
            environment = {
                **os.environ,
                "LD_PRELOAD": str(shim),
                "FAULT_PREFIX": str(root),
                "FAULT_OLD": f"{folder}/old",
            }
            again = [sys.executable, __file__, *sys.argv[1:], "--shim", str(shim), "--root", str(root)]
            return subprocess.run(again, env=environment, check=False).returncode
    os.environ.pop("LD_PRELOAD")
    shim = Shim(args.shim, args.shim.parent / "changes", args.shim.parent / "old")
    table, problems = [], []
    for name, operation in make_operations(args.root).items():
        if args.only and name not in args.only:
            continue
        operation.clear()
        status, changes = shim.run(operation.run, NEVER)
        if status != 0:
            raise RuntimeError(f"{name} fails without a death: status {status}")
        right = operation.result()
        for kind in ("before", "in the middle", "lost cache"):
            points = list(range(len(changes)))
            if args.sample is not None:
                points = sorted(random.Random(f"{name} {kind}").sample(points, min(args.sample, len(points))))
            results, lost = Counter[str](), 0
            for at in points:
                result, undone = trial(shim, operation, at, kind, right)
                lost += undone
                results["whole" if result == "whole" else "bad"] += 1
                if result != "whole":
                    problems.append({"operation": name, "kind": kind, "change": at, "was": changes[at].what,
                                     "of": changes[at].path.name, "result": result[:300]})  # fmt: skip
            table.append(
                {"fault": f"{name} dies at a change, {kind}", "tried": len(points),
                 "survived": results["whole"], "changes_lost": lost}
            )  # fmt: skip
            print(json.dumps(table[-1]), file=sys.stderr, flush=True)
    print(json.dumps({"bad": len(problems), "table": table, "problems": problems, "arguments": sys.argv[1:-4]}))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
