"""Direct reads through the native reader: bytes per second by size, reads at a time and backend (paper A, figure 2b).

    python bench/io/reader.py [--directory DIR | --file FILE] [--file-size 256MiB] [--sizes 4KiB,16KiB]
                              [--threads 1,8,32] [--queue-depths 32,64] [--stream-sizes 1MiB,4MiB] [--rounds N]
                              [--out PREFIX]

Reads of `--sizes` lie at random, distinct, aligned places; those of `--stream-sizes` follow each other and are what the
roof is taken from: the fastest of them. `--threads` are reads at a time of the threads, `--queue-depths` of io_uring.
All combinations take turns in each round; a figure is the median of the rounds with its quartiles. The file lies in DIR
(default: that of temporary files; give one on the drive that matters) and should be far larger than any cache before
the drive; or it is FILE, which is left alone. Says whether reads were really direct; where they were not, the file's
pages are dropped from the page cache before each batch. The last line is one JSON document; with --out it is also
written, with a table and a picture, to PREFIX.json, .md and .png.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from flashllm import _core
from flashllm.base.units import parse_size
from flashllm.errors import FlashIOError
from flashllm.profile.reads import batch_of, file_to_read

BATCH_NBYTES = 16 << 20
LARGEST_BATCH_NBYTES = 128 << 20


@dataclass(slots=True, kw_only=True)
class Series:
    """One way to read, and what it reached in each round."""

    size: int
    backend: Literal["threads", "io_uring"]
    at_a_time: int
    sequential: bool = False
    rates: list[float] = field(default_factory=list)  # bytes per second

    def median(self) -> float:
        return statistics.median(self.rates)

    def record(self, roof: float) -> dict[str, Any]:
        low, median, high = (
            statistics.quantiles(self.rates, n=4, method="inclusive") if len(self.rates) > 1 else self.rates * 3
        )
        return {
            "size": self.size,
            "backend": self.backend,
            "at_a_time": self.at_a_time,
            "sequential": self.sequential,
            "rounds": len(self.rates),
            "bytes_per_s": round(median),
            "bytes_per_s_quartiles": [round(low), round(high)],
            "percent_of_roof": round(100 * median / roof),
        }


def measure(series: Series, file: _core.DirectFile, random: np.random.Generator, *, seconds: float) -> None:
    """One round of one series: batches for `seconds`, at least one; adds their mean rate."""
    reader = _core.Reader(
        threads=series.at_a_time,
        queue_depth=series.at_a_time,
        backend=series.backend,
        max_request=max(series.size, 4096),
    )
    size, places = series.size, file.size // series.size
    wanted = min(max(BATCH_NBYTES, 4 * series.at_a_time * size), max(LARGEST_BATCH_NBYTES, size))
    count = max(1, min(places, wanted // size))
    memory = _core.allocate(count * size)
    start = int(random.integers(places))
    spent, nbytes = 0.0, 0
    while nbytes == 0 or spent < seconds:
        if series.sequential:
            chosen = (start + np.arange(count)) % places
            start += count
        else:  # distinct, at the price of a few less; those beside each other are not merged: max_request is their size
            chosen = np.unique(random.integers(places, size=count))
        batch = batch_of(reader, file, chosen * size, size, memory)
        batch.submit()
        stats = batch.wait()
        nbytes += stats["bytes"]
        spent += stats["wall_ns"] / 1e9
    series.rates.append(nbytes / spent)


def all_series(
    sizes: Sequence[int], stream_sizes: Sequence[int], threads: Sequence[int], queue_depths: Sequence[int]
) -> list[Series]:
    return [
        Series(size=size, backend=backend, at_a_time=at_a_time, sequential=sequential)
        for sequential, chosen in ((False, sizes), (True, stream_sizes))
        for size in chosen
        for backend, numbers in (("threads", threads), ("io_uring", queue_depths))
        for at_a_time in numbers
    ]


def table(series: Sequence[Series]) -> str:
    """Markdown, MB/s: a line a size and order, a column a backend and number of reads at a time."""
    columns = list(dict.fromkeys((each.backend, each.at_a_time) for each in series))
    lines = [
        "| reads of | order | " + " | ".join(f"{backend} {number}" for backend, number in columns) + " |",
        "|---|---|" + "---|" * len(columns),
    ]
    for size, sequential in dict.fromkeys((each.size, each.sequential) for each in series):
        cells = []
        for column in columns:
            each = next(
                s for s in series if (s.size, s.sequential, s.backend, s.at_a_time) == (size, sequential, *column)
            )
            quartiles = each.record(1)["bytes_per_s_quartiles"]
            cells.append(f"{each.median() / 1e6:.0f} ({quartiles[0] / 1e6:.0f}–{quartiles[1] / 1e6:.0f})")
        order = "sequential" if sequential else "random"
        lines.append(f"| {in_binary(size)} | {order} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(series: Sequence[Series], roof: float, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for backend, number in dict.fromkeys((each.backend, each.at_a_time) for each in series):
        curve = [s for s in series if (s.backend, s.at_a_time, s.sequential) == (backend, number, False)]
        axes.plot(
            [each.size for each in curve],
            [each.median() / 1e6 for each in curve],
            marker="o" if backend == "threads" else "s",
            linestyle="-" if backend == "threads" else "--",
            label=f"{number} {'threads' if backend == 'threads' else 'in io_uring'}",
        )
    sizes = sorted({each.size for each in series if not each.sequential})
    axes.axhline(roof / 1e6, color="black", linewidth=1, label="sequential")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [in_binary(size) for size in sizes])
    axes.set(xlabel="bytes a read (random, direct)", ylabel="MB/s", ylim=(0, None))
    axes.legend()
    figure.savefig(path, dpi=120)


def in_binary(nbytes: int) -> str:
    """16384 -> 16 KiB: the unit of sectors and pages."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def byte_sizes(text: str) -> list[int]:
    return [parse_size(part) for part in text.split(",") if part]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    folder = Path(tempfile.gettempdir())
    parser.add_argument("--directory", type=Path, default=folder, help="where to put the file (default: %(default)s)")
    parser.add_argument("--file", type=Path, help="read this file instead")
    parser.add_argument("--file-size", type=parse_size, default=parse_size("256MiB"))
    parser.add_argument("--sizes", type=byte_sizes, default="4KiB,8KiB,16KiB,32KiB,64KiB")
    parser.add_argument("--stream-sizes", type=byte_sizes, default="1MiB")
    parser.add_argument("--threads", type=numbers, default="1,4,8,16,32")
    parser.add_argument("--queue-depths", type=numbers, default="32,64")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.1, help="measuring time of each figure in each round")
    parser.add_argument("--out", type=Path, help="write PREFIX.json, .md and .png")
    args = parser.parse_args(argv)
    missing = ""
    try:
        if args.queue_depths:
            _core.Reader(backend="io_uring", queue_depth=max(args.queue_depths))
    except FlashIOError as error:
        args.queue_depths, missing = [], str(error)
        print(f"without io_uring: {error}", file=sys.stderr)
    series = all_series(args.sizes, args.stream_sizes, args.threads, args.queue_depths)
    if not any(each.sequential for each in series):
        parser.error("needs a stream size and a number of threads for the roof")
    if args.file is None and not args.directory.is_dir():
        parser.error(f"{args.directory} is no folder")

    place = nullcontext(args.file) if args.file else file_to_read(args.directory, args.file_size)
    with place as path:
        file = _core.DirectFile(str(path))
        random = np.random.default_rng()
        for _ in range(args.rounds):
            for each in series:
                measure(each, file, random, seconds=args.seconds)
    roof = max(each.median() for each in series if each.sequential)
    how = "direct" if file.direct else f"NOT direct ({file.fallback_reason})"
    heading = (
        f"Reads are {how}, from a file of {in_binary(file.size)}; MB/s, median (quartiles) of {args.rounds} rounds; "
        f"roof {roof / 1e6:.0f} MB/s (the fastest sequential)."
    )
    print(heading, table(series), sep="\n\n")
    document = {
        "benchmark": "reader",
        "conditions": {
            "file_size": file.size,
            "direct": file.direct,
            "fallback_reason": file.fallback_reason,
            "without_io_uring": missing,
            "cores": os.cpu_count(),
            "kernel": platform.release(),
            "load_average": os.getloadavg()[0],
        },
        "sequential_bytes_per_s": round(roof),
        "results": [each.record(roof) for each in series],
    }
    if args.out:
        args.out.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(f"# Reader curve\n\n{heading}\n\n{table(series)}\n")
        plot(series, roof, args.out.with_suffix(".png"))
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
