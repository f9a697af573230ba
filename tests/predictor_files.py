"""Predictor files for tiny models, made from the checkpoint itself: exact, random, or one that names every neuron."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from flashllm.format.install import install_predictors
from flashllm.format.manifest import Manifest
from flashllm.format.model_files import FFN, PREDICTOR_METADATA

KINDS = ("exact", "random", "all", "none", "prefetch")  # "prefetch": "random", and predictors of the next layer
MARGIN = 0.05  # an "exact" predictor names every neuron that comes this near to firing: fp16 factors are rounded


def make_predictors(kind: str, source: Path, layer: int, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """{a, b, bias, threshold} of one layer; `source` is the Hugging Face folder, an OPT in one file."""
    weights = load_file(source / "model.safetensors")
    up = weights[f"model.decoder.layers.{layer}.fc1.weight"].float()
    up_bias = weights.get(f"model.decoder.layers.{layer}.fc1.bias", torch.zeros(len(up))).float()
    d_ff, d_model = up.shape
    if kind == "exact":  # full rank, so what fires is among what is named
        a, b, bias, threshold = torch.eye(d_model), up, up_bias, -MARGIN
    elif kind in ("random", "prefetch"):  # names about a third, whoever fires
        generator = torch.Generator().manual_seed(100 * seed + layer)
        a = torch.randn((4, d_model), generator=generator) / d_model**0.5
        b, bias, threshold = torch.randn((d_ff, 4), generator=generator), torch.zeros(d_ff), 0.8
    else:
        a, b, bias = torch.zeros((1, d_model)), torch.zeros((d_ff, 1)), torch.zeros(d_ff)
        threshold = {"all": -1.0, "none": 1.0}[kind]
    return {"a": a.half(), "b": b.half(), "bias": bias, "threshold": torch.tensor([threshold])}


def write_plain(path, model, *, ranks=(4, 4), d_ff=256, metadata=(), more=()):
    """A file of predictors of ones, for a model directory of layers of 64 and 256."""
    tensors = {}
    for layer, rank in enumerate(ranks):
        tensors[f"layers.{layer}.a"] = torch.ones(rank, 64).half()
        tensors[f"layers.{layer}.b"] = torch.ones(d_ff, rank).half()
        tensors[f"layers.{layer}.bias"] = torch.ones(d_ff)
        tensors[f"layers.{layer}.threshold"] = torch.full((1,), float(rank))
    facts = {**PREDICTOR_METADATA, "model_sha256": Manifest.load(model).files[FFN].sha256, **dict(metadata)}
    save_file({**tensors, **dict(more)}, path, facts)
    return path


def install(kind: str, source: Path, directory: Path, scratch: Path) -> None:
    """Put predictors of a kind into the model directory made from `source`."""
    manifest = Manifest.load(directory)
    tensors = {}
    for layer in range(manifest.architecture.num_layers):
        for name, tensor in make_predictors(kind, source, layer).items():
            tensors[f"layers.{layer}.{name}"] = tensor.contiguous()
        if kind == "prefetch" and layer > 0:
            near, other = (make_predictors("random", source, layer, seed=seed) for seed in (0, 1))
            near["b"] = near["b"] + 0.3 * other["b"]  # right often enough to be read
            for name, tensor in near.items():
                tensors[f"layers.{layer}.early_{name}"] = tensor.contiguous()
    path = scratch / f"{kind}.safetensors"
    save_file(tensors, path, metadata={**PREDICTOR_METADATA, "model_sha256": manifest.files[FFN].sha256})
    install_predictors(directory, path)
