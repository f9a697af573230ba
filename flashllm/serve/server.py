"""The listening socket, its connections, and uvicorn with our way of stopping: at a signal every answer ends, within a
second.

Connections are fewer than the descriptors there are. One whose request does not come within HEADERS_S is closed, and
one that does not read its answer; where there is no room for a new one, the longest of those that wait for a request
makes it.
"""

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Generator
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from flashllm.base.command_line import say
from flashllm.errors import UsageError
from flashllm.plan.requests import CONNECTIONS

HEADERS_S = 10.0  # from a connection, or an answer, to a request's complete headers
_STOP_S = 1  # what connections get to close by themselves
_ANSWER_READ_S = 60.0  # for what of an answer waits to be read
_READ_NBYTES = 64 << 10  # of a connection at once
_SPARE_DESCRIPTORS = 64  # for files of the model, conversations, and connections that are being closed
_ACCEPTED = 16  # connections at once
_RETRY_S = 1.0  # after a connection that could not be accepted
_SWITCH_S = 5e-4  # until a thread lets others use Python: the one that computes wants it briefly, and often
_QUIET_S = 60.0  # between two lines of a kind
_WORDS = {"Invalid HTTP request received.": "a connection sent what is no HTTP request; it was answered 400"}


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; port 0: one that is free. UsageError where that cannot be."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise UsageError(f"--host {host} is no address of this machine: {error.strerror}") from error
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise UsageError(f"port {port} of {host} cannot be used: {error.strerror}; choose another --port") from error
    return sock


def url(sock: socket.socket) -> str:
    """The address at which the server can be reached."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Lines(logging.Handler):
    """Logs of uvicorn and asyncio in our words: a line of a kind a minute."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._said: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def emit(self, record: logging.LogRecord) -> None:
        error = f" ({record.exc_info[0].__name__})" if record.exc_info and record.exc_info[0] else ""
        self.say(_WORDS.get(record.msg, f"the web server: {record.getMessage().splitlines()[0][:200]}{error}"))

    def say(self, line: str) -> None:
        """Say `line`, unless it was said a moment ago."""
        now = time.monotonic()
        if now - self._said.get(line, -_QUIET_S) < _QUIET_S:
            self._left_out[line] = self._left_out.get(line, 0) + 1
            return
        more = self._left_out.pop(line, 0)
        self._said[line] = now
        say(f"{line}; {more} more since the last such line" if more else line)


class _Connection(H11Protocol):
    """A connection, which must not wait for a request for long."""

    def __init__(self, server: "Server") -> None:
        super().__init__(server.config, server.server_state, {})
        self._server = server
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.max_size = _READ_NBYTES  # type: ignore[attr-defined]
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_wait()
        self._is_read()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._end_wait()

    def on_response_complete(self) -> None:
        self._await_request()
        super().on_response_complete()
        if not self.cycle.response_complete:  # the next request had come before
            self._end_wait()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(_ANSWER_READ_S, self.give_up)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._is_read()

    def _is_read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()

    def give_up(self) -> None:
        """Close the connection, whatever is under way."""
        self._end_wait()
        self.connections.discard(self)
        self.transport.abort()

    def _overdue(self) -> None:
        if self.transport.get_write_buffer_size():  # it still reads its answer
            self.transport.close()
            self._deadline = self.loop.call_later(_ANSWER_READ_S, self.give_up)
        else:
            self.give_up()

    def _await_request(self) -> None:
        self._end_wait()
        self._server.waiting[self] = None
        self._deadline = self.loop.call_later(HEADERS_S, self._overdue)

    def _end_wait(self) -> None:
        self._server.waiting.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()

    def _unsupported_upgrade_warning(self) -> None:
        """The request is answered as if it had not asked for another protocol: nobody needs to know."""


class Server(uvicorn.Server):
    """Serves until it is told to stop, by a signal or `stop`. The signals do nothing else."""

    def __init__(self, app: Any, *, stopping: Callable[[], None], waiting: int = 0) -> None:
        """`stopping` is called first, so that no answer keeps its connection; it must return at once.

        `waiting`: requests that may wait, each with a connection.
        """
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,  # no line a request: requests' texts are private
                access_log=False,
                ws="none",
                lifespan="off",
                http=_Connection,
                server_header=False,
                timeout_graceful_shutdown=_STOP_S,
            )
        )
        self._stopping = stopping
        self._wanted = CONNECTIONS + waiting
        self._most = self._wanted
        self._lines = _Lines()
        self._socket: socket.socket | None = None
        self._accepting: set[asyncio.Task[Any]] = set()
        self.waiting: dict[_Connection, None] = {}  # for a request, the longest first

    def stop(self) -> None:
        """End `run`, from any thread."""
        self._stopping()
        self.should_exit = True

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, on one socket."""
        loggers = [logging.getLogger(name) for name in ("uvicorn.error", "asyncio")]
        for logger in loggers:
            logger.addHandler(self._lines)
        before = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)
        try:
            await super().serve(sockets)
        finally:
            sys.setswitchinterval(before)
            for logger in loggers:
                logger.removeHandler(self._lines)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections ourselves: asyncio's way writes a traceback for each that fails, and tries at once."""
        await self.lifespan.startup()
        assert sockets is not None
        (self._socket,) = sockets
        self._socket.setblocking(False)
        self._socket.listen(self.config.backlog)
        limit, used = resource.getrlimit(resource.RLIMIT_NOFILE)[0], len(os.listdir("/dev/fd"))
        if limit != resource.RLIM_INFINITY:
            self._most = max(1, min(self._wanted, limit - used - _SPARE_DESCRIPTORS))
        self.servers = []
        self._listen()
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's."""
        self._pause()
        await super().shutdown(sockets)

    def _listen(self) -> None:
        if self._socket is not None and not self.should_exit:
            asyncio.get_running_loop().add_reader(self._socket, self._accept)

    def _pause(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)

    def _accept(self) -> None:
        assert self._socket is not None
        loop = asyncio.get_running_loop()
        for _ in range(_ACCEPTED):
            try:
                connection, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._lines.say(f"a connection could not be accepted: {error.strerror}")
                self._pause()
                loop.call_later(_RETRY_S, self._listen)
                return
            if not self._has_room():
                self._lines.say(f"{self._most} connections are being answered; others are closed")
                connection.close()
                continue
            connection.setblocking(False)
            task = loop.create_task(loop.connect_accepted_socket(lambda: _Connection(self), connection))
            self._accepting.add(task)
            task.add_done_callback(self._accepted)

    def _accepted(self, task: "asyncio.Task[Any]") -> None:
        self._accepting.discard(task)
        if not task.cancelled():
            task.exception()  # a connection that is gone already

    def _has_room(self) -> bool:
        """True where another connection may be: where it is needed, the one that waits longest for a request goes."""
        if len(self.server_state.connections) + len(self._accepting) < self._most:
            return True
        longest = next(iter(self.waiting), None)
        if longest is not None:
            longest.give_up()
        return longest is not None

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """As uvicorn's, but for raising the signals again at the end: the caller closes what it has opened."""
        handlers = {}
        with contextlib.suppress(ValueError):  # not the main thread: no signals
            handlers = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: Any) -> None:
        self.force_exit = self.should_exit  # the second one waits for nothing
        self.stop()
