"""Opens whatever a checkpoint is: a Hugging Face folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flashllm.convert.checkpoint.folder import open_folder
from flashllm.convert.checkpoint.source import Checkpoint
from flashllm.errors import UsageError


@contextmanager
def open_checkpoint(path: Path) -> Iterator[Checkpoint]:
    """The checkpoint that `path` is, validated; errors as in `open_folder`. UsageError where it is nothing known."""
    path = Path(path)
    if not path.is_dir():
        raise UsageError(f"{path}: there is no such directory")
    with open_folder(path) as checkpoint:
        yield checkpoint
