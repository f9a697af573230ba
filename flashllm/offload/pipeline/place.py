"""Which of a pipeline's processes this one is: torchrun says it in the environment, and nothing else does.

RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are torchrun's protocol between itself and
the processes it starts. They are read here and by torch's own rendezvous; no other setting of flashllm comes from the
environment.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from flashllm.errors import UsageError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Process number `rank` of `world`, of which `local` are on this machine."""

    rank: int
    world: int
    local: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world or not 1 <= self.local <= self.world:
            raise UsageError(f"process {self.rank} of {self.world}, {self.local} of them here, cannot be")

    @classmethod
    def from_torchrun(cls, environment: Mapping[str, str] = os.environ) -> Self | None:
        """The place that torchrun says; None where the process was not started by it, or is the only one."""
        if environment.get("WORLD_SIZE", "1") == "1":
            return None
        try:
            rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
            local = int(environment.get("LOCAL_WORLD_SIZE", world))
        except (KeyError, ValueError) as error:
            raise UsageError(f"WORLD_SIZE is set, but RANK is not as torchrun sets it ({error})") from None
        return cls(rank=rank, world=world, local=local)

    @property
    def is_last(self) -> bool:
        """True in the process that reads the job, chooses tokens and writes answers."""
        return self.rank == self.world - 1

    @property
    def next(self) -> int:
        return (self.rank + 1) % self.world

    @property
    def previous(self) -> int:
        return (self.rank - 1) % self.world
