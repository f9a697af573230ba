"""The part of a model that generation needs: `flashllm.engine.model.Model`, or whatever else has these methods."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from flashllm.engine.meter import StepTimes


class ModelSequence(Protocol):
    """One conversation's place in a model: how many tokens its KV cache holds."""

    @property
    def length(self) -> int: ...
    @property
    def prompted(self) -> int: ...
    @property
    def nbytes_alone(self) -> int: ...
    def mark(self, positions: Sequence[int]) -> None: ...
    def can_keep(self, length: int) -> int: ...
    def keep(self, length: int) -> int: ...
    def copy_from(self, other: Any) -> None: ...
    def save(self) -> list[list[NDArray[np.uint8]]]: ...
    def restore(
        self,
        length: int,
        pages: Sequence[int],
        fill: Callable[[list[list[NDArray[np.uint8]]]], None],
        *,
        prompted: int = 0,
    ) -> None: ...
    def close(self) -> None: ...


class StepMeter(Protocol):
    """Counts what a model does between two calls."""

    def restart(self) -> None: ...
    def take(self) -> StepTimes: ...


class LanguageModel(Protocol):
    """A model and its one call. `step` with drafted tokens and `accept` are for speculation alone."""

    @property
    def context(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def most_drafted(self) -> int: ...
    @property
    def meter(self) -> StepMeter: ...
    def is_prompt(self, tokens: int) -> bool: ...
    def new_sequence(self) -> ModelSequence: ...
    def step(
        self,
        entries: Sequence[tuple[Any, Sequence[int]]],
        *,
        all_logits: bool = False,
        as_prompt: bool = False,
        drafted: int = 0,
    ) -> NDArray[np.float32]:
        """Logits [tokens wanted, vocab]: as `Model.step`. A step that fails changes no sequence."""

    def accept(self, sequence: Any, count: int) -> None: ...
