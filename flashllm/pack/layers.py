"""The inputs of each matrix on real text: a model's layers over calibration tokens, one at a time.

A layer is read, run once while the sums x xᵀ of what goes into its products are gathered, given back changed, and run
again, so that the next layer sees what the packed model will give it. An expert's sums are those of the tokens that are
routed to it; a layer is run more often where those of all experts take too much memory. Only one layer is in memory,
and the states of all calibration tokens. Attention is causal within a sequence.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle, islice
from typing import Any, NamedTuple
from typing import cast as cast_type

import numpy as np
from numpy.typing import NDArray

from flashllm import _core
from flashllm._core import PAGE_TOKENS
from flashllm.arch.registry import bundle_names
from flashllm.arch.tensors import attentions
from flashllm.base.dtypes import WEIGHT_DTYPE_BY_CODE, cast
from flashllm.errors import UnsupportedModelError, UsageError
from flashllm.offload.runtime.host_ops import HostOps, Watch
from flashllm.offload.runtime.ops import Matrix, Projected, Tensors
from flashllm.offload.runtime.tiers.source import WeightSource, matrix_name
from flashllm.offload.runtime.tiers.states import LentStates, floats
from flashllm.offload.runtime.tiers.weight_plan import is_vector

Array = NDArray[Any]
Floats = NDArray[np.float32]
Sums = list[Floats]  # of x xᵀ, over spans of the inputs: [span, span] each
# (matrix's name, weights [out, in], what goes into it) -> weights. What goes into an expert's is None where fewer
# tokens are routed to it than the matrix has inputs: feedback from so few makes it worse on others.
Rounder = Callable[[str, Floats, Sums | None], Floats]

# Rounded to the nearest, as feedback makes them worse: a sequence's first token takes most of the attention of all
# others (Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023), so an error of its value goes
# into every token, while in the sums it counts as one of many.
NEAREST = ("value", "key_up")  # the latter, of latent attention, is a matrix for each head
_SUMS_NBYTES = 512 << 20  # of experts, gathered together
# Matrices that take what another takes; those of NEAREST only have to be named. Of other matrices of a mixer nobody
# sees the inputs.
_SAME_INPUTS = {
    **dict.fromkeys(("key", "value", "key_up", "out_gate"), "query"),
    **dict.fromkeys((f"state.{name}" for name in ("key", "value", "out_gate")), "state.query"),
    "gate": "up",
}
# Where the query's projection has two halves.
_SAME_LATENT_INPUTS = _SAME_INPUTS | dict.fromkeys(("key", "out_gate"), "query_down")
_SEEN = ("query_down", "query", "out", "state.query", "state.out")  # one after the other, those that a layer has


class Layer(NamedTuple):
    """One layer as it is read: matrices, and vectors, by canonical name without the layer's."""

    number: int
    matrices: dict[str, Array]
    vectors: Mapping[str, Floats]
    others: Mapping[str, Array]  # matrices that stay as they are: a router's, ...
    bundles: Mapping[str, slice]  # neurons, by how their matrices' names begin: "" of all, or "experts.0." and so on

    def parts(self) -> Iterator[tuple[str, str, Array]]:
        """(bundle, name, matrix) of each matrix; of experts, each one's, as views."""
        for name, array in self.matrices.items():
            if name not in ("up", "gate", "down"):
                yield "", name, array
                continue
            for bundle, neurons in self.bundles.items():
                yield bundle, name, array[:, neurons] if name == "down" else array[neurons]

    def tensors(self) -> Tensors:
        arrays = self.matrices | dict(self.others)
        return Tensors({name: Matrix.of(array) for name, array in arrays.items()}, self.vectors)


class _Inputs:
    """Sums over the inputs of a matrix, `width` wide; none where there are fewer than `least` tokens."""

    def __init__(self, width: int, span: int | None, least: int) -> None:
        span = span or width
        sizes = [min(span, width - first) for first in range(0, width, span)]
        self._sums = [np.zeros((size, size), np.float32) for size in sizes]
        self.width, self._tokens, self._least = width, 0, least

    def add(self, x: Floats) -> None:
        if x.shape[1] != self.width:
            raise ValueError(f"inputs {x.shape[1]} wide are not those of a matrix of {self.width}")
        first = 0
        for total in self._sums:
            part = x[:, first : first + len(total)]
            with np.errstate(over="ignore", invalid="ignore"):  # sums that are not finite are refused
                np.add(total, part.T @ part, out=total)
            first += len(total)
        self._tokens += len(x)

    @property
    def sums(self) -> Sums | None:
        return self._sums if self._tokens >= self._least else None


class Calibration:
    """A model's layers in turn over `sequences` of token ids, equally long.

    `span`: sums are kept of so many neighbouring inputs of a matrix together; None: of all.
    """

    def __init__(
        self, source: WeightSource, sequences: Sequence[Sequence[int]], *, threads: int, span: int | None = None
    ) -> None:
        self._source, self._block, self._span = source, source.block, span
        pool = _core.ThreadPool(threads)
        self._ops = HostOps(self._block, source.dtype.name, pool)
        length = len(sequences[0])
        self._positions = np.arange(length, dtype=np.int64)
        self._attention = [
            _core.BatchAttention(layer.mixer, source.dtype.name, pool) if attentions(layer) else None
            for layer in self._block.layers
        ]
        self._pages = -(-length // PAGE_TOKENS)
        self._arena = _core.allocate(self._pages * max(each.page_nbytes for each in self._attention if each))
        self._states = self._embedded(sequences)

    def read(self, layer: int) -> Layer:
        prefix, shapes = f"layers.{layer}.", self._source.shapes
        names = [name for name in shapes if name.startswith(prefix) and not is_vector(name)]
        found = {name: np.empty(shapes[name], self._source.read_dtype(name).storage) for name in names}
        self._source.read(found)
        short = {name.removeprefix(prefix).removesuffix(".weight"): array for name, array in found.items()}
        matrices = {name: short.pop(name) for name in self._source.matrices(layer)}
        vectors = self._vectors(lambda name: name.startswith(prefix))
        of_layer = {name.removeprefix(prefix): values for name, values in vectors.items()}
        return Layer(layer, matrices, of_layer, short, self._bundles(layer))

    def _bundles(self, layer: int) -> dict[str, slice]:
        architecture = self._source.architecture
        names = [name.removeprefix(f"layers.{layer}.") for name in bundle_names(architecture, layer)]
        first = [architecture.expert_size * i for i in range(len(names))]
        return dict(zip(names, map(slice, first, [*first[1:], architecture.width(layer)]), strict=True))

    def _vectors(self, wanted: Callable[[str], bool]) -> dict[str, Floats]:
        names = [name for name in self._source.shapes if is_vector(name) and wanted(name)]
        return {name: cast_type(Floats, self._source.vector(name)) for name in names}

    def round(self, layer: Layer, rounder: Rounder) -> None:
        """Change the layer's matrices by `rounder`, which sees what goes into each. UnsupportedModelError for one that
        it cannot round, or whose inputs are not finite."""
        widths = {bundle + name: array.shape[1] for bundle, name, array in layer.parts()}

        def inputs(bundle: str, *names: str) -> dict[str, _Inputs]:
            taken = {bundle + name: widths[bundle + name] for name in names}
            return {name: _Inputs(width, self._span, width if bundle else 0) for name, width in taken.items()}

        mixers = inputs("", *(name for name in _SEEN if name in layer.matrices))
        turns: dict[int, Iterator[_Inputs]] = {-1: cycle(mixers.values())}
        if "up" not in layer.matrices:
            self._gather(layer, turns)
            self._change(layer, mixers, rounder)
            return
        first, *_ = layer.bundles
        nbytes = 4 * (widths[first + "up"] ** 2 + widths[first + "down"] ** 2)
        bundles = iter(layer.bundles.items())
        while chosen := list(islice(bundles, max(1, _SUMS_NBYTES // nbytes))):
            gathered: dict[str, _Inputs] = {}
            for bundle, neurons in chosen:
                of_bundle = inputs(bundle, "up", "down")
                turns[neurons.start] = cycle(of_bundle.values())
                gathered |= of_bundle
            self._gather(layer, turns)
            self._change(layer, gathered, rounder)
            turns = {}
        self._change(layer, mixers, rounder)

    def _gather(self, layer: Layer, turns: Mapping[int, Iterator[_Inputs]]) -> None:
        """Run the layer; its products' inputs go to the next of `turns`, by the first of their neurons."""

        def watch(x: Floats, neuron: int) -> None:
            if neuron in turns:
                next(turns[neuron]).add(x)

        tensors = layer.tensors()
        for states in self._states:
            self._run(layer.number, tensors, states.copy(), watch)

    def _change(self, layer: Layer, inputs: Mapping[str, _Inputs], rounder: Rounder) -> None:
        """Change the matrices that take any of `inputs`."""
        dtype, wide = self._source.dtype, WEIGHT_DTYPE_BY_CODE["F32"]
        same = _SAME_LATENT_INPUTS if "query_down" in layer.matrices else _SAME_INPUTS
        for bundle, name, array in layer.parts():
            taken = inputs.get(bundle + same.get(name, name))
            if taken is not None and (name in NEAREST or taken.width == array.shape[1]):
                values = np.ascontiguousarray(cast(array, dtype, wide), np.float32)
                try:
                    array[...] = cast(rounder(bundle + name, values, taken.sums), wide, dtype)
                except (OverflowError, ValueError) as error:
                    raise UnsupportedModelError(
                        f"{matrix_name(layer.number, bundle + name)}: {error}; leave these weights at 16 bits, or "
                        "convert without --calibrate"
                    ) from error

    def advance(self, layer: Layer) -> None:
        """Put the calibration tokens through a layer as it now is."""
        tensors = layer.tensors()
        self._states = [self._run(layer.number, tensors, states) for states in self._states]

    def logits(self) -> Iterator[Floats]:
        """fp32 logits [tokens, vocab] of each sequence, after all have been put through every layer."""
        names = ("project_out", "embedding" if self._block.tied_head else "head")
        vectors = self._vectors(lambda name: name.startswith(("final_norm.", "head.")))
        ends = self._ends(names, vectors)
        for states in self._states:
            yield self._ops.logits(ends, states)

    def _run(self, number: int, tensors: Tensors, states: Array, watch: Watch | None = None) -> Array:
        attention, sinks = self._attention[number], tensors.vectors.get("sinks")
        kept = floats([self._block.layers[number]])
        recurrent = LentStates(np.empty((1, *kept), np.float32), np.zeros(1, np.int32)) if any(kept) else None

        def attend(first: int, made: Projected, out: Array) -> None:
            assert attention is not None
            arena = self._arena[: self._pages * attention.page_nbytes].reshape(self._pages, -1)
            positions = self._positions[first : first + len(out)].astype(np.int32)
            attention.write(made.keys, made.values, arena, positions // PAGE_TOKENS, positions)
            attention.prompt(made.queries, arena, 0, first, out, sinks)

        return self._ops.layer(number, tensors, states, self._positions, attend, states=recurrent, watch=watch)

    def _embedded(self, sequences: Sequence[Sequence[int]]) -> list[Array]:
        """Each sequence's states [tokens, d_model] before the first layer."""
        table = self._table("embedding")
        vectors = self._vectors(lambda name: name.startswith("embedding_norm."))
        ends = self._ends(("positions", "project_in"), vectors)
        foreign = next((id for ids in sequences for id in ids if id >= len(table)), None)
        if foreign is not None:
            raise UsageError(f"token id {foreign} is not in the model's vocabulary of {len(table)}")
        chosen = [np.ascontiguousarray(table[np.asarray(ids, np.int64)]) for ids in sequences]
        return [self._ops.embed(ends, rows, self._positions) for rows in chosen]

    def _ends(self, names: Sequence[str], vectors: Mapping[str, Floats]) -> Tensors:
        there = [name for name in names if f"{name}.weight" in self._source.shapes]
        return Tensors({name: Matrix.of(self._table(name)) for name in there}, vectors)

    def _table(self, name: str) -> Array:
        array = np.empty(self._source.shapes[f"{name}.weight"], self._ops.storage)
        self._source.read({f"{name}.weight": array})
        return array
