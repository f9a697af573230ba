"""One torch thread while the engine computes: torch's others spin for milliseconds after each product they shared,
on the cores that the engine's threads and reads need. Choosing a token from 50,000 logits is enough to start them.
"""

import threading
from collections import Counter
from types import TracebackType

import torch


class _OneTorchThread:
    """A context manager, also in several threads at once and within itself: torch's setting is partly the process's,
    partly each thread's, so what it was is kept from the first to enter."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depths: Counter[int] = Counter()  # by thread
        self._before = 1

    def __enter__(self) -> None:
        with self._lock:
            count = torch.get_num_threads()  # asked first, a new thread would take the process's setting later
            if not self._depths:
                self._before = count
            self._depths[threading.get_ident()] += 1
            torch.set_num_threads(1)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            thread = threading.get_ident()
            self._depths[thread] -= 1
            if not self._depths[thread]:
                del self._depths[thread]
                torch.set_num_threads(self._before)


one_torch_thread = _OneTorchThread()
