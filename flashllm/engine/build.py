"""Builds what a loaded model holds: threads, files, weights, neuron caches, and the native model over them.

In the order of the memory plan; nothing but the KV cache grows afterwards, and that out of the neuron caches.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import cast

import numpy as np
from numpy.typing import NDArray

from flashllm import _core
from flashllm.arch.tensors import EMBEDDING, TOKEN_TABLE
from flashllm.config import Backend, RunConfig
from flashllm.engine.resident import Tensors, read_tensors
from flashllm.engine.state import KeptRows, NeuronCache
from flashllm.format.in_place import Slices, block_rows, slice_rows
from flashllm.format.model_dir import ModelDir
from flashllm.format.model_files import FFN, PREDICTORS, RESIDENT, TABLE, TABLE_CHECKSUMS, checksums_tensor, ffn_tensor
from flashllm.format.predictors import PREFETCH, relu_encodings
from flashllm.format.rows import TableLayout
from flashllm.format.safetensors import read_header
from flashllm.plan.memory import STREAM_THREADS, max_request
from flashllm.plan.resolve import Plan
from flashllm.profile.choice import open_reader
from flashllm.profile.costs import ReaderChoice


@dataclass(slots=True, kw_only=True)
class Parts:
    """The parts that `build` makes."""

    ffns: list[_core.FfnLayer]  # of the layers of which a token does not compute every neuron
    caches: Sequence[NeuronCache]  # of each layer
    stream: _core.RowStream  # every layer's rows, in the order of ids
    native: _core.Model
    reader: ReaderChoice  # in use
    file: _core.DirectFile  # that rows are streamed from
    table_file: _core.DirectFile | None  # of rows by token's id
    notices: list[str]


def build(model: ModelDir, plan: Plan, config: RunConfig, counters: _core.Counters) -> Parts:
    """Load `model` as `plan` says. Raises FlashIOError, FormatError, ChecksumError."""
    return _Builder(model, plan, config, counters).build()


class _Builder:
    def __init__(self, model: ModelDir, plan: Plan, config: RunConfig, counters: _core.Counters) -> None:
        self._model, self._plan, self._config, self._counters = model, plan, config, counters
        self._path, self._manifest = model.path, model.manifest
        self._notices: list[str] = list(plan.notices)
        self._sparse = plan.mode == "sparse"
        self._table_file: _core.DirectFile | None = None

    def build(self) -> Parts:
        self._open_files()
        tensors = self._load_resident()
        checksums = [
            np.asarray(tensors.pop(checksums_tensor(layer)), np.uint64)
            for layer in range(self._manifest.architecture.num_layers)
        ]
        table = self._token_table(tensors)
        layers = self._layer_rows(checksums)
        stream = _core.RowStream(
            self._stream_reader,
            self._file,
            layers,
            strides=[layout.stride for layout in self._manifest.layouts],
            block_rows=self._manifest.stream_block_rows,
            ahead=self._plan.memory.read_ahead,
        )
        inputs = self._manifest.activations or "float32"
        native = _core.Model(
            block=self._model.block,
            tensors=_core.ResidentTensors(
                tensors,
                dtype=self._manifest.dtype,
                encoding=self._manifest.resident_encoding or self._manifest.dtype,
                other_encodings=dict(self._manifest.other_encodings),
                inputs=inputs,
                simd=self._config.simd,
            ),
            row_formats=[layout.native(inputs) for layout in self._manifest.layouts],
            stream=stream,
            source=self._neuron_source(),
            layers=layers,
            caches=self._caches(),
            table=table,
            pool=self._pool,
            counters=self._counters,
            part_tokens=self._plan.memory.prompt_tokens,
            fill_tokens=self._plan.memory.window if self._sparse or self._model.block.experts else 0,
            prefetch=self._plan.prefetch,
            loads=self._plan.loads,
        )
        cached = [ffn for ffn in native.ffns if ffn is not None]
        if self._sparse and PREDICTORS in self._manifest.files:
            self._load_predictors(native.ffns)
        elif self._plan.prefetch:
            for layer, ffn in enumerate(native.ffns):
                if ffn is not None:
                    ffn.guess_by_router(self._prefetch_buffers[layer % 2])
        return Parts(
            ffns=cached,
            caches=[ffn or self._keep_rows(stream, layer) for layer, ffn in enumerate(native.ffns)],
            stream=stream,
            native=native,
            reader=self._reader_in_use,
            file=self._file,
            table_file=self._table_file,
            notices=self._notices,
        )

    def _open_files(self) -> None:
        """Threads, and the file that the rows come from."""
        config, choice = self._config, self._plan.reader
        self._pool = _core.ThreadPool(self._plan.threads)
        self._reader = open_reader(choice, max_request=max_request(self._manifest))
        self._pool.set_side_work(self._reader)  # reads move on while the pool computes
        self._reader_in_use = replace(choice, backend=cast(Backend, self._reader.backend))
        if self._reader.backend != choice.backend:
            self._notices.append(f"{self._reader.backend_reason}: flash is read with {choice.depth} threads")
        # Large reads in file order keep a drive busy with few threads, which leaves the processor to the products.
        self._stream_reader = _core.Reader(min(choice.depth, STREAM_THREADS), max_request=max_request(self._manifest))
        self._file = _core.DirectFile(str(self._path / FFN), direct=config.direct)
        self._note_buffered([self._file])

    def _note_buffered(self, files: Sequence[_core.DirectFile]) -> None:
        """Say where files are not read directly, though they were to be."""
        for file in files if self._config.direct else ():
            if not file.direct:
                self._notices.append(
                    f"direct I/O is not available for {file.path} ({file.fallback_reason}): reads go through the page "
                    "cache, which is not counted in the memory plan and makes timings those of memory, not of flash"
                )

    def _load_resident(self) -> Tensors:
        """Resident weights by canonical name. Meanwhile the neuron caches' memory is made real, so that the first
        prompt does not wait for it."""
        self._cache = _core.allocate(self._cached_nbytes[-1])
        populating = threading.Thread(target=_core.populate, args=(self._cache,))
        populating.start()
        try:
            return self._read(RESIDENT, rows=None if self._embedding is None else EMBEDDING)
        finally:
            populating.join()

    @property
    def _embedding(self) -> TableLayout | None:
        """The input embedding, where the plan leaves it on flash."""
        layout, memory = self._manifest.embedding_layout(self._model.block), self._plan.memory
        return None if layout is None or not 0 < memory.table_rows < layout.rows else layout

    def _read(self, name: str, *, rows: str | None = None) -> Tensors:
        """The tensors of a file, as `read_tensors` gives them."""
        return read_tensors(
            self._path / name,
            self._stream_reader,
            direct=self._config.direct,
            expected=self._manifest.files[name],
            rows=rows,
        )

    def _neuron_source(self) -> _core.NeuronSource:
        manifest, memory = self._manifest, self._plan.memory
        return _core.NeuronSource(
            reader=self._reader,
            file=self._file,
            cache_policy=memory.cache_policy,
            window=memory.window,
            unit_rows=manifest.architecture.unit_rows,
            bypass_rows=_core.allocate(memory.bypass_rows * manifest.rows.stride),
        )

    def _token_table(self, tensors: Tensors) -> _core.TokenTable | None:
        """The rows that are read by the token's id: per-layer embeddings, or the embedding; None where none are."""
        table = self._model.table or self._embedding
        if table is None:
            return None
        name, rows, sums = (TABLE, TOKEN_TABLE, TABLE_CHECKSUMS) if table.apart else (RESIDENT, EMBEDDING, EMBEDDING)
        self._table_file = _core.DirectFile(str(self._path / name), direct=self._config.direct)
        self._note_buffered([self._table_file])
        checksums = np.asarray(tensors.pop(sums), np.uint64)
        offset = read_header(self._path / name).tensors[rows].offset
        return _core.TokenTable(
            reader=self._reader,
            file=self._table_file,
            rows=_core.FileRows(offset=offset, count=len(checksums), checksums=checksums),
            columns=table.columns,
            encoding=table.encoding.name,
            stride=table.stride,
            memory=_core.allocate(self._plan.memory.table_rows * table.stride),
            simd=self._config.simd,
        )

    def _layer_rows(self, checksums: list[NDArray[np.uint64]]) -> list[_core.FileRows]:
        tensors, experts = read_header(self._path / FFN).tensors, self._lying_experts()
        return [
            _core.FileRows(
                offset=tensors[ffn_tensor(layer)].offset if ffn_tensor(layer) in tensors else 0,
                count=count,
                checksums=checksums[layer],
                checksum_rows=self._manifest.checksum_rows_of(layer),
                experts=experts[layer],
            )
            for layer, count in enumerate(self._manifest.num_rows)
        ]

    def _lying_experts(self) -> list[_core.LyingExperts | None]:
        manifest, in_place = self._manifest, self._manifest.in_place
        if in_place is None:
            return [None] * manifest.architecture.num_layers
        files = [_core.DirectFile(file.path, direct=self._config.direct) for file in in_place.files]
        self._note_buffered(files)
        size, rows_of = manifest.architecture.unit_rows, slice_rows(manifest.architecture, manifest.rows)

        def of_layer(layer: int, slices: tuple[Slices, ...]) -> _core.LyingExperts:
            parts = zip(slices, rows_of, block_rows(slices, manifest.layout(layer), size), strict=True)
            return _core.LyingExperts(
                [
                    (
                        [(files[file], offset) for file, offset in each.places],
                        each.nbytes,
                        each.piece_nbytes(rows),
                        unpacking,
                    )
                    for each, rows, unpacking in parts
                ],
                count=manifest.architecture.experts,
                size=size,
            )

        return [of_layer(layer, slices) if slices else None for layer, slices in enumerate(in_place.layers)]

    def _caches(self) -> list[_core.LayerCache | None]:
        architecture, popularity = self._manifest.architecture, self._plan.popularity
        unit = architecture.unit_rows
        return [
            None
            if layer in self._plan.memory.dense_layers
            else _core.LayerCache(
                self._rows_of(layer), None if popularity is None else np.ascontiguousarray(popularity[layer][::unit])
            )
            for layer in range(architecture.num_layers)
        ]

    def _rows_of(self, layer: int) -> NDArray[np.uint8]:
        """A layer's part of the neuron caches' memory."""
        return self._cache[self._cached_nbytes[layer] : self._cached_nbytes[layer + 1]]

    @cached_property
    def _cached_nbytes(self) -> list[int]:
        """The offset of each layer's part, in bytes, and behind them the size of all."""
        memory = self._plan.memory
        each = zip(memory.cache_rows, memory.layer_row_nbytes, strict=True)
        return [0, *accumulate(rows * nbytes for rows, nbytes in each)]

    def _keep_rows(self, stream: _core.RowStream, layer: int) -> "KeptRows":
        """The layer's part of the neuron caches' memory holds its first rows, once they have been read."""
        rows = self._rows_of(layer)
        if len(rows):
            stream.keep(layer, rows)
        return KeptRows(stream, layer)

    def _load_predictors(self, ffns: Sequence[_core.FfnLayer | None]) -> None:
        tensors = self._read(PREDICTORS)
        encodings = relu_encodings(read_header(self._path / PREDICTORS)) or {}
        # Where every token computes every neuron of a layer, none is predicted.
        layers = [(layer, ffn) for layer, ffn in enumerate(ffns) if ffn is not None]
        if not self._manifest.resident_gate:  # it names them itself
            for layer, ffn in layers:
                ffn.set_predictor(tensors, f"layers.{layer}.", encodings)
        if not self._plan.prefetch:
            return
        for layer, ffn in layers:
            prefix = f"layers.{layer}.{PREFETCH}"
            if f"{prefix}a" in tensors:
                ffn.set_predictor(tensors, prefix, prefetch=self._prefetch_buffers[layer % 2])

    @cached_property
    def _prefetch_buffers(self) -> list[_core.Prefetch]:
        """Two, which layers that follow each other read into in turn: one is used while the other fills.

        Their memory is one piece: smaller ones may get no huge pages (`csrc/io/memory.cpp`), and direct reads into
        ordinary pages take a third longer."""
        stride, memory = self._manifest.rows.stride, self._plan.memory
        nbytes = memory.prefetch_rows * stride
        both = _core.allocate(2 * nbytes)
        return [
            _core.Prefetch(
                rows=both[start : start + nbytes],
                unit_nbytes=memory.unit_rows * stride,
                num_units=-(-max(self._manifest.architecture.every_width) // memory.unit_rows),
                reader=self._reader,
                file=self._file,
            )
            for start in (0, nbytes)
        ]
