"""Fit one layer's predictor: active where b (a x) + bias > threshold (paper A, section 3.1).

Starts from the best low-rank approximation of the layer's own pre-activations on the samples (a truncated SVD in the
metric of the inputs), then trains with a loss balanced over active and inactive neurons. Knows tensors, not files.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F


class Unpack:
    """Bit-packed masks to booleans [tokens, d_ff]."""

    def __init__(self, d_ff: int) -> None:
        self.d_ff = d_ff
        self._bits = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8)

    def __call__(self, packed: torch.Tensor) -> torch.Tensor:
        return (packed[..., None] & self._bits).ne(0).flatten(-2)[..., : self.d_ff]


@dataclass(slots=True)
class LayerPredictor:
    """a [rank, d_model], b [d_ff, rank], bias [d_ff], threshold (a logit)."""

    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor
    threshold: float = 0.0

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, d_ff] for x [tokens, d_model]."""
        return (x @ self.a.T) @ self.b.T + self.bias


@dataclass(frozen=True, slots=True, kw_only=True)
class FitOptions:
    """How one layer is trained."""

    rank: int
    epochs: int = 2
    batch_tokens: int = 1024
    learning_rate: float = 2e-3
    positive_weight: float = 4.0  # a missed active neuron costs this many wrong predictions
    recall: float = 0.97
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerQuality:
    """On validation positions: shares of all neurons, and errors as shares of the truly active / inactive."""

    rank: int
    true_share: float
    predicted_share: float
    false_negative: float
    false_positive: float


def low_rank_start(matrix: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor, rank: int) -> LayerPredictor:
    """The rank-`rank` map closest to x -> matrix x + bias in mean square over the inputs `x`.

    With C = E[x x^T] = R R^T, the minimiser of E|(matrix - b a) x|^2 is the truncated SVD of matrix R (Eckart-Young).
    """
    mean = x.mean(0)
    centred = x - mean
    values, vectors = torch.linalg.eigh((centred.T @ centred / len(x)).double())
    scales = values.clamp_min(1e-10 * float(values.max())).sqrt()
    product = (matrix @ (vectors * scales).float()).double()  # matrix R
    # Its right singular vectors, from the d_model x d_model Gram matrix: far cheaper than its own SVD.
    squares, right = torch.linalg.eigh(product.T @ product)
    top = right[:, -rank:]
    balance = squares[-rank:].clamp_min(1e-20).sqrt().sqrt()
    b = product @ top / balance
    a = balance[:, None] * top.T @ (vectors / scales).T
    shift = matrix.double() @ mean.double() - b @ (a @ mean.double())
    if bias is not None:
        shift = shift + bias.double()
    return LayerPredictor(a.float(), b.float(), shift.float())


def fit(
    predictor: LayerPredictor, x: torch.Tensor, masks: torch.Tensor, options: FitOptions, unpack: Unpack
) -> LayerPredictor:
    """Train on x [tokens, d_model] and bit-packed masks [tokens, ceil(d_ff / 8)]; factors come back fp16-exact."""
    generator = torch.Generator().manual_seed(options.seed)
    scale = float(predictor.logits(x[:2048]).std()) or 1.0
    # Logits of unit scale, so that one learning rate serves every layer.
    a = (predictor.a.clone()).requires_grad_()
    b = (predictor.b / scale * 2).requires_grad_()
    bias = (predictor.bias / scale * 2).requires_grad_()
    optimizer = torch.optim.AdamW([a, b, bias], lr=options.learning_rate, weight_decay=0.0, betas=(0.9, 0.99))
    steps = options.epochs * (len(x) // options.batch_tokens)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.02, 1 - step / max(1, steps)))
    weight = torch.tensor(options.positive_weight)
    for _ in range(options.epochs):
        order = torch.randperm(len(x), generator=generator)
        for start in range(0, len(x) - options.batch_tokens + 1, options.batch_tokens):
            rows = order[start : start + options.batch_tokens]
            logits = (x[rows] @ a.T) @ b.T + bias
            loss = F.binary_cross_entropy_with_logits(logits, unpack(masks[rows]).to(logits.dtype), pos_weight=weight)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        return LayerPredictor(a.half().float(), b.half().float(), bias.detach().clone())


@torch.no_grad()
def calibrate_threshold(
    predictor: LayerPredictor, x: torch.Tensor, masks: torch.Tensor, recall: float, unpack: Unpack
) -> None:
    """The highest threshold that finds at least `recall` of the truly active neurons of these positions."""
    chunks = [predictor.logits(x[s : s + 2048])[unpack(masks[s : s + 2048])] for s in range(0, len(x), 2048)]
    positives = torch.cat(chunks)
    if len(positives) == 0:  # a layer that never fires: predict nothing
        predictor.threshold = float("inf")
        return
    missed = int((1 - recall) * len(positives))
    predictor.threshold = float(torch.kthvalue(positives, missed + 1).values) - 1e-4


@torch.no_grad()
def judge(predictor: LayerPredictor, x: torch.Tensor, masks: torch.Tensor, unpack: Unpack) -> LayerQuality:
    """Errors and densities on positions not trained on."""
    true = predicted = both = total = 0
    for start in range(0, len(x), 2048):
        guess = predictor.logits(x[start : start + 2048]) > predictor.threshold
        fact = unpack(masks[start : start + 2048])
        true += int(fact.sum())
        predicted += int(guess.sum())
        both += int((guess & fact).sum())
        total += fact.numel()
    return LayerQuality(
        rank=len(predictor.a),
        true_share=true / total,
        predicted_share=predicted / total,
        false_negative=(true - both) / max(1, true),
        false_positive=(predicted - both) / max(1, total - true),
    )
