"""Whatever signal ends a chat at a terminal, the terminal is left as it was found."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time

import pytest

from flashllm.convert.locate import demo_path

WAIT_S = 60
PROMPT = rb"\n[^\n]*>[ \x08\x1b]"  # the space may be a movement of the cursor


class Terminal:
    """A chat in a pseudo-terminal."""

    def __init__(self, home, *, term="xterm", columns=80):
        self.parent, self.child = pty.openpty()
        termios.tcsetwinsize(self.child, (24, columns))
        self.before = termios.tcgetattr(self.child)
        environment = {**os.environ, "HOME": str(home), "XDG_CACHE_HOME": str(home), "TERM": term}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "flashllm", "chat", str(demo_path()), "--max-new-tokens", "2000"],
            stdin=self.child, stdout=self.child, stderr=self.child, env=environment, start_new_session=True,
        )  # fmt: skip
        self.shown = b""

    def read_until(self, pattern):
        """Read until what is shown has `pattern` after what was read before."""
        start, end = len(self.shown), time.monotonic() + WAIT_S
        while not re.search(pattern, self.shown[start:], re.DOTALL):
            assert time.monotonic() < end, self.shown
            if select.select([self.parent], [], [], 0.1)[0]:
                self.shown += os.read(self.parent, 1 << 16)

    def write(self, text):
        os.write(self.parent, text)

    def wait(self):
        """The exit status; what is still shown is read, or the process would wait for room."""
        end = time.monotonic() + WAIT_S
        while self.process.poll() is None:
            assert time.monotonic() < end, self.shown
            if select.select([self.parent], [], [], 0.05)[0]:
                self.shown += os.read(self.parent, 1 << 16)
        return self.process.returncode

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.parent)
        os.close(self.child)


@pytest.fixture
def terminal(tmp_path):
    made = []

    def make(**options):
        made.append(Terminal(tmp_path, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT], ids=lambda number: number.name)
@pytest.mark.parametrize("when", ["at the prompt", "in an answer"])
def test_a_signal_that_ends_the_chat(terminal, when, number):
    chat = terminal()
    chat.read_until(PROMPT)
    if when == "in an answer":
        chat.write(b"Once upon a time\r")
        chat.read_until(rb"Once upon a time.*[a-z]{3,} [a-z]{2,} [a-z]{2,}")
    chat.process.send_signal(number)
    assert chat.wait() == -number
    assert termios.tcgetattr(chat.child) == chat.before
    assert b"\x1b[?25h" in chat.shown[-40:]  # the cursor is seen


def test_ctrl_d_leaves_the_terminal_as_it_was(terminal):
    chat = terminal()
    chat.read_until(PROMPT)
    chat.write(b"\x04")
    assert chat.wait() == 0
    assert termios.tcgetattr(chat.child) == chat.before


@pytest.mark.parametrize("options", [{"term": "dumb"}, {"columns": 20}], ids=["dumb", "20 columns"])
def test_poor_terminals(terminal, options):
    chat = terminal(**options)
    chat.read_until(PROMPT)
    chat.write(b"Once\r")
    chat.read_until(rb"Once.*[a-z]{3,} [a-z]{2,}")
    chat.process.send_signal(signal.SIGINT)  # as ctrl-C does
    chat.read_until(rb"stopped.*" + PROMPT)
    chat.write(b"/quit\r")
    assert chat.wait() == 0
    assert b"Traceback" not in chat.shown
    assert termios.tcgetattr(chat.child) == chat.before
