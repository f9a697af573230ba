"""Finds the scripts of `predictors/`: next to the package in a checkout, inside it where a wheel was installed."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import flashllm
from flashllm.errors import FlashError, needing


def sample_text() -> Path:
    """A short English text, for where a user gives none. FlashError where it is missing."""
    return _folder() / "text_sample.txt"


def load(name: str) -> ModuleType:
    """The module `name` of the scripts, as it is where one of them is run. FlashError where they are missing."""
    folder = _folder()
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    with needing(f"predictors/{name}.py", "train"):
        return importlib.import_module(name)


def _folder() -> Path:
    package = Path(flashllm.__file__).parent
    for each in (package / "predictors", package.parent / "predictors"):
        if each.is_dir():
            return each
    raise FlashError(f"{package}: this installation lacks the predictors' scripts; install flashllm again")
