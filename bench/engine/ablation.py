"""What each part of the engine is worth, added one by one (paper A, table 2, and then our own).

    python bench/engine/ablation.py [--model DIR] [--memory SIZE] [--cgroup] [--tokens N] [--rounds N] [--json OUT]

hybrid       half of the weights in memory, or what the limit leaves room for; the other half read for every token
+ predictor  only the predicted neurons are read, all of them for every token, matrix by matrix
+ windowing  those of the last tokens stay in memory (five tokens, fewer where they do not fit)
+ bundling   a neuron's matrices are one read
then our own: + overlap and merging, + policy, + prefetch. The last row takes one part away again: all of that, but
with the kernels' plain loops instead of those for this processor.

The variants take turns in every round. The last line is one JSON document.
"""

import argparse
import sys
from typing import Any

from engine_runs import COLD_TOKENS, PAPER_READER, Workers, add_model, add_runs, finish, summary

from flashllm.convert.locate import resolve_model

# What each row does without, and its options; but for these, as the row before it.
ROWS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "+ predictor": (("cached", "bundled", "merged", "overlap", "prefetch"), {"cache_policy": "window"}),
    "+ windowing": (("bundled", "merged", "overlap", "prefetch"), {}),
    "+ bundling": (("merged", "overlap", "prefetch"), {}),
    "+ overlap, merging": (("prefetch",), {}),
    "+ policy": (("prefetch",), {"cache_policy": "frequency"}),
    "+ prefetch": ((), {}),
    "− kernels": ((), {"simd": "scalar"}),
}


class Variants:
    """The rows of the table, as settings of the worker."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rows: dict[str, dict[str, Any]] = {}
        options: dict[str, Any] = {}
        for name, (without, more) in ROWS.items():
            options = options | more
            self.rows[name] = {"without": without, "options": options}

    def settings(self, name: str) -> dict[str, Any]:
        args = self.args
        if name == "hybrid":
            return {"task": "dense", "tokens": args.dense_tokens, "memory": args.memory, "resident_share": 0.5}
        common = {"task": "flash", "tokens": args.tokens, "memory": args.memory, "prompt_tokens": args.prompt}
        common |= PAPER_READER  # in all rows
        return {**common, "context": args.prompt + args.tokens + 1, **self.rows[name]}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    add_model(parser)
    add_runs(parser, tokens=40, rounds=2)
    parser.add_argument("--dense-tokens", type=int, default=5)
    args = parser.parse_args(argv)
    directory = resolve_model(args.model, convert_on_first_use=False)
    variants = Variants(args)
    workers = Workers(directory, memory=args.memory if args.cgroup else None, read_first=args.read_first)
    runs: dict[str, list[dict[str, Any]]] = {}
    for number in range(args.rounds):
        for name in ("hybrid", *variants.rows):
            print(f"round {number + 1} of {args.rounds}: {name}", file=sys.stderr, flush=True)
            runs.setdefault(name, []).append(workers.run(variants.settings(name)))
    rows = {name: summary(results, cold=0 if name == "hybrid" else COLD_TOKENS) for name, results in runs.items()}
    activity = runs["+ bundling"][0]["activity"]
    print(f"{directory.name}; activity: {activity}; limit {args.memory}; control group: {args.cgroup}\n")
    print("| | ms/token | quartiles | I/O | memory | compute | other | MB/token | requests | GB/s | hits |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for name, row in rows.items():
        low, high = row["quartiles_ms"]
        parts = " | ".join(f"{row[part]:.1f}" for part in ("io_ms", "memory_ms", "compute_ms", "other_ms"))
        print(
            f"| {name} | {row['total_ms']:.1f} | {low:.1f}–{high:.1f} | {parts} | {row['bytes_read'] / 1e6:.1f} "
            f"| {row['requests']} | {row['read_gbps']:.2f} | {row['hit_rate']:.1%} |"
        )
    document = {
        "model": directory.name,
        "activity": activity,
        "memory": args.memory,
        "cgroup": args.cgroup,
        "read_first": args.read_first,
        "rounds": args.rounds,
        "tokens": args.tokens,
        "rows": rows,
    }
    return finish(document, args.json)


if __name__ == "__main__":
    sys.exit(main())
