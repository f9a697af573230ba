"""transformers' modelling code without what it loads for others: torch's compiler, distributed tensors and scipy.

They are imported to decorate and to describe what this engine never runs, and take 110 MB and two of six seconds
(torch 2.13, transformers 5.23): memory that holds seven thousand neurons of OPT-6.7B instead. For processes that are
ours alone, the commands: one that runs models on several devices wants transformers as it is.
"""

import importlib
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
_DECORATORS = ("allow_in_graph", "assume_constant_result", "disable")  # how a function is to be compiled, if ever
# What the engine imports of transformers, and through it everything that decorates.
_MODELLING = ("transformers.modeling_utils", "transformers.generation", "transformers.masking_utils")


def import_transformers() -> None:
    """Import torch and transformers' modelling code, alone. Does nothing where that code is imported already."""
    if any(name in sys.modules for name in (*_MODELLING, _COMPILER)):
        return
    import torch

    # Until the end of the process: this one runs on one device, and has no use for losses.
    never: Any = _never  # in the place of functions with a signature of their own
    torch.distributed.is_available = never
    utils: Any = importlib.import_module("transformers.utils")  # the package replaces itself while it is imported
    utils.is_scipy_available = never

    spec = importlib.machinery.PathFinder.find_spec(_COMPILER, torch.__path__)
    if spec is not None:
        sys.modules[_COMPILER] = _Undecorated(spec)
    try:
        for name in _MODELLING:
            importlib.import_module(name)
    finally:
        if isinstance(sys.modules.get(_COMPILER), _Undecorated):
            del sys.modules[_COMPILER]  # who wants the compiler from here on gets it


class _Undecorated(ModuleType):
    """Stands for the compiler and leaves functions as they are; if it is asked for more, the compiler takes over."""

    def __init__(self, spec: importlib.machinery.ModuleSpec) -> None:
        super().__init__(spec.name)
        self.__spec__ = spec
        self.__path__ = spec.submodule_search_locations or []  # one of its parts is imported alone

    def __getattr__(self, name: str) -> Any:
        if name in _DECORATORS:
            return _unchanged
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        sys.modules.pop(self.__name__, None)
        return getattr(importlib.import_module(self.__name__), name)


def _unchanged(function: Any = None, *args: Any, **kwargs: Any) -> Any:
    return function if callable(function) else _unchanged


def _never() -> bool:
    return False
