"""This machine as the planner sees it: its stored profile, with the memory and the disk space that are free now."""

import shutil
from pathlib import Path
from typing import Any

from flashllm.base.machine import available_nbytes
from flashllm.offload.accelerators import free_nbytes, has_cuda
from flashllm.offload.machine.hardware import Hardware
from flashllm.offload.runtime.tiers.scratch import READ_THREADS, REQUEST_NBYTES
from flashllm.profile.machine import Profile, fields_of
from flashllm.profile.rates import RateCurve
from flashllm.profile.store import device_of, load_profile, store_path

_TRANSFERS = tuple((64 << 10) << 2 * i for i in range(6))  # bytes of a read: 64 KiB to 64 MiB


def this_machine(
    folder: Path, dtype: str | None, *, device: str | None = None, store: Path | None = None
) -> Hardware | None:
    """The machine with the drive that `folder` lies on, computing in `dtype`, or in another where that was not
    measured. None where its profile lacks what the throughput engine computes with. `device`: "cpu", or "cuda", which
    is None without one; None: a GPU where it was measured. FormatError where the store is damaged, FlashIOError where
    it cannot be read."""
    profile = load_profile(store or store_path(), device_of(folder))
    if profile is None or not profile.batches or (device == "cuda" and profile.gpu is None):
        return None
    return hardware_of(profile, folder, dtype, gpu=profile.gpu is not None and device != "cpu")


def hardware_of(profile: Profile, folder: Path, dtype: str | None, *, gpu: bool = False) -> Hardware:
    """The constants of a profile, which has batches, and what is free now, on the drive of `folder`."""
    if dtype is None or dtype not in profile.batches:
        dtype = min(profile.batches)
    batches, reads = profile.batches[dtype], read_curve(profile)
    common: dict[str, Any] = {
        "name": "this machine",
        "source": f"profile of {profile.made[:10]} with {dtype}, direct I/O {'on' if profile.direct else 'off'}",
        "disk_capacity": shutil.disk_usage(folder).free,
        "direct_io": profile.direct,
        "dtype": dtype,
        "dtoc": reads,
        "ctod": profile.writes or reads,
    }
    if gpu and profile.gpu is not None:
        return Hardware(
            device="cuda",
            device_memory=free_nbytes("cuda") if has_cuda() else 0,
            cpu_memory=available_nbytes(),
            cpu_attention=batches.cpu_attention,
            cpu_bandwidth=RateCurve.flat(profile.dram_bps),
            **common,
            **fields_of(profile.gpu),
        )
    # One memory is both tiers: all of it is the device's, and the CPU tier holds nothing.
    common |= dict.fromkeys(("ctog", "gtoc", "device_bandwidth", "cpu_bandwidth"), batches.elementwise)
    return Hardware(device="cpu", device_memory=available_nbytes(), cpu_memory=0, **common, **fields_of(batches))


def read_curve(profile: Profile) -> RateCurve:
    """Bytes/s of one read of the disk tier over its bytes: a batch of requests of at most REQUEST_NBYTES."""
    reader = profile.of("threads", READ_THREADS)

    def seconds(nbytes: int) -> float:
        requests = -(-nbytes // REQUEST_NBYTES)
        return reader.batch(requests, nbytes / requests)

    return RateCurve(tuple((nbytes, nbytes / seconds(nbytes)) for nbytes in _TRANSFERS))
