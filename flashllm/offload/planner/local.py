"""The policy for a job on the machine that will run it, and what the cost model says of a job. Plans; runs nothing.

Rates are those of this machine's profile (`flashllm calibrate`, or a quick one); without one, a typical machine's.
"""

import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashllm.base.machine import available_nbytes, num_cores
from flashllm.errors import UsageError
from flashllm.offload.machine.hardware import Hardware
from flashllm.offload.machine.here import this_machine
from flashllm.offload.machine.machines import T4
from flashllm.offload.planner.predict import predict
from flashllm.offload.policy import Policy, Workload
from flashllm.offload.runtime.options import RunOptions
from flashllm.offload.shape import ModelShape
from flashllm.profile.rates import RateCurve

_CORE_FLOPS = 4e10  # of products, a core; the typical figures are orders of magnitude, which the order of sizes needs
_MEMORY_RATE = 1.5e10  # bytes/s
_DISK_RATE = 1.5e9
_SQUARE_S = 5e-4  # of a batch in a layer, besides its work


def local_hardware(shape: ModelShape, options: RunOptions) -> Hardware:
    """This machine under the limits of a job, by its stored profile where there is one."""
    memory = options.memory or 0
    if options.accelerator is not None:
        hardware = machine_here(options.scratch, shape.dtype, device="cuda")
        return hardware.limited(
            device_memory=(options.gpu_memory or 0) + hardware.device_reserved,
            cpu_memory=memory + hardware.cpu_reserved,
            disk_capacity=options.disk,
        )
    hardware = machine_here(options.scratch, shape.dtype, device="cpu")
    return hardware.limited(device_memory=memory + hardware.device_reserved, cpu_memory=0, disk_capacity=options.disk)


def machine_here(folder: Path, dtype: str | None, *, device: str | None = None) -> Hardware:
    """As `this_machine`; typical figures where it has no profile."""
    found = this_machine(folder, dtype, device=device)
    return found or (_typical_gpu() if device == "cuda" else _typical(folder))


def load_search() -> None:
    """Imports what planning needs, which is tens of megabytes: whoever counts the memory left does this first.

    UsageError where scipy is not installed.
    """
    try:
        import flashllm.offload.planner.search  # noqa: F401
    except ModuleNotFoundError as error:
        raise UsageError(f"planning needs {error.name}: pip install 'flashllm[offload]'") from None


def plan_policy(
    shape: ModelShape, workload: Workload, options: RunOptions, *, requests: int, stages: int = 1
) -> Policy:
    """The policy of greatest throughput for `requests` prompts of at most `workload`'s sizes.

    With `stages` it is that of a pipeline's stages, on machines like this one: as many blocks are in flight, and the
    prediction is of one block on one stage. Raises BudgetError where no policy fits. `load_search` comes first.
    """
    from flashllm.offload.planner.search import GPU_BATCHES, SearchSpace, search

    hardware = local_hardware(shape, options)
    shape = shape.share(stages)
    requests = -(-requests // stages)
    # A block larger than the job pays for room that nothing fills.
    batches = tuple(size for size in GPU_BATCHES if size <= max(requests, 1))
    space = SearchSpace(
        gpu_batches=batches,
        sequences=max(requests, 1),
        **options.methods,
        weight_bits=options.weight_bits,
        cache_bits=options.cache_bits,
        overlap=None if options.overlap is None else (options.overlap,),
        blocks_in_flight=stages,
        cpu_attention=(True,),  # what the runtime does with a cache beside the device
    )
    return search(shape, hardware, workload, space).policy


def predict_job(
    shape: ModelShape, options: RunOptions, policy: Policy, blocks: Iterable[tuple[int, Workload]]
) -> dict[str, Any]:
    """Prediction for the blocks of a job, (sequences, longest sizes) each: seconds, new tokens/s, and the most bytes
    of each tier. (On a machine without an accelerator all memory is the device's.)"""
    hardware = local_hardware(shape, options)
    prefill_s = decode_s = tokens = 0.0
    peaks = dict.fromkeys(("device", "cpu", "disk"), 0)
    for sequences, workload in blocks:
        part = of_size(policy, sequences)
        prediction = predict(shape, hardware, workload, part, **options.bits)
        prefill_s += prediction.prefill_s
        decode_s += prediction.decode_s
        tokens += sequences * workload.gen_len
        found = {"device": prediction.peak_device, "cpu": prediction.peak_cpu, "disk": prediction.peak_disk}
        peaks = {tier: max(nbytes, found[tier]) for tier, nbytes in peaks.items()}
    seconds = prefill_s + decode_s
    throughput = tokens / seconds if seconds > 0 else 0.0
    rates = {"prefill_s": prefill_s, "decode_s": decode_s, "throughput": throughput}
    return rates | {"tiers": peaks, "source": hardware.source}


def of_size(policy: Policy, sequences: int) -> Policy:
    """`policy` for a block that is not full."""
    gpu_batch = min(policy.gpu_batch, sequences)
    return replace(policy, gpu_batch=gpu_batch, num_batches=-(-sequences // gpu_batch))


def _typical_gpu() -> Hardware:
    source = "a T4's figures: this machine has no profile, which `flashllm calibrate` makes"
    return replace(T4, name="this machine", source=source)


def _typical(folder: Path) -> Hardware:
    most = _CORE_FLOPS * num_cores()
    flops = RateCurve(((1, most / 10), (16, most / 2), (64, most)))  # rows share what loading a weight costs
    memory, disk = RateCurve.flat(_MEMORY_RATE), RateCurve.flat(_DISK_RATE)
    return Hardware(
        name="this machine",
        device="cpu",
        source="typical figures: this machine has no profile, which `flashllm calibrate` makes",
        device_memory=available_nbytes(),
        cpu_memory=0,
        disk_capacity=shutil.disk_usage(folder).free,
        ctog=memory,
        gtoc=memory,
        dtoc=disk,
        ctod=disk,
        gemm=flops,
        bmm=RateCurve.flat(0.25 * most),
        device_bandwidth=memory,
        square_s=_SQUARE_S,
        cpu_attention=memory,
        cpu_bandwidth=memory,
    )
