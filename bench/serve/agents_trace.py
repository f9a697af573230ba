"""The messages of a coding agent with two sub-agents, recorded: their lengths in tokens, and which requests share them.

    python bench/serve/agents_trace.py BIN MODEL [--out FILE]

BIN has `opencode` (npm's opencode-ai). The model is the scripted one of `agents.py`: it has the agent read and search a
copy of a package of this repository, call two sub-agents and write a file. What the agent says of itself,
its tools and what they find are its own. Lengths are by MODEL's tokenizer. `serve_load.py --agents` sends texts of
these lengths. The last line is one JSON document.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agents import AGENTS, make_model, run_alone, serving

import flashllm
from flashllm.generate.tokenizer import Tokenizer

TRACE = Path(__file__).parent / "agents_trace.json"
ASK = "Explain how an answer's tokens are chosen in generate/, review it, and write what you find into notes.md."
SEARCH, REVIEW = "Find where a matcher is used", "Review how the logits are changed"
MOST_SECONDS = 300

Call = tuple[str, dict[str, Any]]


def script(work: Path) -> dict[str, list[Call | str]]:
    """What each conversation's answers are, by what it begins with: calls in turn, then a text."""

    def task(kind: str, prompt: str) -> Call:
        return "task", {"description": prompt, "subagent_type": kind, "prompt": f"{prompt}. Say it in a few sentences."}

    def read(name: str, offset: int = 1, limit: int = 80) -> Call:
        return "read", {"filePath": str(work / "generate" / name), "offset": offset, "limit": limit}

    def bash(command: str) -> Call:
        return "bash", {"command": command, "description": "Looks at the package"}

    def grep(pattern: str) -> Call:  # the agent's own tool wants a program from the net
        return bash(f"grep -rn --include='*.py' '{pattern}' generate")

    found = "Session gives its matcher to the sampler, which asks it for a mask and tells it each token. " * 3
    return {
        ASK: [
            *(bash("find . -name '*.py'"), read("sampling.py"), read("sampling.py", 81), grep("def choose")),
            *(task("explore", SEARCH), read("grammar.py", 80, 60), bash("wc -l generate/*.py"), grep("Sampler")),
            *(read("session.py", 1, 60), task("general", REVIEW), grep("argmax"), read("detokenizer.py", 1, 40)),
            ("write", {"filePath": str(work / "notes.md"), "content": f"# Notes\n\n{found}\n"}),
            *(bash("cat notes.md"), bash("ls -l"), f"The notes are written. {found}"),
        ],
        SEARCH: [grep("matcher"), read("grammar.py", 80, 100), read("decoding.py", 1, 60), grep("masked"), found],
        REVIEW: [read("sampling.py", 50, 100), grep("logits"), bash("grep -c '' generate/*.py"), found],
    }


def of(message: Mapping[str, Any]) -> str:
    """The text of a message, and its calls."""
    content = message.get("content") or ""
    text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    return text + "".join(json.dumps(call["function"]) for call in message.get("tool_calls") or [])


def says(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], work: Path) -> str:
    asked = next((of(each) for each in messages if each["role"] == "user"), "")
    planned = script(work)
    who = next((name for name in planned if name in asked), None)
    if who is None or not tools:
        return "How tokens are chosen"
    step = planned[who][sum(each["role"] == "tool" for each in messages)]
    if isinstance(step, str):
        return step
    call = json.dumps({"name": step[0], "arguments": step[1]})
    return f"I look at the next part.\n<tool_call>\n{call}\n</tool_call>"


def record(program: str) -> tuple[list[dict[str, Any]], str]:
    """The bodies of an agent's requests, and what it printed."""
    agent, bodies = AGENTS["opencode"], list[bytes]()
    with tempfile.TemporaryDirectory(prefix="trace-") as root:
        home, work = Path(root, "home"), Path(root, "work")
        shutil.copytree(Path(flashllm.__file__).parent / "generate", work / "generate")
        with serving(make_model(Path(root)), work, scripted=True, says=says, bodies=bodies) as (address, _, _):
            for place, text in agent.files.items():
                (home / place).parent.mkdir(parents=True, exist_ok=True)
                (home / place).write_text(text.replace("ADDRESS", address))
            command = [program, *agent.command[:-1], ASK]
            environment = {"HOME": str(home), "PATH": f"{Path(program).parent}:{os.defpath}"}
            done = subprocess.run(
                command, cwd=work, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, timeout=MOST_SECONDS, check=False,
            )  # fmt: skip
        if done.returncode or not (work / "notes.md").is_file():
            raise RuntimeError(f"the agent ended with status {done.returncode}: {done.stdout[-2000:]}")
    return [json.loads(body) for body in bodies if b'"messages"' in body], done.stdout


def trace_of(bodies: list[dict[str, Any]], tokenizer: Tokenizer) -> dict[str, Any]:
    """Each different piece (a tool, a message) once, with its length; each request as its pieces."""
    pieces: dict[tuple[str, str], int] = {}
    lengths: list[list[Any]] = []
    requests: list[dict[str, Any]] = []
    for body in bodies:
        said = [("tools", json.dumps(tool)) for tool in body.get("tools") or []]
        said += [(each["role"], of(each)) for each in body["messages"]]
        user = next(text for role, text in said if role == "user")
        who = next((who for who, name in zip(("main", "searching", "reviewing"), script(Path()), strict=True)
                    if name in user and body.get("tools")), "title")  # fmt: skip
        for piece in said:
            if piece not in pieces:
                pieces[piece] = len(pieces)
                lengths.append([piece[0], len(tokenizer.encode(piece[1], add_special=False))])
        ids = [pieces[piece] for piece in said]
        same = [next((at for at, pair in enumerate(zip(ids, other["pieces"], strict=False)) if pair[0] != pair[1]),
                     min(len(ids), len(other["pieces"]))) for other in requests]  # fmt: skip
        shared = max(same, default=0)
        requests.append({
            "who": who, "pieces": ids, "tokens": sum(lengths[at][1] for at in ids),
            "shares_with": same.index(shared) if shared else None, "shared": sum(lengths[at][1] for at in ids[:shared]),
        })  # fmt: skip
    return {"pieces": lengths, "requests": requests}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("bin", metavar="BIN", type=Path)
    parser.add_argument("model", metavar="MODEL", type=Path, help="a model directory")
    parser.add_argument("--out", metavar="FILE", type=Path, default=TRACE)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if not args.inside:
        return run_alone(__file__, argv)
    program = shutil.which("opencode", path=str(args.bin.resolve()))
    if program is None:
        parser.error(f"{args.bin} has no opencode")
    bodies, printed = record(program)
    print(printed, file=sys.stderr)
    document = json.dumps(trace_of(bodies, Tokenizer.load(args.model)))
    args.out.write_text(document + "\n")
    print(document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
