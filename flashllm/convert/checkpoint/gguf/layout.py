"""The layout of a GGUF file's tensors: what its table says is checked whole, so that nothing else can be read.

- A tensor has one to four dimensions, none of them 0, and its rows are whole blocks of its kind.
- Vectors, norms and biases are numbers (F32, F16, BF16), as every writer has them; matrices are of any kind that can be
  dequantised, routers too: ik_llama.cpp can make them Q8_0.
- The data begins at the aligned end of the header, and each tensor at the aligned end of the one before it: no overlap,
  no hole. So write llama.cpp and the gguf package, and llama.cpp reads nothing else. The table may name tensors in
  another order than the data has.
- The file ends where the last one does, or at its aligned end: so another alignment than the writer's is noticed.
"""

import importlib
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flashllm.convert.checkpoint.gguf.header import Header, TableEntry
from flashllm.errors import FormatError, UnsupportedModelError

PLAIN = {"F32": ("F32", 4), "F16": ("F16", 2), "BF16": ("BF16", 2)}  # kind -> safetensors' code, bytes an element
_PLAIN_ENDINGS = (".bias", "_norm.weight")
_I2_S = 36  # a number that ggml gives to nothing any more
_ALIGNMENT, _DEFAULT_ALIGNMENT = "general.alignment", 32


class _Kind(NamedTuple):
    name: str
    weights: int  # of a block
    nbytes: int  # of a block


class Placed(NamedTuple):
    """A tensor whose bytes are known."""

    kind: str  # of ggml: "F16", "Q4_K"
    shape: tuple[int, ...]
    offset: int  # in the file
    nbytes: int


def placed_tensors(header: Header, file_nbytes: int, path: Path) -> dict[str, Placed]:
    """The tensors by name. FormatError for one that none can be, UnsupportedModelError for a kind that is not read."""
    alignment = header.metadata.get(_ALIGNMENT, _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise FormatError(f"{path}: {_ALIGNMENT} must be a power of two, not {str(alignment)[:80]!r}; get it again")
    start = _aligned(header.nbytes, alignment)
    kinds: dict[int, _Kind] = {}
    placed = {}
    for entry in header.tensors:
        where = f"{path}: tensor {entry.name[:80]}"
        if entry.kind not in kinds:
            kinds[entry.kind] = _kind_of(entry.kind, where)
        tensor = placed[entry.name] = _placed(entry, kinds[entry.kind], start, where)
        if tensor.offset + tensor.nbytes > file_nbytes:
            raise FormatError(
                f"{where} is truncated: it ends at byte {tensor.offset + tensor.nbytes}, the file at {file_nbytes}; "
                "get the file again"
            )
    end = last = start
    for name, tensor in sorted(placed.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != end:
            what = "a hole of" if tensor.offset > end else "an overlap of"
            raise FormatError(
                f"{path}: tensor {name[:80]}: {what} {abs(tensor.offset - end)} bytes before it: it lies at byte "
                f"{tensor.offset} instead of {end}; the file is damaged, get it again"
            )
        last = tensor.offset + tensor.nbytes
        end = _aligned(last, alignment)
    if placed and file_nbytes not in (last, end):
        raise FormatError(
            f"{path}: {file_nbytes - last} bytes behind tensor {name[:80]}, the last, belong to nothing; the file, or "
            f"its {_ALIGNMENT} of {alignment}, is damaged; get it again"
        )
    return placed


def dequantized(raw: NDArray[np.uint8], kind: str) -> NDArray[np.float32]:
    """Rows of quantised blocks, [rows, bytes], as fp32."""
    gguf = importlib.import_module("gguf")
    values: NDArray[np.float32] = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    return values


def _aligned(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment


def _kind_of(number: int, where: str) -> _Kind:
    gguf: Any = importlib.import_module("gguf")
    if number == _I2_S:
        raise UnsupportedModelError(
            f"{where} is of kind I2_S, bitnet.cpp's own, whose layout depends on the processor that it was made for; "
            "give the model's Hugging Face folder (microsoft/bitnet-b1.58-2B-4T), which keeps its 2 bits"
        )
    try:
        kind = gguf.GGMLQuantizationType(number)
        weights, nbytes = gguf.GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError) as error:
        raise UnsupportedModelError(f"{where} is of kind {number}, which the gguf package does not know") from error
    if kind.name not in PLAIN:
        try:
            dequantized(np.zeros((1, nbytes), np.uint8), kind.name)
        except NotImplementedError as error:
            raise UnsupportedModelError(f"{where} is of kind {kind.name}, which cannot be dequantised") from error
    return _Kind(kind.name, weights, nbytes)


def _placed(entry: TableEntry, kind: _Kind, start: int, where: str) -> Placed:
    again, shape = "the file is damaged, get it again", entry.shape
    if not shape or 0 in shape:
        raise FormatError(f"{where} holds nothing: its shape is {list(shape)}; {again}")
    if shape[-1] % kind.weights:
        raise FormatError(
            f"{where} has rows of {shape[-1]} weights, and kind {kind.name} blocks of {kind.weights}; {again}"
        )
    if kind.name not in PLAIN and (len(shape) == 1 or entry.name.endswith(_PLAIN_ENDINGS)):
        raise FormatError(
            f"{where} is of kind {kind.name}, where vectors, norms and biases are {', '.join(PLAIN)}; {again}"
        )
    nbytes = math.prod(shape) // kind.weights * kind.nbytes
    return Placed(kind.name, shape, start + entry.offset, nbytes)
