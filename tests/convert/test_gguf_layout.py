"""Where a GGUF file's tensors lie, and of what kind they are: anything but what writers make is refused by name."""

import struct

import numpy as np
import pytest
from arch_models import Variant, make_checkpoint
from gguf_files import KINDS, write_gguf
from weights_of_folders import digests, try_to_open

from flashllm.cli import main
from flashllm.convert.checkpoint.opened import open_checkpoint
from flashllm.convert.run import convert
from flashllm.errors import FormatError, UnsupportedModelError

NORM, DOWN, GATE = "blk.0.attn_norm.weight", "blk.0.ffn_down.weight", "blk.0.ffn_gate.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    return make_checkpoint(tmp_path_factory.mktemp("layout") / "hf", Variant("llama", {"hidden_act": "silu", **sizes}))


@pytest.fixture
def path(source, tmp_path):
    return write_gguf(source, tmp_path / "model.gguf", "Q8_0")


def entry(raw, name):
    """(where the entry's dimensions are, how many)"""
    at = raw.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
    return at + 4, int.from_bytes(raw[at : at + 4], "little")


def offset_of(raw, name):
    at, dimensions = entry(raw, name)
    return struct.unpack_from("<Q", raw, at + 8 * dimensions + 4)[0]


def change(path, name, *, shape=None, kind=None, offset=None):
    """Make the file's table say so of the tensor."""
    raw = bytearray(path.read_bytes())
    at, dimensions = entry(raw, name)
    if shape is not None:
        struct.pack_into(f"<{dimensions}Q", raw, at, *shape)
    if kind is not None:
        struct.pack_into("<I", raw, at + 8 * dimensions, kind)
    if offset is not None:
        struct.pack_into("<Q", raw, at + 8 * dimensions + 4, offset(raw) if callable(offset) else offset)
    path.write_bytes(raw)


def refused(path, message, error=FormatError):
    with pytest.raises(error, match=message):
        try_to_open(path)


@pytest.mark.parametrize(
    ("name", "said", "message"),
    [
        (DOWN, {"offset": lambda raw: offset_of(raw, GATE)}, r"ffn_\w+\.weight: a hole of 6528 bytes before it"),
        (DOWN, {"offset": lambda raw: offset_of(raw, DOWN) + 32}, r"ffn_down\.weight: a hole of 32 bytes before it"),
        (DOWN, {"offset": lambda raw: offset_of(raw, DOWN) - 32}, r"ffn_down\.weight: an overlap of 32 bytes"),
        (DOWN, {"offset": lambda raw: offset_of(raw, DOWN) + 1}, r"ffn_down\.weight: a hole of 1 bytes"),
        (DOWN, {"offset": 2**64 - 32}, r"ffn_down\.weight is truncated: it ends at byte 184467440737"),
        (DOWN, {"offset": 1 << 40}, r"ffn_down\.weight is truncated"),
        (DOWN, {"offset": 0}, "an overlap of"),
        (DOWN, {"kind": KINDS.F16}, "an overlap of"),  # reaches over what is behind it
        (DOWN, {"kind": KINDS.Q4_0}, "a hole of"),
        (DOWN, {"shape": (96, 2**62)}, r"ffn_down\.weight is truncated"),
        (DOWN, {"shape": (96, 0)}, r"ffn_down\.weight holds nothing"),
        (DOWN, {"shape": (95, 64)}, r"ffn_down\.weight has rows of 95 weights, and kind Q8_0 blocks of 32"),
        (DOWN, {"kind": 200}, r"ffn_down\.weight is of kind 200, which the gguf package does not know"),
        (DOWN, {"kind": 36}, r"ffn_down\.weight is of kind I2_S, .* give the model's Hugging Face folder .*bits$"),
        (DOWN, {"kind": KINDS.I32}, r"ffn_down\.weight is of kind I32, which cannot be dequantised"),
        (NORM, {"kind": KINDS.Q4_1}, r"attn_norm\.weight is of kind Q4_1, where vectors, norms and biases are F32"),
    ],
)  # fmt: skip
def test_a_tensor_that_lies_or_is_as_none_may(path, capsys, name, said, message):
    out = path.with_name("out")
    change(path, name, **said)
    refused(path, rf"model\.gguf: tensor .*{message}", (FormatError, UnsupportedModelError))
    assert main(["convert", str(path), str(out)]) == 1
    assert "flashllm: error: " in capsys.readouterr().err
    assert not out.exists()


def test_quantised_norms_of_heads_and_biases_of_experts(tmp_path):
    """Two dimensions do not make them matrices."""
    source = make_checkpoint(
        tmp_path / "hf", Variant("gpt_oss", {"intermediate_size": 64, "moe_intermediate_size": 64})
    )
    path = write_gguf(source, tmp_path / "model.gguf")
    change(path, "blk.0.ffn_up_exps.bias", kind=KINDS.Q8_0)
    refused(path, r"ffn_up_exps\.bias is of kind Q8_0, where vectors, norms and biases")


def test_all_at_one_place(path):
    raw = path.read_bytes()
    for name in (NORM, DOWN, GATE, "token_embd.weight"):
        assert entry(raw, name)
        change(path, name, offset=0)
    refused(path, "an overlap of")


def test_the_table_may_have_another_order_than_the_data(path, tmp_path):
    """Two tensors of one size, each with the other's place in the data and its bytes there."""
    expected = convert(path, tmp_path / "expected")
    up = GATE.replace("gate", "up")
    raw = bytearray(path.read_bytes())
    first, second = offset_of(raw, GATE), offset_of(raw, up)
    start = len(raw) - _data_nbytes(raw)
    nbytes = 64 * 96 // 32 * 34
    places = [slice(start + each, start + each + nbytes) for each in (first, second)]
    raw[places[0]], raw[places[1]] = raw[places[1]], raw[places[0]]
    path.write_bytes(raw)
    change(path, GATE, offset=second)
    change(path, up, offset=first)
    found = convert(path, tmp_path / "found")
    assert digests(found) == digests(expected)


def _data_nbytes(raw):
    """The writer's file ends at the aligned end of its last tensor."""
    last = "token_embd.weight"
    at, _ = entry(raw, last)
    columns, rows = struct.unpack_from("<2Q", raw, at)
    return -(-(offset_of(raw, last) + columns * rows // 32 * 34) // 32) * 32


@pytest.mark.parametrize("alignment", [8, 64, 256])
def test_any_alignment_that_a_writer_keeps(source, tmp_path, alignment):
    def aligned(to):
        path = tmp_path / f"{to}.gguf"
        return write_gguf(source, path, "Q8_0", metadata={"general.alignment": to}, alignment=to)

    expected, found = convert(aligned(32), tmp_path / "expected"), convert(aligned(alignment), tmp_path / "found")
    assert digests(found) == digests(expected)


@pytest.mark.parametrize(
    ("alignment", "message"),
    [
        *((each, "general.alignment must be a power of two") for each in (0, 3, -32, "x", 32.0)),
        *((each, "is truncated|belong to nothing") for each in (1, 4096, 2**31)),  # not the one that the writer kept
    ],
)
def test_an_alignment_that_is_none(source, tmp_path, alignment, message):
    refused(write_gguf(source, tmp_path / "model.gguf", metadata={"general.alignment": alignment}), message)


@pytest.mark.parametrize("rest", [1, 31, 4096])
def test_bytes_behind_the_last_tensor(path, rest):
    path.write_bytes(path.read_bytes() + bytes(rest))
    refused(path, r"model\.gguf: \d+ bytes behind tensor .*, the last, belong to nothing")


def test_every_part_of_a_split_model(source, tmp_path):
    first = write_gguf(source, tmp_path / "model.gguf", "Q8_0", split=2)
    second = tmp_path / "model-00002-of-00002.gguf"
    whole = second.read_bytes()
    name = next(each for each in (DOWN, GATE) if each.encode() in whole)
    change(second, name, offset=lambda raw: offset_of(raw, name) + 32)
    refused(first, rf"00002-of-00002\.gguf: tensor {name}: a hole of 32 bytes")
    second.write_bytes(first.read_bytes())
    refused(first, r"00002-of-00002\.gguf: tensor .* is in model-00001-of-00002\.gguf too")


@pytest.mark.parametrize("count", [-1, "two", 1.5, True, 100_000])
def test_numbers_of_parts_that_are_none(source, tmp_path, count):
    path = write_gguf(source, tmp_path / "model.gguf", metadata={"split.count": count})
    refused(path, r"model\.gguf: split\.count must be an integer from 0 to 99999")


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_norms_in_half_precision_that_have_something_added(tmp_path, kind):
    """Gemma's: their values less 1, whatever they are stored as. These are exact in both."""
    source = make_checkpoint(tmp_path / "hf", Variant("gemma", {}), dtype="bfloat16")
    found = []
    for vectors in ("F32", kind):
        path = write_gguf(source, tmp_path / f"{vectors}.gguf", "BF16", vectors=vectors)
        with open_checkpoint(path) as checkpoint:
            name = next(name for name in checkpoint.tensors if name.endswith("input_layernorm.weight"))
            info = checkpoint.tensors[name]
            assert info.dtype == "F32"
            found.append(checkpoint.floats(name, 0, *info.shape))
    expected, values = found
    np.testing.assert_allclose(values, expected, atol=2**-7)
    assert np.abs(expected).max() < 3
