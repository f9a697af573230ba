"""The listening socket, and uvicorn with our way of stopping: at a signal every answer ends, within a second."""

import contextlib
import signal
import socket
from collections.abc import Callable, Generator
from typing import Any

import uvicorn

from flashllm.errors import UsageError

_STOP_S = 1  # what connections get to close by themselves


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
    """Where the server can be reached."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """Serves until it is told to stop, by a signal or `stop`. The signals do nothing else."""

    def __init__(self, app: Any, *, stopping: Callable[[], None]) -> None:
        """`stopping` is called first, so that no answer keeps its connection; it must return at once."""
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,  # no line a request: requests' texts are private
                access_log=False,
                ws="none",
                lifespan="off",
                http="h11",
                server_header=False,
                timeout_graceful_shutdown=_STOP_S,
            )
        )
        self._stopping = stopping

    def stop(self) -> None:
        """End `run`, from any thread."""
        self._stopping()
        self.should_exit = True

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
