"""Measures what a run lacks in its drive's profile: a program, which `flashllm.profile.quick` runs before the run."""

import dataclasses
import json
import sys
from pathlib import Path

from flashllm.base.machine import num_cores, process_nbytes
from flashllm.offload.machine.measure import QUICK_SIZES, measure_batches
from flashllm.profile.calibrate import QUICK, measure
from flashllm.profile.machine import Profile
from flashllm.profile.quick import Wanted
from flashllm.profile.store import device_of, update_profile


def main(argv: list[str] | None = None) -> int:
    """Measure and keep: the drive, then batches, so that a run that ends early has measured the drive.

    The argument is a `Wanted` as JSON. Another process that measures is not waited for: FlashIOError.
    """
    wanted = Wanted(**json.loads((sys.argv[1:] if argv is None else argv)[0]))
    file, threads = Path(wanted.file), num_cores()  # the machine's, whatever the run computes with
    nbytes = max(1 << 20, min(QUICK.gemv_nbytes, (wanted.room - process_nbytes()) // 2))
    options = dataclasses.replace(QUICK, gemv_nbytes=nbytes, dram_nbytes=min(QUICK.dram_nbytes, nbytes))

    def drive(known: Profile | None) -> Profile:
        writes_in = None if wanted.writes_in is None else Path(wanted.writes_in)
        if known is not None and dataclasses.replace(wanted, dtype=None).is_in(known):
            return known
        return measure(
            file, threads=threads, encodings=wanted.encodings, options=options, known=known, writes_in=writes_in
        )

    def batches(known: Profile | None) -> Profile:
        if known is None or wanted.dtype is None or wanted.dtype in known.batches:
            return drive(known)
        found = measure_batches((wanted.dtype,), file, threads=threads, sizes=QUICK_SIZES)
        return dataclasses.replace(known, batches={**known.batches, **found})

    store, key = Path(wanted.store), device_of(file)
    update_profile(store, key, drive)
    if wanted.dtype is not None:
        update_profile(store, key, batches)
    return 0


if __name__ == "__main__":
    sys.exit(main())
