"""What a forked child must not use: it has none of the native threads, and none of the memory that holds weights.

That memory is left out of children on purpose (direct reads into memory that a fork shares may be lost, open(2)).
"""

import ctypes
import os
import weakref

from flashllm.errors import UsageError


class OneProcess:
    """Base of an object that works in the process alone that made it. In a forked child it is never destroyed: its
    threads cannot be joined there."""

    def __init__(self) -> None:
        self._process = os.getpid()
        _objects.add(self)

    @property
    def in_child(self) -> bool:
        """Whether this process was forked from the one that made the object."""
        return os.getpid() != self._process

    def check_process(self) -> None:
        """UsageError in a forked child."""
        if self.in_child:
            raise UsageError(
                "this process was forked from the one that loaded the model, and has neither its threads nor its "
                'weights; load the model in this process, or start processes by multiprocessing\'s "spawn"'
            )


_objects: "weakref.WeakSet[OneProcess]" = weakref.WeakSet()


def _keep_for_ever() -> None:
    for each in list(_objects):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


os.register_at_fork(after_in_child=_keep_for_ever)
