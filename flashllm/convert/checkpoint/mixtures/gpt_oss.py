"""gpt-oss's experts as a tensor for each matrix of each; those in MXFP4 also as blocks, which can be kept.

Checkpoints hold all experts of a layer together, and in them a gate's row, its up row, the next gate's row, and so on:

    experts.gate_up_proj [experts, d_model, 2 * size], .down_proj [experts, size, d_model], inputs first; or
    experts.gate_up_proj_blocks [experts, 2 * size, d_model / 32, 16], _scales [experts, 2 * size, d_model / 32], and
    .down_proj_blocks, _scales: MXFP4 (Open Compute Project, Microscaling Formats 1.0), a byte of two values, the first
    in its low bits, and 2^(scale - 127) for 32 of them
    experts.gate_up_proj_bias [experts, 2 * size], .down_proj_bias [experts, d_model]

Widened, an MXFP4 value has one bit of mantissa, so bfloat16 holds it exactly. Its blocks are given as GGUF files have
them: a byte of scale, then value i in the low bits of byte i and value i + 16 in the high ones. An expert is read whole
and held until the next.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashllm.base.codes.carried import FP4
from flashllm.base.dtypes import WEIGHT_DTYPES, cast
from flashllm.convert.checkpoint.source import Checkpoint, Lying, MadeTensor, TensorFile
from flashllm.errors import FormatError
from flashllm.format.safetensors import TensorInfo

GPT_OSS = "gpt_oss"
_GROUP = 32  # values of a scale
_BIAS = 127  # of a scale's exponent
_NO_NUMBER = 255  # a scale that makes its values NaN

_ITEMS: dict[str, Any] = {"U8": np.uint8, "F32": np.float32}  # of a dtype's bits; others' are uint16

Matrix = NDArray[Any]
Rows = Callable[[int, int], Matrix]  # (first, count)


class _Expert:
    """The last matrix read of a layer's experts, [outputs, inputs], of a tensor that holds them all."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self._checkpoint, self._name = checkpoint, name
        self.is_coded = f"{name}_blocks" in checkpoint.tensors
        self.part = f"{name}_blocks" if self.is_coded else name
        info = checkpoint.tensors[self.part]
        self.dtype = "BF16" if self.is_coded else info.dtype
        self._check(info)
        if self.is_coded:
            self.shape = (info.shape[0], info.shape[1], info.shape[2] * _GROUP)
        else:
            self.shape = (info.shape[0], info.shape[2], info.shape[1])
        self._last: tuple[int, Matrix] | None = None
        self._last_blocks: tuple[int, Matrix] | None = None

    @property
    def file(self) -> TensorFile:
        return self._checkpoint._files[self.part]

    def matrix(self, expert: int) -> Matrix:
        """[outputs, inputs] of the storage of `dtype`."""
        if self._last is None or self._last[0] != expert:
            self._last = (expert, self._widened(expert) if self.is_coded else self._read(self._name, expert).T)
        return self._last[1]

    def blocks(self, expert: int) -> Matrix:
        """[outputs, bytes of its blocks] of MXFP4, in the order of GGUF files."""
        if self._last_blocks is None or self._last_blocks[0] != expert:
            codes, scales = self._codes(expert)
            low, high = codes & 15, codes >> 4
            ordered = np.stack([low, high], axis=-1).reshape(*codes.shape[:-1], 2, _GROUP // 2)
            packed = ordered[..., 0, :] | ordered[..., 1, :] << 4
            whole = np.concatenate([scales[..., None], packed], axis=-1)
            self._last_blocks = (expert, whole.reshape(len(codes), -1))
        return self._last_blocks[1]

    def lies(self, part: str, kind: str, expert: int) -> Lying | None:
        """The place of an expert's codes or scales."""
        name = f"{self._name}_{part}"
        place, nbytes = self._checkpoint.extent(name), self._checkpoint.tensors[name].nbytes // self.shape[0]
        return None if place is None else Lying(place[0], place[1] + expert * nbytes, kind, nbytes)

    def _check(self, info: TensorInfo) -> None:
        """FormatError for shapes that cannot be."""
        wrong = len(info.shape) != (4 if self.is_coded else 3)
        if self.is_coded and not wrong:
            scales = self._checkpoint.tensors.get(f"{self._name}_scales")
            wrong = info.shape[3] * 2 != _GROUP or info.dtype != "U8"
            wrong = wrong or scales is None or scales.shape != info.shape[:3] or scales.dtype != "U8"
        if wrong:
            raise FormatError(f"{self._checkpoint.where(self.part)}: {list(info.shape)} of {info.dtype} are no experts")

    def _read(self, name: str, expert: int) -> Matrix:
        info = self._checkpoint.tensors[name]
        values: Matrix = np.empty(info.shape[1:], _ITEMS.get(info.dtype, np.uint16))
        self._checkpoint.read(name, expert * values.nbytes, values)
        return values

    def _widened(self, expert: int) -> Matrix:
        codes, scales = self._codes(expert)
        values = np.empty((*codes.shape[:-1], _GROUP), np.float32)
        values[..., ::2], values[..., 1::2] = FP4[codes & 15], FP4[codes >> 4]
        values = np.ldexp(values, scales[..., None].astype(np.int32) - _BIAS).reshape(len(codes), -1)
        return cast(values, WEIGHT_DTYPES["float32"], WEIGHT_DTYPES["bfloat16"])

    def _codes(self, expert: int) -> tuple[Matrix, Matrix]:
        """(bytes of two values [outputs, groups, 16], scales [outputs, groups]). FormatError for what is no number."""
        codes, scales = self._read(f"{self._name}_blocks", expert), self._read(f"{self._name}_scales", expert)
        if (scales == _NO_NUMBER).any():
            raise FormatError(f"{self._checkpoint.where(self.part)}: expert {expert} has scales that are no numbers")
        return codes, scales


@dataclass(frozen=True, slots=True)
class _Blocks:
    """A `QuantisedTensor`: every `step`-th row of an expert from the `first` on."""

    whole: _Expert
    expert: int
    first: int
    step: int
    kind: str = "MXFP4"
    transposed: bool = False
    scale: float = 1.0

    def place(self) -> Lying | None:
        """An up names the codes of all ups and gates, which alternate; a gate names their scales; down its codes."""
        is_gate = (self.first, self.step) == (0, 2)
        return self.whole.lies("scales" if is_gate else "blocks", "E8M0" if is_gate else "E2M1", self.expert)

    def raw(self, first: int, count: int) -> Matrix:
        return self.whole.blocks(self.expert)[self.first :: self.step][first : first + count]


def apart(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with a tensor for each expert's gate, up and down, and biases of all gates and all ups. Any other
    model's is left as it is. FormatError for tensors that cannot be experts."""
    if checkpoint.config.get("model_type") != GPT_OSS:
        return checkpoint
    tensors, files = dict(checkpoint.tensors), dict(checkpoint._files)
    quantised = dict(checkpoint.quantised)

    def put(name: str, dtype: str, shape: tuple[int, ...], made: MadeTensor) -> None:
        tensors[name], files[name] = TensorInfo.made(name, dtype, shape), made

    for found in list(checkpoint.tensors):
        name = found.removesuffix("_blocks")
        owner, _, kind = name.rpartition(".")
        if kind == "gate_up_proj_bias":
            info = checkpoint.tensors[found]
            if len(info.shape) != 2 or info.shape[1] % 2:
                raise FormatError(f"{checkpoint.where(found)}: {list(info.shape)} are no biases of experts")
            for first, part in enumerate(("gate_bias", "up_bias")):
                made = MadeTensor(checkpoint._files[found], _biases(checkpoint, found, first))
                put(f"{owner}.{part}", info.dtype, (info.shape[0] * info.shape[1] // 2,), made)
            taken = [found]
        elif kind in ("gate_up_proj", "down_proj") and owner.endswith(".experts"):
            whole = _Expert(checkpoint, name)
            count, outputs, inputs = whole.shape
            parts = {"down_proj": (0, 1)} if kind == "down_proj" else {"gate_proj": (0, 2), "up_proj": (1, 2)}
            for part, (first, step) in parts.items():
                for expert in range(count):
                    made = MadeTensor(whole.file, _rows(whole, expert, first, step))
                    own = f"{owner}.{expert}.{part}.weight"
                    put(own, whole.dtype, (outputs // step, inputs), made)
                    if whole.is_coded:
                        quantised[own] = _Blocks(whole, expert, first, step)
            taken = [found, f"{name}_scales"]
        else:
            continue
        for each in taken:
            tensors.pop(each, None)
            files.pop(each, None)
    return checkpoint.changed(tensors, files, quantised=quantised)


def _rows(whole: _Expert, expert: int, first: int, step: int) -> Rows:
    return lambda start, count: whole.matrix(expert)[first::step][start : start + count]


def _biases(checkpoint: Checkpoint, name: str, first: int) -> Rows:
    def rows(start: int, count: int) -> Matrix:
        info = checkpoint.tensors[name]
        values: Matrix = np.empty(info.shape, _ITEMS.get(info.dtype, np.uint16))
        checkpoint.read(name, 0, values)
        return values[:, first::2].reshape(-1)[start : start + count]

    return rows
