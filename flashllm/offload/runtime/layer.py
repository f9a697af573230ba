"""A decoder layer over a set of operations, and what comes before the first and after the last.

`BlockSpec` (flashllm/arch/spec.py) says where a layer has its norms, and whether attention and FFN add to the same
states. Rows are tokens of any sequences; attention, which alone looks at other rows, is the caller's. Products go
through the weights in parts of at most ROWS_TOGETHER rows, so that the working memory does not grow with the batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flashllm.arch.spec import BlockSpec, LayerSpec
from flashllm.offload.runtime.ops import Array, Matrix, Norm, Ops

Positions = NDArray[np.int64]
ROWS_TOGETHER = 1024


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """What one layer computes with: query, key, value, out, up, (gate,) down; the norms it has, by canonical name."""

    matrices: Mapping[str, Matrix]
    norms: Mapping[str, Norm]


class Projected(NamedTuple):
    """A layer's queries [rows, heads * head_dim], keys and values [rows, kv_heads * head_dim]."""

    queries: Array
    keys: Array
    values: Array


Attend = Callable[[Projected, Array], None]  # keeps keys and values; fills [rows, heads * head_dim]


def run_layer(
    ops: Ops,
    block: BlockSpec,
    layer: LayerSpec,
    weights: LayerTensors,
    x: Array,
    *,
    positions: Positions,
    attend: Attend,
    decoding: bool = False,
) -> Array:
    """x [rows, d_model], changed, through one layer. `positions` [rows]; `decoding`: of `Ops.linear`."""

    def linear(name: str, inputs: Array) -> Array:
        return ops.linear(weights.matrices[name], inputs, decoding=decoding)

    mixed = ops.empty(len(x), block.query_dim)
    attend(_project(ops, block, layer, weights, x, linear=linear, positions=positions), mixed)

    def attention(rows: slice) -> Array:
        return _behind(ops, block, weights, "attention_output_norm", linear("out", mixed[rows]))

    def ffn(rows: slice) -> Array:
        inputs = _before(ops, block, weights, "attention_norm" if block.shared_norm else "ffn_norm", x[rows])
        hidden = linear("up", inputs)
        gate = linear("gate", inputs) if block.gated else None
        ops.activate(hidden, gate, layer.activation_threshold)
        return _behind(ops, block, weights, "ffn_output_norm", linear("down", hidden))

    if block.parallel:
        for rows in _parts(len(x)):
            made = ffn(rows)
            ops.add(made, attention(rows))
            _add(ops, block, x[rows], made)
        return x
    for norm, part in (("attention_norm", attention), ("ffn_norm", ffn)):
        for rows in _parts(len(x)):
            _add(ops, block, x[rows], part(rows))
            if block.norms == "sum":
                x[rows] = ops.norm(weights.norms[norm], x[rows])
    return x


def _before(ops: Ops, block: BlockSpec, weights: LayerTensors, norm: str, x: Array) -> Array:
    """What attention or FFN reads of the states x."""
    return ops.norm(weights.norms[norm], x) if block.norms in ("input", "both") else x


def _behind(ops: Ops, block: BlockSpec, weights: LayerTensors, norm: str, y: Array) -> Array:
    """What is added to the states of attention's or FFN's output y."""
    return ops.norm(weights.norms[norm], y) if block.norms in ("output", "both") else y


def _add(ops: Ops, block: BlockSpec, x: Array, y: Array) -> None:
    """x += y, which may be changed."""
    if block.residual_scale != 1.0:
        ops.scale(y, block.residual_scale)
    ops.add(x, y)


def _project(
    ops: Ops,
    block: BlockSpec,
    layer: LayerSpec,
    weights: LayerTensors,
    x: Array,
    *,
    linear: Callable[[str, Array], Array],
    positions: Positions,
) -> Projected:
    made = Projected(*(ops.empty(len(x), width) for width in (block.query_dim, block.kv_dim, block.kv_dim)))
    for rows in _parts(len(x)):
        inputs = _before(ops, block, weights, "attention_norm", x[rows])
        for name, out in zip(("query", "key", "value"), made, strict=True):
            out[rows] = linear(name, inputs)
    if block.query_key_norm != "none":
        ops.norm_heads(weights.norms["query_norm"], made.queries, block.heads)
        ops.norm_heads(weights.norms["key_norm"], made.keys, block.kv_heads)
    if layer.rotary is not None:
        ops.rotate(made.queries, block.heads, positions, layer.rotary, block.query_scale)
        ops.rotate(made.keys, block.kv_heads, positions, layer.rotary)
    elif block.query_scale != 1.0:
        ops.scale(made.queries, block.query_scale)
    return made


def _parts(count: int) -> list[slice]:
    return [slice(first, min(first + ROWS_TOGETHER, count)) for first in range(0, count, ROWS_TOGETHER)]


def embed(ops: Ops, block: BlockSpec, x: Array, positions: Array | None, project_in: Matrix | None) -> Array:
    """Hidden states [rows, d_model] of the embedding's rows x, changed, and the position table's, where it has one."""
    if block.embedding_scale != 1.0:
        ops.scale(x, ops.rounded(block.embedding_scale))
    if project_in is not None:
        x = ops.linear(project_in, x)
    if positions is not None:
        ops.add(x, positions)
    return x


def logits(
    ops: Ops, block: BlockSpec, x: Array, *, norm: Norm | None, project_out: Matrix | None, head: Matrix
) -> NDArray[np.float32]:
    """fp32 logits [rows, vocab] after states x [rows, d_model]."""
    if norm is not None:
        x = ops.norm(norm, x)
    if project_out is not None:
        x = ops.linear(project_out, x)
    scores = ops.logits(head, x)
    if block.logit_scale != 1.0:
        scores *= np.float32(block.logit_scale)
    if block.logit_softcap is not None:
        scores = np.float32(block.logit_softcap) * np.tanh(scores / np.float32(block.logit_softcap))
    return scores
