"""The script that lets coding agents write a file: with one of a few lines, in the place of those from the indexes."""

import sys

from scripts import document_of, run_script

AGENT = f"""#!{sys.executable}
import json, pathlib, sys, urllib.request
address = sys.argv[sys.argv.index("--openai-base-url") + 1] + "/chat/completions"
tools = [{{"type": "function", "function": {{"name": "write_file"}}}}]
messages = [{{"role": "user", "content": sys.argv[-1]}}]
for turn in range(2):
    body = json.dumps({{"model": "scripted", "messages": messages, "tools": tools}}).encode()
    asked = urllib.request.Request(address, body, {{"Content-Type": "application/json"}})
    said = json.load(urllib.request.urlopen(asked))["choices"][0]["message"]
    messages.append({{name: value for name, value in said.items() if name != "refusal"}})
    for call in said.get("tool_calls", ()):
        arguments = json.loads(call["function"]["arguments"])
        pathlib.Path(arguments["file_path"]).write_text(arguments["content"])
        messages.append({{"role": "tool", "tool_call_id": call["id"], "content": "written"}})
print(said["content"])
"""


def test_an_agent_writes_a_file(tmp_path):
    program = tmp_path / "qwen"
    program.write_text(AGENT)
    program.chmod(0o755)
    done = run_script("bench/serve/agents.py", tmp_path, "--only", "qwen", "--inside", "--log", tmp_path)
    (row,) = document_of(done)
    assert row["requests"] == ["POST /v1/chat/completions 200"] * 2
    assert (tmp_path / "qwen.log").read_text().startswith("The file is written.")
