"""E1: what a token costs with its reads before its compute, and behind it: threads and io_uring, by request size.

    python bench/io/overlap.py build PROGRAM                   compiles bench/io/overlap.cpp with the core's own sources
    python bench/io/overlap.py file FILE [--size 12GiB]           writes the file that is read
    PROGRAM FILE ROUNDS > ROUNDS.jsonl                         measures
    python bench/io/overlap.py table ROUNDS.jsonl [--json OUT]    medians and quartiles

bench/io/overlap.cpp says what is measured. `table` takes the rounds of several runs together and ends with one JSON
document. The file repeats 64 MiB of random bytes, so that the checksums of all its rows are known.
"""

import argparse
import json
import mmap
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from flashllm.base.units import parse_size

CSRC = Path(__file__).parents[2] / "flashllm" / "csrc"
BLOCK_NBYTES = 64 << 20
READS_NBYTES = 32 * 393 * 16384  # a token's, by bench/io/overlap.cpp


def build(program: Path) -> None:
    """Compiles the core's sources and the benchmark, optimised, for x86-64."""
    sources = [path for path in sorted(CSRC.rglob("*.cpp")) if path.parent.name != "bind"]
    lines = (CSRC / "flags.txt").read_text(encoding="utf-8").splitlines()
    core = {name: flags.split() for name, flags in (line.split(": ") for line in lines if line and line[0] != "#")}
    command = ["g++", "-std=c++17", "-O3", *core["all"], f"-I{CSRC}"]
    with tempfile.TemporaryDirectory() as folder:
        objects = []
        for source in [*sources, Path(__file__).with_suffix(".cpp")]:
            objects.append(f"{folder}/{source.stem}.o")
            flags = core.get(source.relative_to(CSRC).as_posix(), []) if CSRC in source.parents else []
            subprocess.run([*command, *flags, "-c", str(source), "-o", objects[-1]], check=True)
        subprocess.run(["g++", *objects, "-o", str(program), "-pthread"], check=True)


def write_file(path: Path, nbytes: int) -> None:
    """Whole blocks, past the page cache, so that nothing of them is in it afterwards."""
    with mmap.mmap(-1, BLOCK_NBYTES) as block:
        block.write(os.urandom(BLOCK_NBYTES))
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o644)
        try:
            for _ in range(max(1, nbytes // BLOCK_NBYTES)):
                os.write(descriptor, block)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def summarise(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a variant: median and quartiles of a token's milliseconds."""
    variants: dict[tuple[str, int, float], list[float]] = {}
    for row in rounds:
        variants.setdefault((row["backend"], row["size"], row["recall"]), []).append(row["token_ms"])
    result = []
    for (backend, size, recall), times in variants.items():
        low, median, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
        result.append(
            {
                "backend": backend,
                "size": size,
                "recall": recall,
                "token_ms": round(median, 1),
                "quartiles": [round(low, 1), round(high, 1)],
                "rounds": len(times),
            }
        )
    return result


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a line a size and backend; reads alone in GB/s too."""
    by = {(row["backend"], row["size"], row["recall"]): row for row in rows}

    def cell(backend: str, size: int, recall: float) -> str:
        row = by[backend, size, recall]
        return f"{row['token_ms']:.0f} ({row['quartiles'][0]:.0f}–{row['quartiles'][1]:.0f})"

    lines = [
        f"Products alone: {cell('none', 0, -2.0)} ms a token. Median (quartiles) of {rows[0]['rounds']} rounds, ms:",
        "",
        "| reads of | backend | reads alone | GB/s | serial | recall 0.5 | 0.7 | 0.9 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for size in sorted({row["size"] for row in rows} - {0}):
        for backend in dict.fromkeys(row["backend"] for row in rows if row["size"] == size):
            rate = READS_NBYTES / by[backend, size, -1.0]["token_ms"] / 1e6
            cells = [cell(backend, size, recall) for recall in (0.0, 0.5, 0.7, 0.9)]
            lines.append(
                f"| {size >> 10} KiB | {backend} | {cell(backend, size, -1.0)} | {rate:.2f} | {' | '.join(cells)} |"
            )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    commands = parser.add_subparsers(dest="command", required=True)
    builder = commands.add_parser("build")
    builder.add_argument("program", type=Path)
    writer = commands.add_parser("file")
    writer.add_argument("file", type=Path)
    writer.add_argument("--size", type=parse_size, default=parse_size("12GiB"))
    reporter = commands.add_parser("table")
    reporter.add_argument("rounds", type=Path)
    reporter.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    if args.command == "build":
        build(args.program)
    elif args.command == "file":
        write_file(args.file, args.size)
    else:
        rows = summarise([json.loads(line) for line in args.rounds.read_text().splitlines()])
        print(table(rows))
        document = {
            "benchmark": "overlap",
            "conditions": {
                "cores": os.cpu_count(),
                "kernel": platform.release(),
                "reads_nbytes": READS_NBYTES,
                "products_nbytes": 32 * 4 * 4096 * 4096 * 2,
            },
            "results": rows,
        }
        if args.json:
            args.json.write_text(json.dumps(document, indent=1) + "\n")
        print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
