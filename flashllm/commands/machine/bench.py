"""`flashllm bench [MODEL]`: where each token's time goes on this machine; with --report by a fixed protocol."""

import argparse
import contextlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashllm.base.command_line import print_json, say, whole
from flashllm.base.text import inert
from flashllm.commands import options
from flashllm.commands.asked import find_model, loading

if TYPE_CHECKING:
    from flashllm.engine.meter import StepTimes

KINDS = {"io": "reading from flash", "memory": "managing memory", "compute": "computing", "other": "other"}
PROMPT = (
    "Once upon a time there was a little dog who lived in a house by the sea. Every morning the dog ran down to the "
    "water to look for something new, and one day"
)
_WARM_TOKENS = 5  # the first ones fill the neuron cache
_PROMPT_SHARE = 4  # of the context the prompt takes at most this part
_BAR_CHARS = 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Examples: flashllm bench MODEL --memory 7GB; flashllm bench FILE.gguf --memory 7GB --report out.md"
    options.add_model(parser)
    parser.add_argument("--tokens", metavar="N", type=whole(_WARM_TOKENS + 2), default=64, help="default: %(default)s")
    parser.add_argument(
        "--report",
        metavar="FILE",
        nargs="?",
        const="",
        help="a fixed protocol in the place of --tokens, minutes long: prompts of 128 and 2,048 tokens, cold and warm, "
        "with the machine and the drive; printed, and written to FILE as Markdown and to FILE.json",
    )
    parser.add_argument(
        "--beside", choices=("llama.cpp",), help="with --report: the same for llama.cpp on the same GGUF file"
    )
    options.add_json(parser)
    options.add_run(parser)


def main(args: argparse.Namespace) -> int:
    """Generate, and show medians; the first tokens do not count."""
    from flashllm.errors import UsageError

    if args.beside is not None and args.report is None:
        raise UsageError("--beside is a part of --report")
    path = find_model(args)
    if args.report is not None:
        return _report(args, path)
    with contextlib.ExitStack() as stack:
        with loading(path):
            from flashllm.commands.runtime import open_session
            from flashllm.generate.sampling import SamplingOptions
            from flashllm.generate.session import PrefillRecord, TokenRecord

            sampling = SamplingOptions(max_new_tokens=args.tokens, ignore_eos=True)
            session, model = stack.enter_context(open_session(args, path, sampling))
        prompt = session.tokenizer.encode(PROMPT)[: max(1, session.context_limit // _PROMPT_SHARE)]
        records = list(session.stream_ids(prompt))
        if session.stopped == "context":
            say(f"the context limit of {session.context_limit} tokens ended the measurement")
        prefill = next(record for record in records if isinstance(record, PrefillRecord))
        tokens = [record.times for record in records if isinstance(record, TokenRecord)]
        if len(tokens) < _WARM_TOKENS + 2:
            raise UsageError(f"only {len(tokens)} tokens fit the context; give a larger --context")
        facts = {
            "path": str(path.absolute()),
            "mode": model.plan.mode,
            "direct_io": model.direct_io,
            "threads": model.plan.threads,
            "memory_limit_bytes": model.plan.memory.limit_nbytes,
            "prompt_tokens": prefill.tokens,
            "prompt_ms": prefill.times.total_ms,
            **summary(tokens[_WARM_TOKENS:]),
        }
    if args.json:
        print_json(facts)
    else:
        print(inert("\n".join(lines(facts))))
    return 0


def _report(args: argparse.Namespace, path: Path) -> int:
    """Print the protocol's report, and write it where a file is named."""
    import json

    from flashllm.commands.machine.report import markdown, report

    file = Path(args.report) if args.report else None
    if file is not None:
        file.touch()  # what cannot be written is known before minutes are spent
    document = report(args, path)
    block = markdown(document)
    if file is not None:
        file.write_text(block + "\n", encoding="utf-8")
        file.with_name(f"{file.name}.json").write_text(json.dumps(document) + "\n", encoding="utf-8")
    if args.json:
        print_json(document)
    else:
        print(inert(block))
    return 0


def summary(times: "Sequence[StepTimes]") -> dict[str, Any]:
    """The figures of `report.summary` that `bench` prints, by name; times in ms."""
    from flashllm.commands.machine import report

    found = report.summary({"prompt": None, "tokens": [asdict(each) for each in times]})
    return {
        "tokens": len(times),
        **{name: found[name] for name in ("token_ms", "token_ms_p95", "bytes_read", "hit_rate")},
        **{f"{kind}_ms": found["mean_ms"][kind] for kind in KINDS},
    }


def lines(facts: dict[str, Any]) -> list[str]:
    from flashllm.base.units import format_size

    direct = "direct reads" if facts["direct_io"] else "reads through the page cache"
    head = f"{facts['path']}: mode {facts['mode']}, {facts['threads']} threads, {direct}"
    total = sum(facts[f"{kind}_ms"] for kind in KINDS)
    bars = []
    for kind, name in KINDS.items():
        share = facts[f"{kind}_ms"] / total
        bar = "█" * round(share * _BAR_CHARS)
        bars.append(f"  {name:<18} {facts[f'{kind}_ms']:9.2f} ms  {share:4.0%}  {bar}".rstrip())
    hits = "" if facts["hit_rate"] is None else f", {facts['hit_rate']:.1%} of the neurons found in memory"
    return [
        head,
        f"prompt  {facts['prompt_tokens']} tokens in {facts['prompt_ms']:.0f} ms",
        f"token   {facts['token_ms']:.2f} ms (median of {facts['tokens']}; 95 % within {facts['token_ms_p95']:.2f}), "
        f"{1e3 / facts['token_ms']:.1f} tokens/s; on average",
        *bars,
        f"  {format_size(facts['bytes_read'])} read a token{hits}",
    ]
