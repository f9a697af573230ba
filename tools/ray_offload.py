"""Many prompts over many machines: Ray Data hands batches of prompts to engines, one on each worker.

    pip install 'flashllm[ray,offload]'
    python tools/ray_offload.py MODEL -i prompts.jsonl -o answers --workers 4 --cpus 16 --memory 14GB --address auto

Every worker has the whole model, on its own disk at the same path, and its own limit of memory: Ray's is for placing
workers and enforces nothing. IN has a prompt a line, {"prompt": ...} and whatever else, which is kept; OUT is a folder
of JSON lines that have `text`, `finish_reason`, `completion_tokens`, `error` and `worker` besides, in no promised
order. Answers are the likeliest tokens, so they do not depend on which worker gets which prompt. A model that no
machine holds alone is for `torchrun -m flashllm offload run`. Ray has no authentication: use it on a private network.
"""

import argparse
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.data import ActorPoolStrategy

from flashllm.base.units import parse_size
from flashllm.generate.sampling import SamplingOptions

READERS = 1  # processors for Ray's own tasks beside the workers, on a machine of its own
READERS_MEMORY = 1 << 30  # bytes, of Ray's account, for the same


class OffloadWorker:
    """An engine in an actor of Ray, which is made once and then called with one batch after the other."""

    def __init__(self, model: str, max_new: int, engine: dict[str, Any]) -> None:
        from flashllm.offload.engine import OffloadEngine  # where the actor runs

        self._sampling = SamplingOptions(max_new_tokens=max_new)
        self._engine = OffloadEngine(model, **engine)
        self._name = f"{socket.gethostname()} {os.getpid()}"

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The batch (columns of equal length) with columns of answers."""
        outputs = self._engine.generate([prompt_of(each) for each in batch["prompt"]], self._sampling)
        answers = {
            "text": [output.text for output in outputs],
            "finish_reason": [output.finish_reason for output in outputs],
            "completion_tokens": [len(output.token_ids) for output in outputs],
            "error": [output.error or "" for output in outputs],
            "worker": [self._name] * len(outputs),
        }
        return batch | {name: np.array(values) for name, values in answers.items()}


def prompt_of(value: Any) -> str | list[int]:
    """A prompt out of a column: a text, or token ids."""
    return value if isinstance(value, str) else [int(each) for each in value]


def answered(args: argparse.Namespace) -> "ray.data.Dataset":
    """The lines of the input with their answers; nothing runs before it is consumed."""
    memory = parse_size(args.memory)
    engine = {"memory": memory, "threads": args.cpus, "policy": args.policy, "scratch": args.scratch}
    lines = ray.data.read_json(str(args.input), lines=True)
    # A file is one piece of work, and so one worker's, unless it is cut.
    return lines.repartition(target_num_rows_per_block=args.batch_size).map_batches(
        OffloadWorker,
        fn_constructor_kwargs={"model": str(args.model), "max_new": args.max_new, "engine": engine},
        batch_size=args.batch_size,
        num_cpus=args.cpus,
        memory=memory,
        compute=ActorPoolStrategy(size=args.workers, max_tasks_in_flight_per_actor=1),
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path, help="the model's folder, the same on every machine")
    parser.add_argument("-i", "--input", type=Path, required=True, help="JSON lines with a prompt each")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder of answers; must not exist")
    parser.add_argument("--workers", type=int, default=1, help="engines (two on one disk halve it)")
    parser.add_argument("--cpus", type=int, default=1, help="processors, and compute threads, of each")
    parser.add_argument("--memory", required=True, help="limit of everything an engine's process holds, like 14GB")
    parser.add_argument("--batch-size", type=int, default=256, help="prompts a call: not fewer than a block")
    parser.add_argument("--max-new", type=int, default=128, help="new tokens for each prompt")
    parser.add_argument("--policy", type=Path, help="file with the policy (default: each engine plans)")
    parser.add_argument("--scratch", type=Path, help="folder of scratch files (default: the user's cache)")
    parser.add_argument("--address", help="of a Ray cluster (default: workers on this machine)")
    args = parser.parse_args(argv)
    if args.output.exists():
        parser.error(f"{args.output} exists; give another folder")
    if min(args.workers, args.cpus, args.batch_size, args.max_new) < 1:
        parser.error("--workers, --cpus, --batch-size and --max-new must be at least 1")
    own: dict[str, Any] = {}
    if args.address is None:
        own = {"num_cpus": args.workers * args.cpus + READERS, "include_dashboard": False}
        own["_memory"] = args.workers * parse_size(args.memory) + READERS_MEMORY
    started = time.perf_counter()
    ray.init(address=args.address, log_to_driver=False, **own)
    try:
        answered(args).write_json(str(args.output.resolve()))
    finally:
        ray.shutdown()
    counts = {"lines": 0, "new_tokens": 0, "errors": 0}
    for path in args.output.glob("*.json"):
        for line in path.read_text(encoding="utf-8").splitlines():
            answer = json.loads(line)
            counts["lines"] += 1
            counts["new_tokens"] += answer["completion_tokens"]
            counts["errors"] += bool(answer["error"])
    seconds = time.perf_counter() - started  # the engines' start included
    print(json.dumps(counts | {"seconds": seconds, "throughput": counts["new_tokens"] / seconds}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
