"""Memory limits that the kernel enforces, from a cold page cache: 2 % above what a command says it needs it runs, 5 %
below it is refused with numbers, and it is never killed. A limit lowered while a chat goes on. Memory over many turns.

    python bench/faults/limits.py need MODEL...     generate, offload run and a server under load, for each model
    python bench/faults/limits.py lower MODEL       a chat gives memory back, then its group's limit falls
    python bench/faults/limits.py flat MODEL        200 turns of a chat, 1,000 requests to a server

Needs root and a memory control group (`bench/memory_group.py`). The last line is one JSON document.
"""

import argparse
import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import psutil
from memory_group import MemoryGroup, drop_page_cache

from flashllm.base.units import format_size, parse_size

FLASHLLM = (sys.executable, "-m", "flashllm")
JOB = Path(__file__).parent.parent / "offload/workers/job.py"
PROMPT = "Once upon a time there was a little dog who wanted to see the sea, and"
ON_DISK = {"wg": 0.0, "wc": 0.0, "wd": 1.0, "cg": 0.0, "cc": 0.0, "cd": 1.0, "hg": 0.0, "hc": 0.0, "hd": 1.0}
CONTEXT = 256  # tokens
ABOVE, BELOW = 1.02, 0.95
TOO_LITTLE = 1_000_000  # bytes
CLIENTS = 8
START_S, ANSWER_S = 600, 900
# What the server's allocator and its caches may still take after the first tenth of the requests.
MOST_GROWTH = 1_000_000  # bytes in 100 turns or requests

Row = dict[str, Any]


@dataclass(frozen=True)
class Ended:
    """What became of a command in a group."""

    status: int
    said: str  # on standard error
    peak: int
    kills: int


def run(command: list[str], limit: int) -> Ended:
    """`command` in a group of `limit` bytes, from a cold page cache."""
    with MemoryGroup(limit) as group, tempfile.TemporaryFile() as said:
        drop_page_cache()
        status = subprocess.run(
            group.entering(command), stdout=subprocess.DEVNULL, stderr=said, check=False, timeout=ANSWER_S
        ).returncode
        said.seek(0)
        return Ended(status, said.read().decode("utf-8", "replace"), group.peak_nbytes, group.kills)


def refusal(command: list[str], limit: int) -> str:
    """The one line by which `command` refuses this limit; empty where it runs."""
    done = subprocess.run(
        [*command, "--memory", str(limit)], capture_output=True, text=True, check=False, timeout=START_S
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{' '.join(command)} under {limit} bytes: status {done.returncode}: {done.stderr[-500:]}")
    return done.stderr.splitlines()[-1] if done.returncode else ""


def said_need(command: list[str]) -> int:
    """What the refusal of far too little says is enough, in bytes."""
    line = refusal(command, TOO_LITTLE)
    found = re.search(r"use --memory (\d+MB) or more", line)
    if found is None:
        raise RuntimeError(f"no number in: {line}")
    return parse_size(found[1])


def job_need(command: list[str]) -> int:
    """As `said_need`, of a batch job, whose refusals say what is short of the memory left for the model: first for its
    weights, then for its sequences, in three digits."""
    line = refusal(command, TOO_LITTLE)
    taken = re.search(r"libraries \((.*?), and (.*?) for", line)
    if taken is None:
        raise RuntimeError(f"no numbers in: {line}")
    limit = sum(parse_size(each) for each in taken.groups()) + TOO_LITTLE
    while line := refusal(command, limit):
        found = re.search(r"need (\S+ [kMG]?B) of memory, and (\S+ [kMG]?B) is the limit", line)
        if found is None:
            raise RuntimeError(f"no numbers in: {line}")
        limit += max(TOO_LITTLE, parse_size(found[1]) - parse_size(found[2]))
    return limit


def generate_command(model: str) -> list[str]:
    return [*FLASHLLM, "generate", model, "--prompt", PROMPT, "--max-new-tokens", "8", "--context", str(CONTEXT)]


def job_command(model: str, folder: Path) -> list[str]:
    """A batch job with everything on disk."""
    (folder / "in.jsonl").write_text(json.dumps({"custom_id": "a", "prompt": [5, 6, 7, 8], "max_tokens": 3}) + "\n")
    fields = {"policy": {"gpu_batch": 1, "num_batches": 1, **ON_DISK}, "scratch": f"{folder}/scratch"}
    return [
        sys.executable,
        str(JOB),
        json.dumps(fields),
        model,
        "-i",
        f"{folder}/in.jsonl",
        "-o",
        f"{folder}/out.jsonl",
    ]


def serve_command(model: str) -> list[str]:
    return [*FLASHLLM, "serve", model, "--port", "0", "--context", str(CONTEXT), "--keep", "100MB"]


@contextmanager
def served(command: list[str], said: IO[bytes]) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A server and its port; ended at the end."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said) as process:
        try:
            end = time.monotonic() + START_S
            while True:
                said.seek(0)
                found = re.search(rb"serving at http://127\.0\.0\.1:(\d+)", text := said.read())
                if found is not None:
                    break
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"the server does not serve: status {process.returncode}, {text[-300:]!r}")
                time.sleep(0.05)
            yield process, int(found[1])
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def ask(port: int, prompt: str, tokens: int) -> int:
    """The status of a request."""
    with closing(HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)) as connection:
        body = json.dumps({"prompt": prompt, "max_tokens": tokens, "temperature": 0})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.status


def under_load(model: str, limit: int, requests: int) -> Ended:
    """A server in a group of `limit` bytes, with CLIENTS asking at once."""
    numbers, statuses = iter(range(requests)), list[int]()
    with MemoryGroup(limit) as group, tempfile.TemporaryFile() as said:
        drop_page_cache()
        command = group.entering([*serve_command(model), "--memory", str(limit)])
        with served(command, said) as (process, port):

            def client() -> None:
                for number in numbers:
                    statuses.append(ask(port, f"{number} {PROMPT} {number}", 4 + number % 5))

            threads = [threading.Thread(target=client) for _ in range(CLIENTS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        said.seek(0)
        good = statuses.count(200) == requests and process.returncode == 0
        text = f"{statuses} {said.read().decode('utf-8', 'replace')}"
        return Ended(0 if good else 1, text, group.peak_nbytes, group.kills)


def both_sides(
    what: str, need: int, attempt: Callable[[int], Ended], refuse: Callable[[int], Ended]
) -> Iterator[tuple[Row, str]]:
    """A row for each side of the need, and what went wrong."""
    limit = int(need * ABOVE)
    ended = attempt(limit)
    good = ended.status == 0 and ended.kills == 0 and ended.peak <= limit
    yield (
        {"fault": f"{what} under need + 2 % ({format_size(limit)}): runs", "tried": 1, "survived": int(good),
         "limit": limit, "peak": ended.peak, "kills": ended.kills},
        "" if good else ended.said[-1000:],
    )  # fmt: skip
    limit = int(need * BELOW)
    ended = refuse(limit)
    numbers = re.findall(r"\d[\d.]* ?[kMG]B", ended.said.splitlines()[-1] if ended.said else "")
    good = ended.status == 1 and ended.kills == 0 and len(numbers) >= 2
    yield (
        {"fault": f"{what} under need - 5 % ({format_size(limit)}): refused with numbers", "tried": 1,
         "survived": int(good), "limit": limit, "peak": ended.peak, "kills": ended.kills},
        "" if good else ended.said[-1000:],
    )  # fmt: skip


def need(models: list[str], verbs: list[str], load: int) -> Iterator[tuple[Row, str]]:
    """Every verb of every model."""

    def limited(command: list[str], made: Path | None = None) -> Callable[[int], Ended]:
        """`command` under a limit; `made`: a file that must not be there before."""

        def attempt(limit: int) -> Ended:
            if made is not None:
                made.unlink(missing_ok=True)
            return run([*command, "--memory", str(limit)], limit)

        return attempt

    for model in models:
        name = Path(model).absolute().name
        if "generate" in verbs:
            command = generate_command(model)
            yield from both_sides(f"{name}, generate,", said_need(command), limited(command), limited(command))
        if "offload" in verbs:
            with tempfile.TemporaryDirectory() as folder:
                command = job_command(model, Path(folder))
                attempt = limited(command, Path(folder) / "out.jsonl")
                yield from both_sides(f"{name}, offload run,", job_need(command), attempt, attempt)
        if "serve" in verbs:
            command = serve_command(model)
            loaded = partial(under_load, model, requests=load)
            yield from both_sides(f"{name}, a server under load,", said_need(command), loaded, limited(command))


class Conversation:
    """A chat through pipes."""

    def __init__(self, command: list[str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - for the chat's life
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, bufsize=0
        )

    def say(self, text: str) -> str:
        """The answer's line."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(text.encode() + b"\n")
        answer = b""
        while not answer.endswith(b"\n"):
            part = self.process.stdout.read(1)
            if not part:
                break
            answer += part
        return answer.decode("utf-8", "replace")

    def command(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode() + b"\n")

    def said(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode("utf-8", "replace")

    def close(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(60)


def chat_command(model: str, limit: int) -> list[str]:
    return [*FLASHLLM, "chat", model, "--memory", str(limit), "--context", str(CONTEXT), "--max-new-tokens", "12",
            "--temperature", "0"]  # fmt: skip


def chat_need(model: str) -> int:
    """As `said_need`, of a chat."""
    return said_need([*FLASHLLM, "chat", model, "--context", str(CONTEXT)])


def lowered(group: MemoryGroup, limit: int) -> str:
    """Give the group another limit; why the kernel refuses, or nothing."""
    try:
        group.limit_to(limit)
    except OSError as error:
        return str(error.strerror)
    return ""


def lower(model: str) -> Iterator[tuple[Row, str]]:
    """A chat with 60 MB above its need gives most of it back; then the kernel holds it to that."""
    least = chat_need(model)
    start, end = least + 60_000_000, int(least * ABOVE)
    with MemoryGroup(start) as group:
        drop_page_cache()
        chat = Conversation(group.entering(chat_command(model, start)))
        answers = [chat.say(f"The dog number {number} said") for number in range(4)]
        chat.command(f"/memory {end}")
        answers += [chat.say(f"The cat number {number} said") for number in range(4)]
        refused = lowered(group, end)
        answers += [chat.say(f"The cow number {number} said") for number in range(12)]
        status = chat.close()
        good = status == 0 and group.kills == 0 and all(answers) and "from here on" in chat.said() and not refused
        yield (
            {"fault": f"the limit falls from {format_size(start)} to {format_size(end)} in a chat (/memory, then the "
                      "group)", "tried": 1, "survived": int(good), "kills": group.kills},
            "" if good else f"{refused} {chat.said()[-1000:]}",
        )  # fmt: skip
    with MemoryGroup(start) as group:
        drop_page_cache()
        chat = Conversation(group.entering(chat_command(model, start)))
        chat.say("The dog said")
        refused = lowered(group, end)
        time.sleep(1.1)
        answers = [chat.say(f"The cow number {number} said") for number in range(12)]
        status = chat.close()
        # Version 1 refuses a limit below what is held; version 2 kills. What is between, the page cache, is given up.
        good = group.kills == 0 and status == 0 and all(answers)
        how = f"the kernel refused: {refused}" if refused else "lowered"
        yield (
            {"fault": f"the group's limit falls from {format_size(start)} to {format_size(end)} in a chat ({how})",
             "tried": 1, "survived": int(good), "kills": group.kills},
            "" if good else chat.said()[-1000:],
        )  # fmt: skip


def growth(memory: list[int]) -> float:
    """Bytes in 100 steps: the medians of the second and of the last tenth."""
    tenth = len(memory) // 10
    return (statistics.median(memory[-tenth:]) - statistics.median(memory[tenth : 2 * tenth])) / (8 * tenth) * 100


def flat(model: str, turns: int, requests: int) -> Iterator[tuple[Row, str]]:
    """Resident memory, turn by turn and request by request."""
    limit = chat_need(model) + 100_000_000
    chat, memory = Conversation(chat_command(model, limit)), list[int]()
    process = psutil.Process(chat.process.pid)
    for turn in range(turns):
        chat.say(f"Tell me about the animal number {turn}.")
        memory.append(process.memory_info().rss)
    status, grown = chat.close(), growth(memory)
    good = status == 0 and grown < MOST_GROWTH and max(memory) <= limit
    yield (
        {"fault": f"{turns} turns of a chat: {format_size(max(0, grown))} more in 100 turns", "tried": turns,
         "survived": turns if good else 0, "first": memory[0], "last": memory[-1], "limit": limit},
        "" if good else f"status {status}, {grown:.0f} bytes in 100 turns, {chat.said()[-500:]}",
    )  # fmt: skip
    limit, memory, good = said_need(serve_command(model)) + 100_000_000, [], True
    with tempfile.TemporaryFile() as said:
        with served([*serve_command(model), "--memory", str(limit)], said) as (server, port):
            process = psutil.Process(server.pid)
            for number in range(requests):
                good = ask(port, f"{number} {PROMPT} {number % 7}", 4) == 200 and good
                memory.append(process.memory_info().rss)
        grown = growth(memory)
        good = good and grown < MOST_GROWTH and max(memory) <= limit
        said.seek(0)
        yield (
            {"fault": f"{requests} requests to a server: {format_size(max(0, grown))} more in 100", "tried": requests,
             "survived": requests if good else 0, "first": memory[0], "last": memory[-1], "limit": limit},
            "" if good else f"{grown:.0f} bytes in 100 requests, {said.read().decode()[-500:]}",
        )  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("what", choices=("need", "lower", "flat"))
    parser.add_argument("models", nargs="+", metavar="MODEL", help="model directories")
    parser.add_argument("--verbs", nargs="*", choices=("generate", "offload", "serve"),
                        default=["generate", "offload", "serve"])  # fmt: skip
    parser.add_argument("--load", type=int, default=24, help="requests to a server under load (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--requests", type=int, default=1000)
    args = parser.parse_args(argv)
    if args.what == "need":
        rows = need(args.models, args.verbs, args.load)
    elif args.what == "lower":
        rows = lower(args.models[0])
    else:
        rows = flat(args.models[0], args.turns, args.requests)
    table, problems = [], []
    for row, problem in rows:
        table.append(row)
        problems += [problem] if problem else []
        print(json.dumps(row), file=sys.stderr, flush=True)
    bad = sum(row["tried"] - row["survived"] for row in table)
    print(json.dumps({"bad": bad, "table": table, "problems": problems}))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
