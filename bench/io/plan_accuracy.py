"""The plan's token time against what a run then takes, on the same model, memory and calibration.

    flashllm calibrate MODEL
    python bench/io/plan_accuracy.py MODEL --memory 7.0GB [--tokens N]

First `flashllm plan`, then `flashllm generate`, each in a process of its own. The median over the tokens after the
first ten (the cache fills) is what is compared. The last line is one JSON document.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

TRACED = Path(__file__).parents[1] / "engine" / "traced.py"  # the command line, for synthetic models too
COLD_TOKENS = 10
PROMPT = "Once upon a time there was a king who lived in a castle by the sea, and every day he"


def flashllm(*arguments: str) -> dict[str, Any]:
    """The JSON document of one command."""
    command = [sys.executable, str(TRACED), *arguments, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("model")
    parser.add_argument("--memory", required=True)
    parser.add_argument("--store", help="calibrations (default: the user's)")
    parser.add_argument("--context", default="256")
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--temperature", default="0.8")
    args = parser.parse_args(argv)
    common = [args.model, "--memory", args.memory, "--context", args.context]
    common += [] if args.store is None else ["--store", args.store]
    plan = flashllm("plan", *common)
    if plan["token"] is None:
        raise SystemExit(f"the drive is not calibrated: run `flashllm calibrate {args.model}`")
    sampling = ["--temperature", args.temperature, "--seed", "1"]
    run = flashllm("generate", *common, *sampling, "--prompt", PROMPT, "--max-new-tokens", str(args.tokens))
    counted = run["tokens"][min(COLD_TOKENS, len(run["tokens"]) // 2) :]
    if len(counted) < 2:
        raise SystemExit(f"the model stopped after {len(run['tokens'])} tokens: too few to compare")
    names = ("io_ms", "memory_ms", "compute_ms", "other_ms", "total_ms", "active", "misses", "requests", "bytes_read")
    measured = {name: statistics.median(token[name] for token in counted) for name in names}
    low, _, high = statistics.quantiles((token["total_ms"] for token in counted), n=4)
    predicted = plan["token"]
    ratio = predicted["total_s"] * 1e3 / measured["total_ms"]
    print(
        f"{args.model} at {args.memory}: predicted {predicted['total_s'] * 1e3:.1f} ms, measured "
        f"{measured['total_ms']:.1f} ms (quartiles {low:.1f} to {high:.1f}): {ratio:.2f}"
    )
    document = {
        "model": args.model,
        "memory": args.memory,
        "reader": run["reader"],
        "direct_io": run["direct_io"],
        "tokens": len(counted),
        "predicted": predicted,
        "measured": {**measured, "total_ms_quartiles": [low, high]},
        "predicted_over_measured": ratio,
    }
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
