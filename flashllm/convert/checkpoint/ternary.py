"""BitNet b1.58's matrices as its layers multiply by them, in fp32, from what its checkpoints hold.

    scaled:  weight packed, and weight_scale [1]: ternary times the scale
    divided: the same, ternary divided by the scale
    master:  weight whole, W: s * max(-1, min(round(W / s), 1)) for s the mean of |W|

Packed is a byte for four rows: bits 2k and 2k + 1 of row r of [n, columns] are row k * n + r, each number one more than
its value (transformers, integrations/bitnet.py). Reads the rows that are asked for; of a master's matrix once all of
them, for the mean.
"""

import dataclasses
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashllm.arch.llama.bitnet import MODEL_TYPE, Form, form_of
from flashllm.base.dtypes import WEIGHT_DTYPE_BY_CODE, WEIGHT_DTYPES, cast
from flashllm.convert.checkpoint.source import Checkpoint, MadeTensor, TensorFile
from flashllm.errors import FormatError
from flashllm.format.safetensors import TensorInfo

_LINEAR = "_proj.weight"  # how names of the blocks' matrices end
_TOGETHER_NBYTES = 32 << 20  # of a master's matrix, read at a time for its mean
_LEAST = np.float32(1e-5)  # of a mean
_A_BYTE = 4  # rows

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor of the checkpoint, [rows, columns]."""

    file: TensorFile
    info: TensorInfo

    def read(self, first: int, count: int) -> NDArray[Any]:
        """Those rows in the storage of the tensor's dtype."""
        dtype = WEIGHT_DTYPE_BY_CODE.get(self.info.dtype)
        storage: Any = np.uint8 if dtype is None else dtype.storage
        values: NDArray[Any] = np.empty((count, *self.info.shape[1:]), storage)
        start = first * values.nbytes // max(1, count)
        self.file.read_into(self.info, start, values.reshape(-1).view(np.uint8).data)
        return values

    def floats(self, first: int, count: int) -> Floats:
        """The same in fp32."""
        return cast(self.read(first, count), WEIGHT_DTYPE_BY_CODE[self.info.dtype], WEIGHT_DTYPES["float32"])

    def error(self, what: str) -> FormatError:
        return FormatError(f"{self.file.path}: tensor {self.info.name}: {what}; download it again")


@dataclass(slots=True)
class _Matrix:
    """A matrix as it is multiplied by."""

    stored: _Stored
    master: bool
    factor: np.float32 | None = None  # of three values; None: of a master, not known yet

    def rows(self, first: int, count: int) -> Floats:
        """Those rows of it."""
        if self.stored.info.dtype == "U8":
            return self._unpacked(first, count) * self._by
        if not self.master:
            return self.stored.floats(first, count) * self._by
        scale = np.float32(1) / self._by
        three: Floats = np.clip(np.rint(self.stored.floats(first, count) * scale), -1, 1)
        return three / scale

    def _unpacked(self, first: int, count: int) -> Floats:
        """Those rows, of -1, 0 and 1."""
        packed = self.stored.info.shape[0]
        values, done = np.empty((count, self.stored.info.shape[1]), np.float32), 0
        while done < count:
            quarter, row = divmod(first + done, packed)
            n = min(count - done, packed - row)
            codes = (self.stored.read(row, n) >> (2 * quarter)) & 3
            if (codes == 3).any():
                raise self.stored.error("holds a value that is not -1, 0 or 1")
            values[done : done + n] = codes
            done += n
        return values - 1

    @property
    def _by(self) -> np.float32:
        """The factor of three values."""
        if self.factor is None:
            self.factor = self._mean_magnitude()
        return self.factor

    def _mean_magnitude(self) -> np.float32:
        rows, columns = self.stored.info.shape
        together, total = max(1, _TOGETHER_NBYTES // (4 * columns)), 0.0
        for first in range(0, rows, together):
            values = self.stored.floats(first, min(together, rows - first))
            total += float(np.abs(values).sum(dtype=np.float64))
        return max(np.float32(total / (rows * columns)), _LEAST)


def ternary(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with matrices as they are multiplied by. Any other model's, and one without `quantization_config`,
    is left as it is. FormatError for tensors that cannot be."""
    if checkpoint.config.get("model_type") != MODEL_TYPE:
        return checkpoint
    form = form_of(checkpoint.config)
    if form is Form.WHOLE:
        return checkpoint
    tensors, files = dict(checkpoint.tensors), dict(checkpoint._files)
    for name, info in checkpoint.tensors.items():
        if not name.endswith(_LINEAR):
            continue
        stored = _Stored(files[name], info)
        packed = form is not Form.MASTER and info.dtype == "U8"
        if len(info.shape) != 2 or not (packed or info.dtype in WEIGHT_DTYPE_BY_CODE):
            raise stored.error(f"{info.dtype} {list(info.shape)} is no matrix of such a checkpoint")
        shape = (info.shape[0] * (_A_BYTE if packed else 1), info.shape[1])
        matrix = _Matrix(stored, master=form is Form.MASTER)
        if form is not Form.MASTER:
            matrix.factor = _scale(checkpoint, name, stored, form)
        nbytes = shape[0] * shape[1] * 4
        tensors[name] = dataclasses.replace(info, dtype="F32", shape=shape, offset=0, nbytes=nbytes)
        files[name] = MadeTensor(stored.file, matrix.rows)
    for name in [name for name in tensors if name.endswith("_proj.weight_scale")]:
        del tensors[name], files[name]
    whole = [info.dtype for name, info in checkpoint.tensors.items() if name.endswith("embed_tokens.weight")]
    preferred = WEIGHT_DTYPE_BY_CODE[whole[0]].name if whole and whole[0] in WEIGHT_DTYPE_BY_CODE else None
    return dataclasses.replace(
        checkpoint,
        tensors=MappingProxyType(tensors),
        preferred_dtype=checkpoint.preferred_dtype or preferred,
        _files=MappingProxyType(files),
    )


def _scale(checkpoint: Checkpoint, name: str, stored: _Stored, form: Form) -> np.float32:
    """The factor of the matrix's three values."""
    found = checkpoint.tensors.get(f"{name}_scale")
    if found is None or found.dtype not in WEIGHT_DTYPE_BY_CODE or found.shape not in ((1,), ()):
        raise stored.error("has no weight_scale of one number")
    values = np.empty(1, WEIGHT_DTYPE_BY_CODE[found.dtype].storage)
    checkpoint.read(f"{name}_scale", 0, values)
    scale = np.float32(cast(values, WEIGHT_DTYPE_BY_CODE[found.dtype], WEIGHT_DTYPES["float32"])[0])
    if not (np.isfinite(scale) and scale != 0):
        raise stored.error(f"has a weight_scale of {scale}")
    return scale if form is Form.SCALED else np.float32(1) / scale
