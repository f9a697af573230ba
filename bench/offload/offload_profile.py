"""Does a profile predict this machine? Transfers and products at sizes it has not seen, against measured times.

Of products, sizes of the profile and sizes held out are sampled in the same rounds, so that a drifting machine drifts
for both. Reads are predicted by the costs of requests that all of a profile's reads come from. The aim is 15 %.

    python bench/offload/offload_profile.py --dir /tmp --json bench/offload/results/offload_profile.json
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from flashllm import _core
from flashllm.base.machine import num_cores
from flashllm.offload.machine.here import read_curve
from flashllm.offload.machine.measure import KIB, MIB, BatchSizes, reading
from flashllm.offload.machine.measure_native import NativeProbe
from flashllm.profile.calibrate import QUICK, CalibrationOptions, measure
from flashllm.profile.rates import RateCurve, Sample, curve_of, sample_rounds, seconds_of
from flashllm.profile.reads import file_to_read, write_curve

LIMIT = 0.15
# Between the profile's sizes, a factor of two from either neighbour and not a multiple of one only.
HELD_OUT = {
    "bytes": (128 * KIB, 512 * KIB, 1536 * KIB, 3 * MIB, 8 * MIB),
    "gemm": (2, 6, 12, 24, 48, 80, 112, 192, 384, 768),
}
GEMM_SHAPES = ((4096, 11008), (5120, 5120), (2048, 8192))  # the profile's own matrix is 2048 x 8192

TINY = BatchSizes(
    gemm_rows=(1, 4, 16), gemm_inner=128, gemm_outer=128, rounds=1, at_least_s=0.0, rotation=1 * MIB,
)  # fmt: skip


def compared(name: str, curve: RateCurve, found: RateCurve, units: float = 1.0) -> list[dict[str, Any]]:
    """Predicted and measured seconds of `units` for each of a size, at the sizes of `found`."""
    rows = []
    for size, rate in found.knots:
        predicted, measured = units * size / curve.at(size), units * size / rate
        row = {"what": name, "size": size, "predicted_s": predicted, "measured_s": measured}
        rows.append({**row, "error": predicted / measured - 1})
    return rows


def transfers(folder: Path, sizes: BatchSizes, held_out: tuple[int, ...], *, tiny: bool) -> list[dict[str, Any]]:
    """Reads and writes of the drive, by a profile of it."""
    options = dataclasses.replace(QUICK, gemv_nbytes=MIB) if tiny else CalibrationOptions()
    with file_to_read(folder, 2 * MIB if tiny else 2048 * MIB) as file:
        profile = measure(file, threads=num_cores(), encodings=(), options=options, writes_in=folder)

        def read(size: int) -> Sample:
            return Sample(size=size, units=size, seconds=seconds_of(reading(file, size), at_least_s=sizes.at_least_s))

        reads = curve_of(sample_rounds({"reads": (read, held_out)}, rounds=sizes.rounds)["reads"])
    rows = compared("disk to CPU", read_curve(profile), reads)
    writes = write_curve(folder, options.write_nbytes, held_out)
    if profile.writes is None or writes is None:
        print("the file system refuses direct writes", file=sys.stderr)
        return rows
    return rows + compared("CPU to disk", profile.writes, writes)


def gemms(probe: NativeProbe, sizes: BatchSizes, *, tiny: bool) -> list[dict[str, Any]]:
    """The profile's matrix at its rows, others at rows held out, in the same rounds."""
    shapes = ((128, 256),) if tiny else GEMM_SHAPES
    held_out = (2, 8) if tiny else HELD_OUT["gemm"]
    probes = {
        f"{inner}x{outer}": (partial(probe.products, inner=inner, outer=outer), held_out) for inner, outer in shapes
    }
    seen = partial(probe.products, inner=sizes.gemm_inner, outer=sizes.gemm_outer)
    samples = sample_rounds({"": (seen, sizes.gemm_rows), **probes}, rounds=sizes.rounds)
    curve = curve_of(samples.pop(""))
    rows = []
    for (inner, outer), (name, found) in zip(shapes, samples.items(), strict=True):
        rows += compared(f"gemm {name}", curve, curve_of(found), units=4 * inner * outer)
    return rows


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
    sizes = TINY if args.quick else BatchSizes(rounds=args.rounds, at_least_s=args.seconds)
    held_out = (128 * KIB,) if args.quick else HELD_OUT["bytes"]
    probe = NativeProbe(args.dtype, _core.ThreadPool(num_cores()), sizes.at_least_s, sizes.rotation)
    start = time.perf_counter()
    rows = transfers(args.dir, sizes, held_out, tiny=args.quick)
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
