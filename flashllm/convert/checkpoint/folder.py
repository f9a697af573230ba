"""A Hugging Face folder as a checkpoint: safetensors or PyTorch's pickled weights, in one file or in indexed shards.

Opens and validates everything first; then reads ranges with `pread`. Where a folder has both, safetensors are read.
Writes nothing, and does not know what the tensors mean.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from flashllm.base.checks import check_file_name
from flashllm.base.files import read_json_object
from flashllm.convert.checkpoint.pickled import open_pickled
from flashllm.convert.checkpoint.source import ADAPTER, ADAPTER_HINT, Checkpoint, OpenFile, companion_files
from flashllm.errors import FormatError, UsageError
from flashllm.format.manifest import MANIFEST
from flashllm.format.model_files import CONFIG
from flashllm.format.safetensors import open_safetensors

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED_SINGLE = "pytorch_model.bin"
PICKLED_INDEX = "pytorch_model.bin.index.json"
_OTHERS = ("*.[gG][gG][uU][fF]", "*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack")

OpenFiles = Callable[[Sequence[Path], ExitStack], list[OpenFile]]


@contextmanager
def open_folder(directory: Path) -> Iterator[Checkpoint]:
    """The checkpoint in the folder `directory`, every header validated.

    UsageError for what is no checkpoint folder, FormatError for a shard that is missing, truncated, a git-LFS pointer
    or malformed, UnsupportedModelError for pickled files that hold more than tensors or are of before torch 1.6,
    FlashIOError for a failed read.
    """
    if (directory / MANIFEST).exists():
        raise UsageError(f"{directory}: is a flashllm directory already; use it as it is")
    if not (directory / CONFIG).exists():
        raise UsageError(
            f"{directory}: has no {CONFIG}, so it is not a Hugging Face model folder{what_lies_there(directory)}"
        )
    config = read_json_object(directory / CONFIG)
    with ExitStack() as stack:
        for single, index, open_files in (
            (SINGLE, INDEX, _open_safetensors),
            (PICKLED_SINGLE, PICKLED_INDEX, open_pickled),
        ):
            if os.path.lexists(directory / single):
                (file,) = open_files([directory / single], stack)
                files = dict.fromkeys(file.tensors, file)
                break
            if os.path.lexists(directory / index):
                files = _open_shards(directory, index, open_files, stack)
                break
        else:
            raise UsageError(
                f"{directory}: holds no weights ({SINGLE}, {PICKLED_SINGLE}, or an index of shards)"
                f"{what_lies_there(directory)}"
            )
        yield Checkpoint(
            path=directory,
            config=config,
            tensors={name: file.tensors[name] for name, file in files.items()},
            companions=tuple(companion_files(directory)),
            _files=files,
        )


def what_lies_there(directory: Path) -> str:
    """Say what else lies there, and what to do with it: the rest of a message."""
    if (directory / ADAPTER).exists():
        return ADAPTER_HINT
    others = sorted(path.name for pattern in _OTHERS for path in directory.glob(pattern))
    if not others:
        return ""
    if others[0].lower().endswith(".gguf"):
        return f"; for the GGUF file in it, name the file: {directory / others[0]}"
    return f"; {others[0]} has another name or kind: load it with transformers and save it with save_pretrained()"


def _open_safetensors(paths: Sequence[Path], stack: ExitStack) -> list[OpenFile]:
    files = [stack.enter_context(open_safetensors(path)) for path in paths]
    return [OpenFile(file.fd, file.header.path, file.header.tensors) for file in files]


def _open_shards(directory: Path, index: str, open_files: OpenFiles, stack: ExitStack) -> dict[str, OpenFile]:
    """Tensor -> its file. The index decides; tensors it does not list count too, as they do for transformers."""
    weight_map = _read_index(directory / index)
    names = sorted(set(weight_map.values()))
    for name in names:
        if not (directory / name).exists():
            raise FormatError(f"{directory / name}: this shard is missing though {index} lists it; download it again")
    shards = dict(zip(names, open_files([directory / name for name in names], stack), strict=True))
    for name, shard in weight_map.items():
        if name not in shards[shard].tensors:
            raise FormatError(f"{directory / shard}: tensor {name} is missing though {index} puts it here")
    owners = dict(weight_map)
    for shard, file in shards.items():
        for name in file.tensors:
            if owners.setdefault(name, shard) != shard and name not in weight_map:
                raise FormatError(
                    f"{directory / shard}: tensor {name} is also in {owners[name]}, and {index} lists neither"
                )
    return {name: shards[shard] for name, shard in owners.items()}


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
