"""The tools of every verb's command line: arguments that are checked, a line for the user, one JSON document."""

import argparse
import json
import math
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flashllm.base.text import one_line
from flashllm.base.units import parse_size
from flashllm.errors import UsageError


def size(text: str) -> int:
    """An argument like 7GB, in bytes."""
    try:
        nbytes = parse_size(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if nbytes < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be above 0")
    return nbytes


def whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """An argument that is an integer from `low`, to `high` where one is given."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < low or (high is not None and value > high):
            bounds = f"at least {low}" if high is None else f"from {low} to {high}"
            raise argparse.ArgumentTypeError(f"must be {bounds}, not {value}")
        return value

    return parse


def number(low: float, high: float | None, *, low_allowed: bool = True) -> Callable[[str], float]:
    """An argument that is a finite number between the bounds."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        above = value >= low if low_allowed else value > low
        if not math.isfinite(value) or not above or (high is not None and value > high):
            bounds = f"{'at least' if low_allowed else 'above'} {low:g}"
            bounds += "" if high is None else f" and at most {high:g}"
            raise argparse.ArgumentTypeError(f"must be {bounds}, not {text}")
        return value

    return parse


def say(line: str) -> None:
    """A line for the user, apart from the output."""
    print(f"flashllm: {one_line(line)}", file=sys.stderr, flush=True)


def say_bug(error: BaseException) -> None:
    """The place that an unforeseen error came from. Not its message, which may hold a request's text."""
    places = traceback.extract_tb(error.__traceback__)[-3:]
    where = ", ".join(f"{Path(place.filename).name}:{place.lineno}" for place in reversed(places))
    say(f"{type(error).__name__} while a request was answered, at {where} (a bug in flashllm)")


def print_json(document: Mapping[str, Any]) -> None:
    """The one document on standard output."""
    print(json.dumps(document, allow_nan=False), flush=True)
