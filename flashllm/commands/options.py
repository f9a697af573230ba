"""Arguments that several verbs share, and their checks. A wrong value is an error before anything is loaded."""

import argparse
from pathlib import Path
from typing import Any

from flashllm.base.command_line import number, size, whole
from flashllm.config import CACHE_BITS, MAX_THREADS, SPECULATIONS

AUTO = "auto"  # as a limit of memory


def add_model(parser: argparse.ArgumentParser, *, converts: bool = True) -> None:
    """The MODEL of a verb that `converts` what is no model directory yet."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help=f"a model directory, or what {'is' if converts else 'was'} converted on first use: a Hugging Face folder, "
        "a GGUF file, a hub id or address, smollm2 (default: the demo)",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")


def add_store(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--store",
        metavar="FILE",
        type=Path,
        help="profiles, made by `flashllm calibrate` (default: profiles.json in the user's cache)",
    )


def add_memory(parser: argparse.ArgumentParser) -> None:
    """Options that the memory plan depends on."""
    group = parser.add_argument_group("memory")
    group.add_argument(
        "--memory",
        metavar="SIZE|auto",
        type=lambda text: text if text == AUTO else size(text),
        help="limit of everything the process holds, like 7GB; auto: four fifths of what is free, as by default, but "
        "followed while the model runs, as other programs take memory and give it back",
    )
    group.add_argument("--context", metavar="N", type=whole(1), help="tokens of KV cache (default: the model's limit)")
    group.add_argument(
        "--cache-bits",
        metavar="B",
        type=int,
        choices=CACHE_BITS,
        help="keys and values are kept in 8 or 4 bits, but for the last tokens' (default: as they are computed)",
    )
    add_store(group)


def add_engine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--mode",
        choices=("sparse", "dense"),
        help="FFN neurons computed: those the predictors name (sparse), all (dense) "
        "(default: sparse; dense for a model whose neurons are never zero)",
    )
    group.add_argument(
        "--nice", action="store_true", help="in the background: half of the cores, and other programs go first"
    )
    group.add_argument("--threads", metavar="T", type=whole(1, MAX_THREADS), help="compute threads (default: cores)")


def add_run(parser: argparse.ArgumentParser, *, sampling: str | None = None) -> None:
    """The options of a verb that runs a model; `sampling` says where values of the next token's choice come from."""
    add_memory(parser)
    add_engine(parser)
    parser.add_argument(
        "--no-profile", action="store_true", help="do not measure the drive before a run that reads from it"
    )
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="also say how the model is converted and why it is run as it is"
    )
    if sampling is None:
        return
    parser.add_argument(
        "--speculate",
        metavar="off|lookup|DRAFT",
        help="draft tokens, by prompt lookup (what followed the last tokens before) or by a smaller model of the same "
        "vocabulary, and verify several in a pass, where that has paid so far; changes no token (default: "
        f"{SPECULATIONS[0]})",
    )
    group = parser.add_argument_group(f"sampling ({sampling})")  # absent options are None
    group.add_argument("--temperature", metavar="X", type=number(0, None), help="0: always the likeliest token")
    group.add_argument("--top-k", metavar="K", type=whole(0), help="only the K likeliest tokens; 0: all")
    group.add_argument("--top-p", metavar="P", type=number(0, 1, low_allowed=False), help="only tokens up to this mass")
    group.add_argument("--min-p", metavar="P", type=number(0, 1), help="only tokens up to 1/P as unlikely as the best")
    group.add_argument("--repetition-penalty", metavar="X", type=number(0, None, low_allowed=False), help="1: none")
    group.add_argument("--seed", metavar="S", type=whole(0, 2**63 - 1), help="the same answer each time")
    group.add_argument("--stop", metavar="TEXT", action="append", default=[], help="end before TEXT (repeatable)")


def given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling options that were given, under the names of `SamplingOptions`."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    stop = tuple(text for text in args.stop if text)
    return {**given, "stop": stop} if stop else given
