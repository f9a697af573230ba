"""A machine whose device is its CPU, of round numbers, and policies for it that put all tensors in one place."""

from flashllm.offload.machine.hardware import Hardware
from flashllm.offload.policy import Policy
from flashllm.profile.rates import RateCurve

GB, RATE = 10**9, RateCurve.flat
HOST = Hardware(
    name="host", device="cpu", device_memory=8 * GB, cpu_memory=0, disk_capacity=100 * GB, ctog=RATE(1e10),
    gtoc=RATE(1e10), dtoc=RATE(2e9), ctod=RATE(1e9), gemm=RATE(1e11), bmm=RATE(2e10), device_bandwidth=RATE(1e10),
    cpu_attention=RATE(1e10), cpu_bandwidth=RATE(1e10), packed_gemm=RATE(0.9e11), packed_attention=RATE(0.8e10),
    seal=RATE(2e9), elementwise=RATE(5e9), square_s=2e-4,
)  # fmt: skip
PLACES = {"device": (1, 0, 0), "cpu": (0, 1, 0), "disk": (0, 0, 1), "half": (0.5, 0, 0.5)}  # shares of each tensor


def policy_of(where="device", **changes):
    shares = dict(zip(Policy.PLACEMENT, 3 * PLACES[where], strict=True))
    return Policy(**{"gpu_batch": 4, "num_batches": 3, "cpu_attention": True, **shares, **changes})
