"""`flashllm evaluate [MODEL]`: what predictors cost a model's quality (predictors/evaluate.py)."""

import argparse

from flashllm.commands.predictors import scripts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Example: flashllm evaluate MODEL --text book.txt --tasks all > report.md. predictors/evaluate.py has further "
        "options."
    )
    scripts.load("arguments").evaluate_arguments(parser, study=False)


def main(args: argparse.Namespace) -> int:
    """Evaluate; tables, or with --json one JSON document, on standard output."""
    return int(scripts.load("evaluate").show(args))
