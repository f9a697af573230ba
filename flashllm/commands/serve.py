"""`flashllm serve [MODEL]`: OpenAI's interface over HTTP.

The port is taken before the model is loaded, so that a wrong one is an error at once.
"""

import argparse
import contextlib
import dataclasses
import ipaddress
import re
from pathlib import Path

from flashllm.base.command_line import say, size, whole
from flashllm.commands import options
from flashllm.commands.asked import explained, find_model, loading, run_config
from flashllm.config import MOST_TOGETHER
from flashllm.errors import UsageError

_MIN_KEY_CHARS = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Example: flashllm serve MODEL --memory 7GB, then any OpenAI client with the base URL "
        "http://127.0.0.1:8080/v1. ctrl-C stops."
    )
    options.add_model(parser)
    group = parser.add_argument_group("server")
    group.add_argument("--host", metavar="ADDRESS", default="127.0.0.1", help="to listen at (default: %(default)s)")
    group.add_argument(
        "--port", metavar="N", type=whole(0, 65535), default=8080, help="0: a free one (default: %(default)s)"
    )
    group.add_argument(
        "--api-key-file",
        metavar="F",
        type=Path,
        help=f"clients must send the key in this file (one line, at least {_MIN_KEY_CHARS} characters)",
    )
    group.add_argument("--name", help="of the model, for clients (default: its source's, else its directory's)")
    group.add_argument(
        "--parallel",
        metavar="N",
        type=whole(1, MOST_TOGETHER),
        help="requests that are answered at once; they share passes (default: as many as memory has room for, up to "
        f"{MOST_TOGETHER})",
    )
    group.add_argument(
        "--keep",
        metavar="SIZE",
        type=_kept,
        help="memory for conversations and what they begin with, in the place of neurons: requests that begin alike "
        "compute the rest alone (default: as `flashllm plan` says; 0: none)",
    )
    group.add_argument(
        "--park",
        metavar="DIR",
        type=Path,
        help="write conversations that leave memory into this folder, for their next turn, also after a restart; they "
        "hold what was said (default: they are forgotten)",
    )
    group.add_argument("--park-size", metavar="SIZE", type=size, help="the folder's limit (default: 4GB)")
    group.add_argument(
        "--allow-origin",
        metavar="URL",
        type=_origin,
        action="append",
        default=[],
        help="let pages of this origin use the server, and let the server go by the origin's name (repeatable; *: any "
        "page)",
    )
    group.add_argument(
        "--tool-format",
        metavar="NAME",
        help="in which the model writes reasoning and calls of tools (default: as its chat template says)",
    )
    options.add_run(parser, sampling="of requests that do not say; by default the model's generation_config.json")


def main(args: argparse.Namespace) -> int:
    # The server and its libraries come before the model, so that the memory plan counts them.
    from flashllm.serve.server import Server, listen, url

    key = None if args.api_key_file is None else read_key(args.api_key_file)
    limits: dict[str, int] = {} if args.park_size is None else {"parking_nbytes": args.park_size}
    if limits and args.park is None:
        raise UsageError("--park-size is the limit of a folder: name it with --park DIR")
    if args.park is not None and args.keep == 0:
        raise UsageError("--park is for conversations that leave memory, and with --keep 0 none is there")
    path = find_model(args)
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(contextlib.closing(listen(args.host, args.port)))
        with loading(path):
            from flashllm.commands.chat import sampling_defaults
            from flashllm.commands.runtime import profile_drive
            from flashllm.generate.sampling import SamplingOptions
            from flashllm.serve.opening import ServerOptions, open_app

            config = dataclasses.replace(run_config(args), serves=True)
            profile_drive(args, path, config)
            server_options = ServerOptions(
                name=args.name,
                parallel=args.parallel,
                keep=args.keep,
                parking=args.park,
                tool_format=args.tool_format,
                key=key,
                hosts=names(args.host, args.allow_origin, sock.getsockname()[0]),
                origins=frozenset(args.allow_origin),
                defaults=SamplingOptions(**{**sampling_defaults(path), **options.given_sampling(args)}),
                **limits,
            )
            app, worker = stack.enter_context(open_app(path, config, server_options, explain=explained(args)))
        if key is None and not ipaddress.ip_address(sock.getsockname()[0]).is_loopback:
            say("whoever reaches this address can use the server; --api-key-file makes it ask for a key")
        try:
            sock.listen()  # before the next line is read: a client that connects at once is let in
        except OSError as error:  # another server that began at the same time
            raise UsageError(f"port {args.port} cannot be used: {error.strerror}; choose another --port") from error
        say(f"serving at {url(sock)} (base URL of OpenAI clients: {url(sock)}/v1); ctrl-C stops")
        Server(app, stopping=worker.cancel_all, waiting=server_options.max_waiting).run(sockets=[sock])
    return 0


def _kept(text: str) -> int:
    """As `size`, or 0."""
    return 0 if text == "0" else size(text)


def _origin(text: str) -> str:
    """An origin as browsers send it; *: any."""
    if not re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[^/\sA-Z]+", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no origin: give one like https://example.org, without a path, or *"
        )
    return text


def names(host: str, origins: list[str], address: str) -> frozenset[str] | None:
    """Names that the server goes by, those of `origins` among them; None: any. Only a server that this machine alone
    can reach checks them."""
    from flashllm.serve.http import host_name

    if not ipaddress.ip_address(address).is_loopback:
        return None
    return frozenset({"localhost", host.lower(), *(host_name(origin.partition("://")[2]) for origin in origins)} - {""})


def read_key(path: Path) -> bytes:
    """The API key in a file. UsageError where that holds none, or one that could be guessed."""
    from flashllm.base.files import read_bounded

    key = read_bounded(path, 4096).strip()
    if len(key) < _MIN_KEY_CHARS or not all(0x20 < byte < 0x7F for byte in key):
        raise UsageError(
            f"{path}: must hold one line of at least {_MIN_KEY_CHARS} printable ASCII characters without spaces, such "
            "as `openssl rand -hex 32` writes"
        )
    return key
