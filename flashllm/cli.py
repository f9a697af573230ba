"""The umbrella command `flashllm VERB …`: finds the verb's module, parses, and turns errors into one line and a status.

Imports only the chosen verb's module, and those import what they need when they run: `--help` waits for no torch.
Exit status: 0, 1 (failed), 2 (wrong use), 130 (interrupted).
"""

import argparse
import contextlib
import difflib
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Iterable, Sequence
from typing import NoReturn

import flashllm
from flashllm.base.text import one_line, prepare_streams, silence
from flashllm.errors import INTERRUPTED, FlashError, UsageError, needing

# Verb -> its module, with `add_arguments(parser)` and `main(args) -> int`, and what it is for.
VERBS = {
    "chat": ("flashllm.commands.chat", "talk with a model; plain lines when piped"),
    "generate": ("flashllm.commands.generate", "continue one prompt, with a record of every token"),
    "serve": ("flashllm.commands.serve", "answer OpenAI clients over HTTP"),
    "convert": ("flashllm.commands.convert", "make a model directory from a checkpoint"),
    "inspect": ("flashllm.commands.inspect", "what a model directory holds"),
    "verify": ("flashllm.commands.verify", "check every byte of a model directory"),
    "models": ("flashllm.commands.models.known", "well-known models: what each takes here, before it is downloaded"),
    "list": ("flashllm.commands.models.list", "the models that were converted on first use"),
    "rm": ("flashllm.commands.models.rm", "delete such models"),
    "train": ("flashllm.commands.predictors.train", "train a model's activity predictors"),
    "evaluate": ("flashllm.commands.predictors.evaluate", "what predictors cost a model's quality"),
    "calibrate": ("flashllm.commands.calibrate", "measure this drive and machine, for the reader and the plan"),
    "plan": ("flashllm.commands.plan", "the memory plan, before anything is loaded"),
    "bench": ("flashllm.commands.machine.bench", "where each token's time goes on this machine"),
    "doctor": ("flashllm.commands.machine.doctor", "what this machine lacks, and what to do about it"),
    "completion": ("flashllm.commands.completion", "complete verbs and options in a shell"),
    "offload": ("flashllm.offload.cli", "large batches through a model that does not fit: plan, run"),
}
DEBUG = "--debug"
COMPLETION = "completion"


class _Parser(argparse.ArgumentParser):
    """Reports wrong use in one line, like every other error."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"flashllm: error: {one_line(message)} (see {self.prog} --help)\n")

    def refuse(self, unknown: Sequence[str], parsed: argparse.Namespace) -> NoReturn:
        """Report options that the verb does not have, and the nearest one that it has."""
        verbs = next(action for action in self._actions if isinstance(action, argparse._SubParsersAction))
        chosen: argparse.ArgumentParser = verbs.choices[parsed.verb]
        known = [name for name in chosen._option_string_actions if name.startswith("--")]
        near = did_you_mean(unknown[0].split("=")[0], known)
        chosen.error(f"unrecognized arguments: {' '.join(unknown)}{near}")


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """A question to end a message with, where something known is spelt alike."""
    near = difflib.get_close_matches(given, list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""


def make_parser(verb: str | None) -> _Parser:
    """The parser, with the arguments of `verb` alone: the other verbs' modules are not imported."""
    parser = _Parser(
        prog="flashllm",
        description="Runs language models that are larger than memory. MODEL is a model directory, a Hugging Face "
        "folder, a GGUF file, a hub id or address, or smollm2; left out, the bundled demo.",
        epilog="`flashllm VERB --help` has the arguments of a verb.",
        allow_abbrev=False,
    )
    parser.add_argument("-V", "--version", action="version", version=f"flashllm {flashllm.__version__}")
    parser.add_argument(DEBUG, action="store_true", help="show the traceback of an error, for a bug report")
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=_Parser)
    for name, (module, summary) in VERBS.items():
        subparser = subparsers.add_parser(
            name, help=summary, description=summary[0].upper() + summary[1:] + ".", allow_abbrev=False
        )
        if verb in (name, COMPLETION):  # completion needs all of them
            command = importlib.import_module(module)
            command.add_arguments(subparser)
            subparser.set_defaults(main=command.main, parser=parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (by default the process's); the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = [argument for argument in given if argument != DEBUG] or ["--help"]  # DEBUG: after any verb, too
    debug = DEBUG in given
    prepare_streams()
    with contextlib.suppress(ValueError):  # not the main thread
        for number in (signal.SIGTERM, signal.SIGHUP):  # clean up as after ctrl-C
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, signal.default_int_handler)
    try:
        verb = next((argument for argument in arguments if not argument.startswith("-")), None)
        if verb is not None and verb not in VERBS:
            raise UsageError(f"there is no verb {verb[:80]!r}{did_you_mean(verb, VERBS)} (see flashllm --help)")
        parser = make_parser(verb)
        args, unknown = parser.parse_known_args(arguments)
        if unknown:
            parser.refuse(unknown, args)
        with needing(f"flashllm {verb}"):
            status = int(args.main(args))
        sys.stdout.flush()  # here, where a closed pipe can still be handled
        return status
    except SystemExit as stop:  # of argparse: --help, --version, wrong use
        return stop.code if isinstance(stop.code, int) else 2
    except BrokenPipeError:
        silence(sys.stdout.fileno())  # the reader (`| head`) has what it wanted
        return 1
    except KeyboardInterrupt as stop:
        return _fail(str(stop) or "interrupted", INTERRUPTED, debug=False, prefix="flashllm: ")
    except FlashError as error:
        return _fail(str(error), error.exit_status, debug=debug)
    except OSError as error:
        where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        return _fail(f"{where}{error.strerror or error}", 1, debug=debug)
    except MemoryError:
        return _fail("the machine is out of memory; give a smaller --memory or close other programs", 1, debug=debug)
    except ValueError as error:
        if str(error) == "embedded null byte":  # of the system's calls
            return _fail("a file's name holds a NUL character, which none can", 2, debug=debug)
        return _fail_unknown(error, debug=debug)
    except Exception as error:
        return _fail_unknown(error, debug=debug)


def _fail_unknown(error: Exception, *, debug: bool) -> int:
    hint = "" if debug else " (a bug in flashllm; --debug shows the traceback)"
    return _fail(f"{type(error).__name__}: {error}{hint}", 1, debug=debug)


def _fail(message: str, status: int, *, debug: bool, prefix: str = "flashllm: error: ") -> int:
    if debug:
        traceback.print_exc()
    print(prefix + one_line(message), file=sys.stderr, flush=True)
    try:
        sys.stdout.flush()
    except OSError:  # full, or nobody reads: what is left of it has no place to go
        silence(sys.stdout.fileno())
    return status


if __name__ == "__main__":
    sys.exit(main())
