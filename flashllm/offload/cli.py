"""The command line of engine B: `flashllm offload plan`, and the verb of `cli_run`.

Reads arguments and prints; planning and running are elsewhere.
Setting the parser up imports neither numpy, scipy nor torch: the planner is imported when a plan is wanted.
"""

import argparse
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashllm.base.command_line import print_json, size, whole
from flashllm.base.units import format_size
from flashllm.errors import UsageError
from flashllm.offload import cli_run

if TYPE_CHECKING:
    from flashllm.offload.machine.hardware import Hardware
    from flashllm.offload.planner.predict import Prediction
    from flashllm.offload.policy import Policy


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="offload_verb", metavar="VERB", required=True)
    plan = verbs.add_parser(
        "plan",
        help="the best placement of weights, cache and activations, and what it costs",
        description="Searches for the offloading policy of greatest throughput and prices it. Needs no weights.",
    )
    plan.add_argument(
        "model",
        metavar="MODEL_OR_CONFIG",
        help="a folder, config.json or GGUF file, a name of `flashllm models`, opt-175b",
    )
    plan.add_argument("--prompt-len", type=whole(1), required=True, metavar="S", help="tokens of every (padded) prompt")
    plan.add_argument("--gen-len", type=whole(1), required=True, metavar="N", help="new tokens for each prompt")
    plan.add_argument(
        "--hardware",
        default="here",
        metavar="FILE|t4",
        help="another machine, by a file of its figures or by name (default: this one, by its profile)",
    )
    plan.add_argument("--memory", type=size, metavar="SIZE", help="limit of memory, e.g. 16GB (default: the machine's)")
    cli_run.add_compress(plan, default="none; of --policy, its own")
    plan.add_argument("--policy", type=Path, metavar="FILE", help="price this policy instead of searching")
    plan.add_argument("--json", action="store_true", help="one JSON document on stdout")
    plan.set_defaults(offload_main=_plan)
    cli_run.add_arguments(verbs)


def main(args: argparse.Namespace) -> int:
    """Runs the verb that was parsed. Errors are the umbrella's to print."""
    status: int = args.offload_main(args)
    return status


def _plan(args: argparse.Namespace) -> int:
    from flashllm.offload.planner.predict import predict
    from flashllm.offload.planner.search import SearchSpace, search
    from flashllm.offload.policy import Policy, Workload, compression
    from flashllm.offload.shape import load_shape

    compress: dict[str, Any] = {} if args.compress is None else compression(args.compress)
    shape = load_shape(args.model)
    workload = Workload(prompt_len=args.prompt_len, gen_len=args.gen_len)
    hardware = _hardware(args, shape.dtype)
    if hardware.device != "cpu" and (shape.experts or shape.state_bytes):
        kind = "mixtures of experts" if shape.experts else "layers that keep a state"
        print(f"this plan is a GPU's; `run` computes {kind} on the CPU alone", file=sys.stderr)
    document: dict[str, Any] = {"model": shape.name, "hardware": hardware.to_json()}
    if args.policy is not None:
        policy = replace(Policy.load(args.policy), **compress)
        prediction = predict(shape, hardware, workload, policy)
    else:
        plan = search(shape, hardware, workload, SearchSpace(**compress))
        policy, prediction = plan.policy, plan.prediction
        document["search"] = {
            "pairs": plan.pairs,
            "programs": plan.programs,
            "relaxed_throughput": plan.relaxed_throughput,
        }
    document["policy"] = policy.to_json()
    document["predicted"] = asdict(prediction)
    for resource, excess in prediction.over.items():
        print(f"this policy does not fit: {resource} memory is short by {format_size(excess)}", file=sys.stderr)
    if args.json:
        print_json(document)
    else:
        print(_text(document, policy, prediction, hardware))
    return 0 if not prediction.over else 1


def _hardware(args: argparse.Namespace, dtype: str | None) -> "Hardware":
    from flashllm.offload.machine.hardware import Hardware
    from flashllm.offload.machine.machines import MACHINES
    from flashllm.offload.planner.local import machine_here

    if args.hardware == "here":
        path = Path(args.model)
        hardware = machine_here(path if path.exists() else Path(), dtype)
    elif args.hardware in MACHINES:
        hardware = MACHINES[args.hardware]
    elif Path(args.hardware).is_file():
        hardware = Hardware.load(Path(args.hardware))
    else:
        raise UsageError(f"--hardware {args.hardware}: neither a file nor one of: {', '.join(MACHINES)}")
    # The memory of a machine without a GPU is its device tier.
    return hardware.limited(**{"device_memory" if hardware.device == "cpu" else "cpu_memory": args.memory})


def _text(document: dict[str, Any], policy: "Policy", prediction: "Prediction", hardware: "Hardware") -> str:
    from flashllm.offload.planner.predict import STAGE_NAMES

    methods = [
        name
        for name, used in (
            ("weights in 4 bits", policy.compress_weights),
            ("cache in 4 bits", policy.compress_cache),
            ("attention on the CPU where the cache is there", policy.cpu_attention),
            (f"top {policy.attention_sparsity:.0%} of values", policy.attention_sparsity < 1),
            ("no overlap", not policy.overlap),
        )
        if used
    ]
    lines = [
        f"{document['model']} on {hardware.name} ({hardware.source})",
        f"policy      GPU batch {policy.gpu_batch} × {policy.num_batches} = block of {policy.block_size}",
    ]
    for kind, name in (("w", "weights"), ("c", "KV cache"), ("h", "activations")):
        lines.append(f"  {name:12s}{', '.join(policy.shares(kind, 1))}")
    if methods:
        lines.append(f"  {'with':12s}{', '.join(methods)}")
    lines.append(f"stage times over the block, s{'':8s}prefill      decode")
    for stage, name in STAGE_NAMES.items():
        lines.append(f"  {name:30s}{prediction.prefill_stages[stage]:12.4g}{prediction.decode_stages[stage]:12.4g}")
    lines.append(f"  {'with overlap':30s}{prediction.prefill_s:12.4g}{prediction.decode_s:12.4g}")
    binding = prediction.binding
    lines.append(f"binding     {binding['what']}, {binding['share_of_phase']:.0%} of it if alone")
    lines.append(f"full        {', '.join(binding['full']) or 'no memory'}")
    one_memory = hardware.device == "cpu"
    for name, peak, has in (
        ("memory" if one_memory else "device", prediction.peak_device, hardware.device_usable),
        *([] if one_memory else [("CPU", prediction.peak_cpu, hardware.cpu_usable)]),
        ("disk", prediction.peak_disk, hardware.disk_capacity),
    ):
        lines.append(f"  peak {name:8s}{format_size(peak)} of {format_size(has)}")
    rate = f"{prediction.throughput:.3g} tokens/s ({prediction.decode_throughput:.3g} decoding)"
    lines.append(f"predicted   {rate}, {prediction.latency_s:.4g} s a block")
    return "\n".join(lines)
