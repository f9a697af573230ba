"""The throughput engine at work: whole runs against the roof of their own products and of the drive, and against peers.

    python tools/make_dummy_checkpoint.py opt67-4 --shape opt-6.7b --layers 4 --tokenizer DIR
    python bench/offload/offload_run.py opt67-4 --sequences 64 --batch 32 --prompt 128 --new 32 --memory 2.4GB

Weights on disk, cache and activations in memory, in 16 bit and with 4-bit weights and cache (`--runs`), each in a
process of its own, with --memory in a control group of that size from a cold page cache (root). Fewer layers than the
shape has are fine: `projected_throughput` scales a run's time by the layers, the head's time too, so it is rather too
low; the rest is measured. Roofs are taken in the same minutes: `prefill` and `decode` of the
products alone, over the weights of one layer in memory, and the bytes a step reads over the drive's sequential rate.
`of_roof` is the roof over the whole run, `decode_of_roof` the larger of disk and products over decoding. `--peers` runs
others (workers/peer.py) in the same limit, each at the batches given: name:batch. `--jobs` runs `flashllm offload run`
over all sequences as it plans them itself, once for each of its --compress, with the planner's `error`. The last line
is one JSON document.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import numpy as np
from memory_group import document_of

from flashllm.base.units import parse_size
from flashllm.offload.policy import Policy

WORKER = Path(__file__).parent / "workers" / "run.py"
PEER = Path(__file__).parent / "workers" / "peer.py"
RUNS: dict[str, dict[str, Any]] = {
    "16 bit": {},
    "16 bit, no overlap": {"overlap": False},
    "4-bit weights": {"weight_bits": 4},
    "4-bit weights and cache": {"weight_bits": 4, "cache_bits": 4},
    "16 bit, cache on disk": {"cache": "d"},
}
TIERS = {  # shares on the device (of a run without one: in its memory), in memory, on the disk
    "g": (1.0, 0.0, 0.0),
    "c": (0.0, 1.0, 0.0),
    "d": (0.0, 0.0, 1.0),
    "h": (0.5, 0.0, 0.5),
    "m": (0.4, 0.3, 0.3),
}


def placement(weights: str, cache: str = "g", hidden: str = "g") -> dict[str, float]:
    """A policy's shares; where each lies is a key of TIERS."""
    kinds = zip("wch", (weights, cache, hidden), strict=True)
    return {f"{kind}{tier}": share for kind, key in kinds for tier, share in zip("gcd", TIERS[key], strict=True)}


def num_layers(model: Path) -> int:
    """Of a Hugging Face folder."""
    return int(json.loads((model / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"])


def command_line(script: str, argv: Sequence[str] | None) -> str:
    """How a script was called, with the names of files alone."""
    return " ".join([Path(script).name, *(Path(each).name if "/" in each else each for each in argv or sys.argv[1:])])


def finish(script: str, args: argparse.Namespace, argv: Sequence[str] | None, **more: Any) -> int:
    """Print the one document of a benchmark over a dummy model, and keep it where `--json` says."""
    document = {
        "benchmark": Path(script).stem,
        "command": command_line(script, argv),
        "weights": "dummy (synthetic)",
        "model": args.model.name,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        **more,
    }
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document))
    return 0


def run_settings(model: Path, policy: Policy | dict[str, Any], **more: Any) -> dict[str, Any]:
    """What workers/run.py needs to know of a run; a block of sequences where `more` does not say how many."""
    policy = policy if isinstance(policy, Policy) else Policy.from_json(policy)
    settings = {"task": "run", "model": str(model), "policy": policy.to_json(), "sequences": policy.block_size}
    return settings | {"weight_bits": None, "cache_bits": None} | more


def settings_of(args: argparse.Namespace, run: dict[str, Any]) -> dict[str, Any]:
    """What the worker needs to know."""
    policy = Policy(
        gpu_batch=args.batch,
        num_batches=-(-args.sequences // args.batch),
        compress_weights="weight_bits" in run,
        compress_cache="cache_bits" in run,
        overlap=run.get("overlap", True),
        **placement("d", run.get("cache", "g")),
    )
    sizes = {name: getattr(args, name) for name in ("sequences", "batch", "prompt", "new")}
    bits = {name: run.get(name) for name in ("weight_bits", "cache_bits")}
    return run_settings(args.model, policy, scratch=str(args.scratch), **sizes, **bits)


def peer_settings(args: argparse.Namespace, peer: str) -> dict[str, Any]:
    """What the peer's worker needs to know of name:batch."""
    name, batch = peer.split(":")
    return {
        "peer": name,
        "model": str(args.model),
        "gguf": str(args.gguf),
        "batch": int(batch),
        "prompt": args.prompt,
        "new": args.new,
        "dtype": args.peer_dtype,
        "ubatch": args.peer_tokens,
        "scratch": str(args.scratch),
    }


def worker(script: Path, settings: dict[str, Any], memory: int | None) -> dict[str, Any]:
    """What the worker printed; with `memory`, in a control group of that many bytes."""
    found = document_of([sys.executable, str(script), json.dumps(settings)], memory)
    return found if memory is None else found | {"group_bytes": memory}


def job(args: argparse.Namespace, compress: str) -> dict[str, Any]:
    """`flashllm offload run` over random prompts of all sequences, by its own plan; whole seconds predicted over those
    measured, less one, are its `error`."""
    prompts = np.random.default_rng(1).integers(10, 1000, (args.sequences, args.prompt)).tolist()
    lines = [{"prompt": ids, "max_tokens": args.new, "ignore_eos": True} for ids in prompts]
    limit = [] if args.memory is None else ["--memory", str(args.memory)]
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        asked, answers = (Path(folder, name) for name in ("in.jsonl", "out.jsonl"))
        asked.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        command = ["-m", "flashllm", "offload", "run", str(args.model), "-i", str(asked), "-o", str(answers), "--json"]
        found = document_of([sys.executable, *command, "--compress", compress, *limit], args.memory)
    row = {"run": "planned" if compress == "none" else f"planned, {compress} in 4 bits", "group_bytes": args.memory}
    if "failed" in found:
        return row | found
    measured, predicted, policy = (found[key] for key in ("measured", "predicted", "policy"))
    whole = [each["prefill_s"] + each["decode_s"] for each in (predicted, measured)]
    return (
        row
        | measured
        | {
            "policy": policy,
            "batch": policy["gpu_batch"] * policy["num_batches"],
            "decode_throughput": args.sequences * (args.new - 1) / measured["decode_s"],
            "predicted": predicted,
            "error": whole[0] / whole[1] - 1,
            "group_peak_bytes": found.get("group_peak_bytes"),
        }
    )


def compared(run: dict[str, Any], roof: dict[str, Any], steps: int) -> dict[str, Any]:
    """`run` with its shares of the roofs. A prompt's pass reads the weights once, as each of `steps` does."""
    read_s = run["bytes_read"] / roof["read_bytes_per_s"]
    prefill = max(roof["prefill_products_s"], read_s / (steps + 1))
    decode = max(roof["decode_products_s"], read_s * steps / (steps + 1))
    products = roof["prefill_products_s"] + roof["decode_products_s"]
    whole = run["prefill_s"] + run["decode_s"]
    busiest = max(run["busy"].values())
    return {
        "products_of_run": products / whole,
        "of_roof": (prefill + decode) / whole,
        "decode_of_roof": decode / run["decode_s"],
        "run_of_busiest": whole / busiest,
        "decode_disk_s": read_s * steps / (steps + 1),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("model", type=Path, help="Hugging Face folder with safetensors")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32, help="sequences computed at once")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--memory", type=parse_size, help="limit of a control group for every run")
    parser.add_argument("--runs", nargs="*", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--jobs", nargs="*", default=[], metavar="COMPRESS", help="none weights,cache ...")
    parser.add_argument("--peers", nargs="*", default=[], metavar="NAME:BATCH", help="accelerate:32 llama:64 ...")
    parser.add_argument("--gguf", type=Path, help="file of llama.cpp's runs")
    parser.add_argument("--layers", type=int, default=32, help="of the whole shape, for the projection")
    parser.add_argument("--peer-dtype", default="bfloat16", help="of accelerate; float32 where bf16 is emulated")
    parser.add_argument("--peer-tokens", type=int, default=2048, help="of the prompts, at once, of llama.cpp")
    parser.add_argument("--scratch", type=Path, default=Path("/tmp"), help="folder for scratch files")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    for name in args.runs:
        settings = settings_of(args, RUNS[name])
        roof = worker(WORKER, settings | {"task": "roofs"}, None)
        run = worker(WORKER, settings, args.memory)
        row = {"run": name, "policy": settings["policy"], **run, **roof}
        if "failed" not in row:
            row |= compared(run, roof, args.new - 1)
            row["projected_throughput"] = row["throughput"] * num_layers(args.model) / args.layers
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    for compress in args.jobs:
        rows.append(job(args, compress))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    for peer in args.peers:
        rows.append({"run": peer, **worker(PEER, peer_settings(args, peer), args.memory)})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    sizes = {name: getattr(args, name) for name in ("sequences", "batch", "prompt", "new")}
    return finish(__file__, args, argv, layers_of_shape=args.layers, **sizes, rows=rows)


if __name__ == "__main__":
    sys.exit(main())
