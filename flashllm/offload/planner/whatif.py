"""What more memory, disk, bandwidth or a GPU would buy: the same search on a changed machine. It prints nothing."""

import dataclasses
from dataclasses import dataclass

from flashllm.errors import BudgetError
from flashllm.offload.machine.hardware import Hardware
from flashllm.offload.machine.machines import T4
from flashllm.offload.planner.search import SearchSpace, search
from flashllm.offload.policy import Workload
from flashllm.offload.shape import ModelShape

_FACTOR = 2
# A what-if needs the size of a gain, not the last per cent: every other pair is enough.
_GPU_BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)
_NUM_BATCHES = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """One change and the throughput the search finds with it, on the same coarse grid as `base`."""

    change: str
    throughput: float  # tokens/s; 0 where nothing fits
    ratio: float  # to the unchanged machine; infinite where that fits nothing


def _changes(hardware: Hardware) -> list[tuple[str, Hardware]]:
    replace = dataclasses.replace
    host = hardware.device == "cpu"  # one memory is both tiers
    memory = "twice the memory" if host else "twice the device memory"
    changes = [
        (memory, replace(hardware, device_memory=hardware.device_memory * _FACTOR)),
        ("twice the disk space", replace(hardware, disk_capacity=hardware.disk_capacity * _FACTOR)),
        ("a disk twice as fast", replace(hardware, dtoc=hardware.dtoc.scaled(2), ctod=hardware.ctod.scaled(2))),
    ]
    if host:  # the T4's compute and links beside this machine's own memory and disk
        gpu = replace(
            hardware,
            name=f"{hardware.name} with a T4",
            device="cuda",
            **{name: getattr(T4, name) for name in ("device_memory", "device_reserved")},
            **{name: getattr(T4, name) for name in ("ctog", "gtoc", "gemm", "bmm", "device_bandwidth", "combine")},
            cpu_memory=hardware.cpu_memory + hardware.device_memory,  # the device tier was this machine's own memory
        )
        changes.append(("a T4 GPU of 16 GB", gpu))
    else:
        changes.append(("twice the CPU memory", replace(hardware, cpu_memory=hardware.cpu_memory * _FACTOR)))
        links = replace(hardware, ctog=hardware.ctog.scaled(2), gtoc=hardware.gtoc.scaled(2))
        changes.append(("a link to the device twice as fast", links))
    return changes


def what_if(shape: ModelShape, hardware: Hardware, workload: Workload, space: SearchSpace) -> list[Gain]:
    """Gains of each change, greatest first."""
    coarse = dataclasses.replace(space, gpu_batches=_GPU_BATCHES, num_batches=_NUM_BATCHES)

    def best(machine: Hardware) -> float:
        try:
            return search(shape, machine, workload, coarse).prediction.throughput
        except BudgetError:
            return 0.0

    base = best(hardware)
    gains = []
    for change, machine in _changes(hardware):
        throughput = best(machine)
        ratio = throughput / base if base > 0 else float("inf" if throughput > 0 else 1)
        gains.append(Gain(change=change, throughput=throughput, ratio=ratio))
    return sorted(gains, key=lambda gain: -gain.ratio)
