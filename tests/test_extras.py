"""Without the extras: what works, what says which extra it lacks, and that what they bring is told in one way."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import httpx
import pytest
import torch
from gguf_files import write_gguf
from safetensors.torch import load_file
from scripts import document_of, run_python
from tiny_models import make_tiny_opt

from flashllm import errors
from flashllm.errors import MissingPackage, needing

EXTRAS = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "optional-dependencies"
]
SERVE = {"starlette", "uvicorn", "prometheus_client"}
# Python runs this first, in the process and in those that it starts.
REFUSE = """
import sys
from importlib.machinery import PathFinder
class Lacking(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in {names!r} else PathFinder.find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Lacking
"""
THREE = ["--threads", "1", "--max-new-tokens", "3"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A function giving the environment of a process that has no package of an extra, but for `but`."""

    def get(but=frozenset()):
        folder = tmp_path_factory.mktemp("refuse")
        (folder / "sitecustomize.py").write_text(REFUSE.format(names=set(errors.EXTRA_OF) - but))
        return {**os.environ, "PYTHONPATH": str(folder), "HOME": str(folder)}

    return get


def statuses(environment, *commands):
    """(exit status of each of the commands, in one process without extras; what it said; its lines on stderr)"""
    code = "import json, sys; from flashllm.cli import main; print([main(argv) for argv in json.loads(sys.argv[1])])"
    asked = json.dumps([list(map(str, argv)) for argv in commands])
    done = run_python("-c", code, asked, env=environment(), input="The cat\n")
    return document_of(done), done.stdout, done.stderr.splitlines()


def all_run(environment, *commands):
    found, *said = statuses(environment, *commands)
    assert found == [0] * len(commands), said


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A Hugging Face folder in bfloat16, of several safetensors."""
    return make_tiny_opt(tmp_path_factory.mktemp("source") / "opt", dtype="bfloat16", max_shard_size="100KB")


def test_a_model_is_converted_and_used_without_any_extra(source, environment, tmp_path):
    model = tmp_path / "model"
    all_run(
        environment,
        ["convert", source, model],
        ["verify", model],
        ["inspect", model],
        ["plan", model, "--memory", "2GB"],
        ["chat", model, *THREE],
        ["generate", model, "--prompt", "The cat", *THREE],
        ["bench", model, "--threads", "1"],
        ["doctor", model],
    )
    command = [sys.executable, "-m", "flashllm", "serve", str(model), "--port", "0", "--threads", "1"]
    with subprocess.Popen(command, env=environment(SERVE), stderr=subprocess.PIPE, text=True) as server:
        try:
            said = next(line for line in server.stderr if "serving at" in line)
            body = {"prompt": "The cat", "max_tokens": 3}
            answer = httpx.post(re.search(r"http://\S+", said)[0] + "/v1/completions", json=body, timeout=60)
        finally:
            server.send_signal(signal.SIGINT)
            server.communicate(timeout=30)
    assert answer.json()["usage"]["completion_tokens"] == 3


def test_a_gguf_file_is_converted_and_used_without_any_extra(variant_of, environment, tmp_path):
    file, model = write_gguf(variant_of("llama")[0], tmp_path / "m.gguf", "Q8_0"), tmp_path / "model"
    all_run(environment, ["convert", file, model], ["chat", model, *THREE])


def test_what_lacks_an_extra_names_it(environment, source, tmp_path):
    pickled, old = tmp_path / "pickled", tmp_path / "old"
    for folder, keep in ((pickled, ("config.json", "tokenizer.json")), (old, ("config.json", "*.safetensors*"))):
        folder.mkdir()
        for path in (path for pattern in keep for path in source.glob(pattern)):
            shutil.copy(path, folder)
    weights = {name: tensor for path in source.glob("*.safetensors") for name, tensor in load_file(path).items()}
    torch.save(weights, pickled / "pytorch_model.bin")
    (old / "vocab.json").write_text("{}")
    lacking = {
        ("convert", pickled, tmp_path / "out"): ("torch", "hf"),
        ("convert", old, tmp_path / "out"): ("transformers", "hf"),
        ("train", "--data-files", __file__): ("torch", "train"),
        ("evaluate",): ("torch", "train"),
        ("serve",): ("uvicorn", "serve"),
    }
    found, _, lines = statuses(environment, *lacking)
    assert found == [2] * len(lacking)
    for line, names in zip(lines, lacking.values(), strict=True):
        assert (
            re.search(r" needs (\w+), which is not installed: pip install 'flashllm\[(\w+)\]'$", line).groups() == names
        )
    assert not (tmp_path / "out").exists()


def test_python_names_the_extra(environment):
    code = "import flashllm\ntry: from flashllm import FlashModel\nexcept ImportError as error: print(error)"
    said = run_python("-c", code, env=environment()).stdout
    assert said == "FlashModel needs torch, which is not installed: pip install 'flashllm[hf]'\n"


@pytest.mark.parametrize("package", sorted(errors.EXTRA_OF))
def test_the_extra_brings_the_package(package):
    with pytest.raises(MissingPackage, match=r"this needs \w+, .*flashllm\[(\w+)\]") as refused, needing("this"):
        raise ModuleNotFoundError("", name=f"{package}.inside")
    extra = re.search(r"\[(\w+)\]", str(refused.value))[1]
    names = {re.match(r"[\w-]+", requirement)[0].replace("-", "_") for requirement in EXTRAS[extra]}
    assert package in names


def test_a_package_of_no_extra_is_a_bug_as_ever():
    with pytest.raises(ModuleNotFoundError), needing("this"):
        raise ModuleNotFoundError("", name="numpy")


def test_a_source_folder_without_the_core_says_where_to_run():
    with (
        pytest.raises(MissingPackage, match=r"FlashModel needs the compiled core, .* another folder"),
        needing("FlashModel"),
    ):
        raise ModuleNotFoundError("No module named 'flashllm._core'", name="flashllm._core")
