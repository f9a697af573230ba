"""The core's own C++ tests, built with the sanitizers (memory, undefined behaviour and data races), their arithmetic
for 64-bit ARM, which an emulator runs, and the core as Clang sees it."""

import os
import re
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nanobind
import pytest
from scripts import run_python

from flashllm import _core

ROOT = Path(__file__).parent.parent
CSRC = ROOT / "flashllm" / "csrc"
NATIVE = ROOT / "tests" / "native"
SANITIZERS = {
    # What `null` and `object-size` look for, the other one finds where memory is touched. Compiling at -O1 takes twice
    # as long as at -O0, ten times what the tests run faster then; of -fsanitize=thread it is the other way round.
    "address,undefined": [
        *("-O0", "-fsanitize=address,undefined", "-fno-sanitize=null,object-size", "-fno-sanitize-recover=all")
    ],
    "thread": ["-fsanitize=thread"],
}
ARM_COMPILER, ARM_EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
OF_ARITHMETIC = [
    *("attention/*.cpp", "kernels/**/*.cpp", "planes/*.cpp", "pack/*.cpp"),
    *("io/memory.cpp", "io/xxh3.cpp"),
    *(f"ffn/{name}.cpp" for name in ("dense_ffn", "expert_ffn", "expert_products", "experts", "ffn_group")),
    *(f"ffn/{name}.cpp" for name in ("neuron_norm", "predictor", "token_ffn")),
    *("sequence/page_pool.cpp", "sequence/sequence_state.cpp", "model/recurrence.cpp"),
]
TESTS_OF_ARITHMETIC = (
    *("attention", "compute", "experts", "sequence_state", "norm", "offload", "pack", "predictor", "recurrence"),
)


def _core_flags() -> dict[str, list[str]]:
    """What csrc/flags.txt says: flags of "all" files, and of single ones."""
    lines = (CSRC / "flags.txt").read_text(encoding="utf-8").splitlines()
    return {name: flags.split() for name, flags in (line.split(": ") for line in lines if line and line[0] != "#")}


def _build(compiler: str, sources: list[Path], flags: list[str], folder: Path) -> Path:
    """The program that these sources make; -g1: reports name functions and lines, at half the price of -g."""
    machine = subprocess.run([compiler, "-dumpmachine"], capture_output=True, text=True, check=True).stdout
    is_arm = machine.startswith("aarch64")
    levels = {name: flags for name, flags in _core_flags().items() if ("_neon" in name) == is_arm}
    common = [compiler, "-std=c++17", "-O1", "-g1", *_core_flags()["all"], "-Werror", f"-I{CSRC}", "-DFLASHLLM_TESTING"]

    with_avx512 = "avx512" in _core.simd_levels()

    def flags_of(source: Path) -> list[str]:
        name = source.relative_to(CSRC).as_posix() if CSRC in source.parents else ""
        own = [flag for flag in levels.get(name, []) if flag.startswith("-m")]
        # Levels have no thread of their own: the portable one shows races. What no test can reach on this machine need
        # only compile.
        if own and ("-fsanitize=thread" in flags or ("-mavx512f" in own and not with_avx512)):
            return ["-O0", *own]
        return [*flags, *own]

    def compiled(source: Path) -> str:
        out = str(folder / f"{source.parent.name}.{source.stem}.o")
        command = [*common, *flags_of(source), "-c", str(source), "-o", out]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, f"{source.name}:\n{result.stderr}"
        return out

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        largest_first = sorted(sources, key=lambda source: -source.stat().st_size)
        objects = list(pool.map(compiled, largest_first))
    program = folder / "core_tests"
    command = [compiler, *flags, *objects, "-o", str(program), "-pthread"]
    link = subprocess.run(command, capture_output=True, text=True, check=False)
    assert link.returncode == 0, link.stderr
    return program


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
    # All of the core but what speaks to Python.
    sources = [path for path in sorted(CSRC.rglob("*.cpp")) if path.relative_to(CSRC).parts[0] != "bind"]
    sources += [path for path in sorted(NATIVE.glob("*.cpp")) if path.name != "main_arithmetic.cpp"]
    program = _build("g++", sources, flags, tmp_path)
    result = subprocess.run([program, tmp_path], capture_output=True, text=True, timeout=600, check=False, cwd=tmp_path)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]
    assert "core tests passed" in result.stdout


@pytest.mark.sanitizer
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which(ARM_COMPILER) is None, reason=f"needs {ARM_COMPILER} (g++-aarch64-linux-gnu)")
@pytest.mark.skipif(shutil.which(ARM_EMULATOR) is None, reason=f"needs {ARM_EMULATOR} (qemu-user)")
def test_arithmetic_on_arm(tmp_path):
    """The same tests of the kernels, at the levels of NEON; their bits are those of AVX2."""
    sources = sorted(path for pattern in OF_ARITHMETIC for path in CSRC.glob(pattern))
    names = ("arithmetic", "digest", "main_arithmetic", *(f"test_{name}" for name in TESTS_OF_ARITHMETIC))
    program = _build(ARM_COMPILER, [*sources, *(NATIVE / f"{name}.cpp" for name in names)], ["-static"], tmp_path)

    def said(processor, *arguments):
        command = [ARM_EMULATOR, "-cpu", processor, program, *arguments]
        result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]
        return result.stdout.splitlines()

    without_dot, with_dot = said("cortex-a53", "digests"), said("max")
    assert "tests of arithmetic passed" in with_dot
    expected = f"digest {_core.digest('avx2')}" if "avx2" in _core.simd_levels() else with_dot[0]
    assert without_dot == [expected]
    assert with_dot[:-1] == [expected] * 2


@pytest.mark.sanitizer
@pytest.mark.skipif(shutil.which("clang++") is None, reason="needs clang++")
def test_clang_finds_nothing():
    """The wheels' compiler is Clang, which warns of what g++ takes: the core's files but those of single levels."""
    cmake = (CSRC / "CMakeLists.txt").read_text(encoding="utf-8")
    together = re.search(r"foreach\(folder (.+)\)", cmake)[1].split()
    apart = re.search(r'EXCLUDE REGEX "(.+?)"', cmake)[1]
    flags, groups = _core_flags(), {}
    for source in CSRC.rglob("*.cpp"):
        name = source.relative_to(CSRC).as_posix()
        if not any(flag.startswith("-m") for flag in flags.get(name, [])):
            alone = source.parent.name not in together or re.search(apart, name)
            groups.setdefault(name if alone else source.parent.name, []).append(f'#include "{name}"\n')
    headers = (CSRC, nanobind.include_dir(), sysconfig.get_path("include"))
    command = ["clang++", "-std=c++17", "-fsyntax-only", *flags["all"], "-Werror", *(f"-I{each}" for each in headers)]

    def said(lines):
        text = "".join(lines)
        done = subprocess.run([*command, "-x", "c++", "-"], input=text, capture_output=True, text=True, check=False)
        return "" if done.returncode == 0 else done.stderr

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        assert "".join(pool.map(said, groups.values())) == ""


def test_the_product_cannot_be_made_to_fail():
    """Its core has neither faults nor the other parts of the test build."""
    code = (
        "from flashllm import _core; print(hasattr(_core.DirectFile, 'inject'), hasattr(_core, 'hang_reads'), "
        "hasattr(_core.FfnLayer, 'set_trace'))"
    )
    assert run_python("-c", code).stdout.split() == ["False"] * 3
    assert hasattr(_core.DirectFile, "inject")
    assert hasattr(_core.FfnLayer, "set_trace")
