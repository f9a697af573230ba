"""Chooses a reader for a model, and opens it.

An option of the run wins; else what the drive's profile says is fastest for rows of this size; else the default.
The choice decides speed alone: none changes a token.
"""

from flashllm import _core
from flashllm.config import Backend
from flashllm.profile.costs import DEFAULT_DEPTHS, ReaderChoice
from flashllm.profile.machine import Profile

_UNPACKING_DEPTH = 8


def open_reader(choice: ReaderChoice, *, max_request: int) -> _core.Reader:
    """The reader that `choice` describes. Where io_uring is no longer available, it reads with as many threads instead:
    compare its `backend`. FlashIOError where its threads cannot be started."""
    return _core.Reader(
        choice.depth,
        max_gap=choice.max_gap,
        max_request=max_request,
        backend="auto" if choice.backend == "io_uring" else "threads",
        queue_depth=choice.depth,
    )


def backends() -> list[tuple[Backend, int]]:
    """(backend, depth) of every reader that works here and is worth measuring."""
    found: list[tuple[Backend, int]] = [("threads", 8), ("threads", 16), ("threads", 32)]
    if _core.Reader(1, backend="auto", queue_depth=1).backend == "io_uring":
        found += [("io_uring", 32), ("io_uring", 64)]  # deeper queues delay demand reads behind prefetches
    return found


def choose_reader(
    profile: Profile | None,
    row_nbytes: int,
    *,
    io_threads: int | None,
    direct: bool,
    io_backend: Backend | None = None,
    unpacks: bool = False,
) -> ReaderChoice:
    """How to read rows of `row_nbytes`.

    Args:
        profile: the drive's. Not used where it, or this run, goes without direct I/O.
        unpacks: what is read is unpacked where it arrives, as experts that were left in their file are: by threads,
            each on a processor. A few do, and each holds a request's memory.
        io_threads, io_backend: the run's options: reads at a time, and how they are made (by threads where only the
            former is given).
    """
    known = profile if profile is not None and profile.direct and direct else None
    if io_threads is None and io_backend is None:
        if known is None or unpacks:
            depth = _UNPACKING_DEPTH if unpacks else DEFAULT_DEPTHS["threads"]
            return ReaderChoice(backend="threads", depth=depth, max_gap=0, source="default")
        best = known.best(row_nbytes)
        return ReaderChoice(backend=best.backend, depth=best.depth, max_gap=best.gap(row_nbytes), source="calibration")
    backend = io_backend if io_backend is not None else "threads"
    if known is None:
        depth = io_threads if io_threads is not None else DEFAULT_DEPTHS[backend]
        return ReaderChoice(backend=backend, depth=depth, max_gap=0, source="argument")
    depth = io_threads if io_threads is not None else known.best(row_nbytes, backend).depth
    gap = known.of(backend, depth).gap(row_nbytes)
    return ReaderChoice(backend=backend, depth=depth, max_gap=gap, source="argument")
