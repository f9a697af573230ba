"""The commands run without the parts of torch and transformers that others need, and those parts stay to be had."""

import subprocess
import sys

import pytest
import torch
from transformers.modeling_utils import PreTrainedModel  # as a program that uses transformers for itself has it

from flashllm.engine.lean_imports import import_transformers

HEAVY = ("sympy", "scipy", "torch._inductor", "torch.distributed.tensor", "torch.onnx")


def run(code, given=""):
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, input=given).stdout.splitlines()


@pytest.mark.parametrize(
    "arguments",
    [["generate", "--prompt", "The cat", "--max-new-tokens", "20"], ["chat", "--max-new-tokens", "5"], ["plan"]],
    ids=lambda arguments: arguments[0],
)
def test_commands_run_without_them(arguments):
    code = f"""
import sys
from flashllm.cli import main
status = main({arguments})
print()
print(status, [name for name in {HEAVY} if name in sys.modules])
"""
    assert run(code, given="The cat\n")[-1] == "0 []"


def test_the_compiler_is_imported_when_it_is_wanted():
    code = """
import sys
from flashllm.engine.lean_imports import import_transformers
import_transformers()
import torch
import flashllm.hf.model
print("torch._inductor" in sys.modules)
print(torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(2)).tolist(), "torch._inductor" in sys.modules)
"""
    assert run(code) == ["False", "[1.0, 1.0] True"]


def test_a_process_that_has_transformers_keeps_it_as_it_is():
    available = torch.distributed.is_available
    import_transformers()
    assert torch.distributed.is_available is available
    assert sys.modules[PreTrainedModel.__module__].PreTrainedModel is PreTrainedModel


def test_a_decorator_that_is_not_known_is_the_compilers_own():
    code = """
import sys
import torch, transformers.utils
class Finder:
    def find_spec(name, path, target=None):
        if name == "transformers.modeling_utils":
            print(torch._dynamo.disable(abs) is abs, torch._dynamo.disable(recursive=False)(abs) is abs)
            print(torch._dynamo.is_compiling(), "torch._inductor" in sys.modules)
sys.meta_path.insert(0, Finder)
from flashllm.engine.lean_imports import import_transformers
import_transformers()
print("transformers.modeling_utils" in sys.modules)
"""
    assert run(code) == ["True True", "False True", "True"]
