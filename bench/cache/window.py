"""Hit rate, bytes and time per token by window length (paper A, figure 4b), on real generation.

The text is sampled with a fixed seed: greedy text repeats itself and would flatter any cache. Tokens are the same for
every window, so the rows differ in the cache alone. The last line on standard output is one JSON document.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

from flashllm.base.units import parse_size
from flashllm.config import RunConfig
from flashllm.convert.locate import resolve_model
from flashllm.convert.named import is_demo
from flashllm.engine.model import Model
from flashllm.generate.sampling import SamplingOptions
from flashllm.generate.session import PrefillRecord, Session, TokenRecord
from flashllm.generate.tokenizer import Tokenizer

SKIPPED = 10  # first tokens, while the cache fills
PROMPT = "Once upon a time, there was a little girl who lived near the forest. One day"


def measure(directory: Path, window: int, args: argparse.Namespace) -> dict[str, object]:
    """One window: medians over the tokens after the first ones."""
    options = SamplingOptions(max_new_tokens=args.tokens, temperature=0.8, top_p=0.95, seed=0)
    tokenizer = Tokenizer.load(directory)
    config = RunConfig(cache_policy="window", window=window, memory=args.memory, threads=args.threads)
    with Model.open(directory, config) as model, Session(model, tokenizer, options) as session:
        records = list(session.stream(PROMPT))
        tokens = [record for record in records if isinstance(record, TokenRecord)]
        assert isinstance(records[0], PrefillRecord)
        steady = [record.times for record in tokens[SKIPPED:]]
        if len(steady) < SKIPPED:
            raise SystemExit(f"the model ended after {len(tokens)} tokens; choose another seed or prompt")
        active = sum(times.active for times in steady)
        neurons = model.manifest.architecture.num_layers * model.manifest.architecture.d_ff
        return {
            "window": window,
            "tokens": len(steady),
            "active_share": active / len(steady) / neurons,
            "hit_rate": sum(times.hits for times in steady) / max(1, active),
            "bytes_per_token": sum(times.bytes_read for times in steady) / len(steady),
            "median_ms": statistics.median(times.total_ms for times in steady),
            "io_ms": statistics.median(times.io_ms for times in steady),
            "memory_ms": statistics.median(times.memory_ms for times in steady),
            "compute_ms": statistics.median(times.compute_ms for times in steady),
            "other_ms": statistics.median(times.other_ms for times in steady),
            "tokens_per_s": 1000 / statistics.median(times.total_ms for times in steady),
            "direct_io": model.direct_io,
            "token_ids": [record.token_id for record in tokens],
        }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("model", nargs="?", help="model directory; the bundled demo by default")
    parser.add_argument("--windows", type=int, nargs="+", default=[1, 2, 3, 5, 10, 20, 50])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--memory", type=parse_size)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args(argv)
    directory = resolve_model(args.model)
    rows = [measure(directory, window, args) for window in args.windows]
    if any(row["token_ids"] != rows[0]["token_ids"] for row in rows):
        raise SystemExit("the tokens depend on the window: this is a defect")
    print("| window | active | hit rate | kB/token | ms/token | I/O | memory | compute | other | tokens/s |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        del row["token_ids"]
        shares = f"{row['active_share']:.2%} | {row['hit_rate']:.1%} | {row['bytes_per_token'] / 1e3:.0f}"
        times = " | ".join(f"{row[part]:.2f}" for part in ("median_ms", "io_ms", "memory_ms", "compute_ms", "other_ms"))
        print(f"| {row['window']} | {shares} | {times} | {row['tokens_per_s']:.0f} |")
    print(json.dumps({"model": "demo" if is_demo(directory) else directory.name, "windows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
