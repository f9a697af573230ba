"""Three ways to use a gated FFN's gate, measured against each other by replaying what a model's gates say of a text.

    python bench/cache/gate_policies.py MODEL TEXT [--zeros 0.7] [--recall 0.95] [--tokens 512] [--every N] [--json OUT]

MODEL is a gated model's directory, with its gates in the rows; TEXT is UTF-8. A neuron fires where the magnitude of its
activated gate is among the layer's largest: all but the share `--zeros`, by a threshold from the text's first half. The
second quarter gives predictors their thresholds, for `--recall` of its firings, the first half gives the cache its
popularity, and the other half is counted. One dense pass computes the gates' inputs, and nothing is timed.

whole neuron        what a predictor names is read whole: three matrices' rows in one request
gate resident       the gates lie in memory and name exactly what fires: two rows in one request
gate rows first     of what a predictor names the gate is read, then up and down of what fires: one row, later two

Predictors: the gate in 3 bits (groups of 32) and in 4 (as conversion makes it), and rank 64 in 8 bits (the gate's best
map of that rank for the covariance of the first quarter's inputs, not trained). They and resident gates come out of the
same memory as the cache, which the engine's policy fills. Of `gate rows first` the gates and the other two have a cache
each, of as many neurons. The last line of standard output is one JSON document.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from replay import Activity, misses_of

from flashllm.base.group_codes import GROUP_CODES
from flashllm.config import RunConfig
from flashllm.engine.model import Model
from flashllm.format.model_dir import ModelDir, read_plane
from flashllm.format.model_files import FFN, ffn_tensor
from flashllm.format.rows import widened_rows
from flashllm.format.safetensors import open_safetensors
from flashllm.generate.tokenizer import Tokenizer
from flashllm.sparsify.score import Inputs

Floats = NDArray[np.float32]
Masks = NDArray[np.bool_]

POLICY = "frequency"  # the engine's
RANK = 64
GROUP = 32  # of 3 bits, with a scale of 16
ACTIVATIONS: dict[str, Callable[[Floats], Floats]] = {
    "silu": lambda g: g / (1 + np.exp(-g)),
    "relu": lambda g: np.maximum(g, 0),
    "fatrelu": lambda g: np.maximum(g, 0),
}


@dataclass(frozen=True, slots=True)
class Predictor:
    """Scores [tokens, neurons], and what it takes of memory, in rows of a matrix."""

    name: str
    scores: Floats
    resident: float


def in_3_bits(gate: Floats) -> Floats:
    """What codes -4 to 3 with the best of a few scales a group make of the weights [n, k]."""
    n, k = gate.shape
    groups = np.zeros((n, -(-k // GROUP) * GROUP), np.float32)
    groups[:, :k] = gate
    groups = groups.reshape(n, -1, GROUP)
    largest = np.abs(groups).max(-1, keepdims=True)
    sign = np.where(groups.max(-1, keepdims=True) == largest, -1, 1)  # the larger side has code -4
    best, least = np.zeros_like(groups), np.full((*groups.shape[:2], 1), np.inf, np.float32)
    for part in np.linspace(0.55, 1.1, 12):
        scale = (sign * largest * part / 4).astype(np.float16).astype(np.float32)
        made = np.clip(np.rint(groups / np.where(scale == 0, 1, scale)), -4, 3) * scale
        error = ((made - groups) ** 2).sum(-1, keepdims=True)
        best, least = np.where(error < least, made, best), np.minimum(error, least)
    return np.ascontiguousarray(best.reshape(n, -1)[:, :k])


def low_rank(gate: Floats, x: Floats, rank: int) -> Floats:
    """The gate's best map of this rank, by the error of its products with inputs of the covariance of x."""
    values, vectors = np.linalg.eigh(np.cov(x.T) + np.outer(x.mean(0), x.mean(0)) + 1e-6 * np.eye(x.shape[1]))
    root = np.sqrt(np.maximum(values, 1e-9))
    left, sizes, right = np.linalg.svd((gate @ vectors) * root, full_matrices=False)
    return np.asarray((left[:, :rank] * sizes[:rank]) @ (right[:rank] / root) @ vectors.T, np.float32)


def predictors(gate: Floats, x: Floats, fitted: int, activate: Callable[[Floats], Floats]) -> list[Predictor]:
    """All of them, of one layer. `fitted`: tokens whose inputs may be fitted to."""
    neurons, width = gate.shape
    code = GROUP_CODES["int4_64"]
    four_bits = code.vector_nbytes(width) / (2 * width)

    def scores(weights: Floats) -> Floats:
        return np.abs(activate(x @ weights.T))

    return [
        Predictor("3 bits", scores(in_3_bits(gate)), neurons * (3 + 16 / GROUP) / 16),
        Predictor("4 bits", scores(code.decode(code.encode(gate), width)), neurons * four_bits),
        Predictor(f"rank {RANK}", scores(low_rank(gate, x[:fitted], RANK)), RANK * (neurons + width) / width / 2),
    ]


def replayed(masks: Masks, learned: int, capacity: float) -> float:
    """Misses a token, of the tokens after the first `learned`, with memory for `capacity` neurons."""
    tokens = [np.flatnonzero(mask) for mask in masks[learned:]]
    activity = Activity(tokens, masks.shape[1], masks[:learned].mean(0))
    misses, _ = misses_of(POLICY, activity, max(0, int(capacity)))
    return float(np.mean([len(ids) for ids in misses]))


def layer_rows(
    gate: Floats, x: Floats, args: argparse.Namespace, activate: Callable[[Floats], Floats]
) -> list[dict[str, Any]]:
    """What each way reads of one layer a token, at each share of the FFN in memory; rows of a matrix, and requests."""
    learned, neurons = len(x) // 2, len(gate)
    exact = np.abs(activate(x @ gate.T))
    fires = exact > np.quantile(exact[:learned], args.zeros)
    found, every = [], predictors(gate, x, learned // 2, activate)

    def add(way: str, name: str, share: float, rows: float, requests: float, **more: float) -> None:
        found.append({"way": way, "predictor": name, "share": share, "rows": rows, "requests": requests, **more})

    for share in args.memory:
        room = 3 * neurons * share
        missed = replayed(fires, learned, (room - neurons) / 2)
        if room > neurons:
            add("gate resident", "", share, 2 * missed, missed, recall=1.0, named=1.0)
        for each in every:
            chosen = slice(learned // 2, learned)
            threshold = np.quantile(each.scores[chosen][fires[chosen]], 1 - args.recall)
            named = each.scores >= threshold
            used = named & fires
            ratios = {
                "recall": float(used[learned:].sum() / fires[learned:].sum()),
                "named": float(named[learned:].sum() / fires[learned:].sum()),
            }
            capacity = (room - each.resident) / 3
            missed = replayed(named, learned, capacity)
            add("whole neuron", each.name, share, 3 * missed, missed, **ratios)
            gates, others = replayed(named, learned, capacity), replayed(used, learned, capacity)
            add("gate rows first", each.name, share, gates + 2 * others, gates + others, **ratios)
    return found


def gate_of(directory: Path, model: ModelDir, layer: int) -> Floats:
    """[d_ff, d_model]"""
    layout = model.manifest.rows
    rows = np.empty((layout.num_rows, layout.stride), np.uint8)
    with open_safetensors(directory / FFN) as file:
        file.read_into(file.header.tensors[ffn_tensor(layer)], 0, rows.reshape(-1).data)
    return np.array(widened_rows(layout, rows[: layout.d_ff], read_plane(directory, model.manifest, layer))["gate"])


def table(document: dict[str, Any]) -> str:
    """In markdown."""
    lines = ["| in memory | way | predictor | named / fire | recall | rows a token | requests |", "|---" * 7 + "|"]
    for row in document["rows"]:
        lines.append(
            f"| {row['share']:.0%} | {row['way']} | {row['predictor']} | {row['named']:.2f} | {row['recall']:.1%} "
            f"| {row['rows']:.0f} | {row['requests']:.0f} |"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--zeros", type=float, default=0.7, help="share of a layer's neurons that do not fire")
    parser.add_argument("--recall", type=float, default=0.95, help="of all firings, that predictors are to name")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every N-th layer")
    parser.add_argument("--memory", type=float, nargs="+", default=[0.25, 0.5, 0.75], help="shares of the FFN")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    model_dir = ModelDir.open(args.model)
    architecture = model_dir.architecture
    if not architecture.gated or architecture.activation not in ACTIVATIONS or model_dir.manifest.resident_gate:
        known = ", ".join(ACTIVATIONS)
        print(f"gate_policies: {args.model}: is no gated model of {known} with its gates in the rows", file=sys.stderr)
        return 1
    ids = Tokenizer.load(args.model).encode(args.text.read_text(encoding="utf-8"), add_special=False)[: args.tokens]
    inputs = Inputs(architecture.num_layers, 1)
    with Model.open(args.model, RunConfig(mode="dense")) as model, model.new_sequence() as sequence:
        model.step([(sequence, ids)], as_prompt=True, observer=inputs)
    sums: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    layers, activate = range(0, architecture.num_layers, args.every), ACTIVATIONS[architecture.activation]
    for layer in layers:
        print(f"layer {layer}", file=sys.stderr, flush=True)
        rows = layer_rows(gate_of(args.model, model_dir, layer), inputs.of(layer), args, activate)
        for row in rows:
            sums.setdefault((row["share"], row["way"], row["predictor"]), []).append(row)
    document = {
        "model": args.model.name,
        "text": args.text.name,
        "tokens": len(ids),
        "zeros": args.zeros,
        "recall": args.recall,
        "layers": len(layers),
        "rows": [
            {
                **rows[0],
                **{key: sum(row[key] for row in rows) for key in ("rows", "requests")},
                **{key: float(np.mean([row[key] for row in rows])) for key in ("recall", "named")},
            }
            for rows in sums.values()
        ],
    }
    print(table(document))
    if args.json is not None:
        args.json.write_text(json.dumps(document) + "\n", encoding="utf-8")
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
