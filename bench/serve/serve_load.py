"""The server under load, and what it adds to a token.

    python bench/serve/serve_load.py [--model DIR] [--requests N] [--at-once N] [--rounds N] [--tokens N]
    python bench/serve/serve_load.py [--model DIR] --tokens N --together 1 2 4 8
    python bench/serve/serve_load.py [--model DIR] --agents [--words SHARE]

First REQUESTS completions, AT_ONCE at a time: none may be lost, and memory must stay flat (resident bytes of the
server's process after the first tenth, and at the end). Then the overhead: `flashllm generate --json` and a streamed
answer of the same prompt take turns; a token's mean time over the second half of each answer, when the cache is warm in
both. The server's is measured inside it (`include_timings`) and at the client (from the first chunk of that half to the
last: several chunks may arrive at once). The last line is one JSON document.

--agents: 16 turns of an agent, with two sub-agents and a request for a title between them, by a recorded trace of
message lengths (`agents_trace.py`). Each request goes to a server that keeps what requests leave behind and to one that
keeps nothing, in turn: the time to the first token. Words stand for tokens, and SHARE of them are sent; what requests
have in common is as recorded, answers too, which are not those of this model.
"""

import argparse
import itertools
import json
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

PROMPT = "Once upon a time there was a little dog who lived in a house by the sea."


@contextmanager
def server(model: list[str]) -> Iterator[tuple[str, psutil.Process]]:
    """A server of its own: its address and process."""
    command = [sys.executable, "-m", "flashllm", "serve", *model, "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if found := re.search(r"serving at (http://\S+)", line):
                threading.Thread(target=process.stderr.read, daemon=True).start()
                yield found[1], psutil.Process(process.pid)
                return
        raise RuntimeError("the server did not start")
    finally:
        process.terminate()
        process.wait()


def load(address: str, process: psutil.Process, requests: int, at_once: int) -> dict[str, Any]:
    """What became of the requests, and the server's memory."""
    statuses: list[int] = []
    resident: list[int] = []
    lock = threading.Lock()

    def work(first: int) -> None:
        with httpx.Client(base_url=address, timeout=600) as http:
            for number in range(first, requests, at_once):
                body = {"prompt": f"{PROMPT} Number {number} was", "max_tokens": 8, "stream": number % 2 == 1}
                status = http.post("/v1/completions", json=body).status_code
                with lock:
                    statuses.append(status)
                    resident.append(process.memory_info().rss)

    start = time.monotonic()
    threads = [threading.Thread(target=work, args=(first,)) for first in range(at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    early = resident[min(len(resident) - 1, requests // 10)]
    return {
        "requests": requests,
        "at_once": at_once,
        "answered": statuses.count(200),
        "seconds": time.monotonic() - start,
        "resident_after_a_tenth": early,
        "resident_at_the_end": resident[-1],
        "growth_bytes": resident[-1] - early,
    }


def generate(model: list[str], tokens: int) -> float:
    """Mean ms of a token by the command line, in the second half of its answer."""
    command = [sys.executable, "-m", "flashllm", "generate", *model, "--prompt", PROMPT, "--json"]
    done = subprocess.run([*command, "--max-new-tokens", str(tokens)], capture_output=True, text=True, check=True)
    return statistics.mean(token["total_ms"] for token in json.loads(done.stdout)["tokens"][tokens // 2 :])


def streamed(address: str, tokens: int) -> tuple[float, float]:
    """Mean ms of a token inside the server, and at the client, in the second half of an answer."""
    body = {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "stream": True}
    inside, arrivals = [], []
    with (
        httpx.Client(base_url=address, timeout=600) as http,
        http.stream("POST", "/v1/completions", json={**body, "stream_options": {"include_timings": True}}) as response,
    ):
        for line in response.iter_lines():
            if line.startswith("data: {") and "timings" in line:
                inside.append(json.loads(line[6:])["timings"]["total_ms"])
                arrivals.append(time.perf_counter())
    half = len(inside) // 2
    at_client = 1e3 * (arrivals[-1] - arrivals[half - 1]) / (len(arrivals) - half)
    return statistics.mean(inside[half:]), at_client


def together(address: str, tokens: int, at_once: int) -> dict[str, float]:
    """So many answers at once: tokens a second of all together, and of each at the median; the longest gap in one, in
    ms, once also while a long prompt is computed."""

    def work(number: int) -> list[float]:
        body = {"prompt": f"{PROMPT} Number {number} was", "max_tokens": tokens, "temperature": 0, "stream": True}
        arrivals = []
        with (
            httpx.Client(base_url=address, timeout=600) as http,
            http.stream("POST", "/v1/completions", json={**body, "ignore_eos": True}) as response,
        ):
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    arrivals.append(time.perf_counter())
        return arrivals

    def longest_gaps(all_arrivals: list[list[float]]) -> list[float]:
        return [max(b - a for a, b in itertools.pairwise(each)) for each in all_arrivals]

    with ThreadPoolExecutor(at_once + 1) as pool:
        work(0)
        began = time.perf_counter()
        alone = list(pool.map(work, range(at_once)))
        seconds = time.perf_counter() - began
        prompt = {"prompt": " ".join(f"word{n}" for n in range(600)), "max_tokens": 1}
        asked = pool.submit(httpx.post, f"{address}/v1/completions", json=prompt, timeout=600)
        beside = list(pool.map(work, range(at_once)))
        asked.result()
    return {
        "at_once": at_once,
        "tokens_a_second": at_once * tokens / seconds,
        "of_each": statistics.median((len(each) - 1) / (each[-1] - each[0]) for each in alone),
        "longest_gap_ms": 1e3 * max(longest_gaps(alone)),
        "longest_gap_beside_a_prompt_ms": 1e3 * max(longest_gaps(beside)),
    }


def first_token(address: str, messages: list[dict[str, str]]) -> tuple[float, dict[str, Any]]:
    """Ms to the first token of an answer, and its usage."""
    body = {"messages": messages, "max_tokens": 16, "temperature": 0, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    first, usage = 0.0, dict[str, Any]()
    began = time.perf_counter()
    with httpx.stream("POST", f"{address}/v1/chat/completions", json=body, timeout=600) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                document = json.loads(line[6:])
                usage = document.get("usage") or usage
                said = "".join(choice["delta"].get("content") or "" for choice in document["choices"])
                first = first or (1e3 * (time.perf_counter() - began) if said else 0.0)
    return first, usage


def agents(keeping: str, forgetting: str, share: float) -> list[dict[str, Any]]:
    """Each request of the trace, asked of both servers."""
    trace = json.loads((Path(__file__).parent / "agents_trace.json").read_text())
    draw = random.Random(1)
    words = PROMPT.lower().strip(".").split()
    texts = [" ".join(draw.choices(words, k=max(1, round(share * tokens)))) for _, tokens in trace["pieces"]]
    rows = []
    for request in trace["requests"]:
        asked: list[dict[str, str]] = [{"role": "system", "content": ""}]
        for piece in request["pieces"]:
            match trace["pieces"][piece][0]:
                case "tools" | "system":  # tools come first in a prompt
                    asked[0]["content"] += texts[piece] + "\n"
                case role:
                    asked.append({"role": "user" if role == "tool" else role, "content": texts[piece]})
        kept_ms, usage = first_token(keeping, asked)
        alone_ms, _ = first_token(forgetting, asked)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        row = {"who": request["who"], "prompt_tokens": usage["prompt_tokens"], "cached_tokens": cached}
        rows.append({**row, "first_token_ms": kept_ms, "first_token_ms_keeping_nothing": alone_ms})
        print(rows[-1], file=sys.stderr)
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="a model directory; the bundled demo by default")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7, help="of the overhead's comparison")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--together", type=int, nargs="*", default=[], help="answers at once, instead of all else")
    parser.add_argument("--agents", action="store_true", help="an agent with sub-agents, instead of all else")
    parser.add_argument("--words", metavar="SHARE", type=float, default=1.0, help="of what the agents are told")
    args = parser.parse_args(argv)
    model = [args.model] if args.model else []
    if args.agents:
        with server(model) as (keeping, _), server([*model, "--keep", "0"]) as (forgetting, _):
            print(json.dumps({"agents": agents(keeping, forgetting, args.words)}))
        return 0
    if args.together:
        with server(model) as (address, _):
            print(json.dumps({"together": [together(address, args.tokens, count) for count in args.together]}))
        return 0
    with server(model) as (address, process):
        report = {"load": load(address, process, args.requests, args.at_once)}
        print(report["load"], file=sys.stderr)
        rounds = [(generate(model, args.tokens), *streamed(address, args.tokens)) for _ in range(args.rounds)]
    medians = [statistics.median(column) for column in zip(*rounds, strict=True)]
    names = ("generate_ms", "server_ms", "client_ms")
    report["overhead"] = {
        "tokens": args.tokens,
        **dict(zip(names, medians, strict=True)),
        "overhead_ms": medians[2] - medians[0],
        "rounds": [dict(zip(names, each, strict=True)) for each in rounds],
    }
    print(json.dumps(report))
    return int(report["load"]["answered"] != args.requests)


if __name__ == "__main__":
    sys.exit(main())
