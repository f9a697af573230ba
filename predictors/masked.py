"""The sparse model's function over many tokens at once: dense passes in which only predicted neurons count.

The engine decodes token by token and reads what it lacks; this computes the same y = down(mask * activation(up(x)))
with the weights streamed once a batch, so that perplexity over a hundred thousand tokens takes minutes. A test compares
it with the engine. Knows layers and masks; not texts or scores.
"""

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from fit import LayerPredictor
from passes import WeightBlocks
from safetensors.torch import load_file
from torch import nn

from flashllm.arch.registry import spec_of
from flashllm.convert.untrained import untrained_predictor
from flashllm.engine.linear import dense_product
from flashllm.format.manifest import predictor_ranks
from flashllm.format.predictors import EARLY
from flashllm.format.safetensors import read_header

BLOCK_TOKENS = 512  # of one product


class Variant(StrEnum):
    """What decides which neurons count."""

    DENSE = "dense"  # all
    ORACLE = "oracle"  # those that fire
    TRAINED = "trained"  # the model directory's predictors
    SVD = "svd"  # those conversion makes without data


Watcher = Callable[[int, torch.Tensor], None]  # (layer, FFN inputs [tokens, d_model])


class MaskedFFN(nn.Module):
    """Stands where a layer's streaming FFN stood. `predictor` None: every neuron."""

    def __init__(self, layer: int, ffn: Any, d_ff: int) -> None:
        super().__init__()
        self.layer, self._d_ff = layer, d_ff
        self._ffn = [ffn]  # in a list: no submodule, the engine owns it
        self.predictor: LayerPredictor | None = None
        self.oracle = False
        self.watcher: Watcher | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., d_model] -> y, same shape and dtype."""
        ffn, flat = self._ffn[0], x.reshape(-1, x.shape[-1])
        active = None if self.predictor is None else self._active(flat)
        if self.watcher is not None:
            self.watcher(self.layer, flat)
        total = torch.zeros(flat.shape)
        for first, stored in ffn.weight_blocks():
            widen = x.dtype == torch.float16  # once a block, not once a product
            block = {name: matrix.float() if widen else matrix for name, matrix in stored.items()}
            count = len(block["up"])
            for start in range(0, len(flat), BLOCK_TOKENS):
                tokens = slice(start, start + BLOCK_TOKENS)
                h = ffn.activations(flat[tokens].to(block["up"].dtype), first, count, block)
                if active is not None:
                    h = h * active[tokens, first : first + count]
                elif self.oracle:
                    h = h * (h != 0)
                total[tokens] += dense_product(h, block["down"].T)
        if ffn.down_bias is not None:
            total += ffn.down_bias
        return total.to(x.dtype).reshape(x.shape)

    def _active(self, flat: torch.Tensor) -> torch.Tensor:
        predictor = self.predictor
        assert predictor is not None
        active = torch.empty((len(flat), self._d_ff), dtype=torch.bool)
        for start in range(0, len(flat), BLOCK_TOKENS):
            tokens = slice(start, start + BLOCK_TOKENS)
            active[tokens] = predictor.logits(flat[tokens].float()) > predictor.threshold
        return active


class MaskedModel:
    """A loaded model (mode dense) whose FFNs are masked; `use` says by what."""

    def __init__(self, model: Any, predictors: dict[Variant, list[LayerPredictor]]) -> None:
        architecture = model.engine.manifest.architecture
        spec = spec_of(architecture.model_type)
        self.model, self._predictors = model, predictors
        self.ffns = [MaskedFFN(layer, ffn, architecture.d_ff) for layer, ffn in enumerate(model.engine.ffns)]
        for layer, masked in zip(model.get_submodule(spec.layers_module), self.ffns, strict=True):
            layer.set_submodule(spec.ffn_module, masked)

    @property
    def variants(self) -> list[Variant]:
        return [Variant.DENSE, Variant.ORACLE, *self._predictors]

    def predictors(self, variant: Variant) -> list[LayerPredictor] | None:
        """Of a variant that has some."""
        return self._predictors.get(variant)

    def use(self, variant: Variant, watcher: Watcher | None = None) -> None:
        """From now on passes are of this variant; `watcher` sees every FFN's inputs."""
        self.use_predictors(self._predictors.get(variant), watcher, oracle=variant is Variant.ORACLE)

    def use_predictors(
        self, predictors: list[LayerPredictor] | None, watcher: Watcher | None = None, *, oracle: bool = False
    ) -> None:
        """As `use`, for any predictors; None: every neuron."""
        for layer, ffn in enumerate(self.ffns):
            ffn.predictor = None if predictors is None else predictors[layer]
            ffn.oracle, ffn.watcher = oracle, watcher

    @torch.inference_mode()
    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """[sequences, tokens, vocabulary] for ids [sequences, tokens], in the model's dtype."""
        return self.model(ids, use_cache=False).logits


def untrained(model: Any, ranks: list[int]) -> list[LayerPredictor]:
    """What conversion makes of a loaded model's weights without data, at other ranks."""
    architecture = model.engine.manifest.architecture
    norm = spec_of(architecture.model_type).ffn_norm
    made = []
    for layer, (ffn, rank) in enumerate(zip(model.engine.ffns, ranks, strict=True)):
        parts = None if norm is None else model.get_submodule(norm.format(i=layer))
        weight, shift = (getattr(parts, name, None) for name in ("weight", "bias"))
        low_rank, threshold = untrained_predictor(
            WeightBlocks(ffn, architecture.d_ff).drivers,
            None if ffn.up_bias is None else ffn.up_bias.numpy(),
            None if weight is None else weight.float().numpy(),
            None if shift is None else shift.float().numpy(),
            d_model=architecture.d_model,
            rank=rank,
        )
        made.append(LayerPredictor.from_low_rank(low_rank, threshold).stored(16))
    return made


def predictor_nbytes(path: Path) -> tuple[int, int]:
    """Bytes of a file's predictors, and of its early ones."""
    infos = read_header(path).tensors.values()
    early = sum(info.nbytes for info in infos if f".{EARLY}" in info.name)
    return sum(info.nbytes for info in infos) - early, early


def load_predictors(path: Path, manifest: Any) -> list[LayerPredictor]:
    """The predictors in a file, checked against the model's manifest. FormatError where they are another's."""
    layers = len(predictor_ranks(path, manifest))
    tensors = load_file(path)

    def factor(name: str) -> torch.Tensor:
        scale = tensors.get(f"{name}_scale")
        return tensors[name].float() if scale is None else tensors[name].float() * scale.float()[:, None]

    return [
        LayerPredictor(
            a=factor(f"layers.{layer}.a"),
            b=factor(f"layers.{layer}.b"),
            bias=tensors[f"layers.{layer}.bias"],
            threshold=float(tensors[f"layers.{layer}.threshold"]),
        )
        for layer in range(layers)
    ]
