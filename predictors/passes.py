"""Hidden states of all samples pass a model one decoder layer at a time; what each layer's FFN sees goes to disk.

Scratch files hold the states that enter a layer, and for a run of positions of each sample the FFN's inputs (16 bit)
and which neurons fire (2 bits each). Memory holds a batch of samples and a chunk of positions. Knows no predictors.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fit import CODE_EDGES, CODES_PER_BYTE, Chunk, pack_codes
from numpy.typing import NDArray

from flashllm.base.files import drop_page_cache
from flashllm.engine.ffn import Observer

BATCH_TOKENS = 2048  # of the passes through a layer
CHUNK_NBYTES = 64 * 2**20  # of the positions that are trained on at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class PassShape:
    """What passes: `samples` of `tokens`, of which `kept` positions of every sample are recorded."""

    samples: int
    tokens: int
    kept: int
    d_model: int
    d_ff: int

    @property
    def code_nbytes(self) -> int:
        """Of one position."""
        return -(-self.d_ff // CODES_PER_BYTE)

    @property
    def position_nbytes(self) -> int:
        return 2 * self.d_model + self.code_nbytes

    @property
    def chunk_samples(self) -> int:
        """Samples whose positions make a chunk: a constant of the shape, so that results do not depend on memory."""
        return max(1, CHUNK_NBYTES // (self.kept * self.position_nbytes))

    def scratch_nbytes(self, itemsize: int, *, early: bool) -> int:
        """States before and after a layer, and one layer's record; with `early` the inputs of the layer before too."""
        states = 2 * self.samples * self.tokens * self.d_model * itemsize
        earlier = self.samples * self.kept * 2 * self.d_model if early else 0
        return states + self.samples * self.kept * self.position_nbytes + earlier


class HiddenStates:
    """Hidden states of all samples, [samples, tokens, d_model] in the model's dtype, in a scratch file a layer."""

    def __init__(self, scratch: Path, shape: PassShape, dtype: torch.dtype) -> None:
        self._scratch, self._shape, self._dtype = scratch, shape, dtype
        self._nbytes = shape.tokens * shape.d_model * dtype.itemsize  # of a sample

    def write(self, layer: int, first: int, states: torch.Tensor) -> None:
        """States that enter `layer`, of the samples from `first` on."""
        _write_at(self._path(layer), first * self._nbytes, states.contiguous().view(torch.uint8).numpy())

    def read(self, layer: int, first: int, end: int) -> torch.Tensor:
        raw = _read_at(self._path(layer), first * self._nbytes, (end - first) * self._nbytes)
        states = torch.from_numpy(raw).view(self._dtype)
        return states.reshape(end - first, self._shape.tokens, self._shape.d_model)

    def forget(self, layer: int) -> None:
        self._path(layer).unlink(missing_ok=True)

    def _path(self, layer: int) -> Path:
        return self._scratch / f"states.{layer:03d}.bin"


class ActivityRecord:
    """FFN inputs and codes at the kept positions, by layer and sample."""

    def __init__(self, scratch: Path, shape: PassShape) -> None:
        self._scratch, self._shape = scratch, shape

    def write(self, layer: int, first: int, inputs: torch.Tensor, codes: NDArray[np.uint8]) -> None:
        """inputs [samples * kept, d_model], packed codes [samples * kept, ...] of the samples from `first` on."""
        shape = self._shape
        largest = float(torch.finfo(torch.float16).max)
        half = inputs.float().clamp(-largest, largest).half().contiguous()
        offset = first * shape.kept
        _write_at(self._path("inputs", layer), offset * shape.d_model * 2, half.view(torch.uint8).numpy())
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


class _Captured(Exception):
    """Raised once the first layer's inputs are known."""


class LayerPass:
    """Sends hidden states through single decoder layers of a loaded model."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._layers = model.get_decoder().layers
        self._arguments: dict[int, dict[str, Any]] = {}  # by batch size

    @torch.inference_mode()
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """The states that enter layer 0; remembers the other arguments a layer is called with."""
        found: list[torch.Tensor] = []

        def capture(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found.append(args[0])
            self._arguments[len(args[0])] = {**kwargs, "past_key_values": None, "use_cache": False}
            raise _Captured

        handle = self._layers[0].register_forward_pre_hook(capture, with_kwargs=True)
        try:
            self._model(ids, use_cache=False)
        except _Captured:
            pass
        finally:
            handle.remove()
        return found[0]

    @torch.inference_mode()
    def run(
        self, layer: int, states: torch.Tensor, kept: NDArray[np.int64], edges: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, NDArray[np.uint8]]:
        """(states after the layer, FFN inputs [samples * kept, d_model], packed codes of the same positions).

        `kept` [samples, kept] positions; `edges` [2, d_ff]: activations from which codes 2 and 3 are given.
        """
        samples, tokens = states.shape[:2]
        rows = torch.from_numpy((kept + tokens * np.arange(samples)[:, None]).reshape(-1))
        codes = torch.zeros((len(rows), edges.shape[1]), dtype=torch.uint8)
        inputs: list[torch.Tensor] = []

        def observe(first_token: int, first_neuron: int, h: torch.Tensor) -> None:
            low, high = torch.searchsorted(rows, torch.tensor([first_token, first_token + len(h)])).tolist()
            mine, neurons = h[rows[low:high] - first_token].abs(), slice(first_neuron, first_neuron + h.shape[1])
            code = (mine > 0).to(torch.uint8)  # of a gated neuron too: its product is zero where the gate is shut
            for edge in edges[:, neurons]:
                code += mine > edge
            codes[low:high, neurons] = code

        def keep(_module: Any, args: tuple[torch.Tensor, ...]) -> None:
            inputs.append(args[0].reshape(-1, args[0].shape[-1])[rows])

        handle = self._model.engine.ffns[layer].register_forward_pre_hook(keep)
        try:
            after = self.observe(layer, states, observe)
        finally:
            handle.remove()
        return after, inputs[0], pack_codes(codes.numpy())

    @torch.inference_mode()
    def observe(self, layer: int, states: torch.Tensor, observer: Observer) -> torch.Tensor:
        """The states after the layer; `observer` sees its FFN's activations block by block."""
        ffn = self._model.engine.ffns[layer]
        ffn.observer, ffn.few_tokens = observer, False
        try:
            output = self._layers[layer](states, **self._arguments[len(states)])
        finally:
            ffn.observer = None
        return output[0] if isinstance(output, tuple) else output


class WeightBlocks:
    """A layer's driver matrix, a block of rows at a time, and the norms of its down columns."""

    def __init__(self, ffn: Any, d_ff: int) -> None:
        self._ffn, self._d_ff = ffn, d_ff

    def drivers(self) -> Iterator[NDArray[np.float32]]:
        """The matrix whose products decide which neurons fire (the gate where there is one), some rows at a time."""
        for _, block in self._ffn.weight_blocks():
            yield block.get("gate", block["up"]).float().numpy()

    def code_edges(self, lp: LayerPass, layer: int, states: torch.Tensor) -> torch.Tensor:
        """[2, d_ff] activations from which a neuron has code 2 and 3: CODE_EDGES times the mean contribution.

        A neuron contributes |h| times the norm of its down column.
        """
        norms = torch.zeros(self._d_ff)
        for first, block in self._ffn.weight_blocks():
            norms[first : first + len(block["down"])] = block["down"].float().norm(dim=1)
        total, count = 0.0, 0

        def observe(_first_token: int, first_neuron: int, h: torch.Tensor) -> None:
            nonlocal total, count
            total += float((h.abs().float() @ norms[first_neuron : first_neuron + h.shape[1]]).sum())
            count += int((h != 0).sum())

        lp.observe(layer, states, observe)
        mean = total / max(1, count)
        return torch.stack([edge * mean / norms.clamp_min(1e-20) for edge in CODE_EDGES])


def _write_at(path: Path, offset: int, data: NDArray[np.uint8]) -> None:
    with open(path, "r+b" if path.exists() else "w+b") as file:
        file.seek(offset)
        file.write(data.reshape(-1).data)


def _read_at(path: Path, offset: int, nbytes: int) -> NDArray[np.uint8]:
    with open(path, "rb") as file:
        data = np.fromfile(file, np.uint8, nbytes, offset=offset)
        drop_page_cache(file.fileno(), offset, nbytes)
    if len(data) != nbytes:
        raise OSError(
            f"{path}: ends {nbytes - len(data)} bytes too early; remove the scratch directory and start again"
        )
    return data
