"""How well predictors do, and what the model loses by them: errors by layer, KL, perplexity, tasks, texts, figures.

Works offline on any converted model. Everything is computed in batched dense passes with the predictors as masks
(`masked`), which is the function the engine computes.
"""

import argparse
import dataclasses
import gzip
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from activity import aggregated_usage, collect_inputs, every_layer, friends, new_rows_per_token
from arguments import check_json, evaluate_arguments, hand_over
from masked import MaskedModel, Namer, Variant, load_predictors, own_gates, predictor_nbytes, untrained
from report import markdown, save_plots
from scoring import TaskScore, TextScore, score_items, score_text, windows
from tasks import TASKS, load_items
from training.fit import LayerPredictor

from flashllm.base.progress import ProgressBar
from flashllm.base.units import parse_size
from flashllm.config import RunConfig
from flashllm.convert.locate import resolve_model
from flashllm.convert.untrained.predictor import default_rank
from flashllm.engine.model import Model
from flashllm.errors import FlashError, UsageError
from flashllm.format.manifest import predictor_ranks
from flashllm.format.model_dir import ModelDir
from flashllm.format.model_files import PREDICTORS
from flashllm.format.popularity import describe_popularity
from flashllm.generate.sampling import SamplingOptions
from flashllm.generate.session import Session, TokenRecord
from flashllm.generate.tokenizer import Tokenizer
from flashllm.profile.store import find_profile

SAMPLE = Path(__file__).with_name("text_sample.txt")
DEFAULT_BANDWIDTH = 1.0  # GB/s, of a drive that was never calibrated
RUNS = (1, 2, 5, 10, 20, 50, 100, 200)  # tokens, of the aggregated usage
PROMPTS = ("Once upon a time there was a", "The old man opened the door and", "She looked at the letter and said")


def read_text(path: Path) -> str:
    """A text file, plain or .gz; of a .json(l) file the `text` of its lines, joined by blank lines. UsageError."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = raw.decode("utf-8")
        if ".json" in path.name:
            return "\n\n".join(json.loads(line)["text"] for line in text.splitlines() if line.strip())
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path}: cannot be read as text: {error}") from error
    return text


def text_windows(path: Path, tokenizer: Tokenizer, length: int, max_tokens: int) -> torch.Tensor:
    """[n, length] windows spread over a text of which at most `max_tokens` are used."""
    text = read_text(path)
    keep = 12 * max_tokens  # characters: far more than are needed, far fewer than a library of books has
    if len(text) > keep:
        step = len(text) // 8
        text = "\n\n".join(text[part * step : part * step + keep // 8] for part in range(8))
    ids = tokenizer.encode(text)
    if len(ids) < 2:
        raise UsageError(f"{path}: holds too little text to judge by")
    rows = windows(ids, length)
    wanted = max(1, max_tokens // length)
    return rows[np.linspace(0, len(rows) - 1, min(wanted, len(rows))).astype(int)]


def text_report(scores: dict[str, TextScore]) -> dict[str, Any]:
    return {
        "tokens": next(iter(scores.values())).tokens,
        "perplexity": {name: score.perplexity for name, score in scores.items()},
        "kl": {name: score.kl / score.tokens for name, score in scores.items() if name != Variant.DENSE},
        "same_top": {name: score.same_top / score.tokens for name, score in scores.items() if name != Variant.DENSE},
    }


def merged(reports: dict[str, dict[str, Any]], key: str) -> dict[str, float]:
    """Over all texts, weighted by tokens: arithmetic for KL, geometric for perplexity."""
    weights = np.array([report["tokens"] for report in reports.values()], dtype=float)
    result = {}
    for name in next(iter(reports.values()))[key]:
        values = np.array([report[key][name] for report in reports.values()])
        if key == "perplexity":
            result[name] = float(np.exp((np.log(values) * weights).sum() / weights.sum()))
        else:
            result[name] = float((values * weights).sum() / weights.sum())
    return result


def task_report(scores: dict[str, TaskScore]) -> dict[str, Any]:
    dense = scores[Variant.DENSE]
    return {
        "items": dense.items,
        "accuracy": {name: score.correct / score.items for name, score in scores.items()},
        "accuracy_normalised": {name: score.correct_normalised / score.items for name, score in scores.items()},
        "agreement": {
            name: float(np.mean([a == b for a, b in zip(score.chosen, dense.chosen, strict=True)]))
            for name, score in scores.items()
            if name != Variant.DENSE
        },
    }


def layer_reports(
    model: MaskedModel, ids: torch.Tensor, predictors: list[Namer], max_tokens: int, window: int, *, drawn: bool = False
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(the interface's `layers`, what the figures need: nothing unless they are `drawn`, which takes long)."""
    stride = model.manifest.rows.stride
    inputs = collect_inputs(model, ids, max_tokens)
    layers, figures = [], {"usage": [], "friends": [], "histograms": []}
    for activity, predictor in zip(every_layer(model, inputs, predictors), predictors, strict=True):
        misses = new_rows_per_token(activity.predicted, window, ids.shape[1])
        layers.append(
            {
                **activity.errors(),
                "rank": predictor.rank,
                "flash_bytes_per_token": misses * stride,
                "flash_bytes_per_token_oracle": new_rows_per_token(activity.true, window, ids.shape[1]) * stride,
            }
        )
        if not drawn:
            continue
        lengths = tuple(length for length in RUNS if length <= ids.shape[1])
        figures["usage"].append({"lengths": lengths, "shares": aggregated_usage(activity.predicted, lengths)})
        figures["friends"].append(friends(activity.true))
        figures["histograms"].append({name: counts.tolist() for name, counts in activity.histograms.items()})
    return layers, figures


ReadTime = Callable[[list[float]], float]  # bytes that each layer reads for a token -> seconds


def read_time(directory: Path, stride: int, bandwidth: float | None) -> tuple[ReadTime, str]:
    """The cost of reading, and by what it is known: `bandwidth` (GB/s), or the drive's calibration, or a round number.

    By the calibration a layer's rows are a batch of requests of `stride` bytes and a barrier.
    """
    costs = find_profile(directory)[0] if bandwidth is None else None
    if costs is not None and costs.direct:
        reader = costs.best(stride)
        return lambda layers: sum(reader.batch(nbytes / stride, stride) for nbytes in layers), "the drive's calibration"
    rate = DEFAULT_BANDWIDTH if bandwidth is None else bandwidth
    return lambda layers: sum(layers) / rate / 1e9, f"{rate:g} GB/s"


def threshold_curve(
    model: MaskedModel,
    ids: torch.Tensor,
    predictors: list[Namer],
    *,
    recalls: list[float],
    max_tokens: int,
    window: int,
    seconds: ReadTime,
) -> list[dict[str, float]]:
    """Paper A, table 4: thresholds fitted on the first half of the windows, everything else measured on the second."""
    half = len(ids) // 2
    if half == 0:
        raise UsageError("the text is too short for --curve: it needs two windows")
    fitted, judged = ids[:half], ids[half:]
    inputs = collect_inputs(model, fitted, max_tokens)
    firing: list[torch.Tensor] = []
    for activity, x, predictor in zip(every_layer(model, inputs, predictors), inputs, predictors, strict=True):
        logits = predictor.logits(x.float())
        firing.append(logits[torch.from_numpy(activity.true)].sort().values)
    sets: dict[str, Any] = {Variant.DENSE: Variant.DENSE}
    for recall in recalls:
        sets[f"{recall:g}"] = [
            dataclasses.replace(
                p, threshold=float(values[int((1 - recall) * len(values))]) - 1e-6 if len(values) else float("inf")
            )
            for p, values in zip(predictors, firing, strict=True)
        ]
    scores = score_text(model, judged, sets)
    points = []
    for recall in recalls:
        layers, _ = layer_reports(model, judged, sets[f"{recall:g}"], max_tokens, window)
        points.append(
            {
                "target_recall": recall,
                "recall": 1 - float(np.mean([layer["false_negative"] for layer in layers])),
                "true_share": float(np.mean([layer["true_share"] for layer in layers])),
                "io_ms_per_token": 1e3 * seconds([layer["flash_bytes_per_token"] for layer in layers]),
                **_point(layers, scores[f"{recall:g}"], scores[Variant.DENSE]),
            }
        )
    return points


def _point(layers: list[dict[str, Any]], score: TextScore, dense: TextScore) -> dict[str, float]:
    """Reads and costs of a choice of neurons."""
    return {
        "predicted_share": float(np.mean([layer["predicted_share"] for layer in layers])),
        "flash_bytes_per_token": sum(layer["flash_bytes_per_token"] for layer in layers),
        "perplexity": score.perplexity,
        "perplexity_dense": dense.perplexity,
        "kl": score.kl / score.tokens,
        "same_top": score.same_top / score.tokens,
    }


def without_predictors(
    model: MaskedModel,
    ids: torch.Tensor,
    predictors: list[Namer],
    layers: list[dict[str, Any]],
    *,
    counts: list[int],
    max_tokens: int,
    window: int,
) -> list[dict[str, Any]]:
    """The worth of computing every neuron of so many layers (paper A, appendix C.4), for each of `counts`.

    Those layers come first whose misses carry most: `layers` has what `layer_reports` says of each.
    """
    worst = sorted(range(len(layers)), key=lambda layer: -layers[layer]["missed_energy"])
    rows, sets = model.manifest.rows, dict[str, Any]({Variant.DENSE: Variant.DENSE})
    for count in counts:
        left = set(worst[:count])
        sets[str(count)] = [
            LayerPredictor.everything(rows.d_model, model.manifest.architecture.width(layer)) if layer in left else p
            for layer, p in enumerate(predictors)
        ]
    scores, found = score_text(model, ids, sets), []
    for count in counts:
        mine, _ = layer_reports(model, ids, sets[str(count)], max_tokens, window)
        point = _point(mine, scores[str(count)], scores[Variant.DENSE])
        found.append({"layers": sorted(worst[:count]), **point})
    return found


def texts_side_by_side(model: MaskedModel, tokenizer: Tokenizer, max_new_tokens: int) -> list[dict[str, str]]:
    """Greedy continuations by the dense model and with predictors (paper A, appendix G)."""
    penalty = float(model.model.directory.generation_config.get("repetition_penalty") or 1.0)
    options = SamplingOptions(max_new_tokens=max_new_tokens, repetition_penalty=penalty)
    rows = []
    for prompt in PROMPTS:
        row = {"prompt": prompt}
        for variant in (v for v in model.variants if v is not Variant.ORACLE):
            model.use(variant)
            with Session(model, tokenizer, options) as session:
                records = session.stream(prompt)
                row[variant] = "".join(record.text for record in records if isinstance(record, TokenRecord))
        rows.append(row)
    return rows


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    evaluate_arguments(parser)
    return parser


def run(args: argparse.Namespace) -> dict[str, Any]:
    tasks = list(TASKS) if args.tasks == "all" else [name for name in args.tasks.split(",") if name]
    unknown = sorted(set(tasks) - set(TASKS))
    if unknown:
        raise UsageError(f"--tasks: {unknown[0]!r} is not one of {', '.join(TASKS)}")
    check_json(args.json)
    if args.markdown and not args.markdown.absolute().parent.is_dir():
        raise UsageError(f"--markdown: {args.markdown.parent} is no folder")
    directory = resolve_model(args.model, say=lambda line: print(line, file=sys.stderr))
    model_dir = ModelDir.open(directory)
    length = min(args.length or 512, model_dir.block.context)
    if args.threads:
        torch.set_num_threads(args.threads)
    tokenizer = Tokenizer.load(directory)
    config = RunConfig(
        memory=parse_size(args.memory) if args.memory else None,
        mode="dense",
        threads=args.threads,
        context=min(max(length, 64), model_dir.block.context),
    )
    manifest = model_dir.manifest
    if not manifest.sparse:
        raise UsageError(
            f"{directory}: no neuron of this model is ever zero, so all are computed and nothing is left to judge; "
            "`flashllm convert --sparsify` makes a model with zeros, and prints what they cost"
        )
    with Model.open(directory, config) as model:
        predictors: dict[Variant, list[Namer]] = {}
        ranks: list[int] | None = None
        has_file = PREDICTORS in manifest.files
        if manifest.resident_gate or (has_file and set(predictor_ranks(directory / PREDICTORS, manifest)) == {0}):
            predictors[Variant.GATES] = own_gates(model)
        elif has_file:
            predictors[Variant.TRAINED] = list(load_predictors(directory / PREDICTORS, manifest))
            ranks = [p.rank for p in predictors[Variant.TRAINED]]
        architecture = manifest.architecture
        same = [default_rank(architecture.d_model)] * architecture.num_layers
        if not predictors or args.svd:
            predictors[Variant.SVD] = list(untrained(model, ranks or same))
        return _measure(args, MaskedModel(model, predictors), tokenizer, tasks, length)


def _measure(
    args: argparse.Namespace, model: MaskedModel, tokenizer: Tokenizer, tasks: list[str], length: int
) -> dict[str, Any]:
    own = next((variant for variant in (Variant.TRAINED, Variant.GATES) if model.predictors(variant)), Variant.SVD)
    judged = model.predictors(own)
    assert judged is not None
    texts = {str(path.name): text_windows(path, tokenizer, length, args.tokens) for path in args.text or [SAMPLE]}
    sets = {variant: variant for variant in model.variants}
    reports = {}
    for name, ids in texts.items():
        with ProgressBar(name, unit="tokens") as bar:
            reports[name] = text_report(score_text(model, ids, sets, bar))
    main = next(iter(texts.values()))
    layers, figures = layer_reports(model, main, judged, args.layer_tokens, args.window, drawn=args.plots is not None)
    by_svd = model.predictors(Variant.SVD)
    untrained_layers = by_svd and layer_reports(model, main, by_svd, args.layer_tokens, args.window)[0]
    scores, items = {}, {}
    for name in tasks:
        try:
            items[name] = load_items(name, args.tasks_dir, limit=args.items, seed=args.seed)
        except OSError as error:
            raise UsageError(str(error)) from error
        with ProgressBar(name, unit="variants") as bar:
            found = {}
            for number, variant in enumerate(v for v in model.variants if v is not Variant.ORACLE):
                found[variant] = score_items(model, variant, items[name], tokenizer, length)
                bar(variant, number + 1, len(model.variants) - 1)
            # Exactly those that fire are exactly the neurons that count: the oracle's answers are the dense model's.
            found[Variant.ORACLE] = found[Variant.DENSE]
            scores[name] = task_report(found)
    nbytes = [layer["flash_bytes_per_token"] for layer in layers]
    manifest, directory = model.manifest, model.model.directory.path
    seconds, known_by = read_time(directory, manifest.rows.stride, args.bandwidth)
    has_file = PREDICTORS in manifest.files
    own_nbytes, prefetch_nbytes = predictor_nbytes(directory / PREDICTORS) if has_file else (0, 0)
    report: dict[str, Any] = {
        "layers": layers,
        **({"layers_svd": untrained_layers} if untrained_layers else {}),
        "kl": merged(reports, "kl"),
        "perplexity": merged(reports, "perplexity"),
        "tasks": scores,
        "agreement": agreement(scores),
        "texts": reports,
        "window": args.window,
        "flash_bytes_per_token": sum(nbytes),
        "io_ms_per_token": 1e3 * seconds(nbytes),
        "io_by": known_by,
        "predictor_bytes": own_nbytes,
        "early_predictor_bytes": prefetch_nbytes,
        "model_bytes": sum(entry.nbytes for entry in manifest.files.values()),
        "popularity": describe_popularity(directory, manifest),
    }
    if manifest.sparsity is not None:
        report["sparsity"] = dataclasses.asdict(manifest.sparsity)
    if args.curve:
        report["curve"] = threshold_curve(
            model, main, judged, recalls=args.recalls, max_tokens=args.layer_tokens, window=args.window, seconds=seconds
        )
    if args.without:
        report["without"] = without_predictors(
            model, main, judged, layers, counts=args.without, max_tokens=args.layer_tokens, window=args.window
        )
    if args.samples:
        report["samples"] = texts_side_by_side(model, tokenizer, args.samples)
    if args.plots:
        save_plots(args.plots, report, figures)
    return report


def agreement(scores: dict[str, Any]) -> dict[str, float]:
    """Share of all tasks' items where the chosen answer is the dense model's."""
    total = sum(score["items"] for score in scores.values())
    if not total:
        return {}
    names = next(iter(scores.values()))["agreement"]
    return {n: sum(s["agreement"][n] * s["items"] for s in scores.values()) / total for n in names}


def show(args: argparse.Namespace) -> int:
    """Evaluate, and write the report where it is wanted."""
    began = time.monotonic()
    report = run(args)
    report["seconds"] = time.monotonic() - began
    page = markdown(report)
    if args.markdown:
        args.markdown.write_text(page, encoding="utf-8")
    hand_over(report, page, args.json)
    return 0


def main(argv: list[str] | None = None) -> int:
    try:
        return show(build_parser().parse_args(argv))
    except FlashError as error:
        print(f"evaluate: error: {error}", file=sys.stderr)
        return error.exit_status


if __name__ == "__main__":
    sys.exit(main())
