"""Round a model's weights to the grid of packed weights so that they lose less: error feedback on calibration text.

    python tools/quantise_weights.py MODEL OUT --text FILE [--bits 4] [--samples 48] [--length 256]
    flashllm offload run OUT -i prompts.txt -o answers.jsonl --compress weights

MODEL is a Hugging Face folder or a flashllm directory; OUT becomes a Hugging Face folder of the same dtype and size,
which loses nothing more when it is packed to these bits. FILE is plain text, or .jsonl with a "text" a line, gzipped or
not; some 10,000 tokens of the kind the model will see are enough. Runs a layer at a time, and goes on where it was
stopped. Working memory beside a layer: 28 bytes times the square of the widest matrix's inputs.
"""

import argparse
import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from flashllm.base.machine import num_cores
from flashllm.errors import FlashError
from flashllm.generate.tokenizer import Tokenizer
from flashllm.offload.quantise.folder import quantise


def texts(path: Path) -> Iterator[str]:
    """The file's text, or its lines' texts."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        if ".jsonl" not in path.name:
            yield file.read()
            return
        for line in file:
            yield json.loads(line)["text"]


def samples(tokenizer: Tokenizer, path: Path, count: int, length: int) -> list[list[int]]:
    """The first `count` runs of `length` tokens of the text. SystemExit where it has fewer."""
    ids: list[int] = []
    for text in texts(path):
        ids += tokenizer.encode(text, add_special=False)
        if len(ids) >= count * length:
            return [ids[first : first + length] for first in range(0, count * length, length)]
    raise SystemExit(f"quantise_weights: {path} has {len(ids)} tokens; {count} samples of {length} need more")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path, help="folder to write; must not exist")
    parser.add_argument("--text", type=Path, required=True, help="calibration text")
    parser.add_argument("--bits", type=int, choices=(2, 3, 4, 8), default=4)
    parser.add_argument("--groups", choices=("mixed", "inputs", "outputs"), default="mixed", help="as for run")
    parser.add_argument("--samples", type=int, default=48)
    parser.add_argument("--length", type=int, default=256, help="tokens of a sample")
    parser.add_argument("--threads", type=int, default=num_cores())
    args = parser.parse_args(argv)
    try:
        sequences = samples(Tokenizer.load(args.model), args.text, args.samples, args.length)
        quantise(
            args.model,
            args.out,
            sequences,
            bits=args.bits,
            groups=args.groups,
            threads=args.threads,
            report=lambda done, layers: print(f"layer {done} of {layers}", file=sys.stderr),
        )
    except FlashError as error:
        print(f"quantise_weights: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
