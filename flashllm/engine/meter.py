"""Shares of a step's wall time: every instant in one of I/O, memory management, compute, other (design, "Times").

The native core counts its own. What it does not claim (the interpreter, sampling, the tokenizer) is `other`, so that
the parts always sum to the wall time.
"""

import time
from dataclasses import dataclass

from flashllm import _core


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """One step: exposed times that sum to `total_ms`, busy time of the reads, and what they moved."""

    io_ms: float
    memory_ms: float
    compute_ms: float
    other_ms: float
    total_ms: float
    io_busy_ms: float
    bytes_read: int
    requests: int
    retries: int
    active: int
    hits: int
    misses: int
    prefetched: int = 0  # rows read before their layer's turn
    prefetch_used: int = 0  # those of them that were misses
    united: int = 0  # active neurons, counted once for tokens that go through a layer together
    rejected_bytes: int = 0  # of rows that only drafted tokens wanted which turned out wrong


class Meter:
    """Collects the counters of one model between two `take`s."""

    def __init__(self) -> None:
        self.native = _core.Counters()
        self._started = time.perf_counter_ns()

    def restart(self) -> None:
        """Forget what was counted so far: a new step begins now."""
        self.take()

    def take(self) -> StepTimes:
        """The step that ends now; the next one begins."""
        now = time.perf_counter_ns()
        total_ns, self._started = now - self._started, now
        counts = self.native.take()
        claimed_ns = counts["io_ns"] + counts["memory_ns"] + counts["compute_ns"]
        return StepTimes(
            io_ms=counts["io_ns"] / 1e6,
            memory_ms=counts["memory_ns"] / 1e6,
            compute_ms=counts["compute_ns"] / 1e6,
            other_ms=max(0, total_ns - claimed_ns) / 1e6,
            total_ms=total_ns / 1e6,
            io_busy_ms=counts["io_busy_ns"] / 1e6,
            bytes_read=counts["bytes_read"],
            requests=counts["requests"],
            retries=counts["retries"],
            active=counts["active"],
            hits=counts["hits"],
            misses=counts["misses"],
            prefetched=counts["prefetched"],
            prefetch_used=counts["prefetch_used"],
            united=counts["united"],
            rejected_bytes=counts["rejected_bytes"],
        )
