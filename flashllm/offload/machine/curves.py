"""Samples of a rate at sizes, and the piecewise curve fitted to them; what is timed is not known here."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from flashllm.offload.machine.rates import RateCurve


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One timing: `units` of work (bytes, flop) at `size` (what the curve is a function of) took `seconds`."""

    size: float
    units: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.units / self.seconds


Probe = Callable[[int], Sample]  # does the work once at a size


def seconds_of(work: Callable[[], object], *, at_least_s: float) -> float:
    """Median seconds of one call, over as many calls as take `at_least_s` together (one at least).

    The median, because a call that another process interrupted says nothing about the work.
    """
    times: list[float] = []
    while not times or sum(times) < at_least_s:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def sample_rounds(probe: Probe, sizes: Sequence[int], *, rounds: int) -> list[Sample]:
    """`rounds` samples at every size, all sizes in each round, so that a drifting machine drifts for all of them."""
    return [probe(size) for _ in range(rounds) for size in sizes]


def medians(samples: Sequence[Sample]) -> list[Sample]:
    """The sample of median rate at each size, sizes rising."""
    result = []
    for size in sorted({sample.size for sample in samples}):
        at_size = sorted((sample for sample in samples if sample.size == size), key=lambda sample: sample.rate)
        result.append(at_size[len(at_size) // 2])
    return result


def fit_curve(samples: Sequence[Sample], *, knots: Sequence[float]) -> RateCurve:
    """The piecewise curve with these knots of least squared relative error to the samples.

    Knots outside the samples' sizes are dropped, since nothing was measured there.
    Raises ValueError where fewer sizes than knots were sampled.
    """
    sizes = np.array([sample.size for sample in samples])
    rates = np.array([sample.rate for sample in samples])
    kept = np.array([knot for knot in sorted(knots) if sizes.min() <= knot <= sizes.max()])
    if not 0 < len(kept) <= len(set(sizes.tolist())):
        raise ValueError(f"{len(set(sizes.tolist()))} sampled sizes cannot fit {len(kept)} knots")
    # Each column is one knot's hat function: `RateCurve.at` applied to a unit vector.
    hats = [np.interp(np.log(sizes), np.log(kept), unit) for unit in np.eye(len(kept))]
    fitted, *_ = np.linalg.lstsq(np.column_stack(hats) / rates[:, None], np.ones(len(sizes)), rcond=None)
    return RateCurve(tuple((float(size), float(rate)) for size, rate in zip(kept, fitted, strict=True)))
