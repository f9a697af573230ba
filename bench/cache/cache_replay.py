"""What each cache policy would have to read for a recorded or made-up trace, against Belady's optimum (MIN).

Policies learn from one trace, or from the first half of the only one, and are judged on the other. Capacity is a share
of all neurons, cut into equal parts a layer, or given to the most popular neurons of all layers; MIN gets the same.
"Hot set" is the best possible policy where tokens are independent draws: no text before tells what comes next. To see
whether a real trace is more than that, its tokens are also replayed in random order. The last line of standard output
is one JSON document.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from activity_trace import Stream, Trace, unpack_bits
from replay import ALL_POLICIES, Activity, misses_of

from flashllm.base.units import parse_size
from flashllm.plan.shares import levels_by_popularity

PLOTTED = ("window", "LRU", "S3-FIFO", "LFU", "hot set", "frequency", "MIN")
WARM_UP = 20  # tokens that are not counted


def read_active(path: Path, tokens: int | None) -> tuple[NDArray[np.uint8], int, dict[str, Any]]:
    """(bit sets [tokens, layers, row_nbytes], neurons, what the trace says of itself) of the active neurons."""
    with Trace(path) as trace:
        count = min(tokens or trace.info.num_tokens, trace.info.num_tokens)
        bits = np.stack([trace.token(token)[:, Stream.ACTIVE] for token in range(count)])
        info = trace.info
        about = {"description": info.description, "synthetic": info.synthetic, "tokens": count}
        return bits, info.num_neurons, about


def activities(judged: NDArray[np.uint8], known: NDArray[np.float64], neurons: int) -> list[Activity]:
    """A layer each."""
    layers = []
    for layer in range(judged.shape[1]):
        masks = unpack_bits(judged[:, layer], neurons)
        layers.append(Activity([np.flatnonzero(mask) for mask in masks], neurons, known[layer]))
    return layers


def shares_of(bits: NDArray[np.uint8], neurons: int) -> NDArray[np.float64]:
    """[layers, neurons]: the share of tokens each is active in."""
    return np.stack([unpack_bits(bits[:, layer], neurons).mean(axis=0) for layer in range(bits.shape[1])])


def split_rows(share: float, known: NDArray[np.float64], how: str) -> tuple[int, ...]:
    """Rows of each layer."""
    layers, neurons = known.shape
    if how == "even":
        return (int(share * neurons),) * layers
    rows = int(share * neurons * layers)
    return tuple(
        levels_by_popularity([rows], (64,) * layers, list(known.astype(np.float32)), (1,) * layers)[0].tolist()
    )


def measure(layers: list[Activity], rows: tuple[int, ...], policy: str) -> dict[str, Any]:
    """Misses a token, in all and by layer."""
    by_layer, remarks = [], []
    for activity, capacity in zip(layers, rows, strict=True):
        misses, remark = misses_of(policy, activity, capacity)
        by_layer.append(float(np.mean([len(ids) for ids in misses[WARM_UP:]])))
        remarks.append(remark)
    found: dict[str, Any] = {"misses": sum(by_layer), "by_layer": by_layer}
    return {**found, "remarks": remarks} if any(remarks) else found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--learn", type=Path, help="trace to learn from; without it, the first half of TRACE")
    parser.add_argument("--tokens", type=int, help="at most so many tokens are judged")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every N-th layer")
    parser.add_argument("--capacities", type=float, nargs="+", default=[5, 10, 14, 20, 30], metavar="PERCENT")
    parser.add_argument("--split", choices=("even", "popularity"), default="even", help="of the rows between layers")
    parser.add_argument("--policies", nargs="+", choices=ALL_POLICIES, default=ALL_POLICIES, metavar="NAME")
    parser.add_argument("--shuffle", action="store_true", help="tokens in random order: no locality but popularity")
    parser.add_argument("--row", type=parse_size, default=16384, metavar="SIZE", help="bytes of a neuron (16 KiB)")
    parser.add_argument("--out", type=Path, help="stem of a .json, a .md and a .png file")
    args = parser.parse_args(argv)

    bits, neurons, about = read_active(args.trace, None if args.learn is None else args.tokens)
    learned = bits[: len(bits) // 2]
    if args.learn is not None:
        learned, judged = read_active(args.learn, None)[0], bits
    else:
        judged = bits[len(bits) // 2 :][: args.tokens]
    if args.shuffle:
        judged = judged[np.random.default_rng(0).permutation(len(judged))]
    known = shares_of(learned[:, :: args.every], neurons)
    layers = activities(judged[:, :: args.every], known, neurons)
    active = sum(float(np.mean([len(ids) for ids in layer.tokens])) for layer in layers)
    conditions = {
        **about,
        "judged_tokens": len(judged),
        "learned_tokens": len(learned),
        "layers": len(layers),
        "neurons": neurons,
        "active_per_token": active,
        "active_share": active / neurons / len(layers),
        "split": args.split,
        "shuffled": args.shuffle,
        "row_nbytes": args.row,
    }
    results: dict[str, dict[str, Any]] = {}
    for percent in args.capacities:
        rows = split_rows(percent / 100, known, args.split)
        results[f"{percent:g}"] = {"rows": list(rows), "policies": {}}
        for policy in args.policies:
            print(f"{percent:g} %: {policy}", file=sys.stderr, flush=True)
            results[f"{percent:g}"]["policies"][policy] = measure(layers, rows, policy)
    document = {"conditions": conditions, "capacities": results}
    text = report(document)
    print(text)
    if args.out is not None:
        Path(f"{args.out}.json").write_text(json.dumps(document) + "\n")
        Path(f"{args.out}.md").write_text(text)
        plot(document, Path(f"{args.out}.png"))
    print(json.dumps(document))
    return 0


def report(document: dict[str, Any]) -> str:
    """The tables in markdown."""
    conditions = document["conditions"]
    kind = "synthetic trace" if conditions["synthetic"] else "recorded trace"
    order = ", tokens in random order" if conditions["shuffled"] else ""
    lines = [
        f"{kind} ({conditions['description']}){order}: {conditions['judged_tokens']} tokens judged, "
        f"{conditions['learned_tokens']} learned from, {conditions['layers']} layers of {conditions['neurons']} "
        f"neurons, {conditions['active_share']:.1%} active; rows split: {conditions['split']}. Misses a token "
        "in all layers (ratio to MIN):",
        "",
        "| policy | " + " | ".join(f"{percent} %" for percent in document["capacities"]) + " |",
        "|---" * (1 + len(document["capacities"])) + "|",
    ]
    columns = list(document["capacities"].values())
    for policy in columns[0]["policies"]:
        cells = []
        for column in columns:
            found, best = column["policies"][policy], column["policies"].get("MIN")
            ratio = "" if best is None or not best["misses"] else f" ({found['misses'] / best['misses']:.2f})"
            cells.append(f"{found['misses']:.0f}{ratio}")
        lines.append(f"| {policy} | " + " | ".join(cells) + " |")
    if "frequency" in columns[0]["policies"]:
        read = [column["policies"]["frequency"]["misses"] * conditions["row_nbytes"] / 1e6 for column in columns]
        lines.append("| *frequency, MB a token* | " + " | ".join(f"{nbytes:.2f}" for nbytes in read) + " |")
    return "\n".join(lines) + "\n"


def plot(document: dict[str, Any], path: Path) -> None:
    """Misses a token by capacity, as a share of the active neurons; Belady's MIN is the floor."""
    from matplotlib.figure import Figure

    conditions, columns = document["conditions"], document["capacities"]
    figure = Figure(figsize=(5.6, 3.6), layout="constrained")
    axes = figure.subplots()
    x = [float(percent) for percent in columns]
    replayed = next(iter(columns.values()))["policies"]
    for policy in (name for name in PLOTTED if name in replayed):
        misses = [column["policies"][policy]["misses"] for column in columns.values()]
        style = "k-" if policy == "MIN" else "o-" if policy == "frequency" else ".--"
        axes.plot(x, [count / conditions["active_per_token"] for count in misses], style, label=policy)
    axes.set_xlabel("neurons cached, %")
    axes.set_ylabel("misses, share of the active")
    axes.set_ylim(bottom=0)
    axes.set_title(
        f"{conditions['layers']} layers, {'synthetic' if conditions['synthetic'] else 'recorded'} trace", fontsize=9
    )
    axes.legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
