"""Speculation on against off, in turn, on text that repeats and text that does not (paper A, section 5.2).

    python bench/engine/speculation.py [MODEL] [--draft MODEL] [--memory SIZE] [--tokens N] [--rounds N] [--json OUT]
    python bench/engine/speculation.py MODEL --forced [--right 0.8] [--memory SIZE] [--tokens N] [--rounds N]

By default one process holds the model and answers each prompt without drafts and with prompt lookup (and a draft model,
with `--draft`): the tokens must be equal. The prompts: a story written out twice (what an edit asks for), one whose
sentences come again in another order (a summary), and an opening.

`--forced` is table 5's row: four tokens are drafted for every pass, and each is right with the given probability. What
is right is the model's own answer, computed before, so no draft model is needed and none is in the times; a
speculation's own gain (Leviathan et al. 2023) for that share is printed beside what is measured.

Medians over rounds, with their spread. The last line is one JSON document.
"""

import argparse
import contextlib
import random
import statistics
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from engine_runs import add_simd, finish

from flashllm import _core
from flashllm.base.units import parse_size
from flashllm.config import RunConfig
from flashllm.convert.locate import resolve_model
from flashllm.engine.model import Model
from flashllm.generate.depth import DepthGate
from flashllm.generate.draft_model import opened_draft
from flashllm.generate.sampling import SamplingOptions
from flashllm.generate.session import Session, TokenRecord
from flashllm.generate.speculation import Drafter, Speculation, speculation_of
from flashllm.generate.tokenizer import Tokenizer

CONTEXT = 512  # tokens: the prompts and their answers fit
DEPTH = 4  # drafted tokens of a pass in the paper's table 5
STORY = (
    "Lily had a red ball and a small brown dog. One day the ball rolled under the gate and into the road. The dog ran "
    "after it, but a big truck came by. Lily called the dog back and he came at once. Her father fetched the ball, and "
    "they all went home for supper. "
)
PROMPTS = {
    "editing": f"{STORY}\n\n{STORY}\n\nLily had a red ball and",
    "summary": f"{STORY}Her father told the story again: the ball rolled under the gate, the dog ran after it, and",
    "opening": "Once upon a time, far from the sea, there lived an old woman who",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer: its tokens, and what they took after the first."""

    token_ids: list[int]
    seconds: float
    tokens: list[TokenRecord]
    speculation: dict[str, Any] | None


class KnownAnswer:
    """Drafts from the answer itself: each token is right with the given probability. A `Drafter`."""

    prompt_s = 0.0

    def __init__(self, prompt_tokens: int, answer: Sequence[int], right: float, seed: int) -> None:
        self.priors = (right,)
        self._prompt, self._answer, self._right, self._random = prompt_tokens, answer, right, random.Random(seed)

    def look(self, tokens: "array[int]", most: int) -> tuple[int, int]:
        """(0, tokens of the answer that are left, at most `most`)."""
        return 0, max(0, min(most, len(self._answer) - (len(tokens) - self._prompt)))

    def draft(self, tokens: "array[int]", count: int) -> list[int]:
        """The next `count` tokens, with mistakes."""
        at = len(tokens) - self._prompt
        return [each if self._random.random() < self._right else each ^ 1 for each in self._answer[at : at + count]]


class AlwaysDeep(DepthGate):
    """Drafts `DEPTH` tokens whether that pays or not."""

    def choose(self, kind: int, available: int) -> int:
        """As many as there are, at most `DEPTH`."""
        return min(available, DEPTH, self.most)


def answer(model: Model, tokenizer: Tokenizer, prompt: str, tokens: int, speculation: Speculation | None) -> Answer:
    """Greedy tokens after `prompt`; no end of text ends them early."""
    options = SamplingOptions(max_new_tokens=tokens, ignore_eos=True)
    with Session(model, tokenizer, options, speculation=speculation) as session:
        records = [each for each in session.stream(prompt, add_special=True) if isinstance(each, TokenRecord)]
    return Answer(
        [each.token_id for each in records],
        sum(each.times.total_ms for each in records[1:]) / 1e3,
        records[1:],
        None if speculation is None else asdict(speculation.stats),
    )


def costs(answers: list[Answer]) -> dict[str, Any]:
    """What the tokens of a way took: medians over its answers, and the parts of a token."""
    each_ms = [1e3 * one.seconds / len(one.tokens) for one in answers]
    records = [record for one in answers for record in one.tokens]
    count, read = len(records), sum(record.times.bytes_read for record in records)
    deep = [record for record in records if record.pass_tokens > 1]
    return {
        "ms": statistics.median(each_ms),
        "ms_range": [min(each_ms), max(each_ms)],
        **{part: sum(getattr(r.times, part) for r in records) / count for part in ("io_ms", "memory_ms", "compute_ms")},
        "bytes_read": read / count,
        "rejected_share_of_bytes": sum(record.times.rejected_bytes for record in records) / max(read, 1),
        # Active neurons of a pass, each counted once, over those of one of its tokens.
        "union_growth": sum(r.times.united * r.pass_tokens for r in deep) / max(sum(r.times.active for r in deep), 1),
        "tokens_of_deep_passes": statistics.mean(record.pass_tokens for record in deep) if deep else 0,
        "speculation": answers[-1].speculation,
    }


def in_turn(ways: dict[str, Any], rounds: int) -> dict[str, list[Answer]]:
    """Answers of every way, a round of each after the other, the order reversed every other time."""
    answers: dict[str, list[Answer]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in sorted(ways, reverse=number % 2 == 1):
            answers[name].append(ways[name]())
    first = next(iter(answers.values()))[0].token_ids
    for name, all_of in answers.items():
        if any(one.token_ids != first for one in all_of):
            raise SystemExit(f"speculation: {name} gave other tokens")
    return answers


@contextlib.contextmanager
def opened(args: argparse.Namespace, directory: Path) -> Iterator[tuple[Model, Tokenizer, dict[str, Drafter | None]]]:
    """The model and who may draft for it, by name."""
    tokenizer = Tokenizer.load(directory)
    speculate = resolve_model(args.draft, convert_on_first_use=False) if args.draft else "lookup"
    config = RunConfig(memory=args.memory, context=CONTEXT, speculate=speculate, simd=args.simd)
    with opened_draft(directory, config) as draft, Model.open(directory, config, process=draft.process_nbytes) as model:
        yield model, tokenizer, {"lookup": None, **({"draft": draft.drafter} if args.draft else {})}


def texts(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Lookup and the draft model against no drafts, a prompt after the other."""
    document = {}
    with opened(args, directory) as (model, tokenizer, drafters):
        config = replace(RunConfig(), speculate="lookup")
        for kind, prompt in PROMPTS.items():

            def way(drafter: Drafter | None, on: bool, prompt: str = prompt) -> Any:
                # One for all answers, as a model's sessions share it: what it has learned and lost goes on.
                speculation = speculation_of(config, model, drafter) if on else None
                return lambda: answer(model, tokenizer, prompt, args.tokens, speculation)

            ways = {"off": way(None, False), **{name: way(drafter, True) for name, drafter in drafters.items()}}
            ways["off"]()  # the neuron caches are warm for all
            answers = in_turn(ways, args.rounds)
            document[kind] = report(kind, answers)
    return document


def report(title: str, answers: dict[str, list[Answer]]) -> dict[str, Any]:
    """One table row a way; the figures of all."""
    figures = {name: costs(all_of) for name, all_of in answers.items()}
    for name, all_of in answers.items():
        pairs = [off.seconds / on.seconds for off, on in zip(answers["off"], all_of, strict=True)]
        figures[name]["off_over_on"] = statistics.median(pairs)
        figures[name]["off_over_on_range"] = [min(pairs), max(pairs)]
        each = figures[name]
        print(
            f"| {title} | {name} | {each['ms']:.2f} | {each['io_ms']:.2f} | {each['memory_ms']:.2f} | "
            f"{each['compute_ms']:.2f} | {each['off_over_on']:.2f} ({min(pairs):.2f} to {max(pairs):.2f}) | "
            f"{each['union_growth']:.2f} | {each['rejected_share_of_bytes']:.2f} |",
            flush=True,
        )
    return figures


def forced(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Table 5's row: four drafted tokens a pass, right with a given probability."""
    with opened(args, directory) as (model, tokenizer, _):
        prompt = PROMPTS["opening"]
        known = answer(model, tokenizer, prompt, args.tokens, None)
        with Session(model, tokenizer, SamplingOptions(max_new_tokens=1)) as session:
            list(session.stream(prompt, add_special=True))
            prompt_tokens = len(session.tokens) - 1

        def deep() -> Answer:
            speculation = Speculation(KnownAnswer(prompt_tokens, known.token_ids, args.right, 0), DEPTH)
            speculation.gate = AlwaysDeep(DEPTH, (args.right,))
            return answer(model, tokenizer, prompt, args.tokens, speculation)

        answers = in_turn(
            {"off": lambda: answer(model, tokenizer, prompt, args.tokens, None), "forced": deep}, args.rounds
        )
    expected = sum(args.right**place for place in range(DEPTH + 1))
    return {"right": args.right, "depth": DEPTH, "tokens_a_pass_expected": expected, **report("forced", answers)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("model", nargs="?", help="model directory (default: the bundled demo)")
    parser.add_argument("--draft", help="a model directory of the same vocabulary")
    parser.add_argument("--forced", action="store_true", help="table 5's row")
    parser.add_argument("--right", type=float, default=0.8, help="share of drafted tokens that are right")
    parser.add_argument("--memory", type=parse_size)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    add_simd(parser)
    args = parser.parse_args(argv)
    directory = resolve_model(args.model, convert_on_first_use=False)
    began = time.monotonic()
    print("| text | drafts | ms a token | I/O | memory | compute | off over on | union growth | rejected bytes |")
    print("|---|---|---|---|---|---|---|---|---|")
    figures = forced(args, directory) if args.forced else texts(args, directory)
    document = {"model": directory.name, "memory": args.memory, "tokens": args.tokens, "rounds": args.rounds, **figures}
    document |= {"simd": _core.best_simd_level(), "used": args.simd, "seconds": time.monotonic() - began}
    return finish(document, args.json)


if __name__ == "__main__":
    sys.exit(main())
