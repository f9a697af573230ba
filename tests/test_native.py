"""The core's own C++ tests, built plain and with the sanitizers: memory, undefined behaviour and data races."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CSRC = ROOT / "flashllm" / "csrc"
NATIVE = ROOT / "tests" / "native"
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"]
LEVEL_FLAGS = {
    "kernels_avx2.cpp": ["-mavx2", "-mfma", "-mf16c"],
    "kernels_avx512.cpp": AVX512,
    "kernels_avx512_bf16.cpp": [*AVX512, "-mavx512bf16"],
}
SANITIZERS = {
    "plain": [],
    "address,undefined": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-fsanitize=thread"],
}


def _is_x86() -> bool:
    machine = subprocess.run(["g++", "-dumpmachine"], capture_output=True, text=True, check=True).stdout
    return machine.startswith("x86_64")


def _compile(source: Path, out: Path, flags: list[str]) -> None:
    level = LEVEL_FLAGS.get(source.name, []) if _is_x86() else []
    command = ["g++", "-std=c++17", "-O1", "-g", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}"]
    result = subprocess.run(
        [*command, *flags, *level, "-c", str(source), "-o", str(out)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, f"{source.name}:\n{result.stderr}"


@pytest.mark.sanitizer
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
    objects = []
    for source in sources:
        objects.append(tmp_path / f"{source.stem}.o")
        _compile(source, objects[-1], flags)
    program = tmp_path / "core_tests"
    link = subprocess.run(
        ["g++", *flags, *map(str, objects), "-o", str(program), "-pthread"], capture_output=True, text=True, check=False
    )
    assert link.returncode == 0, link.stderr
    scale = "3" if sanitizer == "plain" else "1"
    result = subprocess.run(
        [program, tmp_path, scale], capture_output=True, text=True, timeout=240, check=False, cwd=tmp_path
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]
    assert "core tests passed" in result.stdout
