"""What a template computes it computes in a process apart: it takes neither this one with it nor more than it may."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from chat_templates import BOMBS, FAMILIES, FEATURES

from flashllm.base.processes import beside_nbytes
from flashllm.errors import FlashError, FormatError, UsageError
from flashllm.generate.templates import renderer as apart
from flashllm.generate.templates.chat_template import ChatTemplate

USER = {"role": "user", "content": "Hello"}
PLAIN = "{% for m in messages %}{{ m.content }};{% endfor %}"
CONVERSATIONS = [
    [{"role": "user", "content": ' Hi <b> & é "you" 日本 🙂\r\n\n{{ 1 }} '}],
    [
        {"role": "system", "content": "Be\nbrief. /no_think"},
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nTwo "},
        {"role": "user", "content": "Three"},
    ],
    [{"role": "user", "content": "One"}, {"role": "assistant", "content": ""}],
]


@pytest.fixture
def template():
    with ChatTemplate(PLAIN, "dir") as opened:
        opened.check()
        yield opened


def pid_of(template):
    return template._renderer._child.process.pid


def is_gone(pid):
    return not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("family", FAMILIES)
def test_usual_templates_render_as_transformers_renders_them(theirs, warm, family):
    ours = ChatTemplate(FAMILIES[family], "here", theirs.special_tokens_map, renderer=warm)
    for messages in CONVERSATIONS:
        for ask in (True, False):
            expected = theirs.apply_chat_template(
                messages, tokenize=False, chat_template=FAMILIES[family], add_generation_prompt=ask
            )
            assert ours.render(messages, values={"add_generation_prompt": ask}) == expected


@pytest.mark.parametrize("feature", FEATURES)
def test_what_templates_are_made_of_renders_as_in_transformers(theirs, warm, feature):
    arguments = {"city": 'Łódź <b> "a"', "deep": {"on": True, "no": None, "many": [1, "2"]}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": arguments}}]},
        {"role": "tool", "content": "3 & 4"},
        {"role": "tool", "content": "5"},
    ]
    ours = ChatTemplate(FEATURES[feature], "here", theirs.special_tokens_map, renderer=warm)
    expected = theirs.apply_chat_template(messages, tokenize=False, chat_template=FEATURES[feature])
    assert ours.render(messages) == expected
    assert expected or feature == "refusals"


@pytest.mark.parametrize("bomb", BOMBS, ids=range(len(BOMBS)))
def test_a_bomb_renders_small_or_is_an_error(monkeypatch, warm, bomb):
    template = ChatTemplate(bomb, "dir", renderer=warm)
    began = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(apart, "LIMIT_S", 0.1)  # less, for the tests' sake
        try:
            said = f"small: {len(template.render([USER]))} characters"
        except (FormatError, UsageError) as error:
            said = str(error)
    assert len(said) < 1200
    assert said.startswith(("dir: the chat template", "the model's chat template refuses", "small"))
    assert time.monotonic() - began < 2 + apart._START_S  # a new process may have to begin, on a busy machine
    assert ChatTemplate(PLAIN, "dir", renderer=warm).render([USER]) == "Hello;"


def test_the_limits_as_they_are():
    with ChatTemplate(BOMBS[57], "dir") as template:
        assert "99999999999999999999" in BOMBS[57]
        template.check()
        with pytest.raises(FormatError, match=r"dir: the chat template failed: it takes longer than 1\.5 s"):
            template.render([USER])
    with ChatTemplate(BOMBS[0], "dir") as template:
        template.check()
        with pytest.raises(FormatError, match="dir: the chat template failed: it takes more than 32 MB of memory"):
            template.render([USER])


def test_nothing_goes_off_while_a_template_is_compiled(monkeypatch):
    with ChatTemplate("{{ 3 ** (3 ** 16) % 10 }}" * 50, "dir") as template:
        template.check()
        monkeypatch.setattr(apart, "LIMIT_S", 0.3)
        with pytest.raises(FormatError, match=r"failed: it takes longer than 0\.3 s"):
            template.render([USER])
    monkeypatch.setattr(apart, "COMPILE_S", 0.01)
    with (
        ChatTemplate(FAMILIES["gpt-oss"] * 50, "dir") as template,
        pytest.raises(FormatError, match=r"longer than 0\.3 s, or than 0\.01 s to compile"),
    ):
        template.check()


def test_a_text_without_measure(template):
    longest = "a" * (apart.MAX_NBYTES - 1)
    assert template.render([{"content": longest}]) == longest + ";"
    with pytest.raises(FormatError, match="its text is longer than 8000000 bytes"):
        template.render([{"content": longest + "a"}])


def test_text_that_is_no_text_comes_back_as_it_was(template):
    odd = "\ud800 \ud83d\ude00 \x00 \u2028 é"
    assert template.render([{"content": odd}]) == odd + ";"


def test_a_large_template_has_more_time_to_be_compiled():
    large = "{% if messages | length > 99 %}" + FAMILIES["gpt-oss"] * 12 + "{% endif %}ok"  # of any real one's size
    assert len(large) > 25_000
    with ChatTemplate(large, "dir") as template:
        assert template.render([USER]) == "ok"
        os.kill(pid_of(template), signal.SIGKILL)
        template._renderer._child.process.wait()
        assert template.render([USER]) == "ok"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_process_that_is_killed_is_replaced(template, number):
    first = pid_of(template)
    os.kill(first, number)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    assert template.render([USER]) == "Hello;"  # it was idle: nobody need know
    assert pid_of(template) != first
    assert is_gone(first)


def test_a_process_that_dies_or_stands_still_over_a_request(monkeypatch, template):
    monkeypatch.setattr(apart, "LIMIT_S", 0.5)
    first = pid_of(template)
    os.kill(first, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(FlashError, match="gave no answer"):
        template.render([USER])
    assert time.monotonic() - began < 5
    assert is_gone(first)
    second = pid_of(template)
    assert template.render([USER]) == "Hello;"
    os.kill(second, signal.SIGSTOP)
    timer = threading.Timer(0.2, os.kill, (second, signal.SIGKILL))
    timer.start()
    with pytest.raises(FlashError, match="gave no answer"):
        template.render([USER])
    timer.join()
    assert template.render([USER]) == "Hello;"


def test_an_interrupted_request_leaves_no_answer_behind():
    slow = "{% if messages[0].content == 'slow' %}{% for i in range(60000) %}{% endfor %}{% endif %}" + PLAIN
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)  # ctrl-C, at a time of its own
    try:
        with ChatTemplate(slow, "dir") as template:
            for delay_s in (0.0005, 0.001, 0.003, 0.01):
                template.check()
                with pytest.raises(KeyboardInterrupt):  # noqa: PT012
                    signal.setitimer(signal.ITIMER_REAL, delay_s)
                    while True:
                        template.render([{"content": "slow"}])
                assert template.render([USER]) == "Hello;"
    finally:
        signal.signal(signal.SIGALRM, before)


def test_one_that_cannot_be_started(monkeypatch, template):
    template.close()
    with pytest.raises(FlashError, match="the chat template is closed"):
        template.render([USER])
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/nowhere/python")
        with pytest.raises(FlashError, match="cannot be started"):
            ChatTemplate(PLAIN, "dir")
        patch.setattr(sys, "executable", "/bin/false")
        template = ChatTemplate(PLAIN, "dir")
        with pytest.raises(FlashError, match="gave no answer"):
            template.render([USER])
        template._renderer._child.process.wait()
    assert template.render([USER]) == "Hello;"
    template.close()


def test_closing_ends_the_process_also_in_the_midst_of_a_bomb():
    before = beside_nbytes()
    template = ChatTemplate(BOMBS[57], "dir")
    template.check()
    assert beside_nbytes() - before > 32_000_000  # which the plan of a model's memory counts
    pid = pid_of(template)
    failed = []

    def render():
        try:
            template.render([USER])
        except FlashError as error:
            failed.append(error)

    thread = threading.Thread(target=render)
    thread.start()
    time.sleep(0.2)
    began = time.monotonic()
    template.close()
    assert time.monotonic() - began < 1
    thread.join()
    assert len(failed) == 1
    assert is_gone(pid)
    assert beside_nbytes() == before


def test_one_that_is_forgotten_ends_too():
    template = ChatTemplate(PLAIN, "dir")
    pid = pid_of(template)
    del template
    assert is_gone(pid)


def test_threads_take_turns(template):
    wrong = []

    def render(text):
        for _ in range(20):
            if template.render([{"content": text}]) != text + ";":
                wrong.append(text)

    threads = [threading.Thread(target=render, args=(str(number) * 1000,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


FORK = """
import os, sys, time
from flashllm.errors import UsageError
from flashllm.generate.templates.chat_template import ChatTemplate
template = ChatTemplate("{{ messages | length }}", "dir")
template.check()
child = os.fork()
if child == 0:
    template.close()
    try:
        template.render([])
    except UsageError as error:
        os.write(1, f"{os.getpid()} {template._renderer._child.process.pid} {error}\\n".encode())
    time.sleep(60)  # lives on, and holds what it was given
    sys.exit()
assert template.render([{}]) == "1"
os.waitpid(child, 0)
assert template.render([{}]) == "1"
template.close()
"""


@pytest.mark.parametrize("killed", [False, True])
def test_a_forked_process_neither_uses_it_nor_keeps_it_alive(killed):
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        forked, rendering, said = process.stdout.readline().split(" ", 2)
        try:
            assert "forked from the one that loaded the model" in said
            assert not ended(rendering)
            if killed:
                process.kill()  # while the forked one lives
                process.wait()
                assert not ended(forked)
                deadline = time.monotonic() + 10
                while not ended(rendering) and time.monotonic() < deadline:
                    time.sleep(0.02)
        finally:
            os.kill(int(forked), signal.SIGKILL)
        assert process.wait(timeout=20) == (-signal.SIGKILL if killed else 0)
        assert ended(rendering)


def ended(pid):
    """Whether it is gone, or waits for an init that this machine may not have."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
