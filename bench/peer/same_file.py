"""llama.cpp and flashllm on one GGUF file, whose bits flashllm keeps: the same weights, tokens and memory, in turn.

    python bench/peer/peer_llama.py make olmoe.gguf --shape olmoe
    python bench/peer/peer_llama.py quantise olmoe.gguf olmoe-q4_k_m.gguf --type q4_k_m
    flashllm convert olmoe-q4_k_m.gguf olmoe-q4
    python bench/peer/same_file.py olmoe-q4_k_m.gguf olmoe-q4 --memory 2.4GB

Both get ids 0, 1, 2 ...: of dummy_experts.py's models the router then moves as a real one's. Each run is a process of
its own in a memory control group of --memory bytes (needs root), from a cold page cache; the engines change turns, so
that neither has the drive's better minutes. Prints each run's median token after the first, and how many times as long
llama.cpp takes. The last line is one JSON document.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
import memory_group
from peer_llama import bytes_read

from flashllm.base.machine import num_cores
from flashllm.base.units import format_size, parse_size
from flashllm.config import RunConfig
from flashllm.engine.model import Model
from flashllm.errors import FlashError

ENGINES = ("llama.cpp", "flashllm")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """flashllm's run, in this process; what `peer_llama.py measure` says of llama.cpp's."""
    start = time.perf_counter()
    config = RunConfig(memory=args.memory, context=args.prompt + args.tokens + 1, threads=args.threads)
    with Model.open(args.model, config) as model:
        loaded_s, sequence = time.perf_counter() - start, model.new_sequence()

        def decode(ids: list[int]) -> tuple[float, int]:
            before, began = bytes_read(), time.perf_counter()
            model.step([(sequence, ids)])
            return time.perf_counter() - began, bytes_read() - before

        prompt_s, prompt_bytes = decode(list(range(args.prompt)))
        tokens = [decode([following]) for following in range(args.prompt, args.prompt + args.tokens)]
    return {
        "load_s": loaded_s,
        "prompt_s": prompt_s,
        "prompt_read_bytes": prompt_bytes,
        "token_s": [seconds for seconds, _ in tokens],
        "token_read_bytes": [nbytes for _, nbytes in tokens],
    }


def run_engine(engine: str, args: argparse.Namespace) -> dict[str, Any]:
    """One run under the limit."""
    own = engine == "flashllm"
    script = Path(__file__) if own else Path(__file__).with_name("peer_llama.py")
    command = [sys.executable, str(script), "measure", str(args.directory if own else args.gguf)]
    command += ["--prompt", str(args.prompt), "--tokens", str(args.tokens), "--threads", str(args.threads)]
    command += ["--memory", str(args.memory)] if own else ["--walk", "--no-repack"]
    with tempfile.TemporaryFile() as output:
        capped = memory_group.run_capped(command, args.memory, stdout=output)
        if capped.returncode:
            raise OSError(f"{engine} ended with {capped.returncode} ({capped.kills} kills for the limit)")
        output.seek(0)
        result = json.load(output)
    median = statistics.median(result["token_s"][1:])
    read = statistics.median(result["token_read_bytes"][1:])
    prompt = result["prompt_s"]
    print(f"{engine:9s}: token {median:.3f} s, {format_size(read)} read; prompt {prompt:.2f} s", flush=True)
    return {"engine": engine, "token_median_s": median, "token_read_bytes_median": read} | result | asdict(capped)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The engines in turn."""
    runs = []
    for turn in range(args.rounds):
        for engine in ENGINES[:: 1 if turn % 2 == 0 else -1]:
            runs.append(run_engine(engine, args))
    medians = {
        engine: statistics.median(each["token_median_s"] for each in runs if each["engine"] == engine)
        for engine in ENGINES
    }
    ratio = medians["llama.cpp"] / medians["flashllm"]
    print(f"llama.cpp takes {ratio:.1f} times as long")
    return {
        "benchmark": "same_file",
        "weights": "dummy",
        "gguf": args.gguf.name,
        "gguf_bytes": args.gguf.stat().st_size,
        "memory": args.memory,
        "prompt": args.prompt,
        "threads": args.threads,
        "token_median_s": medians,
        "ratio": ratio,
        "runs": runs,
    }


def main(argv: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--memory", type=parse_size, required=True, help="limit of everything a process holds")
    options.add_argument("--prompt", type=int, default=64, help="tokens")
    options.add_argument("--tokens", type=int, default=24, help="to feed after it")
    options.add_argument("--threads", type=int, default=num_cores(), help="default: cores")
    given = sys.argv[1:] if argv is None else argv
    measures = given[:1] == ["measure"]  # the process that a run starts
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0], parents=[options])
    if measures:
        parser.add_argument("verb")
        parser.add_argument("model", type=Path)
    else:
        parser.add_argument("gguf", type=Path, help="for llama.cpp")
        parser.add_argument("directory", type=Path, help="converted from it, for flashllm")
        parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(given)
    try:
        print(json.dumps(measure(args) if measures else run(args)))
        return 0
    except (OSError, subprocess.CalledProcessError, FlashError, memory_group.GroupError) as error:
        print(f"same_file: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
