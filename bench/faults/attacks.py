"""A server in a memory control group of its --memory, attacked; a chat goes on beside it, and must be answered in time
with the same text as before.

    python bench/faults/attacks.py hold MODEL=MEMORY[@CONTEXT]...   each attack in turn; MEMORY: "least", or like 300MB
    python bench/faults/attacks.py soak MODEL=MEMORY[@CONTEXT]      2,000 requests in the middle of all of them
    python bench/faults/attacks.py load MODEL=MEMORY[@CONTEXT]      2,000 requests, and no attacks, in an hour

Attacks: prompts of megabytes; bodies that stop in the middle; connections that never send their headers, more than
there are descriptors; long answers that are read, and such that never are. The 2,000 requests are of every dialect,
whole and streamed, with schemas and tools, several at once. Before some of them a client leaves another in the middle
of its prompt or of its answer. Needs root and a memory control group (`bench/memory_group.py`). The last line is one
JSON document.
"""

import argparse
import contextlib
import functools
import itertools
import json
import multiprocessing
import random
import resource
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
import psutil
from limits import FLASHLLM, MOST_GROWTH, TOO_LITTLE, growth, said_need, served
from memory_group import MemoryGroup, drop_page_cache

from flashllm.base.units import format_size, parse_size
from flashllm.plan.requests import body_nbytes

DESCRIPTORS = 1024  # of the server
ANSWER_S = 2.0
ATTACK_S = 12.0
CLIENTS = 3  # of a soak
AT_ONCE = 4  # answers, of a soak and a load; a load's requests come by twice as many
LEAVING = 0.3  # of the requests have one before them that its client leaves
CHAT = {"messages": [{"role": "user", "content": "Say something about the sea."}], "max_tokens": 4, "temperature": 0}

Row = dict[str, Any]
Attack = Callable[[int, int, Event], None]  # port, largest body, when to stop


def ask(port: int, path: str, document: Any, timeout: float = 60) -> tuple[int, Any]:
    """Status and answer; of a stream the list of its documents."""
    with contextlib.closing(HTTPConnection("127.0.0.1", port, timeout=timeout)) as connection:
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        body = response.read()
        kind = response.headers["Content-Type"].partition(";")[0]
        if kind == "application/json":
            return response.status, json.loads(body)
        lines = [line.removeprefix(b"data: ") for line in body.splitlines()]
        return response.status, [json.loads(line) for line in lines if line.startswith(b"{")]


def leave(port: int, path: str, document: Any, nbytes: int) -> None:
    """Ask, and go away after so many bytes of the answer; 0: while the prompt is computed."""
    with contextlib.closing(HTTPConnection("127.0.0.1", port, timeout=600)) as connection:
        connection.request("POST", path, json.dumps(document), {"Content-Type": "application/json"})
        if nbytes:
            connection.getresponse().read(nbytes)
        else:
            time.sleep(0.3)


def chat_text(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


def long_prompts(port: int, body: int, stop: Event) -> None:
    """Four clients send texts that are refused by their size, and such that must be tokenised to be refused."""
    texts = ["a" * 3_000_000, "dog " * 2_000_000, "a" * (body - 1000), "dog " * (body // 4 - 250), " " * (body - 1000),
             "\U0001f600" * (body // 16 - 250), "x " * (body // 2 - 500), "ab1 \n!" * (body // 7 - 200)]  # fmt: skip

    bodies = [json.dumps({"prompt": text, "max_tokens": 4}, ensure_ascii=False).encode() for text in texts]

    def client(first: int) -> None:
        for sent in itertools.islice(itertools.cycle(bodies), first, None):
            if stop.is_set():
                return
            with contextlib.suppress(OSError, HTTPException):  # a client may be cut off; the chat may not
                ask(port, "/v1/completions", sent)

    with ThreadPoolExecutor(4) as clients:
        list(clients.map(client, range(4)))


def many_files() -> None:
    """Let this process have as many connections as the attacks want."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192) if hard > 0 else 8192, hard))


def stuck_bodies(port: int, body: int, stop: Event) -> None:
    """60 connections that each send nearly a whole body and wait, half of them in chunks."""
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with contextlib.ExitStack() as stack:
        for number in range(60):
            with contextlib.suppress(OSError):
                sock = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=1))
                if number % 2:
                    sock.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n{body:x}\r\n".encode())
                else:
                    sock.sendall(f"{head}Content-Length: {body}\r\n\r\n".encode())
                sock.sendall(b" " * (body - 10))
        stop.wait()


def silent_connections(port: int, body: int, stop: Event) -> None:
    """1,100 connections that begin a request, or send nothing, and are opened again when they are closed."""
    many_files()
    with contextlib.ExitStack() as stack:
        for number in range(1100):
            if stop.is_set():
                return
            with contextlib.suppress(OSError):
                sock = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=1))
                if number % 4:
                    sock.sendall(b"GET / HTTP/1.1\r\n")
        stop.wait(11)
    if not stop.is_set():
        silent_connections(port, body, stop)


def long_answers(port: int, body: int, stop: Event, *, read: bool) -> None:
    """Four connections that ask for long streams, with 20 alternatives of each token, and read them, or never do."""
    asked = {**CHAT, "max_tokens": 400, "stream": True, "logprobs": True, "top_logprobs": 20}
    sent = json.dumps(asked).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(sent)}\r\n"
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.socket()) for _ in range(4)]
        for sock in socks:
            if not read:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            sock.connect(("127.0.0.1", port))
            sock.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + sent)
        while not stop.wait(0.02):
            for sock in select.select(socks if read else [], [], [], 0)[0]:
                sock.recv(1 << 20)


ATTACKS: dict[str, Attack] = {
    "prompts of megabytes": long_prompts,
    "bodies that stop": stuck_bodies,
    "connections without headers": silent_connections,
    "long answers that are read": functools.partial(long_answers, read=True),
    "readers that never read": functools.partial(long_answers, read=False),
}


@contextlib.contextmanager
def attacked(attacks: list[Attack], port: int, body: int) -> Iterator[None]:
    spawned = multiprocessing.get_context("spawn")
    stop = spawned.Event()
    processes = [spawned.Process(target=attack, args=(port, body, stop)) for attack in attacks]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        stop.set()
        for process in processes:
            process.join()


def command(model: str, limit: int, context: int | None, *more: str) -> list[str]:
    options = [*more, "--tool-format", "generic", *([] if context is None else ["--context", str(context)])]
    return [*FLASHLLM, "serve", model, "--port", "0", "--memory", str(limit), *options]


class Target:
    """MODEL=MEMORY[@CONTEXT]."""

    def __init__(self, text: str) -> None:
        self.model, _, rest = text.partition("=")
        memory, _, context = rest.partition("@")
        self.context = int(context) if context else None
        base = command(self.model, TOO_LITTLE, self.context)
        options = base[: base.index("--memory")] + base[base.index("--memory") + 2 :]
        self.limit = said_need(options) if memory == "least" else parse_size(memory)
        manifest_context = json.loads((Path(self.model) / "config.json").read_text())["max_position_embeddings"]
        self.body = body_nbytes(self.context or manifest_context)
        self.name = f"{Path(self.model).name}, {format_size(self.limit)}"

    @contextlib.contextmanager
    def serving(self, *more: str) -> Iterator[tuple[MemoryGroup, subprocess.Popen[bytes], int, Path]]:
        """The group, the process (of these options, too), its port, and what it says."""
        with MemoryGroup(self.limit) as group, tempfile.NamedTemporaryFile() as said:
            drop_page_cache()
            limited = ["sh", "-c", f'ulimit -n {DESCRIPTORS}; exec "$@"', "sh"]
            line = group.entering([*limited, *command(self.model, self.limit, self.context, *more)])
            with served(line, said) as (process, port):
                yield group, process, port, Path(said.name)


def hold(target: Target) -> Iterator[tuple[Row, str]]:
    """A row an attack: a chat is answered in time, and the group holds."""
    with target.serving() as (group, process, port, said):
        expected = chat_text(ask(port, "/v1/chat/completions", CHAT)[1])
        for name, attack in ATTACKS.items():
            times, wrong = list[float](), list[str]()
            with attacked([attack], port, target.body):
                end = time.monotonic() + ATTACK_S
                while time.monotonic() < end:
                    began = time.monotonic()
                    try:
                        status, answer = ask(port, "/v1/chat/completions", CHAT)
                        if status != 200 or chat_text(answer) != expected:
                            wrong.append(f"{status} {str(answer)[:200]}")
                    except (OSError, HTTPException, ValueError) as error:
                        wrong.append(f"{type(error).__name__}: {error}")
                    times.append(time.monotonic() - began)
                    time.sleep(0.1)
            late = sum(each > ANSWER_S for each in times)
            good = not wrong and not late and group.kills == 0 and process.poll() is None
            yield (
                {"fault": f"{target.name}: {name}, a chat beside them", "tried": len(times),
                 "survived": len(times) - len(wrong) - late if group.kills == 0 else 0, "limit": target.limit,
                 "peak": group.peak_nbytes, "kills": group.kills, "slowest_s": round(max(times), 3),
                 "median_s": round(sorted(times)[len(times) // 2], 3), "said_bytes": said.stat().st_size},
                "" if good else f"{wrong[:3]} late {late} {said.read_text()[-500:]}",
            )  # fmt: skip


def waits(event: Any) -> bool:
    """True of what a stream says so that its client goes on waiting."""
    if not isinstance(event, dict):
        return False
    says_nothing = event.get("done") is False and not (event.get("response") or event.get("message", {}).get("content"))
    return says_nothing or event.get("type") in ("ping", "response.created", "response.in_progress")


def soak(target: Target, requests: int, seconds: float = 0) -> Iterator[tuple[Row, str]]:
    """Mixed requests, each of which has one right answer, while all attacks go on; or without these, over so long."""
    hello = [{"role": "user", "content": "Hi"}]
    schema = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
    tool = {"name": "paint", "parameters": schema}
    kinds: list[tuple[str, Any]] = [
        *(("/v1/completions", {"prompt": f"The {word} went", "max_tokens": 3, "temperature": 0, "stream": word > "p"})
          for word in ("dog", "cat", "old man", "river")),
        *(("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": text}]})
          for text in ("Hello!", "What is rain?", "Count to three. " * 20)),
        ("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 2, "temperature": 1.0, "seed": 5}),
        ("/v1/completions", {"prompt": ["One", "Two"], "max_tokens": 2, "temperature": 0}),
        ("/v1/completions", {"prompt": "x", "max_tokens": "many"}),
        ("/v1/completions", {"prompt": "x", "\ud800": 1}),
        *(("/v1/chat/completions", {**CHAT, "max_tokens": 40, "stream": stream, **form})
          for stream in (False, True)
          for form in ({"response_format": {"type": "json_schema", "json_schema": {"name": "c", "schema": schema}}},
                       {"tools": [{"type": "function", "function": tool}], "tool_choice": "required"},
                       {"response_format": {"type": "regex", "regex": "(a|b){3}"}})),
        *(("/v1/responses", {"input": "Hi", "max_output_tokens": 3, "temperature": 0, "stream": stream})
          for stream in (False, True)),
        *(("/v1/messages", {"model": "x", "messages": hello, "max_tokens": 3, "temperature": 0, "stream": stream})
          for stream in (False, True)),
        ("/v1/messages/count_tokens", {"model": "x", "messages": hello}),
        *((path, {**asked, "stream": stream, "options": {"num_predict": 2, "temperature": 0}})
          for path, asked in (("/api/chat", {"messages": hello}), ("/api/generate", {"prompt": "Hi"}))
          for stream in (False, True)),
        ("/tokenize", {"content": "a text"}),
        ("/v1/chat/completions", {**CHAT, "response_format": {"type": "regex", "regex": "((a{99}){99}){99}"}}),
    ]  # fmt: skip
    tale = [{"role": "user", "content": "Tell me a long story. " * 300}]
    long: list[tuple[str, Any]] = [  # begun only
        ("/v1/completions", {"prompt": tale[0]["content"], "max_tokens": 200}),
        ("/v1/chat/completions", {"messages": tale, "max_tokens": 200}),
        ("/v1/responses", {"input": tale, "max_output_tokens": 200}),
        ("/v1/messages", {"model": "x", "messages": tale, "max_tokens": 200}),
        ("/api/chat", {"messages": tale, "options": {"num_predict": 200}}),
        ("/api/generate", {"prompt": tale[0]["content"], "options": {"num_predict": 200}}),
    ]

    def sense(answer: Any) -> str:
        """What must be the same each time: all but names, times and what was there already."""
        if isinstance(answer, list):
            return json.dumps([sense(each) for each in answer if not waits(each)])
        if isinstance(answer, dict):
            varying = ("id", "item_id", "call_id", "created", "created_at", "usage", "completed_at", "sequence_number")
            kept = {name: sense(each) for name, each in answer.items() if name not in varying}
            return json.dumps({name: each for name, each in kept.items() if not name.endswith("_duration")})
        return json.dumps(answer)

    with target.serving("--parallel", str(AT_ONCE)) as (group, process, port, said):
        expected = [(status, sense(answer)) for status, answer in (ask(port, *kind) for kind in kinds)]
        memory, wrong, held = list[int](), list[str](), psutil.Process(process.pid)
        asked, left = Counter[str](), Counter[str]()
        began, many = time.monotonic(), 2 * AT_ONCE if seconds else CLIENTS

        def request(number: int) -> None:
            # A load's come in groups, so that several are answered at once.
            due = began + seconds * (number - number % many) / requests
            time.sleep(max(0.0, due - time.monotonic()))
            draw = random.Random(number)
            index = draw.randrange(len(kinds))
            asked[kinds[index][0]] += 1
            if draw.random() < LEAVING:
                path, document = draw.choice(long)
                nbytes = draw.choice((0, 1, 2000))
                with contextlib.suppress(OSError, HTTPException):
                    leave(port, path, {**document, "stream": draw.random() < 0.7}, nbytes)
                left[f"{path}, after {nbytes} bytes"] += 1
            for _ in range(50):  # a server that has no room for one says so
                try:
                    status, answer = ask(port, *kinds[index], timeout=600)
                except (OSError, HTTPException, ValueError) as error:
                    status, answer = 0, {"error": str(error)}
                if status not in (429, 503):
                    break
                time.sleep(0.2)
            if (status, sense(answer)) != expected[index]:
                wrong.append(f"{kinds[index]}: {status} {sense(answer)[:200]}")
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with status {process.returncode}: {said.read_text()[-500:]}")
            memory.append(held.memory_info().rss)

        attacks = [] if seconds else [*ATTACKS.values()]
        with attacked(attacks, port, target.body), ThreadPoolExecutor(many) as clients:
            list(clients.map(request, range(requests)))
        took, grown, part = time.monotonic() - began, growth(memory), len(memory) // 4
        quarters = [statistics.median(memory[at * part : (at + 1) * part]) for at in range(4)]
        where = f"in {took / 60:.0f} minutes" if seconds else "in the middle of the attacks"
        if grown > MOST_GROWTH:
            wrong.append(f"{grown:.0f} bytes more in 100 requests")
        yield (
            {"fault": f"{target.name}: {requests} mixed requests {where}, {format_size(max(0, grown))} more in 100",
             "tried": requests, "survived": max(0, requests - len(wrong)) if group.kills == 0 else 0,
             "limit": target.limit, "peak": group.peak_nbytes, "kills": group.kills, "first": memory[0],
             "last": memory[-1], "largest": max(memory), "quarters": quarters, "growth_100": round(grown),
             "said_bytes": said.stat().st_size, "asked": dict(asked), "left": dict(sorted(left.items()))},
            "; ".join(wrong[:5]),
        )  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("what", choices=("hold", "soak", "load"))
    parser.add_argument("targets", nargs="+", metavar="MODEL=MEMORY[@CONTEXT]")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--minutes", type=float, default=60, help="of a load")
    parser.add_argument("--out", type=Path, help="the document, in this file too")
    args = parser.parse_args(argv)
    table, problems = [], []
    for text in args.targets:
        target = Target(text)
        seconds = 60 * args.minutes if args.what == "load" else 0
        for row, problem in hold(target) if args.what == "hold" else soak(target, args.requests, seconds):
            table.append(row)
            problems += [problem] if problem else []
            print(json.dumps(row), problem, file=sys.stderr, flush=True)
    bad = sum(row["tried"] - row["survived"] for row in table)
    document = json.dumps({"bad": bad, "table": table, "problems": problems})
    if args.out is not None:
        args.out.write_text(document + "\n")
    print(document)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
