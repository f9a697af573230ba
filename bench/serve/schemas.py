"""Answers held to the schemas of a public suite: each validates, or the schema is refused with a sentence.

    python bench/serve/schemas.py SUITE [--model DIR] [--schemas N] [--tokens N] [--penalty X]

SUITE is a folder of the JSON Schema test suite (`json/tests/draft2020-12` of jsonschema's source distribution). Answers
that the limit on tokens cuts are counted apart: a small model repeats itself without end where a schema lets anything
come, unless there is a penalty. The time of a mask is compared with that of a token. The last line is one JSON
document. Needs `pip install jsonschema`.
"""

import argparse
import contextlib
import json
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema

from flashllm.config import RunConfig
from flashllm.convert.locate import resolve_model
from flashllm.engine.model import Model
from flashllm.errors import UsageError
from flashllm.generate.grammar import Constraint, Grammars, Matcher
from flashllm.generate.sampling import SamplingOptions
from flashllm.generate.session import Session, TokenRecord
from flashllm.generate.templates.chat_template import ChatTemplate
from flashllm.generate.tokenizer import Tokenizer


def schemas_of(suite: Path, count: int) -> list[Any]:
    """The first `count` schemas, taken from the suite's files in turn."""
    groups = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(suite.glob("*.json"))]
    turns = [group[at]["schema"] for at in range(max(map(len, groups))) for group in groups if at < len(group)]
    return turns[:count]


class Timed:
    """A matcher whose masks are timed."""

    def __init__(self, matcher: Matcher, times: list[float]) -> None:
        self._matcher, self._times = matcher, times

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)

    def masked(self, logits: Any) -> Any:
        began = time.perf_counter()
        masked = self._matcher.masked(logits)
        self._times.append(time.perf_counter() - began)
        return masked


def run(args: argparse.Namespace) -> dict[str, Any]:
    path = resolve_model(args.model)
    tokenizer = Tokenizer.load(path)
    became: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    wrong: list[Any] = []
    masks: list[float] = []
    tokens: list[float] = []
    with Model.open(path, RunConfig()) as model, contextlib.ExitStack() as opened:
        if (template := ChatTemplate.of(tokenizer)) is not None:
            opened.enter_context(template)
        grammars = Grammars(tokenizer.backend, tokenizer.end_ids, model.vocab_size)
        options = SamplingOptions(max_new_tokens=args.tokens, repetition_penalty=args.penalty)
        for schema in schemas_of(args.suite, args.schemas):
            try:
                matcher = grammars.start(Constraint.of_schema(schema))
            except UsageError as error:
                became["refused"] += 1
                refused[str(error).split(": ", 1)[-1][:40]] += 1
                continue
            with Session(model, tokenizer, options, template=template) as session:
                session.choose_by(options, matcher=Timed(matcher, masks))  # type: ignore[arg-type]
                asked = f"Answer with one short JSON value that this schema allows:\n{json.dumps(schema)[:2000]}"
                records = [each for each in session.stream_chat(asked) if isinstance(each, TokenRecord)]
                tokens += [each.times.total_ms / 1000 for each in records[1:] if each.pass_tokens == 1]
                if session.stopped == "length":
                    became["cut"] += 1
                    continue
            text = "".join(each.text for each in records)
            try:
                jsonschema.Draft202012Validator(schema).validate(json.loads(text))
                became["valid"] += 1
            except (ValueError, jsonschema.ValidationError) as error:
                became["wrong"] += 1
                wrong.append({"schema": schema, "answer": text, "error": str(error)[:200]})
    return {
        "model": path.name,
        "schemas": sum(became.values()),
        "became": dict(became),
        "refused": dict(refused.most_common()),
        "wrong": wrong,
        "mask_us_median": round(1e6 * statistics.median(masks), 1),
        "mask_us_99": round(1e6 * statistics.quantiles(masks, n=100)[98], 1),
        "token_ms_median": round(1e3 * statistics.median(tokens), 2),
        "mask_share": round(statistics.median(masks) / statistics.median(tokens), 5),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", type=Path)
    parser.add_argument("--model", help="model directory; default: the demo")
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--penalty", type=float, default=1.0, help="on tokens that the model repeats (default: none)")
    print(json.dumps(run(parser.parse_args(argv)), ensure_ascii=False))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
