"""`flashllm generate [MODEL] --prompt TEXT`: continues one prompt; with --json, every token's times and bytes."""

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashllm.base.command_line import print_json, say, whole
from flashllm.base.text import inert, valid_unicode
from flashllm.commands import options
from flashllm.commands.asked import find_model, loading

if TYPE_CHECKING:
    from flashllm.chat.statistics import TurnStats
    from flashllm.engine.model import Model
    from flashllm.generate.grammar import Constraint
    from flashllm.generate.session import PrefillRecord, Session, TokenRecord


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument("--prompt", metavar="TEXT", required=True, help="the text to continue; -: standard input")
    parser.add_argument("--max-new-tokens", metavar="N", type=whole(1), default=128, help="default: %(default)s")
    parser.add_argument(
        "--json-schema", metavar="FILE", type=Path, help="the answer is JSON that is valid by the schema in FILE"
    )
    options.add_json(parser)
    options.add_run(parser, sampling="by default always the likeliest token")


def main(args: argparse.Namespace) -> int:
    """Generate: text as it comes and a summary on standard error, or one JSON document."""
    prompt = _read_prompt(args.prompt)
    path = find_model(args)
    with contextlib.ExitStack() as stack:
        with loading(path):
            from flashllm.base.machine import peak_process_nbytes
            from flashllm.base.units import format_size
            from flashllm.commands.runtime import open_session
            from flashllm.generate.sampling import SamplingOptions

            sampling = SamplingOptions(max_new_tokens=args.max_new_tokens, **options.given_sampling(args))
            constraint = None if args.json_schema is None else _schema(args.json_schema)
            session, model = stack.enter_context(open_session(args, path, sampling, constraint=constraint))
        matcher = session.matcher
        if args.json:
            records = list(session.stream(prompt, add_special=True))
            print_json({**_document(path, session, model, records), "peak_rss_bytes": peak_process_nbytes()})
        else:
            stats = _show(session.stream(prompt, add_special=True))
            say(f"{stats.summary()}, peak memory {format_size(peak_process_nbytes())}")
        cut = "" if matcher is None or matcher.is_whole else ": the answer is not whole JSON"
        if session.stopped == "context":
            say(f"the context limit of {session.context_limit} tokens is reached{cut}")
        elif session.stopped == "length" and cut:
            say(f"--max-new-tokens {args.max_new_tokens} is reached{cut}")
    return 0


def _show(records: "Iterable[PrefillRecord | TokenRecord]") -> "TurnStats":
    """Print the text as it comes. A line is ended also where an interrupt or an error ends the text."""
    from flashllm.chat.statistics import TurnStats
    from flashllm.generate.session import TokenRecord

    stats = TurnStats()
    try:
        for record in records:
            stats.add(record)
            if isinstance(record, TokenRecord):
                sys.stdout.write(inert(record.text))
                sys.stdout.flush()
    finally:
        if stats.num_tokens:
            sys.stdout.write("\n")
            sys.stdout.flush()
    return stats


def _document(
    path: Path, session: "Session", model: "Model", records: "list[PrefillRecord | TokenRecord]"
) -> dict[str, Any]:
    from flashllm.generate.session import TokenRecord

    tokens = [record for record in records if isinstance(record, TokenRecord)]
    plan, manifest = model.plan, model.manifest
    return {
        "text": "".join(token.text for token in tokens),
        "token_ids": [token.token_id for token in tokens],
        "tokens": [_flat(token) for token in tokens],
        "prefill": _flat(records[0]),
        "stopped": session.stopped,
        "plan": plan.memory.as_dict(),
        "speculation": None if session.speculation is None else dataclasses.asdict(session.speculation.stats),
        "direct_io": model.direct_io,
        "reader": dataclasses.asdict(model.reader),
        "model": {
            "path": str(path.absolute()),
            "source": manifest.source.name,
            "model_type": manifest.architecture.model_type,
            "dtype": manifest.dtype,
            "mode": plan.mode,
            "prompts": model.config.prompts,
        },
        "notices": [*model.plan.reasons, *model.notices],
    }


def _schema(file: Path) -> "Constraint":
    from flashllm.base.files import parse_json, read_bounded
    from flashllm.generate.grammar import MOST_CHARS, Constraint

    return Constraint.of_schema(parse_json(read_bounded(file, 4 * MOST_CHARS), str(file)))


def _read_prompt(argument: str) -> str:
    if argument != "-":
        return valid_unicode(argument)
    return sys.stdin.buffer.read().decode("utf-8", "replace").removesuffix("\n")


def _flat(record: Any) -> dict[str, Any]:
    """A record's fields, and its times among them."""
    fields = dataclasses.asdict(record)
    times = fields.pop("times")
    return {**fields, **times}
