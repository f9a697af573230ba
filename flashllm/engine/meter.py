"""Shares of a step's wall time: every instant in one of I/O, memory management, compute, other (design, "Times").

The native core counts its own. What it does not claim (the interpreter, sampling, the tokenizer) is `other`, so that
the parts always sum to the wall time.
"""

import time
from dataclasses import dataclass, fields
from typing import Any

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
    behind_bytes: int = 0  # read while nothing else was, of what no token wanted yet; in no other count


COUNTS = tuple(each.name for each in fields(StepTimes) if each.type is int)


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
        spent_ns = {"other": max(0, total_ns - claimed_ns), "total": total_ns}
        spent_ns |= {name: counts[f"{name}_ns"] for name in ("io", "memory", "compute", "io_busy")}
        spent: dict[str, Any] = {f"{name}_ms": ns / 1e6 for name, ns in spent_ns.items()}
        return StepTimes(**spent, **{name: counts[name] for name in COUNTS})
