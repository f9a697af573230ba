"""An io_uring that says of a read what is not so: a completion that belongs to another read or to none, one that comes
twice, another length, an error. The right bytes, checked, or one typed error; then a new reader reads on.

    python tests/faults/completions.py --trials 2000

Each trial is a batch of 64 reads, of which one to four in a row are told wrong. A read whose own completion never came
counts as one that never ends, after 50 ms instead of a minute. The last line is one JSON document.
"""

import argparse
import errno
import json
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
import core_testing  # noqa: F401 - first: it puts _core_testing in _core's place
import numpy as np

from flashllm import _core
from flashllm.errors import FlashError

ROW = 4096
NUM_ROWS = 512
READS = 64
DEPTH = 8
PATIENCE_MS = 50
ERRORS = (errno.EIO, errno.EINTR, errno.EAGAIN, errno.EBADF, errno.EINVAL, errno.ECANCELED, errno.ENOMEM, 4095)
KINDS = ("a wrong user_data", "a longer read", "a shorter read", "an error", "an error for ever", "two of one read")


def fault(kind: str, rng: random.Random) -> tuple[str, int, int]:
    """(kind, calls in a row, argument) as `_core.distort_completions` takes them."""
    match kind:
        case "a wrong user_data":
            return "id", rng.randint(1, 4), 1 << rng.randrange(62)
        case "a longer read":
            return "length", rng.randint(1, 4), rng.choice((1, 512, ROW, 1 << 20, 1 << 40))
        case "a shorter read":
            return "length", rng.randint(1, 4), -rng.choice((1, 100, 512, 1000, ROW - 1, ROW, 1 << 20))
        case "an error":
            return "error", rng.randint(1, 2), rng.choice(ERRORS)
        case "an error for ever":
            return "error", 1 << 60, rng.choice(ERRORS)
    return "twice", rng.randint(1, 4), 0


class Trials:
    """Batches of reads of one file, whose bytes are in memory too."""

    def __init__(self, path: Path, rows: Any) -> None:
        self.rows, self.sums = rows, _core.xxh3_64_rows(rows)
        self.file = _core.DirectFile(str(path))

    def read(self, reader: Any, rng: random.Random) -> bool:
        """Whether a batch of random reads gave the right bytes."""
        memory = _core.allocate(READS * ROW)
        memory[:] = 0xA5
        batch, first = _core.ReadBatch(reader, self.file), [rng.randrange(NUM_ROWS) for _ in range(READS)]
        for at, row in enumerate(first):
            batch.add(row * ROW, memory[at * ROW : (at + 1) * ROW], self.sums[row : row + 1], ROW)
        batch.submit()
        batch.wait()
        return bool(np.array_equal(memory.reshape(READS, ROW), self.rows[first]))

    def trial(self, kind: str, rng: random.Random) -> str:
        name, count, argument = fault(kind, rng)
        reader = _core.Reader(1, backend="io_uring", queue_depth=DEPTH, patience_ms=PATIENCE_MS)
        _core.distort_completions(name, rng.randrange(READS), count, argument)
        try:
            result = "right" if self.read(reader, rng) else "wrong"
        except FlashError as error:
            result = "error" if str(self.file.path) in str(error) else "unnamed"
        finally:
            _core.distort_completions("error", 0, 0)
        clean = _core.Reader(1, backend="io_uring", queue_depth=DEPTH)
        return result if self.read(clean, rng) else "wrong afterwards"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--trials", type=int, default=2000, help="of all kinds together")
    parser.add_argument("--folder", type=Path, help="where the file is made (default: the temporary folder)")
    args = parser.parse_args(argv)
    if _core.Reader(1, backend="auto", queue_depth=1).backend != "io_uring":
        print(json.dumps({"bad": 0, "table": [], "skipped": "no io_uring here"}))
        return 0
    rows = np.random.default_rng(0).integers(0, 256, (NUM_ROWS, ROW), dtype=np.uint8)
    table, each = [], -(-args.trials // len(KINDS))
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path = Path(folder) / "rows.bin"
        rows.tofile(path)
        trials = Trials(path, rows)
        for kind in KINDS:
            results = Counter(trials.trial(kind, random.Random(f"{kind} {number}")) for number in range(each))
            table.append({"fault": f"io_uring tells of {kind}", "tried": each,
                          "survived": results["right"] + results["error"], **results})  # fmt: skip
            print(json.dumps(table[-1]), file=sys.stderr, flush=True)
    bad = sum(row["tried"] - row["survived"] for row in table)
    print(json.dumps({"bad": bad, "table": table, "arguments": sys.argv[1:]}))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
