"""Samples of what the scripts of this folder try; `python bench/faults/table.py` has them try all of it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from operations import Operations

needs_a_shim = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="needs Linux and a C compiler"
)


def run(script, *arguments):
    """The JSON document of a script's last line; it must have ended well."""
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    document = json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}
    assert done.returncode == 0, (document.get("problems"), done.stderr[-5000:])
    assert document["bad"] == 0
    return document


@pytest.fixture(scope="module")
def laid_down(tmp_path_factory):
    """The files that operations work on, made here: what that takes is imported already."""
    root = tmp_path_factory.mktemp("files")
    Operations(root).lay_down()
    return str(root)


@needs_a_shim
def test_a_sample_of_faults(laid_down):
    summary = run("harness.py", "--sample", "5", "--root", laid_down)
    operations = ("convert", "generate", "verify", "offload", "offload run", "train", "serve")
    assert summary["trials"] == 5 * len(operations)
    for operation in operations:
        met = {verdict for name, _, verdict, _ in summary["table"] if name == operation}
        assert met <= {"right", "error", "other"}
    assert {verdict for _, _, verdict, _ in summary["table"]} >= {"right", "error"}  # faults were met


def test_a_sample_of_wrong_completions():
    document = run("completions.py", "--trials", "60")
    assert "skipped" in document or sum(row["tried"] for row in document["table"]) == 60


def test_random_reads_with_random_faults():
    document = run("reads.py", "--reads", "20000", "--one-in", "300")
    for each in document["runs"]:
        assert each["right"] > 0.5 * each["batches"]
        assert each["retries"] > 0  # faults were met


@needs_a_shim
def test_a_sample_of_deaths(laid_down):
    table = run("kills.py", "--sample", "1", "--root", laid_down)["table"]
    assert sum(row["tried"] for row in table) == 12
    assert sum(row["changes_lost"] for row in table) > 0
