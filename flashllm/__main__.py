"""The process `flashllm`, also `python -m flashllm`: ctrl-C is one line from its start on."""

import sys

from flashllm.errors import INTERRUPTED


def main() -> int:
    """Run the process's command line; the exit status."""
    try:
        from flashllm.cli import main as run  # which takes some 0.1 s

        return run()
    except KeyboardInterrupt:
        print("flashllm: interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
