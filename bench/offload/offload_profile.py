"""Does a profile predict this machine? Transfers and products at sizes the fit has not seen, against measured times.

Sizes of the profile and sizes held out are sampled in the same rounds, so that a drifting machine drifts for both; the
fit takes the first, and the second are predicted. The aim is 15 %.

    python bench/offload/offload_profile.py --dir /tmp --json bench/offload/results/offload_profile.json
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from flashllm import _core
from flashllm.base.machine import num_cores
from flashllm.offload.machine.curves import Probe, Sample, fit_curve, medians, sample_rounds
from flashllm.offload.machine.measure_disk import open_probe
from flashllm.offload.machine.measure_native import NativeProbe
from flashllm.offload.machine.rates import RateCurve
from flashllm.offload.machine.sampling import KIB, MIB, ProfileSizes

LIMIT = 0.15
# Between the profile's sizes, a factor of two from either neighbour and not a multiple of one only.
HELD_OUT = {
    "bytes": (128 * KIB, 512 * KIB, 1536 * KIB, 3 * MIB, 8 * MIB, 24 * MIB, 48 * MIB),
    "gemm": (2, 6, 12, 24, 48, 80, 112, 192, 384, 768),
}
GEMM_SHAPES = ((4096, 11008), (5120, 5120), (2048, 8192))  # the profile's own matrix is 4096 x 4096

TINY = ProfileSizes(
    disk=(64 * KIB, 256 * KIB), copy=(64 * KIB, 256 * KIB), memory=(256 * KIB, 1 * MIB), gemm_rows=(1, 4, 16),
    gemm_inner=128, gemm_outer=128, disk_file=2 * MIB, rounds=1, at_least_s=0.0, rotation=1 * MIB,
)  # fmt: skip


def compared(name: str, curve: RateCurve, samples: list[Sample]) -> list[dict[str, Any]]:
    """Predicted and measured seconds of the median sample at each size."""
    rows = []
    for sample in medians(samples):
        seconds = sample.units / curve.at(sample.size)
        rows.append(
            {
                "what": name,
                "size": sample.size,
                "predicted_s": seconds,
                "measured_s": sample.seconds,
                "error": seconds / sample.seconds - 1,
            }
        )
    return rows


def link(
    name: str, probe: Probe, fit_sizes: tuple[int, ...], held_out: tuple[int, ...], rounds: int
) -> list[dict[str, Any]]:
    samples = sample_rounds(probe, (*fit_sizes, *held_out), rounds=rounds)
    seen = [sample for sample in samples if sample.size in fit_sizes]
    curve = fit_curve(medians(seen), knots=fit_sizes)
    return compared(name, curve, [sample for sample in samples if sample.size not in fit_sizes])


def gemms(probe: NativeProbe, sizes: ProfileSizes, *, tiny: bool) -> list[dict[str, Any]]:
    """The profile's matrix at its rows, others at rows held out, in the same rounds."""
    shapes = ((128, 256),) if tiny else GEMM_SHAPES
    held_out = (2, 8) if tiny else HELD_OUT["gemm"]
    seen: list[Sample] = []
    others: dict[tuple[int, int], list[Sample]] = {shape: [] for shape in shapes}
    for _ in range(sizes.rounds):
        seen += sample_rounds(
            lambda rows: probe.products(rows, inner=sizes.gemm_inner, outer=sizes.gemm_outer), sizes.gemm_rows, rounds=1
        )
        for inner, outer in shapes:
            others[inner, outer] += sample_rounds(
                lambda rows, inner=inner, outer=outer: probe.products(rows, inner=inner, outer=outer),
                held_out,
                rounds=1,
            )
    curve = fit_curve(medians(seen), knots=sizes.gemm_rows)
    return [row for shape in shapes for row in compared(f"gemm {shape[0]}x{shape[1]}", curve, others[shape])]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dir", type=Path, default=Path(), help="folder whose disk is measured")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.15, help="least time of one sample")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, for a test")
    parser.add_argument("--note", default="", help="conditions to keep with the result")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    sizes = TINY if args.quick else ProfileSizes(rounds=args.rounds, at_least_s=args.seconds)
    held_out = (128 * KIB,) if args.quick else HELD_OUT["bytes"]
    probe = NativeProbe(args.dtype, _core.ThreadPool(num_cores()), sizes.at_least_s, sizes.rotation)
    start = time.perf_counter()
    with open_probe(args.dir, nbytes=sizes.disk_file, largest=max(sizes.disk)) as disk:
        direct = disk.direct
        print(f"direct I/O {'on' if direct else 'off'}", file=sys.stderr)
        least = sizes.at_least_s
        rows = link("disk to CPU", lambda n: disk.read(n, at_least_s=least), sizes.disk, held_out, sizes.rounds)
        rows += link("CPU to disk", lambda n: disk.write(n, at_least_s=least), sizes.disk, held_out, sizes.rounds)
    rows += gemms(probe, sizes, tiny=args.quick)
    for row in rows:
        flag = "" if abs(row["error"]) <= LIMIT else "  over 15 %"
        print(
            f"{row['what']:18s} {row['size']:10.0f}  predicted {row['predicted_s'] * 1e3:9.4g} ms"
            f"  measured {row['measured_s'] * 1e3:9.4g} ms  {row['error']:+6.1%}{flag}",
            file=sys.stderr,
        )
    summary: dict[str, Any] = {
        "command": f"python bench/offload/offload_profile.py --rounds {sizes.rounds} --seconds {sizes.at_least_s}",
        "note": args.note,
        "direct_io": direct,
        "dtype": args.dtype,
        "threads": num_cores(),
        "load_average": os.getloadavg()[0],
        "seconds": time.perf_counter() - start,
        "within": sum(abs(row["error"]) <= LIMIT for row in rows),
        "rows": rows,
    }
    for what in dict.fromkeys(row["what"] for row in rows):
        errors = [abs(row["error"]) for row in rows if row["what"] == what]
        summary[f"worst {what}"] = max(errors)
        summary[f"within {what}"] = f"{sum(error <= LIMIT for error in errors)} of {len(errors)}"
    if args.json is not None:
        args.json.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in summary.items() if key != "rows"}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
