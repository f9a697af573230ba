"""A chat at a terminal begins quietly, and whatever signal ends it, the terminal is left as it was found."""

import errno
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest

from flashllm.base.text import kept_terminal
from flashllm.convert.named import demo_path

WAIT_S, LINES = 60, 24
PROMPT = rb"\n[^\n]*>[ \x08\x1b]"  # the space may be a movement of the cursor


class Terminal:
    """A chat in a pseudo-terminal."""

    def __init__(self, home, *, term="xterm", columns=80, leads=True, full=False, program=("-m", "flashllm")):
        """`leads`: a session of its own, whose processes cannot be stopped by the terminal. `full`: no file may have a
        byte."""
        self.parent, self.child = pty.openpty()
        termios.tcsetwinsize(self.child, (LINES, columns))
        self.before = termios.tcgetattr(self.child)
        environment = {**os.environ, "HOME": str(home), "XDG_CACHE_HOME": str(home), "TERM": term}
        environment |= {"LINES": str(LINES), "COLUMNS": str(columns)}  # of a dumb terminal, too
        environment["PROMPT_TOOLKIT_NO_CPR"] = "1"  # nobody answers for this terminal: a warning looks like an answer
        self.process = subprocess.Popen(
            ["sh", "-c", f'ulimit {"-f 0" if full else "-a > /dev/null"}; exec "$@"', "sh",
             sys.executable, *program, "chat", str(demo_path()), "--max-new-tokens", "2000"],
            stdin=self.child, stdout=self.child, stderr=self.child, env=environment, start_new_session=leads,
            process_group=None if leads else 0,
        )  # fmt: skip
        self.shown = b""

    def read_until(self, pattern):
        """Read until what is shown has `pattern` after what was read before."""
        start, left = len(self.shown), WAIT_S
        while not re.search(pattern, self.shown[start:], re.DOTALL):
            if select.select([self.parent], [], [], 0.1)[0]:
                self.shown += os.read(self.parent, 1 << 16)
            else:  # not by the clock: a machine that was stopped meanwhile is no hang
                left -= 0.1
                assert left > 0, self.shown

    def write(self, text):
        os.write(self.parent, text)

    def write_all(self, text):
        """As `write`, of what a terminal does not hold at once: another thread reads what is shown."""
        while text:
            text = text[os.write(self.parent, text) :]

    def hang_up(self):
        os.close(self.parent)
        os.close(self.child)
        self.parent = self.child = None

    def wait(self):
        """The exit status; what is still shown is read, or the process would wait for room."""
        end = time.monotonic() + WAIT_S
        while self.process.poll() is None:
            assert time.monotonic() < end, self.shown
            if select.select([self.parent], [], [], 0.05)[0]:
                self.shown += os.read(self.parent, 1 << 16)
        return self.process.returncode

    def assert_left_well(self):
        """The chat has ended, and the terminal is as it was."""
        assert self.wait() == 0
        assert b"Traceback" not in self.shown
        assert termios.tcgetattr(self.child) == self.before

    def close(self):
        self.process.kill()
        self.process.wait()
        if self.parent is not None:
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


# A chat whose quick profile takes no time: the second argument is the reason that it fails for, if any.
MEASURING = """
import sys
from types import SimpleNamespace
from flashllm.cli import main
from flashllm.commands import runtime
from flashllm.profile import quick

def measure(wanted):
    open(sys.argv[1], "w").close()
    return sys.argv[2] or None

runtime.WORTH_NBYTES, quick._run_measurer = 0, measure
runtime.dense_token = lambda *given, **named: SimpleNamespace(bytes_read=1)
sys.exit(main(sys.argv[3:]))
"""


def one_line_before_the_prompt(chat):
    chat.read_until(PROMPT)
    before = re.sub(rb"\x1b\[[?\d;]*[a-z]", b"", chat.shown).decode().replace("\r", "").split("\n> ")[0]
    assert len(before.splitlines()) == 1, before
    return before


@pytest.mark.parametrize("failure", ["", "the drive hangs"])
def test_a_quick_profile_adds_no_line(terminal, tmp_path, failure):
    measured = tmp_path / "measured"
    chat = terminal(term="dumb", columns=2000, program=("-c", MEASURING, measured, failure))
    before = one_line_before_the_prompt(chat)
    assert measured.exists()
    assert (f"typical figures are used: {failure}" in before) == bool(failure)


def test_a_quick_profile_is_shown_while_it_is_taken(terminal, tmp_path):
    chat = terminal(columns=200, program=("-c", MEASURING, tmp_path / "measured", ""))
    chat.read_until(rb"loading demo: measuring this drive for a few seconds")
    chat.read_until(PROMPT)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT])
def test_a_signal_that_ends_the_chat(terminal, number):
    """In an answer, or at the prompt."""
    chat = terminal()
    chat.read_until(PROMPT)
    if number == signal.SIGTERM:
        chat.write(b"Once upon a time\r")
        chat.read_until(rb"Once upon a time.*[a-z]{3,} [a-z]{2,} [a-z]{2,}")
    chat.process.send_signal(number)
    assert chat.wait() == -number
    assert termios.tcgetattr(chat.child) == chat.before
    assert b"\x1b[?25h" in chat.shown[-40:]  # the cursor is seen


def test_every_signal_that_ends_a_process_is_seen_to():
    numbers = signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU
    before = [signal.getsignal(number) for number in numbers]
    parent, child = pty.openpty()
    with kept_terminal(child):
        assert not {signal.SIG_DFL, *before} & {signal.getsignal(number) for number in numbers}
    assert [signal.getsignal(number) for number in numbers] == before
    os.close(parent)
    os.close(child)


def test_a_dumb_terminal(terminal):
    """With one line before the prompt, which has the notices: the demo's is that it proves nothing."""
    chat = terminal(term="dumb", columns=2000)
    before = one_line_before_the_prompt(chat)
    assert "proves nothing" in before
    assert before.endswith("ends")
    chat.write(b"Once\r")
    chat.read_until(rb"Once.*[a-z]{3,} [a-z]{2,}")
    chat.process.send_signal(signal.SIGINT)  # as ctrl-C does
    chat.read_until(rb"stopped.*" + PROMPT)
    chat.write(b"/quit\r")
    chat.assert_left_well()


def test_a_chat_that_is_stopped_and_goes_on(terminal):
    """At the prompt, then in an answer; on a narrow terminal."""
    chat = terminal(leads=False, columns=20)
    chat.read_until(PROMPT)
    during = termios.tcgetattr(chat.child)
    _stopped(chat)
    chat.read_until(rb">")  # drawn again
    assert termios.tcgetattr(chat.child) == during
    chat.write(b"Once upon a time\r")
    chat.read_until(rb"Once upon a time.*[a-z]{3,} [a-z]{2,} [a-z]{2,}")
    _stopped(chat)
    chat.read_until(rb"[a-z]{2,} [a-z]{2,}")
    chat.process.send_signal(signal.SIGINT)
    chat.read_until(rb"stopped.*" + PROMPT)
    chat.write(b"\x04")
    chat.assert_left_well()


def _stopped(chat):
    """The chat is stopped, and goes on."""
    assert termios.tcgetattr(chat.child) != chat.before
    chat.process.send_signal(signal.SIGTSTP)
    end = time.monotonic() + WAIT_S
    while Path(f"/proc/{chat.process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < end
        time.sleep(0.01)
    assert termios.tcgetattr(chat.child) == chat.before  # what a shell's user would type on
    chat.process.send_signal(signal.SIGCONT)


def test_a_large_paste_invalid_text_and_a_full_disk(terminal):
    """One after the other, in one chat, on a disk that takes nothing."""
    chat = terminal(full=True)
    chat.read_until(PROMPT)
    chat.write(b"a\xff\xfe\xc3 dog\r")
    chat.read_until(b"history is not saved.*" + os.strerror(errno.EFBIG).encode())
    chat.read_until(rb"[a-z]{3,} [a-z]{2,}")
    chat.process.send_signal(signal.SIGINT)
    chat.read_until(rb"stopped.*" + PROMPT)
    paste = b"\x1b[200~" + b"a line of text\n" * 7000 + b"\x1b[201~\r"  # 105 kB
    writer = threading.Thread(target=chat.write_all, args=(paste,))
    writer.start()
    chat.read_until(rb"context.*" + PROMPT)
    writer.join()
    chat.write(b"/quit\r")
    chat.assert_left_well()


def test_a_terminal_that_is_gone(terminal):
    chat = terminal()
    chat.read_until(PROMPT)
    chat.hang_up()
    end = time.monotonic() + WAIT_S
    while chat.process.poll() is None:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert chat.process.returncode in (0, 1, -signal.SIGHUP)
