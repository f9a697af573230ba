"""Measures this machine and fits the constants of `Hardware` (paper B, section 4.3, last paragraph).

It decides what is measured at which sizes; how is in `measure_disk` and `measure_compute`.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from flashllm.offload.machine.curves import Probe, Sample, fit_curve, medians, sample_rounds
from flashllm.offload.machine.hardware import Hardware
from flashllm.offload.machine.measure_compute import ComputeProbe
from flashllm.offload.machine.measure_disk import open_probe

KIB, MIB = 1 << 10, 1 << 20
# With no GPU the device tier is a share of the CPU's own memory; --device-memory states it exactly.
_DEVICE_SHARE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSizes:
    """Sizes at which each rate is sampled; they are the knots of its curve. Bytes, rows or tokens."""

    disk: tuple[int, ...] = (64 * KIB, 256 * KIB, 1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB)
    copy: tuple[int, ...] = (64 * KIB, 256 * KIB, 1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB)
    memory: tuple[int, ...] = (1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB)
    gemm_rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048)
    bmm_tokens: tuple[int, ...] = (64, 256, 1024)
    attention: tuple[int, ...] = (1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB)
    gemm_inner: int = 4096
    gemm_outer: int = 4096
    heads: int = 16
    head_dim: int = 128
    context: int = 512
    disk_file: int = 512 * MIB
    rounds: int = 3
    at_least_s: float = 0.1
    rotation: int = 256 * MIB  # operands together take this, more than the last-level caches in use


Rates = dict[str, list[Sample]]


def measure(folder: Path, sizes: ProfileSizes, *, report: Callable[[str], None]) -> tuple[Rates, bool]:
    """Samples of every rate of `Hardware`, and whether the disk was read and written past the page cache."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    compute = ComputeProbe(device, torch.float16 if cuda else torch.bfloat16, sizes.at_least_s, sizes.rotation)
    rates: Rates = {}

    def take(name: str, probe: Probe, at: tuple[int, ...]) -> None:
        rates[name] = sample_rounds(probe, at, rounds=sizes.rounds)
        top = max(sample.rate for sample in rates[name])
        report(f"{name:18s} up to {top:.3g}/s over sizes {at[0]} … {at[-1]}")

    with open_probe(folder, nbytes=sizes.disk_file, largest=max(sizes.disk)) as disk:
        direct = disk.direct
        report("direct I/O is on" if direct else f"{folder} refuses direct I/O: disk rates pass through the page cache")
        take("dtoc", lambda size: disk.read(size, at_least_s=sizes.at_least_s), sizes.disk)
        take("ctod", lambda size: disk.write(size, at_least_s=sizes.at_least_s), sizes.disk)
    take("ctog", lambda size: compute.copy(size, to_device=True), sizes.copy)
    take("gtoc", lambda size: compute.copy(size, to_device=False), sizes.copy)
    take("device_bandwidth", compute.memory_read, sizes.memory)
    take("gemm", lambda n: compute.gemm(n, inner=sizes.gemm_inner, outer=sizes.gemm_outer), sizes.gemm_rows)
    take("bmm", lambda n: compute.batched_gemm(n, heads=sizes.heads, head_dim=sizes.head_dim), sizes.bmm_tokens)
    attention = ComputeProbe(torch.device("cpu"), torch.bfloat16, sizes.at_least_s, sizes.rotation)
    take(
        "cpu_attention",
        lambda n: attention.cpu_attention(n, context=sizes.context, head_dim=sizes.head_dim),
        sizes.attention,
    )
    take("cpu_bandwidth", attention.memory_read, sizes.memory)
    return rates, direct


def fit_machine(rates: Rates, *, direct_io: bool, folder: Path) -> Hardware:
    """The machine these samples describe, with the memory and disk space that are free now."""
    # Medians, since a neighbour's burst makes one round slow and no round fast.
    curves = {
        name: fit_curve(medians(samples), knots=sorted({s.size for s in samples})) for name, samples in rates.items()
    }
    cuda = torch.cuda.is_available()
    available = psutil.virtual_memory().available
    # The same bytes must not be planned twice: with no GPU, device and CPU tiers share the machine's memory.
    device_memory = torch.cuda.mem_get_info()[0] if cuda else available // _DEVICE_SHARE
    return Hardware(
        name="this machine",
        device="cuda" if cuda else "cpu",
        source=f"profiled, direct I/O {'on' if direct_io else 'off'}",
        device_memory=device_memory,
        cpu_memory=available if cuda else available - device_memory,
        disk_capacity=shutil.disk_usage(folder).free,
        direct_io=direct_io,
        ctog=curves["ctog"],
        gtoc=curves["gtoc"],
        dtoc=curves["dtoc"],
        ctod=curves["ctod"],
        gemm=curves["gemm"],
        bmm=curves["bmm"],
        device_bandwidth=curves["device_bandwidth"],
        cpu_attention=curves["cpu_attention"],
        cpu_bandwidth=curves["cpu_bandwidth"],
    )


def profile_machine(folder: Path, *, report: Callable[[str], None], sizes: ProfileSizes | None = None) -> Hardware:
    """Measures and fits; `folder` is where the disk is tested. Raises FlashIOError when that cannot be written."""
    rates, direct = measure(folder, sizes or ProfileSizes(), report=report)
    return fit_machine(rates, direct_io=direct, folder=folder)
