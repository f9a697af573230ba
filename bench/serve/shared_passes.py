"""What answers gain by passes that hold more than one token: several at once, a form that says what comes next, and a
prompt whose beginning the server knows.

    python bench/serve/shared_passes.py together MODEL [--memory SIZE] [--at-once 1 2 4 8]
    python bench/serve/shared_passes.py forced MODEL [--memory SIZE]
    python bench/serve/shared_passes.py known MODEL [--memory SIZE] [--known 10500] [--new 500]

All call the engine as the server does, without HTTP. A model of dummy weights is computed as its trace says
(bench/engine/traced.py), each sequence at places of its own; ids are a walk of its own for each, but of `forced`.

together  one token each of so many sequences, in passes that they share, in turn with one alone: tokens a second of all
          together and of each, and what sharing could give at most where the union of the units that are wanted
          (neurons or experts) is read and multiplied once: the units that the tokens want, over their union; and where
          the drive did nothing but read those of the union that are missing, at the rate it had in these passes.
forced    an answer by the schema of an address book, with and without passes over the tokens that the schema forces;
          the tokens are the same. A model without a tokenizer is refused.
known     the time to the first token of NEW tokens alone, of KNOWN and NEW cold, of as many whose first KNOWN the
          server has in memory, and of as many whose first KNOWN it has parked on disk, read from a cold page cache
          where it may be dropped; in this order in every round, each with NEW tokens of its own.

Put `python bench/capped.py SIZE` before the command to have the limit enforced. The last line is one JSON document.
"""

import argparse
import contextlib
import dataclasses
import itertools
import queue
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import core_testing  # noqa: F401 - before what loads the product's core
import numpy as np
from engine_runs import add_simd, finish
from memory_group import GroupError, drop_page_cache
from talking import Silent
from traced import TracedModel

from flashllm import _core
from flashllm.api.requests import Request
from flashllm.base.units import format_size, parse_size
from flashllm.config import RunConfig
from flashllm.errors import FlashError
from flashllm.generate.grammar import Constraint, Grammars
from flashllm.generate.sampling import SamplingOptions
from flashllm.generate.session import PrefillRecord, Session, TokenRecord
from flashllm.generate.speculation import Decoding
from flashllm.generate.tokenizer import Tokenizer
from flashllm.parked.file import identity
from flashllm.parked.folder import ParkingFolder
from flashllm.serve.worker import Began, Chosen, Finished, Job, Worker

WARM = 4  # passes that do not count, of each number
APART = 4999  # first ids of sequences
ENTRY = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 12},
        "family_name": {"type": "string", "maxLength": 12},
        "street_and_number": {"type": "string", "maxLength": 16},
        "postal_code": {"type": "string", "pattern": "^[0-9]{5}$"},
        "city_of_residence": {"type": "string", "maxLength": 12},
        "telephone_number": {"type": "string", "pattern": "^[0-9]{6}$"},
        "is_a_business_address": {"type": "boolean"},
    },
    "additionalProperties": False,
}
ENTRY["required"] = list(ENTRY["properties"])  # type: ignore[call-overload]
SCHEMA = {
    "type": "object",
    "properties": {"address_book": {"type": "array", "items": ENTRY, "minItems": 2, "maxItems": 2}},
    "required": ["address_book"],
    "additionalProperties": False,
}


def together(model: TracedModel, args: argparse.Namespace) -> dict[str, Any]:
    """Passes of each number of sequences, in turns; every round has sequences of its own."""
    passes: dict[int, list[dict[str, Any]]] = {count: [] for count in args.at_once}
    vocab = model.vocab_size
    for _ in range(args.rounds):
        for count in args.at_once:
            with contextlib.ExitStack() as stack:
                sequences = [stack.enter_context(model.new_sequence()) for _ in range(count)]
                for number, sequence in enumerate(sequences):
                    model.step([(sequence, [(number * APART + at) % vocab for at in range(args.prompt)])])
                for turn in range(WARM + args.tokens):
                    ids = [(number * APART + args.prompt + turn) % vocab for number in range(count)]
                    model.meter.restart()
                    logits = model.step([(sequence, [one]) for sequence, one in zip(sequences, ids, strict=True)])
                    times = model.meter.take()
                    if not np.isfinite(logits).all():
                        raise SystemExit("shared_passes: a logit is not finite")
                    if turn >= WARM:
                        passes[count].append(dataclasses.asdict(times))
    rows, stride = [], model.manifest.rows.stride
    alone = statistics.fmean(each["total_ms"] for each in passes[args.at_once[0]]) / args.at_once[0]
    for count, found in passes.items():
        mean = {key: statistics.fmean(each[key] for each in found) for key in found[0]}
        nbytes, missing_ms = mean["bytes_read"], 0.0
        if nbytes:
            missing_ms = mean["misses"] * stride * mean["io_busy_ms"] / nbytes
        row = {
            "at_once": count,
            "tokens_a_second": 1e3 * count / mean["total_ms"],
            "of_each": 1e3 / mean["total_ms"],
            "gain": count * alone / mean["total_ms"],
            "bound_by_union": mean["active"] / mean["united"] if mean["united"] else float(count),
            "bound_by_reads": count * alone / missing_ms if missing_ms else None,
            "bytes_read_a_token": mean["bytes_read"] / count,
            "pass_ms": mean,
        }
        rows.append(row)
        print(
            f"{count} at once: {row['tokens_a_second']:.2f} tokens/s together, {row['of_each']:.2f} each; "
            f"{row['gain']:.2f} times one alone, of at most {row['bound_by_union']:.2f} by the union"
            f"{f', {by_reads:.2f} by reads' if (by_reads := row['bound_by_reads']) else ''}; "
            f"{format_size(row['bytes_read_a_token'])} read a token",
            flush=True,
        )
    return {"together": rows}


def forced(model: TracedModel, args: argparse.Namespace) -> dict[str, Any]:
    """The answer with and without passes over forced tokens, in turns."""
    tokenizer = Tokenizer.load(args.model)
    grammars = Grammars(tokenizer.backend, tokenizer.end_ids, model.vocab_size)
    form = Constraint.of_schema(SCHEMA)
    options = SamplingOptions(max_new_tokens=args.tokens)
    usual = Decoding.after

    def one_by_one(self: Decoding, token_id: int, more: int, **_: Any) -> Any:
        return usual(self, token_id, more)

    answers: dict[str, list[dict[str, Any]]] = {"forced together": [], "one by one": []}
    for turn in range(args.rounds):
        for name in list(answers)[:: 1 if turn % 2 == 0 else -1]:
            Decoding.after = usual if name == "forced together" else one_by_one  # type: ignore[method-assign]
            with Session(model, tokenizer, options) as session:
                session.choose_by(options, matcher=grammars.start(form))
                began = time.perf_counter()
                records = list(session.stream("An address book as JSON:"))
                seconds = time.perf_counter() - began
            first = next(each for each in records if isinstance(each, PrefillRecord))
            tokens = [each for each in records if isinstance(each, TokenRecord)]
            answers[name].append(
                {
                    "seconds": seconds - first.times.total_ms / 1e3,
                    "tokens": len(tokens),
                    "passes": sum(each.pass_tokens > 0 for each in tokens[1:]),
                    "bytes_read": sum(each.times.bytes_read for each in tokens[1:]),
                    "ids": [each.token_id for each in tokens],
                    "stopped": session.stopped,
                    "text": "".join(each.text for each in tokens),
                }
            )
    Decoding.after = usual  # type: ignore[method-assign]
    same = len({tuple(one.pop("ids")) for each in answers.values() for one in each}) == 1
    medians = {name: statistics.median(one["seconds"] for one in each) for name, each in answers.items()}
    for name, each in answers.items():
        print(f"{name}: {each[0]['tokens']} tokens in {each[0]['passes']} passes, {medians[name]:.2f} s (median)")
    gain = medians["one by one"] / medians["forced together"]
    print(f"{gain:.2f} times as fast; the tokens are {'the same' if same else 'NOT the same'}")
    return {"forced": answers, "gain": gain, "same_tokens": same}


def first_token(worker: Worker, ids: list[int], marks: Sequence[int] = ()) -> dict[str, Any]:
    """A request of the prompt `ids` and one token: its time, and how many tokens were computed and reused."""
    options = SamplingOptions(max_new_tokens=1, ignore_eos=True)
    request = Request(
        custom_id="",
        kind="completion",
        prompt=tuple(ids),
        options=options,
        max_new_given=True,
        logprobs=None,
        marks=tuple(marks),
    )
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    found: dict[str, Any] = {}
    began = time.perf_counter()
    worker.submit(Job(prompts=[(request, ids)], deliver=events.put))
    while not isinstance(event := events.get(), Finished):
        if isinstance(event, Began):
            found |= {"computed": event.record.tokens, "reused": event.record.reused_tokens}
            found["bytes_read"] = event.record.times.bytes_read
        elif isinstance(event, Chosen):
            found["seconds"] = time.perf_counter() - began
    if event.error is not None:
        raise SystemExit(f"shared_passes: {event.error}")
    return found


def known(model: TracedModel, args: argparse.Namespace) -> dict[str, Any]:
    """First tokens of prompts of which the server knows nothing, or the beginning."""
    numbers, marks, dropped = itertools.count(), (args.known,), True

    def walk(count: int) -> list[int]:
        first = next(numbers) * APART
        return [(first + at) % model.vocab_size for at in range(count)]

    rows: dict[str, list[dict[str, Any]]] = {"alone": [], "cold": [], "known": [], "parked": []}
    with tempfile.TemporaryDirectory(dir=args.parking) as folder:
        parking = ParkingFolder(
            Path(folder), identity(args.model, model.arithmetic), max_nbytes=1 << 50, daily_nbytes=1 << 50
        )
        keep = model.plan.memory.kept_nbytes
        with Worker(
            model, cast(Tokenizer, Silent()), max_waiting=1, keep=keep, on_event=lambda event: None, parking=parking
        ) as worker:
            first_token(worker, walk(args.new))  # it does not count
            for _ in range(args.rounds):
                while worker.make_room():
                    pass
                beginning = walk(args.known)
                rows["alone"].append(first_token(worker, walk(args.new)))
                rows["cold"].append(first_token(worker, beginning + walk(args.new), marks))
                rows["known"].append(first_token(worker, beginning + walk(args.new), marks))
                while worker.make_room():
                    pass
                try:
                    drop_page_cache()
                except GroupError:  # it takes root
                    dropped = False
                rows["parked"].append(first_token(worker, beginning + walk(args.new), marks))
    # What a model with windows or states can go back to.
    whole_pages = args.known // _core.PAGE_TOKENS * _core.PAGE_TOKENS
    for name in ("known", "parked"):
        if (reused := min(one["reused"] for one in rows[name])) < whole_pages:
            raise SystemExit(
                f"shared_passes: {name}: of {args.known} known tokens {reused} were kept; give more --memory"
            )
    medians = {name: statistics.median(one["seconds"] for one in found) for name, found in rows.items()}
    over = {name: medians[name] / medians["alone"] for name in ("known", "parked")}
    for name, found in rows.items():
        spread = f"{min(one['seconds'] for one in found):.2f} to {max(one['seconds'] for one in found):.2f}"
        times = f", {over[name]:.2f} times those alone" if name in over else ""
        print(f"{name}: {found[0]['computed']} tokens computed, {medians[name]:.2f} s (median; {spread}){times}")
    sizes = {"known_tokens": args.known, "new_tokens": args.new}
    return {**sizes, "first_tokens": rows, "seconds": medians, "over_alone": over, "page_cache_dropped": dropped}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("together", "forced", "known"))
    parser.add_argument("model", type=Path, help="a model directory")
    parser.add_argument("--memory", type=parse_size)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 2, 4, 8], help="the first is what gains are of")
    parser.add_argument("--tokens", type=int, help="of each sequence a round (default: 16), or of an answer (400)")
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--known", type=int, default=10500, help="tokens that a prompt begins with")
    parser.add_argument("--new", type=int, default=500, help="tokens behind them")
    parser.add_argument("--parking", type=Path, help="a folder on the drive of what is parked (default: the system's)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path, help="write the document here too")
    add_simd(parser)
    args = parser.parse_args(argv)
    if args.known < _core.PAGE_TOKENS or args.new < 1:
        parser.error(f"--known must be at least {_core.PAGE_TOKENS}, a page of tokens, and --new at least 1")
    args.tokens = args.tokens or {"together": 16}.get(args.what, 400)
    context = args.known + args.new + 1 if args.what == "known" else 512
    config = RunConfig(memory=args.memory, context=context, threads=args.threads, serves=True, simd=args.simd)
    try:
        model = TracedModel.open(args.model, config)
    except FlashError as error:
        raise SystemExit(f"shared_passes: {error}") from error
    with model:
        found = {"together": together, "forced": forced, "known": known}[args.what](model, args)
        document = {
            "benchmark": "shared_passes",
            "model": args.model.name,
            "model_type": model.manifest.architecture.model_type,
            "activity": model.activity_source,
            "memory": args.memory,
            "threads": model.plan.threads,
            "simd": _core.best_simd_level(),
            "used": args.simd,
            "direct_io": model.direct_io,
            **found,
        }
    return finish(document, args.json)


if __name__ == "__main__":
    sys.exit(main())
