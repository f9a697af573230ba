"""Sparsify a converted model: a threshold a layer on what the gate's activation lets through (Lee et al., 2024: CATS).

A neuron whose |activation(gate(x))| is below its layer's cut counts as zero, in every pass. The cuts are the quantiles
of the wanted share on one half of a text's windows; perplexity with and without them is that of the other half.
Writes the manifest, the margins of gates in 4 bits, and how often each neuron is named; the weights stay as they are.
"""

import dataclasses
import gc
import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Unpack

import numpy as np

from flashllm.base.files import Progress, fsync_directory, iterate_chunks, read_json_object, write_atomically
from flashllm.base.machine import available_nbytes, process_nbytes
from flashllm.config import RunConfig
from flashllm.convert.checkpoint.opened import identity
from flashllm.convert.choices import Choices
from flashllm.convert.hub import Say
from flashllm.convert.run import check_destination, convert
from flashllm.engine.model import Model
from flashllm.errors import UsageError
from flashllm.format.install import install_files
from flashllm.format.manifest import Manifest, predictor_ranks
from flashllm.format.manifest_values import Sparsity
from flashllm.format.model_dir import ModelDir
from flashllm.format.model_files import POPULARITY, PREDICTORS
from flashllm.format.popularity import Popularity, encode_popularity
from flashllm.format.predictors import margin_above
from flashllm.format.safetensors import read_header
from flashllm.generate.tokenizer import Tokenizer
from flashllm.pack.gates import Gates
from flashllm.pack.score import SAMPLES, Inputs, Zeros, check_finite, perplexity, read_text, split_windows
from flashllm.plan.resolve import resolve

_MADE_FROM = ".made_from"  # in the dense model: what it was converted from, and how
GATE_RECALL = 0.995  # of the neurons that fire on the calibrating text, named by gates in 4 bits


def check_can_sparsify(manifest: Manifest, path: Path) -> None:
    """UsageError, saying what to do, where nothing could tell which neurons the cuts leave."""
    if not manifest.architecture.gated:
        raise UsageError(f"{path}: --sparsify puts thresholds on gates, and the FFN of this model has none")
    if not manifest.resident_gate and not has_coded_gates(path, manifest):
        raise UsageError(f"{path}: --sparsify needs gates that name the active neurons: --gate resident or 4bit")


def has_coded_gates(path: Path, manifest: Manifest) -> bool:
    """True where the model's predictors are its gates in 4 bits."""
    return PREDICTORS in manifest.files and 0 in predictor_ranks(path / PREDICTORS, manifest)


def sparsify(path: Path, share: float, text: Path, *, progress: Progress | None = None) -> Manifest:
    """Cut the share `share` of the gate's activations in the model directory `path`; its new manifest.

    `text`: a file, by which cuts are chosen and judged. Memory: as a run without a limit, and the FFN inputs of SAMPLES
    tokens. UsageError for a share that cannot be, a model or a text that does not serve; FlashError where the model
    computes no finite loss; errors of `Model.open`.
    """
    if not (math.isfinite(share) and 0 < share < 1):
        raise UsageError(f"--sparsify must be a share of zeros between 0 and 1, not {share}")
    directory = ModelDir.open(path).with_sparsity(None)
    check_can_sparsify(directory.manifest, path)
    coded = has_coded_gates(path, directory.manifest)
    ids = Tokenizer.load(path).encode(read_text(text), add_special=False)
    calibrating, scored = split_windows(ids, directory.block.context)
    passes = itertools.count(1)
    total = len(calibrating) + (3 if coded else 2) * len(scored)

    def done() -> None:
        if progress is not None:
            progress(text.name, next(passes), total)

    # 1. The dense model: its perplexity, and what its gates see.
    layers = directory.architecture.num_layers
    inputs = Inputs(layers, max(1, sum(map(len, calibrating)) // SAMPLES))
    with _loaded(directory, RunConfig(mode="dense")) as model:
        perplexity(model, calibrating, observer=inputs, done=done)
        dense = perplexity(model, scored, done=done)
        check_finite(text, dense)
        cuts, margins, popularity = _chosen(Gates(model), inputs, layers, share, coded=coded)
        tokens = len(inputs.of(0))
    del inputs
    sparsity = Sparsity(
        share=share,
        cuts=cuts,
        zeros=share,
        perplexity=dense,
        dense_perplexity=dense,
        scored_tokens=sum(len(window) - 1 for window in scored),
        text=text.name,
    )
    # 2. The margins, which the gates in 4 bits need from here on.
    if coded:
        header = read_header(path / PREDICTORS)
        changes = {
            header.tensors[f"layers.{layer}.margin"].offset: margin_above(margin).tobytes()
            for layer, margin in enumerate(margins)
        }
        install_files(path, {PREDICTORS: _patched(path / PREDICTORS, changes)})
    # 3. The model with its cuts: how many neurons are zero, and its perplexity as it will run.
    directory = ModelDir.open(path).with_sparsity(sparsity)
    zeros = Zeros()
    with _loaded(directory, RunConfig(mode="dense")) as model:
        found = perplexity(model, scored, observer=zeros, done=done)
    if coded:
        with _loaded(directory, RunConfig(mode="sparse", prompts="sparse")) as model:
            found = perplexity(model, scored, done=done)
    check_finite(text, found)
    sparsity = dataclasses.replace(sparsity, zeros=zeros.zeros / zeros.values, perplexity=found)
    named = encode_popularity(popularity, tokens=tokens, measured_on=text.name)
    return install_files(path, {POPULARITY: named}, sparsity=sparsity)


def convert_sparsified(
    src: Path,
    dst: Path,
    share: float,
    text: Path,
    *,
    source_name: str | None = None,
    say: Say | None = None,
    progress: Progress | None = None,
    scoring: Progress | None = None,
    **choices: Unpack[Choices],
) -> Manifest:
    """Convert `src` into the new model directory `dst`, sparsified; arguments and errors as `convert` and `sparsify`.

    The gate is "resident" unless another is chosen. Converts into `dst`.dense first, which an interrupted run leaves
    and the next one goes on with.
    """
    dst = Path(os.path.abspath(dst))
    work = dst.with_name(dst.name + ".dense")
    check_destination(dst)
    read_text(text)
    gate = choices.get("gate", "resident")
    if gate == "rows":
        raise UsageError("--sparsify needs gates that name the active neurons: --gate resident or 4bit, not rows")
    wanted: Choices = {**choices, "gate": gate, "predictors": True}
    made_from, record = {"source": identity(src), "name": source_name, "choices": wanted}, work / _MADE_FROM
    if not work.exists():
        convert(src, work, source_name=source_name, say=say, progress=progress, **wanted)
        write_atomically(record, json.dumps(made_from).encode())
    elif not record.exists() or read_json_object(record) != made_from:
        raise UsageError(f"{work}: is left from another conversion; remove it, then try again")
    manifest = sparsify(work, share, text, progress=scoring)
    os.rename(work, dst)
    (dst / _MADE_FROM).unlink()
    fsync_directory(dst.parent)
    return manifest


def _loaded(directory: ModelDir, config: RunConfig) -> Model:
    gc.collect()  # of the model before, which is large
    return Model(directory, resolve(config, directory, available=available_nbytes(), process=process_nbytes()), config)


def _chosen(
    gates: Gates, inputs: Inputs, layers: int, share: float, *, coded: bool
) -> tuple[tuple[float, ...], list[float], Popularity]:
    """(cuts, margins, shares of tokens in which each neuron is named) by layer; margins of gates in 4 bits alone."""
    cuts, margins, popularity = [], [], []
    for layer in range(layers):
        x = inputs.of(layer)
        products = gates.products(layer, x)
        magnitudes = gates.magnitudes(layer, products)
        cut = float(np.quantile(magnitudes, share, method="higher"))
        cuts.append(cut)
        named = firing = (magnitudes >= np.float32(cut)) & (magnitudes > 0)
        if coded:
            distances = gates.distances(layer, gates.coded_products(layer, x), cut)
            margins.append(float(np.quantile(distances[firing], GATE_RECALL, method="higher")) if firing.any() else 0.0)
            named = distances <= np.float32(margins[-1])
        popularity.append(named.mean(axis=0, dtype=np.float32))
    return tuple(cuts), margins, tuple(popularity)


def _patched(path: Path, changes: Mapping[int, bytes]) -> Iterator[bytes]:
    """The file's bytes with those at some offsets replaced, none of which lie in two chunks."""
    first = 0
    for chunk in map(bytearray, iterate_chunks(path)):
        for offset, stored in changes.items():
            if 0 <= (at := offset - first) < len(chunk):
                chunk[at : at + len(stored)] = stored
        first += len(chunk)
        yield bytes(chunk)
