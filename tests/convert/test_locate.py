"""What a folder is that a user names as a model, and what is said of one that is none."""

import pytest

from flashllm.cli import main
from flashllm.convert.locate import find_checkpoint, resolve_model
from flashllm.errors import UsageError
from flashllm.format.manifest import MANIFEST, PARTIAL_SUFFIX
from flashllm.format.model_files import FFN


@pytest.mark.parametrize(
    ("file", "hint"),
    [
        ("notes.txt", r"no Hugging Face folder \(no config.json\)$"),
        ("m.gguf", r"; for the GGUF file in it, name the file: .*folder/m.gguf$"),
        ("adapter_config.json", r"; it holds an adapter .*: merge it into its base model \(peft's merge_and_unload\)"),
    ],
)
def test_a_folder_that_holds_no_model(tmp_path, capsys, file, hint):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / file).touch()
    with pytest.raises(UsageError, match=r"is no model directory \(no flashllm.json\) and .*" + hint):
        resolve_model(str(folder))
    for verb in (["chat"], ["generate", "--prompt", "x"]):
        assert main([verb[0], str(folder), *verb[1:]]) == 2
        assert "is no model directory" in capsys.readouterr().err


def test_a_damaged_model_directory_is_opened_to_say_what_is_wrong(tmp_path):
    for name, file, says in (
        ("model", FFN, f"it has no {MANIFEST}"),
        (f"model{PARTIAL_SUFFIX}", "anything", "an unfinished conversion"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / file).touch()
        with pytest.raises(UsageError, match=says):
            resolve_model(str(folder))


@pytest.mark.parametrize("address", ["hf.co/foo/bar:Q4_K_M", "hf.co/foo", "https://huggingface.co/datasets/foo/bar"])
def test_an_address_that_names_no_model(address):
    with pytest.raises(UsageError, match=r"names no model of the hub's; write hf\.co/owner/name"):
        find_checkpoint(address)
