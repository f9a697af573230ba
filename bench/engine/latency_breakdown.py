"""Where a token's time goes, engine by engine, in one run on this machine (paper A, tables 2 and 3, figure 1).

    python bench/engine/latency_breakdown.py [--model DIR] [--memory SIZE] [--engines naive,hybrid,paper,flashllm]
        [--tokens N] [--cgroup] [--json OUT] [--plot PNG]

naive     every weight is read for every token, in large sequential reads that run ahead of the products
hybrid    half of the weights in memory (or what the limit leaves room for), the other half read
paper     paper A: its window (five tokens, fewer where they do not fit), no merging, no overlap
flashllm  this engine as it comes
paper24   paper mode with room for 24 % of the neurons, outside the limit
streamed  this engine in mode dense: every weight, what does not fit in sequence, ahead of the products

The engines take turns, each in a process of its own that starts cold; with --cgroup inside a memory group of exactly
--memory, entered with a cold page cache. Roofs are measured between them in every round. Times are exposed wall time:
I/O, memory management, compute and other sum to the total. Without arguments it runs on the bundled demo, for a minute,
without a limit. The last line is one JSON document.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

from breakdown_report import markdown, plot
from engine_runs import COLD_TOKENS, PAPER_READER, Workers, add_model, add_runs, add_simd, summary

from flashllm import _core
from flashllm.base.units import format_size
from flashllm.config import DEFAULT_WINDOW
from flashllm.convert.locate import resolve_model
from flashllm.errors import FlashError
from flashllm.format.manifest import Manifest, open_model_dir
from flashllm.format.model_files import FFN, RESIDENT

ENGINES = ("naive", "hybrid", "paper", "flashllm")
EXTRA = ("paper24", "streamed")  # only where they are asked for
PAPER = {
    **PAPER_READER,
    "options": {"cache_policy": "window", "window": DEFAULT_WINDOW},
    "without": ("merged", "overlap", "prefetch"),
}
PAPER_SHARE = 0.24  # of the FFN in memory (paper A, section 4)


class Run:
    """The rounds of one breakdown: starts workers, keeps what they say."""

    def __init__(self, args: argparse.Namespace, directory: Path) -> None:
        self.args, self.directory = args, directory
        self.workers = Workers(directory, memory=args.memory if args.cgroup else None, read_first=args.read_first)
        self.manifest: Manifest = open_model_dir(directory)
        self.results: dict[str, list[dict[str, Any]]] = {}
        self.roofs: list[dict[str, Any]] = []

    def measure(self) -> None:
        """All rounds."""
        for number in range(self.args.rounds):
            self.roofs.append(self.workers.roof(self.args.roof_seconds))
            for engine in self.args.engines:
                print(f"round {number + 1} of {self.args.rounds}: {engine}", file=sys.stderr, flush=True)
                self.results.setdefault(engine, []).append(self._engine(engine))

    def _engine(self, name: str) -> dict[str, Any]:
        args = self.args
        if name in ("naive", "hybrid"):
            settings = {"task": "dense", "tokens": args.dense_tokens, "memory": args.memory, "simd": args.simd}
            return self.workers.run({**settings, "resident_share": 0.5 if name == "hybrid" else 0.0})
        paper: dict[str, Any] = PAPER if name.startswith("paper") else {"options": {}}
        settings = {
            "task": "flash",
            "tokens": args.tokens,
            "memory": args.memory,
            "context": args.prompt + args.tokens + 1,
            "prompt_tokens": args.prompt,
            "io_backend": args.io_backend,
            "io_threads": args.io_threads,
            **paper,
            "options": {**paper["options"], "simd": args.simd},
        }
        if name == "paper24":
            plan = self.results["paper"][-1]["plan"]
            ffn = PAPER_SHARE * self.manifest.files[FFN].nbytes
            settings["memory"] = int(plan["total_bytes"] - plan["neuron_cache_bytes"] + ffn)
            return self.workers.run(settings, capped=False)
        if name == "streamed":
            settings["options"]["mode"] = "dense"
            settings["tokens"] = args.dense_tokens
        return self.workers.run(settings)


def roofs(
    roofs: list[dict[str, Any]], engine: dict[str, Any] | None, run: dict[str, Any] | None, *, position: float
) -> dict[str, Any]:
    """What the hardware allows for flashllm's bytes: reads at the size issued, touched weights at DRAM bandwidth.

    `position`: of the tokens, on average.
    """
    dram = statistics.median(roof["dram_gbps"] for roof in roofs)
    sequential = statistics.median(roof["sequential_gbps"] for roof in roofs)
    curve = [
        (point["size"], statistics.median(roof["reads"][index]["gbps"] for roof in roofs))
        for index, point in enumerate(roofs[0]["reads"])
    ]
    result = {"dram_gbps": dram, "sequential_gbps": sequential, "curve": curve}
    if engine is None or run is None:
        return {**result, "io_ms": None, "compute_ms": None, "read_gbps": None}
    read = rate_at(curve, engine["bytes_read"] / max(1, engine["requests"]))
    shape = run["shape"]
    touched = (
        shape["resident_touched_nbytes"]
        + engine["active"] * (shape["row_nbytes"] - (1 - shape["firing"]) * shape["matrix_nbytes"])
        + shape["kv_nbytes_per_token"] * position
    )
    return {
        **result,
        "io_ms": engine["bytes_read"] / read / 1e6,
        "compute_ms": touched / dram / 1e6,
        "read_gbps": read,
        "touched_bytes": round(touched),
    }


def rate_at(curve: list[tuple[int, float]], size: float) -> float:
    """GB/s of random reads of `size` bytes, between the sizes measured."""
    if size <= curve[0][0]:
        return curve[0][1]
    for (low, slow), (high, fast) in itertools.pairwise(curve):
        if size <= high:
            return slow + (fast - slow) * (size - low) / (high - low)
    return curve[-1][1]


def ratios(engines: dict[str, Any], roof: dict[str, Any]) -> dict[str, float | None]:
    """The figures the design promises."""

    def over(name: str) -> float | None:
        if name not in engines or "flashllm" not in engines:
            return None
        return float(engines[name]["total_ms"] / engines["flashllm"]["total_ms"])

    total = engines.get("flashllm", {}).get("total_ms")
    known = total is not None and roof["io_ms"] is not None
    return {
        "naive_over_flashllm": over("naive"),
        "hybrid_over_flashllm": over("hybrid"),
        "paper_over_flashllm": over("paper"),
        "total_over_roof_sum": total / (roof["io_ms"] + roof["compute_ms"]) if known else None,
        "streamed_over_sequential_read": over_reading(engines.get("streamed"), roof),
        "total_over_roof_max": total / max(roof["io_ms"], roof["compute_ms"]) if known else None,
    }


def over_reading(engine: dict[str, Any] | None, roof: dict[str, Any]) -> float | None:
    """A token's time over that of reading its bytes in sequence."""
    if engine is None or not engine["bytes_read"]:
        return None
    return float(engine["total_ms"] / (engine["bytes_read"] / roof["sequential_gbps"] / 1e6))


def conditions(run: Run) -> dict[str, Any]:
    args = run.args
    first = next((run.results[name][0] for name in ("flashllm", "paper", "streamed") if name in run.results), {})
    return {
        "model": run.directory.name,
        "weights": run.manifest.source.name,
        "activity": first.get("activity", "all neurons"),
        "dtype": run.manifest.dtype,
        "model_bytes": sum(run.manifest.files[name].nbytes for name in (FFN, RESIDENT)),
        "memory": args.memory,
        "cgroup": args.cgroup,
        "direct_io": all(result["direct_io"] for results in run.results.values() for result in results),
        "prompt_tokens": args.prompt,
        "tokens": args.tokens,
        "dense_tokens": args.dense_tokens,
        "rounds": args.rounds,
        "reader": first.get("reader"),
        "read_first": args.read_first,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "simd": _core.best_simd_level(),
        "used": args.simd,
        "load_average": os.getloadavg()[0],
        "rapl": first.get("energy_j") is not None,
        "command": "python " + " ".join([os.path.relpath(sys.argv[0]), *sys.argv[1:]]),
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    add_model(parser)
    add_runs(parser, tokens=60, rounds=2)
    add_simd(parser)
    parser.add_argument("--engines", type=lambda text: text.split(","), default=list(ENGINES))
    parser.add_argument("--dense-tokens", type=int, help="tokens of naive and hybrid in each round (default: a tenth)")
    parser.add_argument("--io-threads", type=int, help="flashllm's reads at a time (default: as calibrated, else 32)")
    parser.add_argument("--io-backend", choices=("threads", "io_uring"), help="of flashllm (default: as calibrated)")
    parser.add_argument("--roof-seconds", type=float, default=0.5, help="measuring time of each roof")
    parser.add_argument("--plot", type=Path, help="write a stacked bar chart (PNG)")
    args = parser.parse_args(argv)
    unknown = set(args.engines) - {*ENGINES, *EXTRA}
    if unknown:
        parser.error(f"unknown engines {', '.join(sorted(unknown))}; there are {', '.join((*ENGINES, *EXTRA))}")
    if args.cgroup and args.memory is None:
        parser.error("--cgroup needs --memory, the limit to enforce")
    if "paper24" in args.engines and "paper" not in args.engines:
        parser.error("paper24 needs paper beside it")
    if args.tokens <= COLD_TOKENS:
        parser.error(f"--tokens must be more than {COLD_TOKENS}, which are shown apart")
    args.dense_tokens = args.dense_tokens or max(3, args.tokens // 10)
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        run = Run(args, resolve_model(args.model, convert_on_first_use=False))
        run.measure()
    except FlashError as error:
        raise SystemExit(f"latency_breakdown: {error}") from error
    engines = {
        name: summary(results, cold=0 if name in ("naive", "hybrid", "streamed") else COLD_TOKENS)
        for name, results in run.results.items()
    }
    main_run = run.results.get("flashllm", [None])[0]
    roof = roofs(run.roofs, engines.get("flashllm"), main_run, position=args.prompt + args.tokens / 2)
    document = {"conditions": conditions(run), "roof": roof, "engines": engines, "ratios": ratios(engines, roof)}
    limit = "no limit" if args.memory is None else format_size(args.memory)
    print(markdown(document, limit))
    if args.plot:
        plot(document, args.plot)
    if args.json:
        args.json.write_text(json.dumps({**document, "runs": run.results, "roofs": run.roofs}) + "\n")
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
