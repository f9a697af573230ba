"""Where the scripts of `predictors/` are: beside the package in a checkout, inside it where a wheel was installed."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import flashllm
from flashllm.errors import FlashError


def load(name: str) -> ModuleType:
    """The module `name` of the scripts, as it is where one of them is run. FlashError where they are missing."""
    package = Path(flashllm.__file__).parent
    folder = next((each for each in (package / "predictors", package.parent / "predictors") if each.is_dir()), None)
    if folder is None:
        raise FlashError(f"{package}: this installation lacks the predictors' scripts; install flashllm again")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return importlib.import_module(name)
