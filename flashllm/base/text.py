"""Text that is safe to show: what a model, a file name or an error says must never command the terminal.

Knows no colours and no layout.
"""

import contextlib
import io
import os
import re
import signal
import sys
import termios
from collections.abc import Iterator
from types import FrameType
from typing import TextIO

# Everything a terminal may obey: C0 but newline and tab, DEL, C1, and surrogates, which no encoder can print. Of an
# escape sequence the letters remain, without effect: a sequence split over two tokens could not be recognised whole.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_MAX_LINE = 2000  # characters of an error message
_PLAIN_SCREEN = b"\x1b[?2004l\x1b[?25h\x1b[0m\r\n"  # no bracketed paste, a cursor, no colour
# What ends a process that does not know it, and comes from others.
_ENDING_SIGNALS = tuple(
    getattr(signal, name)
    for name in (
        *("SIGTERM", "SIGHUP", "SIGQUIT", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGVTALRM", "SIGPROF", "SIGXCPU"),
        *("SIGIO", "SIGPWR", "SIGSTKFLT"),
    )
    if hasattr(signal, name)
)


def inert(text: str) -> str:
    """`text` without control characters, newline and tab excepted."""
    return _UNSAFE.sub("", text)


def one_line(text: str) -> str:
    """`text` as one inert line of bounded length, for messages."""
    line = " ".join(inert(text).split())
    return line if len(line) <= _MAX_LINE else line[: _MAX_LINE - 1] + "…"


def valid_unicode(text: str) -> str:
    """`text` (an argument, typed text) with U+FFFD for the surrogates that Python keeps for undecodable bytes."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def is_terminal(stream: TextIO) -> bool:
    """True where `stream` is a terminal. A closed stream is none."""
    return not stream.closed and stream.isatty()


class _Messages(io.TextIOWrapper):
    """Standard error that drops what cannot be written: a message that nobody can be told ends no work."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError:
            silence(self.fileno())
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError:
            silence(self.fileno())


def silence(fd: int) -> None:
    """Point `fd` at nothing, so that the interpreter's last flush does not fail in turn."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, fd)
    os.close(null)


def prepare_streams() -> None:
    """Give the process three standard streams that never raise for a character their encoding lacks.

    A stream closed by the caller (`2>&-`) is opened to nowhere: otherwise the next file opened would get its number.
    A full disk behind standard error loses messages and nothing else.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  # for the process's life
    if sys.stderr is sys.__stderr__ and type(sys.stderr) is io.TextIOWrapper:
        encoding = sys.stderr.encoding
        sys.stderr.flush()
        sys.stderr = _Messages(sys.stderr.detach(), encoding=encoding, errors="replace", line_buffering=True)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


@contextlib.contextmanager
def hidden_keys(fd: int) -> Iterator[None]:
    """Keep keys typed during the block out of its output; the prompt shows them afterwards."""
    if not os.isatty(fd):
        yield
        return
    before, hidden = termios.tcgetattr(fd), termios.tcgetattr(fd)
    hidden[3] &= ~termios.ECHO
    termios.tcsetattr(fd, termios.TCSADRAIN, hidden)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


@contextlib.contextmanager
def kept_terminal(fd: int) -> Iterator[None]:
    """Leave the terminal as it was also where a signal ends the process during the block, or stops it for a while. For
    the main thread. SIGKILL, SIGSTOP and faults leave it as it is."""
    if not os.isatty(fd):
        yield
        return
    before = termios.tcgetattr(fd)

    def leave() -> None:
        with contextlib.suppress(OSError, termios.error):  # the terminal may be gone: SIGHUP
            termios.tcsetattr(fd, termios.TCSANOW, before)
            os.write(sys.stdout.fileno(), _PLAIN_SCREEN)

    def end(number: int, frame: FrameType | None) -> None:
        leave()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def pause(number: int, frame: FrameType | None) -> None:
        during = before
        with contextlib.suppress(OSError, termios.error):
            during = termios.tcgetattr(fd)
        end(number, frame)  # returns once SIGCONT came
        signal.signal(number, pause)
        with contextlib.suppress(OSError, termios.error):
            termios.tcsetattr(fd, termios.TCSANOW, during)
        os.kill(os.getpid(), signal.SIGWINCH)  # a prompt draws itself again

    mine = {**dict.fromkeys(_ENDING_SIGNALS, end), signal.SIGTSTP: pause}
    handlers = {number: signal.signal(number, handler) for number, handler in mine.items()
                if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)}  # fmt: skip
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
