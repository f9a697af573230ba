"""The READMEs' commands: every one is understood; the two set-up lines run as they stand, in a fresh clone."""

import importlib
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from fresh_home import fresh_home

from flashllm.cli import make_parser

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDERS = (".", "bench", "flashllm", "flashllm/*", "predictors")
READMES = sorted(path for folder in FOLDERS for path in REPOSITORY.glob(f"{folder}/README.md"))


def commands(text: str) -> Iterator[list[str]]:
    """The words of every command in a document's shell blocks."""
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while "&&" in words:
                yield words[: words.index("&&")]
                words = words[words.index("&&") + 1 :]
            if words:
                yield words


def problem(words: list[str], extras: set[str]) -> str | None:
    """What of a command is not so: a verb, an option, a script, an extra. None where all is."""
    program = words[0].split("/")[-1]
    if words[1:3] == ["bench/engine/traced.py", "protocol"]:  # it runs that
        words = [words[0], "bench/protocol.py", *words[3:]]
    if words[1:2] == ["bench/engine/traced.py"]:  # it runs a command of flashllm
        program, words = "flashllm", words[1:]
    if "-m" in words:
        program, words = words[words.index("-m") + 1], words[words.index("-m") + 1 :]
    if program == "flashllm":
        given = words[1:]
        try:
            make_parser(given[0]).parse_args(given)
        except SystemExit as stop:
            return None if stop.code == 0 else f"flashllm does not understand {given}"
    elif program == "pip":
        wanted = {name for word in words for found in re.findall(r"\[(.*)\]", word) for name in found.split(",")}
        return f"no extras {wanted - extras}" if wanted - extras else None
    elif program == "python":
        script = REPOSITORY / words[1]
        if not script.is_file():
            return f"no script {words[1]}"
        known = "".join(path.read_text(encoding="utf-8") for path in script.parent.glob("*.py"))
        unknown = [word for word in words if word.startswith("--") and f'"{word}"' not in known]
        return f"{words[1]} has no {unknown}" if unknown else None
    return None


def readme_line(marker: str) -> str:
    """The one command in the code block after `<!-- marker -->`."""
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    block = re.search(rf"<!-- {marker} -->\n```sh\n(.*?)\n```", text, re.DOTALL)
    assert block is not None, f"README.md has no block after <!-- {marker} -->"
    lines = block[1].splitlines()
    assert len(lines) == 1, f"the {marker} must be one line"
    return lines[0]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("git") is None or not (REPOSITORY / ".git").exists():
        pytest.skip("needs git and a checkout to clone")
    target = tmp_path_factory.mktemp("readme") / "flashllm"
    subprocess.run(["git", "clone", "-q", str(REPOSITORY), str(target)], check=True)
    return target


def test_every_document_with_commands_is_read() -> None:
    assert len(READMES) >= 8
    assert sum(len(list(commands(path.read_text(encoding="utf-8")))) for path in READMES) > 50


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.relative_to(REPOSITORY).as_posix())
def test_commands_are_understood(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = set(project["optional-dependencies"])
    found = [problem(words, extras) for words in commands(path.read_text(encoding="utf-8"))]
    assert [each for each in found if each is not None] == [], capsys.readouterr().err


def test_wrong_commands_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    text = "flashllm chat --gone && flashllm gone\npython bench/gone.py\npip install '.[serve,gone]'  # why\n"
    text += "python bench/tables.py \\\n  --gone\ntorchrun -m flashllm offload gone\nflashllm chat demo\n"
    found = [problem(words, {"serve"}) for words in commands(f"```sh\n{text}```\n")]
    assert len(found) == 7
    assert [each is None for each in found] == [False] * 6 + [True]


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.relative_to(REPOSITORY).as_posix())
def test_python_examples_compile_and_their_imports_exist(path: Path) -> None:
    for example in re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL):
        compile(example, str(path), "exec")
        for module, names in re.findall(r"^from (flashllm[\w.]*) import (.*)$", example, re.MULTILINE):
            assert all(hasattr(importlib.import_module(module), name) for name in names.split(", "))


@pytest.mark.readme
@pytest.mark.timeout(3600)
def test_the_chat_line_answers_through_a_pipe(clone: Path, tmp_path: Path) -> None:
    run = subprocess.run(
        ["bash", "-c", readme_line("chat line")],
        cwd=clone,
        env=fresh_home(tmp_path),
        input="What is the capital of France?\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "Paris" in run.stdout
    assert (tmp_path / ".cache" / "flashllm" / "models" / "smollm2").is_dir()
    demo = subprocess.run(
        [".venv/bin/flashllm", "chat"],
        cwd=clone,
        input="Once upon a time, there was a little girl named Lily.\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert demo.returncode == 0, demo.stderr
    words = re.findall(r"[a-z]+", demo.stdout.lower())
    assert len(words) >= 20
    assert {"the", "and", "to", "she", "was"} & set(words)


@pytest.mark.readme
@pytest.mark.timeout(3600)
def test_the_test_line_collects_in_a_fresh_environment(clone: Path) -> None:
    # The whole suite runs in CI through the same line; here, that it installs and finds every test.
    line = readme_line("test line").replace("-m pytest -q", "-m pytest -q --collect-only")
    run = subprocess.run(["bash", "-c", line], cwd=clone, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
