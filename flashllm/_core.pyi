"""Native core of flashllm: direct reads, neuron cache, kernels"""

from collections.abc import Mapping, Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray

def allocate(nbytes: int) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]: ...
def populate(memory: Annotated[NDArray[numpy.uint8], dict(order="C", device="cpu")]) -> None: ...
def xxh3_64_rows(
    rows: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order="C", device="cpu", writable=False)],
) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,))]: ...

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

class Reader:
    def __init__(
        self,
        threads: int = 32,
        max_gap: int = 0,
        max_request: int = 1048576,
        verify: bool = True,
        backend: str = "threads",
        queue_depth: int = 64,
        patience_ms: int = 60000,
    ) -> None: ...
    def take_busy_ns(self) -> int: ...
    @property
    def backend(self) -> str: ...
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
        destination: Annotated[NDArray[numpy.uint8], dict(order="C", device="cpu")],
        checksums: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)]
        | None = None,
        row_nbytes: int = 0,
    ) -> None: ...
    def submit(self) -> None: ...
    def poll(self) -> bool: ...
    def wait(self) -> dict: ...

class DirectWriter:
    def __init__(self, path: str, nbytes: int, threads: int = 4) -> None: ...
    @property
    def path(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def direct(self) -> bool: ...
    @property
    def fallback_reason(self) -> str: ...
    @property
    def memory_alignment(self) -> int: ...
    def write(
        self, offset: int, array: Annotated[NDArray[numpy.uint8], dict(order="C", device="cpu", writable=False)]
    ) -> int: ...
    def finished(self, ticket: int) -> bool: ...
    def wait(self, ticket: int) -> None: ...
    def wait_all(self) -> None: ...
    def close(self) -> None: ...
    def take_bytes(self) -> int: ...
    def busy_ns(self) -> int: ...

def best_simd_level() -> str: ...

class ThreadPool:
    def __init__(self, threads: int) -> None: ...
    def set_side_work(self, reader: Reader) -> None: ...
    @property
    def threads(self) -> int: ...

def read_bandwidth(pool: ThreadPool, nbytes: int, seconds: float, simd: str = "auto") -> list[float]: ...
def fit_groups(
    weights: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu", writable=False)],
    bits: int,
    minimums: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu")] | None,
    scales: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu")],
) -> None: ...

class Linear:
    def __init__(
        self,
        weight: Annotated[NDArray, dict(shape=(None, None), order="C", device="cpu")],
        bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)] | None,
        dtype: str,
        pool: ThreadPool,
        simd: str = "auto",
        encoding: str | None = None,
        columns: int | None = None,
    ) -> None: ...
    def forward(
        self,
        x: Annotated[NDArray, dict(shape=(None, None), order="C", device="cpu")],
        out: Annotated[NDArray, dict(shape=(None, None), order="C", device="cpu")],
    ) -> None: ...
    def forward_many(
        self,
        x: Annotated[NDArray, dict(shape=(None, None), order="C", device="cpu")],
        out: Annotated[NDArray, dict(shape=(None, None), order="C", device="cpu")],
    ) -> None: ...

def firing_range(activation: str, threshold: float = 0.0, cut: float = 0.0) -> tuple[float, float, float]: ...

class Counters:
    def __init__(self) -> None: ...
    def take(self) -> dict: ...

class Prefetch:
    def __init__(
        self,
        *,
        rows: Annotated[NDArray[numpy.uint8], dict(order="C", device="cpu")],
        stride: int,
        num_neurons: int,
        reader: Reader,
        file: DirectFile,
    ) -> None: ...

class CacheReplay:
    def __init__(
        self,
        *,
        cache_policy: str,
        num_neurons: int,
        capacity: int,
        bypass: int,
        window: int,
        popularity: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)]
        | None,
    ) -> None: ...
    def token(
        self, active: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)]
    ) -> list[int]: ...

class FfnLayer:
    def __init__(self, **kwargs) -> None: ...
    def set_predictor(
        self,
        a: Annotated[NDArray, dict(order="C", device="cpu")],
        b: Annotated[NDArray, dict(order="C", device="cpu")],
        bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        threshold: float,
        a_scale: Annotated[NDArray, dict(order="C", device="cpu")] | None = None,
        b_scale: Annotated[NDArray, dict(order="C", device="cpu")] | None = None,
        prefetch: Prefetch | None = None,
    ) -> None: ...
    def set_coded_gate(self, codes: Annotated[NDArray, dict(order="C", device="cpu")], margin: float) -> None: ...
    def predict_by_gate(self) -> None: ...
    def set_router(
        self,
        weights: Annotated[NDArray, dict(order="C", device="cpu")],
        *,
        chosen: int,
        size: int,
        shared: int,
        softmax_of_all: bool,
        normalized: bool,
        bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)]
        | None = None,
        shared_gate: Annotated[NDArray, dict(order="C", device="cpu")] | None = None,
    ) -> None: ...
    def set_trace(
        self,
        activity: Annotated[
            NDArray[numpy.uint8], dict(shape=(None, None, None, None), order="C", device="cpu", writable=False)
        ],
        layer: int,
    ) -> None: ...
    def forward(self, x: int, tokens: int, y: int) -> None: ...
    def forward_active(
        self,
        x: int,
        active: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        y: int,
    ) -> None: ...
    def predict(self, x: int) -> list[int]: ...
    def begin_fill(self, x: int, tokens: int) -> None: ...
    def fill_from(
        self,
        rows: Annotated[NDArray[numpy.uint8], dict(order="C", device="cpu", writable=False)],
        first_neuron: int,
        count: int,
    ) -> None: ...
    def abandon_fill(self) -> None: ...
    def set_capacity(self, rows: int) -> None: ...
    def cached(self) -> list[int]: ...
    @property
    def capacity(self) -> int: ...
    @property
    def current_window(self) -> int: ...
    @property
    def has_predictor(self) -> bool: ...

class RowStream:
    def __init__(
        self,
        reader: Reader,
        file: DirectFile,
        layers: Sequence[
            tuple[int, Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)]]
        ],
        *,
        stride: int,
        block_rows: int,
        ahead: int,
    ) -> None: ...
    def begin(self, layer: int, then: int | None = None) -> None: ...
    def next(self) -> object: ...
    def drain(self) -> None: ...
    def keep(self, layer: int, memory: Annotated[NDArray[numpy.uint8], dict(order="C", device="cpu")]) -> None: ...
    def set_kept(self, layer: int, rows: int) -> None: ...
    def kept(self, layer: int) -> int: ...
    def take(self) -> dict: ...

class KvSequence:
    @property
    def length(self) -> int: ...
    @property
    def blocks(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def context(self) -> int: ...
    def blocks_to_add(self, length: int) -> int: ...
    def truncate(self, length: int) -> None: ...
    def reserve(self, length: int) -> None: ...
    def commit(self, length: int) -> None: ...
    def memory(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]: ...
    def copy_from(self, other: KvSequence) -> None: ...

class Model:
    def __init__(
        self,
        *,
        block: object,
        dtype: str,
        num_layers: int,
        d_ff: int,
        tensors: dict,
        row_format: tuple[str, int, int, int, int, str],
        resident_encoding: str,
        other_encodings: Mapping[str, str],
        stream: RowStream,
        ffns: list,
        pool: ThreadPool,
        counters: Counters,
        block_tokens: int,
        fill_tokens: int,
        prefetch: bool,
        simd: str = "auto",
    ) -> None: ...
    def new_sequence(self, context: int | None = None, layers: int | None = None) -> KvSequence: ...
    def step(
        self,
        entries: Sequence[tuple[KvSequence, Sequence[int]]],
        pass_: str,
        all_logits: bool = False,
        observer: object | None = None,
        drafted: int = 0,
    ) -> Annotated[NDArray[numpy.float32], dict(shape=(None, None))]: ...
    def accept(self, count: int) -> None: ...
    def embed(
        self,
        entries: Sequence[tuple[KvSequence, Sequence[int]]],
        states: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu")],
    ) -> None: ...
    def run_block(
        self,
        layer: int,
        entries: Sequence[tuple[KvSequence, int]],
        states: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu")],
        observer: object | None = None,
    ) -> None: ...
    def interrupt(self) -> None: ...
    def cancel(self, on: bool) -> None: ...

class KvAttention:
    def __init__(
        self,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        context: int,
        dtype: str,
        scale: float,
        pool: ThreadPool,
        simd: str = "auto",
    ) -> None: ...
    @property
    def length(self) -> int: ...
    def append(
        self,
        keys: Annotated[
            NDArray[numpy.float32], dict(shape=(None, None, None), order="C", device="cpu", writable=False)
        ],
        values: Annotated[
            NDArray[numpy.float32], dict(shape=(None, None, None), order="C", device="cpu", writable=False)
        ],
    ) -> None: ...
    def attend_each(
        self,
        q: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order="C", device="cpu", writable=False)],
        out: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order="C", device="cpu")],
    ) -> None: ...
    def attend_many(
        self,
        q: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order="C", device="cpu", writable=False)],
        out: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order="C", device="cpu")],
    ) -> None: ...
    def truncate(self, length: int) -> None: ...

def packed_weight_nbytes(rows: int, columns: int, bits: int) -> int: ...
def pack_weights(
    weights: Annotated[NDArray, dict(order="C", device="cpu", writable=False)],
    dtype: str,
    bits: int,
    out: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu")],
    pool: ThreadPool,
    simd: str = "auto",
) -> None: ...
def unpack_weights(
    packed: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)],
    rows: int,
    columns: int,
    bits: int,
    out: Annotated[NDArray[numpy.float32], dict(order="C", device="cpu")],
    pool: ThreadPool,
    simd: str = "auto",
) -> None: ...

class PackedLinear:
    def __init__(
        self,
        packed: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)],
        rows: int,
        columns: int,
        bits: int,
        bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)] | None,
        dtype: str,
        pool: ThreadPool,
        simd: str = "auto",
    ) -> None: ...
    def forward_many(
        self,
        x: Annotated[NDArray, dict(order="C", device="cpu", writable=False)],
        out: Annotated[NDArray, dict(order="C", device="cpu")],
    ) -> None: ...

class Elementwise:
    def __init__(self, dtype: str, pool: ThreadPool, simd: str = "auto") -> None: ...
    def normalize(
        self,
        x: Annotated[NDArray, dict(order="C", device="cpu", writable=False)],
        out: Annotated[NDArray, dict(order="C", device="cpu")],
        kind: str,
        epsilon: float,
        weight: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)] | None,
        bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)] | None,
    ) -> None: ...
    def rotate(
        self,
        x: Annotated[NDArray, dict(order="C", device="cpu")],
        heads: int,
        positions: Annotated[NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        inverse_frequency: Annotated[
            NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        dims: int,
        style: str = "half",
        scaling: float = 1.0,
        factor: float = 1.0,
    ) -> None: ...
    def activate(
        self,
        x: Annotated[NDArray, dict(order="C", device="cpu")],
        gate: Annotated[NDArray, dict(order="C", device="cpu", writable=False)] | None,
        activation: str,
        threshold: float = 0.0,
    ) -> None: ...
    def add(
        self,
        x: Annotated[NDArray, dict(order="C", device="cpu")],
        y: Annotated[NDArray, dict(order="C", device="cpu", writable=False)],
    ) -> None: ...
    def scale(self, x: Annotated[NDArray, dict(order="C", device="cpu")], factor: float) -> None: ...
    def widen(
        self,
        x: Annotated[NDArray, dict(order="C", device="cpu", writable=False)],
        out: Annotated[NDArray[numpy.float32], dict(order="C", device="cpu")],
    ) -> None: ...
    def narrow(
        self,
        x: Annotated[NDArray[numpy.float32], dict(order="C", device="cpu", writable=False)],
        out: Annotated[NDArray, dict(order="C", device="cpu")],
    ) -> None: ...

class BatchAttention:
    def __init__(
        self,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: str,
        scale: float,
        pool: ThreadPool,
        layout: str = "plain",
        bits: int = 4,
        softcap: float = 0.0,
        simd: str = "auto",
    ) -> None: ...
    @property
    def block_nbytes(self) -> int: ...
    @property
    def sealed_nbytes(self) -> int: ...
    def write(
        self,
        keys: Annotated[NDArray, dict(order="C", device="cpu", writable=False)],
        values: Annotated[NDArray, dict(order="C", device="cpu", writable=False)],
        arena: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order="C", device="cpu")],
        slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        positions: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    ) -> None: ...
    def seal(
        self,
        arena: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order="C", device="cpu", writable=False)],
        slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        out_arena: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order="C", device="cpu")],
        out_slots: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    ) -> None: ...
    def prompt(
        self,
        q: Annotated[NDArray, dict(order="C", device="cpu", writable=False)],
        arena: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order="C", device="cpu", writable=False)],
        first_slot: int,
        first_position: int,
        out: Annotated[NDArray, dict(order="C", device="cpu")],
        window: int = 0,
    ) -> None: ...
    def decode(
        self,
        q: Annotated[NDArray, dict(order="C", device="cpu", writable=False)],
        arenas: Sequence[
            Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order="C", device="cpu", writable=False)]
        ],
        sealed: Sequence[bool],
        table: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order="C", device="cpu", writable=False)],
        offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        lengths: Annotated[NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        out: Annotated[NDArray, dict(order="C", device="cpu")],
        share: float = 1.0,
        window: int = 0,
    ) -> int: ...
