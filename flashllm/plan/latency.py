"""The time of a token before any token ran: reads, products and what is left, from a memory plan and a calibration.

Per layer: the reader gets one batch for the misses (neighbours merged), while the hits' up products run; behind it, the
rows read ahead for the next layer while this one computes. Everything touched in memory is touched once, resident
weights at the rate of resident products, rows at that of rows gathered. Reads beside products are slower, and slow the
products. The interpreter and waking threads cost a fixed time a layer. Plain arithmetic; loads and measures nothing.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashllm.arch.registry import attention_shape, resident_names, spec_of
from flashllm.base.dtypes import WEIGHT_DTYPES
from flashllm.device.costs import DeviceCosts, ReaderChoice, ReaderCosts
from flashllm.format.manifest import Manifest
from flashllm.format.model_files import RESIDENT
from flashllm.format.safetensors import read_header
from flashllm.plan.activity import ExpectedActivity, LayerActivity
from flashllm.plan.memory import MemoryPlan

_USEFUL_GUESSES = 0.75  # of the rows read ahead: bench/LOG.md, "Reading ahead on an early guess"
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


def product_nbytes(directory: Path, config: Mapping[str, Any]) -> int:
    """Bytes of the resident weights that a token's products read: the layers' and the head's, not the embeddings."""
    spec = spec_of(str(config["model_type"]))
    tensors = read_header(directory / RESIDENT).tensors
    layers = spec.layers_module + "."
    names = [name for name in resident_names(config) if name.startswith(layers) and len(tensors[name].shape) > 1]
    names.append(spec.head if spec.head in tensors else spec.embedding)
    return sum(tensors[name].nbytes for name in names)


def estimate_token(
    manifest: Manifest,
    config: Mapping[str, Any],
    plan: MemoryPlan,
    *,
    costs: DeviceCosts,
    choice: ReaderChoice,
    activity: ExpectedActivity,
    resident_nbytes: int,
) -> TokenEstimate:
    """The expected token. `resident_nbytes`: `product_nbytes` of the model.

    Where the model has predictors of the next layer, rows are read ahead if that is faster, as a run finds out too.
    """
    reader = costs.of(choice.backend, choice.depth)
    rates = _Rates(manifest, config, plan, costs=costs, reader=reader, resident_nbytes=resident_nbytes)
    tokens = [rates.token(activity, ahead=False)]
    if plan.early_rows:
        tokens.append(rates.token(activity, ahead=True))
    return min(tokens, key=lambda token: token.total_s)


class _Rates:
    """What a model's rows and resident weights cost on a device; sums up a token layer by layer."""

    def __init__(
        self,
        manifest: Manifest,
        config: Mapping[str, Any],
        plan: MemoryPlan,
        *,
        costs: DeviceCosts,
        reader: ReaderCosts,
        resident_nbytes: int,
    ) -> None:
        self._plan, self._costs, self._reader = plan, costs, reader
        self._row, self._matrices = manifest.rows.stride, len(manifest.rows.matrices)
        self._sparse_bps = costs.sparse_bps[manifest.dtype]
        self._num_layers = manifest.architecture.num_layers
        position = min(TYPICAL_POSITION, plan.context)
        itemsize = WEIGHT_DTYPES[manifest.dtype].itemsize
        kv_nbytes = position * attention_shape(config).kv_nbytes_per_token(itemsize)
        self._resident_nbytes = resident_nbytes + plan.predictors + kv_nbytes
        self._resident_s = self._resident_nbytes / costs.gemv_bps[manifest.dtype] / self._num_layers

    def token(self, activity: ExpectedActivity, *, ahead: bool) -> TokenEstimate:
        layers = [
            self._layer(layer, rows, ahead=ahead and index > 0)
            for index, (layer, rows) in enumerate(zip(activity.layers, self._plan.cache_rows, strict=True))
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
        """Of the active neurons' rows: the down columns of those that do not fire are left alone."""
        return (layer.active * (self._matrices - 1) + layer.firing) * self._row / self._matrices

    def _layer(self, layer: LayerActivity, rows: int, *, ahead: bool) -> "_LayerEstimate":
        products_s = self._resident_s + self._touched_nbytes(layer) / self._sparse_bps
        if not layer.requests:
            return _LayerEstimate(0.0, products_s, 0.0, 0.0, 0.0)
        parts = max(1, math.ceil(layer.active / (rows + self._plan.bypass_rows)))
        rows_read, per_request = layer.rows_read, layer.rows_read / layer.requests
        nbytes = per_request * self._row
        request_s, lost_s = self._reader.request(nbytes), self._reader.lost(nbytes)
        # The hits' up products run while the misses fly.
        hidden_s = (layer.active - layer.misses) * self._row * (self._matrices - 1) / self._matrices / self._sparse_bps
        guesses, demand = 0.0, layer.requests
        if ahead:
            # While a layer is computed, the drive reads for the next one; some of it in vain.
            most = min(self._plan.early_rows, layer.foretold / _USEFUL_GUESSES) / per_request
            guesses = min(most, self._reader.beside_products(products_s, nbytes))
            demand -= guesses * _USEFUL_GUESSES
            rows_read += guesses * (1 - _USEFUL_GUESSES) * per_request
        latency_s = parts * self._reader.batch(demand / parts, nbytes) - demand * request_s
        beside = min(demand, self._reader.beside_products(max(0.0, hidden_s - latency_s), nbytes))
        return _LayerEstimate(
            io_s=max(0.0, latency_s - hidden_s) + (demand - beside) * request_s,
            compute_s=products_s + (guesses + beside) * lost_s,
            io_busy_s=latency_s + (demand - beside) * request_s + (guesses + beside) * self._reader.beside(nbytes),
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
