"""Replays a layer's activity through cache policies: which of a token's neurons would have had to be read.

A token's active neurons are all in memory while it is computed. A policy that admits everything holds them afterwards,
and as many others as fit; one that may bypass keeps the best of both, and what it reads but does not keep passes
through rows of no layer. A hit never leaves in the token that uses it, but under MIN. Plain numpy, one layer at a time.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
HALF_LIFE, LONG_RUN_TOKENS, KNOWN_TOKENS, NEWCOMER = 16.0, 12.0, 256.0, 0.8  # of flashllm/csrc/cache/frequency_policy.h
NEVER = 1 << 30  # tokens from now


@dataclass(frozen=True, slots=True)
class Activity:
    """One layer's active neurons token by token, and their shares of the tokens of another text or half."""

    tokens: list[Ids]
    num_neurons: int
    known: NDArray[np.float64]  # [num_neurons]


class Policy:
    """Scores decide: the highest stay."""

    may_drop_hits = False
    newcomer = 1.0  # what a miss's score is worth beside those of what is held

    def __init__(self, activity: Activity) -> None:
        self.scores = np.zeros(activity.num_neurons)

    def observe(self, token: int, ids: Ids) -> None:
        """`token` uses `ids`; afterwards `scores` are those of the moment."""


class Belady(Policy):
    """MIN: whoever is used soonest stays (Belady 1966); knows the future."""

    may_drop_hits = True

    def __init__(self, activity: Activity) -> None:
        super().__init__(activity)
        self._next = []
        following = np.full(activity.num_neurons, NEVER)
        for token in range(len(activity.tokens) - 1, -1, -1):
            ids = activity.tokens[token]
            self._next.append(-following[ids])
            following[ids] = token
        self._next.reverse()
        self.scores = -following.astype(float)

    def observe(self, token: int, ids: Ids) -> None:
        self.scores[ids] = self._next[token]


class Recency(Policy):
    """LRU."""

    def __init__(self, activity: Activity) -> None:
        super().__init__(activity)
        self.scores = activity.known - 2.0  # below any use: where the cache begins

    def observe(self, token: int, ids: Ids) -> None:
        self.scores[ids] = token


class SecondRecency(Policy):
    """LRU-2 (O'Neil et al. 1993): the last use but one; ties by the last."""

    def __init__(self, activity: Activity) -> None:
        super().__init__(activity)
        self._last = np.full(activity.num_neurons, -1000.0)
        self.scores = activity.known - 2000.0

    def observe(self, token: int, ids: Ids) -> None:
        self.scores[ids] = self._last[ids] + token * 1e-5
        self._last[ids] = token


class Frequency(Policy):
    """LFU with counts that halve every `half_life` tokens, and optionally a long-run share beside them.

    With 16, 12 and 0.8 this is the engine's policy.
    """

    def __init__(self, activity: Activity, half_life: float, long_run: float = 0.0, newcomer: float = 1.0) -> None:
        super().__init__(activity)
        self.newcomer = newcomer
        self._growth = 2 ** (1 / half_life)
        self._recent = activity.known / (1 - 1 / self._growth)
        self._total, self._tokens = activity.known * KNOWN_TOKENS, KNOWN_TOKENS
        self._increment, self._long_run = 1.0, long_run
        self.scores = activity.known.copy()

    def observe(self, token: int, ids: Ids) -> None:
        self._increment *= self._growth
        self._recent[ids] += self._increment
        self._total[ids] += 1
        self._tokens += 1
        if self._increment > 1e100:
            self._recent /= self._increment
            self._increment = 1.0
        self.scores = self._recent
        if self._long_run:
            self.scores = self._recent + self._total * (self._increment * self._long_run / self._tokens)


class Count(Policy):
    """LFU: all uses since the beginning, nothing known before."""

    def observe(self, token: int, ids: Ids) -> None:
        self.scores[ids] += 1


class Known(Policy):
    """The popular neurons of the learning text, and nothing learned since."""

    def __init__(self, activity: Activity) -> None:
        super().__init__(activity)
        self.scores = activity.known


POLICIES: dict[str, tuple[Callable[[Activity], Policy], bool]] = {  # name: policy, may bypass
    "MIN": (Belady, True),
    "MIN, all admitted": (Belady, False),
    "LRU": (Recency, False),
    "LRU-2": (SecondRecency, False),
    "LRU-2, bypass": (SecondRecency, True),
    "LFU": (Count, False),
    "LFU, bypass": (Count, True),
    "LFU, half-life 16": (lambda a: Frequency(a, HALF_LIFE), False),
    "LFU, half-life 16, bypass": (lambda a: Frequency(a, HALF_LIFE), True),
    "LFU, half-life 64, bypass": (lambda a: Frequency(a, 64.0), True),
    "hot set": (Known, True),
    "frequency": (lambda a: Frequency(a, HALF_LIFE, LONG_RUN_TOKENS, NEWCOMER), True),
    "frequency, newcomers as others": (lambda a: Frequency(a, HALF_LIFE, LONG_RUN_TOKENS), True),
    "frequency, all admitted": (lambda a: Frequency(a, HALF_LIFE, LONG_RUN_TOKENS), False),
}
WINDOW, S3_FIFO = "window", "S3-FIFO"
ALL_POLICIES = (WINDOW, S3_FIFO, *POLICIES)


def misses_of(name: str, activity: Activity, capacity: int) -> tuple[list[Ids], str]:
    """The ids each token has to read under a policy, and a remark (the window's k)."""
    if name == WINDOW:
        k = largest_window(activity, capacity)
        return replay_window(activity, capacity, k), f"k = {k}"
    if name == S3_FIFO:
        return replay_s3_fifo(activity, capacity), ""
    make, bypass = POLICIES[name]
    return replay(activity, make(activity), capacity, bypass=bypass), ""


def replay(activity: Activity, policy: Policy, capacity: int, *, bypass: bool) -> list[Ids]:
    """As `misses_of`; the cache begins with the neurons that the policy scores highest before the first token."""
    held = np.zeros(activity.num_neurons, np.bool_)
    held[np.argsort(-policy.scores, kind="stable")[:capacity]] = True
    misses = []
    for token, ids in enumerate(activity.tokens):
        hit = held[ids]
        missed = ids[~hit]
        misses.append(missed)
        policy.observe(token, ids)
        if not len(missed):
            continue
        held[ids] = False
        others = np.flatnonzero(held)
        if bypass:
            pool, certain = np.concatenate([others, missed]), ids[hit]
            if policy.may_drop_hits:
                pool, certain = np.concatenate([pool, certain]), ids[:0]
        else:
            pool, certain = others, ids[:capacity]
        room = capacity - len(certain)
        if len(pool) > room:
            scores = policy.scores[pool]
            if bypass:
                scores[len(others) : len(others) + len(missed)] *= policy.newcomer
            held[pool] = False
            pool = pool[np.argpartition(-scores, room)[:room]] if room else pool[:0]
        held[pool] = True
        held[certain] = True
    return misses


def largest_window(activity: Activity, capacity: int) -> int:
    """The most tokens whose active neurons fit on average."""
    k = 1
    while True:
        last = np.full(activity.num_neurons, -NEVER)
        sizes = []
        for token, ids in enumerate(activity.tokens[:200]):
            last[ids] = token
            sizes.append(int((last > token - (k + 1)).sum()))
        if np.mean(sizes[k:]) > capacity or k >= len(activity.tokens) // 4:
            return k
        k += 1


def replay_window(activity: Activity, capacity: int, k: int) -> list[Ids]:
    """Paper A's window, which forgets the oldest tokens where it does not fit."""
    last = np.full(activity.num_neurons, -NEVER)
    held = np.zeros(activity.num_neurons, np.bool_)
    misses, width = [], 0
    for token, ids in enumerate(activity.tokens):
        misses.append(ids[~held[ids]])
        last[ids] = token
        width = min(width + 1, k)
        held = last > token - width
        while held.sum() > capacity and width > 1:
            width -= 1
            held = last > token - width
        if len(ids) > capacity:
            held[ids[: len(ids) - capacity]] = False
    return misses


def replay_s3_fifo(activity: Activity, capacity: int) -> list[Ids]:
    """S3-FIFO (Yang et al. 2023): a small queue, a main queue, a ghost queue. Neurons come one after the other."""
    small_size = max(1, capacity // 10)
    small: deque[int] = deque()
    main: deque[int] = deque()
    ghost: dict[int, None] = {}
    uses: dict[int, int] = {}  # of what is held
    misses = []

    def evict() -> None:
        while True:
            if len(small) > small_size or not main:
                neuron = small.popleft()
                if uses[neuron] > 1:
                    uses[neuron] = 0
                    main.append(neuron)
                    continue
                ghost[neuron] = None
                if len(ghost) > capacity:
                    del ghost[next(iter(ghost))]
            else:
                neuron = main.popleft()
                if uses[neuron] > 0:
                    uses[neuron] -= 1
                    main.append(neuron)
                    continue
            del uses[neuron]
            return

    for ids in activity.tokens:
        missed = []
        for neuron in ids.tolist():
            if neuron in uses:
                uses[neuron] = min(3, uses[neuron] + 1)
                continue
            missed.append(neuron)
            if len(uses) >= capacity:
                evict()
            uses[neuron] = 0
            if neuron in ghost:
                del ghost[neuron]
                main.append(neuron)
            else:
                small.append(neuron)
        misses.append(np.array(missed, np.int64))
    return misses
