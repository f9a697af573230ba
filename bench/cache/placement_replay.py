"""What an order of the neurons on flash, learned on one trace, saves in read requests on another.

The misses are those that the engine's cache policy leaves. Misses that are neighbours on flash are one request, and so
are those apart by at most a gap, which is read as well. The cost of a token's reads is requests times --request-us plus
bytes times --kib-us, the line through the reader's curve. Orders: the original one, a random one, by popularity, and
flashllm/convert/placement.py's (the hot set apart, then a path through the co-activation graph). "Closest friend" is
the paper's negative result (paper A, appendix D): each row also holds the neuron's most co-activated friend, twice the
bytes. "Units" are 2 or 4 neighbours of the best order as one row: read, cached and dropped together, in a cache of as
many bytes. The last line of standard output is one JSON document.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from cache_replay import WARM_UP, read_active, split_rows
from numpy.typing import NDArray
from replay import Activity, Ids, misses_of

from flashllm.base.units import parse_size
from flashllm.convert.placement import place
from flashllm.format.trace import unpack_bits

GAPS = (0, 1, 2)  # rows
UNITS = (2, 4)  # neurons that are one row


def requests_of(order: NDArray[Any], misses: Ids, gap: int) -> tuple[int, int]:
    """(requests, rows read) of a token's misses, merged over gaps of at most `gap` rows."""
    if not len(misses):
        return 0, 0
    row_of = np.empty(len(order), np.int64)
    row_of[order] = np.arange(len(order))
    between = np.diff(np.sort(row_of[misses])) - 1
    merged = between <= gap
    return len(misses) - int(merged.sum()), len(misses) + int(between[merged].sum())


def friends_of(active: NDArray[np.bool_]) -> NDArray[np.int64]:
    """[neurons]: each one's most co-activated other."""
    matrix = active.astype(np.float32)
    friends = []
    for start in range(0, matrix.shape[1], 1024):
        together = matrix[:, start : start + 1024].T @ matrix
        together[np.arange(len(together)), start + np.arange(len(together))] = -1.0
        friends.append(together.argmax(axis=1))
    return np.concatenate(friends)


def requests_with_friends(friends: NDArray[np.int64], misses: Ids, popularity: NDArray[np.float64]) -> tuple[int, int]:
    """(requests, rows read) where each row brings the neuron's friend along; the popular are not asked for first."""
    left, requests = set(misses.tolist()), 0
    for neuron in misses[np.argsort(popularity[misses])].tolist():  # popular friends come with the rare
        if neuron in left:
            requests += 1
            left -= {neuron, int(friends[neuron])}
    return requests, 2 * requests


def unit_misses(order: NDArray[Any], size: int, active: NDArray[np.bool_], tokens: list[Ids], rows: int) -> list[Ids]:
    """Units missed by token, where `size` neighbours of `order` are one. `active` [tokens, neurons] is learned."""
    count = -(-len(order) // size)
    unit_of = np.empty(len(order), np.int64)
    unit_of[order] = np.arange(len(order)) // size
    known = np.zeros((len(active), count), np.bool_)
    for neuron, unit in enumerate(unit_of.tolist()):
        known[:, unit] |= active[:, neuron]
    used = [np.unique(unit_of[ids]) for ids in tokens]
    return misses_of("frequency", Activity(used, count, known.mean(axis=0)), rows // size)[0][WARM_UP:]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--learn", type=Path, help="trace to learn from; without it, the first half of TRACE")
    parser.add_argument("--tokens", type=int, help="at most so many tokens are judged")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every N-th layer")
    parser.add_argument("--capacity", type=float, default=14.0, metavar="PERCENT", help="of the neurons cached (14)")
    parser.add_argument("--row", type=parse_size, default=16384, metavar="SIZE", help="bytes of a neuron (16 KiB)")
    parser.add_argument("--request-us", type=float, default=10.3, help="of each request (10.3)")
    parser.add_argument("--kib-us", type=float, default=0.305, help="of each KiB read (0.305)")
    parser.add_argument("--out", type=Path, help="stem of a .json and a .md file")
    args = parser.parse_args(argv)

    bits, neurons, about = read_active(args.trace, None if args.learn is None else args.tokens)
    if args.learn is not None:
        learned, judged = read_active(args.learn, None)[0], bits
    else:
        learned, judged = bits[: len(bits) // 2], bits[len(bits) // 2 :][: args.tokens]
    numbers = range(0, bits.shape[1], args.every)
    known = np.stack([unpack_bits(learned[:, layer], neurons).mean(axis=0) for layer in numbers])
    rows = split_rows(args.capacity / 100, known, "even")
    sums: dict[tuple[str, int], list[float]] = {}
    for index, layer in enumerate(numbers):
        print(f"layer {layer}", file=sys.stderr, flush=True)
        active = unpack_bits(learned[:, layer], neurons)
        tokens = [np.flatnonzero(mask) for mask in unpack_bits(judged[:, layer], neurons)]
        misses = misses_of("frequency", Activity(tokens, neurons, known[index]), rows[index])[0][WARM_UP:]
        orders = {
            "original": np.arange(neurons),
            "random": np.random.default_rng(layer).permutation(neurons),
            "by popularity": np.argsort(-known[index], kind="stable"),
            "path": place(active, hot_share=0.0),
            "hot set, then path": place(active),
        }
        for name, order in orders.items():
            for gap in GAPS:
                add(sums, (name, gap), [requests_of(order, ids, gap) for ids in misses])
        for size in UNITS:
            order = orders["hot set, then path"]
            missed = unit_misses(order, size, active, tokens, rows[index])
            whole = np.arange(-(-neurons // size))
            for gap in GAPS[:2]:
                counts = [requests_of(whole, ids, gap) for ids in missed]
                add(sums, (f"units of {size}", gap), [(requests, size * read) for requests, read in counts])
        friends = friends_of(active)
        add(
            sums,
            ("closest friend", 0),
            [requests_with_friends(friends, ids, known[index]) for ids in misses],
        )
    table = [
        {
            "order": name,
            "gap_rows": gap,
            "requests": requests,
            "rows": read,
            "nbytes": read * args.row,
            "ms": (requests * args.request_us + read * args.row / 1024 * args.kib_us) / 1000,
        }
        for (name, gap), (requests, read) in sums.items()
    ]
    document = {
        "conditions": {**about, "layers": len(numbers), "capacity_percent": args.capacity, "row_nbytes": args.row},
        "request_us": args.request_us,
        "kib_us": args.kib_us,
        "orders": table,
    }
    text = report(document)
    print(text)
    if args.out is not None:
        Path(f"{args.out}.json").write_text(json.dumps(document) + "\n")
        Path(f"{args.out}.md").write_text(text)
    print(json.dumps(document))
    return 0


def add(sums: dict[tuple[str, int], list[float]], key: tuple[str, int], counts: list[tuple[int, int]]) -> None:
    """Another layer's means over tokens."""
    before = sums.get(key, [0.0, 0.0])
    sums[key] = [float(value) for value in np.asarray(before) + np.mean(counts, axis=0)]


def report(document: dict[str, Any]) -> str:
    """The table in markdown."""
    conditions = document["conditions"]
    kind = "synthetic trace" if conditions["synthetic"] else "recorded trace"
    lines = [
        f"{kind} ({conditions['description']}), {conditions['layers']} layers, {conditions['capacity_percent']:g} % "
        f"cached by frequency, rows of {conditions['row_nbytes']} bytes; a token's reads in these layers, at "
        f"{document['request_us']:g} us a request and {document['kib_us']:g} us a KiB:",
        "",
        "| order | gap read through | requests | MB | ms |",
        "|---|---|---|---|---|",
    ]
    for row in document["orders"]:
        counts = f"{row['requests']:.0f} | {row['nbytes'] / 1e6:.2f} | {row['ms']:.2f}"
        lines.append(f"| {row['order']} | {row['gap_rows']} rows | {counts} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
