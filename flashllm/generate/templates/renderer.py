"""A process apart that renders chat templates, with limits on its time and memory. Knows nothing of Jinja.

Whatever a template computes, it computes there: it can end that process and no other. The next request then
has a new one.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flashllm
from flashllm.base.processes import OneProcess
from flashllm.base.units import format_size
from flashllm.errors import FlashError
from flashllm.generate.templates.frames import LENGTH_NBYTES, MEMORY_STATUS, Kind

LIMIT_S = 1.5  # for one conversation: a long one takes a twentieth of a second
COMPILE_S = 5.0  # for the template, when the process begins: one of 20,000 characters takes a tenth of a second
GROWTH_NBYTES = 32_000_000  # of the process's address space: a text of a million characters, several times over
MAX_NBYTES = 8_000_000  # of a conversation's text
_OWN_NBYTES = 13_000_000  # of memory that the process holds alone, when it has begun
_START_S, _ANSWER_S = 20.0, 0.4  # beyond the time in which it must be there, or have answered, it is taken for dead
# The process has the paths of this one, and this package's own.
_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from flashllm.generate.templates.environment import main; main(int(sys.argv[2]))"
)


class Exceeded(Exception):
    """Rendering takes more time or memory than it may; the message says which."""


class Renderer(OneProcess):
    """The warm process, begun by `start` or by a request. `ask` from any thread, one at a time goes through."""

    beside_nbytes = _OWN_NBYTES + GROWTH_NBYTES

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._finalizer: weakref.finalize[[], Renderer] | None = None  # ends it, once
        self._closed = False

    def start(self, request: Mapping[str, Any]) -> None:
        """Begin the process where there is none; it compiles the request's template, for which nobody waits. FlashError
        where it cannot be started."""
        with self._lock, contextlib.suppress(OSError):  # that it has ended, the next request notices
            self._begin(request)

    def ask(self, request: Mapping[str, Any]) -> tuple[Kind, str]:
        """The process's answer. Exceeded where the limits end it, FlashError where anything else does."""
        self.check_process()
        data = _frame(request)
        with self._lock:
            try:
                child = self._begin(request)
                child.send(data, LIMIT_S)
                return child.answer()
            except (OSError, ValueError) as error:  # a time limit, a connection that has ended, no answer's form
                reason, status = str(error), self._end()
            except BaseException:  # ctrl-C: the next request is not to have this one's answer
                self._end()
                raise
        with contextlib.suppress(FlashError):  # the next request says it
            self.start(request)
        if status == -signal.SIGALRM:
            raise Exceeded(f"it takes longer than {LIMIT_S} s, or than {COMPILE_S} s to compile")
        if status == MEMORY_STATUS:
            raise Exceeded(f"it takes more than {format_size(GROWTH_NBYTES)} of memory")
        raise FlashError(
            f"the process that renders chat templates gave no answer ({reason}; status {status}); the next request has "
            "a new one"
        )

    def close(self) -> None:
        """End the process. Nothing is rendered any more; what is under way fails."""
        if self.in_child:
            return
        self._closed, self.beside_nbytes = True, 0
        if (child := self._child) is not None:
            child.process.kill()  # also where a thread waits for its answer, and holds the lock
        with self._lock:
            self._end()

    def forked(self) -> None:
        """In a forked process: let go of the connection, whose end is what ends the process."""
        if self._child is not None:
            self._child.channel.close()

    def _begin(self, request: Mapping[str, Any]) -> "_Child":
        """The process: the one there is, if it lives, else a new one. OSError where that ends at once."""
        if self._closed:
            raise FlashError("the chat template is closed")
        if self._child is not None and self._child.process.poll() is not None:
            self._end()
        if self._child is None:
            try:
                self._child = _Child()
            except OSError as error:
                raise FlashError(f"the process that renders chat templates cannot be started: {error}") from error
            self._finalizer = weakref.finalize(self, self._child.end)  # where it is never closed
            self._child.send(_frame({**request, "messages": None}), COMPILE_S)
        return self._child

    def _end(self) -> int | None:
        self._child = None
        return self._finalizer() if self._finalizer is not None else None


def _frame(request: Mapping[str, Any]) -> bytes:
    limits = {"limit_s": LIMIT_S, "compile_s": COMPILE_S, "max_nbytes": MAX_NBYTES}
    data = json.dumps({**request, **limits}, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return len(data).to_bytes(LENGTH_NBYTES, "little") + data


class _Child:
    """One process, and the connection to it."""

    def __init__(self) -> None:
        """OSError where it cannot be started."""
        self._owner = os.getpid()
        self._owed = deque([_START_S])  # seconds for each answer that is to come, first that it is ready
        paths = [*sys.path, str(Path(flashllm.__file__).parent.parent)]
        command = [sys.executable, "-I", "-S", "-c", _CODE, json.dumps(paths), str(GROWTH_NBYTES)]
        self.channel, theirs = socket.socketpair()
        with theirs:
            try:
                # In a group of its own: ctrl-C at a terminal is not for it.
                self.process = subprocess.Popen(
                    command,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    process_group=0,
                )
            except BaseException:
                self.channel.close()
                raise

    def send(self, data: bytes, limit_s: float) -> None:
        """Send a request, whose answer is to come within `limit_s` of the one before. OSError where it ended."""
        self.channel.settimeout(_START_S if self._owed else LIMIT_S)
        self.channel.sendall(data)
        self._owed.append(limit_s + _ANSWER_S)

    def answer(self) -> tuple[Kind, str]:
        """The answer to the last request. OSError where one does not come in time, or never will."""
        while True:
            answer = self._receive(self._owed.popleft())
            if not self._owed:
                return answer

    def end(self) -> int:
        """End the process, and return its status. In a forked process, do nothing."""
        if os.getpid() != self._owner:
            return 0
        self.channel.close()
        self.process.kill()
        return self.process.wait()

    def _receive(self, limit_s: float) -> tuple[Kind, str]:
        deadline = time.monotonic() + limit_s
        length = int.from_bytes(self._bytes(LENGTH_NBYTES, deadline), "little")
        if not 1 <= length <= MAX_NBYTES + 1:
            raise ConnectionError(f"an answer of {length} bytes")
        data = self._bytes(length, deadline)
        return Kind(chr(data[0])), data[1:].decode("utf-8", "surrogatepass")

    def _bytes(self, count: int, deadline: float) -> bytearray:
        data, at = bytearray(count), 0
        while at < count:
            self.channel.settimeout(max(deadline - time.monotonic(), 0.001))
            got = self.channel.recv_into(memoryview(data)[at:])
            if got == 0:
                raise ConnectionError("no answer")
            at += got
        return data
