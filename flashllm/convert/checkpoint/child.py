"""Runs a function in a process of its own, so that the memory of what it imports does not stay with the caller.

Knows no files.
"""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from flashllm import errors
from flashllm.errors import FlashError

# The child has the paths of this process, not those that its own directory and name would give it.
_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from flashllm.convert.checkpoint.child import _answer; _answer(sys.argv[2], sys.argv[3], sys.argv[4:])"
)


class ChildFailed(Exception):
    """The child ended without an answer; the message is the last line it said."""


def ask_child(function: Callable[..., Any], *arguments: str) -> Any:
    """Ask a child process what a module's function returns for texts, through JSON.

    A FlashError in the child is raised here; ChildFailed where anything else ends it.
    """
    module, name = function.__module__, function.__name__
    command = [sys.executable, "-P", "-c", _CODE, json.dumps(sys.path), module, name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", errors="replace", check=False)
    try:
        answer = json.loads(done.stdout)
    except ValueError as error:
        lines = done.stderr.splitlines() or [f"status {done.returncode}"]
        raise ChildFailed(lines[-1]) from error
    if "error" in answer:
        kind: type[FlashError] = getattr(errors, answer["error"])
        raise kind(answer["message"])
    return answer["result"]


def _answer(module: str, name: str, arguments: list[str]) -> None:
    """Write what the function returns to standard output, where nothing else shall go. Runs in the child."""
    out = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer
    try:
        answer = {"result": getattr(importlib.import_module(module), name)(*arguments)}
    except FlashError as error:
        answer = {"error": type(error).__name__, "message": str(error)}
    with os.fdopen(out, "w", encoding="utf-8") as file:
        json.dump(answer, file)
