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
def simd_levels() -> list[str]: ...

class ThreadPool:
    def __init__(self, threads: int) -> None: ...
    def set_side_work(self, reader: Reader) -> None: ...
    @property
    def threads(self) -> int: ...

def read_bandwidth(pool: ThreadPool, nbytes: int, seconds: float, simd: str = "auto") -> list[float]: ...
def fit_groups(
    weights: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu", writable=False)],
    encoding: str,
    scales: Annotated[NDArray[numpy.uint16], dict(shape=(None,), order="C", device="cpu")],
    minimums: Annotated[NDArray[numpy.uint16], dict(shape=(None,), order="C", device="cpu")] | None,
) -> None: ...
def encode_rows(
    weights: Annotated[NDArray, dict(shape=(None, None), order="C", device="cpu")],
    dtype: str,
    encoding: str,
    out: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order="C", device="cpu")],
    pool: ThreadPool,
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
        inputs: str = "float32",
        by_inputs: bool = False,
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
        num_units: int,
        capacity: int,
        bypass: int,
        window: int,
        popularity: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)]
        | None,
    ) -> None: ...
    def token(
        self, active: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)]
    ) -> list[int]: ...
    def missing(
        self, units: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)]
    ) -> list[int]: ...

class RowFormat:
    def __init__(
        self,
        *,
        encoding: str,
        down_encoding: str,
        stride: int,
        d_model: int,
        up: int,
        gate: int,
        down: int,
        inputs: str,
    ) -> None: ...

class ResidentTensors:
    def __init__(
        self,
        tensors: dict,
        *,
        dtype: str,
        encoding: str,
        other_encodings: Mapping[str, str],
        inputs: str,
        simd: str = "auto",
    ) -> None: ...

class NeuronSource:
    def __init__(
        self,
        *,
        reader: Reader,
        file: DirectFile,
        cache_policy: str,
        window: int,
        unit_rows: int = 1,
        bypass_rows: Annotated[NDArray[numpy.uint8], dict(order="C", device="cpu")] | None = None,
        wait_first: bool = False,
        split_rows: bool = False,
    ) -> None: ...

class LayerRows:
    def __init__(
        self,
        *,
        memory: Annotated[NDArray[numpy.uint8], dict(order="C", device="cpu")],
        offset: int,
        checksums: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        checksum_rows: int = 1,
        row_of: Annotated[NDArray[numpy.int32], dict(shape=(None,), order="C", device="cpu", writable=False)]
        | None = None,
        popularity: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)]
        | None = None,
    ) -> None: ...

class FfnLayer:
    def __init__(
        self,
        *,
        layer: int,
        tensors: ResidentTensors,
        row_format: RowFormat,
        neurons: int,
        activation: str,
        activation_cut: float = 0.0,
        source: NeuronSource,
        rows: LayerRows,
        pool: ThreadPool,
        counters: Counters,
    ) -> None: ...
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
    def set_relu_predictor(
        self,
        a: Annotated[NDArray, dict(order="C", device="cpu")],
        b: Annotated[NDArray, dict(order="C", device="cpu")],
        threshold: float,
        a_encoding: str | None = None,
        b_encoding: str | None = None,
    ) -> None: ...
    def set_coded_gate(self, codes: Annotated[NDArray, dict(order="C", device="cpu")], margin: float) -> None: ...
    def set_trace(
        self,
        activity: Annotated[
            NDArray[numpy.uint8], dict(shape=(None, None, None, None), order="C", device="cpu", writable=False)
        ],
        layer: int,
    ) -> None: ...
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
    def set_capacity(self, rows: int) -> None: ...
    def cached(self) -> list[int]: ...
    @property
    def capacity(self) -> int: ...
    @property
    def current_window(self) -> int: ...

class RowStream:
    def __init__(
        self,
        reader: Reader,
        file: DirectFile,
        layers: Sequence[
            tuple[
                int,
                int,
                Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)],
                int,
            ]
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

class Model:
    def __init__(
        self,
        *,
        block: object,
        tensors: ResidentTensors,
        row_format: RowFormat,
        stream: RowStream,
        source: NeuronSource,
        caches: Sequence[LayerRows | None],
        pool: ThreadPool,
        counters: Counters,
        block_tokens: int,
        fill_tokens: int,
        prefetch: bool,
    ) -> None: ...
    @property
    def ffns(self) -> list[FfnLayer]: ...
    def step(
        self,
        entries: Sequence[tuple[SequenceState, Sequence[int]]],
        pass_: str,
        all_logits: bool = False,
        observer: object | None = None,
        drafted: int = 0,
    ) -> Annotated[NDArray[numpy.float32], dict(shape=(None, None))]: ...
    def accept(self, count: int) -> None: ...
    def embed(
        self,
        entries: Sequence[tuple[SequenceState, Sequence[int]]],
        states: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu")],
    ) -> None: ...
    def run_block(
        self,
        layer: int,
        entries: Sequence[tuple[SequenceState, int]],
        states: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu")],
        observer: object | None = None,
    ) -> None: ...
    def interrupt(self) -> None: ...
    def cancel(self, on: bool) -> None: ...

class StateShape:
    def __init__(self, block: object, context: int, part_tokens: int, dtype: str, bits: int = 0) -> None: ...
    @property
    def block_nbytes(self) -> int: ...
    def nbytes(self, length: int) -> int: ...

class StatePool:
    def __init__(self, shape: StateShape) -> None: ...
    @property
    def nbytes(self) -> int: ...

class SequenceState:
    def __init__(self, pool: StatePool) -> None: ...
    @property
    def length(self) -> int: ...
    @property
    def context(self) -> int: ...
    def nbytes_to_add(self, length: int) -> int: ...
    def commit(self, length: int) -> None: ...
    def can_keep(self, length: int) -> int: ...
    def keep(self, length: int) -> int: ...
    def copy_from(self, other: SequenceState) -> None: ...
    def save(self) -> list[list[Annotated[NDArray[numpy.uint8], dict(shape=(None,))]]]: ...
    def restore(
        self, length: int, pages: Sequence[int]
    ) -> list[list[Annotated[NDArray[numpy.uint8], dict(shape=(None,))]]]: ...

def activate(
    values: Annotated[NDArray[numpy.float32], dict(order="C", device="cpu")], activation: str, threshold: float = 0.0
) -> None: ...

class LentLayer:
    pass

class LentEnds:
    pass

class BatchModel:
    def __init__(
        self, *, block: object, dtype: str, pool: ThreadPool, rows_together: int, simd: str = "auto"
    ) -> None: ...
    def lend_layer(
        self, number: int, tensors: dict, encodings: Mapping[str, str], down_by_inputs: bool
    ) -> LentLayer: ...
    def lend_ends(self, tensors: dict) -> LentEnds: ...
    def embed(
        self,
        ends: LentEnds,
        rows: Annotated[NDArray, dict(order="C", device="cpu", writable=False)],
        positions: Annotated[NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        states: Annotated[NDArray, dict(order="C", device="cpu")],
    ) -> None: ...
    def run(
        self,
        layer: LentLayer,
        states: Annotated[NDArray, dict(order="C", device="cpu")],
        positions: Annotated[NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu", writable=False)],
        attend: object,
        decoding: bool = False,
        watch: object | None = None,
    ) -> None: ...
    def head(
        self,
        ends: LentEnds,
        states: Annotated[NDArray, dict(order="C", device="cpu", writable=False)],
        logits: Annotated[NDArray[numpy.float32], dict(order="C", device="cpu")],
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
        alibi: object | None = None,
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
        sinks: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)]
        | None = None,
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
        sinks: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)]
        | None = None,
    ) -> int: ...
