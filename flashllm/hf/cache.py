"""`FlashCache`: keys and values of a batch, as Hugging Face's `generate` handles them, over sequences of the engine.

A row is a sequence, and a record of which columns of the batch are its tokens: padding never enters a sequence. Rows
of the same tokens share one sequence until they differ, so beams and several answers to one prompt are copied only
where they part. Keeps books and calls the engine; knows nothing of torch's models.
"""

from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import Cache

from flashllm.engine.model import Model
from flashllm.engine.passes import Logits
from flashllm.engine.state import SequenceState
from flashllm.errors import UsageError

Columns = NDArray[np.bool_]  # [rows, columns]: which are tokens, not padding


class FlashCache(Cache):
    """The KV cache of `FlashModel`. Its memory goes back when it is forgotten; a deep copy is independent of it."""

    def __init__(self, engine: Model) -> None:
        """Empty; the first pass decides how many rows there are."""
        super().__init__(layers=[])  # Hugging Face's layers of tensors: there are none
        self.engine = engine
        self._sequences: list[SequenceState] = []  # of each row; rows may share one
        self._tokens: list[list[int]] = []  # of each row
        self._columns: Columns = np.zeros((0, 0), np.bool_)

    @property
    def columns(self) -> Columns:
        """Which columns of the batch so far are tokens, [rows, columns]; no rows before the first pass."""
        return self._columns

    @property
    def batch_size(self) -> int:
        """Rows; -1 before the first pass."""
        return len(self._sequences) or -1

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [int(length) for length in self._columns.sum(axis=1)]

    def run(self, ids: list[list[int]], new: Columns, *, all_logits: bool) -> list[Logits]:
        """Run new columns: `ids` are each row's tokens in them, and `new` [rows, columns] says where they stand.

        Returns each row's logits, [tokens, vocab] with `all_logits`, else [1, vocab] after its last token; [0, vocab]
        where it has none. Where it raises, as `Model.step` does, the cache is as it was.
        """
        rows = range(len(ids))
        self._forget_unrecorded()
        held = self._sequences or [self.engine.new_sequence()] * len(ids)
        sequences = list(held)
        # 1. Rows that stay the same run once; of those that part, all but one go on in a copy.
        groups: dict[tuple[int, bytes, tuple[int, ...]], list[int]] = {}
        for row in rows:
            groups.setdefault((held[row].number, new[row].tobytes(), tuple(ids[row])), []).append(row)
        continued: set[int] = set()
        for same in groups.values():
            sequence = held[same[0]]
            if sequence.number in continued:
                sequence = self._copy(sequence)
            continued.add(sequence.number)
            for row in same:
                sequences[row] = sequence
        # 2. Every group with tokens is an entry of the pass.
        leaders = [same[0] for same in groups.values() if ids[same[0]]]
        entries = [(sequences[row], ids[row]) for row in leaders]
        none: Logits = np.empty((0, self.engine.vocab_size), np.float32)
        results: list[Logits] = []
        if entries:
            logits = self.engine.step(entries, all_logits=all_logits)
            ends = np.cumsum([len(said) if all_logits else 1 for _, said in entries])
            results = np.split(logits, ends[:-1])
        # 3. Only now is anything changed.
        by_sequence = {sequences[row].number: logits for row, logits in zip(leaders, results, strict=True)}
        columns = self._columns if self._sequences else np.zeros((len(ids), 0), np.bool_)
        tokens = self._tokens if self._sequences else [[] for _ in rows]
        self._tokens = [said + more for said, more in zip(tokens, ids, strict=True)]
        self._sequences, self._columns = sequences, np.concatenate([columns, new], axis=1)
        return [by_sequence.get(sequences[row].number, none) if ids[row] else none for row in rows]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of the batch so far, padding included."""
        return int(self._columns.shape[1])

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Tokens a row may have."""
        return self.engine.context

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """(columns with `query_length` new ones, 0)."""
        return self.get_seq_length() + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last `-tokens_to_remove` columns; a positive number is how many stay, as in older transformers."""
        columns = self.get_seq_length()
        keep = min(columns, tokens_to_remove) if tokens_to_remove > 0 else max(0, columns + tokens_to_remove)
        if keep == columns:
            return
        self._columns = self._columns[:, :keep]
        self._tokens = [said[:length] for said, length in zip(self._tokens, self.lengths, strict=True)]
        self._forget_unrecorded()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes what row `beam_idx[i]` was."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row becomes `repeats` rows."""
        self._select(np.arange(len(self._sequences)).repeat(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows of these indices, or where a mask is True."""
        self._select(np.arange(len(self._sequences))[np.asarray(indices.cpu())])

    def reset(self) -> None:
        self._select(np.arange(0))
        self._columns = np.zeros((0, 0), np.bool_)

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        """UsageError: it takes no tensors."""
        raise UsageError("a FlashCache holds sequences of flashllm's engine, no tensors: give it to a FlashModel")

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_initialized(self) -> bool:
        """True after the first pass."""
        return bool(self._sequences)

    def _forget_unrecorded(self) -> None:
        """Cut the sequences to their tokens; they are longer where an interruption came right after a pass. Where a
        sliding window's keys and values are gone, they are computed again."""
        for sequence, said in zip(self._sequences, self._tokens, strict=True):
            if sequence.length > len(said):  # the same for all rows that share it
                sequence.keep(len(said))
            if sequence.length < len(said):
                self.engine.step([(sequence, said[sequence.length :])], as_prompt=True)

    def _select(self, rows: NDArray[np.intp]) -> None:
        self._sequences, self._columns = [self._sequences[row] for row in rows], self._columns[rows]
        self._tokens = [self._tokens[row] for row in rows]

    def _copy(self, sequence: SequenceState) -> SequenceState:
        copy = self.engine.new_sequence()
        if sequence.length:
            copy.copy_from(sequence)
        return copy

    def __deepcopy__(self, memo: dict[int, Any]) -> "FlashCache":
        copy = FlashCache(self.engine)
        copies = {sequence.number: sequence for sequence in self._sequences}
        copies = {number: self._copy(sequence) for number, sequence in copies.items()}
        copy._sequences = [copies[sequence.number] for sequence in self._sequences]
        copy._tokens, copy._columns = list(self._tokens), self._columns.copy()
        memo[id(self)] = copy
        return copy

    def __len__(self) -> int:
        return self.engine.manifest.architecture.num_layers

    def __repr__(self) -> str:
        return f"FlashCache(rows={len(self._sequences)}, columns={self.get_seq_length()}, tokens={self.lengths})"
