"""Objects of one process: what they hold outside it, and that a forked child must not use them.

That child has none of the native threads, and none of the memory that holds weights.

That memory is left out of children on purpose (direct reads into memory that a fork shares may be lost, open(2)).
"""

import ctypes
import os
import weakref

from flashllm.errors import UsageError


class OneProcess:
    """Base of an object that works in the process alone that made it. In a forked child it is never destroyed: its
    threads cannot be joined there."""

    beside_nbytes = 0  # of memory that another process holds for it, which counts against the limit as its own does

    def __init__(self) -> None:
        self._process = os.getpid()
        _objects.add(self)

    @property
    def in_child(self) -> bool:
        """True in a process forked from the one that made the object."""
        return os.getpid() != self._process

    def forked(self) -> None:
        """Called in every forked child: lets go there of what only this process may hold."""

    def check_process(self) -> None:
        """UsageError in a forked child."""
        if self.in_child:
            raise UsageError(
                "this process was forked from the one that loaded the model, and has neither its threads nor its "
                'weights; load the model in this process, or start processes by multiprocessing\'s "spawn"'
            )


def beside_nbytes() -> int:
    """Memory that other processes hold, at most, for what this one has open."""
    return sum(each.beside_nbytes for each in _objects)


_objects: "weakref.WeakSet[OneProcess]" = weakref.WeakSet()


def _after_fork() -> None:
    for each in list(_objects):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
        each.forked()


os.register_at_fork(after_in_child=_after_fork)
