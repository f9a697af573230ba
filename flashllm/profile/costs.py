"""Costs of reads on one machine and drive: timed batches, the values fitted to them, and what follows from those.

A batch of n requests of s bytes, followed by a barrier, takes `latency + n * request(s)`: the latency is the drive's
own and that of waking threads; `request` is what one request more costs while many are under way. While all cores
compute, requests land every `beside(s)` instead, and each takes `lost(s)` from the products. All three are linear in
the size between the measured ones. Knows no model and measures nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from flashllm.base.checks import check_from_zero, check_int
from flashllm.config import Backend

_CURVES = ("request_s", "beside_s", "lost_s")  # of a reader, by size
DEFAULT_DEPTHS: Mapping[Backend, int] = {"threads": 32, "io_uring": 48}  # paper A, section 4; bench/log
_MOST_LOST = 0.9  # of the products' time: something is left to them
_GAP_PAYS = 0.95  # of the time without: a gap must save so much: its bytes also wear the drive


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSample:
    """One timed batch: `requests` random reads of `nbytes` each, then a barrier."""

    requests: int
    nbytes: int
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideSample(BatchSample):
    """As a batch, while all cores compute; `wall_s` is until the last read landed."""

    lost_s: float  # of it: how much longer the products took than without reads


@dataclass(frozen=True, slots=True, kw_only=True)
class GapSample:
    """Pairs of reads `gap_nbytes` apart, timed once as two requests each and once as one through the gap."""

    gap_nbytes: int
    apart_s: float
    through_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderCosts:
    """Cost of batches through one backend. Lists are by size, ascending."""

    backend: Backend
    depth: int  # requests in flight: reader threads, or the queue's depth
    latency_s: float
    sizes: tuple[int, ...]  # bytes
    request_s: tuple[float, ...]
    beside_s: tuple[float, ...]
    lost_s: tuple[float, ...]
    gap_nbytes: float  # a gap of so many bytes costs as much as the request it saves

    def __post_init__(self) -> None:
        if self.backend not in ("threads", "io_uring"):
            raise ValueError(f"backend must be threads or io_uring, not {str(self.backend)[:80]!r}")
        check_int("depth", self.depth, 1, 2**16)
        check_from_zero("latency_s", self.latency_s)
        check_from_zero("gap_nbytes", self.gap_nbytes)
        for size in self.sizes:
            check_int("sizes", size, 1, 2**40)
        if not self.sizes or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError("sizes must be ascending, and at least one")
        for name in _CURVES:
            values = getattr(self, name)
            if len(values) != len(self.sizes):
                raise ValueError(f"{name} must have as many values as sizes, not {len(values)}")
            for value in values:
                check_from_zero(name, value)
        if min(self.beside_s) == 0:
            raise ValueError("beside_s must be above 0: no read is free")

    def request(self, nbytes: float) -> float:
        """Seconds that one more request of `nbytes` costs: below the smallest measured size as much as that, above the
        largest by its bytes per second."""
        return self._at(nbytes, self.request_s)

    def beside(self, nbytes: float) -> float:
        """Seconds from one request of `nbytes` to the next while all cores compute."""
        return self._at(nbytes, self.beside_s)

    def lost(self, nbytes: float) -> float:
        """Seconds that each request of `nbytes` takes from the products that run; less than `beside`."""
        return min(self._at(nbytes, self.lost_s), _MOST_LOST * self.beside(nbytes))

    def beside_products(self, products_s: float, nbytes: float) -> float:
        """Requests of `nbytes` that land during products which take `products_s` alone."""
        return products_s / (self.beside(nbytes) - self.lost(nbytes))

    def _at(self, nbytes: float, curve: Sequence[float]) -> float:
        if nbytes > self.sizes[-1]:
            return curve[-1] * nbytes / self.sizes[-1]
        return float(np.interp(nbytes, self.sizes, curve))

    def batch(self, requests: float, nbytes: float) -> float:
        """Seconds of a batch of `requests` (0: nothing) of `nbytes` each."""
        return self.latency_s * min(requests, 1.0) + requests * self.request(nbytes)

    def gap(self, row_nbytes: int) -> int:
        """The largest gap between two rows of `row_nbytes` that is worth reading through, in bytes of whole rows."""
        return int(self.gap_nbytes) // row_nbytes * row_nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderChoice:
    """How to set the reader up, and where that comes from."""

    backend: Backend
    depth: int
    max_gap: int  # bytes
    source: str  # "default", "argument", or "calibration"


def scatter_of(samples: Sequence[BatchSample]) -> float:
    """Upper quartile ÷ lower quartile of a batch's times; the median of these ratios over different batches."""
    groups: dict[tuple[int, int], list[float]] = {}
    for sample in samples:
        groups.setdefault((sample.nbytes, sample.requests), []).append(sample.wall_s)
    quartiles = [np.percentile(walls, (25, 75)) for walls in groups.values()]
    return float(np.median([upper / lower for lower, upper in quartiles]))


def worthwhile_gap(samples: Sequence[GapSample]) -> float:
    """Bytes of the largest gap that is worth reading through; 0 where none is.

    There the ratio of times, one read through the gap to two reads, crosses `_GAP_PAYS`; linear between the medians at
    the measured gaps.
    """
    shares = {}
    for gap in sorted({sample.gap_nbytes for sample in samples}):
        shares[gap] = float(np.median([one.through_s / one.apart_s for one in samples if one.gap_nbytes == gap]))
    below, most = 0, 0.0
    for gap, share in shares.items():
        if share > _GAP_PAYS:
            if below:
                most += (gap - below) * (_GAP_PAYS - shares[below]) / (share - shares[below])
            break
        below, most = gap, float(gap)
    return most


def fit_reader(
    samples: Sequence[BatchSample],
    beside: Sequence[BesideSample],
    gaps: Sequence[GapSample],
    *,
    backend: Backend,
    depth: int,
) -> ReaderCosts:
    """The costs of least squared relative error to the medians of `samples` by size and number of requests; beside
    products, medians by size.

    ValueError where there are fewer different batches than unknowns (one a size, and the latency), or a size has no
    sample during products.
    """
    groups: dict[tuple[int, int], list[BatchSample]] = {}
    for sample in samples:
        groups.setdefault((sample.nbytes, sample.requests), []).append(sample)
    sizes = sorted({nbytes for nbytes, _ in groups})
    if len(groups) <= len(sizes):
        raise ValueError(f"{len(groups)} different batches cannot tell a latency from {len(sizes)} sizes' costs")
    by_size = [[sample for sample in beside if sample.nbytes == size] for size in sizes]
    if not all(by_size):
        raise ValueError("a size has no sample during products")
    walls = {key: _median([sample.wall_s for sample in group]) for key, group in groups.items()}
    equations = np.zeros((len(groups), 1 + len(sizes)))
    for row, (nbytes, requests) in enumerate(groups):
        equations[row, 0] = 1.0
        equations[row, 1 + sizes.index(nbytes)] = requests
    equations /= np.array([walls[key] for key in groups])[:, None]
    solution, *_ = np.linalg.lstsq(equations, np.ones(len(groups)), rcond=None)
    if solution[0] < 0:  # noise: without a latency, then
        without, *_ = np.linalg.lstsq(equations[:, 1:], np.ones(len(groups)), rcond=None)
        solution = np.concatenate([[0.0], without])
    # No request is free, and a larger one never costs less: where noise says so, the curve is flat.
    request = np.maximum.accumulate(np.maximum(solution[1:], 1e-9))
    return ReaderCosts(
        backend=backend,
        depth=depth,
        latency_s=float(solution[0]),
        sizes=tuple(sizes),
        request_s=tuple(request.tolist()),
        beside_s=tuple(max(1e-9, _median([one.wall_s / one.requests for one in ones])) for ones in by_size),
        lost_s=tuple(max(0.0, _median([one.lost_s / one.requests for one in ones])) for ones in by_size),
        gap_nbytes=worthwhile_gap(gaps),
    )


def _median(values: Sequence[float]) -> float:
    return float(np.median(values))
