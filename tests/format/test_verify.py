"""Every flipped byte of every listed file is found, in the FFN with its layer and neuron."""

import hashlib
import json
import os
import shutil

import numpy as np
import pytest
from damage import flip
from tiny_models import make_tiny_opt

from flashllm.convert.run import convert
from flashllm.errors import FormatError, UsageError
from flashllm.format.manifest import open_model_dir
from flashllm.format.report.verify import MAX_LISTED_ROWS, verify
from flashllm.format.safetensors import read_header

D_FF, NUM_ROWS, STRIDE, START = 203, 208, 512, 4096  # float32 rows of 60: 480 bytes and 32 of padding


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    root = tmp_path_factory.mktemp("verify")
    make_tiny_opt(root / "hf", num_layers=3, d_model=60, d_ff=D_FF)
    convert(root / "hf", root / "model")
    return root / "model"


@pytest.fixture
def copy(model, tmp_path):
    return shutil.copytree(model, tmp_path / "model")


def problems_of_a_flip(model, name, place, bits=1):
    """What is found with these bits of a file turned round; then they are turned back."""
    flip(model / name, place, bits)
    problems = verify(model).problems
    flip(model / name, place, bits)
    return problems


def test_a_good_model_and_its_numbers(model):
    seen = []
    report = verify(model, progress=lambda what, done, total: seen.append((what, done, total)))
    assert report.ok
    assert report.problems == ()
    assert report.num_files == len(os.listdir(model)) - 1
    sizes = sum((model / name).stat().st_size for name in os.listdir(model) if name != "flashllm.json")
    assert report.nbytes == sizes == seen[-1][1] == seen[-1][2]
    assert report.path == str(model)


def test_a_copy_of_the_neurons_of_an_earlier_version_is_not_used(model, tmp_path):
    old = shutil.copytree(model, tmp_path / "old")
    copy = old / "placed.safetensors"
    copy.write_bytes(bytes(70_000))
    value = json.loads((old / "flashllm.json").read_text())
    del value["sha256"]
    value["permutation"] = {"learned_on": "a book", "tokens": 1000}
    value["files"][copy.name] = {"nbytes": 70_000, "sha256": hashlib.sha256(copy.read_bytes()).hexdigest()}
    (old / "flashllm.json").write_text(json.dumps(value))
    assert open_model_dir(old).files == open_model_dir(model).files
    (problem,) = verify(old).problems
    assert problem.message.endswith("placed.safetensors: is not listed in flashllm.json; remove it")
    copy.unlink()
    assert verify(old).ok


def _places():
    end = START + 3 * NUM_ROWS * STRIDE
    edges = [START, START + 479, START + 480, START + 511, START + 512, START + NUM_ROWS * STRIDE - 1]
    edges += [START + NUM_ROWS * STRIDE, START + D_FF * STRIDE - 1, START + D_FF * STRIDE, end - 1]
    return edges + np.random.default_rng(0).integers(START, end, 100).tolist()


def test_a_flipped_byte_of_the_rows_is_located(copy):
    for place in _places():
        (problem,) = problems_of_a_flip(copy, "ffn.safetensors", place, 1 << (place % 8))
        layer, rest = divmod(place - START, NUM_ROWS * STRIDE)
        row = rest // STRIDE
        assert (problem.file, problem.layer) == ("ffn.safetensors", layer)
        assert problem.neuron == (row if row < D_FF else None)
        assert f"layer {layer}, {'neuron' if row < D_FF else 'padding row'} {row}: wrong checksum" in problem.message
    assert verify(copy).ok


@pytest.mark.parametrize("name", ["ffn.safetensors", "resident.safetensors"])
def test_a_flipped_byte_of_a_header_is_found(copy, name):
    for place in (0, 7, 8, 9, 100, 1000, 4000, 4095):
        problems = problems_of_a_flip(copy, name, place)
        assert {problem.file for problem in problems} == {name}
        assert all(problem.neuron is None for problem in problems)
    assert verify(copy).ok


def test_any_byte_of_the_other_files_is_found(copy):
    rng = np.random.default_rng(1)
    names = [name for name in os.listdir(copy) if name not in ("ffn.safetensors", "flashllm.json")]
    for name in names:
        size = (copy / name).stat().st_size
        for place in {0, size - 1, *rng.integers(0, size, 4).tolist()}:
            found = {problem.file for problem in problems_of_a_flip(copy, name, place)}
            assert name in found
            assert "ffn.safetensors" not in found


def test_a_damaged_checksum_is_told_from_a_damaged_row(copy):
    info = read_header(copy / "resident.safetensors").tensors["flashllm.layers.1.checksums"]
    flip(copy / "resident.safetensors", info.offset + 8 * 17 + 3)
    (problem,) = verify(copy).problems
    assert (problem.file, problem.tensor) == ("resident.safetensors", info.name)
    assert (problem.layer, problem.neuron) == (1, 17)


def test_rows_are_located_though_the_header_is_damaged_too(copy):
    flip(copy / "ffn.safetensors", 9)
    flip(copy / "ffn.safetensors", START + (NUM_ROWS + 5) * STRIDE)
    problems = verify(copy).problems
    assert (1, 5) in {(problem.layer, problem.neuron) for problem in problems}
    assert any(problem.layer is None for problem in problems)


def test_many_damaged_rows_are_counted(copy):
    for row in range(MAX_LISTED_ROWS + 7):
        flip(copy / "ffn.safetensors", START + row * STRIDE)
    problems = verify(copy).problems
    assert len(problems) == MAX_LISTED_ROWS + 1
    assert problems[-1].message.endswith("and 7 more rows")


def test_missing_extra_cut_and_replaced_files(copy):
    (copy / "tokenizer.json").unlink()
    (copy / "stray.json").write_text("{}")
    os.truncate(copy / "ffn.safetensors", START + 100)
    (copy / "config.json").rename(copy / "elsewhere.json")
    (copy / "config.json").symlink_to("elsewhere.json")
    messages = {problem.file: problem.message for problem in verify(copy).problems}
    assert set(messages) == {"tokenizer.json", "stray.json", "ffn.safetensors", "config.json", "elsewhere.json"}
    assert "No such file" in messages["tokenizer.json"]
    assert "is not listed in flashllm.json" in messages["stray.json"]
    assert "has 4196 bytes" in messages["ffn.safetensors"]
    assert "no symbolic link" in messages["config.json"]


def test_a_model_card_may_be_added_and_edited(copy):
    (copy / "README.md").write_text("# A model\n")
    assert verify(copy).ok


def test_a_failing_read_is_reported_and_the_rest_is_checked(copy, monkeypatch):
    preadv = os.preadv
    bad = os.stat(copy / "ffn.safetensors").st_ino

    def fail(fd, buffers, offset):
        if os.fstat(fd).st_ino == bad and offset > START:
            raise OSError(5, "Input/output error")
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", fail)
    (copy / "stray.json").write_text("{}")
    messages = {problem.file: problem.message for problem in verify(copy).problems}
    assert set(messages) == {"ffn.safetensors", "stray.json"}
    assert "Input/output error" in messages["ffn.safetensors"]


def test_an_edited_manifest_is_found(copy):
    path = copy / "flashllm.json"
    manifest = json.loads(path.read_text())
    manifest["architecture"]["activation"] = "squared_relu"
    del manifest["sha256"]  # which would say it first
    path.write_text(json.dumps(manifest))
    (problem,) = verify(copy).problems
    assert problem.file == "flashllm.json"
    assert "describes" in problem.message


def test_what_cannot_be_verified(tmp_path, copy):
    with pytest.raises(UsageError, match="not a model directory"):
        verify(tmp_path)
    (copy / "flashllm.json").write_text("{")
    with pytest.raises(FormatError, match=r"flashllm\.json: is not JSON"):
        verify(copy)
