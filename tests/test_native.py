"""The core's own C++ tests, built plain and with the sanitizers: memory, undefined behaviour and data races."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flashllm import _core

ROOT = Path(__file__).parent.parent
CSRC = ROOT / "flashllm" / "csrc"
NATIVE = ROOT / "tests" / "native"
SANITIZERS = {
    "plain": [],
    "address,undefined": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-fsanitize=thread"],
}


def _is_x86() -> bool:
    machine = subprocess.run(["g++", "-dumpmachine"], capture_output=True, text=True, check=True).stdout
    return machine.startswith("x86_64")


def _core_flags() -> dict[str, list[str]]:
    """What csrc/flags.txt says: flags of "all" files, and of single ones."""
    lines = (CSRC / "flags.txt").read_text(encoding="utf-8").splitlines()
    return {name: flags.split() for name, flags in (line.split(": ") for line in lines if line and line[0] != "#")}


def _compile(source: Path, out: Path, flags: list[str]) -> None:
    core = _core_flags()
    level = core.get(source.relative_to(CSRC).as_posix(), []) if CSRC in source.parents and _is_x86() else []
    command = ["g++", "-std=c++17", "-O1", "-g", *core["all"], "-Werror", f"-I{CSRC}", "-DFLASHLLM_TESTING"]
    result = subprocess.run(
        [*command, *flags, *level, "-c", str(source), "-o", str(out)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, f"{source.name}:\n{result.stderr}"


@pytest.mark.sanitizer
@pytest.mark.timeout(900)  # beside other tests: some of it hands the processor over for every step
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_core_without_python(sanitizer, tmp_path):
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    flags = SANITIZERS[sanitizer]
    probe = tmp_path / "probe.cpp"
    probe.write_text("int main() { return 0; }\n")
    linked = subprocess.run(
        ["g++", *flags, str(probe), "-o", str(tmp_path / "probe")], capture_output=True, check=False
    )
    if linked.returncode != 0 or subprocess.run([tmp_path / "probe"], capture_output=True, check=False).returncode != 0:
        pytest.skip(f"needs the runtime of -fsanitize={sanitizer}")

    sources = [path for path in sorted(CSRC.rglob("*.cpp")) if path.parent.name != "bind"]
    sources += sorted(NATIVE.glob("*.cpp"))
    objects = [tmp_path / f"{source.stem}.o" for source in sources]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda source, out: _compile(source, out, flags), sources, objects))
    program = tmp_path / "core_tests"
    link = subprocess.run(
        ["g++", *flags, *map(str, objects), "-o", str(program), "-pthread"], capture_output=True, text=True, check=False
    )
    assert link.returncode == 0, link.stderr
    result = subprocess.run([program, tmp_path], capture_output=True, text=True, timeout=600, check=False, cwd=tmp_path)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]
    assert "core tests passed" in result.stdout


def test_the_product_cannot_be_made_to_fail():
    """Its core has neither faults nor the other parts of the test build."""
    code = "from flashllm import _core; print(hasattr(_core.DirectFile, 'inject'), hasattr(_core, 'SlotTable'))"
    product = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert product.stdout.split() == ["False", "False"]
    assert hasattr(_core.DirectFile, "inject")
