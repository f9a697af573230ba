"""How well a layer's active neurons can be told one layer before, from the FFN input of the layer before.

What is predicted can be prefetched while the layer before still computes. Compared at equal size: the layer's own
predictor on the earlier input; the same, with the earlier norm's scale and shift exchanged for its own; the best
low-rank linear map; and that map trained. Each is judged on all firings, and on the new ones: neurons that did not fire
in the last tokens, which a cache of that window lacks. Thresholds are set on text that nothing is judged on.
The last line of stdout is one JSON document.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[2] / "predictors"))

from activity import collect_inputs
from evaluate import text_windows
from masked import MaskedModel, Variant, load_predictors
from samples import DataError, SampleReport, read_shards, token_rows
from training.fit import CODE_EDGES, Chunk, FitOptions, LayerPredictor, LogitCounts, fit, pack_codes
from training.prefetch_start import linear_start
from weights import LayerWeights

from flashllm.config import DEFAULT_WINDOW, RunConfig
from flashllm.convert.locate import resolve_model
from flashllm.engine.model import Model
from flashllm.errors import FlashError
from flashllm.format.model_files import PREDICTORS
from flashllm.generate.tokenizer import Tokenizer

RECALLS = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98)  # of all firings of the calibration text, a threshold for each
CHUNK_TOKENS = 32_768
BLOCK_TOKENS = 512
CALIBRATION_SHARE = 0.1


@dataclass(slots=True)
class Counts:
    """Neurons over tokens; `new` ones are not in the recent set of the layer."""

    truth: int = 0
    named: int = 0
    both: int = 0
    new_truth: int = 0
    new_named: int = 0
    new_both: int = 0

    def add(self, named: NDArray[np.bool_], truth: NDArray[np.bool_], recent: NDArray[np.bool_]) -> None:
        both, new = named & truth, ~recent
        self.truth += int(truth.sum())
        self.named += int(named.sum())
        self.both += int(both.sum())
        self.new_truth += int((truth & new).sum())
        self.new_named += int((named & new).sum())
        self.new_both += int((both & new).sum())

    def rates(self) -> dict[str, float]:
        return {
            "recall": self.both / max(1, self.truth),
            "precision": self.both / max(1, self.named),
            "recall_new": self.new_both / max(1, self.new_truth),
            "precision_new": self.new_both / max(1, self.new_named),
            "fetched_per_new": self.new_named / max(1, self.new_truth),
        }


@dataclass(slots=True)
class Layer:
    """A layer's deciding parts: weights of the matrix that decides, its bias, and norms of the down columns."""

    driver: torch.Tensor  # [d_ff, d_model]
    bias: torch.Tensor  # [d_ff]
    down_norms: torch.Tensor  # [d_ff]

    @classmethod
    def of(cls, weights: LayerWeights) -> "Layer":
        driver = torch.cat([torch.from_numpy(block.copy()) for block in weights.drivers()])
        bias = torch.zeros(len(driver)) if weights.bias is None else torch.from_numpy(weights.bias)
        return cls(driver, bias, torch.from_numpy(weights.down_norms()))

    def contributions(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, d_ff]: 0 where a neuron does not fire, else its activation times the norm of its down column."""
        return torch.addmm(self.bias, x, self.driver.T).clamp_min_(0).mul_(self.down_norms)


@dataclass(slots=True)
class Texts:
    """FFN inputs of every layer, fp16 [tokens, d_model]."""

    train: list[torch.Tensor]
    calibration: list[torch.Tensor]
    judged: dict[str, list[torch.Tensor]]
    text_tokens: int  # of each text
    norms: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # (scale, shift) before each FFN


def chunks_of(layer: Layer, before: torch.Tensor, at: torch.Tensor) -> list[Chunk]:
    """Chunks to train on: the earlier layer's inputs, and codes of this layer's activity."""
    mean, count = 0.0, 0
    for start in range(0, min(len(at), 8 * BLOCK_TOKENS), BLOCK_TOKENS):
        found = layer.contributions(at[start : start + BLOCK_TOKENS].float())
        mean, count = mean + float(found.sum()), count + int((found > 0).sum())
    mean /= max(1, count)
    chunks = []
    order = torch.randperm(len(at), generator=torch.Generator().manual_seed(0))
    for start in range(0, len(at), CHUNK_TOKENS):
        rows = order[start : start + CHUNK_TOKENS]
        codes = []
        for block in at[rows].split(BLOCK_TOKENS):
            found = layer.contributions(block.float())
            code = (found > 0).to(torch.uint8)
            for edge in CODE_EDGES:
                code += found > edge * mean
            codes.append(torch.from_numpy(pack_codes(code.numpy())))
        chunks.append((before[rows].float(), torch.cat(codes)))
    return chunks


def norm_of(weights: LayerWeights) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, shift) of the norm before a layer's FFN."""
    width = weights.layout.d_model
    scale, shift = weights.norm()
    return (
        torch.ones(width) if scale is None else torch.from_numpy(scale),
        torch.zeros(width) if shift is None else torch.from_numpy(shift),
    )


def renormed(own: LayerPredictor, before: tuple[Any, Any], at: tuple[Any, Any]) -> LayerPredictor:
    """`own` as it sees an input whose norm had the scale and shift `before` instead of `at`."""
    ratio = at[0] / torch.where(before[0].abs() < 1e-6, torch.ones_like(before[0]), before[0])
    shift = own.b @ (own.a @ (at[1] - ratio * before[1]))
    return LayerPredictor(own.a * ratio, own.b, own.bias + shift)


def _floats(inputs: torch.Tensor) -> Iterator[torch.Tensor]:
    for part in inputs.split(CHUNK_TOKENS):
        yield part.float()


def thresholds(head: LayerPredictor, layer: Layer, before: torch.Tensor, at: torch.Tensor) -> list[float]:
    """One for each of RECALLS."""
    counts = LogitCounts()
    for start in range(0, len(at), BLOCK_TOKENS):
        part = slice(start, start + BLOCK_TOKENS)
        counts.add(head.logits(before[part].float()), layer.contributions(at[part].float()) > 0)
    return [counts.threshold_for(recall) for recall in RECALLS]


def recent(active: NDArray[np.bool_], window: int) -> NDArray[np.bool_]:
    """[tokens, d_ff]: active in any of the `window` tokens before."""
    found = np.zeros_like(active)
    for back in range(1, window + 1):
        found[back:] |= active[:-back]
    return found


def judge_heads(
    heads: dict[str, tuple[LayerPredictor, list[float]]],
    layer: Layer,
    own: LayerPredictor,
    inputs: tuple[torch.Tensor, torch.Tensor],
    *,
    text_tokens: int,
    window: int,
) -> dict[str, Any]:
    """Rates of each head at each of its thresholds: against what fires, and against what `own` will name.

    `inputs`: of the layer before and of the layer, [tokens, d_model]; after `text_tokens` the cache is empty again.
    """
    found: dict[str, dict[str, list[Counts]]] = {
        target: {name: [Counts() for _ in RECALLS] for name in heads} for target in ("fires", "named")
    }
    reference = Counts()
    totals = {"tokens": 0, "fires": 0, "named": 0, "new_fires": 0, "new_named": 0}
    before, at = inputs
    for start in range(0, len(at), text_tokens):
        part = slice(start, start + text_tokens)
        x_before, x = before[part].float(), at[part].float()
        targets = {"fires": (layer.contributions(x) > 0).numpy(), "named": (own.logits(x) > own.threshold).numpy()}
        lately = {name: recent(target, window) for name, target in targets.items()}
        warm = slice(window, None)  # before, everything is new
        totals["tokens"] += len(x) - window
        for name, target in targets.items():
            totals[name] += int(target[warm].sum())
            totals[f"new_{name}"] += int((target & ~lately[name])[warm].sum())
        reference.add(targets["named"][warm], targets["fires"][warm], lately["fires"][warm])
        for name, (head, cuts) in heads.items():
            logits = head.logits(x_before).numpy()
            for index, cut in enumerate(cuts):
                named = logits > cut
                for target, truth in targets.items():
                    found[target][name][index].add(named[warm], truth[warm], lately[target][warm])
    return {
        "per_token": {name: count / totals["tokens"] for name, count in totals.items() if name != "tokens"},
        "own_input": reference.rates(),
        **{
            target: {
                name: [
                    {"target_recall": recall, **counts.rates()} for recall, counts in zip(RECALLS, points, strict=True)
                ]
                for name, points in by_head.items()
            }
            for target, by_head in found.items()
        },
    }


def at_precision(points: list[dict[str, float]], precision: float) -> float:
    """Recall of new firings where `precision` of what is fetched for them is right; 0 where no threshold gives it.

    Between thresholds, along a straight line.
    """
    best = 0.0
    for low, high in itertools.pairwise(points):  # ascending recall, descending precision
        if low["precision_new"] >= precision:
            best = max(best, low["recall_new"])
            if high["precision_new"] < precision:
                gap = low["precision_new"] - high["precision_new"]
                share = (low["precision_new"] - precision) / gap
                best = max(best, low["recall_new"] + share * (high["recall_new"] - low["recall_new"]))
    last = points[-1]
    return max(best, last["recall_new"]) if last["precision_new"] >= precision else best


def compare(
    model: MaskedModel, texts: Texts, predictors: list[LayerPredictor], options: FitOptions, window: int
) -> list[dict[str, Any]]:
    """A report for each layer but the first."""
    rows = []
    for number in range(1, len(predictors)):
        layer, own = Layer.of(LayerWeights(model.model, number)), predictors[number]
        before, at = texts.train[number - 1], texts.train[number]
        chunks = chunks_of(layer, before, at)
        start = linear_start(
            lambda found=layer: iter([found.driver.numpy()]),
            layer.bias.numpy(),
            lambda a=before, b=at: zip(_floats(a), _floats(b), strict=True),
            len(own.a),
        )
        trained, _ = fit(start, lambda data=chunks: iter(data), options, len(own.b))
        variants = {"own": own, "linear": start, "trained": trained}
        if texts.norms:
            variants["own_renormed"] = renormed(own, texts.norms[number - 1], texts.norms[number])
        heads = {
            name: (head, thresholds(head, layer, texts.calibration[number - 1], texts.calibration[number]))
            for name, head in variants.items()
        }
        row: dict[str, Any] = {"layer": number, "rank": len(own.a), "texts": {}}
        for name, inputs in texts.judged.items():
            row["texts"][name] = judge_heads(
                heads, layer, own, (inputs[number - 1], inputs[number]), text_tokens=texts.text_tokens, window=window
            )
        rows.append(row)
        print(describe(row), file=sys.stderr, flush=True)
    return rows


def describe(row: dict[str, Any]) -> str:
    """A layer's line: new firings predicted where half of what is fetched is right."""
    parts = []
    for name, text in row["texts"].items():
        shares = ", ".join(f"{head} {at_precision(points, 0.5):.1%}" for head, points in text["fires"].items())
        parts.append(f"{name}: {shares}")
    return f"layer {row['layer']} (rank {row['rank']}), new firings found at precision 50 %: " + "; ".join(parts)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and worst layer of each head, all judged texts together."""
    found: dict[str, Any] = {}
    for target in ("fires", "named"):
        heads = next(iter(rows[0]["texts"].values()))[target]
        for head in heads:
            for precision in (0.5, 0.8):
                values = [
                    float(np.mean([at_precision(text[target][head], precision) for text in row["texts"].values()]))
                    for row in rows
                ]
                found[f"{target}/{head}/new_recall_at_precision_{precision:g}"] = {
                    "mean": float(np.mean(values)),
                    "worst": float(np.min(values)),
                }
            for index, recall in enumerate(RECALLS):
                points = [
                    {
                        key: float(np.mean([text[target][head][index][key] for text in row["texts"].values()]))
                        for key in ("recall", "precision", "recall_new", "precision_new")
                    }
                    for row in rows
                ]
                found[f"{target}/{head}/recall_{recall:g}"] = {
                    key: {"mean": float(np.mean([p[key] for p in points])), "worst": min(p[key] for p in points)}
                    for key in points[0]
                }
    return found


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", help="model directory; the bundled demo by default")
    parser.add_argument("--data-files", type=Path, nargs="+", required=True, help="C4-schema shards to train on")
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="texts to judge on")
    parser.add_argument("--samples", type=int, default=400, help="of --data-files, each as long as the context")
    parser.add_argument("--tokens", type=int, default=20_000, help="of each text judged, at most")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--window", type=int, default=DEFAULT_WINDOW, help="tokens after which a neuron is new again")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the report here")
    return parser


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The report."""
    directory = resolve_model(args.model, say=lambda line: print(line, file=sys.stderr))
    if args.threads:
        torch.set_num_threads(args.threads)
    tokenizer = Tokenizer.load(directory)
    report = SampleReport()
    with Model.open(directory, RunConfig(mode="dense", threads=args.threads)) as opened:
        length = min(512, opened.context)
        rows = token_rows(
            lambda: read_shards(args.data_files, report),
            tokenizer,
            samples=args.samples,
            tokens_per_sample=length,
            report=report,
            seed=args.seed,
        )
        predictors = load_predictors(directory / PREDICTORS, opened.manifest)
        model = MaskedModel(opened, {Variant.TRAINED: predictors})
        ids = torch.from_numpy(rows)
        split = len(ids) - max(1, int(CALIBRATION_SHARE * len(ids)))
        texts = Texts(
            train=collect_inputs(model, ids[:split], ids.numel()),
            calibration=collect_inputs(model, ids[split:], ids.numel()),
            judged={
                path.name: collect_inputs(model, text_windows(path, tokenizer, length, args.tokens), args.tokens)
                for path in args.text
            },
            text_tokens=length,
            norms=[norm_of(LayerWeights(opened, layer)) for layer in range(len(predictors))],
        )
        layers = compare(model, texts, predictors, FitOptions(epochs=args.epochs, seed=args.seed), args.window)
    return {
        "window": args.window,
        "train_tokens": split * length,
        "calibration_tokens": (len(ids) - split) * length,
        "judged_tokens": {name: len(inputs[0]) for name, inputs in texts.judged.items()},
        "layers": layers,
        "summary": summary(layers),
    }


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    began = time.monotonic()
    try:
        report = run(args)
    except (FlashError, DataError) as error:
        print(f"early_prediction: error: {error}", file=sys.stderr)
        return getattr(error, "exit_status", 1)
    report["seconds"] = time.monotonic() - began
    text = json.dumps(report)
    if args.json:
        args.json.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
