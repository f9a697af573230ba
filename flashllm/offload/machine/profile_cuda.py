"""Profiles a machine with a GPU: the disk by the runtime's transfers, all else by torch. Has not run on a GPU yet.

The CPU's attention, which a cache in its memory needs, is measured by torch too.
"""

import shutil
from pathlib import Path

import psutil
import torch

from flashllm.offload.machine.curves import Probe
from flashllm.offload.machine.hardware import Hardware
from flashllm.offload.machine.measure_compute import ComputeProbe
from flashllm.offload.machine.measure_disk import open_probe
from flashllm.offload.machine.sampling import ProfileSizes, Rates, Report, curves_of, sample, sample_disk


def profile_cuda(folder: Path, *, report: Report, sizes: ProfileSizes, device: str = "cuda") -> Hardware:
    """Measures and fits `device`, which torch has ("cpu" for tests)."""
    compute = ComputeProbe(torch.device(device), torch.float16, sizes.at_least_s, sizes.rotation)
    attention = ComputeProbe(torch.device("cpu"), torch.bfloat16, sizes.at_least_s, sizes.rotation)
    rates: Rates = {}

    def take(name: str, probe: Probe, at: tuple[int, ...]) -> None:
        sample(rates, name, probe, at, rounds=sizes.rounds, report=report)

    with open_probe(folder, nbytes=sizes.disk_file, largest=max(sizes.disk)) as disk:
        direct = disk.direct
        sample_disk(rates, disk, sizes, report=report)
    take("ctog", lambda n: compute.copy(n, to_device=True), sizes.copy)
    take("gtoc", lambda n: compute.copy(n, to_device=False), sizes.copy)
    take("device_bandwidth", compute.memory_read, sizes.memory)
    take("gemm", lambda n: compute.gemm(n, inner=sizes.gemm_inner, outer=sizes.gemm_outer), sizes.gemm_rows)
    take("bmm", lambda n: compute.batched_gemm(n, heads=sizes.heads, head_dim=sizes.head_dim), sizes.bmm_tokens)
    take(
        "cpu_attention",
        lambda n: attention.cpu_attention(n, context=sizes.context, head_dim=sizes.head_dim),
        sizes.attention,
    )
    take("cpu_bandwidth", attention.memory_read, sizes.memory)
    return Hardware(
        name="this machine",
        device="cuda",
        source=f"profiled, direct I/O {'on' if direct else 'off'}",
        device_memory=torch.cuda.mem_get_info()[0] if device == "cuda" else 0,
        cpu_memory=psutil.virtual_memory().available,
        disk_capacity=shutil.disk_usage(folder).free,
        direct_io=direct,
        **curves_of(rates),
    )
