"""Group-wise quantisation in numpy, step by step as csrc/kernels/group_codec.h says: what the native one equals."""

import numpy as np

GROUP, UNIT = 64, 16


def quantise(groups, bits):
    """float32 [..., n], a group along the last axis: codes, and float16 scales and minimums [..., 1]."""
    steps = np.float32(2**bits - 1)
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    with np.errstate(all="ignore"):
        scale = np.minimum((high - low) / steps, np.float32(65504)).astype(np.float16)
        minimum = (np.clip(low, -65504, 65504) + np.float32(0)).astype(np.float16)
        codes = np.rint(np.clip((groups - minimum.astype(np.float32)) / scale.astype(np.float32), 0, steps))
    return np.where(scale > 0, codes, 0).astype(np.uint8), scale, minimum


def dequantise(codes, scale, minimum):
    """float32 values; product and sum rounded apart."""
    return codes.astype(np.float32) * scale.astype(np.float32) + minimum.astype(np.float32)


def in_units(columns):
    """Columns in whole units."""
    return -(-columns // UNIT) * UNIT


def pack_codes(codes, bits):
    """uint8 [rows, columns in whole units]: the bytes of each row."""
    units = codes.reshape(len(codes), -1, UNIT).astype(np.uint64)
    places = np.arange(UNIT, dtype=np.uint64)
    half = UNIT if bits < 8 else UNIT // 2  # a word has at most 64 bits
    pieces = units.reshape(*units.shape[:2], -1, half) << bits * places[:half]
    words = [(pieces[:, :, i], f"<u{half * bits // 8}") for i in range(UNIT // half)]
    parts = [np.ascontiguousarray(word.sum(-1, keepdims=True).astype(kind)).view(np.uint8) for word, kind in words]
    return np.concatenate(parts, axis=-1).reshape(len(codes), -1)


def pack_columns(values, bits):
    """Rows of at most one group, a group a column: (bytes, float32 values they stand for)."""
    columns = values.shape[1]
    padded = np.pad(values, ((0, 0), (0, in_units(columns) - columns)), mode="edge")
    codes, scale, minimum = (each.T for each in quantise(np.ascontiguousarray(padded.T), bits))
    parts = [scale.ravel().view(np.uint8), minimum.ravel().view(np.uint8), pack_codes(codes, bits).ravel()]
    return np.concatenate(parts), dequantise(codes, scale, minimum)[:, :columns]


def pack_rows(values, bits):
    """Groups of GROUP columns of a row: (bytes, float32 values they stand for)."""
    columns = values.shape[1]
    padded = np.pad(values, ((0, 0), (0, in_units(columns) - columns)), mode="edge")
    pieces = [quantise(padded[:, j : j + GROUP], bits) for j in range(0, columns, GROUP)]
    back = np.concatenate([dequantise(*piece) for piece in pieces], axis=1)
    codes, scales, minimums = (np.concatenate([piece[i] for piece in pieces], axis=1) for i in range(3))
    parts = [scales.ravel().view(np.uint8), minimums.ravel().view(np.uint8), pack_codes(codes, bits).ravel()]
    return np.concatenate(parts), back[:, :columns]
