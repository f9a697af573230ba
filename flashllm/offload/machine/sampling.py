"""What a profile samples: the sizes, and a line of report for each rate. It fits no machine and knows no device."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flashllm.offload.machine.curves import Probe, Sample, fit_curve, medians, sample_rounds
from flashllm.offload.machine.measure_disk import DiskProbe

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSizes:
    """Sizes at which each rate is sampled; they are the knots of its curve. Bytes, rows or tokens."""

    disk: tuple[int, ...] = (64 * KIB, 256 * KIB, 1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB)
    copy: tuple[int, ...] = (64 * KIB, 256 * KIB, 1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB)
    memory: tuple[int, ...] = (1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB)
    gemm_rows: tuple[int, ...] = (1, 4, 8, 16, 32, 64, 96, 128, 256, 512, 1024)
    bmm_tokens: tuple[int, ...] = (64, 128, 256, 512, 1024)
    attention: tuple[int, ...] = (1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB)
    gemm_inner: int = 2048
    gemm_outer: int = 8192
    heads: int = 16
    head_dim: int = 128
    context: int = 512
    elementwise: tuple[int, ...] = (256 * KIB, 1 * MIB, 4 * MIB, 16 * MIB)
    disk_file: int = 2048 * MIB  # more than a drive, or a host, is likely to keep in memory for us
    rounds: int = 3
    beside_s: float = 1.0
    at_least_s: float = 0.1
    rotation: int = 256 * MIB  # operands together take this, more than the last-level caches in use


Rates = dict[str, list[Sample]]
Report = Callable[[str], None]


def sample(rates: Rates, name: str, probe: Probe, at: tuple[int, ...], *, rounds: int, report: Report) -> None:
    """Add a rate's samples to `rates`, and tell the best."""
    sample_in_turn(rates, {name: probe}, at, rounds=rounds, report=report)


def sample_in_turn(
    rates: Rates, probes: Mapping[str, Probe], at: tuple[int, ...], *, rounds: int, report: Report
) -> None:
    """As `sample` of several rates, each in every round."""
    rates.update({name: [] for name in probes})
    for _ in range(rounds):
        for name, probe in probes.items():
            rates[name] += sample_rounds(probe, at, rounds=1)
    for name in probes:
        top = max(sample.rate for sample in rates[name])
        report(f"{name:18s} up to {top:.3g}/s over sizes {at[0]} … {at[-1]}")


def sample_disk(rates: Rates, disk: DiskProbe, sizes: ProfileSizes, *, report: Report) -> None:
    """The disk's two rates."""
    if not disk.direct:
        report(f"the file system refuses direct I/O ({disk.file.fallback_reason}): disk rates are the page cache's")
    sample(
        rates,
        "dtoc",
        lambda n: disk.read(n, at_least_s=sizes.at_least_s),
        sizes.disk,
        rounds=sizes.rounds,
        report=report,
    )
    sample(
        rates,
        "ctod",
        lambda n: disk.write(n, at_least_s=sizes.at_least_s),
        sizes.disk,
        rounds=sizes.rounds,
        report=report,
    )


def curves_of(rates: Rates) -> dict[str, Any]:
    """Medians, since a neighbour's burst makes one round slow and no round fast."""
    return {
        name: fit_curve(medians(samples), knots=sorted({s.size for s in samples})) for name, samples in rates.items()
    }
