"""The steps of a training run: every layer's pass, fit, calibration and judgement, kept in a scratch directory.

The hidden states of all samples pass one layer at a time. A finished step leaves a file, so that a killed run goes on
at the step it was in with the results it would have had. Knows nothing of command lines, text or model directories.
"""

import dataclasses
import errno
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from weights import LayerWeights

from flashllm.base.files import naming, write_atomically
from flashllm.base.progress import ProgressBar
from flashllm.convert.untrained.svd import low_rank_predictor
from flashllm.engine.model import Model
from flashllm.errors import FlashIOError, FormatError
from training.fit import (
    Chunk,
    Chunks,
    FitOptions,
    LayerPredictor,
    LayerQuality,
    count_logits,
    fit,
    input_statistics,
    judge,
)
from training.passes import ActivityRecord, HiddenStates, LayerPass, PassShape, code_edges, kept_positions
from training.prefetch_start import linear_start
from training.recipes import AutoRanks, Recipe, probe_rank

VALIDATION_SHARE = 0.1
CALIBRATION_SHARE = 0.1  # of the rest
PREFETCH_RANK_DIVISOR = 2  # prefetch predictors take half the memory of the layer's own
# What is kept in the scratch directory, as patterns; a kill leaves "tmp" files of atomic writes.
SCRATCH_FILES = ("states.*.bin", "inputs.*.bin", "codes.*.bin", "*.done", ".*.done.tmp", "layer.*.pt", "layer.partial")
CURVE = (0.8, 0.9, 0.95, 0.96, 0.97, 0.98, 0.99, 0.995)  # recalls of the reported trade-off


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """Settings that decide a run's results, besides the model and the samples."""

    recipe: Recipe | AutoRanks
    fit: FitOptions  # of layer 0; layer i adds i to the seed
    recall: float  # of the truly active, in each layer
    bits: int  # of the factors' weights, 8 or 16
    window: int  # tokens, of the calibrated cache need
    prefetch_precision: float | None = None  # None: no prefetch predictors


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Samples by use: [0, calibration) are trained on, from there to `validation` stop the training and set the
    threshold, and the rest are judged on."""

    calibration: int
    validation: int
    end: int

    @classmethod
    def of(cls, samples: int) -> "Split":
        validation = max(2, int(samples * (1 - VALIDATION_SHARE)))
        return cls(
            calibration=min(validation - 1, int(validation * (1 - CALIBRATION_SHARE))),
            validation=validation,
            end=samples,
        )


@dataclasses.dataclass(slots=True)
class LayerResult:
    """A layer's predictors and what is reported of them."""

    predictor: LayerPredictor
    prefetch: LayerPredictor | None
    popularity: torch.Tensor  # [neurons], fp32: the share of the judged tokens in which each is named
    report: dict[str, Any]


class Trainer:
    """The steps of a run, in a locked scratch directory."""

    def __init__(
        self, options: TrainOptions, model: Model, rows: NDArray[np.int64], shape: PassShape, scratch: Path
    ) -> None:
        self._options, self._model, self._rows = options, model, rows
        self._shape, self._scratch = shape, scratch
        self._architecture = model.manifest.architecture
        self._states = HiddenStates(scratch, shape, model.directory.dtype)
        self._record = ActivityRecord(scratch, shape)
        self._kept = kept_positions(shape, options.fit.seed)
        self._pass = LayerPass(model, shape)
        self.split = Split.of(len(rows))
        self._batch = shape.batch_samples

    def seconds(self, ranks: list[int]) -> float:
        """Times of a run, from a slice of it measured here: a batch through a layer, a step of training, an SVD."""
        shape, fit_options = self._shape, self._options.fit
        layers = self._architecture.num_layers
        edges = np.full((2, shape.d_ff), np.inf, np.float32)
        states = self._pass.embed(self._rows[: self._batch])
        _, inputs, codes = self._pass.run(0, states, self._kept[: self._batch], edges)
        per_batch = _seconds(lambda: self._pass.run(0, states, self._kept[: self._batch], edges))
        rank = max(1, sum(ranks) // len(ranks))
        weights = LayerWeights(self._model, 0)
        x = torch.from_numpy(inputs)
        began = time.perf_counter()
        start = low_rank_predictor(weights.drivers, None, input_statistics(lambda: iter([(x, torch.empty(0))])), rank)
        per_svd = time.perf_counter() - began
        many = torch.arange(fit_options.batch_tokens) % len(x)
        chunk = (x[many], torch.from_numpy(codes)[many])
        once = dataclasses.replace(fit_options, epochs=1)
        predictor = LayerPredictor.from_low_rank(start)
        per_step = _seconds(lambda: fit(predictor, lambda: iter([chunk]), once, self._architecture.width(0)))
        steps = shape.samples * shape.kept / fit_options.batch_tokens
        # Statistics, thresholds, losses and judging cost about as much as half an epoch.
        fitting = per_svd + (fit_options.epochs + 0.5) * steps * per_step
        heads = 1 if self._options.prefetch_precision is None else 2 - 1 / layers
        probing = per_svd if isinstance(self._options.recipe, AutoRanks) else 0.0
        per_layer = len(self._rows) / self._batch * per_batch + heads * fitting + probing
        return per_layer * sum(not self._path(layer).exists() for layer in range(layers))

    def run(self, progress: ProgressBar) -> tuple[list[dict[str, Any]], list[NDArray[np.float32]]]:
        """(report, popularity) by layer, those of earlier runs included. Predictors wait on disk: see `result`."""
        layers, reports, popularity = self._architecture.num_layers, [], []
        units = self._shape.samples * self._shape.tokens  # tokens through a layer: the measure of progress
        self._embed()
        for layer in range(layers):
            if not self._path(layer).exists():
                began = time.monotonic()
                made = self._layer(
                    layer, lambda done, at=layer: progress(f"layer {at}", at * units + done, layers * units)
                )
                made.report["seconds"] = seconds = time.monotonic() - began
                self._save(layer, made)
                print(describe(layer, made.report, (layers - layer - 1) * seconds), file=sys.stderr, flush=True)
                del made
            result = self.result(layer)
            reports.append(result.report)
            popularity.append(result.popularity.numpy())
            progress(f"layer {layer}", (layer + 1) * units, layers * units)
        return reports, popularity

    def result(self, layer: int) -> LayerResult:
        """Result of a finished layer, from its file: all of them together would take more memory than the largest step.

        FlashIOError where the file cannot be read, FormatError where it is not what was written.
        """
        path = self._path(layer)
        try:
            saved = torch.load(path, weights_only=True)
            prefetch = saved["early"]
            return LayerResult(
                LayerPredictor(**saved["predictor"]),
                None if prefetch is None else LayerPredictor(**prefetch),
                saved["popularity"],
                saved["report"],
            )
        except (OSError, pickle.UnpicklingError, RuntimeError, EOFError, LookupError, TypeError, ValueError) as error:
            # EINVAL: what zipfile makes of a file that was cut short.
            if isinstance(error, OSError) and error.errno != errno.EINVAL:
                raise FlashIOError(f"{path}: cannot be read: {error.strerror}; check the drive") from error
            message = f"{path}: damaged ({type(error).__name__})"
            raise FormatError(f"{message}; if that is so again, remove {self._scratch} and train anew") from error

    def _embed(self) -> None:
        """The states that enter layer 0, where no run came further."""
        if self._done("embedded"):
            return
        for first, ids in self._batches():
            self._states.write(0, first, self._pass.embed(ids))
        self._mark("embedded")

    def _layer(self, layer: int, progress: Any) -> LayerResult:
        """One layer: pass, fit, calibrate, judge."""
        if not self._done(f"passed.{layer:03d}"):
            self._pass_samples(layer, progress)
            self._mark(f"passed.{layer:03d}")
        predictor, popularity, report = self._fit_layer(layer)
        prefetch = None
        if self._options.prefetch_precision is not None and layer > 0:
            rank = max(1, len(predictor.a) // PREFETCH_RANK_DIVISOR)
            prefetch, report["early"] = self._fit_prefetch(layer, rank, self._options.prefetch_precision)
        return LayerResult(predictor, prefetch, popularity, report)

    def _pass_samples(self, layer: int, progress: Any) -> None:
        first_batch = self._states.read(layer, 0, min(self._batch, self._shape.samples))
        edges = code_edges(self._pass, LayerWeights(self._model, layer), first_batch, self._shape.d_ff)
        for first, ids in self._batches():
            end = first + len(ids)
            before = self._states.read(layer, first, end)
            after, inputs, codes = self._pass.run(layer, before, self._kept[first:end], edges)
            self._states.write(layer + 1, first, after)
            self._record.write(layer, first, inputs, codes)
            progress(end * self._shape.tokens // 2)

    def _chunks(self, layer: int, first: int, end: int, *, inputs_of: int | None = None) -> Chunks:
        def chunks() -> Iterator[Chunk]:
            return self._record.chunks(layer, first, end, inputs_of=inputs_of)

        return chunks

    def _fit_layer(self, layer: int) -> tuple[LayerPredictor, torch.Tensor, dict[str, Any]]:
        """A layer's predictor, thresholded and judged; the popularity of its neurons."""
        options, shape, split = self._options, self._shape, self.split
        neurons = self._architecture.width(layer)
        weights = LayerWeights(self._model, layer)
        training = self._chunks(layer, 0, split.calibration)
        calibration = self._chunks(layer, split.calibration, split.validation)
        validation = self._chunks(layer, split.validation, split.end)
        statistics = input_statistics(training)

        def ready(predictor: LayerPredictor) -> LayerPredictor:
            """As it will be stored, with its threshold."""
            stored = predictor.stored(options.bits)
            stored.threshold = count_logits(stored, calibration, neurons).threshold_for(options.recall)
            return stored

        def low_rank(rank: int) -> LayerPredictor:
            return LayerPredictor.from_low_rank(low_rank_predictor(weights.drivers, weights.bias, statistics, rank))

        if isinstance(options.recipe, AutoRanks):
            probe = judge(ready(low_rank(probe_rank(shape.d_model))), calibration, neurons)
            waste = probe.predicted_share - probe.true_share * (1 - probe.false_negative)
            rank = options.recipe.rank(shape.d_model, waste, options.bits)
        else:
            rank = min(options.recipe.rank(layer, self._architecture.num_layers), shape.d_model)
        svd: LayerQuality | None = None
        losses: list[float] = []
        if rank == 0:
            predictor = LayerPredictor.everything(shape.d_model, neurons)
            quality = judge(predictor, validation, neurons)
        else:
            untrained = low_rank(rank)
            predictor = start = ready(untrained)
            quality = svd = judge(start, validation, neurons)
            if options.fit.epochs:
                trained, losses = fit(untrained, training, self._fit_options(layer), neurons, calibration)
                predictor = ready(trained)
                quality = judge(predictor, validation, neurons)
            if svd.predicted_share <= quality.predicted_share:
                predictor, quality = start, svd  # training has not helped
        counts = count_logits(predictor, validation, neurons)
        named, tokens, need = self._needs(layer, predictor)
        return (
            predictor,
            (named / tokens).float(),
            {
                **dataclasses.asdict(quality),
                "mean_active": int(named.sum()) / tokens,
                "req": need,
                "threshold": predictor.threshold,
                "losses": losses,
                "svd": None if svd is None else dataclasses.asdict(svd),
                "curve": curve(counts),
            },
        )

    def _fit_prefetch(self, layer: int, rank: int, precision: float) -> tuple[LayerPredictor, dict[str, Any]]:
        """A predictor of the layer's active neurons from the FFN input of the layer before."""
        options, split, neurons = self._options, self.split, self._architecture.width(layer)
        weights = LayerWeights(self._model, layer)
        training = self._chunks(layer, 0, split.calibration, inputs_of=layer - 1)
        calibration = self._chunks(layer, split.calibration, split.validation, inputs_of=layer - 1)
        validation = self._chunks(layer, split.validation, split.end, inputs_of=layer - 1)
        now = self._chunks(layer, 0, split.calibration)

        def pairs() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for (before, _), (at, _) in zip(training(), now(), strict=True):
                yield before, at

        start = linear_start(weights.drivers, weights.bias, pairs, rank)
        trained, losses = fit(start, training, self._fit_options(layer), neurons, calibration)
        prefetch = trained.stored(options.bits)
        prefetch.threshold = count_logits(prefetch, calibration, neurons).threshold_for_precision(precision)
        quality = judge(prefetch, validation, neurons)
        found = quality.true_share * (1 - quality.false_negative)
        return prefetch, {
            **dataclasses.asdict(quality),
            "recall": 1 - quality.false_negative,
            "precision": found / max(1e-12, quality.predicted_share),
            "threshold": prefetch.threshold,
            "losses": losses,
        }

    def _fit_options(self, layer: int) -> FitOptions:
        return dataclasses.replace(self._options.fit, seed=self._options.fit.seed + layer)

    def _needs(self, layer: int, predictor: LayerPredictor) -> tuple[torch.Tensor, int, int]:
        """(how often each neuron is named, tokens, the most neurons of any window), over the validation samples (paper
        A, Req_i)."""
        counts = torch.zeros(self._architecture.width(layer), dtype=torch.int64)
        tokens = most = 0
        for x, _ in self._record.chunks(layer, self.split.validation, self.split.end):
            for sample in x.split(self._shape.kept):
                named = predictor.logits(sample) > predictor.threshold
                counts += named.sum(0)
                tokens += len(named)
                most = max(most, needed_rows(named.numpy(), self._options.window))
        return counts, tokens, most

    def _batches(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        for first in range(0, len(self._rows), self._batch):
            yield first, self._rows[first : first + self._batch]

    def _path(self, layer: int) -> Path:
        return self._scratch / f"layer.{layer:03d}.pt"

    def _save(self, layer: int, result: LayerResult) -> None:
        partial = self._scratch / "layer.partial"
        values = dataclasses.asdict(result)
        values["early"] = values.pop("prefetch")  # the file and the report keep the older word
        with naming(partial), open(partial, "wb") as file:
            torch.save(values, file)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(self._path(layer))
        self._states.forget(layer)
        self._record.forget_codes(layer)
        if self._options.prefetch_precision is None:
            self._record.forget_inputs(layer)
        elif layer > 0:
            self._record.forget_inputs(layer - 1)

    def _done(self, step: str) -> bool:
        return (self._scratch / f"{step}.done").exists()

    def _mark(self, step: str) -> None:
        """A step is done, and what it wrote is on disk: also a power cut resumes."""
        for path in self._scratch.glob("*.bin"):
            with naming(path), open(path, "rb") as file:
                os.fsync(file.fileno())
        write_atomically(self._scratch / f"{step}.done", b"")


def _seconds(step: Callable[[], object]) -> float:
    """The least of three: other programs only ever make it longer."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return min(times)


def curve(counts: Any) -> list[dict[str, float]]:
    """Recall and predicted share of the thresholds that reach the recalls of CURVE."""
    points = []
    for recall in CURVE:
        threshold = counts.threshold_for(recall)
        found, density = counts.density_at(threshold)
        points.append({"threshold": threshold, "recall": found, "predicted_share": density})
    return points


def needed_rows(predicted: NDArray[np.bool_], window: int) -> int:
    """The most neurons of any `window` consecutive tokens: predicted [tokens, d_ff] (paper A, Req_i)."""
    most, counts = 0, np.zeros(predicted.shape[1], dtype=np.int32)
    for token in range(len(predicted)):
        counts += predicted[token]
        if token >= window:
            counts -= predicted[token - window]
        most = max(most, int(np.count_nonzero(counts)))
    return most


def describe(layer: int, report: dict[str, Any], seconds_left: float) -> str:
    """A finished layer's line."""
    prefetch = report.get("early")
    found = ""
    if prefetch is not None:
        found = f", prefetch recall {prefetch['recall']:.2%}, precision {prefetch['precision']:.2%}"
    return (
        f"layer {layer}: rank {report['rank']}, active {report['true_share']:.2%}, predicted "
        f"{report['predicted_share']:.2%}, false negatives {report['false_negative']:.2%}, false positives "
        f"{report['false_positive']:.2%}{found}; about {seconds_left / 60:.1f} min left"
    )
