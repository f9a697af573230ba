"""Who may ask, and how the server starts and stops: as a process, with its port, its key, and its signals."""

import asyncio
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
from serving import running

from flashllm.cli import main
from flashllm.commands.serve import names, read_key
from flashllm.errors import UsageError
from flashllm.format.install import install_files
from flashllm.serve.server import Server, listen

KEY = b"0123456789abcdef"
SECRET = "the-secret-of-the-client"


@pytest.fixture(scope="module")
def guarded(tiny, model):
    options = {"key": KEY, "hosts": frozenset({"localhost"}), "origins": frozenset({"https://good.example"})}
    with running(model, tiny().path(), **options) as (address, _), httpx.Client(base_url=address, timeout=60) as http:
        yield http


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def test_the_key_is_asked_for(guarded):
    assert guarded.get("/health").status_code == 200
    for path in ("/v1/models", "/metrics", "/nowhere"):
        for headers in (
            {},
            bearer("wrong"),
            {"Authorization": "Bearer"},
            {"Authorization": KEY.decode()},
            bearer("é" * 16),
        ):
            response = guarded.get(path, headers={name: value.encode("latin-1") for name, value in headers.items()})
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
    assert guarded.get("/v1/models", headers=bearer(KEY.decode())).status_code == 200
    assert guarded.post("/v1/messages").json()["error"]["type"] == "authentication_error"
    assert "API key" in guarded.get("/api/tags").json()["error"]


def test_other_names_are_refused(guarded):
    """A page of another site can make its own name point to this machine."""
    key = bearer(KEY.decode())
    for host in ("evil.example", "evil.example:80", "localhost.evil.example", ""):
        response = guarded.get("/v1/models", headers={**key, "Host": host})
        assert response.status_code in (400, 403)
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1:8080", "[::1]:80"):
        assert guarded.get("/v1/models", headers={**key, "Host": host}).status_code == 200


def test_only_named_origins_may_read(guarded):
    good, bad = {"Origin": "https://good.example"}, {"Origin": "https://evil.example"}
    sent = "authorization,content-type,x-stainless-lang"
    preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": sent}
    allowed = guarded.options("/v1/chat/completions", headers={**good, **preflight})
    assert allowed.status_code == 204
    assert allowed.headers["access-control-allow-origin"] == "https://good.example"
    assert allowed.headers["access-control-allow-headers"] == sent
    assert guarded.get("/v1/models", headers=good).headers["access-control-allow-origin"] == "https://good.example"
    for response in (guarded.options("/v1/models", headers={**bad, **preflight}), guarded.get("/health", headers=bad)):
        assert not [name for name in response.headers if name.startswith("access-control")]


def test_a_server_goes_by_the_names_of_its_origins():
    origins = ["https://proxy.example:8443", "http://[::1]:80", "null", "*"]
    assert names("box", origins, "127.0.0.1") == {"localhost", "box", "proxy.example", "::1"}
    assert names("box", origins, "10.0.0.1") is None  # others reach it, by whatever name


def test_keys_that_could_be_guessed_are_refused(tmp_path):
    path = tmp_path / "key"
    for text in ("", "short", "two words of some length", "é" * 20, "\0" * 20, "a" * 20 + "\x7f", "a\tb" * 9):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(UsageError, match="openssl rand"):
            read_key(path)
    path.write_text(KEY.decode() + "\n")
    assert read_key(path) == KEY


def test_a_port_in_use_is_said_before_anything_is_loaded(capsys):
    with listen("127.0.0.1", 0) as sock:
        sock.listen()
        port = sock.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    assert f"port {port} of 127.0.0.1 cannot be used" in capsys.readouterr().err
    with pytest.raises(UsageError, match="no address of this machine"):
        listen("no.such.host.invalid", 0)


def test_why_a_model_is_run_as_it_is_can_be_heard(variant_of, monkeypatch, capsys):
    monkeypatch.setattr(Server, "run", lambda self, sockets: None)
    _, path = variant_of("llama")
    for options in ([], ["-v"]):
        assert main(["serve", str(path), "--port", "0", "--threads", "1", *options]) == 0
        assert ("no neuron of this model is ever exactly zero" in capsys.readouterr().err) == bool(options)


class Process:
    """`flashllm serve` as a user starts it."""

    def __init__(self, path, *options, descriptors="unlimited"):
        command = [sys.executable, "-m", "flashllm", "serve", str(path), "--port", "0", "--threads", "1", *options]
        self.process = subprocess.Popen(
            ["sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh", *command],
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.err = []
        while not self.err or "serving at" not in self.err[-1]:
            line = self.process.stderr.readline()
            assert line, self.err
            self.err.append(line)
        self.url = re.search(r"http://[^ ]+", self.err[-1])[0]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def end(self, number):
        """(status, what it wrote, seconds) after a signal."""
        start = time.monotonic()
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=20)
        return self.process.returncode, out + "".join(self.err) + err, time.monotonic() - start


BOMB = (
    "{% if messages[0].content == 'bomb' %}{% set n = namespace(x=99999999999999999999) %}{% for i in range(40) %}"
    "{% set n.x = n.x * n.x %}{% endfor %}{{ n.x }}{% endif %}{{ messages[0].content }}"
)


def test_a_bomb_stops_nothing_a_signal_ends_all_and_requests_are_not_logged(tiny, tmp_path):
    path = shutil.copytree(tiny().path(), tmp_path / "model")
    install_files(path, {"chat_template.jinja": [BOMB.encode()]})

    def completion(**fields):
        return http.post("/v1/completions", json={"prompt": SECRET, "max_tokens": 2, **fields})

    def chat(text):
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
        return http.post("/v1/chat/completions", json=body)

    with (
        Process(path, "--name", "one/model") as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
        ThreadPoolExecutor(1) as pool,
    ):
        (model,) = http.get("/v1/models").json()["data"]
        assert model["id"] == "one/model"
        assert completion().status_code == 200
        assert completion(seed=SECRET).status_code == 400
        # 1. A template that is a bomb: others are answered meanwhile, and conversations afterwards.
        expected = chat("hello").json()["choices"]
        answering = pool.submit(chat, "bomb")
        time.sleep(0.3)
        assert http.get("/health").status_code == 200
        assert not answering.done()
        assert answering.result().status_code == 400
        assert "the chat template failed: it takes longer than 1.5 s" in answering.result().json()["error"]["message"]
        assert chat("hello").json()["choices"] == expected
        # 2. A signal, while one answer is streamed and another's prompt is rendered.
        (renderer,) = psutil.Process(server.process.pid).children()
        body = {"prompt": SECRET, "max_tokens": 60, "stream": True, "ignore_eos": True}
        with http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            answering = pool.submit(chat, "bomb")
            time.sleep(0.1)
            status, written, seconds = server.end(signal.SIGTERM)
            rest = list(lines)
        assert answering.exception() is not None or answering.result().status_code >= 400
    assert status == 0
    assert SECRET not in written
    assert seconds < 10  # a second, where nothing else uses the machine
    assert rest[-2:] == ["data: [DONE]", ""] or "stopping" in str(rest)
    assert not renderer.is_running()


def test_either_signal_stops_the_server_and_is_handed_back():
    numbers = signal.SIGINT, signal.SIGTERM
    before = [signal.getsignal(number) for number in numbers]
    for number in numbers:
        stopped = []
        server = Server(None, stopping=lambda stopped=stopped: stopped.append(True))
        with server.capture_signals():
            assert signal.getsignal(number) not in before
            signal.raise_signal(number)
        assert (stopped, server.should_exit, server.force_exit) == ([True], True, False)
    assert [signal.getsignal(number) for number in numbers] == before


def test_an_unforeseen_error_is_an_answer_and_says_no_text(capsys):
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.routing import Route

    from flashllm.base.command_line import say_bug
    from flashllm.serve.http import ErrorsAreAnswers

    async def fail(request):
        raise RuntimeError(SECRET)

    app = Starlette(routes=[Route("/", fail)], middleware=[Middleware(ErrorsAreAnswers, report=say_bug)])

    async def ask():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://a") as http:
            return await http.get("/")

    response = asyncio.run(ask())
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    written = capsys.readouterr().err
    assert "RuntimeError" in written
    assert SECRET not in written + response.text
