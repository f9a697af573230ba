"""What the inputs of each matrix look like on real text: a model's layers over calibration tokens, one at a time.

A layer is read, run once while the sums x xᵀ of what goes into its products are gathered, given back changed, and run
again, so that the next layer sees what the packed model will give it. Only one layer is in memory, and the states of
all calibration tokens. Attention is causal within a sequence.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flashllm import _core
from flashllm.arch.spec import BlockSpec, LayerSpec
from flashllm.base.dtypes import WEIGHT_DTYPE_BY_CODE, cast
from flashllm.offload.runtime.layer import LayerTensors, Projected, embed, logits, run_layer
from flashllm.offload.runtime.native_ops import NativeOps
from flashllm.offload.runtime.ops import Matrix, Norm
from flashllm.offload.runtime.tiers.arrangement import KV_BLOCK
from flashllm.offload.runtime.tiers.source import WeightSource, matrix_name
from flashllm.offload.runtime.tiers.weights import NORMS, bias_name

Array = NDArray[Any]
Floats = NDArray[np.float32]
Sums = list[Floats]  # of x xᵀ, over spans of the inputs: [span, span] each
Rounder = Callable[[str, Floats, Sums], Floats]  # matrix name, weights [out, in], what goes into it -> weights

# Rounded to the nearest, as feedback makes them worse: a sequence's first token takes most of the attention of all
# others (Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023), so an error of its value goes
# into every token, while in the sums it counts as one of many.
NEAREST = ("value",)
_SAME_INPUTS = {"key": "query", "value": "query", "gate": "up"}  # matrices that take what another takes


class Layer(NamedTuple):
    """One layer as it is read: matrices, and vectors, by canonical name without the layer's."""

    spec: LayerSpec
    matrices: dict[str, Array]
    biases: Mapping[str, Floats | None]
    norms: Mapping[str, Norm]

    def tensors(self) -> LayerTensors:
        return LayerTensors(
            {
                name: Matrix(array, array.shape[0], array.shape[1], None, self.biases[name])
                for name, array in self.matrices.items()
            },
            self.norms,
        )


class _Watching(NativeOps):
    """Operations that gather the sums x xᵀ of the inputs of each watched matrix."""

    def __init__(self, block: BlockSpec, dtype: str, pool: _core.ThreadPool, span: int | None) -> None:
        super().__init__(block, dtype, pool)
        self._span = span
        self._sums: Mapping[int, Sums] = {}

    def watch(self, tensors: LayerTensors) -> dict[str, Sums]:
        """The sums, which grow as products are asked for: by the name of the first matrix that takes the inputs."""
        watched = {name: matrix for name, matrix in tensors.matrices.items() if name not in _SAME_INPUTS}
        sums = {name: self._zeros(matrix.columns) for name, matrix in watched.items()}
        self._sums = {id(matrix): sums[name] for name, matrix in watched.items()}
        return sums

    def _zeros(self, inputs: int) -> Sums:
        span = self._span or inputs
        widths = [min(span, inputs - first) for first in range(0, inputs, span)]
        return [np.zeros((width, width), np.float32) for width in widths]

    def linear(self, matrix: Matrix, x: Array, *, decoding: bool = False) -> Array:
        sums = self._sums.get(id(matrix))
        if sums is not None:
            wide, first = np.empty(x.shape, np.float32), 0
            self._elementwise.widen(np.ascontiguousarray(x), wide)
            for total in sums:
                part = wide[:, first : first + len(total)]
                np.add(total, part.T @ part, out=total)
                first += len(total)
        return super().linear(matrix, x, decoding=decoding)


class Calibration:
    """A model's layers in turn over `sequences` of token ids, equally long.

    `span`: sums are kept of so many neighbouring inputs of a matrix together; None: of all.
    """

    def __init__(
        self, source: WeightSource, sequences: Sequence[Sequence[int]], *, threads: int, span: int | None = None
    ) -> None:
        self._source, self._block = source, source.block
        self._pool = _core.ThreadPool(threads)
        self._ops = _Watching(self._block, source.dtype.name, self._pool, span)
        length = len(sequences[0])
        self._positions = np.arange(length, dtype=np.int64)
        self._attention = _core.BatchAttention(
            heads=self._block.heads,
            kv_heads=self._block.kv_heads,
            head_dim=self._block.head_dim,
            dtype=source.dtype.name,
            scale=1.0,  # queries are scaled already
            softcap=self._block.attention_softcap or 0.0,
            layout="plain",
            bits=4,
            pool=self._pool,
            simd="auto",
        )
        blocks = -(-length // KV_BLOCK)
        self._arena = np.asarray(_core.allocate(blocks * self._attention.block_nbytes)).reshape(blocks, -1)
        self._states = self._embedded(sequences)

    def read(self, layer: int) -> Layer:
        """A layer of the source."""
        source = self._source
        matrices = {
            name: np.empty(source.shapes[matrix_name(layer, name)], self._ops.storage) for name in source.matrices
        }
        source.read({matrix_name(layer, name): array for name, array in matrices.items()})
        biases = {name: source.vector(bias_name(layer, name)) for name in source.matrices}
        norms = {name: self._norm(f"layers.{layer}.{name}") for name in NORMS}
        return Layer(self._block.layers[layer], matrices, biases, norms)

    def _norm(self, name: str) -> Norm:
        weight, shift = self._source.vector(f"{name}.weight"), np.float32(self._block.norm_shift)
        return Norm(weight if weight is None else weight + shift, self._source.vector(f"{name}.bias"))

    def round(self, layer: Layer, rounder: Rounder) -> None:
        """Change the layer's matrices by `rounder`, which sees what goes into each."""
        sums = self._ops.watch(tensors := layer.tensors())
        for states in self._states:
            self._run(layer.spec, tensors, states.copy())
        self._ops.watch(LayerTensors({}, {}))
        dtype, wide = self._source.dtype, WEIGHT_DTYPE_BY_CODE["F32"]
        for name, array in layer.matrices.items():
            values = np.ascontiguousarray(cast(array, dtype, wide), np.float32)
            array[...] = cast(rounder(name, values, sums[_SAME_INPUTS.get(name, name)]), wide, dtype)

    def advance(self, layer: Layer) -> None:
        """Put the calibration tokens through a layer as it now is."""
        tensors = layer.tensors()
        self._states = [self._run(layer.spec, tensors, states) for states in self._states]

    def logits(self, sequence: int) -> Floats:
        """fp32 logits [tokens, vocab] of a sequence that has been put through every layer."""
        head = self._table("embedding.weight" if self._block.tied_head else "head.weight")
        project = self._table("project_out.weight")
        assert head is not None
        return logits(
            self._ops,
            self._block,
            self._states[sequence],
            norm=self._norm("final_norm") if self._block.final_norm else None,
            project_out=None if project is None else Matrix(project, project.shape[0], project.shape[1], None, None),
            head=Matrix(head, head.shape[0], head.shape[1], None, self._source.vector("head.bias")),
        )

    def _run(self, spec: LayerSpec, tensors: LayerTensors, states: Array) -> Array:
        def attend(made: Projected, out: Array) -> None:
            positions = self._positions.astype(np.int32)
            self._attention.write(made.keys, made.values, self._arena, positions // KV_BLOCK, positions)
            self._attention.prompt(made.queries, self._arena, 0, 0, out, spec.window or 0)

        result: Array = run_layer(
            self._ops, self._block, spec, tensors, states, positions=self._positions, attend=attend
        )
        return result

    def _embedded(self, sequences: Sequence[Sequence[int]]) -> list[Array]:
        """Each sequence's states [tokens, d_model] before the first layer."""
        table, rows, project = (self._table(f"{name}.weight") for name in ("embedding", "positions", "project_in"))
        assert table is not None
        places = None if rows is None else np.ascontiguousarray(rows[self._positions + self._block.position_offset])
        matrix = None if project is None else Matrix(project, project.shape[0], project.shape[1], None, None)
        chosen = [np.ascontiguousarray(table[np.asarray(ids, np.int64)]) for ids in sequences]
        return [embed(self._ops, self._block, states, places, matrix) for states in chosen]

    def _table(self, name: str) -> Array | None:
        if name not in self._source.shapes:
            return None
        array = np.empty(self._source.shapes[name], self._ops.storage)
        self._source.read({name: array})
        return array
