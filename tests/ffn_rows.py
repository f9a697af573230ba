"""For tests of the native FFN layer: random neurons in a real file, a layer over it, and its value in float64."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from flashllm import _core
from flashllm.base.dtypes import WEIGHT_DTYPES

FILE_OFFSET = 4096
TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass
class FfnFile:
    """One layer's weights as the file has them, with biases and checksums; all rounded to `dtype`."""

    path: Path
    dtype: str
    stride: int
    up: torch.Tensor  # [num_neurons, d_model], float64
    gate: torch.Tensor | None
    down: torch.Tensor  # [num_neurons, d_model]
    up_bias: np.ndarray | None
    down_bias: np.ndarray | None
    checksums: np.ndarray
    rows: np.ndarray  # uint8 [num_neurons, stride]

    @property
    def num_neurons(self) -> int:
        return self.up.shape[0]

    @property
    def d_model(self) -> int:
        return self.up.shape[1]

    def dense(self, x, active, activation="relu"):
        """The FFN over `active` neurons in float64, and the sum of the magnitudes of all terms (for bounds)."""
        ids = torch.as_tensor(list(active), dtype=torch.long)
        x = x.double()
        fired = (self.gate if self.gate is not None else self.up)[ids] @ x
        if self.up_bias is not None:
            fired = fired + torch.from_numpy(self.up_bias).double()[ids]
        fired = fired.clamp(min=0)
        if activation == "squared_relu":
            fired = fired**2
        if self.gate is not None:
            fired = fired * (self.up[ids] @ x)
        y = fired @ self.down[ids]
        magnitude = fired.abs() @ self.down[ids].abs()
        if self.down_bias is not None:
            y = y + torch.from_numpy(self.down_bias).double()
        return y, magnitude


def _rounded(items, dtype, random) -> np.ndarray:
    return torch.randn(items, generator=random).to(TORCH_DTYPES[dtype]).float().numpy()


def _stored(values, dtype) -> np.ndarray:
    """As the core takes them."""
    return torch.from_numpy(values).to(TORCH_DTYPES[dtype]).view(torch.uint8).numpy().view(WEIGHT_DTYPES[dtype].storage)


def write_ffn(path, *, dtype="float32", num_neurons=24, d_model=64, gated=False, biased=True, seed=0) -> FfnFile:
    random = torch.Generator().manual_seed(seed)
    matrices = [
        torch.randn(num_neurons, d_model, generator=random).to(TORCH_DTYPES[dtype]) for _ in range(3 if gated else 2)
    ]
    items = torch.cat(matrices, dim=1)
    row_nbytes = items.shape[1] * items.element_size()
    stride = -(-row_nbytes // 512) * 512
    rows = np.zeros((num_neurons, stride), np.uint8)
    rows[:, :row_nbytes] = items.view(torch.uint8).numpy()
    path.write_bytes(bytes(FILE_OFFSET) + rows.tobytes())
    return FfnFile(
        path=path,
        dtype=dtype,
        stride=stride,
        up=matrices[0].double(),
        gate=matrices[1].double() if gated else None,
        down=matrices[-1].double(),
        up_bias=_rounded(num_neurons, dtype, random) if biased and not gated else None,
        down_bias=_rounded(d_model, dtype, random) if biased else None,
        checksums=_core.xxh3_64_rows(rows),
        rows=rows,
    )


def resident(tensors, dtype, simd="auto", *, layer=3):
    """A layer's resident tensors by name, for the core."""
    named = {f"layers.{layer}.{name}": values for name, values in tensors.items()}
    return _core.ResidentTensors(named, dtype=dtype, encoding=dtype, other_encodings={}, inputs="float32", simd=simd)


def row_format(encoding, d_model, *, stride, vector_nbytes, gated):
    """Rows of up, gate if `gated`, and down, each of `vector_nbytes`."""
    return _core.RowFormat(
        encoding=encoding,
        down_encoding=encoding,
        stride=stride,
        d_model=d_model,
        up=0,
        gate=vector_nbytes if gated else -1,
        down=(2 if gated else 1) * vector_nbytes,
        inputs="float32",
    )


class Ffn:
    """A native layer over an `FfnFile`, with all it refers to."""

    def __init__(
        self,
        ffn: FfnFile,
        *,
        capacity=None,
        bypass=0,
        cache_policy="window",
        window=4,
        popularity=None,
        threads=1,
        io_threads=4,
        activation="relu",
        activation_cut=0.0,
        gate=None,  # (matrix, bias): resident
        simd="auto",
        reader=None,
    ):
        self.ffn = ffn
        self.file = _core.DirectFile(str(ffn.path), True)
        self.counters = _core.Counters()
        self.rows = _core.allocate((capacity or ffn.num_neurons) * ffn.stride)
        vector_nbytes = ffn.d_model * TORCH_DTYPES[ffn.dtype].itemsize
        biases = {"ffn.up_bias": ffn.up_bias, "ffn.down_bias": ffn.down_bias}
        if gate is not None:
            biases |= {"gate.weight": gate[0], "ffn.gate_bias": gate[1]}
        stored = {name: _stored(values, ffn.dtype) for name, values in biases.items() if values is not None}
        tensors = resident(stored, ffn.dtype, simd)
        self.layer = _core.FfnLayer(
            layer=3,
            tensors=tensors,
            row_format=row_format(
                ffn.dtype, ffn.d_model, stride=ffn.stride, vector_nbytes=vector_nbytes, gated=ffn.gate is not None
            ),
            neurons=ffn.num_neurons,
            activation=activation,
            activation_cut=activation_cut,
            source=_core.NeuronSource(
                reader=reader or _core.Reader(threads=io_threads),
                file=self.file,
                cache_policy=cache_policy,
                window=window,
                bypass_rows=_core.allocate(bypass * ffn.stride) if bypass else None,
            ),
            rows=_core.FileRows(offset=FILE_OFFSET, count=ffn.num_neurons, checksums=ffn.checksums),
            cache=_core.LayerCache(self.rows, popularity),
            pool=_core.ThreadPool(threads),
            counters=self.counters,
        )

    def __call__(self, x, active) -> torch.Tensor:
        """y [d_model] over the ids given, in the rows' dtype."""
        assert x.dtype == TORCH_DTYPES[self.ffn.dtype]
        assert x.is_contiguous()
        y = torch.empty_like(x)
        self.layer.forward_active(x.data_ptr(), np.array(sorted(active), dtype=np.int32), y.data_ptr())
        return y

    def predict_by(self, a, b, bias, threshold) -> None:
        """From now on b (a x) + bias > threshold names the neurons."""
        self.layer.set_predictor({"a": a, "b": b, "bias": bias, "threshold": np.full(1, threshold, np.float32)})

    def fill(self) -> "Ffn":
        """Cache what the policy knows to be popular, as after a prompt; nothing is predicted from now on."""
        nothing, neurons = torch.zeros(1, self.ffn.d_model), self.ffn.num_neurons
        self.predict_by(nothing, torch.zeros(neurons, 1), np.zeros(neurons, np.float32), 1.0)
        self.layer.begin_fill(nothing.data_ptr(), 1)
        self.layer.fill_from(self.ffn.rows, 0, neurons)
        return self

    def predicted(self, x) -> torch.Tensor:
        """y [tokens, d_model] for x, each token over what the layer predicts."""
        return torch.stack([self(row, self.layer.predict(row.data_ptr())) for row in x])

    def wrong_rows(self) -> list[int]:
        """Cached neurons whose bytes in memory are not the file's."""
        cached = self.layer.cached()
        memory = self.rows[: len(cached) * self.ffn.stride].reshape(len(cached), self.ffn.stride)
        return [neuron for row, neuron in zip(memory, cached, strict=True) if (row != self.ffn.rows[neuron]).any()]


def random_input(ffn, seed=0) -> torch.Tensor:
    return torch.randn(ffn.d_model, generator=torch.Generator().manual_seed(seed)).to(TORCH_DTYPES[ffn.dtype])
