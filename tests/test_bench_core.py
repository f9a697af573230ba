"""The core's benchmarks run, and end with one JSON document."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "bench"


@pytest.mark.parametrize(
    ("script", "arguments", "figures"),
    [
        ("kernels.py", ["--tiny", "--threads", "1", "--seconds", "0.001"], 9),
        ("reader.py", ["--file-size", "1MiB", "--sizes", "512B,4KiB", "--threads", "2", "--seconds", "0.001"], 2),
    ],
)
def test_benchmarks_end_with_one_json_document(script, arguments, figures, tmp_path):
    result = subprocess.run(
        [sys.executable, BENCH / script, *arguments], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout.splitlines()[-1])
    assert len(document["results"]) == figures
    assert all("percent_of_roof" in figure for figure in document["results"])
