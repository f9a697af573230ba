"""How memory is shared out among layers, as rows: evenly up to their needs, by popularity, or in whole blocks.

Rows come in units, which a cache holds whole: `unit` of them, those of an expert; needs and minima are so many times.
`sizes` says how much of the memory that is `available` a row of each layer takes. Plain numbers; knows no models.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int32]
Shares = NDArray[np.float32]  # of tokens, by neuron of a layer


def levels_by_need(available: Sequence[int], needs: Sequence[int], sizes: Sequence[int], unit: int = 1) -> Rows:
    """Rows of each layer, for each of some falling amounts of memory, [levels, layers]: at most its need, the rest
    shared evenly, as rows, among the layers that can use more."""
    left = np.maximum(np.asarray(available, np.int64), 0) // unit
    units = np.zeros((len(left), len(needs)), np.int32)
    hungry = sorted(range(len(needs)), key=lambda layer: needs[layer])
    for position, layer in enumerate(hungry):
        of_each = sum(sizes[other] for other in hungry[position:])
        units[:, layer] = np.minimum(needs[layer] // unit, left // of_each)
        left -= units[:, layer] * np.int64(sizes[layer])
    return unit * np.minimum.accumulate(units)  # what a longer row leaves over may be two shorter ones


def levels_by_blocks(available: Sequence[int], num_rows: Sequence[int], sizes: Sequence[int], block_rows: int) -> Rows:
    """For each of some amounts of memory, the first rows of each layer that a dense run keeps: whole blocks, one of
    every layer (of `num_rows` rows) after the other, [levels, layers]."""
    firsts = np.arange(0, max(num_rows), block_rows)[:, None]
    blocks = np.clip(np.asarray(num_rows) - firsts, 0, block_rows)  # [rounds, layers]
    taken = np.cumsum(blocks * np.asarray(sizes, np.int64))
    counts = np.searchsorted(taken, np.maximum(np.asarray(available, np.int64), 0), side="right")
    nothing = np.zeros((1, len(num_rows)), np.int64)
    held = np.cumsum(np.concatenate([nothing, blocks, nothing]), axis=0)  # after each round; the last twice
    rounds, more = np.divmod(counts, len(num_rows))
    rows = np.where(np.arange(len(num_rows)) < more[:, None], held[rounds + 1], held[rounds])
    return np.ascontiguousarray(rows, np.int32)


def levels_beside(
    available: Sequence[int],
    needs: Sequence[int],
    minimum: Sequence[int],
    dense: Sequence[int],
    sizes: Sequence[int],
    *,
    block_rows: int,
    unit: int = 1,
) -> Rows:
    """For each of some falling amounts of memory, rows of each layer, [levels, layers]: the `dense` layers' first, in
    whole blocks, as every token uses them; of the rest at most their needs for the others, which have their minimum."""
    free, others = np.asarray(available, np.int64), [layer for layer in range(len(needs)) if layer not in dense]
    least = sum(minimum[layer] * sizes[layer] for layer in others)
    wanted, of_dense = [needs[layer] for layer in dense], [sizes[layer] for layer in dense]
    rows = np.zeros((len(free), len(needs)), np.int32)
    rows[:, dense] = levels_by_blocks((free - least).tolist(), wanted, of_dense, block_rows)
    if others:
        left = np.where(rows.sum(axis=1) == sum(wanted), free - np.dot(wanted, of_dense), least)
        of_others = [needs[layer] for layer in others], [sizes[layer] for layer in others]
        rows[:, others] = levels_by_need(left.tolist(), *of_others, unit)
    return rows


def levels_by_popularity(
    available: Sequence[int], minimum: Sequence[int], popularity: Sequence[Shares], sizes: Sequence[int], unit: int = 1
) -> Rows:
    """Rows of each layer, for each of some falling amounts of memory, [levels, layers]: its minimum, and the rest where
    they save most reads.

    A layer's n-th row saves the n-th highest of its neurons' shares of tokens (`popularity`, by layer) in reads a
    token, so memory goes to the highest shares of all layers for a row's size, from one sort. Equals, like neurons
    never seen, are shared out evenly. A unit's neurons are as popular as its first.
    """
    least = np.asarray(minimum, np.int32) // unit
    # [units, layers]: by rank, so that a stable sort keeps equals even; narrower layers end in -1.
    gains = np.full((-(-max(map(len, popularity)) // unit), len(popularity)), -1, np.float32)
    for layer, shares in enumerate(popularity):
        of_units = shares[::unit]
        gains[: len(of_units), layer] = np.sort(of_units)[::-1] * np.float32(max(sizes) / sizes[layer])
    free = (np.arange(len(gains))[:, None] >= least) & (gains >= 0)
    layers = np.broadcast_to(np.arange(len(least)), gains.shape)[free]
    order = layers[np.argsort(-gains[free], kind="stable")]
    taken = np.cumsum(np.asarray(sizes, np.int64)[order])
    ends = np.searchsorted(taken, np.asarray(available) // unit - int(np.dot(least, sizes)), side="right")[::-1]
    level = np.searchsorted(ends, np.arange(ends[-1]), side="right")  # the first level, from below, with this unit
    counts = np.bincount(level * len(least) + order[: ends[-1]], minlength=len(ends) * len(least))
    units = least + np.cumsum(counts.reshape(len(ends), len(least)), axis=0)[::-1]
    return np.ascontiguousarray(unit * units, np.int32)
