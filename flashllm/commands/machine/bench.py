"""`flashllm bench [MODEL]`: where each token's time goes on this machine."""

import argparse
import contextlib
import statistics
from collections.abc import Sequence
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
    parser.epilog = "Example: flashllm bench MODEL --memory 7GB"
    options.add_model(parser)
    parser.add_argument("--tokens", metavar="N", type=whole(_WARM_TOKENS + 2), default=64, help="default: %(default)s")
    options.add_json(parser)
    options.add_run(parser)


def main(args: argparse.Namespace) -> int:
    """Generate, and show medians; the first tokens do not count."""
    from flashllm.errors import UsageError

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
    if args.json:
        print_json(facts)
    else:
        print(inert("\n".join(lines(facts))))
    return 0


def summary(times: "Sequence[StepTimes]") -> dict[str, Any]:
    """Medians of the tokens' times in ms, means of their parts and of what was read."""
    totals = sorted(each.total_ms for each in times)
    hits, misses = sum(each.hits for each in times), sum(each.misses for each in times)
    return {
        "tokens": len(times),
        "token_ms": statistics.median(totals),
        "token_ms_p95": totals[int(0.95 * len(totals))],
        "bytes_read": statistics.fmean(each.bytes_read for each in times),
        "hit_rate": hits / (hits + misses) if hits + misses else None,
        **{f"{kind}_ms": statistics.fmean(getattr(each, f"{kind}_ms") for each in times) for kind in KINDS},
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
