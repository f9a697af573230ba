"""Runs of one engine in a process of its own, capped where asked, and the medians over its tokens.

What the benchmarks of whole tokens share: `latency_breakdown`, `ablation`, `memory_curve`, `long_generation`; and the
option that switches instructions off in any of them.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from memory_group import GroupError, document_of

from flashllm import _core
from flashllm.base.units import parse_size
from flashllm.format.model_files import FFN, RESIDENT

WORKER = Path(__file__).with_name("breakdown_worker.py")
PAPER_READER = {"io_backend": "threads", "io_threads": 32}  # paper A, section 4
COLD_TOKENS = 10  # the first tokens of a run are shown apart
PARTS = ("io_ms", "memory_ms", "compute_ms", "other_ms", "total_ms", "io_busy_ms")


def add_model(parser: argparse.ArgumentParser) -> None:
    """A model, and a limit of memory."""
    parser.add_argument("--model", help="model directory (default: the bundled demo)")
    parser.add_argument("--memory", type=parse_size, help="limit of everything a process holds")


def add_runs(
    parser: argparse.ArgumentParser, *, prompt: int = 128, tokens: int | None = None, rounds: int | None = None
) -> None:
    """What is run, by defaults (None: there is no such option), and where it is written."""
    for option, default in (("--prompt", prompt), ("--tokens", tokens), ("--rounds", rounds)):
        if default is not None:
            parser.add_argument(option, type=int, default=default)
    parser.add_argument("--cgroup", action="store_true", help="enforce limits by a memory control group (root)")
    parser.add_argument("--json", type=Path, help="write the document here too")
    parser.add_argument(
        "--read-first",
        action="store_true",
        help="read each engine's files in sequence before it runs: for virtual disks whose host caches, and forgets",
    )


def add_simd(parser: argparse.ArgumentParser) -> None:
    """Which vector instructions compute, to see what those of this processor are worth."""
    parser.add_argument(
        "--simd",
        type=_simd_level,
        default="auto",
        help="flashllm's vector instructions: avx2, avx2_vnni, avx512 ... (default: the best there are)",
    )


def _simd_level(name: str) -> str:
    try:
        _core.read_bandwidth(_core.ThreadPool(1), 4096, 0.0, name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return name


def finish(document: dict[str, Any], file: Path | None) -> int:
    """Write the document, and print it as the last line; 0."""
    if file is not None:
        file.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))
    return 0


class Workers:
    """Starts workers over one model directory; with `memory`, in a control group of that many bytes.

    read_first: before an engine runs, its files are read once in sequence (bench/log, 2026-11-22).
    """

    def __init__(self, directory: Path, *, memory: int | None, read_first: bool = False) -> None:
        self._directory, self._common = directory, {"model": str(directory)}
        self._memory, self._read_first = memory, read_first

    def roof(self, seconds: float) -> dict[str, Any]:
        """What the machine can do now; never capped."""
        return self.run({"task": "roof", "seconds": seconds}, capped=False)

    def run(self, settings: dict[str, Any], *, capped: bool = True, memory: int | None = None) -> dict[str, Any]:
        """What the worker printed. `memory`: another limit than the usual. SystemExit where it failed, or nothing can
        enforce the limit."""
        if self._read_first and settings["task"] in ("dense", "flash"):
            self.run({"task": "read_through", "files": [RESIDENT, FFN]}, capped=False)
        command = [sys.executable, str(WORKER), json.dumps({**self._common, **settings})]
        memory = self._memory if memory is None else memory
        try:
            found = document_of(command, memory if capped else None)
        except GroupError as error:
            raise SystemExit(f"{Path(sys.argv[0]).stem}: {error}") from error
        if "failed" in found:
            raise SystemExit(f"a worker ended with {found['failed']}; -9 is a kill: a limit too low")
        return found


def steady(runs: list[dict[str, Any]], cold: int) -> list[dict[str, Any]]:
    """The tokens that count: of every round, those after the first `cold`."""
    return [token for run in runs for token in run["tokens"][cold:]]


def summary(runs: list[dict[str, Any]], *, cold: int = COLD_TOKENS) -> dict[str, Any]:
    """Medians over an engine's tokens after the first `cold` of each run."""
    tokens = steady(runs, cold)
    totals = sorted(token["total_ms"] for token in tokens)
    first = [token["total_ms"] for run in runs for token in run["tokens"][:COLD_TOKENS]]
    reads = statistics.mean(token["bytes_read"] for token in tokens)
    busy = statistics.mean(token["io_busy_ms"] for token in tokens)
    active = sum(token["active"] for token in tokens)
    result = {part: statistics.median(token[part] for token in tokens) for part in PARTS}
    quarters = statistics.quantiles(totals, n=4) if len(totals) > 1 else [totals[0]] * 3
    return {
        **result,
        "p95_ms": totals[min(len(totals) - 1, int(0.95 * len(totals)))],
        "quartiles_ms": [quarters[0], quarters[2]],
        "first_ten_ms": statistics.median(first),
        "tokens": len(tokens),
        "bytes_read": round(reads),
        "requests": round(statistics.mean(token["requests"] for token in tokens)),
        "read_gbps": reads / busy / 1e6 if busy else 0.0,
        "hit_rate": sum(token["hits"] for token in tokens) / active if active else 0.0,
        "active": round(active / len(tokens)),
        "misses": round(statistics.mean(token["misses"] for token in tokens)),
        "prefill_ms": statistics.median(run["prefill"]["total_ms"] for run in runs) if "prefill" in runs[0] else None,
        "energy_j_per_token": energy(runs),
        "group_peak_bytes": max((run["group_peak_bytes"] for run in runs if "group_peak_bytes" in run), default=None),
        "resident_share": runs[0].get("resident_share"),
        "cached_share": cached_share(runs[0]),
        "window_held": runs[0].get("window_held"),  # tokens, on average over layers; 0: the policy knows no window
    }


def cached_share(run: dict[str, Any]) -> float | None:
    shape = run.get("shape")
    return None if shape is None else shape["cached_neurons"] / shape["num_neurons"]


def energy(runs: list[dict[str, Any]]) -> float | None:
    """Joules a token; None where RAPL cannot be read."""
    if any(run["energy_j"] is None for run in runs):
        return None
    return float(sum(run["energy_j"] for run in runs) / sum(len(run["tokens"]) for run in runs))
