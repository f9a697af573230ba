"""Profiles for tests: made up, whole, and easy to change; and a measurement that takes no time."""

from flashllm.profile.calibrate import CalibrationOptions
from flashllm.profile.costs import ReaderCosts
from flashllm.profile.machine import BatchRates, Profile
from flashllm.profile.rates import RateCurve
from flashllm.profile.reads import ReadOptions

TINY = CalibrationOptions(
    reads=ReadOptions(
        sizes=(4096, 8192), requests=(2, 4), beside=8, batch_nbytes=1 << 16, gaps=(4096,), pairs=2, again=1
    ),
    dram_nbytes=1 << 20, gemv_nbytes=1 << 16, write_nbytes=1 << 20, read_s=60.0, memory_s=0.0, rounds=2,
)  # fmt: skip

BATCHES = BatchRates(
    gemm=RateCurve(((1, 1e10), (64, 1e11))), packed_gemm=RateCurve.flat(0.9e11),
    decoded_gemm=RateCurve.flat(1.2e11), bmm=RateCurve.flat(2e10),
    cpu_attention=RateCurve.flat(1e10), packed_attention=RateCurve.flat(0.8e10), seal=RateCurve.flat(2e9),
    elementwise=RateCurve.flat(5e9), read_takes=0.1, read_loses=0.2, square_s=2e-4,
)  # fmt: skip


def reader(backend="threads", depth=32, **changes):
    values = {
        "latency_s": 1e-4,
        "sizes": (4096, 65536),
        "request_s": (10e-6, 40e-6),
        "beside_s": (20e-6, 60e-6),
        "lost_s": (5e-6, 9e-6),
        "gap_nbytes": 10_000.0,
    }
    return ReaderCosts(backend=backend, depth=depth, **{**values, **changes})


def profile_of(*readers, **changes):
    values = {
        "sequential_bps": 3e9,
        "direct": True,
        "dram_bps": 40e9,
        "gemv_bps": {"float16": 20e9},
        "sparse_bps": {"float16": 16e9},
        "layer_overhead_s": 5e-4,
        "scatter": 1.1,
        "again": 1.0,
        "threads": 2,
        "made": "2026-11-21T00:00:00+00:00",
    }
    return Profile(readers=readers or (reader(),), **{**values, **changes})
