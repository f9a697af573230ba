"""`flashllm completion SHELL`: the script that completes verbs and options in a shell."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Example: flashllm completion bash > ~/.local/share/bash-completion/completions/flashllm; for zsh, into "
        "_flashllm in a folder of fpath."
    )
    parser.add_argument("shell", metavar="SHELL", choices=("bash", "zsh"), help="bash or zsh")


def main(args: argparse.Namespace) -> int:
    import shtab

    # `shell` is the name of one; nothing is run.
    print(shtab.complete(args.parser, shell=args.shell))  # nosec B604
    return 0
