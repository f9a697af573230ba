"""Runs a command under a memory limit that the kernel enforces, from a cold page cache.

    python bench/capped.py 7.0GB flashllm generate MODEL --memory 7.0GB --prompt "Once upon"

Needs root and a memory control group (`bench/memory_group.py`). The last line is one JSON document.
"""

import argparse
import json
import sys
from dataclasses import asdict

from memory_group import GroupError, run_capped

from flashllm.base.units import format_size, parse_size


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("memory", metavar="SIZE", type=parse_size, help="limit of everything the command holds")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run, with its arguments")
    args = parser.parse_args(argv)
    if not args.command:
        parser.error("there is no command to run")
    try:
        run = run_capped(args.command, args.memory)
    except GroupError as error:
        print(f"capped: {error}", file=sys.stderr)
        return 1
    if run.kills:
        print(f"capped: killed: it needs more than {format_size(run.limit_bytes)}", file=sys.stderr)
    print(json.dumps(asdict(run)))
    return 0 if run.returncode == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
