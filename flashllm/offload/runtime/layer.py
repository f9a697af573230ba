"""A decoder layer over a set of operations, and what comes before the first and after the last.

    pre-norm:  x += out(attention(norm(x)));  x += FFN(ffn_norm(x))
    post-norm: x = norm(x + out(attention(x)));  x = ffn_norm(x + FFN(x))

Rows are tokens of any sequences; attention, which alone looks at other rows, is the caller's. Products go through the
weights in parts of at most ROWS_TOGETHER rows, so that the working memory does not grow with the batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flashllm.arch.spec import BlockSpec
from flashllm.offload.runtime.ops import Array, Matrix, Norm, Ops

Positions = NDArray[np.int64]
ROWS_TOGETHER = 1024


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """What one layer computes with: query, key, value, out, up, (gate,) down; attention_norm, ffn_norm."""

    matrices: Mapping[str, Matrix]
    norms: Mapping[str, Norm]


class Projected(NamedTuple):
    """A layer's queries [rows, heads * head_dim], keys and values [rows, kv_heads * head_dim]."""

    queries: Array
    keys: Array
    values: Array


Attend = Callable[[Projected, Array], None]  # keeps keys and values; fills [rows, heads * head_dim]


def run_layer(
    ops: Ops, block: BlockSpec, weights: LayerTensors, x: Array, *, positions: Positions, attend: Attend
) -> Array:
    """x [rows, d_model], changed, through one layer. `positions` [rows]."""
    mixed = ops.empty(len(x), block.query_dim)
    attend(_project(ops, block, weights, x, positions=positions), mixed)
    _add_parts(ops, block, weights.norms["attention_norm"], x, lambda r: ops.linear(weights.matrices["out"], mixed[r]))

    def ffn(rows: slice) -> Array:
        inputs = ops.norm(weights.norms["ffn_norm"], x[rows]) if block.pre_norm else x[rows]
        hidden = ops.linear(weights.matrices["up"], inputs)
        ops.activate(hidden, ops.linear(weights.matrices["gate"], inputs) if block.gated else None)
        return ops.linear(weights.matrices["down"], hidden)

    _add_parts(ops, block, weights.norms["ffn_norm"], x, ffn)
    return x


def _project(ops: Ops, block: BlockSpec, weights: LayerTensors, x: Array, *, positions: Positions) -> Projected:
    made = Projected(*(ops.empty(len(x), width) for width in (block.query_dim, block.kv_dim, block.kv_dim)))
    for rows in _parts(len(x)):
        inputs = ops.norm(weights.norms["attention_norm"], x[rows]) if block.pre_norm else x[rows]
        for name, out in zip(("query", "key", "value"), made, strict=True):
            out[rows] = ops.linear(weights.matrices[name], inputs)
    if block.positions == "rotary":
        ops.rotate(made.queries, block.heads, positions, block.query_scale)
        ops.rotate(made.keys, block.kv_heads, positions)
    elif block.query_scale != 1.0:
        ops.scale(made.queries, block.query_scale)
    return made


def _add_parts(ops: Ops, block: BlockSpec, norm: Norm, x: Array, part: Callable[[slice], Array]) -> None:
    """x += part(rows), part by part, and the norm behind it where the block has it there."""
    for rows in _parts(len(x)):
        ops.add(x[rows], part(rows))
        if not block.pre_norm:
            x[rows] = ops.norm(norm, x[rows])


def _parts(count: int) -> list[slice]:
    return [slice(first, min(first + ROWS_TOGETHER, count)) for first in range(0, count, ROWS_TOGETHER)]


def embed(ops: Ops, block: BlockSpec, x: Array, positions: Array | None, project_in: Matrix | None) -> Array:
    """Hidden states [rows, d_model] of the embedding's rows x, changed, and the position table's, where it has one."""
    if block.embedding_scale != 1.0:
        ops.scale(x, block.embedding_scale)
    if project_in is not None:
        x = ops.linear(project_in, x)
    if positions is not None:
        ops.add(x, positions)
    return x


def logits(ops: Ops, norm: Norm | None, project_out: Matrix | None, head: Matrix, x: Array) -> NDArray[np.float32]:
    """fp32 logits [rows, vocab] after states x [rows, d_model]."""
    if norm is not None:
        x = ops.norm(norm, x)
    if project_out is not None:
        x = ops.linear(project_out, x)
    return ops.logits(head, x)
