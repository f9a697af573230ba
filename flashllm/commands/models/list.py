"""`flashllm list`: the models that were converted on first use, with their sizes."""

import argparse

from flashllm.commands.options import add_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "`flashllm rm NAME` deletes one. Model directories of your own are not listed."
    add_json(parser)


def main(args: argparse.Namespace) -> int:
    from flashllm.base.command_line import print_json, say
    from flashllm.base.text import one_line
    from flashllm.base.units import format_size
    from flashllm.commands.models.kept import kept_models

    models = kept_models()
    if args.json:
        fields = ({"name": one.name, "path": str(one.path), "bytes": one.nbytes, "what": one.what} for one in models)
        print_json({"models": list(fields)})
        return 0
    if not models:
        say("no model was converted on first use yet; `flashllm chat MODEL` does that")
    width = max((len(one.name) for one in models), default=0)
    for one in models:
        print(f"{one_line(one.name):<{width}}  {format_size(one.nbytes):>8}  {one_line(one.what)}")
    return 0
