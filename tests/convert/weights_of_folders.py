"""Checkpoints as these tests change, open and compare them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from flashllm.convert.checkpoint.opened import open_checkpoint
from flashllm.format.manifest import Manifest
from flashllm.format.model_files import FFN, RESIDENT

WEIGHTS = "model.safetensors"


@contextmanager
def tensors_of(folder: Path) -> Iterator[dict[str, torch.Tensor]]:
    """The folder's tensors by name; how they were changed is written at the end."""
    tensors = load_file(folder / WEIGHTS)
    yield tensors
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def try_to_open(path: Path) -> None:
    """Raises what is wrong with the checkpoint."""
    with open_checkpoint(path):
        pass


def digests(manifest: Manifest) -> list[object]:
    """The sizes and hashes of both files of weights."""
    return [manifest.files[FFN], manifest.files[RESIDENT]]
