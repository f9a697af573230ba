"""Feeds a model whose weights are dummies from a trace, recorded or made up: which neurons are active, by token."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flashllm import _core
from flashllm.errors import FormatError
from flashllm.format.manifest import Manifest
from flashllm.format.trace import Trace


class TraceFeed:
    """Bit sets for the tokens of one pass, which every layer's predictor reads."""

    def __init__(self, path: Path, manifest: Manifest, ffns: Sequence[_core.FfnLayer], *, window: int) -> None:
        """FormatError where the trace does not fit the model. Keeps the file open until `close`."""
        self._trace = trace = Trace(path)
        layers, neurons = manifest.architecture.num_layers, manifest.rows.d_ff
        if (trace.info.num_layers, trace.info.num_neurons) != (layers, neurons):
            trace.close()
            raise FormatError(f"{trace.path}: is no trace of {layers} layers of {neurons} neurons; make it again")
        self._window = window
        tokens = max(manifest.sparse_prefill_tokens, window)
        self._activity = np.zeros((tokens, *trace.info.token_shape), np.uint8)
        for layer, ffn in enumerate(ffns):
            ffn.set_trace(self._activity, layer)

    @property
    def source(self) -> str:
        """Who says which neurons are active: for records."""
        return f"synthetic weights, {self._trace.info.description}"

    @property
    def notice(self) -> str:
        """For the user."""
        return f"{self.source}: times and bytes are real, the text is not"

    @property
    def pass_tokens(self) -> int:
        """Tokens of a pass of few tokens at most."""
        return len(self._activity)

    def load(self, positions: Sequence[int], *, fills: bool) -> None:
        """Before a pass over tokens at these positions. `fills`: a prompt, whose last tokens fill the neuron caches."""
        used = list(positions)[-self._window :] if fills else positions
        for token, position in enumerate(used):
            self._trace.read_into(position, self._activity[token])

    def close(self) -> None:
        self._trace.close()
