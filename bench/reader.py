"""Random direct reads through the native reader: bytes per second by read size and number of threads.

    python bench/reader.py [--directory DIR] [--file-size 256MiB] [--sizes 4KiB,16KiB] [--threads 1,8,32] [--seconds S]

Each figure is the median of several batches of random, distinct, aligned reads, after sequential reads of 1 MiB as the
roof. The file lies in DIR (default: a temporary directory; give one on the drive that matters). Says whether reads
were really direct; where they were not, the file's pages are dropped from the page cache before each batch. The last
line is one JSON document.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from flashllm import _core
from flashllm.units import format_size, parse_size

BATCH_NBYTES = 16 << 20
SEQUENTIAL_NBYTES = 1 << 20
WRITE_NBYTES = 8 << 20


def write_file(path: Path, nbytes: int) -> None:
    """Random bytes, on the drive and out of the page cache when this returns."""
    random = np.random.default_rng(0)
    with path.open("wb") as file:
        for start in range(0, nbytes, WRITE_NBYTES):
            file.write(random.bytes(min(WRITE_NBYTES, nbytes - start)))
        file.flush()
        os.fsync(file.fileno())
    drop_cache(path)


def drop_cache(path: Path) -> None:
    """Takes the file's pages out of the page cache, where the system offers that."""
    if hasattr(os, "posix_fadvise"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measure(path: Path, *, size: int, threads: int, seconds: float, sequential: bool = False) -> dict[str, Any]:
    """One figure: reads of `size` bytes, as many a batch as BATCH_NBYTES or the file hold."""
    file, reader = _core.DirectFile(str(path)), _core.Reader(threads=threads, max_request=max(size, 4096))
    places = file.size // size
    count = max(1, min(places, BATCH_NBYTES // size))
    memory = _core.allocate(count * size).reshape(count, size)
    random = np.random.default_rng(threads)
    rates: list[float] = []
    spent, start = 0.0, 0
    while len(rates) < 3 or spent < seconds:
        if not file.direct:
            drop_cache(path)
        chosen = (start + np.arange(count)) % places if sequential else random.choice(places, count, replace=False)
        start += count
        batch = _core.ReadBatch(reader, file)
        for place, destination in zip(chosen.tolist(), memory, strict=True):
            batch.add(place * size, destination)
        batch.submit()
        stats = batch.wait()
        rates.append(stats["bytes"] / stats["wall_ns"] * 1e9)
        spent += stats["wall_ns"] / 1e9
    low, median, high = statistics.quantiles(rates, n=4)
    return {
        "size": size,
        "threads": threads,
        "batches": len(rates),
        "bytes_per_s": round(median),
        "bytes_per_s_quartiles": [round(low), round(high)],
        "direct": file.direct,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--directory", type=Path, help="where to put the file (default: a temporary directory)")
    parser.add_argument("--file-size", type=parse_size, default=parse_size("256MiB"))
    parser.add_argument("--sizes", default="4KiB,8KiB,16KiB,32KiB,64KiB")
    parser.add_argument("--threads", default="1,4,8,16,32")
    parser.add_argument("--seconds", type=float, default=0.3, help="measuring time of each figure")
    args = parser.parse_args(argv)
    sizes = [parse_size(text) for text in args.sizes.split(",")]
    threads = [int(text) for text in args.threads.split(",")]
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        path = Path(folder) / "reads"
        write_file(path, args.file_size)
        file = _core.DirectFile(str(path))
        how = "direct" if file.direct else f"NOT direct ({file.fallback_reason})"
        roof = measure(path, size=SEQUENTIAL_NBYTES, threads=32, seconds=args.seconds, sequential=True)
        print(f"reads are {how}; roof: {roof['bytes_per_s'] / 1e6:.0f} MB/s sequential; {os.getloadavg()[0]:.1f} load")
        results = []
        for size in sizes:
            for count in threads:
                result = measure(path, size=size, threads=count, seconds=args.seconds)
                result["percent_of_roof"] = round(100 * result["bytes_per_s"] / roof["bytes_per_s"])
                results.append(result)
                print(
                    f"{format_size(size):>8} x {count:>2} threads {result['bytes_per_s'] / 1e6:8.1f} MB/s, "
                    f"{result['percent_of_roof']} % of sequential"
                )
    document = {
        "benchmark": "reader",
        "file_size": args.file_size,
        "direct": file.direct,
        "fallback_reason": file.fallback_reason,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "sequential": roof,
        "results": results,
    }
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
