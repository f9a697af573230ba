"""The memory limit of the process's control group, looked at now and then: whoever runs the machine may change it.

The kernel tells nobody. Knows no models.
"""

import time
from collections.abc import Callable

from flashllm.base.machine import cgroup_limit_nbytes

_BETWEEN_LOOKS_S = 1.0


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
