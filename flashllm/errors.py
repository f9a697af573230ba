"""Every error a user can meet. The command line prints one line of it and exits with `exit_status`.

A message says what happened, where (file, layer, neuron, offset), and what to do about it.
"""


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


class ChecksumError(FormatError):
    """Bytes read from flash (a row, or a whole file) do not have the checksum recorded at conversion."""


class NonFiniteError(FlashError):
    """The model computed a number that is not finite; the message says in which layer."""


class BudgetError(FlashError):
    """The memory limit cannot hold what the run needs; the message says by how much and what to change."""


class ContextFull(FlashError):
    """The KV cache has no room for the tokens asked for: the context's limit, or the memory's."""


class UnsupportedModelError(FlashError):
    """The architecture, or a feature of it, is not known to `flashllm.arch`."""


class Cancelled(FlashError):
    """Another thread ended a computation (`flashllm.engine.model.Model.cancel`)."""


class PeerLost(FlashError):
    """Another process of a pipeline failed, ended, or cannot be reached any more."""
