import io

import pytest

from flashllm.base.progress import ProgressBar


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_without_a_terminal_only_a_final_line():
    stream = io.StringIO()
    with ProgressBar("verify", file=stream) as bar:
        for done in range(0, 2001, 500):
            bar("a.safetensors", done * 1000, 2_000_000)
        assert stream.getvalue() == ""
    assert stream.getvalue().startswith("verify: 2 MB in ")
    assert stream.getvalue().count("\n") == 1


def test_work_that_never_reports_says_nothing():
    for stream in (io.StringIO(), Terminal()):
        with ProgressBar("verify", file=stream):
            pass
        assert stream.getvalue() == ""


def test_a_failure_has_no_final_line():
    stream = io.StringIO()

    def fail():
        with ProgressBar("convert", file=stream) as bar:
            bar("x", 1, 2)
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        fail()
    assert stream.getvalue() == ""


def test_at_a_terminal_the_bar_shows_amount_percentage_and_file(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    stream = Terminal()
    with ProgressBar("convert", file=stream) as bar:
        bar("ffn.safetensors", 0, 4_000_000)
        bar("ffn.safetensors", 4_000_000, 4_000_000)
    text = stream.getvalue()
    assert "ffn.safetensors" in text
    assert "4 MB of 4 MB" in text
    assert "100%" in text
    assert text.splitlines()[-1].startswith("convert: 4 MB in ") or "convert: 4 MB in " in text.rpartition("\x1b[2K")[2]


def test_names_cannot_command_the_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    with ProgressBar("verify", file=stream) as bar:
        bar("[red]x[/red]\x1b]0;owned\x07\ny", 1, 1)
    assert "\x1b]0" not in stream.getvalue()
    assert "[red]x[/red]]0;owned y" in stream.getvalue()


@pytest.mark.parametrize("width", ["20", "1", "40"])
def test_narrow_terminals_get_one_line(monkeypatch, width):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", width)
    stream = Terminal()
    with ProgressBar("verify", file=stream) as bar:
        bar("a-rather-long-file-name.safetensors", 5, 10)
        drawn = stream.getvalue()
    assert "\n" not in drawn


@pytest.mark.parametrize(("done", "total"), [(0, 0), (5, 3), (0, 10)])
def test_odd_totals_do_not_break_the_work(done, total):
    stream = Terminal()
    with ProgressBar("x", unit="tokens", file=stream) as bar:
        bar("", done, total)
    assert f"x: {done} tokens in " in stream.getvalue()


def test_repeated_calls_are_drawn_rarely():
    stream = Terminal()
    with ProgressBar("x", file=stream) as bar:
        bar("", 0, 10**6)
        size = len(stream.getvalue())
        for done in range(1000):
            bar("", done, 10**6)
        assert len(stream.getvalue()) <= 20 * max(size, 1)


def test_a_closed_stream_is_no_terminal():
    stream = Terminal()
    bar = ProgressBar("x", file=stream)
    stream.close()
    bar("", 1, 2)
