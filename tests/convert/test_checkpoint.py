"""Checkpoint folders: whole, sharded, and everything that can be wrong with them, each with its file named."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import change_config, make_tiny_opt
from weights_of_folders import tensors_of, try_to_open

from flashllm.convert.checkpoint.folder import INDEX, SINGLE
from flashllm.convert.checkpoint.opened import open_checkpoint
from flashllm.convert.checkpoint.source import companion_files
from flashllm.errors import FormatError, UnsupportedModelError, UsageError


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return make_tiny_opt(tmp_path_factory.mktemp("source") / "single")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    return make_tiny_opt(tmp_path_factory.mktemp("source") / "sharded", max_shard_size="100KB")


@pytest.fixture
def copy(tmp_path, sharded):
    return shutil.copytree(sharded, tmp_path / "model")


def _shards(path):
    return sorted(path.glob("model-*.safetensors"))


def test_single_and_sharded_give_the_same_tensors(single, sharded):
    assert len(_shards(sharded)) > 2
    expected = load_file(single / SINGLE)
    for path in (single, sharded):
        with open_checkpoint(path) as checkpoint:
            assert set(checkpoint.tensors) == set(expected)
            assert checkpoint.config["model_type"] == "opt"
            for name, tensor in expected.items():
                out = np.empty(tuple(tensor.shape), np.float32)
                checkpoint.read(name, 0, out)
                assert torch.equal(torch.from_numpy(out), tensor)


def test_ranges_are_read_at_byte_offsets(single):
    name = "model.decoder.layers.1.fc1.weight"
    expected = load_file(single / SINGLE)[name].numpy()
    with open_checkpoint(single) as checkpoint:
        out = np.empty((3, 64), np.float32)
        checkpoint.read(name, 5 * 64 * 4, out)
        assert np.array_equal(out, expected[5:8])
        with pytest.raises(ValueError, match="outside"):
            checkpoint.read(name, 254 * 64 * 4, out)


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, "this shard is missing"),
        (lambda shard: shard.write_bytes(shard.read_bytes()[:-1]), ".*truncated"),
        (lambda shard: shard.write_bytes(LFS_POINTER), "is a git-LFS pointer"),
    ],
)
def test_a_shard_that_cannot_be_read_is_named(copy, damage, message):
    shard = _shards(copy)[1]
    damage(shard)
    with pytest.raises(FormatError, match=f"{shard.name}: {message}"):
        try_to_open(copy)


def test_a_tensor_the_index_promises_but_the_shard_lacks(copy):
    index = json.loads((copy / INDEX).read_text())
    name = next(iter(index["weight_map"]))
    other = next(shard.name for shard in _shards(copy) if shard.name != index["weight_map"][name])
    index["weight_map"][name] = other
    (copy / INDEX).write_text(json.dumps(index))
    with pytest.raises(FormatError, match=f"{other}: tensor {name} is missing"):
        try_to_open(copy)


@pytest.mark.parametrize("shard", ["../x.safetensors", "/etc/passwd", "", "..", "a\0b", "\ud800", 3, None])
def test_shards_outside_the_folder_are_refused(copy, shard):
    (copy / INDEX).write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(FormatError, match=r"weight_map: .* is not the name of a file"):
        try_to_open(copy)


@pytest.mark.parametrize("index", ["{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_an_index_without_a_map(copy, index):
    (copy / INDEX).write_text(index)
    with pytest.raises(FormatError, match="has no weight_map"):
        try_to_open(copy)


def test_the_index_decides_between_two_copies_and_their_absence_from_it_is_an_error(copy):
    index = json.loads((copy / INDEX).read_text())
    first = _shards(copy)[-1]
    duplicate = copy / "model-duplicate.safetensors"
    shutil.copy(first, duplicate)
    twice = [name for name, shard in index["weight_map"].items() if shard == first.name]
    index["weight_map"][twice[0]] = duplicate.name
    (copy / INDEX).write_text(json.dumps(index))
    with open_checkpoint(copy) as checkpoint:
        assert duplicate.name in checkpoint.where(twice[0])
    assert len(twice) > 1
    del index["weight_map"][twice[1]]
    (copy / INDEX).write_text(json.dumps(index))
    with pytest.raises(FormatError, match=f"tensor {twice[1]} is also in"):
        try_to_open(copy)


def test_other_weights_are_named_with_a_way_out(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="holds no weights"):
        try_to_open(tmp_path)
    (tmp_path / "consolidated.00.pth").write_bytes(b"PK")
    with pytest.raises(UsageError, match=r"consolidated\.00\.pth has another name or kind.*save_pretrained"):
        try_to_open(tmp_path)
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(UsageError, match=r"name the file: .*a\.gguf"):
        try_to_open(tmp_path)


def test_an_adapter_is_merged_first(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "owner/base"}')
    save_file({"base_model.model.lora_A.weight": torch.zeros(2, 2)}, tmp_path / "adapter_model.safetensors")
    message = r"; it holds an adapter .*: merge it into its base model \(peft's merge_and_unload\), save that with"
    with pytest.raises(UsageError, match=r"has no config\.json.*" + message):
        try_to_open(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="holds no weights.*" + message):
        try_to_open(tmp_path)


def test_a_whole_model_beside_an_adapter_is_read(copy):
    (copy / "adapter_config.json").write_text("{}")
    try_to_open(copy)


def test_what_is_no_checkpoint(tmp_path):
    with pytest.raises(UsageError, match="no such directory"):
        try_to_open(tmp_path / "absent")
    with pytest.raises(UsageError, match=r"has no config\.json"):
        try_to_open(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(FormatError, match="must hold a JSON object"):
        try_to_open(tmp_path)
    (tmp_path / "flashllm.json").write_text("{}")
    with pytest.raises(UsageError, match="is a flashllm directory already"):
        try_to_open(tmp_path)


def test_companions_are_plain_files_and_never_weights(copy):
    (copy / "special_tokens_map.json").unlink(missing_ok=True)
    (copy / "special_tokens_map.json").symlink_to("tokenizer_config.json")
    (copy / "chat_template.jinja").write_text("x")
    (copy / "merges.txt").write_text("x")
    (copy / "pytorch_model.bin.index.json").write_text("{}")
    (copy / "modeling.py").write_text("raise SystemExit")
    (copy / ".hidden.json").write_text("{}")
    (copy / "folder.json").mkdir()
    assert [path.name for path in companion_files(copy)] == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "merges.txt",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_a_fingerprint_changes_with_any_weight_file(copy):
    with open_checkpoint(copy) as checkpoint:
        before = checkpoint.identity()
    _shards(copy)[0].touch()
    with open_checkpoint(copy) as checkpoint:
        assert checkpoint.identity() != before
        assert len(before) == len(_shards(copy)) + 2  # the path, and the config


_IN_4_BITS = {"quantization_config": {"load_in_4bit": True}}


@pytest.mark.parametrize(
    ("said", "tensor", "what"),
    [
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, None, "awq"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, None, "compressed-tensors"),
        ({}, ("layers.0.fc1.qweight", torch.int32), "layers.0.fc1.qweight"),
        (_IN_4_BITS, ("layers.0.fc1.weight.quant_map", torch.float32), "quant_map"),
        ({"quantization_config": {}}, ("layers.0.fc1.extra", torch.float8_e4m3fn), "F8_E4M3"),
    ],
)
def test_codes_that_are_not_read_are_named_with_a_way_out(tmp_path, said, tensor, what):
    source = make_tiny_opt(tmp_path / "hf")
    change_config(source, **said)
    if tensor is not None:
        with tensors_of(source) as state:
            state[tensor[0]] = torch.zeros(4).to(tensor[1])
    message = rf"in codes \(.*{what}\), which are not read; give the model that it"
    with pytest.raises(UnsupportedModelError, match=message):
        try_to_open(source)


def test_an_empty_word_about_codes_is_no_word(tmp_path):
    source = make_tiny_opt(tmp_path / "hf")
    for said in ({}, {"load_in_8bit": False}):
        change_config(source, quantization_config=said)
        with open_checkpoint(source) as checkpoint:
            assert checkpoint.tensors
