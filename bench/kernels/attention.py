"""How fast a prompt's attention is computed, against torch's scaled_dot_product_attention.

    python bench/kernels/attention.py [--threads N] [--rounds R] [--tiny]

Causal attention of 128 and 2,048 tokens, 32 heads of 128, in three dtypes. Ours (`attend_many`, over the KV cache's
pages, queries and outputs fp32) and torch's (contiguous tensors of the dtype) are timed in turn, because a machine's
speed moves with its neighbours; `ratio` is the median of torch's time over ours, pair by pair. GFLOP/s count the scores
and sums of visible keys only. The last line is one JSON document. Knows no model.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import core_testing  # noqa: F401 - the core's test build, which has attention by itself

from flashllm import _core

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
HEADS, HEAD_DIM, TOKENS = 32, 128, (128, 2048)
TINY = (2, 16, (9,))
ERROR = {"float32": 1e-5, "float16": 1e-4, "bfloat16": 2e-2}  # largest difference from torch in fp32


def spent_seconds(run: Callable[[], Any]) -> float:
    """Wall-clock seconds of one call."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def bench(dtype: str, shape: tuple[int, int, int], rounds: int, pool: _core.ThreadPool) -> dict[str, Any]:
    """One result: both ways' milliseconds (median, least, most). Raises ValueError where they disagree."""
    tokens, heads, head_dim = shape
    query, key, value = (torch.randn(tokens, heads, head_dim).to(DTYPES[dtype]) for _ in range(3))
    query = query * head_dim**-0.5
    native = _core.KvAttention(heads=heads, kv_heads=heads, head_dim=head_dim, context=tokens, dtype=dtype, pool=pool)
    native.append(key.float().numpy(), value.float().numpy())
    q = query.float().numpy()
    out = np.empty_like(q)
    of_torch = [states.transpose(0, 1)[None].contiguous() for states in (query, key, value)]

    def torch_attention(states: list[torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(*states, is_causal=True, scale=1.0)

    native.attend_many(q, out)
    expected = torch_attention([states.float() for states in of_torch])[0].transpose(0, 1)
    error = float((torch.from_numpy(out) - expected).abs().max())
    if not error <= ERROR[dtype]:
        raise ValueError(f"attention of {tokens} {dtype} tokens differs from torch's by {error}")
    torch_attention(of_torch)
    times: dict[str, list[float]] = {"native": [], "torch": []}
    for _ in range(rounds):
        times["native"].append(spent_seconds(lambda: native.attend_many(q, out)))
        times["torch"].append(spent_seconds(lambda: torch_attention(of_torch)))
    flop = 4 * head_dim * heads * tokens * (tokens + 1) / 2
    result: dict[str, Any] = {"name": "attention", "dtype": dtype, "tokens": tokens, "heads": heads}
    result |= {"head_dim": head_dim, "rounds": rounds, "largest_error": error}
    for way, spent in times.items():
        result[f"{way}_ms"] = round(statistics.median(spent) * 1e3, 3)
        result[f"{way}_ms_range"] = [round(min(spent) * 1e3, 3), round(max(spent) * 1e3, 3)]
        result[f"{way}_gflop_per_s"] = round(flop / statistics.median(spent) / 1e9, 1)
    ratios = [theirs / ours for ours, theirs in zip(times["native"], times["torch"], strict=True)]
    result["ratio"] = round(statistics.median(ratios), 2)
    result["ratio_quartiles"] = [round(value, 2) for value in np.quantile(ratios, [0.25, 0.75]).tolist()]
    return result


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="compute threads of both")
    parser.add_argument("--rounds", type=int, default=5, help="of 2,048 tokens; shorter prompts get more")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to see that it runs")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    pool = _core.ThreadPool(args.threads)
    heads, head_dim, lengths = TINY if args.tiny else (HEADS, HEAD_DIM, TOKENS)
    results = []
    for tokens in lengths:
        for dtype in DTYPES:
            rounds = args.rounds * (4 if tokens < 1024 else 1)
            results.append(bench(dtype, (tokens, heads, head_dim), rounds, pool))
            result = results[-1]
            print(
                f"{dtype:<9} {tokens:5} tokens: {result['native_ms']:8.2f} ms, torch {result['torch_ms']:8.2f} ms, "
                f"{result['ratio']} times as fast (quartiles {result['ratio_quartiles']})",
                flush=True,
            )
    document = {
        "benchmark": "attention",
        "threads": args.threads,
        "simd": _core.best_simd_level(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "torch": torch.__version__,
        "results": results,
    }
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
