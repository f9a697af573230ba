"""`flashllm generate [MODEL] --prompt TEXT`: continues one prompt; with --json, every token's times and bytes."""

import argparse
import dataclasses
import sys
from typing import Any

from flashllm.commands import options
from flashllm.commands.options import find_model, print_json, say
from flashllm.terminal import inert, valid_unicode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    options.add_model(parser)
    parser.add_argument("--prompt", metavar="TEXT", required=True, help="the text to continue; -: standard input")
    parser.add_argument(
        "--max-new-tokens", metavar="N", type=options.whole(1), default=128, help="default: %(default)s"
    )
    options.add_json(parser)
    options.add_memory(parser)
    options.add_engine(parser)
    options.add_sampling(parser, defaults="by default always the likeliest token")


def main(args: argparse.Namespace) -> int:
    """Generate: text as it comes and a summary on standard error, or one JSON document."""
    prompt = _read_prompt(args.prompt)
    path = find_model(args)

    from flashllm.commands.runtime import open_session
    from flashllm.generate import PrefillRecord, SamplingOptions, TokenRecord
    from flashllm.machine import peak_process_nbytes
    from flashllm.turn_stats import TurnStats
    from flashllm.units import format_size

    sampling = SamplingOptions(max_new_tokens=args.max_new_tokens, **options.given_sampling(args))
    with open_session(args, path, sampling) as session:
        stats, prefill, tokens = TurnStats(), None, list[TokenRecord]()
        for record in session.stream(prompt, add_special=True):
            stats.add(record)
            if isinstance(record, PrefillRecord):
                prefill = record
                continue
            tokens.append(record)
            if not args.json:
                sys.stdout.write(inert(record.text))
                sys.stdout.flush()
        engine = session.model.engine
        if args.json:
            print_json(
                {
                    "text": "".join(token.text for token in tokens),
                    "token_ids": [token.token_id for token in tokens],
                    "tokens": [_flat(token) for token in tokens],
                    "prefill": None if prefill is None else _flat(prefill),
                    "stopped": session.stopped,
                    "plan": engine.plan.as_dict(),
                    "direct_io": engine.direct_io,
                    "peak_rss_bytes": peak_process_nbytes(),
                    "model": {
                        "path": str(path.absolute()),
                        "source": engine.manifest.source.name,
                        "model_type": engine.manifest.architecture.model_type,
                        "dtype": engine.manifest.dtype,
                        "mode": args.mode,
                    },
                    "notices": engine.notices,
                }
            )
        else:
            sys.stdout.write("\n")
            say(f"{stats.summary()}, peak memory {format_size(peak_process_nbytes())}")
        if session.stopped == "context":
            say(f"the context limit of {session.context_limit} tokens is reached")
    return 0


def _read_prompt(argument: str) -> str:
    if argument != "-":
        return valid_unicode(argument)
    return sys.stdin.buffer.read().decode("utf-8", "replace").removesuffix("\n")


def _flat(record: Any) -> dict[str, Any]:
    """A record with its times beside its other fields."""
    fields = dataclasses.asdict(record)
    times = fields.pop("times")
    return {**fields, **times}
