"""Models that say how likely a text's tokens are: the engine, transformers, llama.cpp. Knows no tasks.

The optional ones are imported when they are opened.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from flashllm.engine.model import Model

Floats = NDArray[np.float32]


class Scorer(Protocol):
    """A model that knows what it was fed since `start`."""

    def start(self) -> None: ...

    def feed(self, ids: Sequence[int], *, last: bool = False) -> Floats:
        """Logits [ids, vocab] after each; [1, vocab] after the last."""

    def back_to(self, length: int) -> None:
        """Forget what came after so many tokens."""


class Firing:
    """An observer that counts, layer by layer, the neurons that are not exactly zero."""

    def __init__(self, layers: int) -> None:
        self._firing = [0] * layers
        self._values = [0] * layers

    def input(self, layer: int, x: Floats) -> None:
        """Of the engine's `Observer`."""

    def activations(self, layer: int, first: int, h: Floats) -> None:
        """Of the engine's `Observer`."""
        self._firing[layer] += int(np.count_nonzero(h))
        self._values[layer] += h.size

    def shares(self) -> list[float]:
        """Of each layer's neurons."""
        return [firing / max(1, values) for firing, values in zip(self._firing, self._values, strict=True)]


class Flash:
    """The engine. Its prompts are computed as the configuration says, in any number of pieces."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._sequence = model.new_sequence()
        self.observer: Firing | None = None  # of what is fed from now on

    @property
    def has_zeros(self) -> bool:
        """Whether neurons are exactly zero, by themselves or by thresholds."""
        manifest = self._model.manifest
        return "relu" in manifest.architecture.activation or manifest.sparsity is not None

    @property
    def num_layers(self) -> int:
        return self._model.manifest.architecture.num_layers

    def start(self) -> None:
        self._sequence.keep(0)

    def feed(self, ids: Sequence[int], *, last: bool = False) -> Floats:
        entries = [(self._sequence, list(ids))]
        if last:
            return self._model.step(entries, as_prompt=True)
        return self._model.step(entries, all_logits=True, as_prompt=True, observer=self.observer)

    def back_to(self, length: int) -> None:
        self._sequence.keep(length)

    def endings(self, asked: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]]) -> list[list[Floats]]:
        """Logits [ids, vocab] before each id of each ending of each prefix: all prefixes in a pass, then all endings.

        What was fed is as it was. The bits are those of each prefix and ending alone.
        """
        with ExitStack() as held:
            new = lambda: held.enter_context(self._model.new_sequence())  # noqa: E731
            prefixes = [(new(), list(prefix)) for prefix, _ in asked]
            last = self._model.step(prefixes, as_prompt=True)
            found = [[row[None]] * len(endings) for row, (_, endings) in zip(last, asked, strict=True)]
            longer = [(i, j) for i, (_, endings) in enumerate(asked) for j, one in enumerate(endings) if len(one) > 1]
            entries = []
            for i, j in longer:
                entries.append((new(), list(asked[i][1][j][:-1])))
                entries[-1][0].copy_from(prefixes[i][0])
            if entries:
                logits = self._model.step(entries, all_logits=True, as_prompt=True)
                ends = np.cumsum([len(ids) for _, ids in entries])
                for (i, j), rows in zip(longer, np.split(logits, ends[:-1]), strict=True):
                    found[i][j] = np.concatenate([found[i][j], rows])
        return found


class Transformers:
    """The checkpoint as transformers runs it."""

    def __init__(self, folder: Path, threads: int | None = None) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        if threads is not None:
            torch.set_num_threads(threads)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
        self._past: Any = None

    def start(self) -> None:
        self._past = None

    def feed(self, ids: Sequence[int], *, last: bool = False) -> Floats:
        import torch

        kept = 1 if last else 0  # 0: all
        with torch.inference_mode():
            tokens = torch.tensor([list(ids)])
            out = self._model(tokens, past_key_values=self._past, use_cache=True, logits_to_keep=kept)
        self._past = out.past_key_values
        logits: Floats = out.logits[0].float().numpy()
        return logits

    def back_to(self, length: int) -> None:
        self._past.crop(length - self._past.get_seq_length())


class LlamaCpp:
    """A GGUF file as llama.cpp runs it, by llama-cpp-python. It must have the tokenizer that the ids are of."""

    def __init__(self, path: Path, context: int, threads: int | None = None) -> None:
        from llama_cpp import Llama

        self._model: Any = Llama(
            str(path),
            n_ctx=context,
            n_batch=context,
            n_ubatch=context,
            n_threads=threads,
            n_threads_batch=threads,
            logits_all=True,
            verbose=False,
        )

    def start(self) -> None:
        self._model.reset()

    def feed(self, ids: Sequence[int], *, last: bool = False) -> Floats:
        first = self._model.n_tokens + (len(ids) - 1 if last else 0)
        self._model.eval(list(ids))
        logits: Floats = np.array(self._model.scores[first : self._model.n_tokens], np.float32)
        return logits

    def back_to(self, length: int) -> None:
        self._model.n_tokens = length  # `eval` cuts the cache there
