"""Runs tasks: one worker an activity, each in the schedule's order, as soon as what a task needs is done.

Without overlap the tasks run one after the other, in the schedule's order. Knows no tensors: `work` does a task.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

from flashllm.errors import FlashError
from flashllm.offload.planner.schedules import Action
from flashllm.offload.runtime.tasks import Task

_LOOK_AHEAD = 1024  # tasks handed out and not yet done: more than a layer's, so that the next layer's load begins
_POLL_S = 0.1  # how often the caller looks up from waiting, so that an interrupt reaches it
_PATIENCE_S = 0.5  # that an interrupted run waits for tasks under way; they end by themselves


class Stopped(FlashError):
    """The run was stopped before its end, by `Executor.stop`."""


class Executor:
    """Runs tasks by `work`, in workers of its own. A context manager: leaving it ends the workers."""

    def __init__(self, work: Callable[[Task], None], *, overlap: bool = True) -> None:
        self._work = work
        self.busy_s = dict.fromkeys(Action, 0.0)  # seconds in `work`, of each activity
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)  # few tasks are left, or the run ends
        self._ready = {action: threading.Condition(self._lock) for action in Action}  # its next task may run
        self._queues: dict[Action, deque[Task]] = {action: deque() for action in Action}
        self._undone: set[int] = set()  # tasks handed out
        self._error: BaseException | None = None
        self._closed = False
        self._workers: list[threading.Thread] = []
        if overlap:
            for action in Action:
                worker = threading.Thread(target=self._serve, args=(action,), name=f"offload {action}", daemon=True)
                worker.start()
                self._workers.append(worker)

    def run(self, tasks: Iterable[Task]) -> None:
        """Work all of `tasks`; returns when the last is done.

        Raises the first error of `work`, after the tasks under way have ended; Stopped after `stop`.
        """
        if not self._workers:
            for task in tasks:
                self._raise_error()
                self._do(task)
            self._raise_error()
            return
        for task in tasks:
            with self._lock:
                while len(self._undone) >= _LOOK_AHEAD and self._error is None:
                    self._room.wait(_POLL_S)
                if self._error is not None:
                    break
                self._undone.add(task.number)
                self._queues[task.step.action].append(task)
                self._wake(task.step.action)
        with self._lock:
            while self._undone:
                self._room.wait(_POLL_S)
        self._raise_error()

    @property
    def is_ending(self) -> bool:
        """True where a task failed, or the run was stopped: a task that waits for something outside should give up."""
        return self._closed or self._error is not None

    def stop(self, error: FlashError | None = None) -> None:
        """End the run: tasks not begun are dropped, and `run` raises `error`, or Stopped. Any thread may call it."""
        with self._lock:
            self._fail(error or Stopped("the run was stopped"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._closed = True
            self._fail(Stopped("the run has ended"))
            for ready in self._ready.values():
                ready.notify()
        patience = _PATIENCE_S if isinstance(error, KeyboardInterrupt) else None
        for worker in self._workers:
            worker.join(patience)

    def _serve(self, action: Action) -> None:
        queue = self._queues[action]
        while True:
            with self._lock:
                while not (self._closed or self._may_run(queue)):
                    self._ready[action].wait()
                if self._closed:
                    return
                task = queue.popleft()
            try:
                self._do(task)
            except BaseException as error:  # handed to the caller of `run`
                with self._lock:
                    self._fail(error)
            with self._lock:
                self._undone.discard(task.number)
                for other in Action:
                    self._wake(other)
                if len(self._undone) < _LOOK_AHEAD // 2:
                    self._room.notify()

    def _may_run(self, queue: deque[Task]) -> bool:
        return bool(queue) and self._undone.isdisjoint(queue[0].needs)

    def _wake(self, action: Action) -> None:
        """Wake the worker of `action` where its next task may run. The lock is held."""
        if self._may_run(self._queues[action]):
            self._ready[action].notify()

    def _do(self, task: Task) -> None:
        started = time.perf_counter()
        self._work(task)
        self.busy_s[task.step.action] += time.perf_counter() - started

    def _fail(self, error: BaseException) -> None:
        """Drop what has not begun; the first error is the run's. The lock is held."""
        if self._error is None:
            self._error = error
        for queue in self._queues.values():
            self._undone.difference_update(task.number for task in queue)
            queue.clear()
        self._room.notify()

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
