"""`flashllm convert SRC DST`: from a Hugging Face folder, or a hub id, to a model directory."""

import argparse
from pathlib import Path

from flashllm.commands.options import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.add_argument("src", metavar="SRC", help="a Hugging Face folder with safetensors weights, or a hub id")
    parser.add_argument("dst", metavar="DST", type=Path, help="the directory to make; it must not exist")
    parser.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), help="of the result (default: the source's)"
    )
    parser.add_argument(
        "--no-predictors",
        action="store_true",
        help="make no untrained predictors: the model then needs trained ones, or --mode dense",
    )


def main(args: argparse.Namespace) -> int:
    """Convert. Interrupted, the same command goes on where it stopped."""
    from flashllm.convert import convert
    from flashllm.demo import find_checkpoint
    from flashllm.progress import ProgressBar

    source, name = find_checkpoint(args.src, say=say)
    try:
        with ProgressBar("convert") as bar:
            convert(
                source,
                args.dst,
                dtype=args.dtype,
                source_name=name,
                predictors=not args.no_predictors,
                progress=bar,
            )
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt("interrupted; the same command goes on where it stopped") from stop
    print(args.dst)
    return 0
