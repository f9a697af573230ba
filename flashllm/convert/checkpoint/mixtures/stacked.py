"""Matrices of many experts that a checkpoint keeps stacked in one tensor, as a tensor each.

transformers before version 5 wrote a tensor for each expert, later ones write them so or stacked, with gate and up one
behind the other. A stack is [experts, rows, columns], or [rows, columns] of one; what is read of it are the bytes of
the rows asked for. Knows no model_type: the architecture says what is stacked (`ArchitectureSpec.stacked`).
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from flashllm.arch.registry import block_spec, spec_of
from flashllm.convert.checkpoint.source import Checkpoint, TensorFile
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
    prefixes = ("", spec.base_prefix) if spec.base_prefix else ("",)

    def taken(pattern: str, layer: int) -> tuple[str, TensorInfo, TensorFile] | None:
        """The tensor of this name, with or without the base model's prefix: the checkpoint has it no more."""
        full = pattern.format(i=layer)
        for prefix in prefixes:
            name = full.removeprefix(prefix)
            if name in tensors:
                return name, tensors.pop(name), files.pop(name)
        return None

    for layer in layers:
        for new, old in spec.renamed.items():
            if (found := taken(new, layer)) is not None:
                tensors[old.format(i=layer)], files[old.format(i=layer)] = found[1], found[2]
        for stack, parts in spec.stacked.items():
            if (found := taken(stack, layer)) is None:
                continue
            name, info, file = found
            shape = (1, *info.shape) if "{e}" not in parts[0] else info.shape
            if len(shape) != 3 or shape[1] % len(parts):
                raise FormatError(
                    f"{file.path}: tensor {name}: {list(info.shape)} are no experts of {len(parts)} matrices each"
                )
            experts, rows, columns = shape
            nbytes, shape = info.nbytes // (experts * len(parts)), (rows // len(parts), columns)
            for expert in range(experts):
                for part, pattern in enumerate(parts):
                    own = pattern.format(i=layer, e=expert)
                    offset = (expert * len(parts) + part) * nbytes
                    tensors[own] = dataclasses.replace(info, name=own, shape=shape, offset=offset, nbytes=nbytes)
                    files[own] = _Slices(file, info)
    return checkpoint.changed(tensors, files)
