"""Train the activity predictors of a converted model, layer by layer, on the machine that will run it.

The hidden states of all samples lie in scratch files and pass one layer at a time: its neurons stream from flash once a
batch, its FFN inputs and active sets are recorded, its predictor is fitted and calibrated, and the states go on to the
next layer. Finished steps are kept in the scratch directory, so a killed run resumes at the step it was in, with the
results it would have had. Installs the predictors, the calibrated cache need and how often each neuron is named into
the model directory.
"""

import argparse
import contextlib
import hashlib
import json
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from arguments import check_json, hand_over, train_arguments
from masked import predictor_nbytes
from numpy.typing import NDArray
from samples import LEAST_SAMPLES, DataError, SampleReport, read_hub, read_shards, token_rows
from training.fit import FitOptions
from training.plan import plan_training
from training.recipes import Recipe, parse_ranks
from training.stored import StoredPredictor, encode_predictors
from training.trainer import SCRATCH_FILES, LayerResult, Trainer, TrainOptions

from flashllm.base.files import is_there, locked_directory, read_bounded, write_atomically
from flashllm.base.progress import ProgressBar
from flashllm.base.units import format_size, parse_size
from flashllm.config import RunConfig
from flashllm.convert.locate import resolve_model
from flashllm.engine.model import Model
from flashllm.errors import INTERRUPTED, FlashError, UsageError
from flashllm.format.install import install_predictors
from flashllm.format.manifest import Manifest, predictor_ranks
from flashllm.format.manifest_values import Calibration
from flashllm.format.model_dir import ModelDir
from flashllm.format.model_files import FFN, PREDICTORS
from flashllm.format.popularity import encode_popularity
from flashllm.generate.tokenizer import Tokenizer

LONG_CONTEXT = 512  # tokens: shorter samples than this and the model's context get a note
JUDGED_ON = "validation share of the predictors' training samples"
IDENTITY = "identity.json"  # in the scratch directory: of which run its files are
TRAINED = "trained.safetensors"  # there too: the predictors, before they are installed
RESUMABLE = "what is done is kept; the same command with --resume goes on"


def save_predictors(
    path: Path, results: Iterable[LayerResult], manifest: Manifest, bits: int, metadata: dict[str, str]
) -> None:
    """Write the predictor file of the model that `manifest` describes; equal predictors give equal bytes."""

    def stored() -> Iterator[StoredPredictor]:
        for layer, result in enumerate(results):
            for p, prefetch in ((result.predictor, False), (result.prefetch, True)):
                if p is not None:
                    values = {"a": p.a.numpy(), "b": p.b.numpy(), "bias": p.bias.numpy(), "threshold": p.threshold}
                    yield StoredPredictor(layer=layer, prefetch=prefetch, **values)

    with open(path, "wb") as file:
        for data in encode_predictors(stored(), bits, manifest.files[FFN].sha256, metadata):
            file.write(data)


def load_samples(args: argparse.Namespace, tokenizer: Tokenizer) -> tuple[NDArray[np.int64], SampleReport]:
    """Token rows [samples, tokens] and what became of the documents."""
    report = SampleReport()

    def texts() -> Iterator[str]:
        if args.data_files:
            return read_shards(args.data_files, report, strict=args.strict)
        return read_hub(args.dataset, args.config, limit=2 * args.samples)

    rows = token_rows(
        texts, tokenizer, samples=args.samples, tokens_per_sample=args.tokens_per_sample, report=report, seed=args.seed
    )
    return rows, report


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    train_arguments(parser)
    return parser


def train_options(args: argparse.Namespace) -> TrainOptions:
    """The options that the arguments ask for. UsageError for values that cannot be."""
    least_of = {"samples": LEAST_SAMPLES, "tokens_per_sample": 2, "epochs": 0, "positions": 1, "window": 1}
    for name, least in least_of.items():
        if getattr(args, name) < least:
            raise UsageError(f"--{name.replace('_', '-')} must be at least {least}, not {getattr(args, name)}")
    for name in ("recall", "early"):
        if getattr(args, name) is not None and not 0.0 < getattr(args, name) < 1.0:
            raise UsageError(f"--{name} must lie between 0 and 1, not {getattr(args, name)}")
    try:
        return TrainOptions(
            recipe=parse_ranks(args.ranks),
            fit=FitOptions(
                epochs=args.epochs,
                seed=args.seed,
                positive_weight=args.positive_weight,
                learning_rate=args.learning_rate,
            ),
            recall=args.recall,
            bits=args.bits,
            window=args.window,
            prefetch_precision=args.early,
        )
    except ValueError as error:
        raise UsageError(str(error)) from None


def identity(args: argparse.Namespace, manifest: Manifest, rows: NDArray[np.int64]) -> bytes:
    """Everything the result depends on: a scratch directory is resumed only by a run that would give the same."""
    own = vars(build_parser().parse_args([]))  # the umbrella command adds others, which differ from process to process
    options = {
        name: getattr(args, name)
        for name in own
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
        try:
            scratch_files(path)
            yield
        finally:
            with contextlib.suppress(OSError):  # it stays where there is something to resume
                path.rmdir()


def scratch_files(path: Path) -> list[Path]:
    """Files that a training keeps in its scratch directory. UsageError where something else lies there."""
    own = {file for pattern in (*SCRATCH_FILES, IDENTITY, f".{IDENTITY}.tmp", TRAINED) for file in path.glob(pattern)}
    for file in path.iterdir():
        if file not in own:
            raise UsageError(f"{path} holds {file.name}, which is no training's; choose another --scratch")
    return sorted(own)


def clear_scratch(path: Path) -> None:
    """Remove a run's files; its identity first, without which the rest is not believed."""
    (path / IDENTITY).unlink(missing_ok=True)
    for file in scratch_files(path):
        file.unlink()


def run(args: argparse.Namespace) -> int:
    started = time.monotonic()
    options = train_options(args)
    check_json(args.json)
    directory = resolve_model(args.model, say=lambda line: print(line, file=sys.stderr))
    manifest = Manifest.load(directory)
    if args.threads:
        torch.set_num_threads(args.threads)
    check_trainable(directory, manifest)
    args.tokens_per_sample = min(args.tokens_per_sample, ModelDir.open(directory).block.context)
    args.scratch = args.scratch or directory.with_name(directory.name + ".predictors")
    with scratch_directory(args.scratch, resume=args.resume):
        summary = train(args, options, directory, manifest)
        clear_scratch(args.scratch)
    summary["seconds"] = time.monotonic() - started
    hand_over(summary, "\n".join(closing_lines(directory, summary)), args.json)
    return 0


def closing_lines(directory: Path, summary: dict[str, Any]) -> list[str]:
    """The report of `train` for a person."""
    layers, size = summary["layers"], summary["model_bytes"]
    ranks = sorted({layer["rank"] for layer in layers})
    found = [1 - layer["false_negative"] for layer in layers]
    worst = min(range(len(layers)), key=found.__getitem__)

    def mean(key: str) -> str:
        return f"{np.mean([layer[key] for layer in layers]):.2%}"

    nbytes = summary["predictor_bytes"] + summary["early_predictor_bytes"]
    lines = [
        f"predictors  of {len(layers)} layers, rank {' to '.join(map(str, dict.fromkeys((ranks[0], ranks[-1]))))}, "
        f"{format_size(nbytes)}: {nbytes / size:.1%} of the model",
        f"recall      {np.mean(found):.2%} of the firing neurons are named, the fewest in layer {worst}: "
        f"{found[worst]:.2%}",
        f"named       {mean('predicted_share')} of the neurons a token; {mean('true_share')} fire",
    ]
    early = [layer["early"] for layer in layers if "early" in layer]
    if early:
        recall, precision = (np.mean([layer[key] for layer in early]) for key in ("recall", "precision"))
        lines.append(
            f"next layer  {recall:.2%} of its firing neurons are told ahead, {precision:.2%} of those told fire"
        )
    return [
        *lines,
        f"popularity  of every neuron, on {summary['judged_tokens']} tokens that nothing was trained on",
        f"installed   in {directory}, after {_duration(summary['seconds'])}",
    ]


def check_trainable(directory: Path, manifest: Manifest) -> None:
    """UsageError for a model that would not use predictors; a line where they replace other ones."""
    if manifest.architecture.experts:
        raise UsageError(f"{directory}: a mixture of experts, whose router names the neurons: nothing is to be trained")
    if not manifest.sparse:
        raise UsageError(
            f"{directory}: no neuron of this model is ever zero, so predictors would be of no use; `flashllm convert "
            "--sparsify` makes a model with zeros, tools/relufy.py trains one"
        )
    if manifest.resident_gate:
        raise UsageError(
            f"{directory}: its gates are in memory and name exactly the neurons that fire, so predictors would not be "
            "used; `flashllm convert` without --gate makes a model for them"
        )
    if PREDICTORS in manifest.files and set(predictor_ranks(directory / PREDICTORS, manifest)) == {0}:
        print("note: trained predictors take the place of this model's gates in 4 bits", file=sys.stderr)


def train(args: argparse.Namespace, options: TrainOptions, directory: Path, manifest: Manifest) -> dict[str, Any]:
    """Train and install; the report."""
    recipe, layers = options.recipe, manifest.architecture.num_layers
    if isinstance(recipe, Recipe) and recipe.num_layers not in (None, layers):
        raise UsageError(f"--ranks: {recipe.name} is written for {recipe.num_layers} layers, this model has {layers}")
    tokenizer = Tokenizer.load(directory)
    rows, data = load_samples(args, tokenizer)
    print(data, file=sys.stderr)
    mine, known = identity(args, manifest, rows), args.scratch / IDENTITY
    if not is_there(known):
        clear_scratch(args.scratch)
    elif read_bounded(known, 1 << 20) != mine:
        raise UsageError(f"{args.scratch} is of a run with other options, data or model; remove it to start again")
    plan = plan_training(
        directory,
        manifest,
        samples=len(rows),
        tokens=rows.shape[1],
        positions=args.positions,
        options=options,
        limit=parse_size(args.memory) if args.memory else None,
        scratch=args.scratch,
    )
    write_atomically(known, mine)
    print(plan.table(), file=sys.stderr, flush=True)
    context = ModelDir.open(directory).block.context
    if rows.shape[1] < min(context, LONG_CONTEXT):
        # Measured on the demo: trained on 128 tokens, layers missed up to 11 % instead of 2 % beyond (bench/log).
        print(
            f"note: the model's context is {context} tokens, and activity changes with position; predictors see only "
            f"the first {rows.shape[1]}: fewer but longer --samples (--tokens-per-sample) are better",
            file=sys.stderr,
        )
    config = RunConfig(memory=plan.model, mode="dense", threads=args.threads, context=rows.shape[1])
    with Model.open(directory, config) as model, ProgressBar("train", unit="tokens") as bar:
        trainer = Trainer(options, model, rows, plan.shape, args.scratch)
        seconds = trainer.seconds(plan.ranks)
        print(f"about {_duration(seconds)}, by a slice of the work measured here", file=sys.stderr, flush=True)
        reports, popularity = trainer.run(bar)
    path, results = args.scratch / TRAINED, map(trainer.result, range(len(reports)))
    save_predictors(path, results, manifest, args.bits, {"samples": str(len(rows)), "recall": str(args.recall)})
    judged = (trainer.split.end - trainer.split.validation) * plan.shape.kept
    calibration = Calibration(
        window=args.window,
        mean_active=tuple(report["mean_active"] for report in reports),
        req=tuple(report["req"] for report in reports),
        tokens=judged,
        text=JUDGED_ON,
    )
    named = encode_popularity(popularity, tokens=judged, measured_on=JUDGED_ON)
    installed = install_predictors(directory, path, calibration, named)
    own_nbytes, prefetch_nbytes = predictor_nbytes(path)
    return {
        "layers": reports,
        "samples": len(rows),
        "data": str(data),
        "bits": args.bits,
        "judged_tokens": judged,
        "predictor_bytes": own_nbytes,
        "early_predictor_bytes": prefetch_nbytes,
        "model_bytes": sum(entry.nbytes for entry in installed.files.values()),
    }


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        return run(args)
    except (FlashError, DataError) as error:
        print(f"train_predictor: error: {error}", file=sys.stderr)
        return getattr(error, "exit_status", 1)
    except OSError as error:  # a full disk, a folder that may not be written
        print(f"train_predictor: error: {error} ({RESUMABLE})", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"train_predictor: interrupted; {RESUMABLE}", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
