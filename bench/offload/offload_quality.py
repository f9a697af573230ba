"""What compression costs in quality: perplexity and last words through the throughput engine's own decoding (table 6).

    python bench/offload/offload_quality.py MODEL --text wiki.test.raw [--lambada lambada.jsonl] [--windows 16]

MODEL is a Hugging Face folder; but for rows with a copy of it (the paper's layout of weights; error feedback, by
--calibrate FILE) also a flashllm directory. Each window of the text is a prompt of one page, and every
token after it is forced through decoding, so that the cache that is read is the one a user's run would have: its last
up to 63 tokens in 16 bit, the others as the row says. LAMBADA's texts start after 8 tokens, and a word counts where
every one of its tokens is the likeliest. `change` is the perplexity over that of the first row, less one; the standard
error is over windows, of the differences in log perplexity. The last line is one JSON document.
"""

import argparse
import gzip
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence as Ids
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import NDArray
from offload_run import placement
from rounded_copies import copy_in_the_papers_groups, copy_with_feedback

from flashllm.generate.sampling import SamplingOptions
from flashllm.generate.tokenizer import Tokenizer
from flashllm.offload.jobs.sequences import Sequence
from flashllm.offload.policy import Policy
from flashllm.offload.runtime.run import Runner, RunOptions

PROMPT = 64  # tokens of a window that go in at once
LAMBADA_PROMPT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One way to run the model."""

    name: str
    weight_bits: int | None = None
    cache_bits: int | None = None
    copy: Literal["the paper's", "feedback"] | None = None  # of the model, whose weights run as they are
    share: float = 1.0

    @property
    def policy(self) -> Policy:
        return Policy(
            gpu_batch=64,
            compress_weights=self.weight_bits is not None and self.copy is None,
            compress_cache=self.cache_bits is not None,
            attention_sparsity=self.share,
            **placement("g"),
        )

    def options(self, scratch: Path) -> RunOptions:
        return RunOptions(scratch=scratch, weight_bits=self.weight_bits or 4, cache_bits=self.cache_bits or 4)


ROWS = (
    Row(name="16 bit"),
    Row(name="4 bit", weight_bits=4, cache_bits=4),
    Row(name="4 bit, 10 % sparse", weight_bits=4, cache_bits=4, share=0.1),
    Row(name="10 % sparse", share=0.1),
    Row(name="cache 8 bit", cache_bits=8),
    Row(name="cache 4 bit", cache_bits=4),
    Row(name="weights 8 bit", weight_bits=8),
    Row(name="weights 4 bit", weight_bits=4),
    Row(name="weights 4 bit, the paper's", weight_bits=4, copy="the paper's"),
    Row(name="weights 4 bit, feedback", weight_bits=4, copy="feedback"),
)


class Forced(Sequence):
    """A sequence that continues as a text does, and keeps how likely the model found it."""

    def __init__(self, ids: Ids[int], prompt: int) -> None:
        options = SamplingOptions(max_new_tokens=len(ids) - prompt)
        super().__init__(ids[:prompt], options, decoder=None, end_ids=frozenset())
        self._targets = list(ids[prompt:])
        self.losses: list[float] = []  # nats
        self.likeliest: list[bool] = []

    def accept(self, logits: NDArray[np.float32]) -> None:
        target = self._targets[len(self.output)]
        scores = logits.astype(np.float64)
        largest = scores.max()
        self.losses.append(float(largest + np.log(np.exp(scores - largest).sum()) - scores[target]))
        self.likeliest.append(int(logits.argmax()) == target)
        self.output.append(target)
        if len(self.output) == len(self._targets):
            self.finish_reason = "length"


def open_text(path: Path) -> IO[str]:
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")


def windows_of(tokenizer: Tokenizer, path: Path, count: int, length: int) -> list[list[int]]:
    """The first `count` windows of `length` tokens of a text, or of the "text" fields of a .jsonl file."""
    with open_text(path) as file:
        text = "\n".join(json.loads(line)["text"] for line in file) if ".jsonl" in path.name else file.read()
    ids = tokenizer.encode(text[: count * length * 12], add_special=False)
    if len(ids) < count * length:
        raise SystemExit(f"{path}: {len(ids)} tokens are fewer than {count} windows of {length}")
    return [ids[first : first + length] for first in range(0, count * length, length)]


def last_words(tokenizer: Tokenizer, path: Path, count: int) -> list[tuple[list[int], int]]:
    """(tokens, tokens of the last word) of LAMBADA's texts."""
    found: list[tuple[list[int], int]] = []
    with open_text(path) as file:
        for line in file:
            text = json.loads(line)["text"].strip()
            start, word = text.rsplit(" ", 1)
            before = tokenizer.encode(start, add_special=False)
            after = tokenizer.encode(" " + word, add_special=False)
            if len(before) > LAMBADA_PROMPT:
                found.append((before + after, len(after)))
            if len(found) == count:
                break
    return found


def copied(model: Path, out: Path, row: Row, calibrate: Path | None) -> Path:
    """The folder that the row runs."""
    if row.copy is None or row.weight_bits is None:
        return model
    if row.copy == "feedback":
        if calibrate is None:
            raise SystemExit(f"the row {row.name} needs --calibrate")
        return copy_with_feedback(model, out, row.weight_bits, calibrate)
    return copy_in_the_papers_groups(model, out, row.weight_bits)


def measure(
    model: Path, row: Row, windows: list[list[int]], words: list[tuple[list[int], int]], *, calibrate: Path | None
) -> dict[str, Any]:
    """Each window's mean loss, and the share of last words found."""
    started = time.perf_counter()
    forced = [Forced(window, PROMPT) for window in windows]
    texts = [Forced(ids, LAMBADA_PROMPT) for ids, _ in words]
    with (
        tempfile.TemporaryDirectory() as scratch,
        Runner(copied(model, Path(scratch) / "copy", row, calibrate), row.policy, row.options(Path(scratch))) as runner,
    ):
        runner.run(forced)
        if texts:
            runner.run(texts)
    found = [all(text.likeliest[-n:]) for text, (_, n) in zip(texts, words, strict=True)]
    word_loss = [sum(text.losses[-n:]) for text, (_, n) in zip(texts, words, strict=True)]
    return {
        "row": row.name,
        "losses": [statistics.fmean(one.losses) for one in forced],
        "lambada_accuracy": statistics.fmean(found) if found else None,
        "lambada_perplexity": math.exp(statistics.fmean(word_loss)) if word_loss else None,
        "seconds": round(time.perf_counter() - started, 1),
    }


def compared(result: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    """`result` with its perplexity, and the change against the first row's with its standard error."""
    differences = [mine - theirs for mine, theirs in zip(result["losses"], first["losses"], strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else None
    return {
        **{key: value for key, value in result.items() if key != "losses"},
        "perplexity": math.exp(statistics.fmean(result["losses"])),
        "change": math.expm1(statistics.fmean(differences)),
        "standard_error": error,
    }


def _runs(row: Row, calibrate: Path | None) -> bool:
    return row.copy != "feedback" or calibrate is not None


def main(argv: Ids[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="plain text, or .jsonl(.gz) with a text a line")
    parser.add_argument("--lambada", type=Path, help=".jsonl(.gz) with a text a line")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    parser.add_argument("--words", type=int, default=200, help="texts of LAMBADA")
    parser.add_argument("--rows", type=int, nargs="*", help="numbers of the rows to run (default: all)")
    parser.add_argument("--calibrate", type=Path, help="plain text for the row with error feedback")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    tokenizer = Tokenizer.load(args.model)
    windows = windows_of(tokenizer, args.text, args.windows, args.length)
    words = last_words(tokenizer, args.lambada, args.words) if args.lambada else []
    rows = [ROWS[number] for number in args.rows] if args.rows else [row for row in ROWS if _runs(row, args.calibrate)]
    results: list[dict[str, Any]] = []
    first: dict[str, Any] | None = None
    for row in rows:
        result = measure(args.model, row, windows, words, calibrate=args.calibrate)
        first = first or result
        results.append(compared(result, first))
        one = results[-1]
        error = "" if one["standard_error"] is None else f" ± {one['standard_error']:.2%}"
        word = "" if not words else f", last words {one['lambada_accuracy']:.1%} ({one['lambada_perplexity']:.1f})"
        print(f"{row.name:36s}{one['perplexity']:9.3f}  {one['change']:+.2%}{error}{word}", file=sys.stderr, flush=True)
    document = {
        "benchmark": "offload_quality",
        "model": args.model.name,
        "windows": args.windows,
        "length": args.length,
        "prompt": PROMPT,
        "words": len(words),
        "rows": results,
    }
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
