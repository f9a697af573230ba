"""What clients send is bounded: bodies together, prompts before and while they are tokenised, connections, headers."""

import contextlib
import http.client
import json
import select
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from serving import running
from test_server import Process

from flashllm.api.pieces import Pieces
from flashllm.plan.requests import BODIES, body_nbytes
from flashllm.serve import server
from flashllm.serve.http import DocumentStream

COMPLETION = "/v1/completions"
JSON = {"Content-Type": "application/json"}
HELLO = {"prompt": "hello", "max_tokens": 2, "temperature": 0}
EACH = body_nbytes(96)  # of the tiny model


def address_of(served):
    """(host, port)"""
    host, port = served[0].removeprefix("http://").split(":")
    return host, int(port)


def begun(address, length, body=b""):
    """A connection whose body of `length` bytes has begun."""
    sock = socket.create_connection(address, timeout=20)
    head = (
        f"POST {COMPLETION} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}"
    )
    sock.sendall(f"{head}\r\n\r\n".encode() + body)
    return sock


def is_closed(sock, seconds):
    sock.settimeout(seconds)
    try:
        return sock.recv(4096) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


def test_bodies_have_one_bound_together(served, http):
    expected = http.post(COMPLETION, json=HELLO).json()["choices"]
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(begun(address_of(served), EACH, b" " * (EACH - 10))) for _ in range(BODIES + 3)]
        answered, end = [], time.monotonic() + 20
        while len(answered) < 3 and time.monotonic() < end:
            answered, _, _ = select.select(socks, [], [], 1)
        assert len(answered) == 3
        for answer in (sock.recv(4096) for sock in answered):
            assert answer.startswith(b"HTTP/1.1 503")
            assert b"retry-after: 10" in answer.lower()
        assert http.post(COMPLETION, json=HELLO).json()["choices"] == expected  # a small one has room
    http.post(COMPLETION, content=b" " * (EACH - 10), headers=JSON)
    assert http.post(COMPLETION, json=HELLO).json()["choices"] == expected  # and all have left again


def test_a_prompt_that_cannot_fit_is_not_tokenised(http, monkeypatch):
    monkeypatch.setattr(Pieces, "encode", None)
    error = http.post(COMPLETION, json={"prompt": "x" * 300_000}).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "tokens or more" in error["message"]


@pytest.fixture
def slow_pieces(monkeypatch):
    """Pieces take 50 ms, and no text is too long for its bytes: how many were made."""
    made, real = [], Pieces._piece

    def slow(self, *args, **kwargs):
        made.append(time.sleep(0.05))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Pieces, "_piece", slow)
    monkeypatch.setattr(Pieces, "least", lambda self, text: 0)
    original = Pieces.encode
    monkeypatch.setattr(Pieces, "encode", lambda self, text, add_special=True, most=None: original(
        self, text, add_special=add_special))  # fmt: skip
    return made


def test_others_are_answered_while_a_prompt_is_tokenised_and_it_ends_with_its_client(served, http, slow_pieces):
    body = json.dumps({"prompt": "the dog ran " * 40_000}).encode()
    with begun(address_of(served), len(body), body):
        while len(slow_pieces) < 3:
            time.sleep(0.01)
        assert http.post(COMPLETION, json=HELLO).status_code == 200
        assert len(slow_pieces) < 100  # of some hundreds
    count = None
    while len(slow_pieces) != count:  # it ends, long before the last of them
        count = len(slow_pieces)
        assert count < 100
        time.sleep(0.3)


def test_connections_that_send_no_request_end(served, monkeypatch):
    monkeypatch.setattr(server, "HEADERS_S", 0.3)
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.create_connection(address_of(served), timeout=20)) for _ in range(4)]
        for sock, sent in zip(socks, (b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: a\r\n"), strict=False):
            sock.sendall(sent)
        for _ in range(20):  # a byte now and then changes nothing
            with contextlib.suppress(OSError):
                socks[-1].sendall(b"G")
            time.sleep(0.05)
        assert all(is_closed(sock, 5) for sock in socks)


def test_a_client_that_does_not_read_its_answer_is_given_up(monkeypatch):
    monkeypatch.setattr(server, "_ANSWER_READ_S", 0.3)
    given_up = threading.Event()

    async def endless():
        return None if given_up.is_set() else {"text": "a" * 60_000}

    app = DocumentStream(endless, given_up.set)
    sock, serving = server.listen("127.0.0.1", 0), server.Server(app, stopping=given_up.set)
    with contextlib.closing(sock), ThreadPoolExecutor(1) as pool:
        pool.submit(serving.run, sockets=[sock])
        try:
            while not serving.started:
                time.sleep(0.01)
            with socket.create_connection(sock.getsockname(), timeout=20) as deaf:
                deaf.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert given_up.wait(20)
        finally:
            serving.stop()


def test_a_new_connection_takes_the_place_of_one_that_waits(tiny, model, monkeypatch):
    monkeypatch.setattr(server, "CONNECTIONS", 8)
    with running(model, tiny().path()) as (address, worker), contextlib.ExitStack() as stack:
        place = address_of((address, worker))
        socks = [stack.enter_context(socket.create_connection(place, timeout=20)) for _ in range(30)]
        assert httpx.get(f"{address}/health", timeout=5).status_code == 200
        assert sum(is_closed(sock, 0.1) for sock in socks) >= 20


def test_more_connections_than_descriptors(tiny):
    with Process(tiny().path(), descriptors=160) as server, contextlib.ExitStack() as stack:
        for _ in range(300):
            with contextlib.suppress(OSError):
                sock = stack.enter_context(socket.create_connection(address_of([server.url]), timeout=1))
                sock.sendall(b"GET / HTTP/1.1\r\n")
        assert httpx.get(f"{server.url}/health", timeout=5).status_code == 200
        assert len(server.end(signal.SIGTERM)[1]) < 2000


def test_what_cannot_be_accepted_is_said_once_and_tried_later(capsys):
    """Descriptors that others of the machine have used up."""

    class Full:
        tried = 0

        def accept(self):
            self.tried += 1
            raise OSError(24, "Too many open files")

    class Loop:
        later = 0

        def remove_reader(self, sock):
            pass

        def call_later(self, seconds, function):
            self.later += 1
            assert seconds >= 0.5

    made, loop, full = server.Server(None, stopping=lambda: None), Loop(), Full()
    made._socket = full
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("asyncio.get_running_loop", lambda: loop)
        for _ in range(50):
            made._accept()
    assert (full.tried, loop.later) == (50, 50)
    assert capsys.readouterr().err.count("Too many open files") == 1


def test_the_web_servers_lines_are_few_and_ours(served, http, capfd):
    capfd.readouterr()
    for _ in range(30):
        with socket.create_connection(address_of(served), timeout=10) as sock:
            sock.sendall(b"\x00\x01 no HTTP\r\n\r\n")
            assert sock.recv(4096).startswith(b"HTTP/1.1 400")
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "a"}
    assert http.get("/health", headers=upgrade).status_code == 200
    said = capfd.readouterr().err
    assert said.count("\n") <= 1
    assert "uvicorn" not in said
    assert "Invalid HTTP" not in said


@pytest.mark.parametrize("declared", [True, False])
def test_a_client_that_still_sends_hears_that_it_is_too_much(served, declared):
    with contextlib.closing(http.client.HTTPConnection(*address_of(served), timeout=20)) as connection:
        body = b" " * (EACH + 8_000_000)
        parts = body if declared else (body[start : start + 100_000] for start in range(0, len(body), 100_000))
        connection.request("POST", COMPLETION, parts, JSON, encode_chunked=not declared)
        response = connection.getresponse()
        assert response.status == 413
        assert f"larger than {EACH} bytes" in json.loads(response.read())["error"]["message"]
    parts = b" " * (EACH + 1) if declared else iter([b" " * EACH, b" "])
    least = httpx.post(f"{served[0]}{COMPLETION}", content=parts, headers=JSON)
    assert f"larger than {EACH} bytes" in least.json()["error"]["message"]


def test_a_text_that_is_wide_in_memory_is_too_much(http):
    for text in ("😀" + "a" * (EACH // 3), "\\ud83d\\ude00" + "a" * (EACH // 3)):
        body = b'{"prompt": "%s"}' % text.encode()
        response = http.post(COMPLETION, content=body, headers=JSON)
        assert response.status_code == 413
        assert "wide" in response.json()["error"]["message"]
    many = b"[" + b"[]," * 200_000 + b"[]]"
    response = http.post(COMPLETION, content=many, headers=JSON)
    assert response.status_code == 400
    assert "values" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Encoding": "gzip"},
        {"Content-Encoding": "identity, br"},
        {"Content-Type": "application/json; charset=utf-16"},
    ],
    ids=str,
)
def test_encodings_that_are_not_understood(http, headers):
    response = http.post(COMPLETION, content=json.dumps(HELLO), headers={**JSON, **headers})
    assert response.status_code == 415
    good = {"Content-Type": 'application/json; charset="UTF-8"', "Content-Encoding": "identity"}
    assert http.post(COMPLETION, content=json.dumps(HELLO), headers=good).status_code == 200


def test_many_small_bodies_at_once_have_room(served):
    with ThreadPoolExecutor(8) as pool:
        ask = lambda _: httpx.post(f"{served[0]}{COMPLETION}", json=HELLO, timeout=60).status_code  # noqa: E731
        assert set(pool.map(ask, range(8))) == {200}
