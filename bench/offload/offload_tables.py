"""Tables 4 and 5 and figure 1 of paper B, measured: where the time goes, what each technique is worth, the frontier.

    python tools/make_dummy_checkpoint.py opt67-4 --shape opt-6.7b --layers 4 --tokenizer DIR
    python bench/offload/offload_tables.py breakdown opt67-4 --sequences 64 --batch 32 --prompt 128 --new 8
    python bench/offload/offload_tables.py ablation opt67-4 --sequences 64 --prompt 64 --new 16 --memory 1.6GB
    python bench/offload/offload_tables.py frontier opt67-4 --batches 1 4 16 64 --prompt 32 --new 16

`breakdown`: seconds of each activity in the prompts' pass and in decoding, one at a time (overlap off, as the paper's);
decoding is what a run has beyond one that ends after its prompts. `ablation`: the planned policy under --memory, then
the same with one technique off, after a short run to warm up: in --rounds, the lower median of each, and how far the
fastest was above the slowest (`spread`). Where the plan is a block of one batch, row by row is the same run
(`same_as`). The paper's "no CPU compute" has no row: here the CPU is the device. `frontier`: batch sizes with weights
on disk, in 16 bit and with 4-bit weights and cache; a point is on the frontier where none of its kind is both sooner
and faster. Every run is a process of its own, with --memory in a control group of that size (root).
Weights are dummies (synthetic), which changes no time. Fewer layers than the shape has are fine: `projected_throughput`
scales a run's time by the layers, the head's time too, so it is rather too low. The last line is one JSON document.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from offload_run import WORKER, finish, num_layers, placement, run_settings, worker

from flashllm.base.units import parse_size
from flashllm.errors import BudgetError
from flashllm.offload.launch import LaunchOptions, prepare
from flashllm.offload.policy import Policy
from flashllm.offload.shape import load_shape

WIDTHS: dict[str, dict[str, Any]] = {"16 bit": {}, "4 bit": {"weight_bits": 4, "cache_bits": 4}}
PARTS = {  # table 4's columns, of the runtime's activities
    "compute": ("compute",),
    "weights read": ("load weights",),
    "cache read": ("load cache",),
    "cache written": ("store cache",),
    "activations": ("load activation", "store activation"),
}


def run(args: argparse.Namespace, policy: Policy, **changes: Any) -> dict[str, Any]:
    """One run in a process of its own. `changes`: of the worker's settings."""
    sizes = {name: getattr(args, name) for name in ("sequences", "prompt", "new") if hasattr(args, name)}
    settings = run_settings(args.model, policy, scratch=str(args.scratch), **sizes | changes)
    found = worker(WORKER, settings, args.memory)
    if "throughput" in found:
        found["projected_throughput"] = found["throughput"] * num_layers(args.model) / args.layers
    print(json.dumps(found), file=sys.stderr, flush=True)
    return found


def breakdown(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Table 4: seconds by stage and activity."""
    batches = -(-args.sequences // args.batch)
    policy = Policy(gpu_batch=args.batch, num_batches=batches, overlap=False, **placement("d"))
    rows = []
    for name, bits in WIDTHS.items():
        packed = replace(policy, compress_weights=bool(bits), compress_cache=bool(bits))
        prompts, whole = run(args, packed, **bits, new=1), run(args, packed, **bits)
        if "failed" in prompts or "failed" in whole:
            rows.append({"run": name, "failed": True})
            continue
        for stage, seconds in (("prefill", prompts["prefill_s"]), ("decoding", whole["decode_s"])):
            row: dict[str, Any] = {"run": name, "stage": stage, "total": seconds}
            for part, activities in PARTS.items():
                of_prompts = sum(prompts["busy"].get(each, 0.0) for each in activities)
                of_whole = sum(whole["busy"].get(each, 0.0) for each in activities)
                row[part] = of_prompts if stage == "prefill" else of_whole - of_prompts
            rows.append(row | {"of_compute": row["compute"] / seconds})
    return rows


def ablation(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Table 5: throughput with one technique off at a time."""
    shape = load_shape(str(args.model))
    options = LaunchOptions(memory=args.memory, device="cpu", scratch=args.scratch)
    sizes = [(args.prompt, args.prompt + args.new - 1)] * args.sequences
    policy = prepare(args.model, shape, sizes, options, report=lambda line: print(line, file=sys.stderr)).policy
    all_in_memory = replace(policy, **placement("g"))
    alone = {"num_batches": 1, "wg": 0.0, "wc": 0.0, "wd": 1.0}
    variants = [
        ("all", policy),
        ("no policy search: one batch at a time, all weights on disk", replace(policy, **alone)),
        ("no overlap", replace(policy, overlap=False)),
        ("no disk", all_in_memory),
        ("the policy of DeepSpeed: batches of 8, row by row", replace(policy, gpu_batch=8, **alone)),
    ]
    rows: list[dict[str, Any]] = []
    for name, variant in variants:
        row: dict[str, Any] = {"run": name, "policy": variant.to_json(), "rounds": []}
        try:
            prepare(args.model, shape, sizes, replace(options, policy=variant), report=lambda _: None)
        except BudgetError as error:
            row["does not fit"] = str(error)
        rows.append(row)
    fits = [(row, variant) for row, (_, variant) in zip(rows, variants, strict=True) if "does not fit" not in row]
    run(args, fits[0][1], new=2)  # the machine's first read of the model is of no variant
    for _ in range(args.rounds):
        for row, variant in fits:
            row["rounds"].append(run(args, variant))
    for row, _ in fits:
        rates = sorted(one["throughput"] for one in row["rounds"] if "throughput" in one)
        if rates:
            middle = rates[(len(rates) - 1) // 2]
            row.update(next(one for one in row["rounds"] if one.get("throughput") == middle))
            row["spread"] = rates[-1] / rates[0] - 1
        if rates and "throughput" in rows[0]:
            row["of_all"] = row["throughput"] / rows[0]["throughput"]
    return rows


def frontier(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Figure 1: latency of a block and throughput, by batch."""
    rows: list[dict[str, Any]] = []
    for name, bits in WIDTHS.items():
        points: list[dict[str, Any]] = []
        for batch in args.batches:
            packed = bool(bits)
            policy = Policy(gpu_batch=batch, compress_weights=packed, compress_cache=packed, **placement("d"))
            found = run(args, policy, **bits)
            point = {"run": name, "batch": batch, **found}
            if "throughput" in found:
                point["latency_s"] = found["prefill_s"] + found["decode_s"]
            points.append(point)
        for point in points:
            if "latency_s" in point:
                point["on_frontier"] = not any(
                    other["latency_s"] < point["latency_s"] and other["throughput"] > point["throughput"]
                    for other in points
                    if "latency_s" in other
                )
        rows += points
    return rows


TABLES = {"breakdown": breakdown, "ablation": ablation, "frontier": frontier}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    tables = parser.add_subparsers(dest="table", required=True)
    for name in TABLES:
        table = tables.add_parser(name)
        table.add_argument("model", type=Path, help="Hugging Face folder with safetensors")
        table.add_argument("--prompt", type=int, default=32)
        table.add_argument("--new", type=int, default=16)
        table.add_argument("--memory", type=parse_size, help="limit of a control group for every run")
        table.add_argument("--layers", type=int, default=32, help="of the whole shape, for the projection")
        table.add_argument("--scratch", type=Path, default=Path("/tmp"), help="folder for scratch files")
        table.add_argument("--json", type=Path)
        if name == "frontier":
            table.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
        else:
            table.add_argument("--sequences", type=int, default=64)
        if name == "ablation":
            table.add_argument("--rounds", type=int, default=2)
        if name == "breakdown":
            table.add_argument("--batch", type=int, default=32, help="sequences computed at once")
    args = parser.parse_args(argv)
    layers = {"layers": num_layers(args.model), "layers_of_shape": args.layers}
    rows = TABLES[args.table](args)
    return finish(__file__, args, argv, benchmark=f"offload_{args.table}", **layers, rows=rows)


if __name__ == "__main__":
    sys.exit(main())
