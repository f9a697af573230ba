"""Imports point one way: a package may use those below it, and nothing else of this repository."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

from scripts import run_python

import flashllm

ROOT = Path(flashllm.__file__).parent
# From the ground up: a name is a package, or a module that stands alone.
ORDER = (
    *("_core", "errors", "config", "base", "replies", "arch", "format", "profile", "convert", "plan", "engine"),
    *("generate", "parked", "api", "hf", "offload", "pack", "chat", "serve", "commands"),
    *("cli", "__main__"),
)
# The same of the native core's folders; the kernels' levels hold those of planes.
CORE_FLOORS = (
    *(("machine",), ("io",), ("kernels", "planes"), ("attention",), ("cache",), ("ffn",)),
    *(("sequence",), ("model",), ("pack",), ("offload",), ("bind",)),
)
OFFLOAD_SHARES = {
    *("errors", "base", "replies", "api", "arch", "format", "convert"),
    *("profile", "generate", "config", "plan", "_core"),
}
ROOMS = (ROOT, *(ROOT.parent / room for room in ("predictors", "tools", "bench")))
MAX_MODULES = 12  # of one folder
MAX_NATIVE_UNITS = 16
TORCH_ALLOWED = ("convert", "hf", "offload")


def modules():
    for path in sorted(ROOT.rglob("*.py")):
        yield ".".join(("flashllm", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"), path


MODULES = dict(modules())


@cache
def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imported(path, *, top_level_only=False):
    """Dotted names of the modules that a file imports, inside functions too."""
    tree, names = tree_of(path), set()
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            of_modules = inner & {*MODULES, "flashllm._core"}
            names |= of_modules | ({node.module} if inner - of_modules else set())
    return names


def package(name):
    """The entry of ORDER that stands for a module; "" for `flashllm` itself, which holds nothing."""
    return name.removeprefix("flashllm").removeprefix(".").split(".")[0]


def test_every_module_has_its_place():
    assert {package(name) for name in MODULES} | {"_core"} == {*ORDER, ""}


def test_no_folder_is_a_corridor():
    python = [path for room in ROOMS for path in room.rglob("*.py") if path.name != "__init__.py"]
    for folder, count in Counter(path.parent for path in python).items():
        assert count <= MAX_MODULES, f"{folder.relative_to(ROOT.parent)}: {count} modules; split it"
    units = {path.with_suffix("") for path in (ROOT / "csrc").rglob("*") if path.suffix in (".cpp", ".h")}
    for folder, count in Counter(unit.parent for unit in units).items():  # a header and its source are one
        assert count <= MAX_NATIVE_UNITS, f"{folder.relative_to(ROOT)}: {count} units; split it"


def upward():
    """(module, imported) of each import that does not point down the list."""
    for name, path in MODULES.items():
        mine = package(name)
        for other in imported(path):
            if other.split(".")[0] != "flashllm" or other == "flashllm":
                continue
            theirs = package(other)
            if mine not in ("", theirs) and ORDER.index(theirs) > ORDER.index(mine):
                yield name, other


def test_imports_point_down():
    assert not list(upward())


def test_the_core_includes_what_lies_below():
    floor = {folder: number for number, folders in enumerate(CORE_FLOORS) for folder in folders}
    sources = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".cpp", ".h")]
    assert {path.relative_to(ROOT / "csrc").parts[0] for path in sources} == set(floor)
    for path in sources:
        mine = path.relative_to(ROOT / "csrc")
        for other in re.findall(r'^#include "([^"]+)"', path.read_text(encoding="utf-8"), re.MULTILINE):
            assert floor[other.split("/")[0]] <= floor[mine.parts[0]], f"{mine} includes {other}"


def test_packages_inside_have_no_cycle():
    edges = {
        name: {other for other in imported(path) if package(other) == package(name)} for name, path in MODULES.items()
    }
    done = set()
    while ready := {name for name, others in edges.items() if name not in done and others - {name} <= done}:
        done |= ready
    assert done == set(edges)


def stray(name, path):
    """(module, imported) of each import that its room does not allow."""
    for other in imported(path):
        top = other.split(".")[0]
        outside = top in ("predictors", "tools", "bench", "tests")
        not_shared = (
            package(name) == "offload" and top == "flashllm" and package(other) not in OFFLOAD_SHARES | {"offload"}
        )
        heavy = package(name) not in TORCH_ALLOWED and top in ("torch", "transformers")
        if outside or not_shared or heavy:
            yield name, other


def test_a_module_uses_the_product_alone():
    assert [each for name, path in MODULES.items() for each in stray(name, path)] == []


def test_lazy_imports_are_for_the_command_line_alone():
    for name, path in MODULES.items():
        if name in ("flashllm", "flashllm.cli", "flashllm.__main__") or package(name) in ("commands", "offload"):
            continue
        inside = {other for other in imported(path) if other.startswith("flashllm")}
        assert inside == {other for other in imported(path, top_level_only=True) if other.startswith("flashllm")}, name


def test_importing_loads_neither_torch_nor_transformers():
    entrances = ("flashllm", "flashllm.cli", "flashllm.plan.resolve", "flashllm.convert.run", "flashllm.offload.engine")
    code = f"import {', '.join(entrances)}, sys; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    assert run_python("-c", code).stdout.strip() == "[]"
