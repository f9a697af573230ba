"""BitNet b1.58's matrices as its layers multiply by them, in codes of 2 bits, from what its checkpoints hold.

    scaled:  weight packed, and weight_scale [1]: ternary times the scale
    divided: the same, ternary divided by the scale
    master:  weight whole, W: s * max(-1, min(round(W / s), 1)) for s the mean of |W|

Packed is a byte for four rows: bits 2k and 2k + 1 of row r of [n, columns] are row k * n + r, each number one more than
its value (transformers, integrations/bitnet.py). Reads the rows that are asked for; of a master's matrix once all of
them, for the mean, and of a down projection, whose vectors are columns.
"""

from dataclasses import dataclass

import numpy as np

from flashllm.arch.llama.bitnet import MODEL_TYPE, Form, form_of
from flashllm.base.codes.carried import CARRIED_CODES, SHARED, Bytes, Codes, Floats, Quantised
from flashllm.base.dtypes import WEIGHT_DTYPE_BY_CODE, WEIGHT_DTYPES, cast
from flashllm.convert.checkpoint.source import Checkpoint, MadeTensor
from flashllm.errors import FormatError
from flashllm.format.safetensors import TensorInfo

_LINEAR = "_proj.weight"  # how names of the blocks' matrices end
_DOWN = ".down_proj.weight"
_TOGETHER_NBYTES = 32 << 20  # of a master's matrix, read at a time for its mean
_LEAST = np.float32(1e-5)  # of a mean
_A_BYTE = 4  # rows

_CODE = CARRIED_CODES["ternary"]
_NOT_TERNARY = "holds a value that is not -1, 0 or 1"


@dataclass(slots=True)
class _Matrix:
    """A matrix as it is multiplied by: a `QuantisedTensor`."""

    checkpoint: Checkpoint
    info: TensorInfo  # as it is stored
    shape: tuple[int, int]
    transposed: bool
    factor: np.float32 | None = None  # of three values; None: of a master, not known yet
    kind: str = _CODE.name
    scale: float = 1.0
    _master: bool = False
    _whole: Codes | None = None  # of a transposed one, while it is read

    def __post_init__(self) -> None:
        self._master = self.factor is None

    def place(self) -> None:
        return None

    def raw(self, first: int, count: int) -> Bytes:
        if not self.transposed:
            codes = self._codes(first, count)
        else:
            if self._whole is None:
                self._whole = self._codes(0, self.shape[0])
            codes = self._whole[:, first : first + count].T
            if first + count == self.shape[1]:
                self._whole = None
        scales = np.full((count, -(-codes.shape[1] // SHARED)), self._scale)
        return _CODE.pack(Quantised(form=_CODE.form, codes=codes, scales={"scales": scales}))

    def rows(self, first: int, count: int) -> Floats:
        """Those rows in fp32."""
        found: Floats = self._codes(first, count) * self._scale
        return found

    def _codes(self, first: int, count: int) -> Codes:
        """Those rows, of -1, 0 and 1."""
        if self.info.dtype == "U8":
            return self._unpacked(first, count)
        values = self.checkpoint.floats(self.info.name, first, count)
        if self._master:
            values = np.clip(np.rint(values * (np.float32(1) / self._mean)), -1, 1)
        codes = values.astype(np.int8)
        if not (np.array_equal(codes, values) and (abs(codes) <= 1).all()):
            raise _error(self.checkpoint, self.info, _NOT_TERNARY)
        return codes

    def _unpacked(self, first: int, count: int) -> Codes:
        packed, columns = self.info.shape
        values, done = np.empty((count, self.shape[1]), np.int8), 0
        while done < count:
            quarter, row = divmod(first + done, packed)
            n = min(count - done, packed - row)
            stored = np.empty((n, columns), np.uint8)
            self.checkpoint.read(self.info.name, row * columns, stored)
            codes = (stored >> (2 * quarter)) & 3
            if (codes == 3).any():
                raise _error(self.checkpoint, self.info, _NOT_TERNARY)
            values[done : done + n] = codes
            done += n
        return values - np.int8(1)

    @property
    def _scale(self) -> np.float32:
        """The number that code 1 stands for; rounded to the dtype of master weights."""
        if not self._master:
            return self._mean
        dtype = WEIGHT_DTYPE_BY_CODE[self.info.dtype]
        scale = np.array([np.float32(1) / (np.float32(1) / self._mean)])
        found: Floats = cast(cast(scale, WEIGHT_DTYPES["float32"], dtype), dtype, WEIGHT_DTYPES["float32"])
        return np.float32(found[0])

    @property
    def _mean(self) -> np.float32:
        """The factor of three values."""
        if self.factor is None:
            self.factor = self._mean_magnitude()
        return self.factor

    def _mean_magnitude(self) -> np.float32:
        rows, columns = self.shape
        together, total = max(1, _TOGETHER_NBYTES // (4 * columns)), 0.0
        for first in range(0, rows, together):
            values = self.checkpoint.floats(self.info.name, first, min(together, rows - first))
            total += float(np.abs(values).sum(dtype=np.float64))
        return max(np.float32(total / (rows * columns)), _LEAST)


def ternary(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with matrices as they are multiplied by, in codes, and in fp32 for who wants numbers. Any other
    model's, and one without `quantization_config`, is left as it is. FormatError for tensors that cannot be."""
    if checkpoint.config.get("model_type") != MODEL_TYPE:
        return checkpoint
    form = form_of(checkpoint.config)
    if form is Form.WHOLE:
        return checkpoint
    tensors, files, quantised = dict(checkpoint.tensors), dict(checkpoint._files), dict(checkpoint.quantised)
    for name, info in checkpoint.tensors.items():
        if not name.endswith(_LINEAR):
            continue
        packed = form is not Form.MASTER and info.dtype == "U8"
        if len(info.shape) != 2 or not (packed or info.dtype in WEIGHT_DTYPE_BY_CODE):
            raise _error(checkpoint, info, f"{info.dtype} {list(info.shape)} is no matrix of such a checkpoint")
        shape = (info.shape[0] * (_A_BYTE if packed else 1), info.shape[1])
        factor = None if form is Form.MASTER else _scale(checkpoint, info, form)
        matrix = _Matrix(checkpoint, info, shape, transposed=name.endswith(_DOWN), factor=factor)
        tensors[name] = TensorInfo.made(name, "F32", shape)
        files[name], quantised[name] = MadeTensor(files[name], matrix.rows), matrix
    for name in [name for name in tensors if name.endswith("_proj.weight_scale")]:
        del tensors[name], files[name]
    preferred = checkpoint.preferred_dtype or checkpoint.embedding_dtype
    return checkpoint.changed(tensors, files, quantised=quantised, preferred_dtype=preferred)


def _error(checkpoint: Checkpoint, info: TensorInfo, what: str) -> FormatError:
    return FormatError(f"{checkpoint.where(info.name)}: {what}; download it again")


def _scale(checkpoint: Checkpoint, info: TensorInfo, form: Form) -> np.float32:
    """The factor of the matrix's three values."""
    found = checkpoint.tensors.get(f"{info.name}_scale")
    if found is None or found.dtype not in WEIGHT_DTYPE_BY_CODE or found.shape not in ((1,), ()):
        raise _error(checkpoint, info, "has no weight_scale of one number")
    scale = np.float32(checkpoint.floats(found.name, 0, 1)[0])
    if not (np.isfinite(scale) and scale != 0):
        raise _error(checkpoint, info, f"has a weight_scale of {scale}")
    return scale if form is Form.SCALED else np.float32(1) / scale
