"""`RateCurve`: a rate that depends on size, as appendix A.3 of paper B says real systems need; and how one is sampled.

Knots are (size, rate); between them the rate runs linearly in log(size), outside it stays at the end knot. It does not
know what is measured: bytes/s over bytes of a transfer, flop/s over rows of a product.
"""

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class RateCurve:
    """Units per second at a size; sizes rise strictly, rates are positive."""

    knots: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if not self.knots:
            raise ValueError("a rate curve needs at least one (size, rate) knot")
        for size, rate in self.knots:
            if not (size > 0 and math.isfinite(size) and rate > 0 and math.isfinite(rate)):
                raise ValueError(f"knot ({size!r}, {rate!r}): size and rate must be positive and finite")
        sizes = [size for size, _ in self.knots]
        if any(b <= a for a, b in pairwise(sizes)):
            raise ValueError(f"knot sizes must rise strictly: {sizes}")

    @classmethod
    def flat(cls, rate: float) -> "RateCurve":
        return cls(((1.0, rate),))

    @classmethod
    def from_plain(cls, data: Any) -> "RateCurve":
        """A number, or a list of [size, rate]. Raises ValueError for anything else."""
        try:
            if isinstance(data, int | float) and not isinstance(data, bool):
                return cls.flat(float(data))
            return cls(tuple((float(size), float(rate)) for size, rate in data))
        except (TypeError, OverflowError):
            raise ValueError(f"expected a rate or a list of [size, rate], not {data!r}") from None

    def to_plain(self) -> list[list[float]]:
        return [[size, rate] for size, rate in self.knots]

    def at(self, size: float) -> float:
        """The rate at `size`, in units per second."""
        index = bisect_right([knot for knot, _ in self.knots], size)
        if index == 0:
            return self.knots[0][1]
        if index == len(self.knots):
            return self.knots[-1][1]
        (low, low_rate), (high, high_rate) = self.knots[index - 1], self.knots[index]
        share = math.log(size / low) / math.log(high / low)
        return low_rate + share * (high_rate - low_rate)

    def scaled(self, factor: float) -> "RateCurve":
        return RateCurve(tuple((size, rate * factor) for size, rate in self.knots))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One timing: `units` of work (bytes, flop) at `size` (what the curve is a function of) took `seconds`."""

    size: float
    units: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.units / self.seconds


_ENDS = 2  # of a curve
_CALLS = 3  # of two, one that was interrupted moves the median
Probe = Callable[[int], Sample]  # does the work once at a size


def seconds_of(work: Callable[[], object], *, at_least_s: float) -> float:
    """Median seconds of one call, over at least three, and as many as take `at_least_s` together.

    The median, because a call that another process interrupted says nothing about the work.
    """
    times: list[float] = []
    while len(times) < _CALLS or sum(times) < at_least_s:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def sample_rounds(
    probes: Mapping[str, tuple[Probe, Sequence[int]]], *, rounds: int, seconds: float = math.inf
) -> dict[str, list[Sample]]:
    """`rounds` samples of every probe at each of its sizes, all in turn in each round, so that a drifting machine
    drifts for all of them. None begins after `seconds`, but those of a probe's first and last size, which come first:
    the rate of one says nothing of the other's."""
    found: dict[str, list[Sample]] = {name: [] for name in probes}
    order = {name: [*sizes[:1], *sizes[:0:-1]] for name, (_, sizes) in probes.items()}
    end = time.monotonic() + seconds
    for _ in range(rounds):
        for at in range(max(map(len, order.values()))):
            for name, (probe, _) in probes.items():
                if at < len(order[name]) and (len(found[name]) < _ENDS or time.monotonic() < end):
                    found[name].append(probe(order[name][at]))
    return found


def curve_of(samples: Sequence[Sample]) -> RateCurve:
    """The curve through the median rate at each size: a neighbour's burst makes one round slow, and no round fast."""
    by_size: dict[float, list[float]] = {}
    for sample in samples:
        by_size.setdefault(sample.size, []).append(sample.rate)
    return RateCurve(tuple((size, float(np.median(by_size[size]))) for size in sorted(by_size)))
