"""How the runtime executes a policy, and what the planner may use for one, as a frozen value."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """A run's limits and settings on this machine. What the policy says, it says for the planner alone."""

    scratch: Path  # folder of scratch files, which says the drive
    memory: int | None = None  # bytes for weights, cache and working memory beside an accelerator; None: no limit
    disk: int = 0  # bytes that scratch files may take
    accelerator: str | None = None  # torch's name of the device tier; None: the CPU, by the native core
    gpu_memory: int | None = None  # bytes of an accelerator that is the device tier; None: all
    threads: int | None = None  # of the products; None: one a core
    weight_bits: int = 4  # where the policy compresses weights
    cache_bits: int = 4  # where it compresses the cache
    # For a policy that is to be planned.
    methods: Mapping[str, Any] = field(default_factory=dict)  # fields of a `Method`, which change answers
    overlap: bool | None = None  # None: as is faster; it takes a second layer's memory

    @property
    def bits(self) -> dict[str, int]:
        """The widths of compressed weights and cache, by the names of `predict`'s arguments."""
        return {"weight_bits": self.weight_bits, "cache_bits": self.cache_bits}
