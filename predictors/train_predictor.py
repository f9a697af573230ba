"""Train the activity predictors of a converted model, layer by layer, on the machine that will run it.

The hidden states of all samples lie in scratch files and pass one layer at a time: its neurons stream from flash once a
batch, its FFN inputs and active sets are recorded, its predictor is fitted and calibrated, and the states go on to the
next layer. Finished steps are kept in the scratch directory, so a killed run resumes at the step it was in, with the
results it would have had. Installs the predictors and the calibrated cache need into the model directory.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fit import FitOptions, LayerPredictor, count_logits, fit, input_statistics, judge
from numpy.typing import NDArray
from passes import BATCH_TOKENS, ActivityRecord, HiddenStates, LayerPass, WeightBlocks, kept_positions
from recipes import AutoRanks, Recipe, auto_rank, parse_ranks, probe_rank
from samples import DataError, SampleReport, read_hub, read_shards, token_rows
from training_plan import TrainingPlan, plan_training
from transformers import AutoTokenizer

from flashllm import FlashModel
from flashllm.budget import DEFAULT_WINDOW
from flashllm.demo import resolve_model
from flashllm.errors import FlashError, UsageError
from flashllm.files import locked_directory, write_atomically
from flashllm.manifest import Calibration, Manifest, install_predictors
from flashllm.model import read_config
from flashllm.model_files import FFN
from flashllm.progress import ProgressBar
from flashllm.svd_predictor import low_rank_predictor
from flashllm.units import parse_size
from flashllm.untrained import predictor_bytes, predictors_header

VALIDATION_SHARE = 0.1
CALIBRATION_SHARE = 0.1  # of the rest: seen in training, like the paper's; the validation share is not
LONG_CONTEXT = 512  # tokens: shorter samples than this and the model's context get a note
CURVE = (0.8, 0.9, 0.95, 0.96, 0.97, 0.98, 0.99, 0.995)  # recalls of the reported trade-off


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Samples by use: [0, calibration) and on to `validation` are trained on, the latter also set the threshold."""

    calibration: int
    validation: int
    end: int

    @classmethod
    def of(cls, samples: int) -> "Split":
        validation = max(1, int(samples * (1 - VALIDATION_SHARE)))
        return cls(calibration=int(validation * (1 - CALIBRATION_SHARE)), validation=validation, end=samples)


class Trainer:
    """The steps of a run, in a locked scratch directory."""

    def __init__(
        self,
        args: argparse.Namespace,
        recipe: Recipe | AutoRanks,
        model: Any,
        rows: NDArray[np.int64],
        plan: TrainingPlan,
    ) -> None:
        self._args, self._recipe, self._model, self._rows = args, recipe, model, rows
        self._shape, self._scratch = plan.shape, args.scratch
        self._architecture = model.engine.manifest.architecture
        self._states = HiddenStates(args.scratch, plan.shape, model.dtype)
        self._record = ActivityRecord(args.scratch, plan.shape)
        self._kept = kept_positions(plan.shape, args.seed)
        self._pass = LayerPass(model)
        self._split = Split.of(len(rows))
        self._batch = max(1, BATCH_TOKENS // plan.shape.tokens)

    def run(self, progress: ProgressBar) -> tuple[list[LayerPredictor], list[dict[str, Any]]]:
        """Every layer's predictor and result, those of earlier runs included."""
        layers, predictors, results = self._architecture.num_layers, [], []
        units = self._shape.samples * self._shape.tokens  # tokens through a layer: the measure of progress
        self._embed()
        for layer in range(layers):
            saved = self._saved(layer)
            if saved is None:
                began = time.monotonic()
                saved = self._layer(
                    layer, lambda done, at=layer: progress(f"layer {at}", at * units + done, layers * units)
                )
                result = saved[1]
                result["seconds"] = time.monotonic() - began
                self._save(layer, *saved)
                print(describe(layer, result, (layers - layer - 1) * result["seconds"]), file=sys.stderr, flush=True)
            predictors.append(saved[0])
            results.append(saved[1])
            progress(f"layer {layer}", (layer + 1) * units, layers * units)
        return predictors, results

    def _embed(self) -> None:
        """The states that enter layer 0, where no run came further; and what layers are called with."""
        wanted = not self._done("embedded")
        for first, ids in self._batches():
            if wanted or first == 0 or first + self._batch >= len(self._rows):
                states = self._pass.embed(torch.from_numpy(ids))
                if wanted:
                    self._states.write(0, first, states)
        self._mark("embedded")

    def _layer(self, layer: int, progress: Any) -> tuple[LayerPredictor, dict[str, Any]]:
        """One layer: pass, fit, calibrate, judge."""
        shape, split = self._shape, self._split
        ffn = self._model.engine.ffns[layer]
        weights = WeightBlocks(ffn, shape.d_ff)
        # 1. All samples pass the layer.
        if not self._done(f"passed.{layer:03d}"):
            first_batch = self._states.read(layer, 0, min(self._batch, shape.samples))
            edges = weights.code_edges(self._pass, layer, first_batch)
            for first, ids in self._batches():
                end = first + len(ids)
                before = self._states.read(layer, first, end)
                after, inputs, codes = self._pass.run(layer, before, self._kept[first:end], edges)
                self._states.write(layer + 1, first, after)
                self._record.write(first, inputs, codes)
                progress(end * shape.tokens // 2)
            self._mark(f"passed.{layer:03d}")

        # 2. The best low-rank map is trained on.
        def training() -> Iterator[Any]:
            return self._record.chunks(0, split.validation)

        def calibration() -> Iterator[Any]:
            return self._record.chunks(split.calibration, split.validation)

        def validation() -> Iterator[Any]:
            return self._record.chunks(split.validation, split.end)

        statistics = input_statistics(training)

        def low_rank(rank: int) -> LayerPredictor:
            bias = None if ffn.up_bias is None else ffn.up_bias.numpy()
            start = LayerPredictor.from_low_rank(low_rank_predictor(weights.drivers, bias, statistics, rank)).rounded()
            start.threshold = count_logits(start, calibration, shape.d_ff).threshold_for(self._args.recall)
            return start

        if isinstance(self._recipe, AutoRanks):
            probe = judge(low_rank(probe_rank(shape.d_model)), calibration, shape.d_ff)
            waste = probe.predicted_share - probe.true_share * (1 - probe.false_negative)
            rank = auto_rank(shape.d_model, waste, self._recipe.scale)
        else:
            rank = min(self._recipe.rank(layer, self._architecture.num_layers), shape.d_model)
        svd = None
        if rank == 0:
            predictor = LayerPredictor.everything(shape.d_model, shape.d_ff)
        else:
            start = low_rank(rank)
            svd = judge(start, validation, shape.d_ff)
            predictor = fit(start, training, fit_options(self._args, layer), shape.d_ff) if self._args.epochs else start
            predictor.threshold = count_logits(predictor, calibration, shape.d_ff).threshold_for(self._args.recall)
        # 3. Judged on samples never seen.
        quality = judge(predictor, validation, shape.d_ff)
        if svd is not None and svd.predicted_share <= quality.predicted_share:
            predictor, quality = start, svd  # training has not helped
        counts = count_logits(predictor, validation, shape.d_ff)
        active, need = self._needs(predictor)
        result = {
            **dataclasses.asdict(quality),
            "mean_active": active,
            "req": need,
            "threshold": predictor.threshold,
            "svd": None if svd is None else dataclasses.asdict(svd),
            "curve": curve(counts),
        }
        return predictor, result

    def _needs(self, predictor: LayerPredictor) -> tuple[float, int]:
        """Mean predicted neurons a token, and the most of any window, over the validation samples (paper A, Req_i)."""
        total = tokens = most = 0
        for x, _ in self._record.chunks(self._split.validation, self._split.end):
            for sample in x.split(self._shape.kept):
                guess = (predictor.logits(sample) > predictor.threshold).numpy()
                total, tokens = total + int(guess.sum()), tokens + len(guess)
                most = max(most, needed_rows(guess, self._args.window))
        return total / tokens, most

    def _batches(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        for first in range(0, len(self._rows), self._batch):
            yield first, self._rows[first : first + self._batch]

    def _saved(self, layer: int) -> tuple[LayerPredictor, dict[str, Any]] | None:
        path = self._scratch / f"layer.{layer:03d}.pt"
        if not path.exists():
            return None
        saved = torch.load(path, weights_only=True)
        return LayerPredictor(saved["a"], saved["b"], saved["bias"], saved["threshold"]), saved["result"]

    def _save(self, layer: int, predictor: LayerPredictor, result: dict[str, Any]) -> None:
        partial = self._scratch / "layer.partial"
        with open(partial, "wb") as file:
            torch.save({**dataclasses.asdict(predictor), "result": result}, file)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(self._scratch / f"layer.{layer:03d}.pt")
        self._states.forget(layer)
        self._record.forget()

    def _done(self, step: str) -> bool:
        return (self._scratch / f"{step}.done").exists()

    def _mark(self, step: str) -> None:
        """A step is done, and what it wrote is on disk: also a power cut resumes."""
        for path in self._scratch.glob("*.bin"):
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        write_atomically(self._scratch / f"{step}.done", b"")


def fit_options(args: argparse.Namespace, layer: int) -> FitOptions:
    """The options of one layer's training. ValueError for values that cannot be."""
    return FitOptions(
        epochs=args.epochs,
        seed=args.seed + layer,
        positive_weight=args.positive_weight,
        learning_rate=args.learning_rate,
    )


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


def describe(layer: int, result: dict[str, Any], seconds_left: float) -> str:
    """A finished layer's line."""
    return (
        f"layer {layer}: rank {result['rank']}, active {result['true_share']:.2%}, predicted "
        f"{result['predicted_share']:.2%}, false negatives {result['false_negative']:.2%}, false positives "
        f"{result['false_positive']:.2%}; about {seconds_left / 60:.1f} min left"
    )


def save_predictors(path: Path, predictors: list[LayerPredictor], manifest: Manifest, metadata: dict[str, str]) -> None:
    """Write the predictor file of the model that `manifest` describes; equal predictors give equal bytes."""
    ranks = [len(predictor.a) for predictor in predictors]
    with open(path, "wb") as file:
        file.write(predictors_header(manifest.architecture, ranks, manifest.files[FFN].sha256, metadata))
        for p in predictors:
            for data in predictor_bytes(p.a.numpy(), p.b.numpy(), p.bias.numpy(), p.threshold):
                file.write(data.data)


def load_samples(args: argparse.Namespace, tokenizer: Any) -> tuple[NDArray[np.int64], SampleReport]:
    """Token rows [samples, tokens] and what became of the documents."""
    report = SampleReport()

    def texts() -> Iterator[str]:
        if args.data_files:
            return read_shards(args.data_files, report, strict=args.strict)
        return read_hub(args.dataset, args.config, limit=2 * args.samples)

    rows = token_rows(
        texts,
        tokenizer,
        samples=args.samples,
        tokens_per_sample=args.tokens_per_sample,
        report=report,
        seed=args.seed,
    )
    return rows, report


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", help="model directory or Hugging Face folder; the bundled demo by default")
    parser.add_argument("--dataset", default="allenai/c4", help="hub data set, streamed")
    parser.add_argument("--config", default="en", help="its configuration")
    parser.add_argument("--data-files", type=Path, nargs="+", help="C4-schema .json(l)(.gz) shards instead")
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--tokens-per-sample", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=2, help="0: the truncated SVD as it is, calibrated")
    parser.add_argument("--memory", help="limit for everything the process holds, e.g. 7GB")
    parser.add_argument("--scratch", type=Path, help="default: MODEL.predictors beside the model")
    parser.add_argument(
        "--ranks", default="AUTO", help='AUTO, AUTO*2, a rank, "128:1024x4" (last 4 layers), or a recipe'
    )
    parser.add_argument("--recall", type=float, default=0.97, help="share of truly active neurons to find, per layer")
    parser.add_argument("--positions", type=int, default=400_000, help="positions trained on, at most")
    parser.add_argument("--positive-weight", type=float, default=4.0, help="cost of a missed neuron over a wrong one's")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--window", type=int, default=DEFAULT_WINDOW, help="tokens, for the calibrated cache need")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="compute threads; the result depends on their number")
    parser.add_argument("--resume", action="store_true", help="go on with the scratch directory of a killed run")
    parser.add_argument("--strict", action="store_true", help="stop at the first bad document")
    parser.add_argument("--json", type=Path, help="write the report here")
    return parser


def check_args(args: argparse.Namespace) -> Recipe | AutoRanks:
    """The recipe. UsageError for values that cannot be."""
    for name, least in (("samples", 3), ("tokens_per_sample", 2), ("epochs", 0), ("positions", 1), ("window", 1)):
        if getattr(args, name) < least:
            raise UsageError(f"--{name.replace('_', '-')} must be at least {least}, not {getattr(args, name)}")
    if not 0.0 < args.recall < 1.0:
        raise UsageError(f"--recall must lie between 0 and 1, not {args.recall}")
    try:
        fit_options(args, 0)
        return parse_ranks(args.ranks)
    except ValueError as error:
        raise UsageError(str(error)) from None


def identity(args: argparse.Namespace, manifest: Manifest, rows: NDArray[np.int64]) -> bytes:
    """Everything the result depends on: a scratch directory is resumed only by a run that would give the same."""
    options = {
        name: value
        for name, value in vars(args).items()
        if name not in ("model", "scratch", "resume", "json", "memory", "data_files", "dataset", "config", "strict")
    }
    value = {
        "options": options,
        "threads": torch.get_num_threads(),
        "model": manifest.files[FFN].sha256,
        "samples": hashlib.sha256(rows.tobytes()).hexdigest(),
    }
    return json.dumps(value, sort_keys=True, default=str).encode()


@contextlib.contextmanager
def scratch_directory(path: Path, *, resume: bool) -> Iterator[None]:
    """Made or resumed, and locked."""
    if path.exists() and not resume:
        raise UsageError(f"{path} exists: --resume goes on with it, or remove it")
    path.mkdir(parents=True, exist_ok=True)
    with locked_directory(path, f"{path}: another training is at work here; wait for it to finish"):
        yield


def run(args: argparse.Namespace) -> int:
    started = time.monotonic()
    recipe = check_args(args)
    directory = resolve_model(args.model, say=lambda line: print(line, file=sys.stderr))
    manifest = Manifest.load(directory)
    if args.threads:
        torch.set_num_threads(args.threads)
    args.scratch = args.scratch or directory.with_name(directory.name + ".predictors")
    with scratch_directory(args.scratch, resume=args.resume):
        summary = train(args, recipe, directory, manifest)
        for leftover in args.scratch.iterdir():
            leftover.unlink()
    args.scratch.rmdir()
    summary["seconds"] = time.monotonic() - started
    text = json.dumps(summary)
    if args.json:
        args.json.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


def train(args: argparse.Namespace, recipe: Recipe | AutoRanks, directory: Path, manifest: Manifest) -> dict[str, Any]:
    """Train and install; the report."""
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    rows, report = load_samples(args, tokenizer)
    print(report, file=sys.stderr)
    mine, known = identity(args, manifest, rows), args.scratch / "identity.json"
    if known.exists() and known.read_bytes() != mine:
        raise UsageError(f"{args.scratch} is of a run with other options, data or model; remove it to start again")
    write_atomically(known, mine)

    plan = plan_training(
        directory,
        manifest,
        samples=len(rows),
        tokens=rows.shape[1],
        positions=args.positions,
        recipe=recipe,
        options=fit_options(args, 0),
        limit=parse_size(args.memory) if args.memory else None,
        scratch=args.scratch,
    )
    print(plan.table(), file=sys.stderr, flush=True)
    context = int(read_config(directory).get("max_position_embeddings", rows.shape[1]))
    if rows.shape[1] < min(context, LONG_CONTEXT):
        # Measured on the demo: trained on 128 tokens, layers missed up to 11 % instead of 2 % beyond (bench/LOG.md).
        print(
            f"note: the model's context is {context} tokens, and activity changes with position; predictors see only "
            f"the first {rows.shape[1]}: fewer but longer --samples (--tokens-per-sample) are better",
            file=sys.stderr,
        )
    model = FlashModel.from_pretrained(
        directory, memory=plan.model_limit, mode="dense", threads=args.threads, context=rows.shape[1]
    )
    with model.engine, ProgressBar("train", unit="tokens") as bar:
        trainer = Trainer(args, recipe, model, rows, plan)
        predictors, results = trainer.run(bar)
    path = args.scratch / "predictors.safetensors"
    save_predictors(path, predictors, manifest, {"samples": str(len(rows)), "recall": str(args.recall)})
    split = Split.of(len(rows))
    calibration = Calibration(
        window=args.window,
        mean_active=tuple(result["mean_active"] for result in results),
        req=tuple(result["req"] for result in results),
        tokens=(split.end - split.validation) * plan.shape.kept,
        text="validation share of the predictors' training samples",
    )
    installed = install_predictors(directory, path, calibration)
    return {
        "layers": results,
        "samples": len(rows),
        "data": str(report),
        "predictor_bytes": path.stat().st_size,
        "model_bytes": sum(entry.nbytes for entry in installed.files.values()),
    }


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        return run(args)
    except (FlashError, DataError) as error:
        print(f"train_predictor: error: {error}", file=sys.stderr)
        return getattr(error, "exit_status", 1)


if __name__ == "__main__":
    sys.exit(main())
