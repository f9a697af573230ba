"""What a process that makes tokens has loaded: the rest is memory for neurons, and seconds before the first token."""

import json
import shutil

from scripts import document_of, run_python

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
of_python = {*sys.stdlib_module_names, *sys.modules}  # Debian's has a sitecustomize too
from flashllm.cli import main
found = []
for argv in json.loads(sys.argv[1]):
    status = main(argv)
    names = [name for name, module in sys.modules.items() if getattr(module, "__spec__", None)]  # no made-up ones
    found.append([status, names])
print()
print(json.dumps([found, sorted(of_python)]))
"""


def test_a_run_loads_numpy_and_the_tokenizer(tiny, tmp_path):
    """Also a chat through a pipe, which needs no terminal and no template engine. One after another in a process."""
    with_template = shutil.copytree(tiny().path(), tmp_path / "model")
    install_files(with_template, {"chat_template.jinja": [b"{% for m in messages %}{{ m.content }}{% endfor %}"]})
    generate = ["generate", str(tiny().path()), "--prompt", "The cat", *OPTIONS]
    runs = [generate, [*generate, "--json", "--temperature=1", "--top-p=0.9"], ["chat", str(with_template), *OPTIONS]]
    found, of_python = document_of(run_python("-c", CODE, json.dumps(runs), input="The little\n"))
    for argv, (status, names) in zip(runs, found, strict=True):
        assert status == 0, argv
        packages = {name.split(".")[0] for name in names} - set(of_python)
        assert {name for name in packages if not name.startswith("_")} == ALONE, argv
        assert not NOT_NEEDED & set(names), argv
