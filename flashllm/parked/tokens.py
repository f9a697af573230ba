"""Tokens that are compared by hashes of their pages: where two texts part is found without reading what is alike."""

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from flashllm._core import PAGE_TOKENS
from flashllm.generate.session import common_prefix


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids, and after each whole page of them a hash of all before."""

    ids: "array[int]"
    links: tuple[bytes, ...]

    @classmethod
    def of(cls, ids: Sequence[int]) -> Self:
        kept, chain, links = array("q", ids), hashlib.sha256(), []
        for end in range(PAGE_TOKENS, len(kept) + 1, PAGE_TOKENS):
            chain.update(kept[end - PAGE_TOKENS : end])
            links.append(chain.digest())
        return cls(kept, tuple(links))

    def __len__(self) -> int:
        return len(self.ids)

    def shared_with(self, other: "Tokens") -> int:
        """How many of the first tokens are those of `other`."""
        most = min(len(self.links), len(other.links))
        pages = bisect_left(range(most), True, key=lambda at: self.links[at] != other.links[at])
        alike, end = pages * PAGE_TOKENS, min(len(self), len(other), (pages + 1) * PAGE_TOKENS)
        return alike + common_prefix(self.ids[alike:end], other.ids[alike:end], end - alike)
