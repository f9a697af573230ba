"""A smaller model of the same vocabulary drafts for a larger one (Leviathan et al. 2023; paper A, section 5.2).

Its drafts are its own likeliest tokens. It is in memory whole, and its bytes are part of the larger model's limit.
"""

import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from flashllm.base.machine import process_nbytes
from flashllm.base.units import format_size
from flashllm.config import SPECULATIONS, Mode, RunConfig
from flashllm.engine.model import Model
from flashllm.errors import UsageError
from flashllm.format.model_dir import ModelDir
from flashllm.format.model_files import PREDICTORS
from flashllm.generate.session import common_prefix
from flashllm.generate.tokenizer import Tokenizer

_PRIOR = 0.7  # that a drafted token is right, before any was judged
_PROMPT_TOKENS = 32  # from so many on, what the draft model has not seen is a prompt: no part of a draft's cost


class DraftModel:
    """Drafts by a loaded model. Holds the conversation of the last draft, and computes what is new of the next."""

    priors = (_PRIOR,)

    def __init__(self, model: Model) -> None:
        self._model = model
        self._sequence = model.new_sequence()
        self._held = array("q")
        self.prompt_s = 0.0

    def look(self, tokens: "array[int]", most: int) -> tuple[int, int]:
        """(kind, tokens) that could be drafted after `tokens`: all that the context has room for."""
        return 0, max(0, min(most, self._model.context - len(tokens)))

    def draft(self, tokens: "array[int]", count: int) -> list[int]:
        # 1. What the last draft has in common with the tokens stays; the rest, wrong guesses, is cut off.
        alike = common_prefix(self._held, tokens, min(len(self._held), len(tokens) - 1))
        shared = self._sequence.keep(alike)
        self._held = tokens[:shared]
        began = time.perf_counter()
        logits = self._model.step([(self._sequence, tokens[shared:])])[0]
        self.prompt_s = time.perf_counter() - began if len(tokens) - shared >= _PROMPT_TOKENS else 0.0
        self._held = tokens[:]
        # 2. Its own likeliest tokens, one after the other; the last is not computed.
        drafted = [int(logits.argmax())]
        while len(drafted) < count:
            logits = self._model.step([(self._sequence, drafted[-1:])])[0]
            self._held.append(drafted[-1])
            drafted.append(int(logits.argmax()))
        return drafted


@dataclass(frozen=True, slots=True)
class OpenedDraft:
    """A draft model, where the configuration names one."""

    drafter: DraftModel | None = None
    process_nbytes: int | None = None  # what the process holds with it, at most; None: there is none


@contextmanager
def opened_draft(path: Path, config: RunConfig) -> Iterator[OpenedDraft]:
    """The draft model that `config` names for the model directory `path`, closed at the end.

    Raises UsageError where the two do not go together or the draft model does not fit, and what `Model.open` raises.
    """
    if not isinstance(config.speculate, Path):
        yield OpenedDraft()
        return
    if Tokenizer.load(config.speculate).vocabulary() != Tokenizer.load(path).vocabulary():
        raise UsageError(
            f"{config.speculate} cannot draft for {path}: its vocabulary is another; take a smaller model of the same "
            "family, or --speculate lookup"
        )
    base = process_nbytes()
    directory = ModelDir.open(config.speculate)
    context = min(directory.block.context, ModelDir.open(path).block.context)
    context = min(context, config.context or context)
    sparse = directory.architecture.sparse and PREDICTORS in directory.manifest.files
    mode: Mode = "sparse" if sparse else "dense"
    own = replace(config, speculate=SPECULATIONS[0], mode=mode, context=context, window=None)
    with Model.open(config.speculate, own) as model:
        memory = model.plan.memory
        if any(
            held < width
            for held, width in zip(memory.full_cache_rows, model.manifest.architecture.every_width, strict=True)
        ):
            raise UsageError(
                f"the draft model {config.speculate} does not fit whole in {format_size(memory.limit_nbytes)}; take a "
                "smaller one, give --memory more, or --speculate lookup"
            )
        yield OpenedDraft(DraftModel(model), base + memory.total_nbytes - memory.process)
