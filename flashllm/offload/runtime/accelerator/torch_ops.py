"""A decoder layer by torch on a device, and what comes before the first and after the last: an `Ops`.

It mirrors the native core's layer (csrc/model/layer.cpp), for the traits of a block that are known here. Products go
through the weights in parts of at most ROWS_TOGETHER rows, so that the working memory does not grow with the batch.

Sums are torch's: a sequence's bits may depend on the batch it is in, and on the device. The native core's operations on
the CPU promise that they do not; these promise agreement within the dtype's tolerance.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from flashllm.arch.mixers import Rotary
from flashllm.arch.spec import BlockSpec, LayerSpec
from flashllm.base.dtypes import WEIGHT_DTYPES
from flashllm.errors import UnsupportedModelError
from flashllm.offload.runtime.accelerator.codec import PackedMatrix
from flashllm.offload.runtime.accelerator.device import HostArray, Tensor, TorchDevice
from flashllm.offload.runtime.ops import Attend, Matrix, Positions, Projected, Tensors
from flashllm.offload.runtime.tiers.states import LentStates
from flashllm.offload.shape import ModelShape

ROWS_TOGETHER = 1024  # of a batch that go through a product together
_SPARE = 64 << 20  # what torch's allocator rounds up to, and cannot give back
_HEAD_ROWS = 8192  # outputs of the head computed together, where torch has no fp32 product of 16-bit inputs
# Traits of a block that are computed here; a block with another one that is not at its default is refused.
_KNOWN = (
    *("d_model", "embed_dim", "vocab_size", "context", "tied_head", "norm", "norm_epsilon", "norm_shift", "final_norm"),
    *("learned_positions", "position_offset", "layers", "activation", "gated"),
    *("embedding_scale", "residual_scale", "logit_scale", "logit_softcap"),
    *("heads", "kv_heads", "head_dim", "query_scale", "query_key_norm", "rotary", "window"),  # of attention
)
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "squared_relu": lambda x: torch.relu(x).square(),
    "drelu": torch.relu,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


Linear = Callable[[str, Tensor], Tensor]  # a matrix's name, its inputs


class Norm(NamedTuple):
    """Weight and bias of a norm, fp32, one dimension; None where it has none."""

    weight: Tensor | None
    bias: Tensor | None


class TorchOps:
    """Layers of one model on a torch device."""

    def __init__(self, block: BlockSpec, device: TorchDevice) -> None:
        """UnsupportedModelError for a block with traits that have no operation here."""
        if lacks := lacking(block):
            raise UnsupportedModelError(
                f"the throughput engine has no operations on an accelerator for {', '.join(lacks)}; use --device cpu"
            )
        self.storage = WEIGHT_DTYPES[device.dtype_name].storage
        self._block, self._device = block, device
        self._frequencies = {
            rotary: torch.tensor(rotary.inverse_frequency, dtype=torch.float32, device=device.device)
            for rotary in {mixer.rotary for mixer in block.attentions}
            if rotary is not None
        }
        self._wide_products = _has_wide_products(device)

    def embed(self, ends: Tensors, rows: Tensor, positions: Positions) -> Tensor:
        block, x = self._block, rows
        if block.embedding_scale != 1.0:
            x *= self.rounded(block.embedding_scale)
        if "project_in" in ends.matrices:
            x = self.linear(ends.matrices["project_in"], x)
        if "positions" in ends.matrices:
            x += ends.matrices["positions"].array[self.from_host(positions + block.position_offset)]
        return x

    def layer(
        self,
        number: int,
        tensors: Tensors,
        x: Tensor,
        positions: Positions,
        attend: Attend,
        *,
        decoding: bool = False,
        states: LentStates | None = None,
    ) -> Tensor:
        if states is not None:
            raise ValueError("no layer keeps a state here")
        block, layer = self._block, self._block.layers[number]

        def linear(name: str, inputs: Tensor) -> Tensor:
            return self.linear(tensors.matrices[name], inputs, decoding=decoding)

        mixed = self.empty(len(x), layer.attention.query_dim)
        attend(0, self._project(layer, tensors, x, linear, positions), mixed)

        def attention(rows: slice) -> Tensor:
            return self._behind(layer, tensors, "attention_output_norm", linear("out", mixed[rows]))

        def ffn(rows: slice) -> Tensor:
            inputs = self._before(layer, tensors, "attention_norm" if layer.shared_norm else "ffn_norm", x[rows])
            hidden = linear("up", inputs)
            gate = linear("gate", inputs) if block.gated else None
            self.activate(hidden, gate, layer.activation_threshold)
            return self._behind(layer, tensors, "ffn_output_norm", linear("down", hidden))

        if layer.parallel:
            for rows in _parts(len(x)):
                made = ffn(rows)
                made += attention(rows)
                self._add(x[rows], made)
            return x
        for norm, part in (("attention_norm", attention), ("ffn_norm", ffn)):
            for rows in _parts(len(x)):
                self._add(x[rows], part(rows))
                if layer.norms == "sum":
                    x[rows] = self.norm(_norm(tensors, norm), x[rows])
        return x

    def logits(self, ends: Tensors, x: Tensor) -> NDArray[np.float32]:
        block = self._block
        if block.final_norm:
            x = self.norm(_norm(ends, "final_norm"), x)
        if "project_out" in ends.matrices:
            x = self.linear(ends.matrices["project_out"], x)
        scores = self.head(ends.matrices["embedding" if block.tied_head else "head"], x)
        if block.logit_scale != 1.0:
            scores *= np.float32(block.logit_scale)
        if block.logit_softcap is not None:
            scores = np.float32(block.logit_softcap) * np.tanh(scores / np.float32(block.logit_softcap))
        return scores

    def _before(self, layer: LayerSpec, tensors: Tensors, norm: str, x: Tensor) -> Tensor:
        """The input of attention or FFN, of the states x."""
        return self.norm(_norm(tensors, norm), x) if layer.norms in ("input", "both") else x

    def _behind(self, layer: LayerSpec, tensors: Tensors, norm: str, y: Tensor) -> Tensor:
        """The part of attention's or FFN's output y that is added to the states."""
        return self.norm(_norm(tensors, norm), y) if layer.norms in ("output", "both") else y

    def _add(self, x: Tensor, y: Tensor) -> None:
        """x += y, which may be changed."""
        if self._block.residual_scale != 1.0:
            y *= self._block.residual_scale
        x += y

    def _project(
        self, layer: LayerSpec, tensors: Tensors, x: Tensor, linear: Linear, positions: Positions
    ) -> Projected:
        mixer = layer.attention
        made = Projected(*(self.empty(len(x), width) for width in (mixer.query_dim, mixer.kv_dim, mixer.kv_dim)))
        for rows in _parts(len(x)):
            inputs = self._before(layer, tensors, "attention_norm", x[rows])
            for name, out in zip(("query", "key", "value"), made, strict=True):
                out[rows] = linear(name, inputs)
        turns_first = mixer.query_key_norm == "turned_head"
        scale = 1.0 if turns_first else mixer.query_scale

        def norm_heads() -> None:
            self.norm_heads(_norm(tensors, "query_norm"), made.queries, mixer.heads, mixer.query_key_norm)
            self.norm_heads(_norm(tensors, "key_norm"), made.keys, mixer.kv_heads, mixer.query_key_norm)

        if mixer.query_key_norm != "none" and not turns_first:
            norm_heads()
        if mixer.rotary is not None:
            self.rotate(made.queries, mixer.heads, positions, mixer.rotary, scale)
            self.rotate(made.keys, mixer.kv_heads, positions, mixer.rotary)
        if turns_first:
            norm_heads()
        if (turns_first or mixer.rotary is None) and mixer.query_scale != 1.0:
            made.queries.mul_(mixer.query_scale)
        return made

    # Operations; those that return nothing work in place ------------------------------------------------------------

    def task(self) -> AbstractContextManager[None]:
        return self._device.task()

    def empty(self, rows: int, width: int) -> Tensor:
        return torch.empty((rows, width), dtype=self._device.dtype, device=self._device.device)

    def linear(self, matrix: Matrix, x: Tensor, *, decoding: bool = False) -> Tensor:
        bias = None if matrix.bias is None else matrix.bias.to(x.dtype)
        if matrix.packing is None:
            return functional.linear(x, matrix.array, bias)
        packed = PackedMatrix(matrix.array, matrix.rows, matrix.columns, matrix.packing)
        if matrix.packing.by_inputs:
            weights = torch.cat([packed.unpack(part).to(x.dtype) for part in packed.parts()])
            return functional.linear(x, weights.T, bias)
        out = self.empty(len(x), matrix.rows)
        for part in packed.parts():
            weights = packed.unpack(part).to(x.dtype)
            out[:, part] = functional.linear(x, weights, None if bias is None else bias[part])
        return out

    def head(self, matrix: Matrix, x: Tensor) -> NDArray[np.float32]:
        """As `linear`, beside the device, and not rounded to the model's dtype."""
        made = self._logits(matrix, x)
        return self._device.to_host(made if matrix.bias is None else made + matrix.bias)

    def _logits(self, matrix: Matrix, x: Tensor) -> Tensor:
        head: Tensor = matrix.array
        if self._wide_products:
            return torch.mm(x, head.t(), out_dtype=torch.float32)
        out = torch.empty((len(x), matrix.rows), dtype=torch.float32, device=x.device)
        for first in range(0, matrix.rows, _HEAD_ROWS):
            part = slice(first, min(first + _HEAD_ROWS, matrix.rows))
            torch.mm(x.float(), head[part].float().t(), out=out[:, part])
        return out

    def norm(self, norm: Norm, x: Tensor) -> Tensor:
        wide, epsilon = x.float(), self._block.norm_epsilon
        if self._block.norm == "layer":
            return functional.layer_norm(wide, wide.shape[-1:], norm.weight, norm.bias, epsilon).to(x.dtype)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
        if norm.weight is not None:
            wide *= norm.weight
        if norm.bias is not None:
            wide += norm.bias
        return wide.to(x.dtype)

    def norm_heads(self, norm: Norm, x: Tensor, heads: int, kind: str) -> None:
        if kind == "projection":
            x.copy_(self.norm(norm, x))
            return
        turned = x.view(len(x), heads, -1)
        if kind == "heads":
            norm = Norm(*(None if part is None else part.view(heads, -1) for part in (norm.weight, norm.bias)))
        turned.copy_(self._norm_of_heads(norm, turned))

    def _norm_of_heads(self, norm: Norm, x: Tensor) -> Tensor:
        """x [rows, heads, head_dim], each head normalized; weight and bias [head_dim] or [heads, head_dim]."""
        made = self.norm(Norm(None, None), x.float())
        made = made if norm.weight is None else made * norm.weight
        return made if norm.bias is None else made + norm.bias

    def rotate(self, x: Tensor, heads: int, positions: NDArray[np.int64], rotary: Rotary, factor: float = 1.0) -> None:
        for first in range(0, len(x), ROWS_TOGETHER):
            part = slice(first, first + ROWS_TOGETHER)
            self._rotate(x[part], heads, positions[part], rotary, factor)

    def _rotate(self, x: Tensor, heads: int, positions: NDArray[np.int64], rotary: Rotary, factor: float) -> None:
        dims = rotary.dims
        angles = self._device.from_host(positions).float()[:, None, None] * self._frequencies[rotary]
        cosines, sines = angles.cos() * rotary.scaling, angles.sin() * rotary.scaling
        turned = x.view(len(x), heads, -1)
        wide = turned.float()
        if rotary.style == "half":
            first, second = wide[..., : dims // 2], wide[..., dims // 2 : dims]
        else:
            first, second = wide[..., 0:dims:2], wide[..., 1:dims:2]
        ahead, behind = first * cosines - second * sines, second * cosines + first * sines
        first.copy_(ahead)
        second.copy_(behind)
        turned.copy_(wide * factor)

    def activate(self, x: Tensor, gate: Tensor | None, threshold: float) -> None:
        kind = self._block.activation
        driver = x if gate is None else gate
        made = driver * (driver > threshold) if kind == "fatrelu" else _ACTIVATIONS[kind](driver)
        if gate is None:
            x.copy_(made)
        else:
            x.copy_(made * (torch.relu(x) if kind == "drelu" else x))

    def rounded(self, value: float) -> float:
        return float(torch.tensor(value, dtype=self._device.dtype))

    def from_host(self, values: HostArray) -> Tensor:
        return self._device.from_host(values)

    def to_host(self, x: Tensor, out: HostArray | None = None) -> HostArray:
        return self._device.to_host(x, out)

    def use(self, x: Tensor) -> Tensor:
        return self._device.use(x)

    def copy(self, x: Tensor) -> Tensor:
        return x.clone()

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(tuple(parts))

    def rows(self, x: Tensor, index: NDArray[np.int64]) -> Tensor:
        return x[self._device.from_host(index)]


def _norm(tensors: Tensors, name: str) -> Norm:
    vectors: Any = tensors.vectors
    return Norm(vectors.get(f"{name}.weight"), vectors.get(f"{name}.bias"))


def _parts(count: int) -> list[slice]:
    return [slice(first, min(first + ROWS_TOGETHER, count)) for first in range(0, count, ROWS_TOGETHER)]


def lacking(block: BlockSpec) -> list[str]:
    """The traits of a block that torch's operations lack, by name."""
    mixers = block.attentions
    unknown = [
        each.name
        for of in (block, mixers[0])
        for each in fields(of)
        if each.name not in _KNOWN and getattr(of, each.name) != each.default
    ]
    if len({(mixer.heads, mixer.kv_heads, mixer.head_dim, mixer.softcap, mixer.alibi) for mixer in mixers}) > 1:
        unknown.append("layers that differ in heads")
    if len(mixers) < len(block.layers) or any(not layer.neurons or layer.second for layer in block.layers):
        unknown.append("layers of which some keep a state, or lack a part")
    if any(mixer.window is not None for mixer in mixers):
        unknown.append("sliding windows")
    if block.experts is not None:
        unknown.append("mixtures of experts")
    known = block.activation in (*_ACTIVATIONS, "fatrelu")
    return unknown + ([] if known else [f"activation {block.activation}"])


def working_nbytes(
    shape: ModelShape, rows: int, sequences: int, positions: int, *, packs: tuple[bool, bool], sparse: bool
) -> int:
    """Bytes that torch takes of the device for a batch's worst moment: `packs` of weights and cache."""
    shape = shape.largest
    item, wide, part = shape.dtype_bytes, 4, min(rows, ROWS_TOGETHER)
    attention = rows * (2 * shape.query_dim + 2 * shape.kv_dim) * item
    inputs = part * max(shape.ffn, shape.hidden, shape.query_dim) * wide
    ffn = part * (shape.ffn * (1 + shape.gated) + 2 * shape.hidden) * item + inputs
    arrays = max(
        rows * 3 * shape.hidden * item,  # of the embedding
        attention + part * shape.hidden * item + inputs,
        ffn + rows * shape.query_dim * item,
        sequences * (shape.vocab * wide + 2 * shape.hidden * item),
    )
    normed = 3 * ROWS_TOGETHER * max(shape.hidden, shape.query_dim) * wide
    prompt = 6 * positions * shape.query_dim * item  # a sequence's attention, keys and values for every head
    weights = 4096 * max(shape.hidden, shape.ffn, shape.query_dim) * (2 * wide + item) if packs[0] else 0
    cache = sequences * positions * shape.kv_dim
    attended = cache * (3 * wide + 2 * item) if packs[1] else 0
    if sparse:
        attended += 2 * cache * wide + 4 * sequences * shape.heads * positions * (wide + shape.head_dim)
    head = sequences * shape.vocab * wide + _HEAD_ROWS * shape.hidden * wide
    return arrays + max(normed, prompt) + max(weights, attended, head) + _SPARE


def _has_wide_products(device: TorchDevice) -> bool:
    """True where torch multiplies 16-bit matrices into fp32 on the device (CUDA, from torch 2.8 on)."""
    if device.dtype == torch.float32:
        return False
    one = torch.zeros((16, 16), dtype=device.dtype, device=device.device)
    try:
        torch.mm(one, one, out_dtype=torch.float32)
    except (TypeError, RuntimeError):  # NotImplementedError is a RuntimeError
        return False
    return True
