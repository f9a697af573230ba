"""The README's own lines, copied as they stand, in a fresh clone and a fresh virtual environment."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

pytestmark = [pytest.mark.readme, pytest.mark.timeout(3600)]


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


def test_the_chat_line_answers_through_a_pipe(clone: Path, tmp_path: Path) -> None:
    home = Path.home()
    pip = {"PIP_CACHE_DIR": str(home / ".cache" / "pip")}
    if (config := home / ".config" / "pip" / "pip.conf").exists():
        pip["PIP_CONFIG_FILE"] = str(config)
    run = subprocess.run(
        ["bash", "-c", readme_line("chat line")],
        cwd=clone,
        env={**os.environ, "HOME": str(tmp_path), **pip},
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


def test_the_test_line_collects_in_a_fresh_environment(clone: Path) -> None:
    # The whole suite runs in CI through the same line; here, that it installs and finds every test.
    line = readme_line("test line").replace("-m pytest -q", "-m pytest -q --collect-only")
    run = subprocess.run(["bash", "-c", line], cwd=clone, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
