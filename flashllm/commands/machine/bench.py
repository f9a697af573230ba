"""`flashllm bench [MODEL]`: where each token's time goes on this machine, with a picture of it."""

import argparse
import contextlib
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashllm.base.command_line import print_json, say, whole
from flashllm.base.text import inert
from flashllm.commands import options
from flashllm.commands.options import find_model, loading

if TYPE_CHECKING:
    from flashllm.engine.meter import StepTimes

KINDS = {"io": "#d97706", "memory": "#7c3aed", "compute": "#2563eb", "other": "#9ca3af"}
NAMES = {"io": "reading from flash", "memory": "managing memory", "compute": "computing", "other": "other"}
PROMPT = (
    "Once upon a time there was a little dog who lived in a house by the sea. Every morning the dog ran down to the "
    "water to look for something new, and one day"
)
_WARM_TOKENS = 5  # the first ones fill the neuron cache
_PROMPT_SHARE = 4  # of the context the prompt takes at most this part
_BAR_CHARS = 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.epilog = "Example: flashllm bench MODEL --memory 7GB --plot tokens.svg"
    options.add_model(parser)
    parser.add_argument("--tokens", metavar="N", type=whole(_WARM_TOKENS + 2), default=64, help="default: %(default)s")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="write the picture as SVG; it must not exist")
    options.add_json(parser)
    options.add_memory(parser)
    options.add_engine(parser)
    options.add_no_profile(parser)
    options.add_verbose(parser)


def main(args: argparse.Namespace) -> int:
    """Generate, and show medians; the first tokens do not count."""
    from flashllm.errors import UsageError

    if args.plot is not None and args.plot.exists():
        raise UsageError(f"--plot {args.plot} exists; give another name")
    path = find_model(args)
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
    if args.plot is not None:
        args.plot.write_text(svg(tokens[1:], title=path.name), encoding="utf-8")
    if args.json:
        print_json(facts)
    else:
        print(inert("\n".join(lines(facts))))
    return 0


def summary(times: "Sequence[StepTimes]") -> dict[str, Any]:
    """Medians of tokens' times, in ms; bytes and hits a token."""
    totals = sorted(each.total_ms for each in times)
    hits, active = sum(each.hits for each in times), sum(each.hits + each.misses for each in times)
    return {
        "tokens": len(times),
        "token_ms": statistics.median(totals),
        "token_ms_p95": totals[min(len(totals) - 1, int(0.95 * len(totals)))],
        **{f"{kind}_ms": statistics.fmean(getattr(each, f"{kind}_ms") for each in times) for kind in KINDS},
        "bytes_read": sum(each.bytes_read for each in times) / len(times),
        "hit_rate": hits / active if active else None,
    }


def lines(facts: dict[str, Any]) -> list[str]:
    """The facts for a person."""
    from flashllm.base.units import format_size

    direct = "direct reads" if facts["direct_io"] else "reads through the page cache"
    head = f"{facts['path']}: mode {facts['mode']}, {facts['threads']} threads, {direct}"
    total = sum(facts[f"{kind}_ms"] for kind in KINDS)
    bars = []
    for kind in KINDS:
        share = facts[f"{kind}_ms"] / total
        bar = "█" * round(share * _BAR_CHARS)
        bars.append(f"  {NAMES[kind]:<18} {facts[f'{kind}_ms']:9.2f} ms  {share:4.0%}  {bar}".rstrip())
    hits = "" if facts["hit_rate"] is None else f", {facts['hit_rate']:.1%} of the neurons found in memory"
    return [
        head,
        f"prompt  {facts['prompt_tokens']} tokens in {facts['prompt_ms']:.0f} ms",
        f"token   {facts['token_ms']:.2f} ms (median of {facts['tokens']}; 95 % within {facts['token_ms_p95']:.2f}), "
        f"{1e3 / facts['token_ms']:.1f} tokens/s; on average",
        *bars,
        f"  {format_size(facts['bytes_read'])} read a token{hits}",
    ]


def svg(times: "Sequence[StepTimes]", *, title: str) -> str:
    """The picture: a stacked bar a token."""
    from xml.sax.saxutils import escape

    width, height, left, top = max(480, 8 * len(times)), 220, 50, 40
    most = max(each.total_ms for each in times)
    scale, step = (height - 10) / most, width / len(times)
    parts = []
    for at, each in enumerate(times):
        bottom = float(top + height)
        for kind, colour in KINDS.items():
            length = getattr(each, f"{kind}_ms") * scale
            bottom -= length
            place = f'x="{left + at * step:.1f}" y="{bottom:.1f}" width="{step * 0.85:.1f}" height="{length:.1f}"'
            parts.append(f'<rect {place} fill="{colour}"/>')
    for at, (kind, colour) in enumerate(KINDS.items()):
        x = left + at * 130
        parts.append(f'<rect x="{x}" y="{top + height + 12}" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 15}" y="{top + height + 21}">{NAMES[kind]}</text>')
    heading = escape(f"{title}: milliseconds of each token, at most {most:.1f}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 20} {top + height + 40}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="{left}" y="22" font-size="15">{heading}</text>{"".join(parts)}</svg>\n'
    )
