"""A Hugging Face checkpoint folder as a source of tensors: one safetensors file, or shards with an index.

Opens and validates everything first; then reads ranges of elements with `pread`, leaving nothing in the page cache.
Writes nothing, and does not know what the tensors mean.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashllm.base.checks import check_file_name
from flashllm.base.files import drop_page_cache, read_json_object
from flashllm.errors import FlashIOError, FormatError, UnsupportedModelError, UsageError
from flashllm.format.manifest import MANIFEST
from flashllm.format.model_files import CONFIG
from flashllm.format.safetensors import SafetensorsFile, TensorInfo, open_safetensors

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_COPIED_SUFFIXES = (".json", ".txt", ".model", ".jinja")  # config, generation config, tokenizer, chat template
_INDEX_SUFFIX = ".index.json"  # of weights that are not copied
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """An open checkpoint: its folder, its config.json, and where each tensor is."""

    directory: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    _files: Mapping[str, SafetensorsFile]  # by tensor name

    def read(self, name: str, start: int, out: NDArray[Any]) -> None:
        """Fill contiguous `out` with the bytes of tensor `name` from its byte `start`, whatever its item type."""
        file, info = self._files[name], self.tensors[name]
        buffer = out.reshape(-1).view(np.uint8).data
        file.read_into(info, start, buffer)
        drop_page_cache(file.fd, info.offset + start, len(buffer))

    def path_of(self, name: str) -> Path:
        """The file that holds the tensor."""
        return self._files[name].header.path

    def where(self, name: str) -> str:
        """The tensor and its file, for messages."""
        return f"{self.path_of(name)}: tensor {name}"

    def fingerprint(self) -> list[list[object]]:
        """Name, size and modification time of every weight file and of the config: changes when the source does."""
        paths = {file.header.path for file in self._files.values()} | {self.directory / CONFIG}
        return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in sorted(paths)]


@contextmanager
def open_checkpoint(directory: Path) -> Iterator[Checkpoint]:
    """The checkpoint in the folder `directory`, every header validated.

    UsageError for what is not a checkpoint folder, UnsupportedModelError for pickled weights, FormatError for a shard
    that is missing, truncated, a git-LFS pointer or malformed, FlashIOError for a failed read.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise UsageError(f"{directory}: there is no such directory")
    if (directory / MANIFEST).exists():
        raise UsageError(f"{directory}: is a flashllm directory already; use it as it is")
    if not (directory / CONFIG).exists():
        raise UsageError(f"{directory}: has no {CONFIG}, so it is not a Hugging Face model folder")
    config = read_json_object(directory / CONFIG)
    with ExitStack() as stack:
        if os.path.lexists(directory / SINGLE):
            shards = {SINGLE: stack.enter_context(open_safetensors(directory / SINGLE))}
            owners = dict.fromkeys(shards[SINGLE].header.tensors, SINGLE)
        elif os.path.lexists(directory / INDEX):
            weight_map = _read_index(directory / INDEX)
            shards = {
                name: stack.enter_context(_open_shard(directory, name)) for name in sorted(set(weight_map.values()))
            }
            owners = _owners(directory, weight_map, shards)
        else:
            raise _no_weights(directory)
        files = {name: shards[shard] for name, shard in owners.items()}
        tensors = {name: file.header.tensors[name] for name, file in files.items()}
        yield Checkpoint(
            directory=directory,
            config=MappingProxyType(config),
            tensors=MappingProxyType(tensors),
            _files=MappingProxyType(files),
        )


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(f"{path}: has no weight_map")
    for shard in weight_map.values():
        try:
            check_file_name(shard)
        except ValueError as error:
            raise FormatError(f"{path}: weight_map: {error}") from error
    return weight_map


@contextmanager
def _open_shard(directory: Path, name: str) -> Iterator[SafetensorsFile]:
    if not (directory / name).exists():
        raise FormatError(f"{directory / name}: this shard is missing though {INDEX} lists it; download it again")
    with open_safetensors(directory / name) as file:
        yield file


def _owners(directory: Path, weight_map: Mapping[str, str], shards: Mapping[str, SafetensorsFile]) -> dict[str, str]:
    """Tensor -> shard. The index decides; tensors it does not list count too, as they do for transformers."""
    for name, shard in weight_map.items():
        if name not in shards[shard].header.tensors:
            raise FormatError(f"{directory / shard}: tensor {name} is missing though {INDEX} puts it here")
    owners = dict(weight_map)
    for shard, file in shards.items():
        for name in file.header.tensors:
            if owners.setdefault(name, shard) != shard and name not in weight_map:
                raise FormatError(
                    f"{directory / shard}: tensor {name} is also in {owners[name]}, and {INDEX} lists neither"
                )
    return owners


def _no_weights(directory: Path) -> Exception:
    pickled = sorted(path.name for pattern in _PICKLED for path in directory.glob(pattern))
    if pickled:
        return UnsupportedModelError(
            f"{directory}: holds pickled weights only ({pickled[0]}), which can run code when opened; load them with "
            "transformers and save them with save_pretrained(), which writes safetensors"
        )
    return UsageError(f"{directory}: holds no weights ({SINGLE} or {INDEX})")


def companion_files(directory: Path) -> list[Path]:
    """The files that go with the weights (config, tokenizer, chat template), sorted by name; never weights.

    Links are followed, as the hub's cache consists of them. FlashIOError where one cannot be looked at.
    """
    paths = []
    for path in sorted(Path(directory).iterdir()):
        if path.name.startswith(".") or path.name.endswith(_INDEX_SUFFIX) or path.suffix not in _COPIED_SUFFIXES:
            continue
        try:
            path.stat()
        except OSError as error:
            raise FlashIOError(f"{path}: cannot be read: {error.strerror}") from error
        if path.is_file():
            paths.append(path)
    return paths
