"""How the runtime executes a policy, as a frozen value."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Settings of a run that the policy itself does not say."""

    threads: int | None = None  # of the products; None: one a core
    weight_bits: int = 4  # where the policy compresses weights
    cache_bits: int = 4  # where it compresses the cache
    accelerator: str | None = None  # torch's name of the device; None: the CPU, by the native core
    accelerator_memory: int | None = None  # bytes of it; None: what is free
