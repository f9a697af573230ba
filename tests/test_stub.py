"""`_core.pyi` is generated; it names what the module has, no more and no less."""

import ast
import json
from pathlib import Path

from scripts import run_python

import flashllm

STUB = Path(flashllm.__file__).with_name("_core.pyi")
ADVICE = "python -m nanobind.stubgen -m flashllm._core -o flashllm/_core.pyi"


# In a process of its own: the tests' core has more.
PUBLIC_NAMES = """
import json, types
from flashllm import _core
def public(names): return sorted(name for name in names if not name.startswith("_"))
print(json.dumps({name: public(vars(value)) if isinstance(value, type) else None
                  for name, value in vars(_core).items() if not name.startswith("_")}))
"""


def public(names):
    return {name for name in names if not name.startswith("_")}


def test_the_stub_is_of_this_module():
    tree = ast.parse(STUB.read_text(encoding="utf-8"))
    defined = {node.name: node for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    defined |= {node.target.id: node for node in tree.body if isinstance(node, ast.AnnAssign)}
    there = json.loads(run_python("-c", PUBLIC_NAMES).stdout)
    assert public(defined) == set(there), f"make it again: {ADVICE}"
    for name, node in defined.items():
        if isinstance(node, ast.ClassDef):
            members = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
            assert public(members) == set(there[name]), f"{name}: make it again: {ADVICE}"
