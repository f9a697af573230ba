"""`flashllm verify [MODEL]`: rereads a model directory and names every damaged file, layer and neuron."""

import argparse
import dataclasses
import sys

from flashllm.base.command_line import print_json
from flashllm.base.text import inert, one_line
from flashllm.base.units import format_size
from flashllm.commands.asked import find_converted
from flashllm.commands.options import add_json, add_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, converts=False)
    add_json(parser)


def main(args: argparse.Namespace) -> int:
    """Check; exit status 1 where anything is wrong, every finding an error line (with --json: in the document)."""
    from flashllm.base.progress import ProgressBar
    from flashllm.format.report.verify import verify

    path = find_converted(args)
    with ProgressBar("verify") as bar:
        report = verify(path, bar)
    if args.json:
        print_json({"ok": report.ok, **dataclasses.asdict(report)})
    elif report.ok:
        print(inert(f"{report.path}: all {report.num_files} files are whole ({format_size(report.nbytes)})"))
    else:
        for problem in report.problems:
            print(f"flashllm: error: {one_line(problem.message)}", file=sys.stderr)
    return 0 if report.ok else 1
