"""Record a model's activity on text: neurons named by its predictors, those that fire, those to prefetch.

One dense pass a sequence; the predictors are asked about each layer's real FFN input, by the engine's own kernels. The
prefetch set of a layer is its predictor's answer to the input of the layer before. The trace's format is
tools/activity_trace.py; replay it with bench/cache/cache_replay.py.
"""

import argparse
import itertools
import json
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import core_testing  # noqa: F401 - the core's test build, whose layers say what they name
from activity_trace import Stream, TraceInfo, TraceWriter, pack_bits
from relufication.text import texts_of

from flashllm.base.dtypes import WEIGHT_DTYPES
from flashllm.base.dtypes import cast as cast_dtype
from flashllm.base.progress import ProgressBar
from flashllm.convert.locate import resolve_model
from flashllm.convert.named import is_demo
from flashllm.engine.model import Model
from flashllm.errors import FlashError, UsageError
from flashllm.generate.tokenizer import Tokenizer

MAX_SEQUENCE = 512  # tokens
CHARS_PER_TOKEN = 8  # ample for English and byte-level vocabularies

T = TypeVar("T")


def pieces(text: str, tokenizer: Tokenizer, length: int) -> Iterator[list[int]]:
    """Successive sequences of at most `length` tokens, each tokenized alone."""
    width = length * CHARS_PER_TOKEN
    start = 0
    while start < len(text):
        encoded = tokenizer.backend.encode(text[start : start + width])
        if encoded.ids:
            yield encoded.ids[:length]
        start += max((end for _, end in encoded.offsets[:length]), default=0) or width


def sequences(paths: list[Path], tokenizer: Tokenizer, tokens: int, length: int) -> list[list[int]]:
    """Sequences of `tokens` tokens in all: files in turn, and of each file its documents in turn, a piece at a time."""
    files = [in_turn(pieces(text, tokenizer, length) for text in texts_of(path)) for path in paths]
    chosen: list[list[int]] = []
    left = tokens
    for ids in in_turn(files):
        chosen.append(ids[:left])
        left -= len(chosen[-1])
        if left == 0:
            return chosen
    raise UsageError(f"the text has {tokens - left} tokens; lower --tokens or give more files")


def in_turn(sources: Iterable[Iterator[T]]) -> Iterator[T]:
    """One item of each source, then the second of each, and so on while any has more."""
    waiting = deque(sources)
    while waiting:
        source = waiting.popleft()
        for item in itertools.islice(source, 1):
            yield item
            waiting.append(source)


class Recorder:
    """Watches the FFNs of a loaded model during a pass that computes all neurons."""

    def __init__(self, model: Model) -> None:
        if model.manifest.architecture.widths or model.manifest.architecture.dense_layers:
            raise UsageError("a trace is of layers that are alike; this model's differ")
        self._model, self._ffns = model, model.parts.ffns
        self.num_layers = len(self._ffns)
        self.num_neurons = model.manifest.architecture.d_ff
        self._masks = np.zeros((0, self.num_layers, len(Stream), self.num_neurons), np.bool_)

    def record(self, ids: list[int]) -> NDArray[np.bool_]:
        """[tokens, layers, streams, neurons] of one sequence."""
        self._masks = np.zeros((len(ids), *self._masks.shape[1:]), np.bool_)
        self._done = 0  # tokens of the parts before: a long sequence goes through the layers in parts
        with self._model.new_sequence() as sequence:
            self._model.step([(sequence, ids)], observer=self)
        return self._masks

    def input(self, layer: int, x: NDArray[np.float32]) -> None:
        """Mark what the predictors say of a layer's input."""
        stored = np.ascontiguousarray(cast_dtype(x, WEIGHT_DTYPES["float32"], self._model.directory.dtype))
        for token, row in enumerate(stored, start=self._done):
            self._masks[token, layer, Stream.ACTIVE, self._ffns[layer].predict(row.ctypes.data)] = True
            if layer + 1 < self.num_layers:
                named = self._ffns[layer + 1].predict(row.ctypes.data)
                self._masks[token, layer + 1, Stream.PREFETCH, named] = True

    def activations(self, layer: int, first: int, h: NDArray[np.float32]) -> None:
        """Mark what fires of some neurons [neurons, tokens]."""
        neurons, end = slice(first, first + len(h)), self._done + h.shape[1]
        self._masks[self._done : end, layer, Stream.FIRING, neurons] = (h != 0).T
        if layer + 1 == self.num_layers and neurons.stop == self.num_neurons:
            self._done = end


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("model", nargs="?", help="model directory; the bundled demo by default")
    parser.add_argument("--text", type=Path, nargs="+", required=True, help=".txt or .jsonl files, .gz or not")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens recorded (4096)")
    parser.add_argument("--out", type=Path, required=True, help="trace to write; must not exist")
    args = parser.parse_args(argv)
    try:
        return record(args)
    except (FlashError, OSError, ValueError, KeyError) as error:
        print(f"record_trace: {error}", file=sys.stderr)
        return 1


def record(args: argparse.Namespace) -> int:
    if args.out.exists():
        raise UsageError(f"{args.out} exists; choose another name or remove it")
    directory = resolve_model(args.model)
    tokenizer = Tokenizer.load(directory)
    with Model.open(directory) as model:
        rows = sequences(args.text, tokenizer, args.tokens, min(MAX_SEQUENCE, model.context))
        recorder = Recorder(model)
        starts = np.cumsum([0, *map(len, rows)])[:-1]
        name = "the bundled demo" if is_demo(directory) else directory.name
        info = TraceInfo(
            num_tokens=args.tokens,
            num_layers=recorder.num_layers,
            num_neurons=recorder.num_neurons,
            synthetic=False,
            description=f"{name} on {', '.join(path.name for path in args.text)}",
            sequence_starts=tuple(int(start) for start in starts),
        )
        with TraceWriter(args.out, info) as writer, ProgressBar("record", unit="tokens") as bar:
            for start, ids in zip(info.sequence_starts, rows, strict=True):
                bar("", start, args.tokens)
                for token in pack_bits(recorder.record(ids)):
                    writer.append(token)
            bar("", args.tokens, args.tokens)
            sha256, nbytes = writer.finish()
    print(json.dumps({"out": str(args.out), "tokens": args.tokens, "nbytes": nbytes, "sha256": sha256}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
