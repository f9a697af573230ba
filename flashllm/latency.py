"""The time of a token before any token ran: reads, products and what is left, from a memory plan and a calibration.

Per layer: the reader gets one batch for the misses (neighbours merged), while the hits' up products run; everything
touched in memory is touched once, at the rate of resident products; the interpreter and waking threads cost a fixed
time. Plain arithmetic; loads and measures nothing.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashllm.architectures import attention_shape, resident_names, spec_of
from flashllm.budget import MemoryPlan
from flashllm.device_costs import DeviceCosts, ReaderChoice
from flashllm.dtypes import WEIGHT_DTYPES
from flashllm.expected_activity import ExpectedActivity
from flashllm.manifest import Manifest
from flashllm.model_files import RESIDENT
from flashllm.safetensors_file import read_header

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
    """The expected token. `resident_nbytes`: `product_nbytes` of the model."""
    reader = costs.of(choice.backend, choice.depth)
    row = manifest.rows.stride
    matrices = len(manifest.rows.matrices)
    rate = costs.gemv_bps[manifest.dtype]
    io = busy = touched = 0.0
    for layer, rows in zip(activity.layers, plan.cache_rows, strict=True):
        parts = max(1, math.ceil(layer.active / (rows + plan.bypass_rows)))
        reading = 0.0
        if layer.requests:
            reading = parts * reader.batch(layer.requests / parts, layer.rows_read / layer.requests * row)
        before_down = (layer.active - layer.misses) * row * (matrices - 1) / matrices
        io, busy = io + max(0.0, reading - before_down / rate), busy + reading
        touched += (layer.active * (matrices - 1) + layer.firing) * row / matrices
    position = min(TYPICAL_POSITION, plan.context)
    itemsize = WEIGHT_DTYPES[manifest.dtype].itemsize
    touched += resident_nbytes + plan.predictors + position * attention_shape(config).kv_nbytes_per_token(itemsize)
    return TokenEstimate(
        io_s=io,
        compute_s=touched / rate,
        overhead_s=manifest.architecture.num_layers * costs.layer_overhead_s,
        io_busy_s=busy,
        active=sum(layer.active for layer in activity.layers),
        misses=sum(layer.misses for layer in activity.layers),
        requests=sum(layer.requests for layer in activity.layers),
        bytes_read=sum(layer.rows_read for layer in activity.layers) * row,
        bytes_touched=touched,
    )
