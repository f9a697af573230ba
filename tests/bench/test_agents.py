"""The script that lets coding agents write a file: with one of a few lines, in the place of those from the indexes."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "bench/serve/agents.py"
AGENT = f"""#!{sys.executable}
import json, pathlib, sys
import openai
client = openai.OpenAI(base_url=sys.argv[sys.argv.index("--openai-base-url") + 1], api_key="any")
tools = [{{"type": "function", "function": {{"name": "write_file"}}}}]
messages = [{{"role": "user", "content": sys.argv[-1]}}]
for turn in range(2):
    said = client.chat.completions.create(model="scripted", messages=messages, tools=tools).choices[0].message
    messages.append(said)
    for call in said.tool_calls or ():
        arguments = json.loads(call.function.arguments)
        pathlib.Path(arguments["file_path"]).write_text(arguments["content"])
        messages.append({{"role": "tool", "tool_call_id": call.id, "content": "written"}})
print(said.content)
"""


def test_an_agent_writes_a_file(tmp_path):
    program = tmp_path / "qwen"
    program.write_text(AGENT)
    program.chmod(0o755)
    command = [sys.executable, SCRIPT, tmp_path, "--only", "qwen", "--inside", "--log", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout.splitlines()[-1])
    assert row["requests"] == ["POST /v1/chat/completions 200"] * 2
    assert (tmp_path / "qwen.log").read_text().startswith("The file is written.")
