"""A sample of the faults that harness.py tries; `python tests/faults/harness.py` tries them all."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HARNESS = Path(__file__).with_name("harness.py")


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="needs Linux and a C compiler")
@pytest.mark.parametrize("operation", ["convert", "generate", "verify", "offload"])
def test_a_sample_of_faults(operation):
    done = subprocess.run(
        [sys.executable, str(HARNESS), "--sample", "15", "--only", operation],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["trials"] == 15
    assert summary["bad"] == 0
    assert {row[2] for row in summary["table"]} == {"right", "error"}  # faults were met
