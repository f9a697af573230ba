"""`flashllm train [MODEL]`: trains the activity predictors of a converted model (predictors/train_predictor.py)."""

import argparse

from flashllm.commands.predictors import scripts
from flashllm.errors import FlashError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Example: flashllm train MODEL --data-files book.txt. Without --data-files, samples come from the hub's C4 "
        "(pip install 'flashllm[train]'). predictors/train_predictor.py has further options."
    )
    scripts.load("arguments").train_arguments(parser, study=False)


def main(args: argparse.Namespace) -> int:
    """Train and install them. Interrupted, the same command with --resume goes on."""
    script = scripts.load("train_predictor")
    try:
        return int(script.run(args))
    except scripts.load("samples").DataError as error:
        raise FlashError(str(error)) from error
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted; {script.RESUMABLE}") from None
