"""`flashllm plan [MODEL] --memory SIZE`: what the memory would be used for, the least that would work, and the time of
a token where the drive has been calibrated.

Imports the libraries a run imports, because their size is part of the plan; loads no weights.
"""

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashllm.base.text import inert
from flashllm.commands.options import add_json, add_memory, add_model, find_converted, print_json, say
from flashllm.engine.lean_imports import import_transformers

if TYPE_CHECKING:
    from flashllm.format.manifest import Manifest
    from flashllm.format.popularity import Popularity
    from flashllm.plan.activity import ExpectedActivity
    from flashllm.plan.latency import TokenEstimate
    from flashllm.plan.memory import MemoryPlan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    add_model(parser)
    add_json(parser)
    add_memory(parser)
    parser.add_argument(
        "--trace",
        metavar="FILE",
        type=Path,
        help="the model's activity as tools/record_trace.py recorded it, for a better estimate of its reads",
    )


def main(args: argparse.Namespace) -> int:
    """Print the plan. A limit that cannot work is an error with the numbers."""
    path = find_converted(args)

    import_transformers()
    from flashllm.base.machine import available_nbytes, process_nbytes
    from flashllm.base.units import format_size
    from flashllm.commands.runtime import load_tokenizer
    from flashllm.device.choice import choose_reader, find_costs
    from flashllm.device.store import device_of, device_store_path
    from flashllm.format.manifest import open_model_dir, reads_ahead
    from flashllm.format.popularity import read_popularity
    from flashllm.hf.model import read_config
    from flashllm.plan.latency import estimate_token, product_nbytes
    from flashllm.plan.memory import plan_memory

    manifest, config = open_model_dir(path), read_config(path)
    costs, problem = find_costs(path, args.store if args.store is not None else device_store_path())
    if problem is not None:
        say(problem)
    reader = choose_reader(
        costs, manifest.rows.stride, io_threads=args.io_threads, direct=True, io_backend=args.io_backend
    )
    popularity = read_popularity(path, manifest)
    tokenizer = load_tokenizer(path)  # part of the process in a run, too
    plan = plan_memory(
        manifest,
        config,
        limit=args.memory,
        available=available_nbytes(),
        process=process_nbytes(),
        context=args.context,
        window=args.window,
        cache_policy=args.cache_policy,
        early=reads_ahead(path, manifest),
        popularity=popularity,
        io_threads=reader.depth,
        max_gap=reader.max_gap,
    )
    del tokenizer
    activity = _activity(path, manifest, plan, trace=args.trace, popularity=popularity, gap=reader.max_gap)
    token = None
    if costs is not None:
        token = estimate_token(
            manifest,
            config,
            plan,
            costs=costs,
            choice=reader,
            activity=activity,
            resident_nbytes=product_nbytes(path, config),
        )
    if args.json:
        print_json(
            {
                "path": str(path.absolute()),
                **plan.as_dict(),
                "reader": dataclasses.asdict(reader),
                "token": None if token is None else _document(token, activity),
            }
        )
        return 0
    origin = "--memory" if plan.limit_is_given else "four fifths of what is free"
    neurons = manifest.architecture.num_layers * manifest.architecture.d_ff
    table = [(name, format_size(nbytes), "") for name, nbytes in plan.rows()]
    cached = f"{sum(plan.cache_rows)} of {neurons} neurons ({sum(plan.cache_rows) / neurons:.0%})"
    table[-1] = (*table[-1][:2], cached)
    table.append(("total", format_size(plan.total_nbytes), ""))
    table.append(("limit", format_size(plan.limit_nbytes), origin))
    table.append(("minimum", format_size(plan.minimum_nbytes), f"--memory {-(-plan.minimum_nbytes // 10**6)}MB"))
    width = max(len(name) for name, _, _ in table)
    print(inert(f"{path.absolute()}"))
    for name, size, remark in table:
        print(f"  {name:<{width}}  {size:>8}  {remark}".rstrip())
    if token is None:
        print(inert(f"token: {device_of(path)} is not calibrated; run `flashllm calibrate {path}`"))
    else:
        print(inert("\n".join(_lines(token, activity))))
    return 0


def _activity(
    path: Path,
    manifest: "Manifest",
    plan: "MemoryPlan",
    *,
    trace: Path | None,
    popularity: "Popularity | None",
    gap: int,
) -> "ExpectedActivity":
    from flashllm.errors import FormatError
    from flashllm.format.model_files import TRACE
    from flashllm.format.placed import read_places
    from flashllm.format.trace import Trace
    from flashllm.plan.activity import from_shares, from_trace

    if trace is None and TRACE not in manifest.files:
        return from_shares(manifest, plan, popularity, gap)
    with Trace(trace if trace is not None else path / TRACE) as opened:
        shape = manifest.architecture.num_layers, manifest.architecture.d_ff
        if (opened.info.num_layers, opened.info.num_neurons) != shape:
            raise FormatError(f"{opened.path}: is no trace of {shape[0]} layers of {shape[1]} neurons, as {path} has")
        return from_trace(opened, plan, popularity, gap, read_places(path, manifest))


def _document(token: "TokenEstimate", activity: "ExpectedActivity") -> Mapping[str, Any]:
    return {
        **dataclasses.asdict(token),
        "total_s": token.total_s,
        "activity_source": activity.source,
    }


def _lines(token: "TokenEstimate", activity: "ExpectedActivity") -> list[str]:
    from flashllm.base.units import format_size

    return [
        f"a token ({activity.source})",
        f"  I/O       {token.io_s * 1e3:8.1f} ms  {token.misses:.0f} of {token.active:.0f} active neurons in "
        f"{token.requests:.0f} requests, {format_size(token.bytes_read)}",
        f"  compute   {token.compute_s * 1e3:8.1f} ms  {format_size(token.bytes_touched)} of memory",
        f"  overhead  {token.overhead_s * 1e3:8.1f} ms",
        f"  total     {token.total_s * 1e3:8.1f} ms  {1 / token.total_s:.3g} tokens/s",
    ]
