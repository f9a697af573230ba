"""The manifest: what is written is what is read, and nothing else is accepted."""

import dataclasses
import json
import os
import shutil

import numpy as np
import pytest
import torch
from predictor_files import write_plain
from safetensors.numpy import load_file
from tiny_models import make_tiny_opt

from flashllm.convert.run import convert
from flashllm.errors import FlashError, FormatError, UsageError
from flashllm.format.install import install_predictors
from flashllm.format.manifest import Manifest, open_model_dir
from flashllm.format.manifest_values import Calibration
from flashllm.format.popularity import encode_popularity
from flashllm.format.report.verify import verify
from flashllm.format.safetensors import encode_header


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    root = tmp_path_factory.mktemp("manifest")
    make_tiny_opt(root / "hf")
    convert(root / "hf", root / "model")
    return root / "model"


@pytest.fixture
def model(tmp_path, original):
    return shutil.copytree(original, tmp_path / "model")


def _edit(model, change):
    path = model / "flashllm.json"
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def _set(*keys_and_value):
    *keys, last, value = keys_and_value

    def change(manifest):
        for key in keys:
            manifest = manifest[key]
        manifest[last] = value

    return change


def _delete(*keys):
    def change(manifest):
        for key in keys[:-1]:
            manifest = manifest[key]
        del manifest[keys[-1]]

    return change


def test_the_literal_manifest(original):
    value = json.loads((original / "flashllm.json").read_text())
    files = value.pop("files")
    assert len(value.pop("sha256")) == 64
    assert value == {
        "format_version": 2,
        "flashllm_version": "0.2.0",
        "architecture": {
            "model_type": "opt",
            "num_layers": 2,
            "d_model": 64,
            "d_ff": 256,
            "activation": "relu",
            "gated": False,
            "ffn_bias": True,
        },
        "dtype": "float32",
        "rows": {"encoding": "float32", "matrices": ["up", "down"], "row_nbytes": 512, "stride": 512, "num_rows": 256},
        "calibration": None,
        "sparse_prefill_tokens": 8,
        "prefill_block_tokens": 256,
        "stream_block_rows": 256,
        "source": {"name": "hf", "dtype": "float32"},
    }
    assert set(files) == set(os.listdir(original)) - {"flashllm.json"}
    assert files["ffn.safetensors"]["nbytes"] == 4096 + 2 * 256 * 512


def test_save_and_load_are_inverse(model):
    manifest = Manifest.load(model)
    calibration = Calibration(window=4, mean_active=(10.5, 3.0), req=(40, 20), tokens=1000, text="a story")
    changed = dataclasses.replace(manifest, calibration=calibration, sparse_prefill_tokens=0)
    changed.save(model)
    assert Manifest.load(model) == changed
    assert verify(model).ok
    with pytest.raises(ValueError, match="calibration has 1 layers, not 2"):
        dataclasses.replace(manifest, calibration=Calibration(window=1, mean_active=(1,), req=(1,), tokens=1, text=""))


BAD = {
    "newer version": (_set("format_version", 3), "version 3 is newer than this flashllm; upgrade flashllm"),
    "older version": (_set("format_version", 1), "version 1 is of an older flashllm; convert the model again"),
    "newer version with new keys": (lambda m: m.update(format_version=9, more=1), "upgrade flashllm"),
    "version zero": (_set("format_version", 0), "format_version must be 2"),
    "version true": (_set("format_version", True), "format_version must be 2"),
    "version a text": (_set("format_version", "1"), "format_version must be 2"),
    "unknown key": (_set("extra", 1), "the key 'extra' is unknown"),
    "unknown key inside": (_set("architecture", "extra", 1), "architecture: the key 'extra' is unknown"),
    "unknown key in rows": (_set("rows", "extra", 1), "rows: the key 'extra' is unknown"),
    "missing key": (_delete("dtype"), "the key 'dtype' is missing"),
    "missing key inside": (_delete("source", "name"), "source: the key 'name' is missing"),
    "architecture a list": (_set("architecture", []), "architecture must be an object"),
    "million layers": (_set("architecture", "num_layers", 10**6), "num_layers must be an integer from 1"),
    "no layers": (_set("architecture", "num_layers", 0), "num_layers"),
    "huge d_ff": (_set("architecture", "d_ff", 2**62), "d_ff must be"),
    "d_model a float": (_set("architecture", "d_model", 64.0), "d_model must be"),
    "activation unknown": (_set("architecture", "activation", "softmax"), "activation must be one of"),
    "activation a list": (_set("architecture", "activation", ["relu"]), "activation must be one of"),
    "gated a number": (_set("architecture", "gated", 0), "gated must be true or false"),
    "rows with a gate too many": (_set("rows", "matrices", ["up", "gate", "down"]), "row_nbytes must be"),
    "model_type huge": (_set("architecture", "model_type", "x" * 10**6), "model_type must be a short name"),
    "dtype unknown": (_set("dtype", "float64"), "dtype must be one of"),
    "encoding unknown": (_set("rows", "encoding", "int4"), "encoding 'int4' is not one of"),
    "encoding a number": (_set("rows", "encoding", 4), "rows.encoding must be a text"),
    "matrices unknown": (_set("rows", "matrices", ["down", "up"]), "matrices must be"),
    "matrices objects": (_set("rows", "matrices", [{}, {}]), "matrices must be"),
    "stride wrong": (_set("rows", "stride", 1024), "rows.stride must be 512"),
    "num_rows wrong": (_set("rows", "num_rows", 2**60), "rows.num_rows must be 256"),
    "row bytes a text": (_set("rows", "row_nbytes", "512"), "rows.row_nbytes must be 512"),
    "files a list": (_set("files", []), "files must be an object"),
    "parent path": (_set("files", "../x", {"nbytes": 0, "sha256": "0" * 64}), "'../x' is not the name of a file"),
    "absolute path": (_set("files", "/etc/passwd", {"nbytes": 0, "sha256": "0" * 64}), "is not the name of a file"),
    "dot dot": (_set("files", "..", {"nbytes": 0, "sha256": "0" * 64}), "is not the name of a file"),
    "empty name": (_set("files", "", {"nbytes": 0, "sha256": "0" * 64}), "is not the name of a file"),
    "NUL in a name": (_set("files", "a\0", {"nbytes": 0, "sha256": "0" * 64}), "is not the name of a file"),
    "lone surrogate": (_set("files", "\ud800", {"nbytes": 0, "sha256": "0" * 64}), "is not the name of a file"),
    "surrogate in a text": (_set("source", "name", "\ud800"), "source: name must be a text"),
    "long name": (_set("files", "x" * 256, {"nbytes": 0, "sha256": "0" * 64}), "is not the name of a file"),
    "itself": (_set("files", "flashllm.json", {"nbytes": 0, "sha256": "0" * 64}), "must not list flashllm.json"),
    "FFN not listed": (_delete("files", "ffn.safetensors"), "files does not list ffn.safetensors"),
    "config not listed": (_delete("files", "config.json"), "files does not list config.json"),
    "too many files": (
        lambda m: m["files"].update({f"f{i}": {"nbytes": 0, "sha256": "0" * 64} for i in range(1000)}),
        "at most 1000",
    ),
    "size negative": (_set("files", "config.json", "nbytes", -1), "nbytes must be an integer from 0"),
    "hash short": (_set("files", "config.json", "sha256", "00"), "sha256 must be 64 hexadecimal digits"),
    "hash upper case": (_set("files", "config.json", "sha256", "A" * 64), "sha256 must be 64"),
    "calibration a number": (_set("calibration", 3), "calibration must be an object"),
    "calibration of other layers": (
        _set("calibration", {"window": 1, "mean_active": [1], "req": [1], "tokens": 1, "text": ""}),
        "calibration has 1 layers, not 2",
    ),
    "calibration negative": (
        _set("calibration", {"window": 1, "mean_active": [1, -1], "req": [1, 1], "tokens": 1, "text": ""}),
        "mean_active must be numbers from 0",
    ),
    "K0 negative": (_set("sparse_prefill_tokens", -1), "sparse_prefill_tokens must be"),
    "block of zero": (_set("prefill_block_tokens", 0), "prefill_block_tokens must be"),
    "stream block over the rows": (_set("stream_block_rows", 257), "stream_block_rows must be"),
    "source dtype": (_set("source", "dtype", "int8"), "source: dtype must be one of"),
    "checksums of rows that are read apart": (_set("checksum_rows", 2), "checksum_rows must divide"),
    "checksum of no rows": (_set("checksum_rows", 0), "checksum_rows must be an integer from 1"),
    "version of flashllm a number": (_set("flashllm_version", 1), "flashllm_version must be a text"),
    "file missing": (_set("files", "more.txt", {"nbytes": 0, "sha256": "0" * 64}), "more.txt: listed in flashllm.json"),
    "file of another size": (_set("files", "config.json", "nbytes", 3), r"config.json: has \d+ bytes, .* says 3"),
    "other layers": (_set("architecture", "num_layers", 3), "config.json: describes"),
    "other activation": (_set("architecture", "activation", "squared_relu"), "config.json: describes"),
    "other bias": (_set("architecture", "ffn_bias", False), "config.json: describes"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_manifests_are_named(model, kind):
    change, message = BAD[kind]
    _edit(model, change)
    with pytest.raises(FormatError, match=message) as caught:
        open_model_dir(model)
    assert len(str(caught.value)) < 1500


def test_any_other_change_is_noticed(model):
    raw = (model / "flashllm.json").read_bytes()
    _edit(model, _set("source", "name", "another"))
    message = "flashllm.json: was changed or damaged: it is not what its own hash says; copy it anew"
    with pytest.raises(FormatError, match=message):
        open_model_dir(model)
    with pytest.raises(FormatError, match=message):
        verify(model)
    _edit(model, _delete("sha256"))  # as directories have it from before the hash
    assert open_model_dir(model).source.name == "another"
    (model / "flashllm.json").write_bytes(raw)
    for bit in np.random.default_rng(0).integers(0, 8 * len(raw), 300):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        (model / "flashllm.json").write_bytes(flipped)
        with pytest.raises(FlashError):
            open_model_dir(model)


@pytest.mark.parametrize("raw", ["", "[]", "{", '{"a":1,"a":2}', '{"format_version":NaN}', "[" * 10_000])
def test_manifests_that_are_no_json_object(model, raw):
    (model / "flashllm.json").write_text(raw)
    with pytest.raises(FormatError, match=r"flashllm\.json"):
        open_model_dir(model)


def test_links_and_folders_in_place_of_files(model, tmp_path):
    shutil.move(model / "tokenizer.json", tmp_path / "moved")
    (model / "tokenizer.json").symlink_to(tmp_path / "moved")
    with pytest.raises(FormatError, match=r"tokenizer\.json: must be a regular file, and no symbolic link"):
        open_model_dir(model)
    (model / "tokenizer.json").unlink()
    (model / "tokenizer.json").mkdir()
    with pytest.raises(FormatError, match="must be a regular file"):
        open_model_dir(model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("layers.1.key.weight"), r"tensor layers\.1\.key\.weight is missing"),
        (lambda tensors: tensors.update(extra=np.zeros(3, np.float32)), "tensor extra is no part of the model"),
        (
            lambda tensors: tensors.update({"final_norm.bias": np.zeros(32, np.float32)}),
            r"final_norm\.bias is F32 \[32\], not F32 \[64\]",
        ),
        (
            lambda tensors: tensors.update({"final_norm.bias": np.zeros(64, np.float16)}),
            r"final_norm\.bias is F16 \[64\], not F32 \[64\]",
        ),
    ],
)
def test_resident_tensors_are_those_of_the_config(model, change, message):
    tensors = load_file(model / "resident.safetensors")
    change(tensors)
    entries = sorted(tensors.items(), key=lambda pair: -pair[1].itemsize)
    codes = {"float32": "F32", "float16": "F16", "uint64": "U64"}
    header = encode_header([(name, codes[str(values.dtype)], values.shape) for name, values in entries], {})
    raw = header + b"".join(values.tobytes() for _, values in entries)
    (model / "resident.safetensors").write_bytes(raw)
    _edit(model, _set("files", "resident.safetensors", "nbytes", len(raw)))
    with pytest.raises(FormatError, match=message):
        open_model_dir(model)


@pytest.mark.parametrize("name", ["ffn.safetensors", "resident.safetensors"])
def test_swapped_weight_files_are_found_without_hashing(model, name):
    """Another model's file of equal size: its header gives it away."""
    raw = bytearray((model / name).read_bytes())
    place = raw.index(b"layers.1.")
    raw[place : place + 9] = b"layers.7."
    (model / name).write_bytes(raw)
    with pytest.raises(FormatError, match=name):
        open_model_dir(model)


def test_other_directories_are_explained(tmp_path):
    with pytest.raises(UsageError, match="no such directory"):
        open_model_dir(tmp_path / "absent")
    with pytest.raises(UsageError, match="not a model directory"):
        open_model_dir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=f"a Hugging Face folder; run `flashllm convert {tmp_path} DST`"):
        open_model_dir(tmp_path)
    (tmp_path / "x.partial").mkdir()
    with pytest.raises(UsageError, match="an unfinished conversion"):
        open_model_dir(tmp_path / "x.partial")


def test_predictors_are_installed_and_replaced(model, tmp_path):
    for rank in (4, 7):
        path = write_plain(tmp_path / "trained", model, ranks=(rank, rank))
        manifest = install_predictors(model, path)
        assert open_model_dir(model) == manifest
        assert (model / "predictors.safetensors").read_bytes() == path.read_bytes()
        assert verify(model).ok
    assert not [name for name in os.listdir(model) if name.startswith(".")]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"metadata": {"model_sha256": "0" * 64}}, "trained for another model"),
        ({"metadata": {"format": "x"}}, "is not a predictor file"),
        ({"metadata": {"version": "2"}}, "is not a predictor file of version 1"),
        ({"ranks": (0, 0)}, "with a rank from 1"),
        ({"ranks": (65, 65)}, "with a rank from 1"),
        ({"d_ff": 128}, r"layers\.0\.b is F16 \[128, 4\], not F16 \[256, 4\]"),
        ({"ranks": (4,)}, r"layers\.1\.a must be"),
        ({"ranks": (4, 4, 4)}, "belong to no predictor"),
        ({"more": {"layers.0.bias": torch.ones(256).half()}}, r"layers\.0\.bias is F16"),
    ],
    ids=str,
)
def test_foreign_predictors_are_refused_and_change_nothing(model, tmp_path, kwargs, message):
    path = write_plain(tmp_path / "trained", model, **kwargs)
    before = sorted(os.listdir(model)), (model / "flashllm.json").read_bytes()
    with pytest.raises(FormatError, match=message):
        install_predictors(model, path)
    assert (sorted(os.listdir(model)), (model / "flashllm.json").read_bytes()) == before


@pytest.mark.parametrize("had_predictors", [False, True])
def test_an_installation_that_stops_anywhere_leaves_a_loadable_model(model, tmp_path, monkeypatch, had_predictors):
    if had_predictors:
        install_predictors(model, write_plain(tmp_path / "old", model, ranks=(3, 3)))
    path = write_plain(tmp_path / "trained", model)
    real = {name: getattr(os, name) for name in ("pwrite", "fsync", "rename", "ftruncate")}
    stop, calls = 0, 0

    def wrap(name):
        def call(*args):
            nonlocal calls
            calls += 1
            if calls == stop:
                raise OSError(5, "Input/output error")
            return real[name](*args)

        return call

    for name in real:
        monkeypatch.setattr(os, name, wrap(name))
    while True:
        stop, calls = stop + 1, 0
        try:
            shares = encode_popularity([np.zeros(256, np.float32)] * 2, tokens=1, measured_on="a text")
            install_predictors(model, path, None, shares)
            break
        except OSError:
            open_model_dir(model)
    assert stop > 12
    assert (model / "predictors.safetensors").read_bytes() == path.read_bytes()
    assert verify(model).ok
