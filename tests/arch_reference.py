"""A decoder as its `BlockSpec` says, in fp32 and in the plainest torch: the specification that the native core meets.

Reads the converted model directory alone, so it also shows that the canonical tensors are the right ones.
"""

from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import layer_norm, relu, silu

from flashllm.arch.spec import BlockSpec
from flashllm.base.dtypes import WEIGHT_DTYPES, cast
from flashllm.format.model_dir import ModelDir
from flashllm.format.model_files import FFN, RESIDENT, ffn_tensor
from flashllm.format.rows import unpack_rows
from flashllm.format.safetensors import open_safetensors

ACTIVATIONS = {"relu": relu, "squared_relu": lambda h: relu(h).square(), "silu": silu}


class ReferenceDecoder:
    """The model in a directory, all of it in memory."""

    def __init__(self, path: Path) -> None:
        self.model = ModelDir.open(path)
        self.block: BlockSpec = self.model.block
        self.tensors = self._read(path / RESIDENT)
        layout = self.model.manifest.rows
        self.ffn = []
        with open_safetensors(path / FFN) as file:
            for layer in range(self.model.architecture.num_layers):
                rows = np.empty((layout.num_rows, layout.stride), np.uint8)
                file.read_into(file.header.tensors[ffn_tensor(layer)], 0, rows.reshape(-1).data)
                parts = unpack_rows(layout, rows[: layout.d_ff])
                self.ffn.append({name: self._fp32(part) for name, part in parts.items()})

    def _fp32(self, values):
        return torch.from_numpy(np.array(cast(values, self.model.dtype, WEIGHT_DTYPES["float32"])))

    def _read(self, path):
        tensors = {}
        with open_safetensors(path) as file:
            for name, info in file.header.tensors.items():
                if not name.startswith("flashllm."):
                    values = np.empty(info.shape, self.model.dtype.storage)
                    file.read_into(info, 0, values.reshape(-1).view(np.uint8).data)
                    tensors[name] = self._fp32(values)
        return tensors

    def logits(self, ids: list[int]) -> torch.Tensor:
        """[tokens, vocab] of one sequence."""
        block, tensors = self.block, self.tensors
        positions = torch.arange(len(ids))
        h = tensors["embedding.weight"][ids] * block.embedding_scale
        if "project_in.weight" in tensors:
            h = self._linear("project_in", h)
        if block.positions == "learned":
            h = h + tensors["positions.weight"][positions + block.position_offset]
        for layer in range(len(self.ffn)):
            at = f"layers.{layer}."
            if block.pre_norm:
                h = h + self._attention(at, self._norm(at + "attention_norm", h), positions)
                h = h + self._ffn(layer, self._norm(at + "ffn_norm", h))
            else:
                h = self._norm(at + "attention_norm", h + self._attention(at, h, positions))
                h = self._norm(at + "ffn_norm", h + self._ffn(layer, h))
        if block.final_norm:
            h = self._norm("final_norm", h)
        if "project_out.weight" in tensors:
            h = self._linear("project_out", h)
        return h @ tensors["embedding.weight" if block.tied_head else "head.weight"].T

    def _linear(self, name, x):
        bias = self.tensors.get(name + ".bias")
        return torch.nn.functional.linear(x, self.tensors[name + ".weight"], bias)

    def _norm(self, name, x):
        weight, bias = (self.tensors.get(f"{name}.{part}") for part in ("weight", "bias"))
        if self.block.norm == "layer":
            return layer_norm(x, x.shape[-1:], weight, bias, self.block.norm_epsilon)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.block.norm_epsilon) * weight

    def _attention(self, at, x, positions):
        block = self.block
        query = self._linear(at + "query", x).view(len(x), block.heads, block.head_dim)
        key, value = (self._linear(at + part, x).view(len(x), block.kv_heads, -1) for part in ("key", "value"))
        query, key = self._rotate(query, positions) * block.query_scale, self._rotate(key, positions)
        key, value = (states.repeat_interleave(block.heads // block.kv_heads, 1) for states in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key)
        scores = scores.masked_fill(positions[None, :, None] < positions[None, None, :], -torch.inf)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)
        return self._linear(at + "out", mixed.reshape(len(x), -1))

    def _rotate(self, states, positions):
        block = self.block
        if block.positions != "rotary":
            return states
        assert block.rotary_style == "half"
        angles = positions[:, None].float() * torch.tensor(block.inverse_frequency)
        cos, sin = (part(angles)[:, None] * block.rotary_scaling for part in (torch.cos, torch.sin))
        half = block.rotary_dims // 2
        first, second, rest = states[..., :half], states[..., half : 2 * half], states[..., 2 * half :]
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)

    def _ffn(self, layer, x):
        matrices, activation = self.ffn[layer], ACTIVATIONS[self.block.activation]  # [d_ff, d_model], down too
        names = [f"layers.{layer}.ffn.{part}_bias" for part in ("up", "gate", "down")]
        up, gate, down = (self.tensors.get(name, torch.zeros(())) for name in names)
        pre = x @ matrices["up"].T + up
        hidden = activation(x @ matrices["gate"].T + gate) * pre if self.block.gated else activation(pre)
        return hidden @ matrices["down"] + down
