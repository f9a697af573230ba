"""Matrices of many experts that a checkpoint keeps stacked in one tensor, as a tensor each.

transformers before version 5 wrote a tensor for each expert, later ones write them so or stacked, with gate and up one
behind the other. A stack is [experts, rows, columns], or [rows, columns] of one; what is read of it are the bytes of
the rows asked for. One of [experts, columns, rows] (Qwen3-VL's) is told by its shape, as transformers does; of it an
expert is read whole and held until the next. Knows no model_type: the architecture says what is stacked
(`ArchitectureSpec.stacked`).
"""

import dataclasses
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashllm.arch.registry import block_spec, source_shapes, spec_of
from flashllm.convert.checkpoint.source import Checkpoint, MadeTensor, TensorFile
from flashllm.errors import FormatError
from flashllm.format.safetensors import TensorInfo


@dataclass(frozen=True, slots=True)
class _Slices:
    """The parts of a stacked tensor: tensors whose offset is one into the stack."""

    file: TensorFile
    stack: TensorInfo

    @property
    def path(self) -> Path:
        return self.file.path

    def read_into(self, info: TensorInfo, start: int, buffer: memoryview) -> None:
        self.file.read_into(self.stack, info.offset + start, buffer)

    def extent(self, info: TensorInfo) -> int | None:
        start = self.file.extent(self.stack)
        return None if start is None else start + info.offset


def unstacked(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with a tensor for each expert in the place of every stack, and with its old names of tensors that
    have new ones (`ArchitectureSpec.renamed`).

    UnsupportedModelError for an unknown model_type, FormatError for a stack that cannot be one.
    """
    spec = spec_of(checkpoint.config)
    if not (spec.stacked or spec.renamed):
        return checkpoint
    tensors, files = dict(checkpoint.tensors), dict(checkpoint._files)
    layers = range(len(block_spec(checkpoint.config).layers))
    expected: dict[str, tuple[int, ...]] = {}
    prefixes = ("", spec.base_prefix) if spec.base_prefix else ("",)

    def taken(pattern: str, layer: int) -> tuple[str, TensorInfo, TensorFile] | None:
        """The tensor of this name, with or without the base model's prefix: the checkpoint has it no more."""
        full = pattern.format(i=layer)
        for prefix in prefixes:
            name = full.removeprefix(prefix)
            if name in tensors:
                return name, tensors.pop(name), files.pop(name)
        return None

    @lru_cache(maxsize=2)  # of an expert's two stacks
    def turned(name: str, expert: int) -> NDArray[Any]:
        """An expert of a stack that has columns first, rows first."""
        info = checkpoint.tensors[name]
        read = np.empty(info.shape[1:], f"u{info.itemsize}")
        checkpoint.read(name, expert * read.nbytes, read)
        return np.ascontiguousarray(read.T)

    def part_of(name: str, expert: int, top: int, first: int, count: int) -> NDArray[Any]:
        return turned(name, expert)[top + first :][:count]

    for layer in layers:
        for new, old in spec.renamed.items():
            if (found := taken(new, layer)) is not None:
                tensors[old.format(i=layer)], files[old.format(i=layer)] = found[1], found[2]
        for stack, parts in spec.stacked.items():
            if (found := taken(stack, layer)) is None:
                continue
            name, info, file = found
            expected = expected or source_shapes(checkpoint.config)
            whole = (1, *info.shape) if "{e}" not in parts[0] else info.shape
            rows, columns = expected.get(parts[0].format(i=layer, e=0), (0, 0))
            is_turned = info.shape[1:] == (columns, rows * len(parts)) != (rows * len(parts), columns)
            if is_turned:
                whole = (info.shape[0], rows * len(parts), columns)
            if len(whole) != 3 or whole[1] % len(parts):
                raise FormatError(
                    f"{file.path}: tensor {name}: {list(info.shape)} are no experts of {len(parts)} matrices each"
                )
            experts, slices = whole[0], _Slices(file, info)
            nbytes, shape = info.nbytes // (experts * len(parts)), (whole[1] // len(parts), whole[2])
            for expert in range(experts):
                for part, pattern in enumerate(parts):
                    own = pattern.format(i=layer, e=expert)
                    offset = (expert * len(parts) + part) * nbytes
                    tensors[own] = dataclasses.replace(info, name=own, shape=shape, offset=offset, nbytes=nbytes)
                    make = partial(part_of, name, expert, part * rows)
                    files[own] = MadeTensor(file, make) if is_turned else slices
    return checkpoint.changed(tensors, files)
