"""Models in fewer bits, by short names: neurons alone, resident matrices alone, both, parts apart.

A variant is `wide` (the folder as it is, in its own dtype), a dtype (`bfloat16`), NEURONS+RESIDENT+TABLES (each may be
empty: `+int4_32` is resident matrices alone; tables are embedding and head, otherwise as RESIDENT; `bf12` codes the
weights in bfloat16), the same with a `*` behind it, whose codes are chosen on a text, or ENCODING:MATRICES, where only
those of a neuron's matrices (down, or up,gate) are rounded; that rounding is done on the folder's weights.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashllm.arch.registry import claims
from flashllm.base.bf12 import BF12
from flashllm.base.dtypes import WEIGHT_DTYPE_BY_CODE, WEIGHT_DTYPES, cast
from flashllm.base.group_codes import GROUP_CODES
from flashllm.convert.checkpoint.opened import open_checkpoint
from flashllm.convert.checkpoint.source import Checkpoint
from flashllm.convert.run import convert_checkpoint
from flashllm.format.rows import CODED_ENCODINGS
from flashllm.pack.calibrated import convert_calibrated


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What is in fewer bits: names of CODED_ENCODINGS, None for `dtype`."""

    name: str
    dtype: str | None = None  # None: the checkpoint's own
    neurons: str | None = None
    resident: str | None = None
    tables: str | None = None  # embedding and head, where they differ from `resident`
    calibrated: bool = False
    rounded: tuple[str, ...] = ()  # matrices of neurons that `rounding` is applied to, before the conversion
    rounding: str | None = None

    @classmethod
    def of(cls, text: str) -> "Variant":
        """ValueError for what is no variant."""
        encoding, colon, matrices = text.partition(":")
        if colon:
            found = cls(name=text, rounding=encoding, rounded=tuple(matrices.split(",")))
        else:
            dtype = text if text in WEIGHT_DTYPES else None
            parts = text.removeprefix("wide" if dtype is None else dtype).removesuffix("*").split("+")
            if len(parts) > 3:
                raise ValueError(f"{text}: is more than NEURONS+RESIDENT+TABLES")
            neurons, resident, tables = (part or None for part in (*parts, "", "")[:3])
            found = cls(
                name=text,
                dtype="bfloat16" if BF12.name in parts else dtype,
                neurons=neurons,
                resident=resident,
                tables=tables,
                calibrated=text.endswith("*"),
            )
        for encoding in (found.neurons, found.resident, found.tables):
            if encoding is not None and encoding not in CODED_ENCODINGS:
                raise ValueError(f"{text}: {encoding} is not one of {', '.join(CODED_ENCODINGS)}")
        if found.rounding is not None and found.rounding not in GROUP_CODES:
            raise ValueError(f"{text}: {found.rounding} is not one of {', '.join(GROUP_CODES)}")
        return found

    def convert(self, folder: Path, directory: Path, *, text: Path | None = None, threads: int | None = None) -> None:
        """The Hugging Face folder as the new model directory `directory`; codes are chosen on `text`."""
        options: dict[str, Any] = {
            "dtype": self.dtype,
            "encoding": self.neurons,
            "resident_encoding": self.resident,
            "table_encoding": self.tables,
            "source_name": folder.name,
        }
        if self.calibrated:
            if text is None:
                raise ValueError(f"{self.name}: needs a text")
            convert_calibrated(folder, directory, text, **options, threads=threads)
            return
        with open_checkpoint(folder) as opened:
            rounded = self.rounding is not None
            checkpoint: Any = RoundedCheckpoint(opened, self.rounded, self.rounding) if rounded else opened
            convert_checkpoint(checkpoint, directory, **options)


class RoundedCheckpoint:
    """A checkpoint some of whose neurons' matrices are rounded to an encoding, along d_model, when they are read."""

    def __init__(self, checkpoint: Checkpoint, matrices: tuple[str, ...], encoding: str) -> None:
        self._checkpoint, self._code = checkpoint, GROUP_CODES[encoding]
        names = [f".{matrix}.weight" for matrix in matrices]
        found = {c.source: c for c in claims(checkpoint.config).values() if c.name.endswith(tuple(names))}
        if not found or any(claim.part.transposed or claim.part.count for claim in found.values()):
            raise ValueError(f"{checkpoint.path}: its {', '.join(matrices)} cannot be rounded apart")
        self._down = {source: claim.name.split(".")[2] == "down" for source, claim in found.items()}
        self._whole: dict[str, NDArray[Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._checkpoint, name)

    def read(self, name: str, start: int, out: NDArray[Any]) -> None:
        if name not in self._down:
            self._checkpoint.read(name, start, out)
            return
        if name not in self._whole:
            info = self._checkpoint.tensors[name]
            dtype = WEIGHT_DTYPE_BY_CODE[info.dtype]
            values = np.empty(info.shape, dtype.storage)
            self._checkpoint.read(name, 0, values)
            wide = cast(values, dtype, WEIGHT_DTYPES["float32"])
            wide = np.ascontiguousarray(wide.T) if self._down[name] else wide
            rounded = self._code.decode(self._code.encode(wide), wide.shape[1])
            rounded = np.ascontiguousarray(rounded.T) if self._down[name] else rounded
            self._whole = {name: cast(rounded, WEIGHT_DTYPES["float32"], dtype).reshape(-1).view(np.uint8)}
        flat = out.reshape(-1).view(np.uint8)
        flat[:] = self._whole[name][start : start + len(flat)]
