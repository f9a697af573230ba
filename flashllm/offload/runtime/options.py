"""How the runtime executes a policy, and what the planner may use for one, as a frozen value."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """A run's limits and settings on this machine. What the policy says, it says for the planner alone."""

    scratch: Path  # folder of scratch files, which says the drive
    memory: int | None = None  # bytes for weights, cache and working memory beside an accelerator; None: no limit
    disk: int = 0  # bytes that scratch files may take
    accelerator: str | None = None  # torch's name of the device tier; None: the CPU, by the native core
    gpu_memory: int | None = None  # bytes of the device tier: of an accelerator, or a part of `memory`; None: all
    threads: int | None = None  # of the products; None: one a core
    weight_bits: int = 4  # where the policy compresses weights
    cache_bits: int = 4  # where it compresses the cache
    # For a policy that is to be planned.
    compress_weights: bool = False
    compress_cache: bool = False
    attention_sparsity: float = 1.0
    overlap: bool | None = None  # None: as is faster; it takes a second layer's memory

    @property
    def bits(self) -> dict[str, int]:
        """The widths of compressed weights and cache, by the names of `predict`'s arguments."""
        return {"weight_bits": self.weight_bits, "cache_bits": self.cache_bits}
