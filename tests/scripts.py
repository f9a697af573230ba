"""Scripts of `tools/` and `bench/` run as a user runs them, but in the tests' own process: what they import (torch,
transformers) would take longer than what they do. And what needs a process of its own."""

import contextlib
import gzip
import io
import json
import runpy
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

REPOSITORY = Path(__file__).parents[1]


def run_script(script: str, *arguments: object, status: int = 0) -> subprocess.CompletedProcess[str]:
    """`script`: its path in the repository. It must have ended with `status`."""
    path = REPOSITORY / script
    command = [str(path), *map(str, arguments)]
    said, complained, code = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.object(sys, "argv", command),
        mock.patch.object(sys, "path", [str(path.parent), *sys.path]),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(complained),
    ):
        try:
            runpy.run_path(command[0], run_name="__main__")
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                complained.write(end.code)
    assert code == status, (said.getvalue(), complained.getvalue())
    return subprocess.CompletedProcess(command, code, said.getvalue(), complained.getvalue())


def run_python(*arguments: object, status: int = 0, **options: Any) -> subprocess.CompletedProcess[Any]:
    """A Python with these arguments, and with the options of `subprocess.run`; it must have ended with `status`."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, check=False, **{"capture_output": True, "text": True, "timeout": 120, **options})
    assert done.returncode == status, (done.stdout, done.stderr)
    return done


def document_of(done: subprocess.CompletedProcess[str]) -> Any:
    """The JSON document of its last line."""
    return json.loads(done.stdout.splitlines()[-1])


def write_gz(path: Path, rows: Iterable[object]) -> Path:
    """A line of JSON for each row, compressed."""
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path
