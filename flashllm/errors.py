"""Every error a user can meet. The command line prints one line of it and exits with `exit_status`.

A message says what happened, where (file, layer, neuron, offset), and what to do about it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130  # exit status: 128 + SIGINT, as shells report it
EXTRA_OF = {  # package -> the extra that brings it
    **dict.fromkeys(("torch", "transformers", "safetensors"), "hf"),
    **dict.fromkeys(("starlette", "uvicorn", "prometheus_client"), "serve"),
    "datasets": "train",
    "matplotlib": "bench",
    "scipy": "offload",
}


class FlashError(Exception):
    """Base of all errors of this package."""

    exit_status = 1
    offset: int | None = None  # byte in the file where a read went wrong, where the native core knows it


class UsageError(FlashError):
    """The arguments cannot mean anything useful: a bad size, an unknown mode, a missing model."""

    exit_status = 2


class FormatError(FlashError):
    """A file is damaged, truncated, foreign, or made by another version."""


class FlashIOError(FlashError):
    """The operating system failed a read or a write."""


class Busy(FlashIOError):
    """Another process is at work on the same directory, and may be done soon."""


class ChecksumError(FormatError):
    """Bytes read from flash (a row, or a whole file) do not have the checksum recorded at conversion."""


class MissingPackage(FlashError, ImportError):
    """A package of an extra is not installed; the message names the extra."""

    exit_status = 2


class NonFiniteError(FlashError):
    """The model computed a number that is not finite; the message says in which layer."""


class BudgetError(FlashError):
    """The memory limit cannot hold what the run needs; the message says by how much and what to change."""


class ContextFull(FlashError):
    """The KV cache has no room for the tokens asked for: the context's limit, or the memory's."""


class FormError(FlashError):
    """An answer cannot go on in the form that was asked for."""


class UnsupportedModelError(FlashError):
    """The architecture, or a feature of it, is not known to `flashllm.arch`."""


class Cancelled(FlashError):
    """Another thread ended a computation (`flashllm.engine.model.Model.cancel`)."""


class PeerLost(FlashError):
    """Another process of a pipeline failed, ended, or cannot be reached any more."""


@contextmanager
def needing(what: str, extra: str | None = None) -> Iterator[None]:
    """Import for `what`: MissingPackage names the extra (or `extra`) where a package of one is not installed, and says
    what to do where Python found the source folder in the place of the installed package."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name == "flashllm._core":
            raise MissingPackage(
                f"{what} needs the compiled core, which this source folder lacks: run Python from another folder than "
                "the clone's, or install with pip install -e ."
            ) from error
        package = (error.name or "").partition(".")[0]
        if package not in EXTRA_OF:
            raise
        extra = extra or EXTRA_OF[package]
        raise MissingPackage(
            f"{what} needs {package}, which is not installed: pip install 'flashllm[{extra}]'"
        ) from error
