"""Text samples for training and judging predictors: C4-schema shards on disk, or a hub data set, as token rows.

Documents give rows in proportion to their length. Bad lines, empty and short documents and a truncated
shard are counted and skipped, or stop the run with `strict`. Knows no model.
"""

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_DOCUMENT_CHARS = 2_000_000  # a longer one is cut, and counted


class DataError(Exception):
    """A data file cannot be used, or `strict` met a bad document."""


@dataclass(slots=True)
class SampleReport:
    """What became of the documents."""

    used: int = 0
    skipped: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        skipped = ", ".join(f"{count} {why}" for why, count in self.skipped.items()) or "none"
        return f"{self.used} samples used; skipped: {skipped}"


def read_shards(paths: list[Path], report: SampleReport, *, strict: bool = False) -> Iterator[str]:
    """The `text` of each line of .json, .jsonl and .json(l).gz files."""
    for path in paths:
        opener = gzip.open if path.suffix == ".gz" else open
        try:
            with opener(path, "rb") as lines:
                for line in lines:
                    text = _text_of(line, report)
                    if text is not None:
                        yield text
                    elif strict:
                        raise DataError(f"{path}: {', '.join(report.skipped)}")
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            if strict:
                raise DataError(f"{path} is truncated or damaged: {error}") from error
            report.skipped["truncated shard"] += 1
        except OSError as error:
            raise DataError(f"cannot read {path}: {error}") from error


def _text_of(line: bytes, report: SampleReport) -> str | None:
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError):  # UnicodeDecodeError is a ValueError
        report.skipped["bad line"] += 1
        return None
    if not isinstance(text, str) or not text.strip():
        report.skipped["empty document"] += 1
        return None
    return text


def read_hub(dataset: str, config: str | None, split: str = "train") -> Iterator[str]:
    """The `text` column of a hub data set, streamed."""
    import datasets

    for row in datasets.load_dataset(dataset, config, split=split, streaming=True):
        yield row["text"]


def token_rows(
    texts: Iterator[str], tokenizer: Any, *, samples: int, tokens_per_sample: int, report: SampleReport, seed: int
) -> NDArray[np.int64]:
    """[at most `samples`, tokens_per_sample] ids. Long documents (books) give several rows, drawn over their length."""
    rows: list[NDArray[np.int64]] = []
    rng = np.random.default_rng(seed)
    documents = list(texts) if samples > 0 else []
    lengths = np.array([min(len(text), MAX_DOCUMENT_CHARS) for text in documents], dtype=np.float64)
    if len(documents) == 0:
        raise DataError("no usable document in the data")
    quota = np.maximum(1, np.floor(samples * lengths / lengths.sum())).astype(int)
    for text, count in zip(documents, quota, strict=True):
        if len(text) > MAX_DOCUMENT_CHARS:
            report.skipped["end of a huge document"] += 1
        ids = np.asarray(tokenizer(text[:MAX_DOCUMENT_CHARS])["input_ids"], dtype=np.int64)
        if len(ids) < tokens_per_sample:
            report.skipped["short document"] += 1
            continue
        pieces = len(ids) // tokens_per_sample
        for piece in sorted(rng.choice(pieces, size=min(count, pieces), replace=False)):
            rows.append(ids[piece * tokens_per_sample : (piece + 1) * tokens_per_sample])
    if not rows:
        raise DataError(f"no document has {tokens_per_sample} tokens; lower --tokens-per-sample")
    order = rng.permutation(len(rows))[:samples]
    report.used = len(order)
    return np.stack([rows[index] for index in order])
