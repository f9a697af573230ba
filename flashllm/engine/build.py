"""Everything a loaded model holds outside its Python modules: threads, files, buffers, weights, neuron caches.

Built once from a manifest and a memory plan, in the order of the plan; nothing grows afterwards. `close` releases all.
"""

import itertools
import threading
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, cast

import numpy as np
import torch

from flashllm import _core
from flashllm.arch.registry import AttentionShape, spec_of
from flashllm.config import Ablation
from flashllm.device.choice import open_reader
from flashllm.device.costs import ReaderChoice
from flashllm.engine.attention import KVMemory
from flashllm.engine.dense import TORCH_DTYPES, DenseFFN, NativeDenseFFN, TorchDenseFFN
from flashllm.engine.ffn import FlashFFN, Mode
from flashllm.engine.linear import multiplied_by_torch
from flashllm.engine.meter import Meter
from flashllm.engine.resident import read_tensors
from flashllm.engine.stream import LayerRows, RowStream
from flashllm.errors import FormatError, UsageError
from flashllm.format.manifest import Manifest
from flashllm.format.model_files import FFN, PLACED, PREDICTORS, RESIDENT, TRACE, checksums_tensor, ffn_tensor
from flashllm.format.placed import read_places
from flashllm.format.popularity import read_popularity
from flashllm.format.predictors import EARLY
from flashllm.format.rows import PAGE_NBYTES
from flashllm.format.safetensors import read_header
from flashllm.format.trace import Trace
from flashllm.plan.memory import MAX_REQUEST, READ_AHEAD, STREAM_THREADS, MemoryPlan


class Releasable(Protocol):
    """What holds native threads or weights on the engine's behalf."""

    def release(self) -> None: ...


class Engine:
    """The memory, files and threads of one model; a context manager."""

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        plan: MemoryPlan,
        attention: AttentionShape,
        *,
        mode: Mode,
        threads: int,
        reader: ReaderChoice,
        direct: bool,
        verify_checksums: bool,
        batch: int,
        ablation: Ablation | None = None,
    ) -> None:
        if mode is Mode.SPARSE and PREDICTORS not in manifest.files:
            raise UsageError(
                f"{directory} has no predictors, which mode sparse needs; train them with "
                f"`python predictors/train_predictor.py {directory}`, or use --mode dense"
            )
        self.directory, self.manifest, self.plan, self.mode = directory, manifest, plan, mode
        self.reader_choice = reader
        self.ablation = ablation if ablation is not None else Ablation()
        self.meter = Meter()
        self.notices: list[str] = []
        self.closed = False
        self._adopted: list[Releasable] = []
        # 1. Threads, and the file the rows come from.
        self.pool = _core.ThreadPool(threads)
        self._reader = open_reader(reader, max_request=self._max_request(), verify=verify_checksums)
        self.pool.set_side_work(self._reader)  # reads move on while the pool computes
        if self._reader.backend != reader.backend:
            self.reader_choice = replace(reader, backend=self._reader.backend)
            self.notices.append(f"{self._reader.backend_reason}: flash is read with {reader.depth} threads")
        # Large reads in file order keep a drive busy with few threads, which leaves the processor to the products.
        self._stream_reader = _core.Reader(
            min(reader.depth, STREAM_THREADS), max_request=MAX_REQUEST, verify=verify_checksums
        )
        self._file = _core.DirectFile(str(directory / FFN), direct=direct)
        self.direct_io = self._file.direct
        if direct and not self._file.direct:
            self.notices.append(
                f"direct I/O is not available for {directory} ({self._file.fallback_reason}): reads go through the "
                "page cache, which is not counted in the memory plan and makes timings those of memory, not of flash"
            )
        # 2. Resident weights and checksums, in anonymous memory; meanwhile the neuron caches' memory is made real, so
        # that the first prompt does not wait for it.
        self._cache = _core.allocate(sum(plan.cache_rows) * manifest.rows.stride)
        populating = threading.Thread(target=_core.populate, args=(self._cache,))
        populating.start()
        try:
            self.tensors, _ = read_tensors(directory / RESIDENT, self._stream_reader, direct=direct)
        finally:
            populating.join()
        # 3. Buffers of the plan: KV cache, staging, neuron caches.
        self.kv_memory = KVMemory(
            num_layers=attention.num_layers,
            batch=batch,
            kv_heads=attention.num_kv_heads,
            context=plan.context,
            head_dim=attention.head_dim,
            dtype=TORCH_DTYPES[manifest.dtype],
        )
        header = read_header(directory / FFN)
        layers = range(manifest.architecture.num_layers)
        self._rows = [
            LayerRows(
                offset=header.tensors[ffn_tensor(layer)].offset,
                num_rows=manifest.rows.num_rows,
                checksums=self.tensors.pop(checksums_tensor(layer)).numpy(),
            )
            for layer in layers
        ]
        self._stream = RowStream(
            self._stream_reader,
            self._file,
            self._rows,
            stride=manifest.rows.stride,
            block_rows=manifest.stream_block_rows,
            ahead=READ_AHEAD,
        )
        self.meter.streams.append(self._stream)
        # Single neurons are read from the reordered copy where there is one, dense passes always in the order of ids.
        self._neurons_file, self._neurons_at = self._file, [rows.offset for rows in self._rows]
        self._row_of = read_places(directory, manifest) if self.ablation.placed else None
        if self._row_of is not None:
            self._neurons_file = _core.DirectFile(str(directory / PLACED), direct=direct)
            header = read_header(directory / PLACED)
            self._neurons_at = [header.tensors[ffn_tensor(layer)].offset for layer in layers]
        self._popularity = read_popularity(directory, manifest)
        self._bypass = _core.allocate(plan.bypass_rows * manifest.rows.stride) if plan.bypass_rows else None
        self.ffns = [self._build_ffn(layer) for layer in layers]
        self._trace: Trace | None = None
        if mode is Mode.SPARSE:
            self._load_predictors(direct)
            if TRACE in manifest.files:
                self._open_trace()

    def _max_request(self) -> int:
        """Bytes of one read request: more than one matrix's, or one row's, only where neighbours may merge."""
        rows = self.manifest.rows
        if not self.ablation.bundled:
            return max(rows.byte_offset("down") // (len(rows.matrices) - 1), PAGE_NBYTES)
        return MAX_REQUEST if self.ablation.merged else max(rows.stride, PAGE_NBYTES)

    def _build_ffn(self, layer: int) -> FlashFFN:
        manifest, spec = self.manifest, spec_of(self.manifest.architecture.model_type)
        layout, stride = manifest.rows, manifest.rows.stride
        start = sum(self.plan.cache_rows[:layer]) * stride

        def bias(pattern: str | None) -> torch.Tensor | None:
            tensor = None if pattern is None else self.tensors.pop(pattern.format(i=layer), None)
            return None if tensor is None else tensor.float().contiguous()

        up_bias, down_bias = bias(spec.up_bias), bias(spec.down_bias)
        parts = {name: index * layout.d_model for index, name in enumerate(layout.matrices)}
        native = _core.FfnLayer(
            layer=layer,
            dtype=cast(Any, layout.encoding),  # the core checks both names
            stride=stride,
            d_model=layout.d_model,
            num_neurons=layout.d_ff,
            up=parts["up"],
            gate=parts.get("gate", -1),
            down=parts["down"],
            activation=cast(Any, manifest.architecture.activation),
            cache_policy=cast(Any, self.plan.cache_policy),
            window=self.plan.window,
            popularity=None if self._popularity is None else self._popularity[layer],
            file_offset=self._neurons_at[layer],
            row_of=None if self._row_of is None else self._row_of[layer],
            up_bias=None if up_bias is None else up_bias.numpy(),
            down_bias=None if down_bias is None else down_bias.numpy(),
            checksums=self._rows[layer].checksums,
            rows=self._cache[start : start + self.plan.cache_rows[layer] * stride],
            bypass_rows=self._bypass,
            reader=self._reader,
            file=self._neurons_file,
            pool=self.pool,
            counters=self.meter.native,
            overlap=self.ablation.overlap,
            bundled=self.ablation.bundled,
            cached=self.ablation.cached,
        )
        dense: DenseFFN
        if multiplied_by_torch(TORCH_DTYPES[layout.encoding]):
            activation = manifest.architecture.activation
            dense = TorchDenseFFN(layout, activation, up_bias, down_bias, self.meter)
        else:
            dense = NativeDenseFFN(
                _core.DenseFfn(
                    dtype=cast(Any, layout.encoding),
                    stride=stride,
                    d_model=layout.d_model,
                    up=parts["up"],
                    gate=parts.get("gate", -1),
                    down=parts["down"],
                    activation=cast(Any, manifest.architecture.activation),
                    up_bias=None if up_bias is None else up_bias.numpy(),
                    down_bias=None if down_bias is None else down_bias.numpy(),
                    pool=self.pool,
                    counters=self.meter.native,
                )
            )
        return FlashFFN(
            layer,
            num_layers=manifest.architecture.num_layers,
            mode=self.mode,
            layout=layout,
            activation=manifest.architecture.activation,
            native=native,
            dense=dense,
            stream=self._stream,
            meter=self.meter,
            up_bias=up_bias,
            down_bias=down_bias,
            window=self.plan.window,
        )

    def _load_predictors(self, direct: bool) -> None:
        tensors, _ = read_tensors(self.directory / PREDICTORS, self._stream_reader, direct=direct)

        def install(layer: int, kind: str, early: _core.EarlyReads | None) -> None:
            names = {part: f"layers.{layer}.{kind}{part}" for part in ("a", "b", "bias", "threshold")}
            self.ffns[layer].native.set_predictor(
                tensors[names["a"]],
                tensors[names["b"]],
                tensors[names["bias"]].numpy(),
                float(tensors[names["threshold"]].item()),
                tensors.get(f"{names['a']}_scale"),  # of 8-bit factors
                tensors.get(f"{names['b']}_scale"),
                early,
            )

        for layer in range(len(self.ffns)):
            install(layer, "", None)
        early_layers = [layer for layer in range(len(self.ffns)) if f"layers.{layer}.{EARLY}a" in tensors]
        if not (early_layers and self.plan.early_rows and self.ablation.early):
            return
        # Layers that follow each other read into two buffers in turn: one is used while the other fills.
        rows = self.manifest.rows
        buffers = [
            _core.EarlyReads(
                rows=_core.allocate(self.plan.early_rows * rows.stride),
                stride=rows.stride,
                num_neurons=rows.d_ff,
                reader=self._reader,
                file=self._neurons_file,
            )
            for _ in range(2)
        ]
        for layer in early_layers:
            install(layer, EARLY, buffers[layer % 2])
        control = _core.EarlyControl()
        for ffn, following in itertools.pairwise(self.ffns):
            ffn.native.set_next(following.native, control)
        self.ffns[-1].native.set_last(control)

    def _open_trace(self) -> None:
        """Dummy weights have no sparsity of their own: the trace says what is active, at the position of each token."""
        self._trace = trace = Trace(self.directory / TRACE)
        layers, neurons = self.manifest.architecture.num_layers, self.manifest.rows.d_ff
        if (trace.info.num_layers, trace.info.num_neurons) != (layers, neurons):
            raise FormatError(f"{trace.path}: is no trace of {layers} layers of {neurons} neurons; make it again")
        tokens = max(self.manifest.sparse_prefill_tokens, self.plan.window)
        self._activity = np.zeros((tokens, *trace.info.token_shape), np.uint8)
        for layer, ffn in enumerate(self.ffns):
            ffn.native.set_trace(self._activity, layer)
        self.notices.append(f"synthetic weights, {trace.info.description}: times and bytes are real, the text is not")

    @property
    def activity_source(self) -> str:
        """Who says which neurons are active: for records."""
        return "predictors" if self._trace is None else f"synthetic weights, {self._trace.info.description}"

    @property
    def decoding(self) -> str:
        """How a layer runs at one new token: for records."""
        spec = spec_of(self.manifest.architecture.model_type)
        return spec.decoding if self.mode is Mode.SPARSE else "module by module"

    def begin_pass(self, first: int, count: int) -> None:
        """Before each pass: `count` new tokens from position `first` of the sequence on."""
        few = count <= self.manifest.sparse_prefill_tokens
        for ffn in self.ffns:
            if ffn.few_tokens is not few:  # setting a module's attribute costs ten times the question
                ffn.few_tokens = few
        if self._trace is not None:
            used = count if few else min(count, self.plan.window)  # a dense pass fills the cache for its last tokens
            for token in range(used):
                self._trace.read_into(first + count - used + token, self._activity[token])

    def cached_neurons(self) -> list[np.ndarray[tuple[int, ...], np.dtype[np.int32]]]:
        """Ids in each layer's cache, in the order of its rows."""
        return [np.asarray(ffn.native.cached(), dtype=np.int32) for ffn in self.ffns]

    def adopt(self, *parts: Releasable) -> None:
        """Parts of the model built over this engine, released when it closes."""
        self._adopted += parts

    def interrupt(self) -> None:
        """After a pass that did not finish: no read stays under way. Raises nothing."""
        if not self.closed:
            self._stream.drain()

    def close(self) -> None:
        """Wait for reads under way and release threads, files and memory. The model cannot be used afterwards."""
        if self.closed:
            return
        self.closed = True
        self._stream.drain()
        for part in [*self._adopted, *self.ffns]:
            part.release()
        self.kv_memory.close()
        if self._trace is not None:
            self._trace.close()
        self._adopted.clear()
        self.tensors.clear()
        self.meter.streams.clear()
        del self._cache, self._bypass, self._stream, self._file, self._reader, self._stream_reader
        del self._rows, self._neurons_file, self.pool

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
