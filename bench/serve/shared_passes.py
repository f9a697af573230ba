"""What answers gain by passes that hold more than one token: several at once, and a form that says what comes next.

    python bench/serve/shared_passes.py together MODEL [--memory SIZE] [--at-once 1 2 4 8]
    python bench/serve/shared_passes.py forced MODEL [--memory SIZE]

Both call the engine as the server does, without HTTP. A model of dummy weights is computed as its trace says
(bench/engine/traced.py), each sequence at places of its own; ids of `together` are a walk of its own for each.

together  one token each of so many sequences, in passes that they share, in turn with one alone: tokens a second of all
          together and of each, and what sharing could give at most where the union of the units that are wanted
          (neurons or experts) is read and multiplied once: the units that the tokens want, over their union; and where
          the drive did nothing but read those of the union that are missing, at the rate it had in these passes.
forced    an answer by the schema of an address book, with and without passes over the tokens that the schema forces;
          the tokens are the same. A model without a tokenizer is refused.

Put `python bench/capped.py SIZE` before the command to have the limit enforced. The last line is one JSON document.
"""

import argparse
import contextlib
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

import numpy as np
from traced import TracedModel

from flashllm.base.units import format_size, parse_size
from flashllm.config import RunConfig
from flashllm.generate.grammar import Constraint, Grammars
from flashllm.generate.sampling import SamplingOptions
from flashllm.generate.session import PrefillRecord, Session, TokenRecord
from flashllm.generate.speculation import Decoding
from flashllm.generate.tokenizer import Tokenizer

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


def forced(model: TracedModel, path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The answer with and without passes over forced tokens, in turns."""
    tokenizer = Tokenizer.load(path)
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


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("together", "forced"))
    parser.add_argument("model", type=Path, help="a model directory")
    parser.add_argument("--memory", type=parse_size)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 2, 4, 8], help="the first is what gains are of")
    parser.add_argument("--tokens", type=int, help="of each sequence a round (default: 16), or of an answer (400)")
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path, help="write the document here too")
    args = parser.parse_args(argv)
    args.tokens = args.tokens or {"together": 16, "forced": 400}[args.what]
    config = RunConfig(memory=args.memory, context=512, threads=args.threads, serves=True)
    with TracedModel.open(args.model, config) as model:
        found = together(model, args) if args.what == "together" else forced(model, args.model, args)
        document = {
            "benchmark": "shared_passes",
            "model": args.model.name,
            "model_type": model.manifest.architecture.model_type,
            "activity": model.activity_source,
            "memory": args.memory,
            "threads": model.plan.threads,
            "direct_io": model.direct_io,
            **found,
        }
    if args.json is not None:
        args.json.write_text(json.dumps(document) + "\n", encoding="utf-8")
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
