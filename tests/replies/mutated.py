"""Damaged answers of every family: none raises, each is the same however it is cut, and none of its words is lost.

python tests/replies/mutated.py 1000000
"""

import argparse
import itertools
import json
import random
import sys
import time

from recorded import ANSWERS, BROKEN, MALFORMED, TOOLS

from flashllm.replies.formats import find
from flashllm.replies.parser import Parser

SEEDS = [*((name, answer) for _, name, answer, *_ in ANSWERS), *MALFORMED, *(each[:2] for each in BROKEN)]
SIGNS = [
    *"{}[]()<>\"\\'|:,;=/ \n\t0a\0\u2028ö\U0001f600",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "[ARGS]",
    "NaN",
]
WORDS = ("Köln", "Rain", "rains", "look")  # that stand in texts and arguments alone


def mutated(rng):
    """(format, answer) with one to four signs put in, left out, or a piece cut off or said twice."""
    name, answer = rng.choice(SEEDS)
    for _ in range(rng.randint(1, 4)):
        at = rng.randint(0, len(answer))
        match rng.randrange(5):
            case 0:
                answer = answer[:at] + rng.choice(SIGNS) + answer[at:]
            case 1:
                answer = answer[:at] + answer[at + 1 :]
            case 2:
                answer = answer[:at] + answer[at + rng.randint(1, 12) :]
            case 3 if rng.random() < 0.3:
                answer = answer[:at]
            case _:
                answer += answer[at : at + rng.randint(1, 40)]
    return name, answer


def parsed(name, pieces, *, tools=TOOLS, thinking=False):
    """(reasoning, text, calls), a call as (name, id, arguments, valid). AssertionError for events out of order."""
    count = itertools.count()
    parser = Parser(find("", name), tools, thinking=thinking, make_id=lambda: f"made{next(count)}")
    reasoning, text, calls, is_open = "", "", [], False
    for event in (
        event for piece in (*pieces, None) for event in (parser.finish() if piece is None else parser.feed(piece))
    ):
        assert is_open == (event.kind in ("arguments", "end")), event
        match event.kind:
            case "reasoning":
                reasoning += event.text
            case "text":
                text += event.text
            case "call":
                calls.append([event.text, event.id, "", None])
                is_open = True
            case "arguments":
                calls[event.index][2] += event.text
            case "end":
                is_open = False
                assert event.index == len(calls) - 1
    for call in calls:
        try:
            value = json.loads(call[2], parse_constant=lambda _: {}["no JSON"])
        except (ValueError, KeyError):
            value = None
        call[3] = isinstance(value, dict)
    return reasoning, text, calls


def said(name, answer, told):
    """Whether each word of the answer is told; harmony's heads are not."""
    everything = json.dumps(told, ensure_ascii=False)
    return name == "harmony" or all(everything.count(word) >= answer.count(word) for word in WORDS)


def check(name, answer, size):
    """One answer, also in pieces of `size` characters. AssertionError where something is wrong."""
    whole = parsed(name, [answer])
    assert parsed(name, [answer[at : at + size] for at in range(0, len(answer), size)]) == whole, (name, answer)
    assert said(name, answer, whole), (name, answer, whole)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    rng, began, bad = random.Random(args.seed), time.perf_counter(), 0
    for _ in range(args.count):
        name, answer = mutated(rng)
        try:
            check(name, answer, rng.randint(1, 7))
        except Exception as error:
            bad += 1
            print(f"{name}: {answer!r}\n  {type(error).__name__}: {error!s:.1000}")
    print(json.dumps({"answers": args.count, "bad": bad, "seconds": round(time.perf_counter() - began, 1)}))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
