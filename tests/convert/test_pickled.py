"""`pytorch_model.bin`: the same tensors as in safetensors, no code run, and each fault with its file named."""

import json
import pickle
import shutil
import sys
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_models import make_tiny_opt
from weights_of_folders import try_to_open

from flashllm.convert.checkpoint import child, pickled
from flashllm.convert.checkpoint.folder import PICKLED_INDEX, PICKLED_SINGLE, SINGLE
from flashllm.convert.checkpoint.opened import open_checkpoint
from flashllm.convert.run import convert
from flashllm.errors import FlashError, FormatError, UnsupportedModelError


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_tiny_opt(tmp_path_factory.mktemp("pickled") / "opt", dtype="float16")


@pytest.fixture(scope="module")
def state(source):
    return load_file(source / SINGLE)


@pytest.fixture(autouse=True)
def _in_this_process(request, monkeypatch):
    """Torch is loaded here already; a test that wants the child asks for it."""
    if "real_child" not in request.fixturenames:
        monkeypatch.setattr(pickled, "ask_child", lambda function, *arguments: function(*arguments))


@pytest.fixture
def real_child():
    """The child process is started."""


@pytest.fixture
def folder(tmp_path, source):
    """The model without its weights."""
    return shutil.copytree(source, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))


def _split(state, folder, count=3):
    """`count` shards with an index, as transformers wrote them."""
    names, weight_map = list(state), {}
    for shard in range(count):
        file = f"pytorch_model-{shard + 1:05}-of-{count:05}.bin"
        part = names[shard::count]
        torch.save({name: state[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / PICKLED_INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def test_tensors_are_those_of_the_state_dict(folder, state):
    torch.save(state, folder / PICKLED_SINGLE)
    with open_checkpoint(folder) as checkpoint:
        assert set(checkpoint.tensors) == set(state)
        for name, tensor in state.items():
            out = np.empty(tuple(tensor.shape), np.float16)
            checkpoint.read(name, 0, out)
            assert np.array_equal(out, tensor.numpy())
            path, offset = checkpoint.extent(name)
            assert path.read_bytes()[offset : offset + 16] == tensor.numpy().tobytes()[:16]


@pytest.mark.usefixtures("real_child")
def test_shards_convert_as_safetensors_do(folder, source, state, tmp_path):
    expected = convert(source, tmp_path / "expected").files
    _split(state, folder)
    assert convert(folder, tmp_path / "sharded").files == expected


def test_a_tied_head_may_stand_for_the_embedding(folder, source, state, tmp_path):
    head = {**state, "lm_head.weight": state["model.decoder.embed_tokens.weight"]}
    del head["model.decoder.embed_tokens.weight"]
    torch.save(head, folder / PICKLED_SINGLE)
    assert convert(folder, tmp_path / "out").files == convert(source, tmp_path / "expected").files


def test_safetensors_beside_are_preferred(folder, source):
    (folder / PICKLED_SINGLE).write_bytes(b"not read")
    shutil.copy(source / SINGLE, folder)
    try_to_open(folder)


def test_views_and_tied_tensors_are_found_in_their_storage(folder):
    whole = torch.arange(40, dtype=torch.float32)
    views = {"a": whole[8:24].reshape(4, 4), "b": whole, "c": whole[30:], "empty": torch.empty(0, 3)}
    torch.save({**views, "d": whole[8:24].reshape(4, 4)}, folder / PICKLED_SINGLE)
    with open_checkpoint(folder) as checkpoint:
        for name, tensor in {**views, "d": views["a"]}.items():
            out = np.empty(tuple(tensor.shape), np.float32)
            checkpoint.read(name, 0, out)
            assert np.array_equal(out, tensor.numpy()), name
        with pytest.raises(ValueError, match="outside"):
            checkpoint.read("a", 60, np.empty(2, np.float32))


class _Code:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_code_in_the_pickle_is_named_and_never_run(folder, tmp_path, state):
    trap = tmp_path / "sprung"
    torch.save({**state, "trap": _Code(str(trap))}, folder / PICKLED_SINGLE)
    with pytest.raises(UnsupportedModelError, match=r"holds Python objects \(_?io\.open\) besides tensors"):
        try_to_open(folder)
    assert not trap.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.zeros(3)], "holds a list instead of named tensors"),
        ({"state_dict": {"a": torch.zeros(3)}}, "state_dict is a dict and no tensor"),
        ({"a": torch.zeros(4, 3).T}, "tensor a: is not stored row by row"),
        ({"a": torch.zeros(3, dtype=torch.complex64)}, "dtype torch.complex64"),
    ],
)
def test_what_is_no_plain_state_dict(folder, content, message):
    torch.save(content, folder / PICKLED_SINGLE)
    with pytest.raises(UnsupportedModelError, match=message):
        try_to_open(folder)


def test_pickles_of_before_torch_1_6(folder, state):
    torch.save(state, folder / PICKLED_SINGLE, _use_new_zipfile_serialization=False)
    with pytest.raises(UnsupportedModelError, match=r"before torch 1\.6.*save_pretrained"):
        try_to_open(folder)
    (folder / PICKLED_SINGLE).write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(UnsupportedModelError, match=r"before torch 1\.6"):
        try_to_open(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git-LFS pointer.*git lfs pull"),
        (b"<!DOCTYPE html>", "is not a file that torch.save wrote"),
        (b"PK\x03\x04", "truncated or damaged"),
        (None, "truncated or damaged"),
    ],
)
def test_files_that_are_no_archives_or_parts_of_one(folder, state, content, message):
    torch.save(state, folder / PICKLED_SINGLE)
    whole = (folder / PICKLED_SINGLE).read_bytes()
    (folder / PICKLED_SINGLE).write_bytes(whole[:-100] if content is None else content)
    with pytest.raises(FormatError, match=f"{PICKLED_SINGLE}: .*{message}"):
        try_to_open(folder)


def test_a_compressed_archive_and_one_without_its_records(folder, state):
    torch.save(state, folder / "whole.bin")
    for compression, kept in ((zipfile.ZIP_DEFLATED, "data/"), (zipfile.ZIP_STORED, "data/0")):
        with (
            zipfile.ZipFile(folder / "whole.bin") as old,
            zipfile.ZipFile(folder / PICKLED_SINGLE, "w", compression) as new,
        ):
            for record in old.infolist():
                if compression == zipfile.ZIP_DEFLATED or not record.filename.endswith(kept):
                    new.writestr(record.filename, old.read(record))
        with pytest.raises((FormatError, UnsupportedModelError), match=r"is compressed|damaged"):
            try_to_open(folder)


def test_without_torch_the_error_says_so(folder, state, monkeypatch):
    torch.save(state, folder / PICKLED_SINGLE)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(FlashError, match=r"needs torch.*flashllm\[hf\]"):
        pickled.describe(str(folder / PICKLED_SINGLE))


@pytest.mark.usefixtures("real_child")
def test_a_child_that_dies_is_an_error_of_the_file(folder, state, monkeypatch):
    torch.save(state, folder / PICKLED_SINGLE)
    monkeypatch.setattr(child, "_CODE", "raise SystemExit('gone')")
    with pytest.raises(FormatError, match=r"pytorch_model\.bin: torch cannot read it: gone"):
        try_to_open(folder)
