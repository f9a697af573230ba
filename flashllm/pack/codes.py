"""The codes that calibration chose, layer by layer, in a folder beside the model under conversion.

A finished layer is a safetensors file of its own, so that an interrupted calibration goes on behind it. The folder's
record says what the codes belong to: source, text and encodings. Knows no arithmetic.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashllm.base.files import fsync_directory, read_json_object, write_atomically
from flashllm.convert.checkpoint.coded import Vectors
from flashllm.errors import UsageError
from flashllm.format.safetensors import encode_header, open_safetensors

_RECORD = "codes.json"
Codes = dict[str, NDArray[np.uint8]]  # by canonical name, [vectors, vector_nbytes]


class CodesFolder:
    """Codes under the names of `CodedWeights`; one layer's are in memory at a time."""

    def __init__(self, path: Path, record: Mapping[str, Any]) -> None:
        """Begin or resume. UsageError where the folder holds codes of something else."""
        self.path, self._record = path, dict(record)
        self._loaded: tuple[int, Codes] = (-1, {})
        path.mkdir(exist_ok=True)
        if not (path / _RECORD).exists():
            write_atomically(path / _RECORD, json.dumps(self._record).encode())
        elif read_json_object(path / _RECORD) != self._record:
            raise UsageError(f"{path}: is left from another calibration; remove it, then try again")

    def layer(self, number: int) -> Codes | None:
        """A finished layer's codes; None for one that is not finished."""
        if self._loaded[0] != number:
            path = self._file(number)
            if not path.exists():
                return None
            with open_safetensors(path) as file:
                self._loaded = number, {name: file.array(info) for name, info in file.header.tensors.items()}
        return self._loaded[1]

    def write(self, number: int, codes: Codes) -> None:
        """Keep a finished layer."""
        path = self._file(number)
        draft = path.with_suffix(".draft")
        with draft.open("wb") as file:
            file.write(encode_header([(name, "U8", array.shape) for name, array in codes.items()]))
            for array in codes.values():
                file.write(np.ascontiguousarray(array).reshape(-1).data)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
        fsync_directory(self.path)
        self._loaded = number, codes

    def fingerprint(self) -> Any:
        return self._record

    def vectors(self, name: str) -> Vectors | None:
        first, _, rest = name.partition(".")
        codes = self.layer(int(rest.partition(".")[0])) if first == "layers" else None
        found = None if codes is None else codes.get(name)
        return None if found is None else lambda start, count: found[start : start + count]

    def _file(self, number: int) -> Path:
        return self.path / f"layer-{number:05d}.safetensors"
