"""Token rows of text files: plain text, or .jsonl with a "text" a line, gzipped or not."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flashllm.errors import FormatError, UsageError
from flashllm.generate.tokenizer import Tokenizer


def texts_of(path: Path) -> Iterator[str]:
    """The file's text, or its lines' texts."""
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as file:
            if ".jsonl" not in path.name:
                yield file.read()
                return
            for line in file:
                yield json.loads(line)["text"]
    except (ValueError, KeyError, TypeError, EOFError) as error:
        raise FormatError(f'{path}: is neither plain text nor .jsonl with a "text" in every line: {error}') from error


def stream(tokenizer: Tokenizer, path: Path, most: int, length: int) -> NDArray[np.int32]:
    """[rows, length]: successive tokens of the file's texts, one behind the other; `most` rows at the most.

    UsageError for a file of less than one row.
    """
    ids: list[int] = []
    for text in texts_of(path):
        ids += tokenizer.encode(text, add_special=False)
        if len(ids) >= most * length:
            break
    rows = min(most, len(ids) // length)
    if rows == 0:
        raise UsageError(f"{path} has {len(ids)} tokens, less than one row of {length}; give a longer text")
    return np.asarray(ids[: rows * length], np.int32).reshape(rows, length)


class Rows:
    """Rows of several streams in turn, and each stream again from its start where it has ended. Holds no state: row n
    is always the same."""

    def __init__(self, streams: list[NDArray[np.int32]]) -> None:
        self._streams = streams

    def __getitem__(self, number: int) -> NDArray[np.int32]:
        turn, which = divmod(number, len(self._streams))
        of = self._streams[which]
        return of[turn % len(of)]

    def first(self, count: int) -> NDArray[np.int32]:
        """[count, length]."""
        return np.stack([self[number] for number in range(count)])
