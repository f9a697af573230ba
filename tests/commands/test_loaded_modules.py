"""What a process that makes tokens has loaded: the rest is memory for neurons, and seconds before the first token."""

import json
import shutil
import subprocess
import sys

import pytest

from flashllm.format.install import install_files

ALONE = {"flashllm", "numpy", "psutil", "tokenizers"}
# Of the product: what converts a checkpoint is loaded where there is one to convert; the rest are other verbs'.
NOT_NEEDED = {
    *("flashllm.convert.run", "flashllm.convert.locate", "flashllm.convert.kept", "flashllm.convert.checkpoint.gguf"),
    *("flashllm.api", "flashllm.hf", "flashllm.offload", "flashllm.pack", "flashllm.serve"),
}
OPTIONS = ["--threads", "1", "--max-new-tokens", "3"]
CODE = """
import json, sys
from flashllm.cli import main
status = main(sys.argv[1:])
found = [name for name, module in sys.modules.items() if getattr(module, "__spec__", None)]  # no made-up ones
names = {name.split(".")[0] for name in found} - set(sys.stdlib_module_names)
print()
inside = [name for name in found if name.startswith("flashllm.")]
print(json.dumps([status, sorted(name for name in names if not name.startswith("_")), inside]))
"""


def loaded(*argv):
    """(status, packages that are not Python's own) of a command that runs a converted model."""
    command = [sys.executable, "-c", CODE, *map(str, argv)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, input="The little\n")
    status, names, inside = json.loads(done.stdout.splitlines()[-1])
    assert not NOT_NEEDED & set(inside)
    return status, set(names)


@pytest.mark.parametrize("more", ["", "--json --temperature=1 --top-p=0.9"])
def test_generate_loads_numpy_and_the_tokenizer(tiny, more):
    status, names = loaded("generate", tiny().path(), "--prompt", "The cat", *OPTIONS, *more.split())
    assert status == 0
    assert names == ALONE


def test_a_chat_through_a_pipe_needs_no_terminal_and_no_template_engine(tiny, tmp_path):
    path = tmp_path / "model"
    shutil.copytree(tiny().path(), path)
    install_files(path, {"chat_template.jinja": [b"{% for m in messages %}{{ m.content }}{% endfor %}"]})
    status, names = loaded("chat", path, *OPTIONS)
    assert status == 0
    assert names == ALONE
