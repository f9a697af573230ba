"""Profiles a machine without a GPU by what the runtime really does there (paper B, section 4.3, last paragraph)."""

import shutil
from pathlib import Path
from typing import Any

from flashllm import _core
from flashllm.base.machine import available_nbytes, num_cores
from flashllm.offload.machine.curves import Probe
from flashllm.offload.machine.hardware import Hardware
from flashllm.offload.machine.measure_disk import open_probe
from flashllm.offload.machine.measure_native import NativeProbe
from flashllm.offload.machine.sampling import (
    ProfileSizes,
    Rates,
    Report,
    curves_of,
    sample,
    sample_disk,
    sample_in_turn,
)

_PACKED_BITS = 4  # the width that is measured; others take nearly the same time
_PACKED_LAYOUT = "kivi"


def profile_cpu(folder: Path, *, report: Report, sizes: ProfileSizes, dtype: str, threads: int | None) -> Hardware:
    """The rates of the runtime's products, attention and transfers, with weights and cache of `dtype`."""
    probe = NativeProbe(dtype, _core.ThreadPool(threads or num_cores()), sizes.at_least_s, sizes.rotation)
    rates: Rates = {}
    inner, outer = sizes.gemm_inner, sizes.gemm_outer
    shape: dict[str, Any] = {"heads": sizes.heads, "head_dim": sizes.head_dim}
    packed = shape | {"layout": _PACKED_LAYOUT, "bits": _PACKED_BITS}

    def take(name: str, one: Probe, at: tuple[int, ...]) -> None:
        sample(rates, name, one, at, rounds=sizes.rounds, report=report)

    with open_probe(folder, nbytes=sizes.disk_file, largest=max(sizes.disk)) as disk:
        direct = disk.direct
        sample_disk(rates, disk, sizes, report=report)
        takes, loses = probe.beside_reads(
            disk, size=max(sizes.disk), seconds=sizes.beside_s, inner=inner, rounds=sizes.rounds
        )
        report(f"beside each other  products lose {takes:.0%}, reads {loses:.0%}")
    products: dict[str, Probe] = {
        "gemm": lambda n: probe.products(n, inner=inner, outer=outer),
        "packed_gemm": lambda n: probe.products(n, inner=inner, outer=outer, bits=_PACKED_BITS),
    }
    # In turn: policies are compared by both, so a machine that drifts must drift for both.
    sample_in_turn(rates, products, sizes.gemm_rows, rounds=sizes.rounds, report=report)
    take("bmm", lambda n: probe.prompt_attention(n, **shape), sizes.bmm_tokens)
    take("cpu_attention", lambda n: probe.decode_attention(n, context=sizes.context, **shape), sizes.attention)
    take(
        "packed_attention",
        lambda n: probe.decode_attention(n, context=sizes.context, **packed),
        sizes.attention,
    )
    take("seal", lambda n: probe.seal(n, **packed), sizes.attention)
    take("elementwise", lambda n: probe.elementwise(n, width=inner), sizes.elementwise)
    square_s = probe.square_s()
    report(f"a square takes     {square_s * 1e6:.0f} µs before its products")
    curves = curves_of(rates)
    memory = available_nbytes()
    return Hardware(
        name="this machine",
        device="cpu",
        source=f"profiled with {dtype}, direct I/O {'on' if direct else 'off'}",
        # One memory is both tiers: all of it is the device's, and the CPU tier holds nothing.
        device_memory=memory,
        cpu_memory=0,
        disk_capacity=shutil.disk_usage(folder).free,
        direct_io=direct,
        ctog=curves["elementwise"],
        gtoc=curves["elementwise"],
        device_bandwidth=curves["elementwise"],
        cpu_bandwidth=curves["elementwise"],
        dtype=dtype,
        read_takes=takes,
        read_loses=loses,
        square_s=square_s,
        **{name: curves[name] for name in ("dtoc", "ctod", "gemm", "bmm", "cpu_attention")},
        **{name: curves[name] for name in ("packed_gemm", "packed_attention", "seal", "elementwise")},
    )
