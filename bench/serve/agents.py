"""Coding agents against the server: each is asked for a file, and writes it by a tool that it offers.

    python bench/serve/agents.py BIN... [--only NAME...] [--log DIR] [--model DIR]

BIN are folders of programs: `node_modules/.bin` of npm's (@openai/codex, opencode-ai, @qwen-code/qwen-code), `bin` of
an environment with aider-chat. What is not there is left out. Server and agents are in a network namespace that has
loopback alone; an agent has a home folder of its own and no environment but PATH and HOME.

The model is a tiny one whose logits are scripted: where tools are offered it calls the one that writes files, and
after a tool's result it says that it is done. Everything else is the server as it is. With --model it is a real one,
with a penalty on what it repeats, and all that counts is that the agents end. The last line is one JSON document.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import flashllm
from flashllm.config import RunConfig
from flashllm.convert.run import convert
from flashllm.engine.model import Model
from flashllm.engine.passes import Pass
from flashllm.generate.sampling import SamplingOptions
from flashllm.generate.templates.chat_template import ChatTemplate
from flashllm.generate.tokenizer import Tokenizer
from flashllm.serve.opening import ServerOptions, app_of
from flashllm.serve.server import Server, listen, url

ASK = "Write the file note.txt with the one line: The sea is calm."
LINE = "The sea is calm."
CONTEXT = 1 << 17
ANSWERS = 256  # that can be told apart
PENALTY = 1.3  # on tokens that a real model repeats: a small one may never end without
MOST_SECONDS = 1800
TEMPLATE = """{%- for tool in tools or [] %}<tool_call>{{ tool | tojson }}{% endfor %}
{%- for m in messages %}<{{ m.role }}>{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{% endfor %}<assistant>"""


@dataclass(frozen=True, kw_only=True)
class Agent:
    """How an agent is pointed at a server: ADDRESS stands for the address."""

    command: tuple[str, ...]  # behind its name
    files: Mapping[str, str] = field(default_factory=dict)  # of its home folder


AGENTS = {
    "codex": Agent(
        command=("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", ASK),
        files={
            ".codex/config.toml": 'model = "scripted"\nmodel_provider = "flashllm"\n[model_providers.flashllm]\n'
            'name = "flashllm"\nbase_url = "ADDRESS/v1"\nwire_api = "responses"\n'
        },
    ),
    "opencode": Agent(
        command=("run", "--model", "flashllm/scripted", ASK),
        files={
            ".config/opencode/opencode.json": json.dumps(
                {
                    "provider": {
                        "flashllm": {
                            "npm": "@ai-sdk/openai-compatible",
                            "options": {"baseURL": "ADDRESS/v1", "apiKey": "any"},
                            "models": {"scripted": {"limit": {"context": CONTEXT, "output": 8192}}},
                        }
                    }
                }
            )
        },
    ),
    "qwen": Agent(
        command=(
            *("--auth-type", "openai", "--openai-base-url", "ADDRESS/v1", "--openai-api-key", "any"),
            *("--model", "scripted", "--yolo", ASK),
        )
    ),
    "aider": Agent(
        command=(
            *("--model", "openai/scripted", "--openai-api-base", "ADDRESS/v1", "--openai-api-key", "any", "--no-git"),
            *("--yes-always", "--no-check-update", "--no-show-model-warnings", "--no-show-release-notes"),
            *("--analytics-disable", "--edit-format", "whole", "--message", ASK, "note.txt"),
        )
    ),
}


def answer(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], work: Path) -> str:
    """What the model says."""
    names = {tool["function"]["name"] for tool in tools}
    file = work / "note.txt"
    write = f"printf '{LINE}\\n' > note.txt"
    calls: dict[str, dict[str, Any]] = {
        "exec_command": {"cmd": write},
        "shell": {"command": ["bash", "-c", write]},
        "shell_command": {"command": write},
        "write": {"filePath": str(file), "content": f"{LINE}\n"},
        "write_file": {"file_path": str(file), "content": f"{LINE}\n"},
    }
    called = next((name for name in calls if name in names), None)
    if messages[-1]["role"] == "tool":
        return "The file is written."
    if called is not None:
        call = json.dumps({"name": called, "arguments": calls[called]})
        return f"<think>\nA tool does that.\n</think>\n\nI write it.\n<tool_call>\n{call}\n</tool_call>"
    return f"note.txt\n```\n{LINE}\n```\n"


Says = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]], Path], str]


class Script(ChatTemplate):
    """A template that ends each prompt with a token of its own, so that the model knows what to say."""

    work = Path()
    says: Says
    tokenizer: Tokenizer
    answers: "dict[int, list[int]]"  # by that token
    asked: "list[dict[str, Any]]"

    def render(self, messages: Any, *, tools: Any = (), values: Any = None) -> str:
        text = super().render(messages, tools=tools, values=values)
        mark = f"<answer {len(self.asked) % ANSWERS}>"
        said = self.says(messages, tools, self.work)
        ids = self.tokenizer.encode(said, add_special=False)
        (token,) = self.tokenizer.encode(mark, add_special=False)
        self.answers[token] = [*ids, next(iter(self.tokenizer.end_ids))]
        self.asked.append({"tools": len(tools), "messages": len(messages), "chars": len(text), "said": said})
        return text + mark


class Scripted:
    """The model, with logits for what `answers` say."""

    def __init__(self, model: Model, answers: dict[int, list[int]]) -> None:
        self._model, self._answers = model, answers
        self._at: dict[int, tuple[list[int], int]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def step(self, entries: Any, **options: Any) -> Any:
        return self._said(entries, self._model.step(entries, **options))

    def begin(self, entries: Any, **options: Any) -> "Running":
        return Running(self._model.begin(entries, **options), lambda logits: self._said(entries, logits))

    def _said(self, entries: Any, logits: Any) -> Any:
        for row, (sequence, ids) in enumerate(entries):
            said, at = self._at.get(id(sequence), ([], 0))
            said, at = (self._answers[ids[-1]], 0) if ids[-1] in self._answers else (said, at)
            if at < len(said):
                logits[row] = np.float32(0)
                logits[row, said[at]] = 10
            self._at[id(sequence)] = (said, at + 1)
        return logits


class Running:
    """A pass that can wait, and what becomes of its logits."""

    def __init__(self, running: Pass, said: Callable[[Any], Any]) -> None:
        self._running, self._said = running, said

    def advance(self, seconds: float) -> Any:
        logits = self._running.advance(seconds)
        return None if logits is None else self._said(logits)

    def close(self) -> None:
        self._running.close()


def make_model(root: Path) -> Path:
    """A tiny random model of a long context, with the demo's tokenizer and marks of calls."""
    tokenizer = AutoTokenizer.from_pretrained(Path(flashllm.__file__).parent / "demo")
    marks = [f"<answer {number}>" for number in range(ANSWERS)]
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.chat_template = TEMPLATE
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        bos_token_id=2,
        eos_token_id=2,
        pad_token_id=1,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(root / "hf")
    tokenizer.save_pretrained(root / "hf")
    convert(root / "hf", root / "model")
    return root / "model"


@contextmanager
def serving(
    path: Path, work: Path, *, scripted: bool, says: Says = answer, bodies: list[bytes] | None = None
) -> Iterator[tuple[str, list[dict[str, Any]], list[str]]]:
    """The server's address, what was asked of the model, and the requests with their statuses; `bodies` gets theirs."""
    tokenizer = Tokenizer.load(path)
    script = (Script if scripted else ChatTemplate).of(tokenizer)
    assert script is not None
    if isinstance(script, Script):
        script.work, script.tokenizer, script.answers, script.asked = work, tokenizer, {}, []
        script.says = says
    requests: list[str] = []
    defaults = SamplingOptions(repetition_penalty=1.0 if scripted else PENALTY)
    options = ServerOptions(name="scripted", tool_format="generic", defaults=defaults)
    with Model.open(path, RunConfig(mode="dense", threads=2)) as opened:
        model: Any = Scripted(opened, script.answers) if isinstance(script, Script) else opened
        with app_of(model, tokenizer, script, options, limit=10**9) as (app, worker):

            async def noted(scope: Any, receive: Any, send: Any) -> None:
                async def sent(message: Any) -> None:
                    if message["type"] == "http.response.start":
                        requests.append(f"{scope['method']} {scope['path']} {message['status']}")
                    await send(message)

                parts: list[bytes] = []

                async def received() -> Any:
                    message = await receive()
                    if bodies is not None and message["type"] == "http.request":
                        parts.append(message["body"])
                        if not message.get("more_body"):
                            bodies.append(b"".join(parts))
                    return message

                await app(scope, received, sent)

            sock = listen("127.0.0.1", 0)
            server = Server(noted, stopping=worker.cancel_all)
            thread = threading.Thread(target=lambda: server.run(sockets=[sock]))
            thread.start()
            try:
                yield url(sock), getattr(script, "asked", []), requests
            finally:
                server.stop()
                thread.join()
                sock.close()
                script.close()


def run(name: str, program: str, model: Path, log: Path | None, *, scripted: bool) -> dict[str, Any]:
    """An agent's one task."""
    agent = AGENTS[name]
    with tempfile.TemporaryDirectory(prefix=f"{name}-") as root:
        home, work = Path(root, "home"), Path(root, "work")
        home.mkdir()
        work.mkdir()
        with serving(model, work, scripted=scripted) as (address, asked, requests):
            for place, text in agent.files.items():
                (home / place).parent.mkdir(parents=True, exist_ok=True)
                (home / place).write_text(text.replace("ADDRESS", address))
            command = [program, *(word.replace("ADDRESS", address) for word in agent.command)]
            environment = {"HOME": str(home), "PATH": f"{Path(program).parent}:{os.defpath}"}
            given: dict[str, Any] = {"cwd": work, "env": environment, "stdin": subprocess.DEVNULL, "text": True}
            given |= {"timeout": MOST_SECONDS, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            version = subprocess.run([program, "--version"], check=False, **given).stdout
            began = time.monotonic()
            done = subprocess.run(command, check=False, **given)
            seconds = time.monotonic() - began
        if log is not None:
            parts = [done.stdout, *requests, json.dumps(asked, indent=1)]
            (log / f"{name}.log").write_text("\n".join(parts))
        file = work / "note.txt"
        return {
            "agent": name,
            "version": " ".join(re.findall(r"\d+\.[\d.]+", version)[:1]),
            "status": done.returncode,
            "written": file.is_file() and file.read_text().strip() == LINE,
            "seconds": round(seconds, 1),
            "requests": requests,
            "longest_prompt_chars": max((each["chars"] for each in asked), default=0),
            "tools": max((each["tools"] for each in asked), default=0),
        }


def run_alone(script: str, argv: list[str] | None) -> int:
    """Run a script again with `--inside`, in a network namespace that has loopback alone; its status."""
    given = sys.argv[1:] if argv is None else argv
    again = ["sh", "-c", 'ip link set lo up && exec "$@"', "sh", sys.executable, script, *given, "--inside"]
    return subprocess.run(["unshare", "-rn", *again], check=False).returncode


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("bins", metavar="BIN", nargs="+", type=Path)
    parser.add_argument("--only", nargs="+", choices=AGENTS, default=list(AGENTS))
    parser.add_argument("--log", metavar="DIR", type=Path, help="keep what each printed and asked")
    parser.add_argument("--model", metavar="DIR", type=Path, help="a model directory (default: one that is scripted)")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if not args.inside:
        return run_alone(__file__, argv)
    rows = []
    with tempfile.TemporaryDirectory(prefix="agents-") as root:
        model = args.model or make_model(Path(root))
        for name in args.only:
            program = shutil.which(name, path=":".join(str(each.resolve()) for each in args.bins))
            if program is None:
                print(f"{name}: not there", file=sys.stderr)
                continue
            rows.append(run(name, program, model, args.log, scripted=args.model is None))
            print(rows[-1], file=sys.stderr)
    print(json.dumps(rows))
    return int(not all(row["written"] if args.model is None else row["status"] == 0 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
