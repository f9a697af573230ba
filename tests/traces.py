"""Traces for tests."""

import numpy as np
from activity_trace import Stream, TraceInfo, TraceWriter, pack_bits, unpack_bits


def write_trace(path, active):
    """`active` [tokens, layers, neurons]; the other streams hold noise."""
    tokens, layers, neurons = active.shape
    info = TraceInfo(num_tokens=tokens, num_layers=layers, num_neurons=neurons, synthetic=True, description="a test")
    masks = np.random.default_rng(0).random((tokens, layers, len(Stream), neurons)) < 0.5
    masks[:, :, Stream.ACTIVE] = active
    write_masks(path, info, masks)
    return path


def write_masks(path, info, masks):
    """`masks` [tokens, layers, streams, neurons]; what `finish` says."""
    with TraceWriter(path, info) as writer:
        for token in masks:
            writer.append(pack_bits(token))
        return writer.finish()


def masks_of(trace, layer, stream=Stream.ACTIVE):
    """One layer's stream over all tokens of an open trace, [tokens, neurons]."""
    bits = np.stack([trace.token(token)[layer, stream] for token in range(trace.info.num_tokens)])
    return unpack_bits(bits, trace.info.num_neurons)
