"""Activity traces: what is written is read, and what is no trace is refused."""

import numpy as np
import pytest
from activity_trace import Stream, Trace, TraceInfo, TraceWriter, bits_nbytes, pack_bits, unpack_bits
from traces import masks_of, write_masks

from flashllm.errors import FormatError
from flashllm.format.safetensors import encode_header

NEURONS = 77  # no whole byte, no whole word


def info(**changes):
    values = {"num_tokens": 3, "num_layers": 2, "num_neurons": NEURONS, "synthetic": True, "description": "a test"}
    return TraceInfo(**{**values, **changes})


@pytest.fixture
def masks():
    return np.random.default_rng(0).random((3, 2, len(Stream), NEURONS)) < 0.3


def test_bits_are_the_masks(masks):
    packed = pack_bits(masks)
    assert packed.shape == (3, 2, 3, 16)
    assert packed.shape[-1] == bits_nbytes(NEURONS)
    assert np.array_equal(unpack_bits(packed, NEURONS), masks)
    neuron = 42
    assert bool(packed[0, 0, 0, neuron // 8] >> neuron % 8 & 1) == masks[0, 0, 0, neuron]


def test_what_is_written_is_read(tmp_path, masks):
    _, nbytes = write_masks(tmp_path / "t", info(sequence_starts=(0, 2)), masks)
    assert (tmp_path / "t").stat().st_size == nbytes
    with Trace(tmp_path / "t") as trace:
        assert trace.info == info(sequence_starts=(0, 2))
        assert np.array_equal(masks_of(trace, 1, Stream.PREFETCH), masks[:, 1, Stream.PREFETCH])
        assert np.array_equal(trace.token(4), pack_bits(masks[1])), "a trace counts on from its start"


def test_missing_and_superfluous_tokens_are_errors(tmp_path, masks):
    with TraceWriter(tmp_path / "t", info()) as writer:
        for token in masks[:2]:
            writer.append(pack_bits(token))
        with pytest.raises(ValueError, match="1 of 3"):
            writer.finish()
        writer.append(pack_bits(masks[2]))
        with pytest.raises(ValueError, match="full"):
            writer.append(pack_bits(masks[2]))
        with pytest.raises(ValueError, match="uint8"):
            writer.append(pack_bits(masks[2])[:1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "not an activity trace"),
        ({"version": "2"}, "not an activity trace"),
        ({"neurons": "many"}, "damaged"),
        ({"neurons": "900"}, "no trace of 900"),
        ({"synthetic": "perhaps"}, "damaged"),
        ({"sequence_starts": "0 x"}, "damaged"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, change, message):
    metadata = {**info().metadata(), **change}
    header = encode_header([("activity", "U8", (3, 2, 3, 16))], metadata)
    (tmp_path / "t").write_bytes(header + bytes(3 * 2 * 3 * 16))
    with pytest.raises(FormatError, match=message):
        Trace(tmp_path / "t")


def test_another_tensor_is_refused(tmp_path):
    (tmp_path / "t").write_bytes(encode_header([("other", "U8", (4,))], info().metadata()) + bytes(4))
    with pytest.raises(FormatError, match="one tensor"):
        Trace(tmp_path / "t")
