"""A logits processor that holds what `generate` writes to a form, row by row, in every strategy."""

import contextlib

import numpy as np
import torch
from transformers.generation.logits_process import LogitsProcessor

from flashllm.errors import FlashError
from flashllm.generate.grammar import Matcher

_Ids = tuple[int, ...]


class GrammarLogits(LogitsProcessor):
    """Lets only those tokens come that go on as a matcher demands, after a prompt of so many columns."""

    def __init__(self, first: Matcher, prompt_columns: int, end_ids: frozenset[int]) -> None:
        """`first`: an answer's, before its first token. `end_ids`: of those one must come where it is complete."""
        self._first, self._start, self._end_ids = first, prompt_columns, sorted(end_ids)
        self._matchers: dict[_Ids, Matcher] = {}  # of the rows of the last call, by their tokens

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """`scores` [rows, vocab], with -inf for the tokens that may not follow."""
        rows = [tuple(row) for row in input_ids[:, self._start :].tolist()]
        self._matchers = {ids: self._matcher(ids) for ids in rows}
        may = np.full(scores.shape, -np.inf, np.float32)
        for row, ids in enumerate(rows):
            matcher = self._matchers[ids]
            if matcher.ended:
                may[row, self._end_ids] = 0
            elif matcher.forced:
                may[row, matcher.forced[0]] = 0
            else:
                may[row] = matcher.masked(np.zeros(scores.shape[1], np.float32))
        return torch.FloatTensor(scores + torch.from_numpy(may).to(scores))

    def _matcher(self, ids: _Ids) -> Matcher:
        """The matcher after `ids`: beams go on from one another."""
        before = self._matchers.get(ids[:-1]) if ids else None
        matcher, rest = (self._first.copy(), ids) if before is None else (before.copy(), ids[-1:])
        for token_id in rest:
            if not matcher.ended:  # behind the end there is padding
                with contextlib.suppress(FlashError):  # where beams are short of tokens, one takes what may not come
                    matcher.accept(token_id)
        return matcher
