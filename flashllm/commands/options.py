"""Arguments that several verbs share, and their checks. A wrong value is an error before anything is loaded."""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flashllm.base.command_line import number, say, size, whole
from flashllm.base.machine import give_way, num_cores
from flashllm.base.text import is_terminal, one_line
from flashllm.config import CACHE_BITS, MAX_THREADS, SPECULATIONS, RunConfig, Speculate

AUTO = "auto"  # as a limit of memory


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="a model directory, or what is converted on first use: a Hugging Face folder, a GGUF file, a hub id or "
        "address, smollm2 (default: the demo)",
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
        help="limit of everything the process holds, like 7GB; auto: the default, four fifths of what is free, but "
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


def run_config(args: argparse.Namespace) -> RunConfig:
    """The run that the options of `add_memory` and `add_engine` describe; with --nice the process gives way."""
    if args.nice:
        give_way()
    return RunConfig(
        memory=None if args.memory == AUTO else args.memory,
        follows=args.memory == AUTO,
        context=args.context,
        cache_bits=args.cache_bits,
        mode=args.mode,
        threads=max(1, num_cores() // 2) if args.nice and args.threads is None else args.threads,
        store=args.store,
        speculate=_speculate(getattr(args, "speculate", None)),
    )


def _speculate(given: str | None) -> Speculate | Path:
    """Who drafts. A model that is not converted yet is, as MODEL would be."""
    for known in SPECULATIONS:
        if given in (None, known):
            return known
    return _converted(given)


def explained(args: argparse.Namespace) -> Callable[[str], None]:
    """The sink of lines that need no attention: they are said with --verbose alone."""
    return say if args.verbose else lambda line: None


def find_model(args: argparse.Namespace, *, notice: Callable[[str], None] = say) -> Path:
    """The model directory to run, converted now if this is its first use. `notice` gets what is to be said of it."""
    from flashllm.convert.named import DEMO_NOTICE, find_directory, is_demo

    path = find_directory(args.model)
    if path is None:
        memory = None if args.memory == AUTO else args.memory
        path = _converted(args.model, memory=memory, explain=explained(args))
    if is_demo(path):
        notice(DEMO_NOTICE)
    return path


def _converted(model: str | None, **options: Any) -> Path:
    """`resolve_model`, which may take a while; what it converts is checked."""
    from flashllm.base.progress import ProgressBar
    from flashllm.convert.locate import resolve_model

    new: list[Path] = []
    with ProgressBar("convert") as bar:
        path = resolve_model(model, progress=bar, say=say, converted=new.append, **options)
    for directory in new:
        warn_of_garbage(directory, memory=options.get("memory"))
    return path


def warn_of_garbage(path: Path, *, memory: int | None = None, always: bool = False) -> None:
    """Say where the model directory `path`, just converted, predicts a text as garbage does; with `always` how it
    predicts it, too. Nothing where it has no tokenizer or memory is too small: the model's first run says so."""
    from flashllm.commands.predictors.scripts import sample_text
    from flashllm.errors import FlashError
    from flashllm.pack.loss import measure_loss

    try:
        text = sample_text()
        with loading(path, "checking"):
            loss = measure_loss(path, text, memory=memory)
    except FlashError:
        return
    if always:
        say(f"its perplexity is {loss.perplexity:.4g}, on {loss.tokens} tokens of {text.name}")
    if loss.is_garbage:
        say(
            "warning: this model predicts plain English as garbage does: its perplexity is "
            f"{loss.perplexity:.3g}, where guessing has {loss.vocab_size}. Its file is damaged, not trained or of no "
            "English, or flashllm computes it wrongly. Try another file of the model; if that is no better, please "
            "report it with the file's name"
        )


@contextmanager
def loading(path: Path, what: str = "loading") -> Iterator[None]:
    """Show at a terminal that the block loads a model, or does `what` with it, which takes seconds."""
    if not is_terminal(sys.stderr):
        yield
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(Text(f"{what} {one_line(path.name)}"), spinner="line"):
        yield


def find_converted(args: argparse.Namespace) -> Path:
    """The model directory to look at; nothing is converted or downloaded for that."""
    from flashllm.convert.locate import resolve_model

    return resolve_model(args.model, convert_on_first_use=False)
