"""`flashllm rm NAME`: deletes models that were converted on first use."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Example: flashllm rm facebook/opt-125m. Checkpoints that were downloaded stay."
    parser.add_argument("names", metavar="NAME", nargs="+", help="as `flashllm list` shows it")


def main(args: argparse.Namespace) -> int:
    """Delete them; nothing is deleted where a name is wrong."""
    import shutil

    from flashllm.base.command_line import say
    from flashllm.base.units import format_size
    from flashllm.commands.models.kept import find, kept_models
    from flashllm.errors import FlashIOError

    models = kept_models()
    chosen = {one.path: one for one in (find(name, models) for name in args.names)}
    for one in chosen.values():
        try:
            shutil.rmtree(one.path)
        except OSError as error:
            raise FlashIOError(f"{one.path}: cannot be deleted: {error.strerror}") from error
        say(f"{one.name}: deleted, {format_size(one.nbytes)}")
    return 0
