"""The server's load script runs, and ends with one JSON document."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "bench/serve/serve_load.py"


def test_a_small_load():
    small = ["--requests", "6", "--at-once", "2", "--rounds", "1", "--tokens", "5"]
    done = subprocess.run([sys.executable, SCRIPT, *small], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["load"]["answered"] == 6
    assert report["overhead"]["server_ms"] > 0
