"""A quick profile: a few seconds before a run that reads from flash and has no fresh one.

A run never fails for its profile: where it cannot be taken or kept (a home that is read-only, a full drive, another
process that is measuring), the run goes on with what there is. It is measured in a process of its own, because what a
process once held counts against its limit, and because a drive may not answer.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from flashllm.base.machine import system_name
from flashllm.errors import FlashError
from flashllm.profile.machine import Profile
from flashllm.profile.store import find_profile, store_path

NOTICE = "measuring this drive for a few seconds, once a month (--no-profile: not)"
NOT_MEASURED = "it was not measured, so that typical figures are used"
WORTH_NBYTES = 32 << 20  # of a file: a token of a smaller model reads too little for the choice of a reader to be felt
_LEAST_NBYTES = 96 << 20  # of memory: an interpreter with the native core, and some to measure with
_STORE_NBYTES = 1 << 20  # free where the store lies
_PATIENCE_S = 5.0  # for all of it; what was kept by then stays
_MEASURER = "flashllm.commands.machine.quick"  # a program, since it needs both engines


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Figures that a run plans by, and how they may be measured."""

    file: str  # whose drive is meant; the run reads it
    store: str
    room: int  # bytes of memory that the measuring process may take
    encodings: tuple[str, ...] = ()  # of MEASURED_ENCODINGS: of weights that the run multiplies by one token
    dtype: str | None = None  # of the run's batches
    writes_in: str | None = None  # a folder of the drive that the run writes to

    def is_in(self, profile: Profile | None) -> bool:
        """True where the profile has all of it, fresh."""
        nbytes = os.stat(self.file).st_size
        if profile is None or not profile.is_fresh(system_name(), nbytes):
            return False
        return profile.gemv_bps.keys() >= set(self.encodings) and self.dtype in (None, *profile.batches)


def take_quick_profile(
    file: Path,
    *,
    room: int,
    say: Callable[[str], None],
    encodings: Iterable[str] = (),
    dtype: str | None = None,
    writes_in: Path | None = None,
    store: Path | None = None,
) -> str | None:
    """Measure what the profile of the drive of `file` lacks for a run, and keep it; arguments as in `Wanted`.

    Says so in a line before it begins. Returns another one where it failed; None, too, where there was nothing to do,
    or nothing could be done.
    """
    store = store or store_path()
    wanted = Wanted(
        file=str(file.absolute()),
        store=str(store.absolute()),
        room=room,
        encodings=tuple(encodings),
        dtype=dtype,
        writes_in=None if writes_in is None else str(writes_in.absolute()),
    )
    with contextlib.suppress(FlashError, OSError):
        if room < _LEAST_NBYTES or not _can_keep(store) or wanted.is_in(find_profile(file, store)[0]):
            return None
        say(NOTICE)
        if (failure := _run_measurer(wanted)) is not None:
            return f"{NOT_MEASURED}: {failure}"
    return None


def _run_measurer(wanted: Wanted) -> str | None:
    """Why it failed; None where it did not."""
    command = [sys.executable, "-P", "-m", _MEASURER, json.dumps(asdict(wanted))]  # -P: never the current folder's
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PATIENCE_S, text=True, check=False
        )
    except subprocess.TimeoutExpired:
        return f"it took over {_PATIENCE_S:g} s"
    if done.returncode == 0:
        return None
    return (done.stderr.splitlines() or [f"status {done.returncode}"])[-1]


def _can_keep(store: Path) -> bool:
    """True where nothing forbids to write the store."""
    folder = next(each for each in (store.parent, *store.parent.parents) if each.exists())
    return folder.is_dir() and os.access(folder, os.W_OK) and shutil.disk_usage(folder).free >= _STORE_NBYTES
