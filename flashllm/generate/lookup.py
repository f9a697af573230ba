"""Prompt lookup: what followed the last tokens where they stood before is drafted (Saxena 2023; no model is asked).

Text that repeats itself or its prompt (an edit, a summary, code) so drafts itself. Bookkeeping over token ids.
"""

from array import array

import numpy as np

MATCH_KINDS = (2, 3, 4, 6)  # tokens that match, at least: the longer, the likelier the draft is right
MATCH_PRIORS = (0.3, 0.45, 0.6, 0.75)  # that a drafted token is right, before any was judged
_LONGEST_MATCH = 16  # tokens compared
_PLACES = 32  # looked at, the last first


class PromptLookup:
    """Drafts from the conversation's own tokens."""

    priors = MATCH_PRIORS
    prompt_s = 0.0

    def __init__(self) -> None:
        self._source: list[int] = []

    def look(self, tokens: "array[int]", most: int) -> tuple[int, int]:
        """(kind, how many tokens could be drafted after `tokens`, at most `most`); none where nothing matches."""
        start, length = _longest_match(np.frombuffer(tokens, np.int64)) if len(tokens) > MATCH_KINDS[0] else (0, 0)
        if length < MATCH_KINDS[0]:
            return 0, 0
        # A match close to the end continues into what is drafted: a loop goes on round.
        self._source = list(tokens[start : start + most])
        while len(self._source) < most:
            self._source.append(self._source[len(self._source) - (len(tokens) - start)])
        return max(kind for kind, least in enumerate(MATCH_KINDS) if length >= least), most

    def draft(self, tokens: "array[int]", count: int) -> list[int]:
        """The first `count` of what `look` found."""
        return self._source[:count]


def _longest_match(tokens: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> tuple[int, int]:
    """(what follows it, length) of the longest earlier run of tokens that are also the last ones; the latest of equals.

    A run has at least two tokens; (0, 0) where there is none.
    """
    ends = np.flatnonzero((tokens[1:-1] == tokens[-1]) & (tokens[:-2] == tokens[-2])) + 1  # index of its last token
    best = (0, 0)
    for end in ends[::-1][:_PLACES].tolist():
        most = min(_LONGEST_MATCH, end + 1)
        equal = tokens[end + 1 - most : end + 1][::-1] == tokens[len(tokens) - most :][::-1]
        length = most if equal.all() else int(equal.argmin())
        if length > best[1]:
            best = (end + 1, length)
    return best
