"""Conversion: bit-exact, the same bytes however often it is killed, clear about everything that stops it."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from arch_models import VARIANTS, make_checkpoint
from safetensors import safe_open
from safetensors.torch import load_file
from scripts import run_python
from tiny_models import config_of, make_tiny_opt
from weights_of_folders import tensors_of

import flashllm.convert.run
import flashllm.format.partial
from flashllm.arch.registry import claims, resident_shapes
from flashllm.base.dtypes import WEIGHT_DTYPES
from flashllm.convert.run import convert
from flashllm.errors import FlashIOError, FormatError, UnsupportedModelError, UsageError
from flashllm.format.manifest import Manifest
from flashllm.format.report.verify import verify
from flashllm.format.rows import RowLayout, row_checksums, unpack_rows
from flashllm.format.safetensors import encode_header, read_header

ROOT = Path(__file__).resolve().parents[2]
FFN_NAMES = ("fc1.weight", "fc2.weight")


def _digests(path):
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(path.iterdir())}


def _sources(folder):
    """Canonical name -> state_dict name of a Hugging Face folder's resident tensors."""
    config = config_of(folder)
    return {name: claims(config)[name].source for name in resident_shapes(config)}


def _bits(tensor):
    return tensor.contiguous().view(torch.uint8).numpy()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """d_ff is no multiple of the rows of a page, so that there are zero rows."""
    return make_tiny_opt(tmp_path_factory.mktemp("convert") / "hf", num_layers=3, d_ff=203)


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
    target = tmp_path_factory.mktemp("converted") / "model"
    convert(source, target)
    return target


@pytest.mark.parametrize(
    ("dtype", "max_shard_size"), [("float32", None), ("float16", None), ("bfloat16", None), ("float32", "60KB")]
)
def test_round_trip_is_bit_exact(tmp_path, dtype, max_shard_size):
    source = make_tiny_opt(tmp_path / "hf", d_ff=203, dtype=dtype, max_shard_size=max_shard_size)
    assert (max_shard_size is None) == (source / "model.safetensors").exists()
    manifest = convert(source, tmp_path / "model")
    assert manifest == Manifest.load(tmp_path / "model")
    expected = {}
    for shard in source.glob("*.safetensors"):
        expected |= load_file(shard)
    resident = load_file(tmp_path / "model" / "resident.safetensors")
    checksums = {name: resident.pop(name) for name in list(resident) if name.endswith(".checksums")}
    sources = _sources(source)
    assert {sources[name] for name in resident} == {name for name in expected if not name.endswith(FFN_NAMES)}
    for name, tensor in resident.items():
        assert tensor.dtype == expected[sources[name]].dtype
        assert np.array_equal(_bits(tensor), _bits(expected[sources[name]]))
    ffn = load_file(tmp_path / "model" / "ffn.safetensors")
    layout = manifest.rows
    assert list(ffn) == ["layers.0.ffn", "layers.1.ffn"]
    for layer, tensor in enumerate(ffn.values()):
        rows = _bits(tensor).reshape(layout.num_rows, layout.stride)
        parts = unpack_rows(layout, rows[:203])
        prefix = f"model.decoder.layers.{layer}."
        assert parts["up"].tobytes() == _bits(expected[prefix + "fc1.weight"]).tobytes()
        assert parts["down"].tobytes() == _bits(expected[prefix + "fc2.weight"].T).tobytes()
        assert not rows[203:].any()
        assert not rows[:, layout.row_nbytes :].any()
        recorded = checksums[f"flashllm.layers.{layer}.checksums"].numpy().view(np.uint64)
        assert np.array_equal(recorded, row_checksums(rows))
    assert verify(tmp_path / "model").ok


def test_sharded_single_and_unprefixed_sources_give_the_same_bytes(tmp_path, converted):
    sharded = make_tiny_opt(tmp_path / "sharded" / "hf", num_layers=3, d_ff=203, max_shard_size="60KB")
    convert(sharded, tmp_path / "a")
    assert _digests(tmp_path / "a") == _digests(converted)
    bare = make_tiny_opt(tmp_path / "bare" / "hf", num_layers=3, d_ff=203)
    with tensors_of(bare) as tensors:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)
        tensors["lm_head.weight"] = tensors["decoder.embed_tokens.weight"].clone()  # as some hub checkpoints have it
    convert(bare, tmp_path / "b")
    assert _digests(tmp_path / "b") == _digests(converted)


def test_the_layout_of_the_files(converted, source):
    for name in ("ffn.safetensors", "resident.safetensors"):
        header = read_header(converted / name)
        assert header.data_start % 4096 == 0
        with safe_open(converted / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}
    ffn = read_header(converted / "ffn.safetensors")
    assert all(info.offset % 4096 == 0 and info.nbytes % 4096 == 0 for info in ffn.tensors.values())
    resident = list(read_header(converted / "resident.safetensors").tensors.values())
    whole_lines = [info.nbytes % 64 == 0 for info in resident]
    assert whole_lines == sorted(whole_lines, reverse=True)
    assert not all(whole_lines)  # the fc1 biases: 203 floats
    assert all(info.offset % (64 if info.nbytes % 64 == 0 else info.itemsize) == 0 for info in resident)
    for path in source.glob("*.json"):
        assert (converted / path.name).read_bytes() == path.read_bytes()


def test_an_untied_head_is_resident(tmp_path):
    source = make_tiny_opt(tmp_path / "hf", tie_word_embeddings=False, enable_bias=False, word_embed_proj_dim=32)
    convert(source, tmp_path / "model")
    names = set(read_header(tmp_path / "model" / "resident.safetensors").tensors)
    assert {"head.weight", "project_in.weight", "project_out.weight"} <= names
    assert not any("bias" in name and "norm" not in name for name in names)
    assert Manifest.load(tmp_path / "model").architecture.ffn_bias is False


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtype_conversion_equals_torch(tmp_path, source, dtype):
    manifest = convert(source, tmp_path / "model", dtype=dtype)
    assert (manifest.dtype, manifest.rows.encoding, manifest.source.dtype) == (dtype, dtype, "float32")
    expected = load_file(source / "model.safetensors")
    resident = load_file(tmp_path / "model" / "resident.safetensors")
    for name, origin in _sources(source).items():
        assert torch.equal(resident[name], expected[origin].to(getattr(torch, dtype)))
    ffn = load_file(tmp_path / "model" / "ffn.safetensors")["layers.2.ffn"]
    assert torch.equal(ffn[:203, :64], expected["model.decoder.layers.2.fc1.weight"].to(ffn.dtype))
    assert torch.equal(ffn[:203, 64:128], expected["model.decoder.layers.2.fc2.weight"].T.to(ffn.dtype))


def test_a_value_outside_the_dtype_names_the_tensor(tmp_path):
    source = make_tiny_opt(tmp_path / "hf")
    with tensors_of(source) as tensors:
        tensors["model.decoder.layers.1.fc2.weight"][3, 5] = 1e6
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.fc2\.weight: the value 1e\+06 is outside .* float16"):
        convert(source, tmp_path / "model", dtype="float16")
    assert not (tmp_path / "model").exists()


def test_mixed_dtypes_need_a_decision(tmp_path):
    source = make_tiny_opt(tmp_path / "hf")
    name = "model.decoder.final_layer_norm.weight"
    with tensors_of(source) as tensors:
        tensors[name] = tensors[name].half()
    with pytest.raises(UnsupportedModelError, match=f"{name}: has dtype F16, .* has F32; say which one"):
        convert(source, tmp_path / "model")
    convert(source, tmp_path / "model", dtype="float32")
    resident = load_file(tmp_path / "model" / "resident.safetensors")
    assert torch.equal(resident["final_norm.weight"], tensors[name].float())
    with tensors_of(source) as tensors:
        tensors[name] = tensors[name].double()
    with pytest.raises(UnsupportedModelError, match=f"{name}: has dtype F64; supported"):
        convert(source, tmp_path / "model64", dtype="float32")


LAYER = "model.decoder.layers."


@pytest.mark.parametrize(
    ("name", "value", "kind", "message"),
    [
        (LAYER + "1.self_attn.k_proj.bias", None, FormatError, r"layers\.1\.self_attn\.k_proj\.bias is missing"),
        (LAYER + "0.fc2.weight", None, FormatError, r"layers\.0\.fc2\.weight is missing"),
        (LAYER + "0.extra.weight", torch.zeros(1), UnsupportedModelError, "extra.weight: is no part of the opt model"),
        (LAYER + "1.fc1.weight", torch.zeros(128, 64), FormatError, r"fc1.*\[128, 64\], the config says \[256, 64\]"),
        (LAYER + "0.fc2.bias", torch.zeros(256), FormatError, r"fc2\.bias: has shape \[256\], the config says \[64\]"),
        (LAYER + "1.self_attn.q_proj.weight", torch.zeros(32, 64), FormatError, r"q_proj.*says \[64, 64\]"),
        ("lm_head.weight", torch.ones(300, 64), UnsupportedModelError, "lm_head.weight: differs from the embedding"),
    ],
)
def test_wrong_checkpoints_are_refused_before_anything_is_written(tmp_path, name, value, kind, message):
    source = make_tiny_opt(tmp_path / "hf")
    with tensors_of(source) as tensors:
        tensors[name] = value
        if value is None:
            del tensors[name]
    with pytest.raises(kind, match=message):
        convert(source, tmp_path / "model")
    assert os.listdir(tmp_path) == ["hf"]


def test_wrong_use(tmp_path, source, converted):
    with pytest.raises(UsageError, match="dtype 'int8' is not one of"):
        convert(source, tmp_path / "model", dtype="int8")
    with pytest.raises(UsageError, match="is a flashllm directory already"):
        convert(converted, tmp_path / "model")
    with pytest.raises(UsageError, match="no such directory"):
        convert(source, tmp_path / "absent" / "model")
    for name in ("directory", "file", "link"):
        target = tmp_path / name
        {"directory": target.mkdir, "file": target.touch, "link": lambda: target.symlink_to("nowhere")}[name]()  # noqa: B023
        with pytest.raises(UsageError, match="exists; remove it or choose another"):
            convert(source, target)
    (tmp_path / "x.partial").write_text("mine")
    with pytest.raises(UsageError, match=r"x\.partial: is in the way"):
        convert(source, tmp_path / "x")
    assert (tmp_path / "x.partial").read_text() == "mine"


def test_progress_ends_at_the_total(tmp_path, source):
    seen = []
    convert(source, tmp_path / "model", predictors=True, progress=lambda *step: seen.append(step))
    dones = [done for _, done, _ in seen]
    assert dones == sorted(dones)
    assert {total for *_, total in seen} == {dones[-1]}
    sizes = sum(path.stat().st_size for path in (tmp_path / "model").iterdir())
    assert dones[-1] == sizes - (tmp_path / "model" / "flashllm.json").stat().st_size
    assert seen[0][0] == "ffn.safetensors"


def test_odd_names(tmp_path, source):
    target = tmp_path / ("ö ß " + "x" * 200)
    convert(source, target)
    assert verify(target).ok


_DRIVER = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
source, targets = sys.argv[2], sys.argv[3]
from flashllm.convert.run import convert

calls, point, torn = 0, 0, False

def wrap(name):
    real = getattr(os, name)
    def call(*args):
        global calls
        calls += 1
        if calls == point:
            if torn and name == "pwrite":
                real(args[0], args[1][: len(args[1]) // 2], args[2])
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args)
    return call

os.fsync = lambda fd: None  # the kernel survives this test; a kill loses nothing that was written
for name in ("pwrite", "fsync", "rename", "mkdir", "unlink", "ftruncate", "posix_fallocate"):
    setattr(os, name, wrap(name))

def killed_at(number, target, with_torn_writes):
    global point, torn
    child = os.fork()  # one thread so far: nothing but numpy and the converter is loaded
    if child == 0:
        point, torn = number, with_torn_writes
        convert(source, target)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
    return status != 0

"""


def _drive(source, targets, body):
    """Run `body` in a process in which `killed_at(number, target, torn)` converts up to the number-th system call."""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    return run_python("-c", _DRIVER + body, ROOT, source, targets, env=environment).stdout


def test_killed_at_any_moment_it_resumes_to_the_same_bytes(tmp_path, source, converted, monkeypatch):
    """SIGKILL at every one of the converter's writes, syncs and renames, with whole and with torn writes."""
    body = """
number = 1
while killed_at(number, f"{targets}/whole-{number}", False):
    killed_at(number, f"{targets}/torn-{number}", True)
    number += 1
print(number - 1)
"""
    num_calls = int(_drive(source, tmp_path, body))
    assert num_calls > 40
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # as in the driver: a hundred conversions in a second or two
    expected = _digests(converted)
    assert _digests(tmp_path / f"whole-{num_calls + 1}") == expected
    for number in range(1, num_calls + 1):
        for mode in ("whole", "torn"):
            target = tmp_path / f"{mode}-{number}"
            if target.exists():
                assert number == num_calls  # only the last sync follows the rename
            else:
                convert(source, target)
            assert _digests(target) == expected
            assert not target.with_name(target.name + ".partial").exists()


def test_killed_again_and_again_while_resuming(tmp_path, source, converted):
    body = """
kills = 0
while not os.path.exists(f"{targets}/model") and killed_at(12 + kills, f"{targets}/model", True):
    kills += 1
print(kills)
"""
    assert int(_drive(source, tmp_path, body)) > 5
    assert _digests(tmp_path / "model") == _digests(converted)


class _Stop(Exception):
    pass


def _interrupt(source, target, layers):
    """Leave a partial directory with `layers` finished layers."""

    def progress(what, done, total):
        journal = target.with_name(target.name + ".partial") / ".journal"
        if len(journal.read_bytes().splitlines()) == layers + 1:
            raise _Stop

    with pytest.raises(_Stop):
        convert(source, target, progress=progress)
    return target.with_name(target.name + ".partial")


def test_finished_layers_are_not_read_again(tmp_path, source, converted, monkeypatch):
    _interrupt(source, tmp_path / "model", 2)
    read = []
    blocks = flashllm.convert.run._Conversion._blocks
    monkeypatch.setattr(
        flashllm.convert.run._Conversion, "_blocks", lambda self, layer: read.append(layer) or blocks(self, layer)
    )
    convert(source, tmp_path / "model")
    assert read == [2]
    assert _digests(tmp_path / "model") == _digests(converted)


@pytest.mark.parametrize("place", [100, 4096, 4096 + 204 * 512 + 700, "cut", "absent"])
def test_damage_to_a_partial_directory_is_repaired(tmp_path, source, converted, place):
    partial = _interrupt(source, tmp_path / "model", 2)
    path = partial / "ffn.safetensors"
    if place == "absent":
        path.unlink()
    elif place == "cut":
        os.truncate(path, 5000)
    else:
        raw = bytearray(path.read_bytes())
        raw[place] ^= 1
        path.write_bytes(raw)
    (partial / "left-over.json").write_text("{}")
    convert(source, tmp_path / "model")
    assert _digests(tmp_path / "model") == _digests(converted)


def test_another_source_or_dtype_is_not_mixed_in(tmp_path, source):
    _interrupt(source, tmp_path / "model", 1)
    with pytest.raises(UsageError, match=r"model\.partial: was begun from another source, or with other options"):
        convert(source, tmp_path / "model", dtype="float16")
    other = shutil.copytree(source, tmp_path / "other")
    with pytest.raises(UsageError, match="was begun from another source"):
        convert(other, tmp_path / "model")
    (tmp_path / "model.partial" / ".journal").write_bytes(b"garbage\n")
    with pytest.raises(FormatError, match=r"\.journal"):
        convert(source, tmp_path / "model")


def test_a_second_converter_is_refused(tmp_path, source, converted):
    entered, leave = threading.Event(), threading.Event()

    def progress(what, done, total):
        entered.set()
        leave.wait(30)

    first = threading.Thread(target=lambda: convert(source, tmp_path / "model", progress=progress))
    first.start()
    try:
        assert entered.wait(30)
        with pytest.raises(FlashIOError, match="another conversion is at work here"):
            convert(source, tmp_path / "model")
    finally:
        leave.set()
        first.join()
    assert _digests(tmp_path / "model") == _digests(converted)


def test_a_target_that_appears_meanwhile_is_not_overwritten(tmp_path, source, converted):
    target = tmp_path / "model"

    def progress(what, done, total):
        if what == "resident.safetensors":
            target.mkdir(exist_ok=True)

    with pytest.raises(UsageError, match="exists by now"):
        convert(source, target, progress=progress)
    assert os.listdir(target) == []
    target.rmdir()
    convert(source, target)
    assert _digests(target) == _digests(converted)


def test_too_little_space_is_said_first_with_both_numbers(tmp_path, source, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(flashllm.format.partial.shutil, "disk_usage", lambda path: usage._replace(free=12345))
    with pytest.raises(
        FlashIOError, match=r"not enough space: .*\(\d{6} bytes\) are needed, .*\(12345 bytes\) are free"
    ):
        convert(source, tmp_path / "model")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("nbytes", [300_000, 600_000])
def test_a_full_disk_is_resumable(tmp_path, source, converted, nbytes, monkeypatch):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("a tmpfs of limited size needs root and the right to mount")
    try:
        with monkeypatch.context() as patch:
            patch.setattr(flashllm.convert.run, "check_space", lambda *arguments: None)
            with pytest.raises(
                FlashIOError, match=r"No space left on device; the output has .* bytes\), \d+ are free"
            ) as error:
                convert(source, disk / "model")
        assert "run the same conversion again to go on" in str(error.value)
        assert not (disk / "model").exists()
        subprocess.run(["mount", "-o", "remount,size=20m", disk], check=True)
        convert(source, disk / "model")
        assert _digests(disk / "model") == _digests(converted)
    finally:
        subprocess.run(["umount", disk], check=True)


ELSEWHERE = "; give `flashllm convert` a DST that you may write to;"


@pytest.mark.parametrize(
    "failure",
    [(30, "Read-only file system", ELSEWHERE), (13, "Permission denied", ELSEWHERE), (27, "File too large", "")],
)
def test_failing_writes_are_explained(tmp_path, source, converted, monkeypatch, failure):
    real, calls = os.pwrite, 0

    def pwrite(fd, data, offset):
        nonlocal calls
        calls += 1
        if calls == 5:
            raise OSError(*failure[:2])
        return real(fd, data, offset)

    told = f"model: the conversion stopped: {failure[1]}{failure[2]}.* is kept: run"
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        with pytest.raises(FlashIOError, match=told):
            convert(source, tmp_path / "model")
    convert(source, tmp_path / "model")
    assert _digests(tmp_path / "model") == _digests(converted)


def test_a_failing_read_of_the_source_is_named(tmp_path, source, monkeypatch):
    real, calls = os.preadv, 0

    def preadv(fd, buffers, offset):
        nonlocal calls
        calls += 1
        if calls == 12:
            raise OSError(5, "Input/output error")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(FlashIOError, match=r"model\.safetensors: reading \d+ bytes at \d+ failed: Input/output error"):
        convert(source, tmp_path / "model")


def test_the_source_is_never_written_to(tmp_path, source):
    before = [(path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(source.iterdir())]
    convert(source, tmp_path / "model", dtype="float16")
    assert [(path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(source.iterdir())] == before


@pytest.mark.parametrize("name", ["llama relu", "llama"])
def test_a_gated_model_has_three_matrices_a_row(tmp_path, name):
    source = make_checkpoint(tmp_path / "hf", VARIANTS[name], dtype="bfloat16")
    manifest = convert(source, tmp_path / "model", predictors=True)
    assert manifest.rows == RowLayout(encoding="bfloat16", d_model=64, d_ff=96, matrices=("up", "gate", "down"))
    tensors = load_file(source / "model.safetensors")
    rows = load_file(tmp_path / "model" / "ffn.safetensors")["layers.1.ffn"][:96]
    up, gate, down = (tensors[f"model.layers.1.mlp.{part}_proj.weight"] for part in ("up", "gate", "down"))
    assert torch.equal(rows[:, :192], torch.cat([up, gate, down.T], dim=1))
    assert verify(tmp_path / "model").ok
    assert ("predictors.safetensors" in manifest.files) == (name == "llama relu")  # none helps where nothing is zero


_PEAK = """
import sys
sys.path.insert(0, sys.argv[1])
from flashllm.convert.run import convert

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

before = peak()
convert(sys.argv[2], sys.argv[3], dtype=sys.argv[4] or None)
assert "torch" not in sys.modules
print(peak() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="VmHWM is Linux's")
@pytest.mark.parametrize("dtype", ["", "bfloat16"])
def test_peak_memory_does_not_grow_with_the_model(tmp_path, dtype):
    """A model of 24 layers of 8.4 MB and an embedding of 84 MB passes through one layer and a few reads of 8 MiB."""
    d_model, d_ff, num_layers, vocab = 512, 2048, 24, 41_000
    config = {"model_type": "opt", "hidden_size": d_model, "ffn_dim": d_ff, "num_hidden_layers": num_layers}
    config |= {"vocab_size": vocab, "num_attention_heads": 8}
    config |= {"enable_bias": False, "layer_norm_elementwise_affine": False}
    shapes = {"embed_tokens.weight": (vocab, d_model), "embed_positions.weight": (2050, d_model)}
    for i in range(num_layers):
        shapes |= {f"layers.{i}.self_attn.{p}_proj.weight": (d_model, d_model) for p in "qkv"}
        shapes[f"layers.{i}.self_attn.out_proj.weight"] = (d_model, d_model)
        shapes |= {f"layers.{i}.fc1.weight": (d_ff, d_model), f"layers.{i}.fc2.weight": (d_model, d_ff)}
    tensors = [(f"model.decoder.{name}", "F32", shape) for name, shape in shapes.items()]
    source = tmp_path / "hf"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    header = encode_header(tensors)
    with open(source / "model.safetensors", "wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(4 * rows * columns for rows, columns in shapes.values()))  # zeros, sparse
    result = run_python("-c", _PEAK, ROOT, source, tmp_path / "model", dtype)
    layer = 2 * d_model * d_ff * WEIGHT_DTYPES[dtype or "float32"].itemsize
    total = (tmp_path / "model" / "ffn.safetensors").stat().st_size
    grown = int(result.stdout)
    assert grown < layer + 64 * 2**20 < total
