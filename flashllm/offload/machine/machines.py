"""Machines the planner knows by name. Constants: `bench/offload/offload_fit.py` derives them, a test does it again.

The T4 instance of paper B, table 1 (GCP, one NVIDIA T4 of 16 GB, 208 GB of DRAM, 1.5 TB of SSD). What the paper's
figures do not identify is said at the constant.
"""

from flashllm.offload.machine.hardware import Hardware
from flashllm.profile.rates import RateCurve

_CTOG = RateCurve.flat(9.18e9)
_GEMM = RateCurve.flat(2.12e13)
_CPU_ATTENTION = RateCurve.flat(1.68e10)

T4 = Hardware(
    name="t4",
    device="cuda",
    source="fitted to paper B: tables 1, 3, 4 and the cells 30B and 175B at prompt 512 of table 2",
    # The driver shows 14.75 GiB. Section 6.1 has 6.7B wholly on the GPU at both prompt lengths, which takes 13.02 GiB
    # (batch 2 at 512, batch 1 at 1024); batch 4 at 512 would take 13.6. What is left for CUDA's context, cuBLAS
    # workspaces and fragmentation lies between; no throughput was used for it.
    device_memory=int(14.75 * 2**30),
    device_reserved=int(1.7 * 2**30),
    # The largest run the paper reports on the CPU alone, 175B in 4 bit at a block of 144, needs 203 GB.
    cpu_memory=208 * 10**9,
    cpu_reserved=4 * 10**9,
    disk_capacity=1500 * 10**9,
    ctog=_CTOG,
    gtoc=_CTOG,  # PCIe is symmetric; no figure shows copies off the device alone
    dtoc=RateCurve.flat(2.91e9),
    # Table 4's cache writes: a step's new keys (0.8 MB a GPU batch) and a prompt's (400 MB).
    ctod=RateCurve(((32 * 12288 * 2, 3.02e8), (32 * 512 * 12288 * 2, 2.374e9))),
    gemm=_GEMM,
    bmm=_GEMM.scaled(0.5),  # assumed: attention is a few per cent of prefill in every figure used
    device_bandwidth=RateCurve.flat(2.65e11),
    cpu_attention=_CPU_ATTENTION,
    cpu_bandwidth=_CPU_ATTENTION,  # attention on the CPU is bound by reading the cache
    combine="serial-load",
)

MACHINES = {T4.name: T4}
