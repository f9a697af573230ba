"""The expected time of a token, from a memory plan and a profile: reads, products, and what is left.

Per layer: the reader gets one batch for the misses (neighbours merged), while the hits' up products run; behind it, the
rows prefetched for the next layer while this one computes. Everything touched in memory is touched once, resident
weights at the rate of resident products, rows at that of rows gathered. What is read where it lies in a file of another
layout is put into rows by the same cores. Reads during products are slower, and slow the products. The interpreter and
waking threads cost a fixed time a layer. Plain arithmetic; loads and measures nothing.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from flashllm.arch.registry import resident_shapes
from flashllm.format.in_place import lying_experts
from flashllm.format.model_dir import ModelDir
from flashllm.format.model_files import PREDICTORS, RESIDENT
from flashllm.format.rows import RowEncoding, RowLayout, measured_as
from flashllm.format.safetensors import read_header
from flashllm.plan.activity import ExpectedActivity, LayerActivity
from flashllm.plan.memory_plan import MemoryPlan
from flashllm.profile.costs import ReaderChoice
from flashllm.profile.machine import Profile

_CLEARLY_FASTER = 1.03  # a ratio of two estimates; smaller ones are noise
_FACTORS_AS = {"F16": "float16", "I8": "int8_32", "U8": "int4_32"}  # encodings as fast as predictors' factors
TYPICAL_POSITION = 256  # tokens in the KV cache that attention reads, where the context allows as many


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEstimate:
    """Expected seconds, bytes and requests of one token. The seconds are exposed time and sum to `total_s`."""

    io_s: float  # waiting for reads
    compute_s: float
    overhead_s: float
    io_busy_s: float  # reads, overlapped or not
    active: float
    misses: float
    requests: float
    bytes_read: float  # from flash, gaps included
    bytes_touched: float  # in memory

    @property
    def total_s(self) -> float:
        return self.io_s + self.compute_s + self.overhead_s


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseEstimate:
    """The cost of a token that reads every neuron: those kept from memory, the others from flash, in sequence."""

    ffn_nbytes: int  # of all neurons
    bytes_read: int  # those of the neurons that are not kept, as often as a token reads them
    read_bps: float  # of the drive; 0 where it is not known
    products_s: float | None  # None where it is not known

    @property
    def read_s(self) -> float:
        """Seconds of the reads; 0 where nothing is read."""
        return self.bytes_read / self.read_bps if self.bytes_read else 0.0

    @property
    def total_s(self) -> float | None:
        """The longer of reads and products, which go on together; None where it is not known."""
        return None if self.products_s is None else max(self.read_s, self.products_s)


def dense_token(model: ModelDir, plan: MemoryPlan, *, costs: Profile | None) -> DenseEstimate:
    """The expected token of a dense run at the start of a conversation."""
    rows, layouts = model.manifest.rows, model.manifest.layouts
    ffn_nbytes = sum(layout.layer_nbytes for layout in layouts)
    passes = [2 if model.block.sub_norms or layer.twice else 1 for layer in model.block.layers]  # of a layer's rows
    each = zip(layouts, plan.cache_rows, passes, strict=True)
    bytes_read = sum((layout.layer_nbytes - cached * layout.stride) * times for layout, cached, times in each)
    if costs is None or not costs.direct:
        return DenseEstimate(ffn_nbytes=ffn_nbytes, bytes_read=bytes_read, read_bps=0.0, products_s=None)
    products_s = _resident_s(model, costs)
    products_s += ffn_nbytes * _row_s_a_byte(rows, lambda encoding: costs.resident_bps(encoding, model.manifest.dtype))
    products_s += len(layouts) * costs.layer_overhead_s
    return DenseEstimate(
        ffn_nbytes=ffn_nbytes, bytes_read=bytes_read, read_bps=costs.sequential_bps, products_s=products_s
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptEstimate:
    """The cost of a conversation's first prompt, whose rows are read once for all its tokens."""

    tokens: int
    bytes_read: float
    read_s: float
    products_s: float | None  # with what is unpacked; None where the rate of many tokens' products was not measured

    @property
    def total_s(self) -> float:
        """The longer of reads and products, which go on together; of reads alone where those are not known."""
        return max(self.read_s, self.products_s or 0.0)


def estimate_prompt(model: ModelDir, plan: MemoryPlan, *, costs: Profile, tokens: int) -> PromptEstimate:
    """The expected pass of a prompt of so many tokens. A mixture's experts count as if tokens chose independently of
    each other and all alike: real ones choose fewer."""
    architecture = model.architecture
    missed = active = unpacked_s = 0.0  # bytes; neurons
    for layer, (cached, unpacked_row_s) in enumerate(zip(plan.cache_rows, _unpacked_row_s(model, costs), strict=True)):
        needed = used = float(architecture.width(layer))
        if layer in architecture.mixtures:
            share = architecture.chosen_experts / architecture.experts
            routed, shared = architecture.experts * architecture.expert_size, architecture.shared_neurons
            needed, used = routed * (1 - (1 - share) ** tokens) + shared, routed * share + shared
        rows = max(0.0, needed - cached)
        missed += rows * plan.layer_row_nbytes[layer]
        unpacked_s += rows * unpacked_row_s
        active += used
    shapes, parts = resident_shapes(model.config), _product_parts(model)
    resident = sum(math.prod(shapes.get(name, ())) for name in parts)
    weights = resident + active * architecture.d_model * len(architecture.matrices)
    batches = costs.batches.get(model.manifest.dtype)
    return PromptEstimate(
        tokens=tokens,
        bytes_read=missed,
        read_s=missed / costs.sequential_bps,
        products_s=None if batches is None else 2 * tokens * weights / batches.gemm.at(tokens) + unpacked_s,
    )


def product_nbytes(model: ModelDir) -> int:
    """Bytes of the resident weights that a token's products read: the layers' and the head's, not the embeddings."""
    return sum(_product_parts(model).values())


def _product_parts(model: ModelDir) -> dict[str, int]:
    """The bytes of `product_nbytes` by the tensors' names."""
    tensors = read_header(model.path / RESIDENT).tensors
    head = "head.weight" if "head.weight" in tensors else "embedding.weight"
    names = [name for name, info in tensors.items() if name.startswith(("layers.", "project_")) and len(info.shape) > 1]
    planes = model.manifest.planes
    names = [name for name in names if name not in planes]
    return {name: tensors[name].nbytes for name in (*names, head)}


def _resident_s(model: ModelDir, costs: Profile) -> float:
    """Seconds of a token's products with the resident weights."""
    manifest, seconds = model.manifest, 0.0
    for name, nbytes in _product_parts(model).items():
        seconds += nbytes * _s_a_byte(
            manifest.encoding_of(name), lambda encoding: costs.resident_bps(encoding, manifest.dtype)
        )
    return seconds


def _predictors_s(model: ModelDir, plan: MemoryPlan, costs: Profile) -> float:
    """Seconds of a token's products with the predictors' factors."""
    if not plan.predictors:
        return 0.0
    seconds = 0.0
    for info in read_header(model.path / PREDICTORS).tensors.values():
        encoding = _FACTORS_AS.get(info.dtype, "float32") if len(info.shape) > 1 else "float32"
        seconds += info.nbytes / costs.resident_bps(encoding, model.manifest.dtype)
    return seconds


def _s_a_byte(encoding: RowEncoding, rate: Callable[[str], float]) -> float:
    """Seconds of products for each byte of vectors; `rate`: bytes a second by encoding that was measured."""
    measured, nbytes = measured_as(encoding.name)
    return nbytes / rate(measured)


def _row_s_a_byte(rows: RowLayout, rate: Callable[[str], float]) -> float:
    """The same for each byte of a row."""
    seconds = sum(rows.vector_nbytes(matrix) * _s_a_byte(rows.encoding_of(matrix), rate) for matrix in rows.matrices)
    return seconds / rows.row_nbytes


def _unpacked_row_s(model: ModelDir, costs: Profile) -> list[float]:
    """For each layer, seconds that all cores take to put a row into its place whose expert is read where it lies."""
    architecture, in_place = model.architecture, model.manifest.in_place
    row_s = architecture.d_model * len(model.manifest.rows.matrices) / (costs.blocks_wps * costs.threads)
    return [row_s if lying_experts(architecture, in_place, i) else 0.0 for i in range(architecture.num_layers)]


def estimate_token(
    model: ModelDir, plan: MemoryPlan, *, costs: Profile, choice: ReaderChoice, activity: ExpectedActivity
) -> TokenEstimate:
    """The expected token at the start of a conversation; the next layer's rows are prefetched where the plan has memory
    for them."""
    return _Rates(model, plan, costs=costs, choice=choice).token(activity, prefetch=plan.prefetch_rows > 0)


def prefetch_pays(
    model: ModelDir, plan: MemoryPlan, *, costs: Profile, choice: ReaderChoice, activity: ExpectedActivity
) -> bool:
    """True where prefetching pays under `plan`, which has memory for it; arguments as `estimate_token`. Prefetched rows
    take time from the products they hide behind, and some are read in vain. That pays where demand reads would take
    longer than what hides them. False where a token is expected to be clearly faster without."""
    rates = _Rates(model, plan, costs=costs, choice=choice)
    with_s, without_s = (rates.token(activity, prefetch=prefetch).total_s for prefetch in (True, False))
    return with_s < _CLEARLY_FASTER * without_s


class _Rates:
    """Costs of a model's rows and resident weights on a device; sums up a token layer by layer."""

    def __init__(self, model: ModelDir, plan: MemoryPlan, *, costs: Profile, choice: ReaderChoice) -> None:
        manifest = model.manifest
        self._plan, self._costs = plan, costs
        self._reader = costs.of(choice.backend, choice.depth)
        neurons = manifest.architecture.neurons
        self._row = plan.rows_nbytes(manifest.architecture.every_width) / neurons  # bytes, of all layers' the mean
        self._matrices = len(manifest.rows.matrices)
        self._sparse_bps = 1 / _row_s_a_byte(
            manifest.rows, lambda encoding: costs.gathered_bps(encoding, manifest.dtype)
        )
        self._num_layers = manifest.architecture.num_layers
        kv_nbytes = model.block.mixers_read_nbytes(min(TYPICAL_POSITION, plan.context), model.dtype.itemsize)
        self._resident_nbytes = product_nbytes(model) + plan.predictors + kv_nbytes
        resident_s = (
            _resident_s(model, costs)
            + _predictors_s(model, plan, costs)
            + kv_nbytes / costs.resident_bps(manifest.dtype, manifest.dtype)
        )
        self._resident_s = resident_s / self._num_layers
        self._unpacked_row_s = _unpacked_row_s(model, costs)

    def token(self, activity: ExpectedActivity, *, prefetch: bool) -> TokenEstimate:
        layers = [
            self._layer(layer, rows, unpacked_row_s, prefetch=prefetch and index > 0)
            for index, (layer, rows, unpacked_row_s) in enumerate(
                zip(activity.layers, self._plan.cache_rows, self._unpacked_row_s, strict=True)
            )
        ]
        return TokenEstimate(
            io_s=sum(layer.io_s for layer in layers),
            compute_s=sum(layer.compute_s for layer in layers),
            overhead_s=self._num_layers * self._costs.layer_overhead_s,
            io_busy_s=sum(layer.io_busy_s for layer in layers),
            active=sum(layer.active for layer in activity.layers),
            misses=sum(layer.misses for layer in activity.layers),
            requests=sum(layer.requests for layer in layers),
            bytes_read=sum(layer.rows_read for layer in layers) * self._row,
            bytes_touched=sum(self._touched_nbytes(layer) for layer in activity.layers) + self._resident_nbytes,
        )

    def _touched_nbytes(self, layer: LayerActivity) -> float:
        """Bytes of the active neurons' rows, without the down columns of those that do not fire."""
        return (layer.active * (self._matrices - 1) + layer.firing) * self._row / self._matrices

    def _layer(self, layer: LayerActivity, rows: int, unpacked_row_s: float, *, prefetch: bool) -> "_LayerEstimate":
        unpacked_s = layer.rows_read * unpacked_row_s
        products_s = self._resident_s + self._touched_nbytes(layer) / self._sparse_bps + unpacked_s
        if not layer.requests:
            return _LayerEstimate(0.0, products_s, 0.0, 0.0, 0.0)
        parts = max(1, math.ceil(layer.active / (rows + self._plan.bypass_rows)))
        rows_read, per_request = layer.rows_read, layer.rows_read / layer.requests
        nbytes = per_request * self._row
        request_s, lost_s = self._reader.request(nbytes), self._reader.lost(nbytes)
        # The hits' up products run while the misses fly.
        hidden_s = (layer.active - layer.misses) * self._row * (self._matrices - 1) / self._matrices / self._sparse_bps
        prefetched, demand = 0.0, layer.requests
        if prefetch:
            # While a layer computes, the drive reads rows of the next one, some in vain.
            most = min(self._plan.prefetch_rows, layer.prefetched) / per_request
            prefetched = min(most, self._reader.beside_products(products_s, nbytes))
            needed = prefetched * layer.useful / layer.prefetched if prefetched else 0.0
            demand -= needed
            rows_read += (prefetched - needed) * per_request
        latency_s = parts * self._reader.batch(demand / parts, nbytes) - demand * request_s
        beside = min(demand, self._reader.beside_products(max(0.0, hidden_s - latency_s), nbytes))
        return _LayerEstimate(
            io_s=max(0.0, latency_s - hidden_s) + (demand - beside) * request_s,
            compute_s=products_s + (prefetched + beside) * lost_s,
            io_busy_s=latency_s + (demand - beside) * request_s + (prefetched + beside) * self._reader.beside(nbytes),
            requests=rows_read / per_request,
            rows_read=rows_read,
        )


@dataclass(frozen=True, slots=True)
class _LayerEstimate:
    io_s: float
    compute_s: float
    io_busy_s: float
    requests: float
    rows_read: float
