"""`flashllm plan [MODEL] --memory SIZE`: what the memory would be used for, and the least that would work.

Imports the libraries a run imports, because their size is part of the plan; loads no weights.
"""

import argparse

from flashllm.commands.options import add_json, add_memory, add_model, find_converted, print_json
from flashllm.terminal import inert


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    add_model(parser)
    add_json(parser)
    add_memory(parser)


def main(args: argparse.Namespace) -> int:
    """Print the plan. A limit that cannot work is an error with the numbers."""
    path = find_converted(args)

    from flashllm.budget import plan_memory
    from flashllm.commands.runtime import load_tokenizer
    from flashllm.machine import available_nbytes, process_nbytes
    from flashllm.manifest import open_model_dir, reads_ahead
    from flashllm.model import read_config
    from flashllm.popularity import read_popularity
    from flashllm.units import format_size

    manifest, config = open_model_dir(path), read_config(path)
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
        popularity=read_popularity(path, manifest),
        io_threads=args.io_threads,
        early=reads_ahead(path, manifest),
    )
    del tokenizer
    if args.json:
        print_json({"path": str(path.absolute()), **plan.as_dict()})
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
    return 0
