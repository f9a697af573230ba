"""`flashllm offload run` with fields of LaunchOptions that its command line lacks: `job.py '{"threads": 2}' ARGS`."""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from flashllm import cli
from flashllm.offload import cli_run
from flashllm.offload.policy import Policy

READ: dict[str, Callable[[Any], Any]] = {"policy": Policy.from_json, "scratch": Path}


def main(argv: list[str] | None = None) -> int:
    """`argv`: a JSON object of fields, then the arguments of `offload run`."""
    given, *arguments = sys.argv[1:] if argv is None else argv
    fields: dict[str, Any] = json.loads(given)
    fields |= {name: read(fields[name]) for name, read in READ.items() if name in fields}
    command = cli_run.main
    cli_run.main = partial(command, **fields)
    try:
        return cli.main(["offload", "run", *arguments])
    finally:
        cli_run.main = command


if __name__ == "__main__":
    sys.exit(main())
