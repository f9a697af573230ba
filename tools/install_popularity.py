"""Measure how often each neuron of a trace is named, and keep that in a model directory for its cache.

python tools/install_popularity.py MODEL TRACE

`flashllm train` does that with the predictors. This is for models whose gates name the neurons, and for made-up ones.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from activity_trace import Stream, Trace, unpack_bits
from numpy.typing import NDArray

from flashllm.errors import FlashError
from flashllm.format.install import install_files
from flashllm.format.manifest import Manifest
from flashllm.format.model_files import POPULARITY
from flashllm.format.popularity import encode_popularity


def measure_popularity(trace: Trace) -> NDArray[np.float32]:
    """The shares of `trace` [layers, neurons], in one pass over it."""
    info = trace.info
    counts = np.zeros((info.num_layers, info.num_neurons), np.int64)
    for token in range(info.num_tokens):
        counts += unpack_bits(trace.token(token)[:, Stream.ACTIVE], info.num_neurons)
    return (counts / info.num_tokens).astype(np.float32)


def install_popularity(directory: Path, trace: Trace) -> Manifest:
    """Measure `trace` and put the result into a model directory; the new manifest. UsageError for a foreign trace."""
    trace.check_model(Manifest.load(directory).architecture)
    info = trace.info
    file = encode_popularity(measure_popularity(trace), tokens=info.num_tokens, measured_on=info.description)
    return install_files(directory, {POPULARITY: file})


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
