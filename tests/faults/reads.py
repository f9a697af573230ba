"""Random direct reads, of which one in a thousand system calls misbehaves, against the same bytes in memory.

    python tests/faults/reads.py --reads 1000000      both backends, half of the reads each

A batch of reads gives the right bytes or one typed error; none is lost, none hangs. Faults: an error once or again and
again, an interruption, a file that is not ready, a short read, an end that is none, a flipped bit. The last line is one
JSON document.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
import core_testing  # noqa: F401 - first: it puts _core_testing in _core's place
import numpy as np

from flashllm import _core
from flashllm.errors import ChecksumError, FlashError, FlashIOError, FormatError

ROW = 4096
NUM_ROWS = 4096
BATCH = 64  # reads
TYPED = (ChecksumError, FormatError, FlashIOError)


def trial(backend: str, reads: int, *, one_in: int, path: Path, rows: Any, seed: int) -> Counter[str]:
    """`reads` reads in batches of up to BATCH, two under way at a time. What came of the batches, by name."""
    sums = _core.xxh3_64_rows(rows)
    reader = _core.Reader(16, max_gap=2 * ROW, max_request=1 << 16, backend=backend, queue_depth=16)
    file = _core.DirectFile(str(path), True)
    file.inject("random", seed, argument=one_in)
    rng, counts = random.Random(seed), Counter[str]()
    memory = [_core.allocate(BATCH * 4 * ROW) for _ in range(2)]
    under_way: list[tuple[Any, list[tuple[int, int, Any]]]] = []

    def submit() -> None:
        buffer = memory[counts["batches"] % 2]
        batch, jobs, used = _core.ReadBatch(reader, file), [], 0
        for _ in range(min(rng.randint(1, BATCH), reads - counts["reads"])):
            count = rng.choice((1, 1, 1, 2, 4))
            first = rng.randrange(NUM_ROWS - count)
            destination = buffer[used : used + count * ROW]
            used += count * ROW
            batch.add(first * ROW, destination, np.ascontiguousarray(sums[first : first + count]), ROW)
            jobs.append((first, count, destination))
            counts["reads"] += 1
        buffer[:used] = 0xA5
        batch.submit()
        counts["batches"] += 1
        under_way.append((batch, jobs))

    def take() -> None:
        batch, jobs = under_way.pop(0)
        try:
            counts["retries"] += batch.wait()["retries"]
        except FlashError as error:
            counts[type(error).__name__] += 1
            counts["unnamed"] += str(path) not in str(error)
            counts["untyped"] += type(error) not in TYPED
            return
        for first, count, destination in jobs:
            if not np.array_equal(destination, rows[first : first + count].reshape(-1)):
                counts["wrong"] += 1
        counts["right"] += 1

    while counts["reads"] < reads:
        submit()
        if len(under_way) == 2:
            take()
    while under_way:
        take()
    counts["direct"] = int(file.direct)
    return counts


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--reads", type=int, default=1_000_000)
    parser.add_argument("--one-in", type=int, default=1000, help="system calls of which one misbehaves")
    parser.add_argument("--folder", type=Path, help="where the file is made (default: the temporary folder)")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    backends = ["threads"]
    if _core.Reader(1, backend="auto", queue_depth=1).backend == "io_uring":
        backends.append("io_uring")
    rows = np.random.default_rng(args.seed).integers(0, 256, (NUM_ROWS, ROW), dtype=np.uint8)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path = Path(folder) / "rows.bin"
        rows.tofile(path)
        for backend in backends:
            began = time.monotonic()
            counts = trial(
                backend, args.reads // len(backends), one_in=args.one_in, path=path, rows=rows, seed=args.seed
            )
            results.append({"backend": backend, **counts, "seconds": round(time.monotonic() - began, 1)})
    bad = sum(each.get(key, 0) for each in results for key in ("wrong", "unnamed", "untyped"))
    table = [
        {"fault": f"1 in {args.one_in} reads misbehaves, {each['backend']}", "tried": each["reads"],
         "survived": each["reads"] - each.get("wrong", 0)}
        for each in results
    ]  # fmt: skip
    print(json.dumps({"bad": bad, "runs": results, "table": table}))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
