"""Counts predictors' hits and misses in each layer, and how tokens use neurons (paper A's figures 3, 4, 12).

Works on FFN inputs collected from a dense pass, a layer at a time. Knows no texts and no scores.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from masked import MaskedModel, Namer, Variant
from numpy.typing import NDArray
from weights import Floats, LayerWeights

from flashllm.pack.gates import Gates

BINS = np.linspace(-4.0, 4.0, 81)  # of pre-activations, in standard deviations of the layer's
BLOCK_TOKENS = 512
MOST_USED = 2048  # neurons whose co-activation is counted
FRIENDS = (1, 4, 8)  # closest friends shown in figure 12


@dataclass(slots=True)
class LayerActivity:
    """One layer over the collected tokens."""

    true: NDArray[np.bool_]  # [tokens, d_ff]
    predicted: NDArray[np.bool_]
    scale: float  # standard deviation of the pre-activations
    histograms: dict[str, NDArray[np.int64]]  # over BINS: all, false_positive, false_negative, true_positive
    false_positive_mean: float  # mean pre-activation, in deviations: how far below zero
    false_negative_mean: float  # the same: how small what is missed
    missed_energy: float  # share of the summed squared contributions |h| ||down|| that false negatives carry

    def errors(self) -> dict[str, float]:
        """Shares as in the interface: predicted and true of all neurons, errors of the truly active / inactive."""
        true, predicted = int(self.true.sum()), int(self.predicted.sum())
        both = int((self.true & self.predicted).sum())
        return {
            "true_share": true / self.true.size,
            "predicted_share": predicted / self.true.size,
            "false_negative": (true - both) / max(1, true),
            "false_positive": (predicted - both) / max(1, self.true.size - true),
            "false_positive_mean_deviations": self.false_positive_mean,
            "false_negative_mean_deviations": self.false_negative_mean,
            "missed_energy": self.missed_energy,
        }


def collect_inputs(model: MaskedModel, ids: torch.Tensor, max_tokens: int) -> list[torch.Tensor]:
    """FFN inputs of each layer, fp16 [tokens, d_model], of a dense pass over the first windows of ids [n, tokens]."""
    inputs: list[list[torch.Tensor]] = [[] for _ in range(model.manifest.architecture.num_layers)]

    def watch(layer: int, x: torch.Tensor) -> None:
        inputs[layer].append(x.half())

    model.use(Variant.DENSE, watch)
    for window in ids[: max(1, max_tokens // ids.shape[1])]:
        model.logits(window[None])
    model.use(Variant.DENSE)
    return [torch.cat(parts) for parts in inputs]


def layer_activity(weights: LayerWeights, x: torch.Tensor, predictor: Namer) -> LayerActivity:
    """x: the FFN inputs [tokens, d_model] of the layer that `weights` are of."""
    x = x.float()
    pre = pre_activations(weights, x)
    norms = torch.from_numpy(weights.down_norms())
    predicted = torch.empty(pre.shape, dtype=torch.bool)
    for start in range(0, len(x), BLOCK_TOKENS):
        part = slice(start, start + BLOCK_TOKENS)
        predicted[part] = predictor.logits(x[part]) > predictor.threshold
    values = activations(weights, x, pre)
    true = values != 0
    energy = values.mul_(norms).square_()
    scale = float(pre.std())
    groups = {
        "all": torch.ones_like(true),
        "true_positive": true & predicted,
        "false_positive": ~true & predicted,
        "false_negative": true & ~predicted,
    }
    means = {name: float(pre[mask].mean()) / scale if bool(mask.any()) else 0.0 for name, mask in groups.items()}
    return LayerActivity(
        true=true.numpy(),
        predicted=predicted.numpy(),
        scale=scale,
        histograms={name: _histogram(pre[mask].numpy() / scale) for name, mask in groups.items()},
        false_positive_mean=means["false_positive"],
        false_negative_mean=means["false_negative"],
        missed_energy=float(energy[groups["false_negative"]].sum() / energy.sum().clamp_min(1e-30)),
    )


def _histogram(values: NDArray[np.float32]) -> NDArray[np.int64]:
    """Over BINS, which are even: numpy then sorts nothing."""
    return np.histogram(values, len(BINS) - 1, (float(BINS[0]), float(BINS[-1])))[0]


def pre_activations(weights: LayerWeights, x: torch.Tensor) -> torch.Tensor:
    """Values that decide whether a neuron fires, [tokens, d_ff] fp32: above 0 it does. x: [tokens, d_model] fp32."""
    return _products(x, weights.drivers(), weights.bias, weights.layout.d_ff)


def activations(weights: LayerWeights, x: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """Factors of the neurons' down columns, less signs, [tokens, d_ff] fp32; `pre`: its pre-activations."""
    gates = Gates(weights.model)
    values = torch.from_numpy(gates.magnitudes(weights.layer, (pre + float(weights.threshold)).numpy()))
    values[values < float(weights.cut)] = 0.0
    if weights.gated:
        up = _products(x, weights.ups(), weights.up_bias(), weights.layout.d_ff)
        values.mul_(up.clamp_min_(0) if weights.activation == "drelu" else up)
    return values


def _products(x: torch.Tensor, blocks: Iterator[Floats], bias: Floats | None, d_ff: int) -> torch.Tensor:
    found = torch.empty(len(x), d_ff)
    first = 0
    for block in blocks:
        torch.mm(x, torch.from_numpy(block).T, out=found[:, first : first + len(block)])
        first += len(block)
    return found if bias is None else found.add_(torch.from_numpy(bias))


def aggregated_usage(predicted: NDArray[np.bool_], lengths: tuple[int, ...]) -> list[float]:
    """Share of neurons used in a run of n tokens, mean over runs, for each n of `lengths` (figure 4a)."""
    shares = []
    for length in lengths:
        starts = range(0, len(predicted) - length + 1, max(1, length))
        shares.append(float(np.mean([predicted[start : start + length].any(axis=0).mean() for start in starts])))
    return shares


def new_rows_per_token(predicted: NDArray[np.bool_], window: int, text: int) -> float:
    """Mean neurons a token needs that the `window` tokens before it did not: what the cache misses (section 3.1).

    `text`: tokens of each separate text, after which the cache is cold; its first tokens are left out.
    """
    misses = counted = 0
    for start in range(0, len(predicted), text):
        last = np.full(predicted.shape[1], -(10**9))
        for token, active in enumerate(predicted[start : start + text]):
            if token >= window:
                misses += int((active & (last < token - window)).sum())
                counted += 1
            last[active] = token
    return misses / max(1, counted)


def friends(true: NDArray[np.bool_], ranks: tuple[int, ...] = FRIENDS) -> dict[int, list[float]]:
    """For each often-used neuron the share of its firings that its 1st, 4th, 8th closest friend shares (figure 12)."""
    counts = true.sum(axis=0)
    chosen = np.argsort(-counts)[:MOST_USED]
    chosen = chosen[counts[chosen] >= 8]
    if len(chosen) <= max(ranks):
        return {rank: [] for rank in ranks}
    fired = true[:, chosen].astype(np.float32)
    together = fired.T @ fired
    share = together / np.diag(together)[:, None]
    np.fill_diagonal(share, -1.0)
    ordered = -np.sort(-share, axis=1)
    return {rank: [float(value) for value in ordered[:, rank - 1]] for rank in ranks}


def every_layer(model: MaskedModel, inputs: list[torch.Tensor], predictors: list[Namer]) -> Iterator[LayerActivity]:
    """Layer by layer, so that only one layer's masks are held."""
    for layer, (x, predictor) in enumerate(zip(inputs, predictors, strict=True)):
        yield layer_activity(LayerWeights(model.model, layer), x, predictor)
