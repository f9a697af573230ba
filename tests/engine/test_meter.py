"""Every instant in exactly one of I/O, memory, compute, other."""

import contextlib
import time

import pytest

from flashllm.engine.meter import Meter
from flashllm.engine.stream import StreamTimes


class FakeStream:
    def __init__(self, times):
        self.times = times

    def take_times(self):
        times, self.times = self.times, StreamTimes()
        return times


def test_parts_sum_to_the_wall_time(monkeypatch):
    clock = iter([0, 1_000_000, 4_000_000, 10_000_000, 11_000_000, 30_000_000])
    monkeypatch.setattr("flashllm.engine.meter.time.perf_counter_ns", lambda: next(clock))
    meter = Meter()
    meter.streams += [
        FakeStream(StreamTimes(wait_ns=2_000_000, busy_ns=3_000_000, nbytes=10, requests=2, retries=1)),
        FakeStream(StreamTimes(wait_ns=1_000_000, busy_ns=1_000_000, nbytes=5, requests=1)),
    ]
    with meter.computing():
        pass
    times = meter.take()
    assert (times.io_ms, times.memory_ms, times.compute_ms, times.other_ms, times.total_ms) == (3, 0, 3, 4, 10)
    assert (times.io_busy_ms, times.bytes_read, times.requests, times.retries) == (4, 15, 3, 1)
    meter.restart()
    times = meter.take()
    assert (times.total_ms, times.other_ms, times.io_ms, times.compute_ms) == (19, 19, 0, 0)


def test_time_before_a_restart_is_forgotten():
    meter = Meter()
    time.sleep(0.02)
    meter.restart()
    assert meter.take().total_ms < 20


def test_what_fails_while_computing_is_still_counted():
    meter = Meter()
    with contextlib.suppress(KeyError), meter.computing():
        time.sleep(0.002)
        raise KeyError
    times = meter.take()
    assert times.compute_ms >= 2
    assert times.other_ms == pytest.approx(times.total_ms - times.compute_ms)
