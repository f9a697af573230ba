"""Blocks of rows in file order, read ahead: whatever was interrupted before, the right bytes come."""

import contextlib
import itertools

import numpy as np
import pytest

from flashllm import _core
from flashllm.errors import ChecksumError, FlashIOError, FormatError
from flashllm.format.rows import row_checksums

STRIDE, LAYERS = 512, 3


@pytest.fixture
def flash(tmp_path):
    """A file of three layers of `num_rows` rows, and a stream over it."""

    def make(num_rows=10, block_rows=4, *, threads=3, ahead=2):
        data = np.random.default_rng(0).integers(0, 256, (LAYERS, num_rows, STRIDE), dtype=np.uint8)
        path = tmp_path / "rows"
        path.write_bytes(bytes(4096) + data.tobytes())
        file = _core.DirectFile(str(path), direct=True)
        offsets = [4096 + index * num_rows * STRIDE for index in range(LAYERS)]
        layers = [
            _core.FileRows(offset=at, count=num_rows, checksums=row_checksums(layer))
            for at, layer in zip(offsets, data, strict=True)
        ]
        reader = _core.Reader(threads)
        return (
            _core.RowStream(reader, file, layers, strides=[STRIDE] * LAYERS, block_rows=block_rows, ahead=ahead),
            data,
            file,
        )

    return make


def blocks_of(stream, layer, then=None):
    """(first row, rows) block by block; a block is valid until the next is asked for."""
    stream.begin(layer, then)
    while (block := stream.next()) is not None:
        yield block


def read_layer(stream, layer, then=None):
    blocks = []
    for first, rows in blocks_of(stream, layer, then):
        assert first == sum(len(block) for block in blocks)
        blocks.append(rows.copy())
    return np.concatenate(blocks)


@pytest.mark.parametrize("ahead", [1, 2, 7])
def test_every_row_once_in_order(flash, ahead):
    for num_rows, block_rows in ((1, 1), (10, 1), (10, 4), (8, 4), (10, 10), (7, 64)):
        stream, data, _ = flash(num_rows, block_rows, ahead=ahead)
        for _ in range(2):
            for layer in range(LAYERS):
                then = layer + 1 if layer + 1 < LAYERS else None
                assert np.array_equal(read_layer(stream, layer, then), data[layer])


@pytest.mark.parametrize("ahead", [1, 2, 7])
@pytest.mark.parametrize("kept", [0, 3, 4, 9, 10])
def test_kept_rows_are_read_once(flash, kept, ahead):
    """The first whole blocks of 4 of 10 rows stay; the last layer is followed by none, or by the first."""
    stream, data, _ = flash(ahead=ahead)
    for layer in range(LAYERS):
        stream.keep(layer, _core.allocate(max(kept, 1) * STRIDE)[: kept * STRIDE])
        assert stream.kept(layer) == kept
    stays = kept if kept == 10 else kept // 4 * 4
    for turn, around in enumerate((False, False, True, True)):
        for layer in range(LAYERS):
            then = layer + 1 if layer + 1 < LAYERS else 0 if around else None
            assert np.array_equal(read_layer(stream, layer, then), data[layer])
        stream.drain()
        read = stream.take()["bytes"]
        assert read == LAYERS * (10 if turn == 0 else 10 - stays) * STRIDE


@pytest.mark.parametrize("then", [None, 0, 1])
def test_kept_rows_give_way_and_come_back(flash, then):
    stream, data, _ = flash()
    stream.keep(0, _core.allocate(10 * STRIDE))
    for rows in (10, 4, 0, 7, 10, 10):
        stream.set_kept(0, rows)
        for _ in range(2):
            assert np.array_equal(read_layer(stream, 0, then), data[0])
        blocks = blocks_of(stream, 0, then)
        next(blocks)  # given up
    with pytest.raises(ValueError, match="memory for 10 rows cannot keep 11"):
        stream.set_kept(0, 11)
    with pytest.raises(ValueError, match="a layer beyond"):
        stream.keep(LAYERS, _core.allocate(STRIDE))


def test_times_count_each_read_once(flash):
    stream, data, _ = flash()
    read_layer(stream, 0, then=1)
    read_layer(stream, 1)
    times = stream.take()
    assert times["bytes"] == 2 * data[0].nbytes
    assert times["requests"] == 6
    assert times["wait_ns"] > 0
    assert times["busy_ns"] > 0
    assert stream.take()["bytes"] == 0


@pytest.mark.parametrize(("layer", "then"), [(-1, None), (LAYERS, None), (0, LAYERS), (0, -2)])
def test_a_layer_that_is_not_there(flash, layer, then):
    stream, _, _ = flash()
    with pytest.raises(ValueError, match="a layer beyond those there are"):
        stream.begin(layer, then)


@pytest.mark.parametrize("ahead", [1, 4])
@pytest.mark.parametrize("then", [None, 0, 1])
@pytest.mark.parametrize("drained", [False, True])
def test_a_pass_given_up_anywhere_does_not_disturb_the_next(flash, then, drained, ahead):
    stream, data, _ = flash(ahead=ahead)
    for stop_after, start in itertools.product((1, 2, 3), range(LAYERS)):
        blocks = blocks_of(stream, start, then)
        for _ in range(stop_after):
            next(blocks)
        if drained:
            stream.drain()
        for layer in (0, 1, 2, 0):
            assert np.array_equal(read_layer(stream, layer, then), data[layer])


def test_another_layer_than_the_one_announced(flash):
    stream, data, _ = flash()
    read_layer(stream, 0, then=2)
    assert np.array_equal(read_layer(stream, 1), data[1])


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        (("error", 5), FlashIOError, "layer 1, neuron 4: .*check the drive"),
        (("flip", 9), ChecksumError, "layer 1, neuron 4: wrong checksum .*`flashllm verify`"),
        (("end_of_file", 0), FormatError, "layer 1, neuron 4: .*shrank or is truncated.*`flashllm verify`"),
    ],
)
def test_a_fault_names_layer_and_neuron_and_is_forgotten(flash, fault, error, message):
    stream, data, file = flash(threads=1)
    file.inject(fault[0], 1, count=3, argument=fault[1])  # the second request, and its two more tries
    with pytest.raises(error, match=message) as caught:
        read_layer(stream, 1, then=2)
    assert caught.value.offset == 4096 + (10 + 4) * STRIDE
    file.inject("error", 2**60)
    for layer in range(LAYERS):
        assert np.array_equal(read_layer(stream, layer), data[layer])


def test_drain_swallows_the_fault_of_a_read_nobody_wants(flash):
    stream, data, file = flash(threads=1)
    file.inject("error", 3, count=10**6, argument=5)  # the next layer's first block
    assert np.array_equal(read_layer(stream, 0, then=1), data[0])
    stream.drain()
    file.inject("error", 2**60)
    assert np.array_equal(read_layer(stream, 1), data[1])


def test_every_read_may_fail(flash):
    stream, data, file = flash(threads=2)
    for first in range(9):
        file.inject("error", first, count=3, argument=5)
        for layer in range(LAYERS):
            with contextlib.suppress(FlashIOError):
                read_layer(stream, layer, then=(layer + 1) % LAYERS)
        stream.drain()  # what was read ahead may have failed, which the next pass would report
        file.inject("error", 2**60)
        for layer in range(LAYERS):
            assert np.array_equal(read_layer(stream, layer), data[layer])
