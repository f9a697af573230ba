"""Every instant in exactly one of I/O, memory, compute, other."""

from flashllm.engine.meter import Meter


class Counts:
    """Native counters that answer once."""

    def __init__(self, meter, **given):
        self._next = {**meter.native.take(), **given}

    def take(self):
        taken, self._next = self._next, dict.fromkeys(self._next, 0)
        return taken


def test_parts_sum_to_the_wall_time_since_the_last_take_or_restart(monkeypatch):
    clock = iter([0, 10_000_000, 11_000_000, 30_000_000])
    monkeypatch.setattr("flashllm.engine.meter.time.perf_counter_ns", lambda: next(clock))
    meter = Meter()
    meter.native = Counts(
        meter, io_ns=3_000_000, memory_ns=500_000, compute_ns=2_000_000, io_busy_ns=4_000_000, bytes_read=15, requests=3
    )
    times = meter.take()
    assert (times.io_ms, times.memory_ms, times.compute_ms, times.other_ms, times.total_ms) == (3, 0.5, 2, 4.5, 10)
    assert (times.io_busy_ms, times.bytes_read, times.requests, times.retries) == (4, 15, 3, 0)
    meter.restart()
    times = meter.take()
    assert (times.total_ms, times.other_ms, times.io_ms, times.compute_ms) == (19, 19, 0, 0)
