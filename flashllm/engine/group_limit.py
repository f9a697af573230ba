"""Two limits that may change while a model is loaded: that of the process's control group, and the memory that other
programs leave. The kernel does not tell, so both are read again now and then. Knows no models.
"""

import math
import time
from collections.abc import Callable

from flashllm.base.machine import available_nbytes, cgroup_limit_nbytes, default_limit, process_nbytes

_BETWEEN_LOOKS_S = 1.0
_STEP = 0.05  # of the limit: smaller changes are not followed, as moving rows costs time


class GroupLimit:
    """One thread at a time uses it."""

    def __init__(
        self, read: Callable[[], int | None] = cgroup_limit_nbytes, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._read, self._clock = read, clock
        self._at_start = self._now = read()
        self._looked = clock()

    def lowered(self) -> int | None:
        """The limit in bytes, where it is lower than at the start, as seen within the last second; else None."""
        if self._clock() - self._looked >= _BETWEEN_LOOKS_S:
            self._looked, self._now = self._clock(), self._read()
        if self._now is None or (self._at_start is not None and self._now >= self._at_start):
            return None
        return self._now


class FreeMemory:
    """The limit that leaves other programs some of what is free, control groups' limits counted. One thread at a time
    uses it."""

    def __init__(
        self,
        read: Callable[[], int] = lambda: process_nbytes() + available_nbytes(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read, self._clock = read, clock
        self._looked = -math.inf

    def limit(self, now: int, most: int) -> int:
        """The limit to keep to in bytes, at most `most`, where it is `now`; looks once a second."""
        if self._clock() - self._looked < _BETWEEN_LOOKS_S:
            return now
        self._looked = self._clock()
        found = min(most, default_limit(self._read()))
        return found if found == most or abs(found - now) > _STEP * now else now
