"""Hidden states of all samples pass a model one decoder layer at a time; what each layer's FFN sees goes to disk.

Scratch files hold the states that enter a layer, and for a run of positions of each sample the FFN's inputs (16 bit)
and which neurons fire (2 bits each). Memory holds a batch of samples and a chunk of positions. Knows no predictors.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from weights import Floats, LayerWeights

from flashllm import _core
from flashllm._core import PAGE_TOKENS
from flashllm.base.dtypes import WEIGHT_DTYPES, WeightDtype
from flashllm.base.dtypes import cast as cast_dtype
from flashllm.base.files import drop_page_cache, naming
from flashllm.engine.model import Model
from flashllm.engine.passes import Observer
from training.fit import CODE_EDGES, CODES_PER_BYTE, Chunk, pack_codes

BATCH_TOKENS = 2048  # of the passes through a layer, at most; one sample where it is longer
CHUNK_NBYTES = 64 * 2**20  # of the positions that are trained on at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class PassShape:
    """The shape of a pass: `samples` of `tokens`, of which `kept` positions of every sample are recorded."""

    samples: int
    tokens: int
    kept: int
    d_model: int
    d_ff: int  # neurons of the widest layer: codes of the others are zeros behind their neurons

    @property
    def code_nbytes(self) -> int:
        """Bytes of one position's codes."""
        return -(-self.d_ff // CODES_PER_BYTE)

    @property
    def position_nbytes(self) -> int:
        return 2 * self.d_model + self.code_nbytes

    @property
    def batch_samples(self) -> int:
        """Samples that pass a layer together. Each holds whole pages of keys and values."""
        return max(1, BATCH_TOKENS // (self._pages * PAGE_TOKENS))

    @property
    def batch_tokens(self) -> int:
        """Tokens that pass a layer together, at most."""
        return self.batch_samples * self.tokens

    @property
    def kv_positions(self) -> int:
        """Positions of keys and values of one layer that a batch holds."""
        return self.batch_samples * self._pages * PAGE_TOKENS

    @property
    def _pages(self) -> int:
        """Pages of a sample."""
        return -(-self.tokens // PAGE_TOKENS)

    @property
    def chunk_samples(self) -> int:
        """Samples whose positions make a chunk: a constant of the shape, so that results do not depend on memory."""
        return max(1, CHUNK_NBYTES // (self.kept * self.position_nbytes))

    def scratch_nbytes(self, itemsize: int, *, prefetch: bool) -> int:
        """States before and after a layer, and a layer's record; with `prefetch` the inputs of the layer before too."""
        states = 2 * self.samples * self.tokens * self.d_model * itemsize
        earlier = self.samples * self.kept * 2 * self.d_model if prefetch else 0
        return states + self.samples * self.kept * self.position_nbytes + earlier


class HiddenStates:
    """Hidden states of all samples, [samples, tokens, d_model] in the model's dtype, in a scratch file a layer."""

    def __init__(self, scratch: Path, shape: PassShape, dtype: WeightDtype) -> None:
        self._scratch, self._shape, self._dtype = scratch, shape, dtype
        self._nbytes = shape.tokens * shape.d_model * dtype.itemsize  # of a sample

    def write(self, layer: int, first: int, states: Floats) -> None:
        """States that enter `layer`, of the samples from `first` on. They are of the model's dtype: none is rounded."""
        stored = np.ascontiguousarray(cast_dtype(states, WEIGHT_DTYPES["float32"], self._dtype))
        _write_at(self._path(layer), first * self._nbytes, stored.reshape(-1).view(np.uint8))

    def read(self, layer: int, first: int, end: int) -> Floats:
        """[end - first, tokens, d_model]: what was written."""
        raw = _read_at(self._path(layer), first * self._nbytes, (end - first) * self._nbytes)
        states = cast_dtype(raw.view(self._dtype.storage), self._dtype, WEIGHT_DTYPES["float32"])
        return np.asarray(states, np.float32).reshape(end - first, self._shape.tokens, self._shape.d_model)

    def forget(self, layer: int) -> None:
        self._path(layer).unlink(missing_ok=True)

    def _path(self, layer: int) -> Path:
        return self._scratch / f"states.{layer:03d}.bin"


class ActivityRecord:
    """FFN inputs and codes at the kept positions, by layer and sample."""

    def __init__(self, scratch: Path, shape: PassShape) -> None:
        self._scratch, self._shape = scratch, shape

    def write(self, layer: int, first: int, inputs: Floats, codes: NDArray[np.uint8]) -> None:
        """inputs [samples * kept, d_model], packed codes [samples * kept, ...] of the samples from `first` on."""
        shape = self._shape
        largest = float(np.finfo(np.float16).max)
        half = np.clip(inputs, -largest, largest).astype(np.float16)
        offset = first * shape.kept
        _write_at(self._path("inputs", layer), offset * shape.d_model * 2, half.reshape(-1).view(np.uint8))
        _write_at(self._path("codes", layer), offset * shape.code_nbytes, codes)

    def chunks(self, layer: int, first: int, end: int, *, inputs_of: int | None = None) -> Iterator[Chunk]:
        """(inputs fp32 [n, d_model], packed codes [n, ...]) of the samples from `first` to `end`.

        `inputs_of`: the layer whose inputs are wanted, where it is not `layer`.
        """
        shape = self._shape
        inputs_path = self._path("inputs", layer if inputs_of is None else inputs_of)
        for start in range(first, end, shape.chunk_samples):
            count = (min(start + shape.chunk_samples, end) - start) * shape.kept
            offset = start * shape.kept
            inputs = _read_at(inputs_path, offset * shape.d_model * 2, count * shape.d_model * 2)
            codes = _read_at(self._path("codes", layer), offset * shape.code_nbytes, count * shape.code_nbytes)
            x = torch.from_numpy(inputs).view(torch.float16).reshape(count, shape.d_model).float()
            yield x, torch.from_numpy(codes.reshape(count, shape.code_nbytes))

    def forget_inputs(self, layer: int) -> None:
        self._path("inputs", layer).unlink(missing_ok=True)

    def forget_codes(self, layer: int) -> None:
        self._path("codes", layer).unlink(missing_ok=True)

    def _path(self, what: str, layer: int) -> Path:
        return self._scratch / f"{what}.{layer:03d}.bin"


def kept_positions(shape: PassShape, seed: int) -> NDArray[np.int64]:
    """[samples, kept]: consecutive positions at a random place of each sample (the cache's need is of runs)."""
    starts = np.random.default_rng([seed, 1]).integers(0, shape.tokens - shape.kept + 1, shape.samples)
    return np.asarray(starts[:, None] + np.arange(shape.kept))


class LayerPass:
    """Sends hidden states through single decoder layers of a loaded model."""

    def __init__(self, model: Model, shape: PassShape) -> None:
        self._native, self._shape = model.parts.native, shape
        self._block, self._dtype = model.directory.block, model.manifest.dtype
        self._kept = (0, 0)
        self._use(0)

    def _use(self, layer: int) -> None:
        """Room for the keys and values of one layer, which every layer of as many uses in turn."""
        block = replace(self._block, layers=self._block.layers[layer : layer + 1])
        kept, tokens = (block.layers[0].mixer.kv_heads, block.layers[0].mixer.head_dim), self._shape.tokens
        if kept == self._kept:
            return
        self._kept = kept
        pool = _core.StatePool(_core.StateShape(block, tokens, tokens, self._dtype))
        self._sequences = [_core.SequenceState(pool) for _ in range(self._shape.batch_samples)]

    def embed(self, ids: NDArray[np.int64]) -> Floats:
        """The states [samples, tokens, d_model] that enter layer 0, for ids [samples, tokens]."""
        states = np.empty((*ids.shape, self._shape.d_model), np.float32)
        entries = list(zip(self._sequences, ids.tolist(), strict=False))
        self._native.embed(entries, states.reshape(-1, self._shape.d_model))
        return states

    def run(
        self, layer: int, states: Floats, kept: NDArray[np.int64], edges: Floats
    ) -> tuple[Floats, Floats, NDArray[np.uint8]]:
        """(states after the layer, FFN inputs [samples * kept, d_model], packed codes of the same positions).

        `kept` [samples, kept] positions; `edges` [2, d_ff]: activations from which codes 2 and 3 are given.
        """
        samples, tokens = states.shape[:2]
        recorder = _Recorder((kept + tokens * np.arange(samples)[:, None]).reshape(-1), edges)
        after = self.observe(layer, states, recorder)
        return after, recorder.inputs, pack_codes(recorder.codes)

    def observe(self, layer: int, states: Floats, observer: Observer) -> Floats:
        """The states after the layer; `observer` sees its FFN."""
        after = states.copy()
        self._use(layer)
        entries = [(sequence, states.shape[1]) for sequence in self._sequences[: len(states)]]
        self._native.run_block(layer, entries, after.reshape(-1, self._shape.d_model), observer)
        return after


class _Recorder:
    """Inputs and codes of some tokens."""

    def __init__(self, tokens: NDArray[np.int64], edges: Floats) -> None:
        self._tokens, self._edges = tokens, edges
        self.inputs = np.empty((0, 0), np.float32)
        self.codes = np.zeros((len(tokens), edges.shape[1]), np.uint8)

    def input(self, _layer: int, x: Floats) -> None:
        self.inputs = x[self._tokens]

    def activations(self, _layer: int, first: int, h: Floats) -> None:
        mine, neurons = np.abs(h[:, self._tokens]), slice(first, first + len(h))
        code = (mine > 0).astype(np.uint8)  # of a gated neuron too: its product is zero where the gate is shut
        for edge in self._edges[:, neurons]:
            code += mine > edge[:, None]
        self.codes[:, neurons] = code.T


class _Contributions:
    """The sum of |h| times the norm of the down column over a pass, and how often a neuron fired."""

    def __init__(self, norms: Floats) -> None:
        self._norms = norms
        self.total, self.count = 0.0, 0

    def input(self, _layer: int, x: Floats) -> None:
        pass

    def activations(self, _layer: int, first: int, h: Floats) -> None:
        self.total += float(np.abs(h).sum(axis=1, dtype=np.float64) @ self._norms[first : first + len(h)])
        self.count += int(np.count_nonzero(h))


def code_edges(lp: LayerPass, weights: LayerWeights, states: Floats, d_ff: int) -> Floats:
    """[2, d_ff] activations from which a neuron has code 2 and 3: CODE_EDGES times the mean contribution.

    A neuron contributes |h| times the norm of its down column; the mean is of a pass of `states`.
    """
    norms = weights.down_norms()
    seen = _Contributions(norms)
    lp.observe(weights.layer, states, seen)
    mean = seen.total / max(1, seen.count)
    edges = np.full((len(CODE_EDGES), d_ff), np.inf, np.float32)
    edges[:, : len(norms)] = [edge * mean / np.maximum(norms, 1e-20) for edge in CODE_EDGES]
    return edges


def _write_at(path: Path, offset: int, data: NDArray[np.uint8]) -> None:
    with naming(path), open(path, "r+b" if path.exists() else "w+b") as file:
        file.seek(offset)
        file.write(data.reshape(-1).data)


def _read_at(path: Path, offset: int, nbytes: int) -> NDArray[np.uint8]:
    with naming(path), open(path, "rb") as file:
        data = np.fromfile(file, np.uint8, nbytes, offset=offset)
        drop_page_cache(file.fileno(), offset, nbytes)
    if len(data) != nbytes:
        raise OSError(
            f"{path}: ends {nbytes - len(data)} bytes too early; remove the scratch directory and start again"
        )
    return data
