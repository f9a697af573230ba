"""A long generation: no drift in memory or time (paper A, figure 8).

    python bench/engine/long_generation.py [--model DIR] [--memory SIZE] [--cgroup] [--tokens 1000]
                                             [--json OUT] [--plot PNG]

Once greedy and once with nucleus sampling. Compares tokens 100 to 200 with the last hundred, and says the peaks of
memory. The last line is one JSON document.
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from engine_runs import Workers, add_model, add_runs, finish

from flashllm.convert.locate import resolve_model

SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {}, "nucleus": {"temperature": 1.0, "top_p": 0.95, "seed": 0}}


def hundreds(tokens: list[dict[str, Any]], part: str) -> list[float]:
    """Medians over each hundred tokens."""
    return [statistics.median(token[part] for token in tokens[at : at + 100]) for at in range(0, len(tokens) - 99, 100)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    add_model(parser)
    add_runs(parser, tokens=1000)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args(argv)
    directory = resolve_model(args.model, convert_on_first_use=False)
    workers = Workers(directory, memory=args.memory if args.cgroup else None, read_first=args.read_first)
    conditions = {"memory": args.memory, "cgroup": args.cgroup, "read_first": args.read_first}
    document: dict[str, Any] = {"model": directory.name, **conditions, "samplings": {}}
    print("| sampling | tokens 100–200, ms | last hundred, ms | ratio | hits | peak RSS | peak of the group |")
    print("|---|---|---|---|---|---|---|")
    for name, sampling in SAMPLINGS.items():
        settings = {"task": "flash", "tokens": args.tokens, "memory": args.memory, "prompt_tokens": args.prompt}
        run = workers.run({**settings, "context": args.prompt + args.tokens + 1, "sampling": sampling})
        tokens = run["tokens"]
        early = statistics.median(token["total_ms"] for token in tokens[100:200])
        late = statistics.median(token["total_ms"] for token in tokens[-100:])
        document["samplings"][name] = {
            "activity": run["activity"],
            "tokens": len(tokens),
            "early_ms": early,
            "late_ms": late,
            "late_over_early": late / early,
            "hundreds_ms": hundreds(tokens, "total_ms"),
            "hundreds_io_ms": hundreds(tokens, "io_ms"),
            "hundreds_compute_ms": hundreds(tokens, "compute_ms"),
            "hit_rate": sum(token["hits"] for token in tokens) / max(1, sum(token["active"] for token in tokens)),
            "peak_rss_bytes": run["peak_rss_bytes"],
            "group_peak_bytes": run.get("group_peak_bytes"),
        }
        peaks = [run["peak_rss_bytes"], run.get("group_peak_bytes")]
        held = " | ".join("" if peak is None else f"{peak / 1e9:.2f} GB" for peak in peaks)
        hits = document["samplings"][name]["hit_rate"]
        print(f"| {name} | {early:.1f} | {late:.1f} | {late / early:.2f} | {hits:.1%} | {held} |")
    if args.plot:
        plot(document, args.plot)
    return finish(document, args.json)


def plot(document: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 3.4), layout="constrained")
    axes = figure.subplots()
    for name, result in document["samplings"].items():
        axes.plot([100 * (at + 1) for at in range(len(result["hundreds_ms"]))], result["hundreds_ms"], "o-", label=name)
    axes.set_xlabel("tokens generated")
    axes.set_ylabel("ms per token (median of a hundred)")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
