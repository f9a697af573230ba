"""Measure how often each neuron of a trace is active, and keep that in a model directory for its cache.

python tools/install_popularity.py MODEL TRACE
"""

import argparse
import sys
from pathlib import Path

from flashllm.errors import FlashError
from flashllm.format.popularity import install_popularity
from flashllm.format.trace import Trace


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("model", type=Path, help="model directory")
    parser.add_argument("trace", type=Path, help="of this model's activity; see tools/record_trace.py")
    args = parser.parse_args(argv)
    try:
        with Trace(args.trace) as trace:
            install_popularity(args.model, trace)
    except FlashError as error:
        print(f"install_popularity: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
