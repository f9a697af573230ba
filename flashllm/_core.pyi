"""Types of the native core (flashllm/csrc). Addresses are of C-contiguous CPU memory, checked by the callers."""

from typing import Any, Literal, TypedDict

import numpy as np
from numpy.typing import NDArray

SimdLevel = Literal["scalar", "avx2", "avx512", "avx512_bf16"]
Simd = Literal["auto"] | SimdLevel
CachePolicy = Literal["window", "frequency"]
Dtype = Literal["float32", "float16", "bfloat16"]
Matrix = Any  # what speaks DLPack, 2-D: a torch tensor or numpy array of float32, float16, bfloat16 (predictors: int8)

class ReadStats(TypedDict):
    jobs: int
    requests: int
    bytes: int
    gap_bytes: int
    bounced: int
    retries: int
    wall_ns: int

class CounterValues(TypedDict):
    io_ns: int
    memory_ns: int
    compute_ns: int
    io_busy_ns: int
    bytes_read: int
    requests: int
    retries: int
    active: int
    hits: int
    misses: int
    moves: int
    parts: int
    early_read: int
    early_used: int

def allocate(nbytes: int) -> NDArray[np.uint8]: ...
def populate(memory: NDArray[np.uint8]) -> None: ...
def xxh3_64_rows(rows: NDArray[np.uint8]) -> NDArray[np.uint64]: ...
def best_simd_level() -> SimdLevel: ...
def default_simd_level() -> SimdLevel: ...
def has_amx() -> bool: ...

class DirectFile:
    def __init__(self, path: str, direct: bool = True) -> None: ...
    @property
    def path(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def direct(self) -> bool: ...
    @property
    def fallback_reason(self) -> str: ...
    @property
    def offset_alignment(self) -> int: ...
    @property
    def memory_alignment(self) -> int: ...
    def inject(
        self,
        kind: Literal["error", "short_read", "end_of_file", "flip"],
        first: int,
        count: int = 1,
        argument: int = 0,
    ) -> None: ...

class Reader:
    def __init__(
        self,
        threads: int = 32,
        max_gap: int = 0,
        max_request: int = 1048576,
        verify: bool = True,
        backend: Literal["threads", "io_uring", "auto"] = "threads",
        queue_depth: int = 64,
    ) -> None: ...
    def take_busy_ns(self) -> int: ...
    @property
    def backend(self) -> Literal["threads", "io_uring"]: ...
    @property
    def backend_reason(self) -> str: ...
    @property
    def queue_depth(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def verify(self) -> bool: ...

class ReadBatch:
    def __init__(self, reader: Reader, file: DirectFile) -> None: ...
    def add(
        self,
        offset: int,
        destination: NDArray[np.uint8],
        checksums: NDArray[np.uint64] | None = None,
        row_nbytes: int = 0,
    ) -> None: ...
    def submit(self) -> None: ...
    def poll(self) -> bool: ...
    def wait(self) -> ReadStats: ...

class ThreadPool:
    def __init__(self, threads: int) -> None: ...
    def set_side_work(self, reader: Reader) -> None: ...
    @property
    def threads(self) -> int: ...

def read_bandwidth(pool: ThreadPool, nbytes: int, seconds: float, simd: Simd = "auto") -> list[float]: ...

class Counters:
    def __init__(self) -> None: ...
    def take(self) -> CounterValues: ...

class Linear:
    def __init__(
        self,
        weight: Matrix,
        bias: NDArray[np.float32] | None,
        pool: ThreadPool,
        counters: Counters,
        simd: Simd = "auto",
    ) -> None: ...
    def forward(self, x: int, tokens: int, out: int) -> None: ...
    def forward_many(self, x: int, tokens: int, out: int) -> None: ...

class LayerNorm:
    def __init__(
        self,
        width: int,
        epsilon: float,
        weight: NDArray[np.float32] | None,
        bias: NDArray[np.float32] | None,
        dtype: Dtype,
        pool: ThreadPool,
        counters: Counters,
        simd: Simd = "auto",
    ) -> None: ...
    def forward(self, x: int, rows: int, out: int) -> None: ...

class DenseFfn:
    def __init__(
        self,
        *,
        dtype: Dtype,
        stride: int,
        d_model: int,
        up: int,
        gate: int,
        down: int,
        activation: Literal["relu", "squared_relu"],
        up_bias: NDArray[np.float32] | None,
        down_bias: NDArray[np.float32] | None,
        pool: ThreadPool,
        counters: Counters,
        simd: Simd = "auto",
    ) -> None: ...
    def begin(self, x: int, tokens: int) -> None: ...
    def add(self, rows: NDArray[np.uint8], first: int, count: int) -> None: ...
    def activations(self, h: int) -> None: ...
    def finish(self, y: int) -> None: ...

class Attention:
    def __init__(
        self,
        heads: int,
        kv_heads: int,
        head_dim: int,
        max_length: int,
        dtype: Dtype,
        pool: ThreadPool,
        counters: Counters,
        simd: Simd = "auto",
    ) -> None: ...
    def forward(
        self, q: int, k: int, v: int, length: int, head_stride: int, row_stride: int, scale: float, out: int
    ) -> None: ...

class SlotTable:
    def __init__(self, num_neurons: int, capacity: int) -> None: ...
    @property
    def num_used(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    def slot_of(self, neuron: int) -> int: ...
    def pointers(self) -> list[int]: ...
    def exchange(self, leaving: list[int], coming: list[int]) -> list[tuple[int, int]]: ...

class EarlyControl:
    def __init__(self) -> None: ...
    @property
    def reads_ahead(self) -> bool: ...

class EarlyReads:
    def __init__(
        self, *, rows: NDArray[np.uint8], stride: int, num_neurons: int, reader: Reader, file: DirectFile
    ) -> None: ...

class CacheReplay:
    def __init__(
        self,
        *,
        cache_policy: CachePolicy,
        num_neurons: int,
        capacity: int,
        bypass: int,
        window: int,
        popularity: NDArray[np.float32] | None,
    ) -> None: ...
    def token(self, active: NDArray[np.int32]) -> list[int]: ...

class FfnLayer:
    def __init__(
        self,
        *,
        layer: int,
        dtype: Dtype,
        stride: int,
        d_model: int,
        num_neurons: int,
        up: int,
        gate: int,
        down: int,
        activation: Literal["relu", "squared_relu"],
        cache_policy: CachePolicy,
        window: int,
        popularity: NDArray[np.float32] | None,
        file_offset: int,
        up_bias: NDArray[np.float32] | None,
        down_bias: NDArray[np.float32] | None,
        checksums: NDArray[np.uint64],
        rows: NDArray[np.uint8],
        bypass_rows: NDArray[np.uint8] | None,
        reader: Reader,
        file: DirectFile,
        pool: ThreadPool,
        counters: Counters,
        simd: Simd = "auto",
        overlap: bool = True,
        bundled: bool = True,
        cached: bool = True,
        row_of: NDArray[np.int32] | None = None,
    ) -> None: ...
    def set_predictor(
        self,
        a: Matrix,
        b: Matrix,
        bias: NDArray[np.float32],
        threshold: float,
        a_scale: Any = None,
        b_scale: Any = None,
        early: EarlyReads | None = None,
    ) -> None: ...
    def set_next(self, next: FfnLayer, control: EarlyControl) -> None: ...
    def set_last(self, control: EarlyControl) -> None: ...
    def set_trace(self, activity: NDArray[np.uint8], layer: int) -> None: ...
    def forward(self, x: int, tokens: int, y: int) -> None: ...
    def forward_active(self, x: int, active: NDArray[np.int32], y: int) -> None: ...
    def predict(self, x: int) -> list[int]: ...
    def begin_fill(self, x: int, tokens: int) -> None: ...
    def fill_from(self, rows: NDArray[np.uint8], first_neuron: int, count: int) -> None: ...
    def abandon_fill(self) -> None: ...
    def cached(self) -> list[int]: ...
    @property
    def current_window(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    @property
    def has_predictor(self) -> bool: ...

class Decoder:
    def __init__(
        self,
        *,
        d_model: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        context: int,
        batch: int,
        dtype: Dtype,
        query_scale: float,
        pool: ThreadPool,
        counters: Counters,
        simd: Simd = "auto",
    ) -> None: ...
    def add_layer(
        self,
        *,
        norm: LayerNorm,
        query: Linear,
        key: Linear,
        value: Linear,
        out: Linear,
        ffn_norm: LayerNorm,
        ffn: FfnLayer,
        keys: Any,
        values: Any,
    ) -> None: ...
    def forward(self, layer: int, x: int, sequences: int, position: int, out: int) -> None: ...
