"""A decoder layer by torch's operations, and what comes before the first and after the last: an `Ops`.

It mirrors the native core's layer (csrc/model/layer.cpp), for the traits of a block that `torch_ops.py` knows. Products
go through the weights in parts of at most ROWS_TOGETHER rows, so that the working memory does not grow with the batch.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashllm.arch.spec import LayerSpec
from flashllm.offload.runtime.accelerator.device import Tensor
from flashllm.offload.runtime.accelerator.torch_ops import ROWS_TOGETHER, Norm, TorchOps
from flashllm.offload.runtime.ops import Attend, Positions, Projected, Tensors
from flashllm.offload.runtime.tiers.states import LentStates

Linear = Callable[[str, Tensor], Tensor]  # a matrix's name, its inputs


class TorchLayers(TorchOps):
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


def _norm(tensors: Tensors, name: str) -> Norm:
    vectors: Any = tensors.vectors
    return Norm(vectors.get(f"{name}.weight"), vectors.get(f"{name}.bias"))


def _parts(count: int) -> list[slice]:
    return [slice(first, min(first + ROWS_TOGETHER, count)) for first in range(0, count, ROWS_TOGETHER)]
