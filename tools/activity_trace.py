"""Activity traces: which neurons each layer used, token by token, recorded from a model or made up.

A trace is a safetensors file with one tensor `activity`, uint8 [tokens, layers, 3, row_nbytes]: for each layer three
bit sets over the neurons by original id (bit i of byte i // 8 is 1 << i % 8), in the order of `Stream`. Its metadata
says where it came from. Traces drive cache replay, and stand in for the predictor's answer in models whose weights
are dummies. Reads one token at a time, with `pread`; imports no torch.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from flashllm.arch.spec import Architecture
from flashllm.base.files import Closing, HashingWriter, open_for_reading, pread_into
from flashllm.errors import FormatError, UsageError
from flashllm.format.safetensors import SafetensorsHeader, encode_header, read_header

TRACE = "trace.safetensors"  # in models of dummy weights: activity that takes the place of the predictor's answer
TRACE_FORMAT = "flashllm-trace"
TRACE_VERSION = "1"
_TENSOR = "activity"
_WORD_NBYTES = 8  # a layer's bit set is whole 64-bit words

Bits = NDArray[np.uint8]


class Stream(IntEnum):
    """The three bit sets of a layer and token."""

    ACTIVE = 0  # predicted to fire: what the engine computes
    FIRING = 1  # firing indeed
    PREFETCH = 2  # predicted one layer before, for prefetching; empty in layer 0


def bits_nbytes(num_neurons: int) -> int:
    """Bytes of one bit set."""
    return -(-num_neurons // (8 * _WORD_NBYTES)) * _WORD_NBYTES


def pack_bits(mask: NDArray[np.bool_]) -> Bits:
    """Masks [..., num_neurons] as bit sets [..., row_nbytes]."""
    packed = np.packbits(mask, axis=-1, bitorder="little")
    missing = bits_nbytes(mask.shape[-1]) - packed.shape[-1]
    return np.pad(packed, [(0, 0)] * (packed.ndim - 1) + [(0, missing)])


def unpack_bits(bits: Bits, num_neurons: int) -> NDArray[np.bool_]:
    """The masks of bit sets: the inverse of `pack_bits`."""
    return np.unpackbits(bits, axis=-1, count=num_neurons, bitorder="little").view(np.bool_)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceInfo:
    """A trace's extent and origin."""

    num_tokens: int
    num_layers: int
    num_neurons: int
    synthetic: bool
    description: str
    sequence_starts: tuple[int, ...] = (0,)  # tokens with which a new text begins

    @property
    def token_shape(self) -> tuple[int, int, int]:
        """Shape of one token's bit sets: [layers, streams, row_nbytes]."""
        return self.num_layers, len(Stream), bits_nbytes(self.num_neurons)

    def metadata(self) -> Mapping[str, str]:
        return {
            "format": TRACE_FORMAT,
            "version": TRACE_VERSION,
            "neurons": str(self.num_neurons),
            "synthetic": "true" if self.synthetic else "false",
            "description": self.description,
            "sequence_starts": " ".join(str(start) for start in self.sequence_starts),
        }


class TraceWriter:
    """Writes a trace token by token; a context manager. `sha256` and `nbytes` are there after `finish`."""

    def __init__(self, path: Path, info: TraceInfo) -> None:
        self.info = info
        self._left = info.num_tokens
        self._writer = HashingWriter(path)
        header = encode_header([(_TENSOR, "U8", (info.num_tokens, *info.token_shape))], info.metadata())
        self._writer.write(memoryview(header))

    def append(self, token: Bits) -> None:
        """The next token's bit sets [layers, 3, row_nbytes]. ValueError for another shape or a token too many."""
        if token.shape != self.info.token_shape or token.dtype != np.uint8:
            raise ValueError(f"a token of this trace is uint8 {self.info.token_shape}, not {token.dtype} {token.shape}")
        if self._left == 0:
            raise ValueError(f"the trace is full with {self.info.num_tokens} tokens")
        self._left -= 1
        self._writer.write(np.ascontiguousarray(token).data.cast("B"))

    def finish(self) -> tuple[str, int]:
        """SHA-256 and size of the whole file, durable. ValueError where tokens are missing."""
        if self._left:
            raise ValueError(f"{self._left} of {self.info.num_tokens} tokens are missing")
        return self._writer.finish(), self._writer.position

    def __enter__(self) -> Self:
        self._writer.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._writer.__exit__(kind, value, tb)


class Trace(Closing):
    """An open trace; a context manager. Raises FormatError for a file that is no trace."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        header = read_header(self.path)
        self.info = _parse(header)
        self._offset = header.data_start
        self._fd = open_for_reading(self.path)

    def read_into(self, token: int, buffer: Bits) -> None:
        """Fill `buffer` [layers, 3, row_nbytes] with one token's bit sets. After the trace's end it begins again."""
        nbytes = int(np.prod(self.info.token_shape))
        view = buffer.data.cast("B")
        pread_into(self._fd, view, self._offset + token % self.info.num_tokens * nbytes, self.path)

    def token(self, token: int) -> Bits:
        buffer = np.empty(self.info.token_shape, np.uint8)
        self.read_into(token, buffer)
        return buffer

    def check_model(self, architecture: Architecture) -> None:
        """UsageError unless the trace is of a model of this shape."""
        num_layers, num_neurons = architecture.num_layers, architecture.d_ff
        if architecture.widths or architecture.dense_layers:
            raise UsageError(f"{self.path}: a trace, and the model's layers differ")
        if (self.info.num_layers, self.info.num_neurons) != (num_layers, num_neurons):
            raise UsageError(
                f"{self.path}: a trace of {self.info.num_layers} layers of {self.info.num_neurons} neurons; the model "
                f"has {num_layers} of {num_neurons}"
            )

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _parse(header: SafetensorsHeader) -> TraceInfo:
    path, metadata, tensor = header.path, header.metadata, header.tensors.get(_TENSOR)
    if metadata.get("format") != TRACE_FORMAT or metadata.get("version") != TRACE_VERSION:
        raise FormatError(f"{path}: is not an activity trace of version {TRACE_VERSION}")
    if tensor is None or len(header.tensors) != 1 or tensor.dtype != "U8" or len(tensor.shape) != 4:
        raise FormatError(f"{path}: a trace holds one tensor, `{_TENSOR}`, uint8 of four dimensions")
    try:
        info = TraceInfo(
            num_tokens=tensor.shape[0],
            num_layers=tensor.shape[1],
            num_neurons=int(metadata["neurons"]),
            synthetic={"true": True, "false": False}[metadata["synthetic"]],
            description=metadata["description"],
            sequence_starts=tuple(int(start) for start in metadata["sequence_starts"].split()),
        )
    except (KeyError, ValueError) as error:
        raise FormatError(f"{path}: the trace's metadata is damaged ({error})") from error
    if 0 in tensor.shape or info.num_neurons < 1 or tensor.shape[1:] != info.token_shape:
        raise FormatError(f"{path}: {list(tensor.shape)} is no trace of {info.num_neurons} neurons a layer")
    return info
