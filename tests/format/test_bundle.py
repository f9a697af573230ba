"""Row layouts by hand-computed numbers, packing and its inverse, checksums against an independent XXH3."""

import numpy as np
import pytest
import xxhash

from flashllm.arch.spec import Architecture
from flashllm.format.rows import RowLayout, checksum_rows, pack_rows, packed, row_checksums, unpack_rows


def _layout(encoding="float16", d_model=64, d_ff=256, matrices=("up", "down")):
    return RowLayout(encoding=encoding, d_model=d_model, d_ff=d_ff, matrices=matrices)


@pytest.mark.parametrize(
    ("layout", "row_nbytes", "stride", "num_rows"),
    [
        (_layout(d_model=4096, d_ff=16384), 16384, 16384, 16384),  # OPT-6.7B
        (_layout(d_model=2048, d_ff=8192), 8192, 8192, 8192),  # OPT-1.3B
        (_layout("float32", 320, 1280), 2560, 2560, 1280),  # the demo model
        (_layout("float16", 320, 1280), 1280, 1536, 1280),
        (_layout(d_model=5120, d_ff=20480), 20480, 20480, 20480),  # OPT-13B: already whole pages
        (_layout(d_model=1000, d_ff=4000), 4000, 4096, 4000),  # 2.4 % waste: a whole page
        (_layout(d_model=900, d_ff=3600), 3600, 4096, 3600),  # sectors, which happen to fill a page
        (_layout(d_model=2000, d_ff=10), 8000, 8192, 10),
        (_layout(d_model=1952, d_ff=10), 7808, 8192, 10),  # 4.9 %: a page
        (_layout(d_model=1920, d_ff=10), 7680, 7680, 16),  # 6.7 %: sectors, rows to whole pages
        (_layout("bfloat16", 4096, 11008, ("up", "gate", "down")), 24576, 24576, 11008),  # a gated 7B
        (_layout("float32", 1, 1), 8, 512, 8),
        (_layout("float32", 64, 257), 512, 512, 264),
    ],
)
def test_layouts(layout, row_nbytes, stride, num_rows):
    assert (layout.row_nbytes, layout.stride, layout.num_rows) == (row_nbytes, stride, num_rows)
    assert layout.layer_nbytes == stride * num_rows
    assert layout.layer_nbytes % 4096 == 0
    assert layout.shape == (num_rows, stride // layout.itemsize)


def test_offsets_of_matrices():
    layout = _layout("float32", 48, 10, ("up", "gate", "down"))
    assert [layout.byte_offset(matrix) for matrix in ("up", "gate", "down")] == [0, 192, 384]
    with pytest.raises(ValueError, match="'gate' is not one of"):
        _layout().byte_offset("gate")


@pytest.mark.parametrize(
    ("layout", "rows"),
    [
        (_layout(d_model=4096, d_ff=16384), 256),  # 4 MiB of 16 KiB rows
        (_layout(d_model=5120, d_ff=20480), 192),  # 204 rows fit; a multiple of 64
        (_layout(d_model=2**16, d_ff=2**18), 64),  # 16 rows fit; never under 64
        (_layout("float32", 64, 256), 256),  # never over num_rows
        (_layout("float32", 64, 9), 16),
    ],
)
def test_stream_blocks(layout, rows):
    assert layout.stream_block_rows == rows


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"encoding": "int8"}, "encoding 'int8' is not one of"),
        ({"d_model": 0}, "d_model must be"),
        ({"d_ff": -1}, "d_ff must be"),
        ({"matrices": ("down", "up")}, "matrices must be"),
        ({"matrices": ("up",)}, "matrices must be"),
    ],
)
def test_impossible_layouts(change, message):
    with pytest.raises(ValueError, match=message):
        _layout(**change)


@pytest.mark.parametrize(
    ("encoding", "matrices", "d_model"),
    [
        *(("float16", ("up", "down"), d_model) for d_model in (1, 63, 64, 130)),
        *((encoding, ("up", "gate", "down"), 63) for encoding in ("float32", "float16", "bfloat16")),
    ],
)
def test_packing_keeps_every_bit_and_zeroes_the_rest(encoding, matrices, d_model):
    layout = _layout(encoding, d_model, 20, matrices)
    rng = np.random.default_rng(0)
    vectors = {}
    for matrix in matrices:
        bits = rng.integers(0, 256, (7, d_model * layout.itemsize), np.uint8)  # any bits, NaNs too
        vectors[matrix] = bits.view(layout.storage)
    rows = np.full((7, layout.stride), 0xAA, np.uint8)
    pack_rows(layout, vectors, rows)
    assert not rows[:, layout.row_nbytes :].any()
    expected = b"".join(vectors[matrix][3].tobytes() for matrix in matrices)
    assert rows[3, : layout.row_nbytes].tobytes() == expected
    unpacked = unpack_rows(layout, rows)
    assert list(unpacked) == list(matrices)
    for matrix in matrices:
        assert unpacked[matrix].tobytes() == vectors[matrix].tobytes()


def test_packing_refuses_other_shapes_types_and_matrices():
    layout = _layout("float32", 8, 8)
    rows = np.empty((2, 512), np.uint8)
    good = np.zeros((2, 8), np.float32)
    for vectors in (
        {"up": good},
        {"up": good, "down": good, "gate": good},
        {"up": good, "down": good[:1]},
        {"up": good, "down": good[:, :7]},
        {"up": good, "down": good.astype(np.float64)},
    ):
        with pytest.raises(ValueError):
            pack_rows(layout, vectors, rows)
    for bad in (rows[:, :511], rows.view(np.int8), np.empty((2, 1024), np.uint8)[:, ::2], rows[0]):
        with pytest.raises(ValueError, match="rows must be contiguous"):
            pack_rows(layout, {"up": good, "down": good}, bad)
        with pytest.raises(ValueError, match="rows must be contiguous"):
            unpack_rows(layout, bad)


def _mixture(d_model, size, experts, shared, activation="silu"):
    d_ff = size * experts + shared
    sizes = {"num_layers": 3, "d_model": d_model, "d_ff": d_ff, "gated": True, "ffn_bias": False}
    parts = {"experts": experts, "chosen_experts": 2, "shared_neurons": shared, "dense_layers": (1,)}
    return Architecture(model_type="a_moe", activation=activation, **sizes, **parts)


@pytest.mark.parametrize(
    ("encoding", "mixture", "activation", "padded", "stride"),  # mixture: d_model, and as below
    [
        ("int4_32", (2048, 1024, 64, 0), "silu", 3584, 3456),  # OLMoE
        ("int4_32", (2048, 1024, 64, 0), "relu", 3584, 3584),  # neurons are read alone
        ("bfloat16", (2048, 768, 128, 0), "silu", 12288, 12288),  # there is nothing to save
        ("int4_32", (2048, 1024, 64, 1000), "silu", 3584, 3584),  # shared neurons that are no whole pages
        ("float32", (64, 48, 8, 80), "silu", 1024, 768),
        ("float32", (32, 48, 8, 80), "silu", 512, 512),  # no less than a sector
    ],
)
def test_rows_of_experts_are_packed(encoding, mixture, activation, padded, stride):
    architecture = _mixture(*mixture, activation)
    layout = _layout(encoding, mixture[0], architecture.d_ff, ("up", "gate", "down"))
    tight = packed(layout, architecture)
    assert (layout.stride, tight.stride) == (padded, stride)
    assert tight.layer_nbytes % 4096 == tight.stream_block_rows * stride % 4096 == 0
    assert tight.of_layer(0, mixture[1]).layer_nbytes == mixture[1] * stride


@pytest.mark.parametrize("together", [1, 2, 3, 5, 8])
def test_rows_may_share_a_checksum(together):
    rows = np.random.default_rng(1).integers(0, 256, (5, 512), np.uint8)
    expected = [xxhash.xxh3_64_intdigest(rows[first : first + together].tobytes()) for first in range(0, 5, together)]
    assert row_checksums(rows, together).tolist() == expected
    assert row_checksums(rows[:0], together).tolist() == []


@pytest.mark.parametrize(
    ("encoding", "d_model", "mixture", "together"),  # mixture: neurons of an expert, experts, shared neurons
    [
        ("int4_32", 2048, (768, 128, 0), 768),  # Qwen3-30B-A3B: an expert
        ("bfloat16", 2048, (768, 128, 0), 64),  # in 16 bits it is two blocks of the stream and a part of one
        ("int4_32", 2048, (512, 512, 512), 512),  # Qwen3-Next
        ("bfloat16", 64, (48, 8, 80), 16),  # shared neurons that are no whole experts
        ("bfloat16", 64, (48, 8, 0), 48),
    ],
)
def test_experts_have_as_few_checksums_as_reads_allow(encoding, d_model, mixture, together):
    architecture = _mixture(d_model, *mixture)
    layout = _layout(encoding, d_model, architecture.d_ff, ("up", "gate", "down"))
    assert checksum_rows(layout, architecture) == [together, 1, together]
    assert checksum_rows(layout, _mixture(d_model, *mixture, "relu")) == [1, 1, 1]
