"""A copy of a causal LM whose FFNs compute with FATReLU, a threshold a layer; everything but the FFNs is shared.

FATReLU (Kurtz et al., 2020; Song et al., 2024: ProSparse) keeps a value above its threshold and makes any other zero.
Where the modules are comes from flashllm's own table of architectures, so that what is made here converts.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from flashllm.arch.registry import block_spec, complete_config, resolve, spec_of
from flashllm.errors import UnsupportedModelError

KINDS = "it takes FFNs of Llama's kind: llama, mistral, qwen2, qwen3, gemma, smollm3, stablelm, cohere, phi and others"


class FATReLU(nn.Module):
    """x where x > threshold, else 0. `threshold` is a number, from 0; `seen` holds the last gate's values, detached,
    where `watched`."""

    def __init__(self) -> None:
        super().__init__()
        self.threshold = 0.0
        self.watched = False
        self.seen: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.watched:
            self.seen = x.detach()
        return x * (x > self.threshold)


@dataclass(frozen=True, slots=True)
class FFN:
    """One layer's FFN in a model: the module of the layer, the FFN within it, and the FFN's projections."""

    layer: nn.Module
    module: nn.Module
    up: nn.Linear
    gate: nn.Linear | None
    down: nn.Linear
    activation_name: str  # of the activation's module within `module`

    @property
    def activation(self) -> nn.Module:
        return getattr(self.module, self.activation_name)

    @property
    def decides(self) -> nn.Linear:
        """The projection whose values the activation sees."""
        return self.up if self.gate is None else self.gate

    def parameters(self) -> list[nn.Parameter]:
        """Parameters that are trained: weights and biases of the projections."""
        return [value for one in (self.up, self.gate, self.down) if one is not None for value in one.parameters()]

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        """Values that the down projection reads, for inputs [..., d_model]."""
        value = self.activation(self.decides(x))
        return value if self.gate is None else value * self.up(x)


def relufied_config(config: Mapping[str, Any], thresholds: list[float]) -> dict[str, Any]:
    """The config.json of a model with these thresholds, as `flashllm convert` reads it.

    UnsupportedModelError where the model cannot be had with FATReLU: a mixture of experts, one that is sparse already,
    one whose FFN's output goes through a norm, whose FFN's matrices lie together in a tensor, or whose architecture
    file reads its thresholds from nowhere.
    """
    model_type, before = config.get("model_type"), resolve(config)
    if before.experts:
        raise UnsupportedModelError(f"{model_type}: relufy changes dense FFNs, and this is a mixture of experts")
    if before.sparse:
        raise UnsupportedModelError(f"{model_type}: its activation {before.activation} is sparse already; convert it")
    block = block_spec(config)
    if any(layer.norms != "input" for layer in block.layers) or block.residual_scale != 1:
        raise UnsupportedModelError(
            f"{model_type}: relufy fits FFNs whose output is added as it is, without norm or scale; {KINDS}"
        )
    if spec_of(config).matrix_parts:
        raise UnsupportedModelError(f"{model_type}: relufy needs up, gate and down as linear modules each; {KINDS}")
    changed = {**config, "hidden_act": "fatrelu", "hidden_act_param": thresholds}
    if "hidden_act" in complete_config(config) and resolve(changed).activation == "fatrelu":
        found = [layer.activation_threshold for layer in block_spec(changed).layers] or [0.0] * before.num_layers
        if found == thresholds:
            return changed
    raise UnsupportedModelError(
        f"{model_type}: flashllm reads no thresholds from its config, which must name the activation as hidden_act; "
        f"{KINDS}"
    )


def ffns(model: PreTrainedModel, config: Mapping[str, Any]) -> list[FFN]:
    """Every layer's FFN. UnsupportedModelError where its projections are not plain linear modules of one module."""
    spec = spec_of(config)
    found = []
    for index in range(resolve(config).num_layers):
        names = {matrix: source.format(i=index) for matrix, source in spec.matrices.items()}
        try:
            linear = {matrix: model.get_submodule(name.removesuffix(".weight")) for matrix, name in names.items()}
        except AttributeError as error:
            raise UnsupportedModelError(f"transformers has no module for {names['down']}: {error}") from error
        if len(set(linear.values())) < len(linear) or not all(isinstance(one, nn.Linear) for one in linear.values()):
            raise UnsupportedModelError(
                f"{config['model_type']}: relufy needs up, gate and down as linear modules each"
            )
        ffn_name = names["down"].removesuffix(".weight").rpartition(".")[0]
        module = model.get_submodule(ffn_name)
        others = [name for name, one in module.named_children() if not isinstance(one, nn.Linear | nn.Dropout)]
        if len(others) != 1:
            raise UnsupportedModelError(
                f"{config['model_type']}: {ffn_name} has no one activation of its own: {others}"
            )
        layer_name = spec.matrices["down"].partition(".{i}")[0] + f".{index}"
        layer = model.get_submodule(layer_name)
        up, gate, down = linear["up"], linear.get("gate"), linear["down"]
        found.append(FFN(layer, module, up, gate, down, others[0]))
    return found


def student_of(teacher: PreTrainedModel, config: Mapping[str, Any]) -> tuple[PreTrainedModel, list[FFN]]:
    """A copy of `teacher` and its FFNs, with FATReLU at threshold 0. Its other weights are the teacher's own tensors;
    of both models only the copy's FFNs have gradients."""
    teacher.requires_grad_(requires_grad=False)
    mine = {id(value) for ffn in ffns(teacher, config) for value in ffn.parameters()}
    shared = {id(value): value for value in teacher.parameters() if id(value) not in mine}
    student = copy.deepcopy(teacher, shared)  # the memo's tensors are not copied
    found = ffns(student, config)
    for ffn in found:
        setattr(ffn.module, ffn.activation_name, FATReLU())
        for value in ffn.parameters():
            value.requires_grad_()
    return student, found
