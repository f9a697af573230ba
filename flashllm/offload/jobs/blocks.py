"""Cuts a job's sequences, in their order, into blocks: as many together as the memory holds."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Size = tuple[int, int]  # of a sequence: prompt tokens, and positions that its cache holds at most


def cut(sizes: Sequence[Size], most: int, fits: Callable[[Sequence[Size]], bool]) -> list[int] | None:
    """How many sequences each block has, `most` at most; None where one of them does not fit alone.

    A block that fits goes on fitting with fewer sequences.
    """
    counts: list[int] = []
    first = 0
    while first < len(sizes):
        low, high = 0, min(most, len(sizes) - first)
        if fits(sizes[first : first + high]):
            low = high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(sizes[first : first + middle]) else (low, middle)
        if not low:
            return None
        counts.append(low)
        first += low
    return counts


def equal(sequences: int, block: int) -> list[int]:
    """As many blocks of `block` sequences as there are, and the rest."""
    return [min(block, sequences - first) for first in range(0, sequences, block)]


def in_blocks(items: Sequence[Item], counts: Iterable[int]) -> Iterator[Sequence[Item]]:
    """The items in their order, so many at a time."""
    first = 0
    for count in counts:
        yield items[first : first + count]
        first += count
