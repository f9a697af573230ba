"""Where a step's wall time went: every instant in one of I/O, memory management, compute, other (design, "Times").

The native core counts its own; the torch products of a prefill are timed here. What nobody claims (norms, the
interpreter, sampling) is `other`, so that the parts always sum to the wall time.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from flashllm import _core
from flashllm.engine.stream import RowStream, StreamTimes


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
    early_read: int = 0  # rows read on a guess before their layer was reached
    early_used: int = 0  # those of them that were misses


class Meter:
    """Collects the counters of one model between two `take`s."""

    def __init__(self) -> None:
        self.native = _core.Counters()
        self.streams: list[RowStream] = []
        self._compute_ns = 0
        self._started = time.perf_counter_ns()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Counts the block's time as compute; must not contain native calls that count their own."""
        start = time.perf_counter_ns()
        try:
            yield
        finally:
            self._compute_ns += time.perf_counter_ns() - start

    def restart(self) -> None:
        """Forget what was counted so far: a new step begins now."""
        self.take()

    def take(self) -> StepTimes:
        """The step that ends now; the next one begins."""
        now = time.perf_counter_ns()
        total_ns, self._started = now - self._started, now
        native = self.native.take()
        streamed = [stream.take_times() for stream in self.streams] or [StreamTimes()]
        io_ns = native["io_ns"] + sum(times.wait_ns for times in streamed)
        compute_ns, self._compute_ns = native["compute_ns"] + self._compute_ns, 0
        memory_ns = native["memory_ns"]
        return StepTimes(
            io_ms=io_ns / 1e6,
            memory_ms=memory_ns / 1e6,
            compute_ms=compute_ns / 1e6,
            other_ms=max(0, total_ns - io_ns - memory_ns - compute_ns) / 1e6,
            total_ms=total_ns / 1e6,
            io_busy_ms=(native["io_busy_ns"] + sum(times.busy_ns for times in streamed)) / 1e6,
            bytes_read=native["bytes_read"] + sum(times.nbytes for times in streamed),
            requests=native["requests"] + sum(times.requests for times in streamed),
            retries=native["retries"] + sum(times.retries for times in streamed),
            active=native["active"],
            hits=native["hits"],
            misses=native["misses"],
            early_read=native["early_read"],
            early_used=native["early_used"],
        )
