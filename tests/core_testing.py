"""Importing this puts the native core's test build, `_core_testing`, in the place of `flashllm._core`.

And torch's threads that wait sleep from now on, here and in processes that tests start: where they spin, and other
tests have the processors, products of milliseconds take minutes.
"""

import importlib.util
import os
import sys
from importlib.machinery import ExtensionFileLoader

import flashllm

NAME = "flashllm._core"
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is loaded


def _load() -> None:
    assert NAME not in sys.modules, "the product's core is loaded already"
    found = importlib.util.find_spec("flashllm._core_testing")
    if found is None or found.origin is None:
        raise ImportError(
            "the tests need the core's test build: install with `pip install -e '.[dev]'`, or build csrc with "
            "-DFLASHLLM_TESTING=ON"
        )
    # The file's name is not its module's: both are flashllm._core to whoever imports them.
    spec = importlib.util.spec_from_loader(NAME, ExtensionFileLoader(NAME, found.origin), origin=found.origin)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    assert spec.loader is not None
    spec.loader.exec_module(module)
    flashllm._core = module


_load()
