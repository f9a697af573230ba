"""The arguments of the scripts that train and judge predictors, and where their reports go.

Imports nothing heavy, so that help answers at once.
"""

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tasks import TASKS
from training.recipes import RECIPES

from flashllm.base.text import inert
from flashllm.config import DEFAULT_WINDOW
from flashllm.errors import UsageError
from flashllm.format.predictors import BITS

STDOUT = Path("-")  # of --json without FILE


def train_arguments(parser: argparse.ArgumentParser, *, study: bool = True) -> None:
    """Those of `train_predictor.py`; without `study` those of the command, where the others keep their defaults."""
    parser.add_argument("model", nargs="?", help="model directory or Hugging Face folder; the bundled demo by default")
    parser.add_argument(
        "--data-files", type=Path, nargs="+", help=".txt or C4-schema .jsonl files (or .gz); default: the hub's C4"
    )
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--memory", help="limit for everything the process holds, e.g. 7GB")
    parser.add_argument("--scratch", type=Path, help="default: MODEL.predictors beside the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="compute threads; the result depends on their number")
    parser.add_argument("--resume", action="store_true", help="go on with the scratch directory of a killed run")
    _add_json(parser)
    _add(parser, _train_study, shown=study)


def _train_study(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dataset", default="allenai/c4", help="hub data set, streamed")
    parser.add_argument("--config", default="en", help="the data set's configuration")
    parser.add_argument("--recall", type=float, default=0.97, help="share of truly active neurons to find, per layer")
    parser.add_argument("--tokens-per-sample", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=2, help="at most; 0: the truncated SVD as it is, calibrated")
    parser.add_argument(
        "--ranks",
        default="AUTO",
        help=f'AUTO, AUTO*2, a rank, "128:1024x4" (last 4 layers), or a recipe of paper A: {", ".join(RECIPES)}',
    )
    parser.add_argument("--bits", type=int, choices=BITS, default=8, help="of a predictor's weights")
    parser.add_argument(
        "--early",
        type=float,
        metavar="PRECISION",
        help="also train predictors of the next layer, thresholded so that this share of what they name fires",
    )
    parser.add_argument("--positions", type=int, default=400_000, help="positions trained on, at most")
    parser.add_argument("--positive-weight", type=float, default=4.0, help="cost of a missed neuron over a wrong one's")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--window", type=int, default=DEFAULT_WINDOW, help="tokens, for the calibrated cache need")
    parser.add_argument("--strict", action="store_true", help="stop at the first bad document")


def evaluate_arguments(parser: argparse.ArgumentParser, *, study: bool = True) -> None:
    """Those of `evaluate.py`; without `study` those of the command, where the others keep their defaults."""
    parser.add_argument("model", nargs="?", help="model directory; the bundled demo by default")
    parser.add_argument("--text", type=Path, nargs="+", help="text, .json(l) files, .gz too; default: a small sample")
    parser.add_argument("--tokens", type=int, default=20_000, help="of each text, at most")
    parser.add_argument("--tasks", default="", help=f"comma-separated, or all: {', '.join(TASKS)}")
    parser.add_argument("--memory", help="limit for the model, e.g. 7GB")
    parser.add_argument("--threads", type=int)
    _add_json(parser)
    _add(parser, _evaluate_study, shown=study)


def _evaluate_study(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--length", type=int, help="tokens of a window; default: the model's context, at most 512")
    parser.add_argument("--layer-tokens", type=int, default=4096, help="of the errors by layer")
    parser.add_argument("--tasks-dir", type=Path, help="folder of the tasks' .jsonl.gz files; default: the hub")
    parser.add_argument("--items", type=int, default=200, help="of each task, at most")
    parser.add_argument("--curve", action="store_true", help="recall, density, bytes and perplexity by threshold")
    parser.add_argument("--recalls", type=float, nargs="+", default=[0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995])
    parser.add_argument(
        "--without",
        type=int,
        nargs="+",
        default=[],
        metavar="LAYERS",
        help="also with so many layers left without predictors, those first whose misses weigh most",
    )
    parser.add_argument(
        "--no-svd", dest="svd", action="store_false", help="leave untrained predictors out: a third less work"
    )
    parser.add_argument("--window", type=int, default=DEFAULT_WINDOW, help="tokens, of the cache (flash bytes)")
    parser.add_argument(
        "--bandwidth", type=float, help="GB/s of flash, for expected I/O times; default: this drive's calibration"
    )
    parser.add_argument("--samples", type=int, default=0, help="new tokens of the texts side by side; 0: none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--markdown", type=Path, help="write tables and texts here, too")
    parser.add_argument("--plots", type=Path, help="write PNG figures into this folder")


def _add(parser: argparse.ArgumentParser, study: Callable[[argparse.ArgumentParser], None], *, shown: bool) -> None:
    """The arguments of a study, or their defaults alone."""
    if shown:
        study(parser)
        return
    hidden = argparse.ArgumentParser(add_help=False)
    study(hidden)
    parser.set_defaults(**vars(hidden.parse_args([])))


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        type=Path,
        nargs="?",
        const=STDOUT,
        metavar="FILE",
        help="the whole report as one JSON document, in this file (.json), or in place of the text",
    )


def check_json(path: Path | None) -> None:
    """UsageError for a file that `hand_over` could not write, or that was meant to be the model."""
    if path is None or path == STDOUT:
        return
    if path.suffix != ".json":
        raise UsageError(f"--json {path}: the name of a report ends in .json; for standard output put --json last")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--json: {path.parent} is no folder")


def hand_over(report: Mapping[str, Any], text: str, path: Path | None) -> None:
    """The text on standard output; the report where `--json` wants it."""
    if path == STDOUT:
        print(json.dumps(report))
        return
    if path is not None:
        path.write_text(json.dumps(report) + "\n", encoding="utf-8")
    print(inert(text))
