"""Matrices in 8-bit floating point (e4m3: Micikevicius et al., 2022), widened to fp32 as they are read.

    weight            F8_E4M3 [rows, columns], or [experts, rows, columns] of many
    weight_scale_inv  by what values are multiplied: a number for each block of rows and columns, the last ones of a
                      row or column may be shorter; or one for all of a matrix

DeepSeek V3, MiniMax-M2, Qwen and Mistral publish so (transformers, integrations/finegrained_fp8.py). Scales for the
inputs of products (`activation_scale`) are left out: inputs stay whole here.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashllm.base.dtypes import WEIGHT_DTYPE_BY_CODE, WEIGHT_DTYPES, cast
from flashllm.convert.checkpoint.source import Checkpoint, MadeTensor
from flashllm.errors import FormatError, UnsupportedModelError
from flashllm.format.model_files import CONFIG
from flashllm.format.safetensors import TensorInfo

_CODE, _SCALE, _OF_INPUTS = "F8_E4M3", "_scale_inv", "activation_scale"
_FORMS = (None, "e4m3", "float8_e4m3fn")
_NO_NUMBER = 0x7F  # without its sign

Floats = NDArray[np.float32]


def _values() -> Floats:
    """The value of each code: a sign, four bits of exponent, of which 7 is 0, and three of mantissa."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, (codes & 7).astype(np.float32)
    tiny = exponent == 0
    size = np.ldexp(np.where(tiny, mantissa, 8 + mantissa), np.where(tiny, 1, exponent) - 10)
    values: Floats = np.where(codes < 128, size, -size).astype(np.float32)
    return values


_VALUES = _values()


@dataclass(frozen=True, slots=True)
class _Matrix:
    checkpoint: Checkpoint
    info: TensorInfo
    scales: TensorInfo
    block: tuple[int, int]  # rows and columns that share a scale

    def rows(self, first: int, count: int) -> Floats:
        """Those rows in fp32, of all experts one behind the other. FormatError for a code or a scale that is no
        number."""
        (*_, rows, columns), (height, width) = self.info.shape, self.block
        codes = np.empty((count, columns), np.uint8)
        self.checkpoint.read(self.info.name, first * columns, codes)
        number = np.arange(first, first + count)
        of_row = number // rows * -(-rows // height) + number % rows // height
        dtype, top = WEIGHT_DTYPE_BY_CODE[self.scales.dtype], int(of_row[0])
        stored = np.empty((of_row[-1] + 1 - top, -(-columns // width)), dtype.storage)
        self.checkpoint.read(self.scales.name, top * stored[:1].nbytes, stored)
        scales = cast(stored, dtype, WEIGHT_DTYPES["float32"])
        if (codes & 0x7F == _NO_NUMBER).any() or not np.isfinite(scales).all():
            raise FormatError(f"{self.checkpoint.where(self.info.name)}: holds what is no number; download it again")
        result: Floats = _VALUES[codes] * np.repeat(scales[of_row - top], width, axis=1)[:, :columns]
        return result


def widened(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with its matrices in fp32, and a config that says nothing of codes. One in another form, or in
    none, is left as it is.

    UnsupportedModelError for 8-bit floating point of another kind, FormatError for tensors that do not fit each other.
    """
    said = checkpoint.config.get("quantization_config")
    if not isinstance(said, dict) or said.get("quant_method") != "fp8":
        return checkpoint
    block = _block(said, checkpoint)
    tensors, files = dict(checkpoint.tensors), dict(checkpoint._files)
    for name, info in checkpoint.tensors.items():
        if name.endswith(_OF_INPUTS):
            del tensors[name], files[name]
        if info.dtype != _CODE:
            continue
        scales = tensors.pop(name + _SCALE, None)
        files.pop(name + _SCALE, None)
        matrix = _matrix(checkpoint, info, scales, block)
        tensors[name] = TensorInfo.made(name, "F32", info.shape)
        files[name] = MadeTensor(files[name], matrix.rows)
    config = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    wide = checkpoint.changed(tensors, files, config)
    return replace(wide, preferred_dtype=wide.embedding_dtype or "bfloat16")


def _block(said: dict[str, Any], checkpoint: Checkpoint) -> tuple[int, int] | None:
    """Rows and columns that share a scale; None where all of a matrix do."""
    size, form = said.get("weight_block_size"), said.get("fmt")
    if form not in _FORMS:
        raise UnsupportedModelError(
            f"{checkpoint.path / CONFIG}: fp8 in the form {str(form)[:80]!r} is not read, e4m3 is; give the model that "
            "it was made from, or a GGUF file of it"
        )
    if size is None:
        return None
    if not isinstance(size, list) or len(size) != 2 or not all(type(each) is int and each > 0 for each in size):
        raise FormatError(f"{checkpoint.path / CONFIG}: weight_block_size must be two sizes, not {str(size)[:80]!r}")
    return size[0], size[1]


def _matrix(
    checkpoint: Checkpoint, info: TensorInfo, scales: TensorInfo | None, block: tuple[int, int] | None
) -> _Matrix:
    if len(info.shape) not in (2, 3) or 0 in info.shape:
        raise UnsupportedModelError(
            f"{checkpoint.where(info.name)}: {list(info.shape)} in 8-bit floating point is no matrix and no stack "
            "of them, which alone are read so; give the model that it was made from, or a GGUF file of it"
        )
    *experts, rows, columns = info.shape
    height, width = block or (rows, columns)
    expected = (*experts, -(-rows // height), -(-columns // width))
    alone = block is None and not experts and scales is not None and scales.shape in ((), (1,))
    if scales is None or scales.dtype not in WEIGHT_DTYPE_BY_CODE or not (alone or scales.shape == expected):
        found = "lacks it" if scales is None else f"has {scales.dtype} {list(scales.shape)}"
        raise FormatError(
            f"{checkpoint.where(info.name)}: wants a scale for each {height} x {width}, {list(expected)} numbers, and "
            f"{found}; download it again"
        )
    return _Matrix(checkpoint, info, scales, (height, width))
