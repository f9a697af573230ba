"""A machine whose device is its CPU, of round numbers."""

from flashllm.offload.machine.hardware import Hardware
from flashllm.profile.rates import RateCurve

GB, RATE = 10**9, RateCurve.flat
HOST = Hardware(
    name="host", device="cpu", device_memory=8 * GB, cpu_memory=0, disk_capacity=100 * GB, ctog=RATE(1e10),
    gtoc=RATE(1e10), dtoc=RATE(2e9), ctod=RATE(1e9), gemm=RATE(1e11), bmm=RATE(2e10), device_bandwidth=RATE(1e10),
    cpu_attention=RATE(1e10), cpu_bandwidth=RATE(1e10), packed_gemm=RATE(0.9e11), packed_attention=RATE(0.8e10),
    seal=RATE(2e9), elementwise=RATE(5e9), square_s=2e-4,
)  # fmt: skip
