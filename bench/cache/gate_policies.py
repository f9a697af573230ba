"""Three ways to use a gated FFN's gate, measured against each other by replaying what a model's gates say of a text.

    python bench/cache/gate_policies.py MODEL TEXT [--zeros 0.7] [--recall 0.95] [--tokens 512] [--every N] [--json OUT]
                                        [--read FILE --row 8KiB --neurons 11008]

MODEL is a gated model's directory, with its gates in the rows; TEXT is UTF-8. A neuron fires where the magnitude of its
activated gate is among the layer's largest: all but the share `--zeros`, by a threshold from the text's first half; a
FATReLU model has thresholds of its own, and they decide where `--zeros` is not given. The second quarter gives
predictors their thresholds, for `--recall` of its firings, the first half gives the cache its popularity, and the other
half is counted. One dense pass computes the gates' inputs. With --read the reads are timed as well: as many a layer as
were counted, scaled to `--neurons`, of rows of `--row`, direct and at random places of FILE (gate_reads.py).

whole neuron        what a predictor names is read whole: three matrices' rows in one request
gate resident       the gates lie in memory and name exactly what fires: two rows in one request
gate rows first     of what a predictor names the gate is read, then up and down of what fires: one row, later two

Predictors: the gate in 3 bits (groups of 32) and in 4 (as conversion makes it), and rank 64 in 8 bits (the gate's best
map of that rank for the covariance of the first quarter's inputs, not trained); and the model's own, where it has
trained ones, by their own thresholds. They and resident gates come out of the same memory as the cache, which the
engine's policy fills. Of `gate rows first` the gates and the other two have a cache each, of as many neurons. The last
line of standard output is one JSON document.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gate_reads import Drive, Round
from numpy.typing import NDArray
from replay import Activity, misses_of
from safetensors.numpy import load_file

from flashllm.base.group_codes import GROUP_CODES
from flashllm.base.units import parse_size
from flashllm.config import RunConfig
from flashllm.engine.model import Model
from flashllm.format.model_dir import ModelDir, read_plane
from flashllm.format.model_files import FFN, PREDICTORS, ffn_tensor
from flashllm.format.predictors import FACTOR_CODES
from flashllm.format.rows import widened_rows
from flashllm.format.safetensors import open_safetensors
from flashllm.generate.tokenizer import Tokenizer
from flashllm.pack.score import Inputs

Floats = NDArray[np.float32]
Masks = NDArray[np.bool_]

POLICY = "frequency"  # the engine's
RANK = 64
GROUP = 32  # of 3 bits, with a scale of 16
Activate = Callable[[Floats], Floats]
ACTIVATIONS: dict[str, Activate] = {
    "silu": lambda g: g / (1 + np.exp(-g)),
    "relu": lambda g: np.maximum(g, 0),
    "fatrelu": lambda g: np.maximum(g, 0),
}


@dataclass(frozen=True, slots=True)
class Predictor:
    """Scores [tokens, neurons], and what it takes of memory, in rows of a matrix; the score from which it names a
    neuron, where that is known."""

    name: str
    scores: Floats
    resident: float
    threshold: float | None = None


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


def predictors(gate: Floats, x: Floats, fitted: int, activate: Activate) -> list[Predictor]:
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


def trained(tensors: dict[str, NDArray[Any]], layer: int, x: Floats) -> list[Predictor]:
    """The model's own, of low rank in 8 bits, where it has one."""
    start = f"layers.{layer}."
    if tensors.get(f"{start}a", x).dtype != np.int8:
        return []
    coded = {part: tensors[f"{start}{part}"].view(np.uint8) for part in "ab"}
    a = FACTOR_CODES[8].decode(coded["a"], x.shape[1])
    b = FACTOR_CODES[8].decode(coded["b"], len(a))
    scores = x @ a.T @ b.T + tensors[f"{start}bias"]
    resident = len(a) * (len(b) + a.shape[1]) / a.shape[1] / 2
    return [Predictor("trained", scores, resident, float(tensors[f"{start}threshold"].item()))]


def replayed(masks: Masks, learned: int, capacity: float) -> float:
    """Misses a token, of the tokens after the first `learned`, with memory for `capacity` neurons."""
    tokens = [np.flatnonzero(mask) for mask in masks[learned:]]
    activity = Activity(tokens, masks.shape[1], masks[:learned].mean(0))
    misses, _ = misses_of(POLICY, activity, max(0, int(capacity)))
    return float(np.mean([len(ids) for ids in misses]))


def layer_rows(fires: Masks, every: list[Predictor], args: argparse.Namespace) -> list[dict[str, Any]]:
    """What each way reads of one layer a token, at each share of the FFN in memory; rows of a matrix, and requests, of
    which `later` wait for the others."""
    learned, neurons = len(fires) // 2, fires.shape[1]
    found = []

    def add(way: str, name: str, share: float, rows: float, requests: float, **more: float) -> None:
        more = {"later": 0.0, "recall": 1.0, "named": 1.0, **more}
        found.append({"way": way, "predictor": name, "share": share, "rows": rows, "requests": requests, **more})

    for share in args.memory:
        room = 3 * neurons * share
        if room > neurons:
            missed = replayed(fires, learned, (room - neurons) / 2)
            add("gate resident", "", share, 2 * missed, missed)
        for each in every:
            threshold = each.threshold
            if threshold is None:
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
            add("gate rows first", each.name, share, gates + 2 * others, gates + others, later=others, **ratios)
    return found


def time_reads(rows: list[dict[str, Any]], layers: int, neurons: int, args: argparse.Namespace) -> None:
    """Adds `ms`, [quartile, median, quartile] that a layer's reads take, at the size that was asked for."""
    scale = args.neurons / neurons / layers
    ways = []
    for row in rows:
        first, later = row["requests"] - row["later"], row["later"]
        in_first, in_later = {"whole neuron": (3, 0), "gate resident": (2, 0), "gate rows first": (1, 2)}[row["way"]]
        ways.append(
            [Round(round(first * scale), in_first * args.row), Round(round(later * scale), in_later * args.row)]
        )
    for row, seconds in zip(rows, Drive(args.read).quartiles_of(ways), strict=True):
        row["ms"] = [1e3 * each for each in seconds]


def gate_of(directory: Path, model: ModelDir, layer: int) -> Floats:
    """[d_ff, d_model]"""
    layout = model.manifest.rows
    rows = np.empty((layout.num_rows, layout.stride), np.uint8)
    with open_safetensors(directory / FFN) as file:
        file.read_into(file.header.tensors[ffn_tensor(layer)], 0, rows.reshape(-1).data)
    return np.array(widened_rows(layout, rows[: layout.d_ff], read_plane(directory, model.manifest, layer))["gate"])


def table(document: dict[str, Any]) -> str:
    """In markdown."""
    lines = [
        "| in memory | way | predictor | named / fire | recall | rows a token | requests | ms a layer |",
        "|---" * 8 + "|",
    ]
    for row in document["rows"]:
        ms = "{1:.2f} ({0:.2f} to {2:.2f})".format(*row["ms"]) if "ms" in row else ""
        lines.append(
            f"| {row['share']:.0%} | {row['way']} | {row['predictor']} | {row['named']:.2f} | {row['recall']:.1%} "
            f"| {row['rows']:.0f} | {row['requests']:.0f} | {ms} |"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--zeros", type=float, help="share of a layer's neurons that do not fire (0.7)")
    parser.add_argument("--recall", type=float, default=0.95, help="of all firings, that predictors are to name")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every N-th layer")
    parser.add_argument("--memory", type=float, nargs="+", default=[0.25, 0.5, 0.75], help="shares of the FFN")
    parser.add_argument("--read", type=Path, metavar="FILE", help="time the reads on this file's drive")
    parser.add_argument("--row", type=parse_size, default=8192, metavar="SIZE", help="of a matrix's row there (8KiB)")
    parser.add_argument("--neurons", type=int, default=11008, help="of a layer there (11008)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    model_dir = ModelDir.open(args.model)
    architecture = model_dir.architecture
    if not architecture.gated or architecture.activation not in ACTIVATIONS or model_dir.manifest.resident_gate:
        known = ", ".join(ACTIVATIONS)
        print(f"gate_policies: {args.model}: is no gated model of {known} with its gates in the rows", file=sys.stderr)
        return 1
    if args.zeros is None and architecture.activation != "fatrelu":
        args.zeros = 0.7
    ids = Tokenizer.load(args.model).encode(args.text.read_text(encoding="utf-8"), add_special=False)[: args.tokens]
    inputs = Inputs(architecture.num_layers, 1)
    with Model.open(args.model, RunConfig(mode="dense")) as model, model.new_sequence() as sequence:
        model.step([(sequence, ids)], as_prompt=True, observer=inputs)
    sums: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    tensors = load_file(args.model / PREDICTORS) if (args.model / PREDICTORS).exists() else {}
    layers, activate = range(0, architecture.num_layers, args.every), ACTIVATIONS[architecture.activation]
    for layer in layers:
        print(f"layer {layer}", file=sys.stderr, flush=True)
        x, gate, own = inputs.of(layer), gate_of(args.model, model_dir, layer), model_dir.block.layers[layer]
        learned, exact = len(x) // 2, np.abs(activate(x @ gate.T))
        zero = own.activation_threshold if args.zeros is None else np.quantile(exact[:learned], args.zeros)
        every = [*predictors(gate, x, learned // 2, activate), *trained(tensors, layer, x)]
        rows = layer_rows(exact > zero, every, args)
        for row in rows:
            sums.setdefault((row["share"], row["way"], row["predictor"]), []).append(row)
    document = {
        "model": args.model.name,
        "text": args.text.name,
        "tokens": len(ids),
        "zeros": "the model's own" if args.zeros is None else args.zeros,
        "recall": args.recall,
        "layers": len(layers),
        "rows": [
            {
                **rows[0],
                **{key: sum(row[key] for row in rows) for key in ("rows", "requests", "later")},
                **{key: float(np.mean([row[key] for row in rows])) for key in ("recall", "named")},
            }
            for rows in sums.values()
        ],
    }
    if args.read is not None:
        time_reads(document["rows"], len(layers), architecture.d_ff, args)
        document |= {"row_nbytes": args.row, "neurons": args.neurons}
    print(table(document))
    if args.json is not None:
        args.json.write_text(json.dumps(document) + "\n", encoding="utf-8")
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
