"""The KV cache of a run: pages in memory and on disk, and attention over them where they lie.

`arrangement.py` says where a sequence's pages are. A computation appends keys and values and attends; what it leaves
to be moved, `store` moves: full pages are sealed (packed where the cache is compressed) and go to their tier.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashllm import _core
from flashllm._core import PAGE_TOKENS
from flashllm.offload.runtime.ops import Projected
from flashllm.offload.runtime.tasks import BUFFERS, Task
from flashllm.offload.runtime.tiers.arrangement import Arrangement, Place, pages_of
from flashllm.offload.runtime.tiers.scratch import ScratchFile

Array = NDArray[Any]
Bytes = NDArray[np.uint8]
Written = list[tuple[int, Array]]  # (offset in the file, pages), to be written
Attentions = Sequence[_core.BatchAttention | None]  # of each layer; None: it keeps no keys and values
_OPEN, _SEALED, _STAGED = range(3)  # arenas, as tables name them


@dataclass(slots=True)
class _Step:
    """Places of a batch's sequences in one decoding step, the same for all layers."""

    rows: tuple[int, ...]  # places of the batch that take part
    positions: NDArray[np.int32]
    table: NDArray[np.int32]  # [pages, 2]: arena of the layer, slot
    offsets: NDArray[np.int64]


class KvCache:
    """Keys and values of all layers of a run's sequences."""

    def __init__(
        self, attention: Attentions, arrangement: Arrangement, *, disk: ScratchFile | None, share: float = 1.0
    ) -> None:
        """`share` of the values is read in decoding: the likeliest positions (top-k sparse
        attention, section 5). `disk` holds `arrangement.disk_slots` sealed pages a layer; None where there are none.
        """
        self._attention, self._arrangement, self._disk, self._share = attention, arrangement, disk, share
        pages, sealed = _page_sizes(attention)
        disk_nbytes = [arrangement.disk_slots * each for each in sealed]
        self._disk_first = [0, *itertools.accumulate(disk_nbytes)]  # byte of each layer's pages
        self._open = _arenas(arrangement.open_slots, pages)
        self._sealed = _arenas(arrangement.sealed_slots, sealed)
        # Layers take turns in these.
        self._staged = [_shared(arrangement.staged_slots, sealed) for _ in range(BUFFERS)]
        self._prompt = [_shared(arrangement.prompt_slots, pages) for _ in range(BUFFERS)]
        self._outbox = _shared(arrangement.prompt_slots if arrangement.disk_slots else 0, sealed)  # of `store` alone
        self._steps: dict[tuple[int, int], _Step] = {}  # (batch, token) -> where the batch is

    @staticmethod
    def nbytes(attention: Attentions, arrangement: Arrangement) -> int:
        """Bytes of memory that a cache of this arrangement takes."""
        pages, sealed_ones = _page_sizes(attention)
        arenas = arrangement.open_slots * sum(pages) + arrangement.sealed_slots * sum(sealed_ones)
        page, sealed = max(pages), max(sealed_ones)
        buffers = BUFFERS * (arrangement.staged_slots * sealed + arrangement.prompt_slots * page)
        return arenas + buffers + (arrangement.prompt_slots * sealed if arrangement.disk_slots else 0)

    @staticmethod
    def disk_nbytes(attention: Attentions, arrangement: Arrangement) -> int:
        return arrangement.disk_slots * sum(_page_sizes(attention)[1])

    # A prompt ------------------------------------------------------------------------------------------------------

    def prompt(self, task: Task, first: int, made: Projected, out: Array, *, sinks: Array | None = None) -> None:
        """Keep the keys and values of some tokens of a batch's prompts, and attend: causal, prompt by prompt. The
        prompts follow each other, and these are the tokens from number `first` on. Arrays are fp32, queries, keys and
        values of the model's dtype; out: [tokens, heads * head_dim]. `sinks` [heads]: scores of no position."""
        self.keep_prompt(task, made.keys, made.values, first)
        for place, rows, positions in self._pieces(task, first, len(out)):
            arena, slot = self._prompt_pages(task, place)
            attention = self._of(task.step.layer)
            attention.prompt(made.queries[rows], arena, slot, int(positions[0]), out[rows], sinks)

    def keep_prompt(self, task: Task, keys: Array, values: Array, first: int = 0) -> None:
        """Keep what `prompt` keeps, where something else attends: keys and values [tokens, kv_heads * head_dim]."""
        for place, rows, positions in self._pieces(task, first, len(keys)):
            arena, slot = self._prompt_pages(task, place)
            attention = self._of(task.step.layer)
            attention.write(keys[rows], values[rows], arena, slot + positions // PAGE_TOKENS, positions)

    def _pieces(self, task: Task, first: int, count: int) -> Iterator[tuple[Place, slice, NDArray[np.int32]]]:
        """The sequences of which a batch's tokens [first, first + count) are: rows of these, and their positions."""
        begin = 0
        for place in self._arrangement.batches[task.step.batch]:
            low, high = max(begin, first), min(begin + place.prompt, first + count)
            if low < high:
                yield place, slice(low - first, high - first), np.arange(low - begin, high - begin, dtype=np.int32)
            begin += place.prompt

    def _prompt_pages(self, task: Task, place: Place) -> tuple[Bytes, int]:
        """The arena that a prompt's pages are written to, and the first one's slot."""
        if place.moves:
            return self._prompt[task.square][task.step.layer], place.prompt_slot
        return self._open[task.step.layer], place.open_slot

    def store_prompt(self, task: Task) -> None:
        """Move what `prompt` left in the buffer: full pages to their tier, the rest to the tail."""
        written: Written = []
        layer = task.step.layer
        arena = self._prompt[task.square][layer]
        for place in self._arrangement.batches[task.step.batch]:
            if not place.moves:
                continue
            full, tail = divmod(place.prompt, PAGE_TOKENS)
            slots = range(place.prompt_slot, place.prompt_slot + full)
            if full:
                self._seal(layer, place, arena, slots, first=0, written=written)
            if tail:
                self._open[layer][place.open_slot] = arena[place.prompt_slot + full]
        if written:
            self._on_disk().write(written)

    # A decoding step -----------------------------------------------------------------------------------------------

    def begin_step(self, batch: int, token: int, rows: Sequence[int], positions: Sequence[int]) -> None:
        """Say where the batch is: `rows` of its places take part, each with one token at its position."""
        for old in [key for key in self._steps if key[0] == batch and key[1] < token - BUFFERS]:
            del self._steps[old]
        places = self._arrangement.batches[batch]
        table: list[tuple[int, int]] = []
        offsets = [0]
        for row, position in zip(rows, positions, strict=True):
            place = places[row]
            if place.moves:
                arena = _STAGED if place.on_disk else _SEALED
                first = place.staged_slot if place.on_disk else place.sealed_slot
                table += [(arena, first + page) for page in range(position // PAGE_TOKENS)]
                table.append((_OPEN, place.open_slot))
            else:
                table += [(_OPEN, place.open_slot + page) for page in range(pages_of(position + 1))]
            offsets.append(len(table))
        self._steps[batch, token] = _Step(
            tuple(rows),
            np.array(positions, np.int32),
            np.array(table, np.int32).reshape(-1, 2),
            np.array(offsets, np.int64),
        )

    def load(self, task: Task, positions: Sequence[int | None]) -> None:
        """Read a batch's pages on disk into the buffer, those before the window left out. `positions` of its places;
        None: not needed any more."""
        runs: list[tuple[int, Array]] = []
        places, window = self._arrangement.batches[task.step.batch], self._of(task.step.layer).window
        for place, position in zip(places, positions, strict=True):
            if not place.on_disk or position is None:
                continue
            first, end = max(0, position + 1 - window) // PAGE_TOKENS if window else 0, position // PAGE_TOKENS
            if first < end:
                staged = self._staged[task.square][task.step.layer]
                staged = staged[place.staged_slot + first : place.staged_slot + end]
                runs.append((self._disk_offset(place, task.step.layer, first), staged))
        if runs:
            self._on_disk().read(runs)

    def decode(self, task: Task, first: int, made: Projected, out: Array, *, sinks: Array | None = None) -> None:
        """Keep the key and value of one token a sequence, and attend to all positions that it sees: as `prompt`."""
        layer = task.step.layer
        step, places = self._steps[task.step.batch, task.step.token], self._arrangement.batches[task.step.batch]
        few = slice(first, first + len(out))
        positions, rows = step.positions[few], step.rows[few]
        tails = np.array([places[row].open_slot for row in rows], np.int32)
        moves = np.array([places[row].moves for row in rows])
        slots = tails + np.where(moves, 0, positions // PAGE_TOKENS)
        attention = self._of(layer)
        attention.write(made.keys, made.values, self._open[layer], slots.astype(np.int32), positions)
        attention.decode(
            made.queries,
            [self._open[layer], self._sealed[layer], self._staged[task.square][layer]],
            step.table,
            step.offsets[first : few.stop + 1],
            positions.astype(np.int64) + 1,
            out,
            self._share,
            sinks,
        )

    def store_step(self, task: Task) -> None:
        """Seal the tails that the step filled, and move them to their tier."""
        batch, layer = task.step.batch, task.step.layer
        step = self._steps[batch, task.step.token]
        written: Written = []
        for row, position in zip(step.rows, step.positions.tolist(), strict=True):
            place = self._arrangement.batches[batch][row]
            if place.moves and (position + 1) % PAGE_TOKENS == 0:
                first = position // PAGE_TOKENS
                self._seal(layer, place, self._open[layer], [place.open_slot], first=first, written=written)
        if written:
            self._on_disk().write(written)

    def _seal(
        self, layer: int, place: Place, arena: Bytes, slots: Sequence[int], *, first: int, written: Written
    ) -> None:
        """Seal the full pages in these slots, the sequence's from number `first` on: into their place in memory, or
        into the outbox, behind what `written` has of it, to which they are added."""
        attention, begin, to = self._of(layer), place.sealed_slot + first, self._sealed[layer]
        if place.on_disk:
            begin, to = sum(len(pages) for _, pages in written), self._outbox[layer]
            written.append((self._disk_offset(place, layer, first), to[begin : begin + len(slots)]))
        homes = np.arange(begin, begin + len(slots), dtype=np.int32)
        attention.seal(arena, np.array(slots, np.int32), to, homes)

    def _disk_offset(self, place: Place, layer: int, page: int) -> int:
        return self._disk_first[layer] + (place.sealed_slot + page) * self._of(layer).sealed_nbytes

    def _of(self, layer: int) -> _core.BatchAttention:
        attention = self._attention[layer]
        if attention is None:
            raise ValueError(f"layer {layer} keeps no keys and values")
        return attention

    def _on_disk(self) -> ScratchFile:
        if self._disk is None:
            raise ValueError("this arrangement has pages on disk, and there is no file for them")
        return self._disk


def _page_sizes(attention: Attentions) -> tuple[list[int], list[int]]:
    """Bytes of a plain and of a sealed page in each layer."""
    plain = [0 if one is None else one.page_nbytes for one in attention]
    return plain, [0 if one is None else one.sealed_nbytes for one in attention]


def _arenas(slots: int, nbytes: Sequence[int]) -> list[Bytes]:
    """[slots, bytes of a page] of each layer, one behind the other in one piece of memory."""
    parts = np.split(_core.allocate(slots * sum(nbytes)), np.cumsum(nbytes)[:-1] * slots)
    return [part.reshape(slots, each) for part, each in zip(parts, nbytes, strict=True)]


def _shared(slots: int, nbytes: Sequence[int]) -> list[Bytes]:
    """The same, where layers take turns: all of them in one piece of memory, from its first byte on."""
    memory = _core.allocate(slots * max(nbytes))
    return [memory[: slots * each].reshape(slots, each) for each in nbytes]
