"""Imports point one way: each module may use those above it in the list, and nothing else of this repository."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import flashllm

ROOT = Path(flashllm.__file__).parent
# From the ground up. A new module goes in where its imports allow; `offload` is one entry, ordered by itself.
ORDER = """
    flashllm errors terminal lean_imports _core
    units checks dtypes machine architectures files progress bundle safetensors_file
    model_files trace predictor_file svd_predictor untrained manifest popularity placement placed_file
    partial source hub conversion_plan convert reorder verify inspect demo
    device_costs device_store reader ablation stream meter resident linear norm dense attention budget
    expected_activity latency ffn decoder engine model
    detokenizer generate measure_products measure_reads calibrate turn_stats chat chat_terminal
    offload
    commands commands.options commands.convert commands.inspect commands.verify
    commands.calibrate commands.runtime commands.plan commands.generate commands.chat
    cli __main__
""".split()  # noqa: SIM905
OFFLOAD_SHARES = {"errors", "units", "terminal", "architectures", "files", "bundle", "_core", "machine"}
NO_TORCH = (
    "dtypes",
    "machine",
    "architectures",
    "files",
    "bundle",
    "safetensors_file",
    "model_files",
    "predictor_file",
    "trace",
    "manifest",
    "popularity",
    "placement",
    "placed_file",
    "reorder",
    "budget",
    "device_costs",
    "device_store",
    "expected_activity",
    "latency",
)


def modules():
    for path in sorted(ROOT.rglob("*.py")):
        yield ".".join(("flashllm", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"), path


def imported(path, *, top_level_only=False):
    """Dotted names of the modules that a file imports, inside functions too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner == "flashllm._core" or _is_module(inner) else node.module


def _is_module(name):
    if not name.startswith("flashllm."):
        return False
    path = ROOT.joinpath(*name.split(".")[1:])
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def entry(name):
    """The entry of ORDER that stands for a module."""
    short = name.removeprefix("flashllm.")
    return "offload" if short.split(".")[0] == "offload" else short


def test_every_module_has_its_place():
    assert {entry(name) for name, _ in modules()} | {"_core"} == set(ORDER)
    assert len(ORDER) == len(set(ORDER))


@pytest.mark.parametrize(("name", "path"), list(modules()), ids=lambda value: value if isinstance(value, str) else "")
def test_imports_point_up_the_list(name, path):
    mine = entry(name)
    for other in imported(path):
        top = other.split(".")[0]
        assert top not in ("predictors", "tools", "bench", "tests"), f"{name} imports {other}"
        if top != "flashllm":
            continue
        theirs = entry(other)
        if mine == theirs == "offload" or (name, other) == ("flashllm", "flashllm.model"):  # the lazy top level
            continue
        assert ORDER.index(theirs) < ORDER.index(mine), f"{name} imports {other}"
        if mine == "offload":
            assert theirs in OFFLOAD_SHARES, f"{name} imports {other}"


@pytest.mark.parametrize("name", NO_TORCH)
def test_bookkeeping_has_no_tensors(name):
    tops = {other.split(".")[0] for other in imported(ROOT / f"{name}.py")}
    assert not tops & {"torch", "transformers"}


def test_lazy_imports_are_for_the_command_line_alone():
    for name, path in modules():
        if name in ("flashllm", "flashllm.cli") or entry(name).startswith(("commands", "offload")):
            continue
        inside = {other for other in imported(path) if other.startswith("flashllm")}
        assert inside == {other for other in imported(path, top_level_only=True) if other.startswith("flashllm")}, name


@pytest.mark.parametrize(
    "statement", ["import flashllm", "import flashllm.cli", "import flashllm.budget", "import flashllm.convert"]
)
def test_importing_loads_neither_torch_nor_transformers(statement):
    code = f"{statement}, sys; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
