"""Parsed arguments become a run's configuration and a model directory. A model's first use converts and checks it."""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flashllm.base.command_line import say
from flashllm.base.machine import give_way, num_cores
from flashllm.base.text import is_terminal, one_line
from flashllm.commands.options import AUTO
from flashllm.config import SPECULATIONS, RunConfig, Speculate


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


def _converted(model: str | None, *, memory: int | None = None, **options: Any) -> Path:
    """`resolve_model`, which may take a while; what it converts is checked, in at most `memory` bytes."""
    from flashllm.base.progress import ProgressBar
    from flashllm.convert.locate import resolve_model

    new: list[Path] = []
    with ProgressBar("convert") as bar:
        path = resolve_model(model, progress=bar, say=say, converted=new.append, **options)
    for directory in new:
        warn_of_garbage(directory, memory=memory)
    return path


def check_text(path: Path) -> None:
    """Read what lies beside the weights of the model directory or Hugging Face folder `path`, as runs do; their errors.
    A GGUF file has nothing there."""
    from flashllm.convert.tokenizer import TOKENIZER
    from flashllm.format.model_dir import Companions
    from flashllm.format.model_files import GENERATION_CONFIG
    from flashllm.generate.templates.chat_template import opened_template
    from flashllm.generate.tokenizer import Tokenizer

    Companions.of(path).read_json_object(GENERATION_CONFIG)
    if (path / TOKENIZER).exists():
        with opened_template(Tokenizer.load(path)) as template:
            if template is not None:
                template.check()


def warn_of_garbage(path: Path, *, memory: int | None = None, always: bool = False) -> None:
    """Say where the model directory `path`, just converted, predicts a text as garbage does, or fails; with `always`
    how it predicts it, too. Nothing where it has no tokenizer, or where memory is too small: the model's first
    run says so."""
    from flashllm.commands.predictors.scripts import sample_text
    from flashllm.convert.tokenizer import TOKENIZER
    from flashllm.errors import BudgetError, FlashError
    from flashllm.pack.loss import measure_loss

    if not (path / TOKENIZER).exists():
        return
    try:
        text = sample_text()
        with loading(path, "checking"):
            check_text(path)
            loss = measure_loss(path, text, memory=memory)
    except BudgetError:
        return
    except FlashError as error:
        say(f"warning: this model could not be checked: {error}")
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
def loading(path: Path, what: str = "loading") -> Iterator[Callable[[str], None]]:
    """Show at a terminal that the block loads a model, or does `what` with it, which takes seconds. Yields what adds to
    that line, which goes with the block."""
    if not is_terminal(sys.stderr):
        yield lambda more: None
        return
    from rich.console import Console
    from rich.text import Text

    line = f"{what} {one_line(path.name)}"
    with Console(stderr=True).status(Text(line), spinner="line") as status:
        yield lambda more: status.update(Text(f"{line}: {one_line(more)}"))


def find_converted(args: argparse.Namespace) -> Path:
    """The model directory to look at; nothing is converted or downloaded for that."""
    from flashllm.convert.locate import resolve_model

    return resolve_model(args.model, convert_on_first_use=False)
