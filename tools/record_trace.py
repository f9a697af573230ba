"""Record a model's activity on text: which neurons its predictors name, which fire, and what an early guess would say.

One dense pass a sequence; the predictors are asked about each layer's real FFN input, by the engine's own kernels. The
early guess for a layer is its predictor's answer to the input of the layer before. The trace's format is
flashllm/format/trace.py; replay it with bench/cache/cache_replay.py, or place neurons by it with
`flashllm convert --reorder`.
"""

import argparse
import gzip
import itertools
import json
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from flashllm import FlashModel
from flashllm.base.progress import ProgressBar
from flashllm.commands.runtime import load_tokenizer
from flashllm.convert.locate import is_demo, resolve_model
from flashllm.engine.ffn import Mode
from flashllm.errors import FlashError, UsageError
from flashllm.format.trace import Stream, TraceInfo, TraceWriter, pack_bits

MAX_SEQUENCE = 512  # tokens
CHARS_PER_TOKEN = 8  # ample for English and byte-level vocabularies

T = TypeVar("T")


def documents(path: Path) -> Iterator[str]:
    """The texts of a .jsonl file (key `text`), or a .txt file as one; either may be gzipped."""
    opener: Any = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        if ".jsonl" in path.suffixes:
            yield from (json.loads(line)["text"] for line in file)
        else:
            yield file.read()


def pieces(text: str, tokenizer: Any, length: int) -> Iterator[list[int]]:
    """Successive sequences of at most `length` tokens, each tokenized alone."""
    width = length * CHARS_PER_TOKEN
    start = 0
    while start < len(text):
        encoded = tokenizer(text[start : start + width], return_offsets_mapping=True)
        yield encoded["input_ids"][:length]
        start += max(1, *(end for _, end in encoded["offset_mapping"][:length]))


def sequences(paths: list[Path], tokenizer: Any, tokens: int, length: int) -> list[list[int]]:
    """Sequences of `tokens` tokens in all: files in turn, and of each file its documents in turn, a piece at a time."""
    files = [in_turn(pieces(text, tokenizer, length) for text in documents(path)) for path in paths]
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
    """Watches the FFNs of a loaded model during dense passes."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._ffns = model.engine.ffns
        self.num_layers = len(self._ffns)
        self.num_neurons = model.engine.manifest.architecture.d_ff

    @torch.inference_mode()
    def record(self, ids: list[int]) -> NDArray[np.bool_]:
        """[tokens, layers, streams, neurons] of one sequence."""
        masks = np.zeros((len(ids), self.num_layers, len(Stream), self.num_neurons), np.bool_)
        handles = []
        for layer, ffn in enumerate(self._ffns):
            handles.append(ffn.register_forward_pre_hook(self._ask(layer, masks)))
            ffn.observer = self._watch(masks[:, layer, Stream.FIRING])
            ffn.mode = Mode.DENSE  # all passes, short ones too
        try:
            self._model(torch.tensor([ids]), use_cache=False, logits_to_keep=1)
        finally:
            for handle in handles:
                handle.remove()
        return masks

    def _ask(self, layer: int, masks: NDArray[np.bool_]) -> Any:
        def ask(_module: Any, args: tuple[torch.Tensor, ...]) -> None:
            x = args[0].reshape(-1, args[0].shape[-1]).contiguous()
            for token, row in enumerate(x):
                masks[token, layer, Stream.ACTIVE, self._ffns[layer].native.predict(row.data_ptr())] = True
                if layer + 1 < self.num_layers:
                    early = self._ffns[layer + 1].native.predict(row.data_ptr())
                    masks[token, layer + 1, Stream.EARLY, early] = True

        return ask

    @staticmethod
    def _watch(firing: NDArray[np.bool_]) -> Any:
        def watch(first_token: int, first_neuron: int, h: torch.Tensor) -> None:
            firing[first_token : first_token + len(h), first_neuron : first_neuron + h.shape[1]] = (h != 0).numpy()

        return watch


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
    model = FlashModel.from_pretrained(directory)
    with model.engine:
        length = min(MAX_SEQUENCE, model.engine.plan.context)
        rows = sequences(args.text, load_tokenizer(directory), args.tokens, length)
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
