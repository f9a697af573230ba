"""Mutated files and requests against the parsers that meet them first: accepted, or refused by one typed error within a
second that names the file; nothing dies, hangs, or takes memory for what a number in a small file says.

    python tests/faults/mutations.py --each 10000            so many of every kind, in one process
    python tests/faults/mutations.py --command 500           so many model directories through `flashllm inspect`

Mutations are of bytes, of JSON tokens (numbers to extremes, values to other types), and of lengths; those of a model
directory get the right hashes, as whoever makes one on purpose writes them. The last line is one JSON document.
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from kinds import Kind
from operations import BUG
from written import every_kind

from flashllm.api.fields import BadRequest
from flashllm.cli import main as main_of_flashllm
from flashllm.convert.checkpoint import pickled
from flashllm.convert.checkpoint.child import ask_child
from flashllm.errors import FlashError
from flashllm.format.manifest import MANIFEST

SLOW_S = 1.0  # of the processor
STUCK_S = 600.0  # by the clock
MOST_MEMORY = 256 << 20  # bytes, more than before the first trial
HEADER = 6000  # bytes of a binary file in which nearly all mutations are
EXTREMES = [
    "-1", "0", "1", "2", "255", "65536", "2147483648", "4294967296", "9223372036854775807", "18446744073709551616",
    "1e400", "-0.0", "0.5", "1e-320", "NaN", "Infinity", "null", "true", "[]", "{}", '""', '"x"', '"\\ud800"',
    "[[[[]]]]",
    "9" * 400, '"' + "A" * 5000 + '"',
]  # fmt: skip
TOKEN = re.compile(rb'-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|"(?:[^"\\]|\\.)*"|true|false|null')


class TooSlow(BaseException):
    """Raised by the alarm."""


def mutated(base: bytes, rng: random.Random, *, is_json: bool) -> bytes:
    """One to four changes of `base`."""
    raw = bytearray(base)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        end = max(1, len(raw) if is_json else min(len(raw), HEADER))
        at = rng.randrange(end)
        tokens = list(TOKEN.finditer(bytes(raw[:HEADER]))) if rng.random() < (0.6 if is_json else 0.3) else []
        if tokens:
            token = rng.choice(tokens)
            raw[token.start() : token.end()] = rng.choice(EXTREMES).encode()
            continue
        match rng.randrange(7):
            case 0:
                raw[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                raw[at : at + 8] = rng.choice((0, 1, 2**31, 2**32, 2**63, 2**64 - 1)).to_bytes(8, "little")
            case 2:
                del raw[at : at + rng.randrange(1, 40)]
            case 3:
                raw[at:at] = bytes(rng.choices(b'0123456789{}[]",:- x\xff\0', k=rng.randrange(1, 20)))
            case 4:
                raw[at:at] = raw[at : at + rng.randrange(1, 200)]
            case 5:
                del raw[rng.randrange(len(raw) + 1) :]
            case _:
                raw[at] ^= 1 << rng.randrange(8)
        if not raw:
            raw = bytearray(b"\0")
    return bytes(raw)


@contextlib.contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """TooSlow after so much of the processor's time, or where nothing happens; where Python looks at signals."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise TooSlow

    before = [signal.signal(number, ring) for number in (signal.SIGPROF, signal.SIGALRM)]
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, STUCK_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in zip((signal.SIGPROF, signal.SIGALRM), before, strict=True):
            signal.signal(number, handler)


def judged(kind: Kind, raw: bytes) -> tuple[str, str]:
    """What comes of one input, and the message."""
    try:
        kind.use(raw)
    except (FlashError, BadRequest) as error:
        said = str(error)
        named = not kind.names or any(part in said for part in kind.names.split("|"))
        return "refused" if named and BUG not in said else "unnamed", said
    except TooSlow:
        raise
    except BaseException as error:  # a panic of a library is none of Exception
        return "untyped", f"{type(error).__name__}: {error}"
    return "accepted", ""


def verdict(kind: Kind, raw: bytes) -> tuple[str, str]:
    """As `judged`, with "slow" and "hangs"."""
    began = time.process_time()  # the machine has other work
    try:
        with alarm(5 * SLOW_S):
            result, said = judged(kind, raw)
    except TooSlow:
        result, said = "hangs", ""
    if result != "hangs" and time.process_time() - began > SLOW_S:
        result = "slow"
    return result, said[:300]


def memory_nbytes(name: str) -> int:
    """What this process holds ("VmRSS"), or the most since `forget_peak` ("VmHWM")."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{name}:")[1].split()[0]) * 1024


def forget_peak() -> None:
    """VmHWM begins anew."""
    Path("/proc/self/clear_refs").write_text("5")


GOOD = ("accepted", "refused")


def sweep(kinds: dict[str, Kind], each: int, seed: int, keep: Path | None) -> dict[str, Any]:
    """`each` mutations of every kind: counts, and the first bad ones."""
    table, problems = [], []
    for name, kind in kinds.items():
        for _ in range(2):  # what is imported on first use is not the input's
            assert verdict(kind, kind.base)[0] in ("accepted", "slow"), (name, verdict(kind, kind.base))
        forget_peak()
        before, counts = memory_nbytes("VmRSS"), Counter[str]()
        for number in range(each):
            raw = mutated(kind.base, random.Random(f"{seed} {name} {number}"), is_json=kind.is_json)
            result, said = verdict(kind, raw)
            counts[result] += 1
            if result not in GOOD and counts[result] <= 3:
                problems.append({"kind": name, "number": number, "result": result, "said": said})
                if keep is not None:
                    (keep / f"{name.replace('/', '_')} {number}").write_bytes(raw)
        grown = max(0, memory_nbytes("VmHWM") - before)
        if grown > MOST_MEMORY:
            problems.append({"kind": name, "result": "memory", "said": f"{grown} bytes more than before"})
        good = sum(counts[key] for key in GOOD) if grown <= MOST_MEMORY else 0
        table.append({"fault": f"mutated {name}", "tried": each, "survived": good, **counts, "grown": grown})
        print(json.dumps(table[-1]), file=sys.stderr, flush=True)
    return {"bad": sum(row["tried"] - row["survived"] for row in table), "table": table, "problems": problems}


def flashllm(*words: object) -> tuple[int, str]:
    """The exit status of a command in a forked child, and what it says on standard error."""
    with tempfile.TemporaryFile() as said:
        pid = os.fork()
        if pid == 0:
            status = 70
            try:
                null = os.open(os.devnull, os.O_RDWR)
                for fd, into in ((0, null), (1, null), (2, said.fileno())):
                    os.dup2(into, fd)
                sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")  # a test has others
                signal.alarm(int(STUCK_S))
                pickled.ask_child = ask_child
                status = main_of_flashllm([str(word) for word in words])
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        said.seek(0)
        return status, said.read().decode("utf-8", "replace")


def through_the_command(kinds: dict[str, Kind], root: Path, count: int, seed: int) -> dict[str, Any]:
    """Mutated model directories through `flashllm inspect`, checkpoints through `convert`, each in a forked process."""
    problems: list[dict[str, Any]] = []
    names = [name for name, kind in kinds.items() if kind.source is not None]
    for number in range(count):
        rng = random.Random(f"{seed} command {number}")
        name = rng.choice(names)
        kind = kinds[name]
        with contextlib.suppress(Exception):
            kind.use(mutated(kind.base, rng, is_json=kind.is_json))
        shutil.rmtree(root / "out", ignore_errors=True)
        shutil.rmtree(root / "out.partial", ignore_errors=True)
        is_model = kind.source is not None and (kind.source / MANIFEST).exists()
        verb = ["inspect", kind.source] if is_model else ["convert", kind.source, root / "out"]
        status, said = flashllm(*verb)
        lines = said.splitlines()
        good = status == 0 or (status in (1, 2) and lines != [] and lines[-1].startswith("flashllm: error: "))
        if not good or BUG in said or "Traceback" in said:
            problems.append({"kind": name, "number": number, "status": status, "said": said[-300:]})
    row = {"fault": "mutated, through the command", "tried": count, "survived": count - len(problems)}
    return {"bad": len(problems), "table": [row], "problems": problems}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--each", type=int, default=0, help="mutations of every kind")
    parser.add_argument("--command", type=int, default=0, help="mutations that go through the command")
    parser.add_argument("--only", nargs="*", help="parts of kinds' names")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="a folder for inputs that ended badly")
    args = parser.parse_args(argv)
    if args.keep is not None:
        args.keep.mkdir(parents=True, exist_ok=True)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        kinds = every_kind(Path(folder))
        chosen = {
            name: kind for name, kind in kinds.items() if not args.only or any(part in name for part in args.only)
        }
        if args.each:
            results.append(sweep(chosen, args.each, args.seed, args.keep))
        if args.command:
            results.append(through_the_command(chosen, Path(folder), args.command, args.seed))
    merged: dict[str, Any] = {
        "bad": sum(each["bad"] for each in results),
        "table": [row for each in results for row in each["table"]],
        "problems": [problem for each in results for problem in each["problems"]],
        "arguments": sys.argv[1:],
    }
    print(json.dumps(merged))
    return 1 if merged["bad"] else 0


if __name__ == "__main__":
    sys.exit(main())
