"""An open checkpoint, whatever its files are: named tensors whose bytes can be read in ranges. Knows no file format."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from flashllm.base.dtypes import WEIGHT_DTYPE_BY_CODE, WEIGHT_DTYPES, cast
from flashllm.base.files import drop_page_cache, pread_into
from flashllm.errors import FlashIOError, FormatError
from flashllm.format.model_files import CONFIG
from flashllm.format.safetensors import TensorInfo, read_start

COPIED_SUFFIXES = (".json", ".txt", ".model", ".jinja")  # config, generation config, tokenizer, chat template
ADAPTER = "adapter_config.json"  # of peft's, whose weights are no model's
ADAPTER_HINT = (
    f"; it holds an adapter ({ADAPTER}): merge it into its base model (peft's merge_and_unload), save that with "
    "save_pretrained(), and name it"
)
_INDEX_SUFFIX = ".index.json"  # of weights that are not copied


class TensorFile(Protocol):
    """An open file of weights, or what reads a tensor of it."""

    @property
    def path(self) -> Path:
        """The file."""

    def read_into(self, info: TensorInfo, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes of tensor `info` from its byte `start`, leaving nothing in the page cache."""

    def extent(self, info: TensorInfo) -> int | None:
        """Offset in the file of the tensor's bytes as they are; None where reading makes them."""


@dataclass(frozen=True, slots=True)
class MadeTensor:
    """A `TensorFile` of a tensor that is made of what `file` holds: `rows(first, count)` of it, or of its numbers; of a
    stack of matrices, those of all, one behind the other."""

    file: TensorFile
    rows: Callable[[int, int], NDArray[Any]]

    @property
    def path(self) -> Path:
        return self.file.path

    def read_into(self, info: TensorInfo, start: int, buffer: memoryview) -> None:
        row = info.nbytes // math.prod(info.shape[:-1] or info.shape)
        first, last = start // row, -(-(start + len(buffer)) // row)
        made = np.ascontiguousarray(self.rows(first, last - first)).reshape(-1).view(np.uint8)
        buffer[:] = made[start - first * row :][: len(buffer)].data

    def extent(self, info: TensorInfo) -> int | None:
        """As `TensorFile.extent`: they lie nowhere as they are."""
        return None


class Lying(NamedTuple):
    """The place of a matrix in a file: its stored rows, one after the other."""

    path: Path
    offset: int
    kind: str
    nbytes: int


class QuantisedTensor(Protocol):
    """A tensor that a file has in codes."""

    @property
    def kind(self) -> str:
        """How: a kind that flashllm/convert/kept knows, or does not; or an encoding, whose vectors `raw` gives."""

    @property
    def scale(self) -> float:
        """A factor of all weights: NVFP4 has one for a tensor, other kinds have 1."""

    @property
    def transposed(self) -> bool:
        """True where the file has the tensor's columns as rows."""

    def place(self) -> Lying | None:
        """The place of the whole tensor; None where its rows do not lie one after the other."""

    def raw(self, first: int, count: int) -> NDArray[np.uint8]:
        """The stored bytes of those rows of the tensor, or columns of a transposed one, [count, bytes]."""


class OwnPredictors(Protocol):
    """Predictors that a checkpoint brings, as the model directory's file of them."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""

    def header(self, model_sha256: str) -> bytes:
        """The file's header, for the `ffn.safetensors` of this hash; its length does not depend on it."""

    def arrays(self) -> Iterator[NDArray[np.uint8]]:
        """The tensors' bytes, in the order of the header."""


class WeightFile(TensorFile, Protocol):
    """An open file whose tensors are known."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The tensors in it, by name."""


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A `WeightFile` in which tensors lie as they are."""

    fd: int
    path: Path
    tensors: Mapping[str, TensorInfo]

    def read_into(self, info: TensorInfo, start: int, buffer: memoryview) -> None:
        at = info.position(start, len(buffer))
        pread_into(self.fd, buffer, at, self.path)
        drop_page_cache(self.fd, at, len(buffer))

    def extent(self, info: TensorInfo) -> int | None:
        return info.offset


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """An open checkpoint: its config.json, where each tensor is, and the files that go with the weights."""

    path: Path  # the folder, or the one file
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]  # by the name the checkpoint has, or the architecture's state_dict name
    companions: Sequence[Path] = ()  # files to copy
    made: Mapping[str, bytes] = field(default_factory=dict)  # files to write, by name
    preferred_dtype: str | None = None  # of a conversion, where the source has none of its own; None: the tensors'
    quantised: Mapping[str, QuantisedTensor] = field(default_factory=dict)  # by tensor name
    predictors: OwnPredictors | None = None
    assumed: str | None = None  # what the source leaves open and its config settles, as a line for the user
    _files: Mapping[str, TensorFile]  # by tensor name

    def changed(
        self,
        tensors: Mapping[str, TensorInfo],
        files: Mapping[str, TensorFile],
        config: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> "Checkpoint":
        """The same with other tensors, and another config.json where one is given."""
        same = self if config is None else self.configured(config)
        return replace(same, tensors=tensors, _files=files, **others)

    def configured(self, config: Mapping[str, Any]) -> "Checkpoint":
        """The same with another config.json."""
        companions = tuple(path for path in self.companions if path.name != CONFIG)
        made = {**self.made, CONFIG: json.dumps(config, indent=2).encode()}
        return replace(self, config=config, companions=companions, made=made)

    def read(self, name: str, start: int, out: NDArray[Any]) -> None:
        """Fill contiguous `out` with the bytes of tensor `name` from its byte `start`, whatever its item type."""
        self._files[name].read_into(self.tensors[name], start, out.reshape(-1).view(np.uint8).data)

    def floats(self, name: str, first: int, count: int) -> NDArray[np.float32]:
        """Rows of a tensor in fp32, whatever its dtype of weights."""
        info = self.tensors[name]
        dtype = WEIGHT_DTYPE_BY_CODE[info.dtype]
        values = np.empty((count, *info.shape[1:]), dtype.storage)
        self.read(name, first * values[:1].nbytes, values)
        return cast(values, dtype, WEIGHT_DTYPES["float32"])

    def extent(self, name: str) -> tuple[Path, int] | None:
        """(file, offset) of the tensor's bytes; None where they lie nowhere as they are."""
        file = self._files[name]
        offset = file.extent(self.tensors[name])
        return None if offset is None else (file.path, offset)

    @property
    def embedding_dtype(self) -> str | None:
        """The name of the embedding's dtype; None where that is none of weights."""
        codes = (info.dtype for name, info in self.tensors.items() if name.endswith("embed_tokens.weight"))
        found = WEIGHT_DTYPE_BY_CODE.get(next(codes, ""))
        return None if found is None else found.name

    def where(self, name: str) -> str:
        """The tensor and its file, for messages."""
        return f"{self._files[name].path}: tensor {name}"

    def identity(self) -> list[list[object]]:
        """Its path; name, size and modification time of every weight file and of the config."""
        paths = {file.path for file in self._files.values()}
        if self.path.is_dir():
            paths.add(self.path / CONFIG)
        files = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in sorted(paths)]
        return [[str(self.path.resolve())], *files]


def companion_files(directory: Path) -> list[Path]:
    """The files that go with the weights (config, tokenizer, chat template), sorted by name; never weights.

    Links are followed inside the folder and into the hub's cache, which consists of them. FormatError for others: what
    they point to would be copied unseen. FlashIOError where a file cannot be looked at.
    """
    directory, paths = Path(directory), []
    for path in sorted(directory.iterdir()):
        if path.name.startswith(".") or path.name.endswith(_INDEX_SUFFIX) or path.suffix not in COPIED_SUFFIXES:
            continue
        try:
            path.stat()
        except OSError as error:
            raise FlashIOError(f"{path}: cannot be read: {error.strerror}") from error
        if path.is_file():
            if path.is_symlink():
                _check_link(path)
            paths.append(path)
    return paths


def _check_link(path: Path) -> None:
    """FormatError where the link `path` leaves its folder, but for models--NAME/blobs beside models--NAME/snapshots."""
    folder, target = path.parent.resolve(), path.resolve()
    blobs = folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else folder
    if not (target.is_relative_to(folder) or target.is_relative_to(blobs)):
        raise FormatError(
            f"{path}: is a link that leaves the folder, to {target}, whose contents would be copied into the model "
            "directory; put the file itself there"
        )


def check_start(fd: int, nbytes: int, magic: bytes, what: str, path: Path) -> None:
    """That the file `path` of `nbytes`, open as `fd`, begins with `magic`. FormatError says what it is instead.

    `what` names the kind of file, with its article.
    """
    if nbytes == 0:
        raise FormatError(f"{path}: is empty; get the file again")
    start = read_start(fd, nbytes, path)
    if not start.startswith(magic):
        raise FormatError(f"{path}: is not {what}: it begins with {start[:8]!r}")
