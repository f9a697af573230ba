"""The sparse model's function over many tokens at once: dense passes in which only predicted neurons count.

The engine decodes token by token and reads what it lacks; here its dense pass streams the weights once a batch and an
observer zeroes the activations of the neurons that are not named, y = down(mask * activation(up(x))), so that
perplexity over a hundred thousand tokens takes minutes. A test compares the two. Knows layers and masks; not texts or
scores.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from training.fit import LayerPredictor
from weights import Floats, LayerWeights

from flashllm._core import PAGE_TOKENS
from flashllm.convert.untrained.predictor import untrained_predictor
from flashllm.convert.untrained.svd import normed_inputs
from flashllm.engine.meter import Meter
from flashllm.engine.model import Model
from flashllm.engine.state import SequenceState
from flashllm.errors import UsageError
from flashllm.format.manifest import Manifest, predictor_ranks
from flashllm.format.model_files import PREDICTORS
from flashllm.format.predictors import FACTOR_CODES, PREFETCH, relu_encodings
from flashllm.format.safetensors import read_header
from flashllm.pack.gates import Gates

BLOCK_TOKENS = 512  # whose logits a predictor gives at once


class Variant(StrEnum):
    """Ways to decide which neurons count."""

    DENSE = "dense"  # all
    ORACLE = "oracle"  # those that fire
    TRAINED = "trained"  # the model directory's predictors
    GATES = "gates"  # the model directory's gates, in 4 bits, or whole in memory
    SVD = "svd"  # those conversion makes without data


Watcher = Callable[[int, torch.Tensor], None]  # (layer, FFN inputs [tokens, d_model])


class Namer(Protocol):
    """Names the neurons whose logit is above the threshold."""

    threshold: float

    @property
    def rank(self) -> int: ...

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, d_ff] for x [tokens, d_model]."""


@dataclass(slots=True)
class GateNamer:
    """A layer's gate: a logit is how far its product is from firing, below 0; the threshold is its margin."""

    gates: Gates
    products: Callable[[int, Floats], Floats]
    layer: int
    d_model: int
    threshold: float

    @property
    def rank(self) -> int:
        """Rank of the matrix, whole."""
        return self.d_model

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, d_ff] for x [tokens, d_model]."""
        return torch.from_numpy(-self.gates.distances(self.layer, self.products(self.layer, x.numpy())))


class _Mask:
    """Observes a pass: hands the inputs on, and zeroes the activations of neurons that the predictors do not name."""

    def __init__(self) -> None:
        self.predictors: Sequence[Namer] | None = None  # None: every neuron counts
        self.oracle = False
        self.watcher: Watcher | None = None
        self._active: NDArray[np.bool_] | None = None  # [d_ff, tokens] of the layer that is computed

    def input(self, layer: int, x: Floats) -> None:
        if self.predictors is None and self.watcher is None:
            return
        inputs = torch.from_numpy(x.copy())
        if self.watcher is not None:
            self.watcher(layer, inputs)
        if self.predictors is not None:
            predictor = self.predictors[layer]
            parts = [(predictor.logits(part) > predictor.threshold).T for part in inputs.split(BLOCK_TOKENS)]
            self._active = torch.cat(parts, 1).numpy()

    def activations(self, _layer: int, first: int, h: Floats) -> None:
        if self.predictors is not None and self._active is not None:
            h *= self._active[first : first + len(h)]
        elif self.oracle:
            h *= h != 0


class MaskedModel:
    """A loaded model whose neurons count or not; `use` says by what. A session can run on it."""

    def __init__(self, model: Model, predictors: dict[Variant, list[Namer]]) -> None:
        self.model, self._predictors = model, predictors
        self._mask = _Mask()

    @property
    def variants(self) -> list[Variant]:
        return [Variant.DENSE, Variant.ORACLE, *self._predictors]

    def predictors(self, variant: Variant) -> list[Namer] | None:
        return self._predictors.get(variant)

    def use(self, variant: Variant, watcher: Watcher | None = None) -> None:
        """From now on passes are of this variant; `watcher` sees every FFN's inputs."""
        self.use_predictors(self._predictors.get(variant), watcher, oracle=variant is Variant.ORACLE)

    def use_predictors(
        self, predictors: list[Namer] | None, watcher: Watcher | None = None, *, oracle: bool = False
    ) -> None:
        """As `use`, for any predictors; None: every neuron."""
        self._mask.predictors, self._mask.oracle, self._mask.watcher = predictors, oracle, watcher

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits [sequences, tokens, vocabulary], fp32, for ids [sequences, tokens].

        A pass takes as many sequences as the memory plan has room for.
        """
        pages = -(-ids.shape[1] // PAGE_TOKENS)
        found = []
        for part in ids.split(max(1, self.model.plan.memory.max_pages // pages)):
            entries = [(self.model.new_sequence(), row) for row in part.tolist()]
            try:
                found.append(self.model.step(entries, all_logits=True, observer=self._mask))
            finally:
                for sequence, _ in entries:
                    sequence.close()
        return torch.from_numpy(np.concatenate(found).reshape(*ids.shape, -1))

    # What a session needs of a model (flashllm/generate/session.py).

    @property
    def context(self) -> int:
        return self.model.context

    @property
    def meter(self) -> Meter:
        return self.model.meter

    @property
    def manifest(self) -> Manifest:
        return self.model.manifest

    def is_prompt(self, tokens: int) -> bool:
        """True where a session calls so many new tokens a prompt; all are computed as one."""
        return self.model.is_prompt(tokens)

    def new_sequence(self) -> SequenceState:
        return self.model.new_sequence()

    def step(self, entries: Sequence[tuple[SequenceState, Sequence[int]]], *, as_prompt: bool = False) -> Floats:
        """Logits [entries, vocab] after each entry's last token, of the variant in use."""
        return self.model.step(entries, observer=self._mask)


def untrained(model: Model, ranks: list[int]) -> list[LayerPredictor]:
    """Predictors as conversion makes them of a loaded model's weights, without data, at other ranks."""
    made = []
    for layer, rank in enumerate(ranks):
        weights = LayerWeights(model, layer)
        inputs = normed_inputs(*weights.norm(), weights.layout.d_model)
        low_rank, threshold = untrained_predictor(weights.drivers, weights.bias, inputs, rank)
        made.append(LayerPredictor.from_low_rank(low_rank, threshold).stored(16))
    return made


def own_gates(model: Model) -> list[Namer]:
    """The gates by which a loaded model names neurons: in memory, which name what fires and nothing else, or in 4 bits
    with a margin."""
    gates, architecture = Gates(model), model.manifest.architecture
    if model.manifest.resident_gate:
        products, margins = gates.products, [float(np.finfo(np.float32).tiny)] * architecture.num_layers
    else:
        tensors = load_file(model.directory.path / PREDICTORS)
        margins = [float(tensors[f"layers.{layer}.margin"]) for layer in range(architecture.num_layers)]
        products = gates.coded_products
    return [GateNamer(gates, products, layer, architecture.d_model, -margin) for layer, margin in enumerate(margins)]


def predictor_nbytes(path: Path) -> tuple[int, int]:
    """Bytes of a file's predictors, and of those for prefetching."""
    infos = read_header(path).tensors.values()
    prefetch = sum(info.nbytes for info in infos if f".{PREFETCH}" in info.name)
    return sum(info.nbytes for info in infos) - prefetch, prefetch


def load_predictors(path: Path, manifest: Any) -> list[LayerPredictor]:
    """The predictors in a file, checked against the model's manifest. FormatError where they are another's."""
    ranks = predictor_ranks(path, manifest)
    if 0 in ranks:
        raise UsageError(f"{path}: holds the gates in 4 bits, which are no low-rank predictors; train some first")
    if relu_encodings(read_header(path)) is not None:
        raise UsageError(
            f"{path}: holds PowerInfer's predictors, which the engine alone computes; train predictors first"
        )
    layers = len(ranks)
    tensors = load_file(path)

    def factor(name: str, columns: int) -> torch.Tensor:
        if tensors[name].is_floating_point():
            return tensors[name].float()
        code = FACTOR_CODES[8 if tensors[name].dtype == torch.int8 else 4]
        return torch.from_numpy(code.decode(tensors[name].numpy().view(np.uint8), columns))

    return [
        LayerPredictor(
            a=factor(f"layers.{layer}.a", manifest.rows.d_model),
            b=factor(f"layers.{layer}.b", ranks[layer]),
            bias=tensors[f"layers.{layer}.bias"],
            threshold=float(tensors[f"layers.{layer}.threshold"]),
        )
        for layer in range(layers)
    ]
