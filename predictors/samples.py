"""Text samples for training and judging predictors: shards or plain text on disk, or a hub data set, as token rows.

Documents give excerpts in proportion to the square root of their length, so that books do not drown web pages; short
pieces are packed together. Bad lines, empty documents and a truncated shard are counted and skipped, or stop the run
with `strict`. Holds the excerpts and one document, never the data; knows no model.
"""

import gzip
import itertools
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

MAX_DOCUMENT_CHARS = 20_000_000  # a longer one is cut, and counted
MAX_LINE_NBYTES = 4 * MAX_DOCUMENT_CHARS  # what a line of JSON may take in memory before it is parsed
LEAST_SAMPLES = 3  # to train on, to calibrate with and to judge by
CHARS_PER_TOKEN = 8  # of an excerpt: ample for English and byte-level vocabularies


class TextEncoder(Protocol):
    """The part of a tokenizer that samples need."""

    def encode(self, text: str) -> list[int]: ...


class DataError(Exception):
    """A data file cannot be used, or `strict` met a bad document."""


@dataclass(slots=True)
class SampleReport:
    """The fate of the documents."""

    used: int = 0
    skipped: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        skipped = ", ".join(f"{count} {why}" for why, count in self.skipped.items()) or "none"
        return f"{self.used} samples used; skipped: {skipped}"


def read_shards(paths: list[Path], report: SampleReport, *, strict: bool = False) -> Iterator[str]:
    """The `text` of each line of C4-schema .json(l) files, and each .txt file whole; any of them may be .gz.

    DataError: see `strict`, and missing files.
    """
    for path in paths:
        opener: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
        try:
            with opener(path, "rb") as lines:
                plain = path.with_suffix("").suffix == ".txt" if path.suffix == ".gz" else path.suffix == ".txt"
                documents = _plain_text(lines) if plain else map(_text_of, _lines(lines, report))
                for number, (why, text) in enumerate(documents, start=1):
                    if text is not None:
                        yield text
                        continue
                    if strict:
                        raise DataError(f"{path}, line {number}: {why}")
                    report.skipped[why] += 1
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            if strict:
                raise DataError(f"{path} is truncated or damaged: {error}; fetch it again") from error
            report.skipped["truncated shard"] += 1
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def _plain_text(file: Any) -> Iterator[tuple[str, str | None]]:
    """The whole file as one document; as `_text_of`."""
    text = file.read(MAX_LINE_NBYTES).decode("utf-8", errors="replace")
    yield ("", text) if text.strip() else ("empty document", None)


def _lines(file: Any, report: SampleReport) -> Iterator[bytes]:
    """Lines of bounded length: one without an end must not take all memory."""
    while line := file.readline(MAX_LINE_NBYTES):
        if len(line) == MAX_LINE_NBYTES and not line.endswith(b"\n"):
            while not line.endswith(b"\n") and (line := file.readline(MAX_LINE_NBYTES)):
                pass
            line = b"\n"
            report.skipped["line of huge length"] += 1
        yield line


def _text_of(line: bytes) -> tuple[str, str | None]:
    """(what is wrong, None) or ("", the text)."""
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError, RecursionError):  # UnicodeDecodeError is a ValueError
        return "bad line", None
    if not isinstance(text, str):
        return "bad line", None
    return ("", text) if text.strip() else ("empty document", None)


def read_hub(dataset: str, config: str | None, split: str = "train", *, limit: int) -> Iterator[str]:
    """The `text` column of the first `limit` rows of a hub data set, streamed. DataError where it cannot be had."""
    import datasets

    try:
        # Text of the user's choice, as it is today; datasets runs none of its code.
        rows = datasets.load_dataset(dataset, config, split=split, streaming=True)  # nosec B615
        for row in itertools.islice(rows, limit):
            yield row["text"]
    except Exception as error:  # datasets raises a dozen types: offline, unknown name, no such split, lost connection
        raise DataError(
            f"cannot read {dataset} from the hub ({type(error).__name__}: {error}); give local shards with --data-files"
        ) from error


def token_rows(
    texts: Callable[[], Iterator[str]],
    tokenizer: TextEncoder,
    *,
    samples: int,
    tokens_per_sample: int,
    report: SampleReport,
    seed: int,
) -> NDArray[np.int64]:
    """[at most `samples`, tokens_per_sample] ids in random order, equal for equal arguments.

    `texts` is called twice: for the documents' lengths, and for their text. DataError where there is too little text.
    """
    # 1. How many excerpts each document gives, at random places of it.
    lengths = np.fromiter((min(len(text), MAX_DOCUMENT_CHARS) for text in texts()), dtype=np.float64)
    if not len(lengths):
        raise DataError(f"no usable document in the data: {report}; a plain text is a .txt file")
    report.skipped.clear()  # counted again in the second pass
    rng = np.random.default_rng(seed)
    width = CHARS_PER_TOKEN * tokens_per_sample
    share = np.sqrt(lengths) / np.sqrt(lengths).sum()
    fill = np.minimum(1.0, lengths / (0.5 * width))  # of a row, by an excerpt: shorter ones are packed
    expected = 1.2 * samples * share / (share * fill).sum()
    quota = np.minimum(np.floor(expected + rng.random(len(lengths))), np.maximum(1, lengths // width)).astype(int)
    if (quota * fill).sum() < samples:  # little text: all of it
        quota = np.maximum(1, lengths // width).astype(int)
    # 2. The excerpts, one document in memory at a time.
    rows: list[NDArray[np.int64]] = []
    pack = np.empty(0, dtype=np.int64)
    for text, count in zip(texts(), quota, strict=False):
        if len(text) > MAX_DOCUMENT_CHARS:
            report.skipped["end of a huge document"] += 1
        for ids in _excerpts(text[:MAX_DOCUMENT_CHARS], int(count), tokenizer, tokens_per_sample, rng):
            if len(ids) == tokens_per_sample:
                rows.append(ids)
                continue
            pack = np.concatenate([pack, ids])
            if len(pack) >= tokens_per_sample:
                rows.append(pack[:tokens_per_sample])
                pack = pack[tokens_per_sample:]
    if len(rows) < LEAST_SAMPLES:
        raise DataError(
            f"the data gives {len(rows)} samples of {tokens_per_sample} tokens, and {LEAST_SAMPLES} are the least; "
            "give more text"
        )
    order = rng.permutation(len(rows))[:samples]
    report.used = len(order)
    return np.stack([rows[index] for index in order])


def _excerpts(
    text: str, count: int, tokenizer: TextEncoder, tokens: int, rng: np.random.Generator
) -> Iterator[NDArray[np.int64]]:
    """`count` pieces of a document, each in its own part of it; the first is its beginning."""
    width = CHARS_PER_TOKEN * tokens
    for index in range(count):
        part = len(text) / count
        start = 0 if index == 0 else int(index * part) + int(rng.integers(0, max(0, int(part) - width) + 1))
        while 0 < start < len(text) and not text[start - 1].isspace():
            start += 1  # at a word
        ids = tokenizer.encode(text[start : start + width])[:tokens]
        yield np.asarray(ids, dtype=np.int64)
