"""Time a token by memory limit (paper A, figure 7).

    python bench/engine/memory_curve.py --model DIR [--shares 0.45,0.5,…,1.0] [--cgroup] [--json OUT] [--plot PNG]

Each limit is a share of the model's bytes, libraries included, so that 1.0 is what the dense model would need for its
weights alone. Shares take turns in every round. The last line is one JSON document.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from engine_runs import Workers, add_read_first, summary
from memory_group import GroupError

from flashllm.convert.locate import resolve_model
from flashllm.format.manifest import open_model_dir
from flashllm.format.model_files import FFN, RESIDENT

SHARES = "0.45,0.5,0.55,0.6,0.7,0.8,0.9,1.0"


def plot(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5.6, 3.6), layout="constrained")
    x = [row["memory"] / 1e9 for row in rows]
    axes.plot(x, [row["total_ms"] for row in rows], "o-", label="token")
    axes.plot(x, [row["io_ms"] for row in rows], "s--", label="of which I/O")
    axes.set_xlabel("memory limit, GB")
    axes.set_ylabel("ms per token (median)")
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=9)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", help="model directory (default: the bundled demo)")
    parser.add_argument("--shares", type=lambda text: [float(part) for part in text.split(",")], default=SHARES)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--cgroup", action="store_true", help="enforce each limit by a memory control group (root)")
    add_read_first(parser)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args(argv)
    directory = resolve_model(args.model, convert_on_first_use=False)
    manifest = open_model_dir(directory)
    model_nbytes = sum(manifest.files[name].nbytes for name in (FFN, RESIDENT))
    runs: dict[float, list[dict[str, Any]]] = {share: [] for share in args.shares}
    try:
        for _ in range(args.rounds):
            for share in args.shares:
                memory = int(share * model_nbytes)
                settings = {"task": "flash", "tokens": args.tokens, "memory": memory, "prompt_tokens": args.prompt}
                settings["context"] = args.prompt + args.tokens + 1
                workers = Workers(directory, memory=memory if args.cgroup else None, read_first=args.read_first)
                runs[share].append(workers.run(settings))
                print(f"{share:.0%}: done", file=sys.stderr, flush=True)
    except GroupError as error:
        raise SystemExit(f"memory_curve: {error}") from error
    rows = [
        {"share": share, "memory": int(share * model_nbytes), **summary(results)} for share, results in runs.items()
    ]
    activity = runs[args.shares[0]][0]["activity"]
    print(f"{directory.name}, {model_nbytes / 1e9:.2f} GB; activity: {activity}; control group: {args.cgroup}\n")
    print("| limit | of the model | FFN cached | ms/token | I/O | compute | MB/token | hits | peak of the group |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        peak = "" if row["group_peak_bytes"] is None else f"{row['group_peak_bytes'] / 1e9:.2f} GB"
        times = " | ".join(f"{row[part]:.0f}" for part in ("total_ms", "io_ms", "compute_ms"))
        print(
            f"| {row['memory'] / 1e9:.2f} GB | {row['share']:.0%} | {row['cached_share']:.0%} | {times} "
            f"| {row['bytes_read'] / 1e6:.0f} | {row['hit_rate']:.0%} | {peak} |"
        )
    common = {"cgroup": args.cgroup, "read_first": args.read_first}
    document = {"model": directory.name, "activity": activity, **common, "rows": rows}
    if args.plot:
        plot(rows, f"{directory.name}: {activity.split(',')[0]}", args.plot)
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
