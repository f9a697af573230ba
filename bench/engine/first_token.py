"""The first token: a prompt's pass against its roof, the larger of reading the neurons once and the products alone.

    python bench/engine/first_token.py [--model DIR] [--memory SIZE] [--cgroup] [--prompt N] [--rounds N] [--json OUT]

Each round starts the engine in a process of its own, cold, and measures the roofs beside it: sequential reads, and the
prompt's products by torch in the dtype it is fastest in here, over one layer's whole matrices in memory. Loading is not
counted. The last line is one JSON document.
"""

import argparse
import os
import statistics
import sys
from typing import Any

from engine_runs import Workers, add_model, add_runs, finish

from flashllm.base.units import format_size
from flashllm.convert.locate import resolve_model
from flashllm.errors import FlashError
from flashllm.format.manifest import open_model_dir


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    add_model(parser)
    add_runs(parser, rounds=3)
    parser.add_argument("--roof-seconds", type=float, default=1.0, help="measuring time of each roof")
    args = parser.parse_args(argv)
    if args.cgroup and args.memory is None:
        parser.error("--cgroup needs --memory, the limit to enforce")
    rounds: list[dict[str, Any]] = []
    try:
        directory = resolve_model(args.model, convert_on_first_use=False)
        manifest = open_model_dir(directory)
        workers = Workers(directory, memory=args.memory if args.cgroup else None, read_first=args.read_first)
        settings = {"task": "flash", "tokens": 1, "memory": args.memory, "prompt_tokens": args.prompt}
        for number in range(args.rounds):
            print(f"round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
            roof = workers.roof(args.roof_seconds)
            products = workers.run({"task": "prompt_products", "tokens": args.prompt}, capped=False)
            run = workers.run({**settings, "context": args.prompt + 2})
            rounds.append({"sequential_gbps": roof["sequential_gbps"], **products, **run["prefill"]})
            rounds[-1]["roof_io_ms"] = run["prefill"]["bytes_read"] / roof["sequential_gbps"] / 1e6
            rounds[-1]["ratio"] = rounds[-1]["total_ms"] / max(rounds[-1]["roof_io_ms"], products["products_ms"])
    except FlashError as error:
        raise SystemExit(f"first_token: {error}") from error
    median = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    limit = "no limit" if args.memory is None else format_size(args.memory)
    enforced = " by control group" if args.cgroup else ""
    print(
        f"{directory.name} ({manifest.source.name}, {manifest.dtype}); {limit}{enforced}; prompt of {args.prompt}; "
        f"{os.cpu_count()} cores; direct I/O: {run['direct_io']}\n"
    )
    print("| round | ms | I/O | memory | compute | other | sequential reads alone | products alone | over the larger |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row, one in [*((str(number + 1), one) for number, one in enumerate(rounds)), ("median", median)]:
        parts = ("total_ms", "io_ms", "memory_ms", "compute_ms", "other_ms", "roof_io_ms", "products_ms")
        print(f"| {row} | {' | '.join(f'{one[part]:.0f}' for part in parts)} | {one['ratio']:.2f} |")
    document = {
        "conditions": {
            "model": directory.name,
            "weights": manifest.source.name,
            "dtype": manifest.dtype,
            "memory": args.memory,
            "cgroup": args.cgroup,
            "read_first": args.read_first,
            "direct_io": run["direct_io"],
            "prompt_tokens": args.prompt,
            "cores": os.cpu_count(),
        },
        "median": median,
        "rounds": rounds,
    }
    return finish(document, args.json)


if __name__ == "__main__":
    sys.exit(main())
