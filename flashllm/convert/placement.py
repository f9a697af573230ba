"""The order of neurons on flash: the popular ones first, the others so that those read together are neighbours.

Neighbours among a token's misses are read in one request. The hot set is cached anyway; apart from it, the rest lies in
the order of a greedy path over the graph of co-activation (Ripple, arXiv 2410.19274): the strongest links first, each
neuron linked to two others at most. All other code keeps the original ids; only file offsets follow the order.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashllm.format.placed import Order

HOT_SHARE = 0.15  # of a layer's neurons: what a cache of the usual size holds most of the time
_FRIENDS = 16  # neurons of the highest co-activation that are considered for each
_BLOCK = 1024  # neurons whose co-activation is counted at a time


def place(active: NDArray[np.bool_], hot_share: float = HOT_SHARE) -> Order:
    """The order of one layer's neurons, from which were active: [tokens, d_ff]."""
    popularity = active.mean(axis=0)
    by_popularity = np.argsort(-popularity, kind="stable")
    hot = int(hot_share * active.shape[1])
    rest = by_popularity[hot:]
    path = rest[_greedy_path(active[:, rest])]
    return np.concatenate([by_popularity[:hot], path]).astype(np.int32)


def _greedy_path(active: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Columns in the order of a path; the most popular come first among those that nothing links."""
    num = active.shape[1]
    if num == 0:
        return np.empty(0, np.int64)
    weights, ones, others = _links(active)
    # 1. The strongest links that keep every neuron at two neighbours, and no ring.
    neighbours: list[list[int]] = [[] for _ in range(num)]
    root = list(range(num))

    def find(neuron: int) -> int:
        while root[neuron] != neuron:
            root[neuron] = root[root[neuron]]
            neuron = root[neuron]
        return neuron

    for link in np.lexsort((others, ones, -weights)).tolist():
        one, other = int(ones[link]), int(others[link])
        if len(neighbours[one]) > 1 or len(neighbours[other]) > 1 or find(one) == find(other):
            continue
        root[find(one)] = find(other)
        neighbours[one].append(other)
        neighbours[other].append(one)
    # 2. The pieces one after the other, by their most popular neuron (columns come in that order).
    order: list[int] = []
    placed = [False] * num
    for start in range(num):
        if placed[start]:
            continue
        piece = _walk(neighbours, _walk(neighbours, start)[-1])  # to one end, and from there to the other
        for neuron in piece:
            placed[neuron] = True
        order += piece
    return np.array(order, np.int64)


def _walk(neighbours: list[list[int]], start: int) -> list[int]:
    """From `start` along its piece to an end."""
    way, previous = [start], -1
    while onward := [neuron for neuron in neighbours[way[-1]] if neuron != previous]:
        previous = way[-1]
        way.append(onward[0])
    return way


def _links(active: NDArray[np.bool_]) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64]]:
    """(tokens in which both are active, one, the other) of each neuron with its closest friends; each link once."""
    matrix = active.astype(np.float32)
    num = matrix.shape[1]
    count = min(_FRIENDS, num - 1)
    # A count and its neuron in one integer, which numpy partitions ten times as fast as it finds places.
    bits = num.bit_length()
    whole: np.dtype[Any] = np.dtype(np.uint32 if len(matrix) < 1 << (32 - bits) else np.uint64)
    backwards = np.arange(num - 1, -1, -1, dtype=whole)  # of equal counts the more popular neuron's is the larger
    shift, neuron_bits = np.array(bits, whole), np.array((1 << bits) - 1, whole)
    weights, ones, others = [], [], []
    for start in range(0, num, _BLOCK):
        together = matrix[:, start : start + _BLOCK].T @ matrix  # [block, num]
        rows = np.arange(len(together))
        together[rows, start + rows] = 0.0
        keys = (together.astype(whole) << shift) | backwards
        keys.partition(num - 1 - count, axis=1)
        friends = keys[:, num - count :]
        weights.append((friends >> shift).astype(np.float32).ravel())
        ones.append(np.repeat(start + rows, count))
        others.append(num - 1 - (friends & neuron_bits).astype(np.int64).ravel())
    one, other, weight = np.concatenate(ones), np.concatenate(others), np.concatenate(weights)
    pairs = np.unique(np.minimum(one, other) * num + np.maximum(one, other), return_index=True)[1]
    linked = pairs[weight[pairs] > 0]
    return weight[linked], one[linked], other[linked]
