"""Thresholds and refitted down projections, in closed form and layer by layer, without gradients.

Each layer is done with the layers before it as they have become. Its threshold is the quantile of the gate's values
that leaves the wanted share of zeros, never below 0. Its down projection W is then the ridge solution of

    min over W of  sum over tokens of  weight^2 * |W a + bias - target|^2  +  ridge * mean(diag(A)) * |W - W0|^2

with a the FATReLU FFN's inner values, A = sum of weight^2 * a a^T in fp64, and W0 the projection before. The target is
what brings the layer's output to the unmodified model's, so that what earlier layers lost is made good, too; a token's
weight is 1 / rms of its output there, or the few tokens with huge ones would decide everything.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from relufication.student import FFN, FATReLU

_MAX_QUANTILE_VALUES = 2**24  # of one layer; more tokens are thinned out evenly


class _Captured(Exception):
    pass


def _run(layer: nn.Module, hidden: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    """A decoder layer's output, [1, tokens, d_model]."""
    result = layer(hidden, **kwargs)
    return result[0] if isinstance(result, tuple) else result


def _entries(
    model: PreTrainedModel, layers: list[FFN], rows: torch.Tensor
) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    """Inputs of the first layer for each row, and the further arguments that each layer is called with."""
    hidden: list[torch.Tensor] = []
    kwargs: list[dict[str, Any]] = [{} for _ in layers]

    def first(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        hidden.append((args[0] if args else named["hidden_states"]).clone())
        if len(hidden) > 1:
            raise _Captured

    def each(index: int) -> Callable[..., None]:
        def take(_: nn.Module, __: tuple[Any, ...], named: dict[str, Any]) -> None:
            kwargs[index] = {key: value for key, value in named.items() if key != "hidden_states"}

        return take

    hooks = [ffn.layer.register_forward_pre_hook(each(i), with_kwargs=True) for i, ffn in enumerate(layers)]
    hooks.append(layers[0].layer.register_forward_pre_hook(first, with_kwargs=True))
    try:
        for row in rows:  # the first through all layers, for their arguments; all rows are of one length
            try:
                model(row[None], use_cache=False)
            except _Captured:
                continue
    finally:
        for hook in hooks:
            hook.remove()
    return hidden, kwargs


def threshold_of(values: torch.Tensor, share: float) -> float:
    """The least threshold from 0 that makes at least `share` of `values` zero."""
    flat = values.flatten().float()
    rank = min(max(math.ceil(share * flat.numel()), 1), flat.numel())
    return max(0.0, flat.kthvalue(rank).values.item())


@torch.no_grad()
def fit(
    teacher: PreTrainedModel,
    of_teacher: list[FFN],
    of_student: list[FFN],
    rows: torch.Tensor,
    share: float,
    *,
    refit: bool = True,
    ridge: float = 1e-2,
    report: Callable[[str], None] = lambda line: None,
) -> None:
    """Sets thresholds (and with `refit` the down projections) of the student, in place.

    `rows` [samples, tokens]: calibration tokens, on the models' device. Working memory: two hidden states of all rows
    in fp32, a layer's FFN inputs, and 16 bytes times the square of d_ff.
    """
    hidden, kwargs = _entries(teacher, of_teacher, rows)
    wanted = [each.clone() for each in hidden]  # the unmodified model's stream
    for index, (before, ffn) in enumerate(zip(of_teacher, of_student, strict=True)):
        inputs: list[torch.Tensor] = []
        outputs: list[torch.Tensor] = []
        hooks = [
            ffn.module.register_forward_pre_hook(lambda _, args: inputs.append(args[0])),  # noqa: B023 - gone by then
            ffn.module.register_forward_hook(lambda _, __, out: outputs.append(out)),  # noqa: B023
        ]
        middles = []
        for row, (given, target) in enumerate(zip(hidden, wanted, strict=True)):
            wanted[row] = _run(before.layer, target, kwargs[index])
            middles.append(_run(ffn.layer, given, kwargs[index]) - outputs.pop())  # the stream without this FFN
        for hook in hooks:
            hook.remove()
        activation = ffn.activation
        assert isinstance(activation, FATReLU)
        values = sum(x.shape[1] for x in inputs) * ffn.decides.out_features
        every = -(-values // _MAX_QUANTILE_VALUES)
        activation.threshold = threshold_of(torch.cat([ffn.decides(x[:, ::every]) for x in inputs], 1), share)
        if refit:
            _refit(ffn, inputs, middles, wanted, ridge)
        for row, (x, middle) in enumerate(zip(inputs, middles, strict=True)):
            hidden[row] = middle + ffn.down(ffn.inner(x))
        worst = torch.cat([(h - w).norm(dim=-1) / w.norm(dim=-1) for h, w in zip(hidden, wanted, strict=True)], 1)
        report(f"layer {index}: threshold {activation.threshold:.4f}, stream off by {worst.median().item():.3f}")


def _refit(
    ffn: FFN, inputs: list[torch.Tensor], middles: list[torch.Tensor], wanted: list[torch.Tensor], ridge: float
) -> None:
    """Solves for the down projection, which is changed in place."""
    weight = ffn.down.weight
    size = weight.shape[1]
    gram = torch.zeros(size, size, dtype=torch.float64, device=weight.device)
    cross = torch.zeros(size, weight.shape[0], dtype=torch.float64, device=weight.device)
    for x, middle, target in zip(inputs, middles, wanted, strict=True):
        inner = ffn.inner(x)[0].double()
        by = target[0].double().square().mean(-1, keepdim=True).rsqrt()
        left = (target - middle)[0].double() - ffn.down(ffn.inner(x))[0].double()
        gram.addmm_((inner * by).T, inner * by)
        cross.addmm_((inner * by).T, left * by)
    gram.diagonal().add_(max(ridge * gram.diagonal().mean().item(), 1e-12))
    change = torch.cholesky_solve(cross, torch.linalg.cholesky(gram))
    weight += change.T.to(weight.dtype)
