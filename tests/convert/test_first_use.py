"""The first use of a model by two processes at once: one converts it, the other waits."""

import subprocess
import sys

import pytest
from arch_models import VARIANTS, make_checkpoint

from flashllm.convert.locate import resolve_model
from flashllm.format.report.verify import verify

# Stops where the conversion has begun, until a line comes.
FIRST = """
import sys
from flashllm.convert.locate import resolve_model
begun = []
def progress(*report):
    if not begun:
        begun.append(print("begun", flush=True))
        sys.stdin.readline()
print(resolve_model(sys.argv[1], cache=__import__("pathlib").Path(sys.argv[2]), progress=progress))
"""
SECOND = """
import sys
from pathlib import Path
from flashllm.convert.locate import resolve_model
say = lambda line: print(line, flush=True)
print(resolve_model(sys.argv[1], cache=Path(sys.argv[2]), say=say, converted=lambda path: say("converted here")))
"""


@pytest.fixture
def begin():
    processes = []

    def start(script, *arguments):
        command = [sys.executable, "-c", script, *map(str, arguments)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("dies", [False, True], ids=["it ends", "it dies"])
def test_the_second_process_waits_and_converts_where_the_first_does_not(begin, tmp_path, dies):
    source = make_checkpoint(tmp_path / "hf", VARIANTS["opt"])
    cache = tmp_path / "cache"
    first = begin(FIRST, source, cache)
    assert first.stdout.readline() == "begun\n"
    second = begin(SECOND, source, cache)
    assert second.stdout.readline() == f"another process converts {source}; waiting for it\n"
    if dies:
        first.kill()
    else:
        said, _ = first.communicate("\n")
    found = second.communicate()[0].splitlines()
    path = resolve_model(str(source), cache=cache, convert_on_first_use=False)
    assert second.returncode == 0
    assert found == [*(["converted here"] if dies else []), str(path)]
    assert dies or said == f"{path}\n"
    assert verify(path).ok
    assert [each.name for each in path.parent.iterdir()] == [path.name]
