"""`flashllm inspect [MODEL]`: what a model directory holds, and where it is."""

import argparse

from flashllm.base.command_line import print_json
from flashllm.base.text import inert
from flashllm.commands.asked import find_converted
from flashllm.commands.options import add_json, add_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, converts=False)
    add_json(parser)


def main(args: argparse.Namespace) -> int:
    from flashllm.format.report.inspect import format_inspection, inspect

    facts = inspect(find_converted(args))
    if args.json:
        print_json(facts)
    else:
        print(inert(format_inspection(facts)))
    return 0
