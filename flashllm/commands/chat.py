"""`flashllm chat [MODEL]`: talk with a model, at a terminal or through a pipe.

Sampling defaults come from the model's generation_config.json; flags override them.
"""

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Any

from flashllm.base.command_line import say, whole
from flashllm.base.text import hidden_keys, is_terminal, kept_terminal, valid_unicode
from flashllm.commands import options
from flashllm.commands.asked import find_model, loading

MAX_ANSWER_TOKENS = 256
CONTEXT_SHARE = 4  # by default an answer takes at most this part of the context, so that a conversation fits


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "At a terminal: /help lists the commands. Piped: each line is a user turn and each answer goes to standard "
        "output; commands work; when the context is full, the next line begins a new conversation, which is said on "
        "standard error."
    )
    options.add_model(parser)
    parser.add_argument("--system", metavar="TEXT", help="instructions at the start of every conversation")
    parser.add_argument(
        "--max-new-tokens",
        metavar="N",
        type=whole(1),
        help=f"tokens of an answer (default: a quarter of the context, at most {MAX_ANSWER_TOKENS})",
    )
    options.add_run(parser, sampling="by default as in the model's generation_config.json")


def main(args: argparse.Namespace) -> int:
    at_terminal = is_terminal(sys.stdin) and is_terminal(sys.stdout)
    notices: list[str] = []
    notice = notices.append if at_terminal and not args.verbose else say  # a terminal gets them with the greeting
    path = find_model(args, notice=notice)
    with contextlib.ExitStack() as stack:
        if at_terminal:
            stack.enter_context(kept_terminal(sys.stdin.fileno()))
            stack.enter_context(hidden_keys(sys.stdin.fileno()))
        with loading(path) as show:
            # Before the model, so that the plan counts them.
            from flashllm.base.machine import process_nbytes
            from flashllm.base.user_dirs import user_cache_dir
            from flashllm.chat.conversation import Chat, Memory
            from flashllm.commands.runtime import open_session
            from flashllm.format.model_dir import ModelDir
            from flashllm.generate.sampling import SamplingOptions
            from flashllm.parked.file import identity
            from flashllm.parked.shelf import Shelf

            if at_terminal:
                from rich.console import Console

                from flashllm.chat.terminal import TerminalChat
            else:
                from flashllm.chat.plain import run_plain

            sampling = {**sampling_defaults(path), **options.given_sampling(args)}
            context = args.context or ModelDir.open(path).block.context
            max_new_tokens = args.max_new_tokens or min(MAX_ANSWER_TOKENS, max(1, context // CONTEXT_SHARE))
            options_given = SamplingOptions(max_new_tokens=max_new_tokens, **sampling)
            waiting = show if at_terminal and not args.verbose else say
            session, model = stack.enter_context(
                open_session(args, path, options_given, chat=True, notice=notice, waiting=waiting)
            )
        session.system = valid_unicode(args.system) if args.system else None
        shelf = Shelf(user_cache_dir() / "conversations", identity(path, model.arithmetic))
        chat = Chat(
            session,
            lambda: Memory(used=process_nbytes(), limit=model.memory_limit),
            model.direct_io,
            shelf,
            keep_to=model.keep_to,
            watch=model.watch,
            notices=notices,
        )
        if at_terminal:
            return TerminalChat(chat, history=user_cache_dir() / "chat_history", console=Console()).run()
        return run_plain(chat, sys.stdin.buffer, sys.stdout, sys.stderr)


def sampling_defaults(path: Path) -> dict[str, Any]:
    """The sampling options in the model's generation config, under the names of `SamplingOptions`.

    As for transformers, a model that does not sample is greedy; one that gives a temperature samples unless it says no.
    """
    from flashllm.format.model_dir import Companions
    from flashllm.format.model_files import GENERATION_CONFIG

    config = Companions.of(path).read_json_object(GENERATION_CONFIG)
    if config is None:
        return {}
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    given = {name: config[name] for name in names if type(config.get(name)) in (int, float)}
    if config.get("do_sample", "temperature" in given) is not True:
        given["temperature"] = 0.0
    else:
        given.setdefault("temperature", 1.0)
    return given
