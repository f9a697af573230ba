"""Measures this machine: the constants of `Hardware`, for the device it has (paper B, section 4.3, last paragraph)."""

import dataclasses
import shutil
from pathlib import Path

from flashllm.base.machine import available_nbytes
from flashllm.offload.accelerators import has_cuda
from flashllm.offload.machine.hardware import Hardware
from flashllm.offload.machine.profile_cpu import profile_cpu
from flashllm.offload.machine.sampling import ProfileSizes, Report


def profile_machine(
    folder: Path,
    *,
    report: Report,
    sizes: ProfileSizes | None = None,
    dtype: str = "bfloat16",
    threads: int | None = None,
) -> Hardware:
    """Measures and fits, with weights and cache of `dtype`; `folder` is where the disk is tested.

    On a CPU the runtime's own products, attention and transfers; where torch sees a GPU, torch's. Raises FlashIOError
    when the folder cannot be written.
    """
    if has_cuda():
        from flashllm.offload.machine.profile_cuda import profile_cuda

        return profile_cuda(folder, report=report, sizes=sizes or ProfileSizes())
    return profile_cpu(folder, report=report, sizes=sizes or ProfileSizes(), dtype=dtype, threads=threads)


def as_now(hardware: Hardware, folder: Path) -> Hardware:
    """A stored profile of this machine with the memory and disk space that are free now."""
    capacity = shutil.disk_usage(folder).free
    if hardware.device == "cpu":
        return dataclasses.replace(hardware, device_memory=available_nbytes(), disk_capacity=capacity)
    return dataclasses.replace(hardware, disk_capacity=capacity)
