"""Time a token by memory limit (paper A, figure 7), of one model or of several in one picture.

    python bench/engine/memory_curve.py --model DIR [--model DIR …] [--shares 0.45,0.5,…,1.0 | --limits 2.4GB,4GB,…]
        [--plan] [--cgroup] [--json OUT] [--plot PNG]

A share is of the model's bytes, libraries included, so that 1.0 is what the dense model would need for its weights
alone; limits are the same for all models, and a model is left out of those that cannot hold it. With --plan each run
stands beside the time that `flashllm plan` expects of it on this machine (`flashllm calibrate` first), of synthetic
models by their traces. Models and limits take turns in every round. The last line is one JSON document.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from engine_runs import Workers, add_runs, finish, summary

from flashllm.base.units import parse_size
from flashllm.convert.locate import resolve_model
from flashllm.format.manifest import open_model_dir
from flashllm.format.model_files import FFN, RESIDENT

TRACED = Path(__file__).with_name("traced.py")  # the command line, for synthetic models too
SHARES = [0.45, 0.5, 0.55, 0.6, 0.7, 0.8, 0.9, 1.0]


class Point(NamedTuple):
    """A model under a limit."""

    directory: Path
    share: float  # of the model's bytes
    memory: int


def model_nbytes(directory: Path) -> int:
    """Bytes of the model's weights."""
    files = open_model_dir(directory).files
    return sum(files[name].nbytes for name in (FFN, RESIDENT))


def points_of(directory: Path, args: argparse.Namespace) -> list[Point]:
    """The limits at which a model is run."""
    nbytes = model_nbytes(directory)
    return [Point(directory, limit / nbytes, limit) for limit in args.limits or [int(s * nbytes) for s in args.shares]]


def planned(point: Point, args: argparse.Namespace) -> dict[str, Any] | None:
    """What `flashllm plan` says, by a model's trace; None where the limit cannot hold the model."""
    command = [sys.executable, str(TRACED), "plan", str(point.directory), "--json", "--memory", str(point.memory)]
    command += ["--context", str(args.prompt + args.tokens + 1)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0 and "cannot hold this model" not in done.stderr:
        raise SystemExit(f"memory_curve: {done.stderr.strip()}")
    document: dict[str, Any] | None = json.loads(done.stdout) if done.returncode == 0 else None
    return document


def plot(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 3.6), layout="constrained")
    axes = figure.subplots()
    models = list(dict.fromkeys(row["model"] for row in rows))
    for model in models:
        own = [row for row in rows if row["model"] == model]
        x = [row["memory"] / 1e9 for row in own]
        label = "token" if len(models) == 1 else own[0]["encoding"]
        line = axes.plot(x, [row["total_ms"] for row in own], "o-", label=label)
        io = "of which I/O" if model == models[-1] else None
        axes.plot(x, [row["io_ms"] for row in own], "s--", color=line[0].get_color(), alpha=0.5, label=io)
    axes.set_xlabel("memory limit, GB")
    axes.set_ylabel("ms per token (median)")
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=9)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def measure(points: list[Point], args: argparse.Namespace) -> dict[Point, list[dict[str, Any]]]:
    """The runs of each point, in turn."""
    runs: dict[Point, list[dict[str, Any]]] = {point: [] for point in points}
    for _ in range(args.rounds):
        for point in points:
            settings = {"task": "flash", "tokens": args.tokens, "memory": point.memory, "prompt_tokens": args.prompt}
            settings["context"] = args.prompt + args.tokens + 1
            memory = point.memory if args.cgroup else None
            runs[point].append(Workers(point.directory, memory=memory, read_first=args.read_first).run(settings))
            print(f"{point.directory.name}, {point.memory / 1e9:.2f} GB: done", file=sys.stderr, flush=True)
    return runs


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", action="append", help="model directory, once or more (default: the bundled demo)")
    parser.add_argument("--shares", type=lambda text: [float(part) for part in text.split(",")], default=SHARES)
    parser.add_argument("--limits", type=lambda text: [parse_size(part) for part in text.split(",")])
    parser.add_argument("--plan", action="store_true", help="the expected time beside the measured one")
    add_runs(parser, tokens=40, rounds=1)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args(argv)
    directories = [resolve_model(model, convert_on_first_use=False) for model in args.model or [None]]
    points = [point for directory in directories for point in points_of(directory, args)]
    expected = {point: planned(point, args) for point in points if args.plan or args.limits}
    if args.limits:  # those left out that cannot hold it
        points = [point for point in points if expected[point] is not None]
    runs = measure(points, args)
    rows = []
    for point, results in runs.items():
        row = {"model": point.directory.name, "encoding": open_model_dir(point.directory).rows.encoding}
        row |= {"share": point.share, "memory": point.memory, **summary(results)}
        plan = expected.get(point)
        if args.plan and plan is not None and plan["token"] is not None:
            row["planned_ms"] = plan["token"]["total_s"] * 1e3
            row["planned_over_measured"] = row["planned_ms"] / row["total_ms"]
        rows.append(row)
    activity = runs[points[0]][0]["activity"]
    print(f"activity: {activity}; control group: {args.cgroup}\n")
    print("| model | limit | of the model | FFN cached | ms/token | I/O | compute | planned | MB/token | hits | peak |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        peak = "" if row["group_peak_bytes"] is None else f"{row['group_peak_bytes'] / 1e9:.2f} GB"
        times = " | ".join(f"{row[part]:.0f}" for part in ("total_ms", "io_ms", "compute_ms"))
        plan_ms = f"{row['planned_ms']:.0f}" if "planned_ms" in row else ""
        print(
            f"| {row['model']} | {row['memory'] / 1e9:.2f} GB | {row['share']:.0%} | {row['cached_share']:.0%} "
            f"| {times} | {plan_ms} | {row['bytes_read'] / 1e6:.0f} | {row['hit_rate']:.0%} | {peak} |"
        )
    common = {"cgroup": args.cgroup, "read_first": args.read_first}
    document = {"activity": activity, **common, "rows": rows}
    if args.plot:
        plot(rows, f"{', '.join(directory.name for directory in directories)}: {activity.split(',')[0]}", args.plot)
    return finish(document, args.json)


if __name__ == "__main__":
    sys.exit(main())
