"""`flashllm models`: well-known models, what each takes on this machine, and what to type. Nothing is downloaded."""

import argparse
from typing import TYPE_CHECKING, Any

from flashllm.commands.asked import run_config
from flashllm.commands.options import add_engine, add_json, add_memory

if TYPE_CHECKING:
    from flashllm.config import RunConfig
    from flashllm.convert.outline import WellKnown

_TRAINED = "smollm2"  # in a hub id: the one that was run with trained weights
_ANY = 2**50  # bytes: a limit that every model fits


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Example: flashllm models --memory 8GB; then flashllm plan qwen3-30b-a3b --memory 8GB"
    add_json(parser)
    add_memory(parser)
    add_engine(parser)


def main(args: argparse.Namespace) -> int:
    """Print a line a model, those first that need least."""
    from flashllm.base.command_line import print_json, say
    from flashllm.base.machine import available_nbytes
    from flashllm.base.units import format_size
    from flashllm.base.user_dirs import user_cache_dir
    from flashllm.commands.plan import OUTLINE_BITS, PROMPT
    from flashllm.convert.outline import well_known
    from flashllm.profile.store import find_profile

    config, available = run_config(args), available_nbytes()
    rows = sorted((row_of(known, config, available) for known in well_known()), key=lambda row: row["minimum_bytes"])
    if args.json:
        print_json({"models": rows})
        return 0
    limit = f"{format_size(config.memory)}" if config.memory is not None else "four fifths of what is free"
    print(f"in {OUTLINE_BITS} bits, within {limit}; a context of 8192 tokens unless --context; tokenizers not counted")
    print(f"{'':<20} {'16, 8, 4 bits on disk':>25} {'least memory':>13} {'a token':>10} {f'first of {PROMPT}':>13}")
    for row in rows:
        sizes = ", ".join(format_size(row["bytes"][bits]) for bits in ("16", "8", "4"))
        times = ("needs more", "") if not row["fits"] else (_ms(row["token_s"]), _ms(row["first_token_s"]))
        least = format_size(row["minimum_bytes"])
        print(f"{row['name']:<20} {sizes:>25} {least:>13} {times[0]:>10} {times[1]:>13}  {row['type']}".rstrip())
    print(
        "a conversion has these sizes; an fp8 original takes half of its 16 bits'; gpt-oss and BitNet keep their codes"
    )
    print("tested against transformers' arithmetic on small random models, never run trained, but for SmolLM2")
    if any(row["fits"] and row["first_token_s"] is None for row in rows):
        measured = find_profile(user_cache_dir(), config.store)[0] is not None
        lacks = "products of prompts are not measured, so no first tokens" if measured else "no profile, so no times"
        say(f"{user_cache_dir()}: {lacks}; `flashllm calibrate` measures this drive and machine in two minutes")
    return 0


def row_of(known: "WellKnown", config: "RunConfig", available: int) -> dict[str, Any]:
    """A model's sizes in bytes and times in seconds within the run's limit (None: not known)."""
    import dataclasses

    from flashllm.base.group_codes import DEFAULT_GROUP, code_of
    from flashllm.base.machine import default_limit, process_nbytes
    from flashllm.commands.plan import OUTLINE_BITS, PROMPT, estimate, to_type
    from flashllm.convert.outline import outlined
    from flashllm.format.model_dir import ModelDir
    from flashllm.plan.latency import estimate_prompt
    from flashllm.plan.resolve import resolve

    parameters = known.parameters
    config = dataclasses.replace(config, context=config.context or known.context)
    with outlined(known, OUTLINE_BITS) as path:
        model = ModelDir.open(path)
        process = process_nbytes()
        plan = resolve(dataclasses.replace(config, memory=_ANY), model, available=_ANY, process=process)
        minimum, limit = plan.memory.minimum_nbytes, config.memory or default_limit(available + process)
        fits, token, prompt = minimum <= limit, None, None
        if fits:
            plan = resolve(dataclasses.replace(config, memory=limit), model, available=limit, process=process)
            token = estimate(model, plan)
            if plan.profile is not None:
                prompt = estimate_prompt(model, plan.memory, costs=plan.profile, tokens=PROMPT)
        eight = code_of(8, DEFAULT_GROUP, has_minimum=False).vector_nbytes(DEFAULT_GROUP)
        nbytes = {"16": 2 * parameters, "8": parameters * eight // DEFAULT_GROUP}
        nbytes["4"] = sum(one.nbytes for one in model.manifest.files.values())
    return {
        "name": known.name,
        "hub": known.hub,
        "parameters": parameters,
        "published": known.published,
        "bytes": nbytes,
        "minimum_bytes": minimum,
        "fits": fits,
        "token_s": None if token is None else token.document["total_s"],
        "first_token_s": None if prompt is None or prompt.products_s is None else prompt.total_s,
        "run_trained": _TRAINED in known.hub.lower(),
        "type": to_type(known),
    }


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
