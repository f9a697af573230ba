"""PyTorch's pickled weights (`pytorch_model.bin`): which tensor lies where in the file, then plain reads.

Such a file is a zip archive: a pickle, which says what the tensors are, and each tensor's bytes, stored as they are.
torch reads the pickle with `weights_only`, so that no code in it runs, and none of the bytes. It does so in a process
of its own: neither its memory nor torch's stays with the caller.
"""

import errno
import importlib
import os
import re
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from flashllm.base.files import file_status, open_for_reading, pread_bytes
from flashllm.convert.checkpoint.child import ChildFailed, ask_child
from flashllm.convert.checkpoint.source import OpenFile, check_start
from flashllm.errors import FlashIOError, FormatError, UnsupportedModelError, needing
from flashllm.format.safetensors import ITEMSIZES, TensorInfo

_ZIP = b"PK\x03\x04"
_PICKLE = b"\x80"  # what torch wrote before 1.6 begins with
_RESAVE = "load the model with transformers and save it with save_pretrained(), which writes safetensors"
_LOCAL_HEADER_NBYTES = 30  # of an archive's record, before its name and its extra field


def open_pickled(paths: Sequence[Path], stack: ExitStack) -> list[OpenFile]:
    """The files `paths`, closed by `stack`.

    FormatError for one that is empty, truncated, damaged or a git-LFS pointer; UnsupportedModelError for one that holds
    code or other objects, is of before torch 1.6, or has tensors that are not stored row by row.
    """
    fds = []
    for path in paths:
        fd = open_for_reading(path)
        stack.callback(os.close, fd)
        _check(fd, path)
        fds.append(fd)
    try:
        described = ask_child(describe, *(str(path) for path in paths))
    except ChildFailed as error:
        raise FormatError(f"{paths[0]}: torch cannot read it: {error}; get the file again") from error
    return [
        OpenFile(fd, path, _checked(found, file_status(fd, path).st_size, path))
        for fd, path, found in zip(fds, paths, described, strict=True)
    ]


def _check(fd: int, path: Path) -> None:
    """Check what can be told of the file without torch."""
    nbytes = file_status(fd, path).st_size
    if nbytes and pread_bytes(fd, 1, 0, path) == _PICKLE:
        raise UnsupportedModelError(
            f"{path}: is a pickle of before torch 1.6, whose tensors cannot be read one by one; {_RESAVE}"
        )
    check_start(fd, nbytes, _ZIP, "a file that torch.save wrote", path)
    try:
        with zipfile.ZipFile(path) as archive:
            packed = [record.filename for record in archive.infolist() if record.compress_type != zipfile.ZIP_STORED]
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise FormatError(f"{path}: truncated or damaged ({error}); get the file again") from error
    except OSError as error:
        if error.errno != errno.EINVAL:  # that is what zipfile makes of records before the file's beginning
            raise FlashIOError(f"{path}: cannot be read: {error.strerror}") from error
        raise FormatError(f"{path}: truncated or damaged; get the file again") from error
    if packed:
        raise UnsupportedModelError(f"{path}: {packed[0]} in it is compressed, which torch never does; {_RESAVE}")


def _checked(found: Mapping[str, Any], file_nbytes: int, path: Path) -> Mapping[str, TensorInfo]:
    """The tensors the child found, once their ranges are inside the file."""
    tensors = {}
    for name, (code, shape, offset, nbytes) in found.items():
        if offset < 0 or offset + nbytes > file_nbytes:
            raise FormatError(f"{path}: tensor {name}: lies outside the file; get the file again")
        tensors[name] = TensorInfo(name=name, dtype=code, shape=tuple(shape), offset=offset, nbytes=nbytes)
    return tensors


def describe(*paths: str) -> list[dict[str, Any]]:
    """Tables of the files, tensor -> (safetensors' dtype code, shape, offset in the file, bytes). Runs in a child.
    MissingPackage where torch is not installed; UnsupportedModelError and FormatError as `open_pickled`."""
    with needing(f"{paths[0]}: a file of pickled weights"):
        importlib.import_module("torch")
    return [_describe(path) for path in paths]


def _describe(path: str) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    """Tensor -> (safetensors' dtype code, shape, offset in the file, bytes) of a file."""
    import pickle

    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    codes = {
        torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64", torch.bool: "BOOL",
        torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64",
    }  # fmt: skip
    records = _record_offsets(path)
    try:
        with FakeTensorMode():  # tensors without their bytes, which know where those are
            state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)|module (\S+) is blocked", str(error))
        what = f" ({named[1] or named[2]})" if named else ""
        raise UnsupportedModelError(
            f"{path}: holds Python objects{what} besides tensors, which could run code when opened; if you trust its "
            f"maker, {_RESAVE}"
        ) from error
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise FormatError(f"{path}: damaged: {reason}; get the file again") from error
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise UnsupportedModelError(f"{path}: holds a {type(state).__name__} instead of named tensors; {_RESAVE}")
    found = {}
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            raise UnsupportedModelError(f"{path}: {name} is a {type(tensor).__name__} and no tensor; {_RESAVE}")
        if tensor.layout is not torch.strided or not tensor.is_contiguous():
            raise UnsupportedModelError(f"{path}: tensor {name}: is not stored row by row; {_RESAVE}")
        if tensor.dtype not in codes:
            raise UnsupportedModelError(f"{path}: tensor {name}: has dtype {tensor.dtype}; {_RESAVE}")
        code, storage = codes[tensor.dtype], tensor.untyped_storage()
        offset = getattr(storage, "_checkpoint_offset", None)  # documented with FakeTensorMode
        if offset is None:
            raise UnsupportedModelError(
                f"{path}: torch {torch.__version__} does not say where tensors lie; install torch 2.7 or newer"
            )
        if records.get(offset) != storage.nbytes():
            raise FormatError(f"{path}: tensor {name}: its record is not where torch expects it; get the file again")
        first = tensor.storage_offset() * ITEMSIZES[code]
        found[name] = (code, tuple(tensor.shape), offset + first, tensor.numel() * ITEMSIZES[code])
    return found


def _record_offsets(path: str) -> dict[int, int]:
    """Offset in the file of each record's bytes -> how many they are."""
    result = {}
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        for record in archive.infolist():
            file.seek(record.header_offset)
            header = file.read(_LOCAL_HEADER_NBYTES)
            lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
            result[record.header_offset + _LOCAL_HEADER_NBYTES + lengths] = record.file_size
    return result
