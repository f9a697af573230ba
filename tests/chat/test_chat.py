"""The conversation, the plain lines and the keys, over a session of our own; and plain lines over a real tiny model."""

import errno
import io
import os
import pty
import stat
import termios
import threading

import pytest
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console

from flashllm.base.text import hidden_keys, inert, one_line, valid_unicode
from flashllm.chat import terminal as chat_terminal
from flashllm.chat.conversation import COMMANDS, Chat, Memory
from flashllm.chat.history import SafeHistory, open_history
from flashllm.chat.plain import run_plain
from flashllm.chat.terminal import TerminalChat
from flashllm.engine.meter import StepTimes
from flashllm.errors import ContextFull, FlashIOError
from flashllm.generate.session import PrefillRecord, TokenRecord


def times(**values):
    fields = dict.fromkeys(("io_ms", "memory_ms", "compute_ms", "other_ms", "total_ms", "io_busy_ms"), 0.0)
    fields |= dict.fromkeys(("bytes_read", "requests", "retries", "active", "hits", "misses"), 0)
    return StepTimes(**{**fields, **values})


class FakeSession:
    """Answers a turn with "<turn>" in capitals, a character a token; a turn costs its characters and the answer's."""

    def __init__(self, context_limit=1000, has_chat_template=False, answers=None):
        self.context_limit = context_limit
        self.has_chat_template = has_chat_template
        self.messages, self.system, self.stopped, self.tokens = [], None, None, []
        self.turns, self.closed = [], 0
        self.answers = answers or {}

    def reset(self):
        self.tokens, self.messages = [], []

    def stream_chat(self, user_text):
        if len(self.tokens) + len(user_text) > self.context_limit:
            raise ContextFull(f"the context limit of {self.context_limit} tokens is reached")
        self.turns.append(user_text)
        self.tokens = [*self.tokens, *range(len(user_text))]
        self.stopped = None
        try:
            yield PrefillRecord(
                tokens=len(user_text), reused_tokens=0, dense=True, times=times(total_ms=50.0, compute_ms=50.0)
            )
            answer = self.answers.get(user_text, user_text.upper())
            if isinstance(answer, BaseException):
                yield TokenRecord(token_id=0, text="so f", times=times(total_ms=1.0))
                raise answer
            for index, text in enumerate(answer):
                self.tokens = [*self.tokens, index]
                if len(self.tokens) >= self.context_limit:
                    self.stopped = "context"
                yield TokenRecord(
                    token_id=index,
                    text=text,
                    times=times(total_ms=100.0, io_ms=60.0, compute_ms=40.0, bytes_read=4096, hits=9, misses=1),
                )
                if self.stopped:
                    return
            self.stopped = "eos"
        finally:
            self.closed += 1


def make_chat(**session):
    memory, nothing = Memory(used=412_000_000, limit=7_000_000_000), lambda given: None
    return Chat(FakeSession(**session), lambda: memory, direct_io=True, shelf=None, keep_to=nothing, watch=nothing)


def plain(chat, text):
    out, err = io.StringIO(), io.StringIO()
    raw = text if isinstance(text, bytes) else text.encode()
    status = run_plain(chat, io.BytesIO(raw), out, err)
    return status, out.getvalue(), err.getvalue()


# Inert text.


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain \t\n", "plain \t\n"),
        ("\x1b[31mred\x1b]0;title\x07", "[31mred]0;title"),
        ("a\rb\bc\x00\x7f\x9b2J\x85", "abc2J"),
        ("é 漢 🙂 \u2028", "é 漢 🙂 \u2028"),
        ("\ud800x\udcff", "x"),
    ],
)
def test_inert_text_has_no_controls(text, shown):
    assert inert(text) == shown


def test_messages_are_one_bounded_line():
    assert one_line("a\nb\x1b[0m\r\n c") == "a b[0m c"
    assert len(one_line("x" * 10**6)) == 2000
    assert valid_unicode("a\udcffb") == "a\ufffdb"


# The conversation.


def test_an_answer_is_inert_counted_and_remembered():
    chat = make_chat(answers={"hi": ["A", "\x1b", "", "[0m\rB"]})
    assert "".join(chat.answer("hi")) == "A[0mB"
    assert chat.transcript == [("user", "hi"), ("model", "A\x1b[0m\rB")]
    assert chat.stats.num_tokens == 4
    assert chat.stats.tokens_per_s == pytest.approx(10)
    assert chat.stats.hit_rate == pytest.approx(0.9)
    assert chat.stats.first_token_ms == pytest.approx(150)


def test_stopping_an_answer_closes_the_sessions_stream_and_keeps_what_was_said():
    chat = make_chat()
    pieces = chat.answer("abc")
    assert next(pieces) == "A"
    pieces.close()
    assert chat.session.closed == 1
    assert chat.transcript == [("user", "abc"), ("model", "A")]


def test_a_turn_that_does_not_fit_changes_nothing():
    chat = make_chat(context_limit=3)
    with pytest.raises(ContextFull):
        list(chat.answer("abcd"))
    assert chat.transcript == []
    assert chat.session.tokens == []


def test_greeting_tells_the_context_and_that_a_base_model_continues():
    assert make_chat(context_limit=7).greeting() == [
        "context: 7 tokens",
        "no chat template: the model continues your text",
    ]
    assert make_chat(has_chat_template=True).greeting() == ["context: 1000 tokens"]


def test_greeting_begins_with_what_nobody_has_said_yet():
    chat = make_chat(has_chat_template=True)
    chat.notices += ["flash is read with 4 threads", "a name\x1b[31m"]
    assert chat.greeting() == ["flash is read with 4 threads", "a name[31m", "context: 1000 tokens"]


def test_unknown_commands_are_named_and_the_known_ones_listed():
    reply = make_chat().command("/frobnicate\x1b[2J now")
    assert "there is no command /frobnicate[2J" in reply
    for name in COMMANDS:
        assert name in reply
        assert name in make_chat().command("/help")
    assert make_chat().command("/").startswith("there is no command /;")


def test_reset_forgets():
    chat = make_chat()
    list(chat.answer("abc"))
    chat.command("/reset")
    assert (chat.session.tokens, chat.transcript, chat.stats.num_tokens) == ([], [], 0)


def test_system_begins_a_new_conversation_and_can_be_shown_and_removed():
    chat = make_chat()
    list(chat.answer("abc"))
    assert chat.command("/system") == "no instructions"
    assert chat.transcript
    chat.command("/system be  brief")
    assert chat.session.system == "be  brief"
    assert (chat.session.tokens, chat.transcript) == ([], [])
    assert chat.command("/system") == "instructions: be  brief"
    chat.command("/system off")
    assert chat.session.system is None


def test_stats_and_footer():
    chat = make_chat()
    before = chat.command("/stats")
    assert "412 MB of 7 GB" in before
    assert "speed" not in before
    list(chat.answer("abc"))
    text = chat.command("/stats")
    for expected in ("speed: 10.0 tokens/s", "cache hits: 90.0%", "io a token: 60.00 ms", "context: 6 of 1000 tokens"):
        assert expected in text
    footer = chat.footer(200)
    assert footer == "10.0 tokens/s · hits 90% · 412 MB of 7 GB · context 6/1000 · /help"
    for width in range(80):
        assert len(chat.footer(width)) <= width
    assert chat.footer(20).startswith("10.0 tokens/s")


def test_export_writes_once_and_never_over(tmp_path):
    chat = make_chat()
    chat.command("/system short")
    list(chat.answer("abc"))
    path = tmp_path / "with space.txt"
    assert "saved" in chat.command(f"/export {path}")
    assert path.read_text() == "system: short\n\nuser: abc\n\nmodel: ABC\n\n"
    assert "exists" in chat.command(f"/export {path}")
    assert path.read_text() == "system: short\n\nuser: abc\n\nmodel: ABC\n\n"
    for bad in ("", str(tmp_path), str(tmp_path / "no" / "dir"), "/dev/full", "a\0b", "~no-such-user/x"):
        reply = chat.command(f"/export {bad}")
        assert "saved" not in reply, bad


# Plain lines.


@pytest.mark.parametrize(
    ("lines", "answers"),
    [
        ("one\n\n  \ntwo\r\nlast", "ONE\nTWO\nLAST\n"),
        ("", ""),
        ("\n   \n", ""),
        ("silent\ntwo\n", "\nTWO\n"),
        (b"a\xff\xfe\n\xc3\n\x00\x1b[2J\n", "A\ufffd\ufffd\n\ufffd\n[2J\n"),  # invalid UTF-8, and controls
    ],
)
def test_each_line_is_a_turn_and_answers_alone_are_on_stdout(lines, answers):
    status, out, err = plain(make_chat(answers={"silent": ""}), lines)
    assert (status, out) == (0, answers)
    assert "continues your text" in err


def test_commands_in_a_pipe_answer_on_stderr():
    status, out, err = plain(make_chat(), "one\n/stats\n/nonsense\n /text\n/quit\nnever\n")
    assert (status, out) == (0, "ONE\n /TEXT\n")
    assert "speed: 10.0 tokens/s" in err
    assert "no command /nonsense" in err


def test_a_full_context_begins_anew_and_a_line_too_long_is_skipped():
    chat = make_chat(context_limit=10)
    status, out, err = plain(chat, "abcd\nefgh\n" + "x" * 100_000 + "\nij\n")
    assert (status, out) == (0, "ABCD\nEFGH\nIJ\n")
    assert "line 2 begins a new conversation: the context limit of 10 tokens is reached" in err
    assert "line 3 begins a new conversation" in err
    assert "line 3 is skipped: the context limit of 10" in err
    assert "line 4" not in err


def test_an_answer_cut_by_the_limit_is_announced():
    status, out, err = plain(make_chat(context_limit=6), "abcd\n")
    assert (status, out) == (0, "AB\n")
    assert "the context limit of 6 tokens is reached; /reset" in err


def test_a_failing_disk_ends_the_plain_run():
    out = io.StringIO()
    chat = make_chat(answers={"x": FlashIOError("bad sector")})
    with pytest.raises(FlashIOError):
        run_plain(chat, [b"x\n", b"y\n"], out, io.StringIO())
    assert out.getvalue() == "so f\n"
    assert chat.session.turns == ["x"]


# The terminal.


def run_terminal(chat, keys, tmp_path, width=80, *, drawn=False):
    out = io.StringIO()
    with create_pipe_input() as pipe:
        sender = threading.Thread(target=pipe.send_text, args=(keys,), daemon=True)  # a pipe holds 64 kB only
        sender.start()
        console = Console(file=out, width=width, force_terminal=drawn)
        terminal = TerminalChat(
            chat, history=tmp_path / "cache" / "history", console=console, input=pipe, output=DummyOutput()
        )
        status = terminal.run()
        sender.join()
    return status, out.getvalue()


def test_enter_sends_and_alt_enter_is_a_new_line(tmp_path):
    chat = make_chat()
    status, out = run_terminal(chat, "one\rtwo\x1b\rlines\r/quit\r", tmp_path)
    assert status == 0
    assert chat.session.turns == ["one", "two\nlines"]
    assert "ONE\n" in out
    assert "TWO\nLINES\n" in out


def test_a_prompt_that_takes_long_says_how_far_it_is(tmp_path):
    heard, chat = [], make_chat()

    def watch(progress):
        heard.append(progress)
        if progress is not None:
            progress(1, 4)

    chat.watch = watch
    _, out = run_terminal(chat, "one\r\x04", tmp_path, drawn=True)
    assert "reading the prompt: 25%" in out
    assert len(heard) == 2
    assert heard[1] is None


def test_ctrl_d_ends_and_ctrl_c_at_the_prompt_does_not(tmp_path):
    chat = make_chat()
    status, out = run_terminal(chat, "half\x03whole\r\x04", tmp_path)
    assert status == 0
    assert chat.session.turns == ["whole"]
    assert "ctrl-D or /quit" in out


def test_ctrl_c_stops_the_answer_and_the_chat_goes_on(tmp_path):
    chat = make_chat(answers={"long": KeyboardInterrupt()})
    _, out = run_terminal(chat, "long\rnext\r\x04", tmp_path)
    assert "so f\nstopped\n" in out
    assert "NEXT\n" in out
    assert chat.session.closed == 2


@pytest.mark.parametrize(("before", "left"), [(True, 2), (False, 0)])
def test_ctrl_c_stops_a_command_and_the_chat_goes_on(tmp_path, before, left):
    """The conversation does too, where nothing of the other one was read."""

    class Shelf:
        def load(self, name, session):
            if not before:
                session.reset()
            raise KeyboardInterrupt

    chat = make_chat()
    chat.shelf = Shelf()
    _, out = run_terminal(chat, "one\r/load other\r\x04", tmp_path)
    assert "ONE\nstopped\n" in out
    assert len(chat.transcript) == left


def test_errors_and_limits_leave_the_chat_running(tmp_path):
    chat = make_chat(context_limit=20, answers={"bad": FlashIOError("row\x1b[31m 3")})
    _, out = run_terminal(chat, "bad\r" + "x" * 30 + "\r/nope\r\rok\r\x04", tmp_path)
    assert "so f\nerror: row[31m 3\n" in out
    assert "the context limit of 20 tokens is reached" in out
    assert "there is no command /nope" in out
    assert "OK\n" in out


def test_a_large_paste_is_one_turn(tmp_path):
    chat = make_chat(context_limit=10**6, answers={})
    paste = "line of text\n" * 8000  # 104 kB
    chat.session.answers[paste] = ["ok"]
    _, out = run_terminal(chat, f"\x1b[200~{paste}\x1b[201~\r\x04", tmp_path)
    assert chat.session.turns == [paste]
    assert "ok\n" in out


def test_history_is_private_kept_and_survives_odd_text(tmp_path):
    run_terminal(make_chat(), "one\r\x04", tmp_path)
    path = tmp_path / "cache" / "history"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "+one" in path.read_text()
    SafeHistory(path, pytest.fail).store_string("lone \ud800")
    assert list(SafeHistory(path, pytest.fail).load_history_strings()) == ["lone \ufffd", "one"]


def test_a_history_that_cannot_be_kept_is_said_once_and_costs_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    said = []
    open_history(tmp_path / "file" / "history", said.append)
    assert len(said) == 1
    assert "not saved" in said[0]
    os.mkfifo(tmp_path / "fifo")
    open_history(tmp_path / "fifo", said.append)  # at once: nobody writes into it
    assert "is no regular file" in said.pop()
    if not os.path.exists("/dev/full"):
        return
    history = SafeHistory("/dev/full", said.append)
    history.append_string("a")
    history.append_string("b")
    assert len(said) == 2
    assert os.strerror(errno.ENOSPC) in said[1]
    assert history.get_strings() == ["a", "b"]


def test_keys_typed_during_work_are_not_echoed_and_the_terminal_is_restored():
    def echoes():
        return bool(termios.tcgetattr(child)[3] & termios.ECHO)

    parent, child = pty.openpty()
    try:
        assert echoes()
        with hidden_keys(child):
            assert not echoes()
        assert echoes()
    finally:
        os.close(parent)
        os.close(child)


def test_narrow_terminals(tmp_path):
    _, out = run_terminal(make_chat(), "hello\r/stats\r/help\r\x04", tmp_path, width=20)
    assert "HELLO\n" in out
    assert chat_terminal.KEYS.split()[0] in out
