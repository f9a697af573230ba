"""Predictors of several sizes side by side: neurons named per neuron that fires at fixed recalls, and quality.

Reads pairs of reports, of `predictors/train_predictor.py --json` and `predictors/evaluate.py --json`, and writes a
table and a figure. Computes nothing but ratios. The last line of stdout is one JSON document.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np


def size_row(name: str, trained: dict[str, Any], judged: dict[str, Any] | None) -> dict[str, Any]:
    """One size: bytes, predicted / active by recall (mean of layers and worst), and the evaluation's quality."""
    curve = []
    for point in range(len(trained["layers"][0]["curve"])):
        points = [layer["curve"][point] for layer in trained["layers"]]
        ratios = [
            p["predicted_share"] / layer["true_share"] for p, layer in zip(points, trained["layers"], strict=True)
        ]
        mean = np.mean([p["predicted_share"] for p in points]) / np.mean([x["true_share"] for x in trained["layers"]])
        recalls = [p["recall"] for p in points]
        curve.append({"recall": float(np.mean(recalls)), "ratio": float(mean), "worst_ratio": float(max(ratios))})
    row: dict[str, Any] = {"name": name, "ranks": [layer["rank"] for layer in trained["layers"]], "curve": curve}
    row["predictor_bytes"] = trained["predictor_bytes"]
    row["share_of_model"] = _share(trained)
    row["at_threshold"] = _errors(trained["layers"])
    if judged is not None:
        row["predictor_bytes"] = judged["predictor_bytes"]
        row["share_of_model"] = _share(judged)
        row["judged"] = _errors(judged["layers"])
        row["texts"] = {
            text: {
                "perplexity": report["perplexity"]["trained"] / report["perplexity"]["dense"] - 1,
                "kl": report["kl"]["trained"],
                "same_top": report["same_top"]["trained"],
            }
            for text, report in judged["texts"].items()
        }
        row["agreement"] = judged["agreement"].get("trained")
        row["flash_bytes_per_token"] = judged["flash_bytes_per_token"]
    return row


def _share(report: dict[str, Any]) -> float:
    """Of a model directory without predictors for prefetching."""
    return float(report["predictor_bytes"] / (report["model_bytes"] - report.get("early_predictor_bytes", 0)))


def _errors(layers: list[dict[str, float]]) -> dict[str, float]:
    ratios = [layer["predicted_share"] / layer["true_share"] for layer in layers]
    true, predicted = (np.mean([layer[key] for layer in layers]) for key in ("true_share", "predicted_share"))
    found: dict[str, float] = {"ratio": float(predicted / true), "worst_ratio": max(ratios)}
    for key in ("false_negative", "false_positive"):
        values = [layer[key] for layer in layers]
        found |= {key: float(np.mean(values)), f"worst_{key}": max(values)}
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    recalls = [0.9, 0.95, 0.97, 0.99]
    lines = ["Predicted / active at fixed recall, on samples never trained on: all layers together (worst layer).", ""]
    lines.append("| predictors | MB | of the model | ranks | " + " | ".join(f"{r:.0%}" for r in recalls) + " |")
    lines.append("| --- " * (4 + len(recalls)) + "|")
    for row in rows:
        cells = []
        for recall in recalls:
            point = min(row["curve"], key=lambda p: abs(p["recall"] - recall))
            cells.append(f"{point['ratio']:.2f} ({point['worst_ratio']:.2f})")
        ranks = f"{min(row['ranks'])} to {max(row['ranks'])}"
        size = f"{row['predictor_bytes'] / 1e6:.2f} | {row['share_of_model']:.1%}"
        lines.append(f"| {row['name']} | {size} | {ranks} | " + " | ".join(cells) + " |")
    judged = [row for row in rows if "judged" in row]
    if judged:
        lines += [
            "",
            "At the thresholds as stored, on other text: mean of layers (worst layer); perplexity against dense.",
            "",
        ]
        texts = list(judged[0]["texts"])
        heads = [f"{text}: perplexity, KL" for text in texts]
        lines.append(
            "| predictors | predicted / active | false neg. | false pos. | " + " | ".join(heads) + " | kB/token |"
        )
        lines.append("| --- " * (5 + len(texts)) + "|")
        for row in judged:
            e = row["judged"]
            cells = [f"{row['texts'][t]['perplexity']:+.2%}, {row['texts'][t]['kl']:.5f}" for t in texts]
            lines.append(
                f"| {row['name']} | {e['ratio']:.2f} ({e['worst_ratio']:.2f}) | "
                f"{e['false_negative']:.2%} ({e['worst_false_negative']:.2%}) | "
                f"{e['false_positive']:.2%} ({e['worst_false_positive']:.2%}) | "
                + " | ".join(cells)
                + f" | {row['flash_bytes_per_token'] / 1e3:.0f} |"
            )
    return "\n".join(lines) + "\n"


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    mean, worst = figure.subplots(1, 2, sharey=True)
    for row in rows:
        recalls = [100 * p["recall"] for p in row["curve"]]
        label = f"{row['name']} ({row['share_of_model']:.1%} of the model)"
        mean.plot(recalls, [p["ratio"] for p in row["curve"]], ".-", label=label)
        worst.plot(recalls, [p["worst_ratio"] for p in row["curve"]], ".-", label=label)
    for axes, title in ((mean, "all layers"), (worst, "worst layer")):
        axes.axhline(1.0, color="grey", lw=0.5)
        axes.set(xlabel="recall, %", title=title)
    mean.set_ylabel("predicted / active neurons")
    mean.legend(fontsize="small")
    figure.savefig(path, dpi=110)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("reports", nargs="+", metavar="NAME=TRAINED.json[,JUDGED.json]")
    parser.add_argument("--out", type=Path, required=True, help="folder of predictor_sizes.{json,md,png}")
    args = parser.parse_args(argv)
    rows = []
    for item in args.reports:
        name, _, paths = item.partition("=")
        trained, *judged = [json.loads(Path(path).read_text(encoding="utf-8")) for path in paths.split(",")]
        rows.append(size_row(name, trained, judged[0] if judged else None))
    page, text = table(rows), json.dumps({"sizes": rows})
    (args.out / "predictor_sizes.md").write_text(page, encoding="utf-8")
    (args.out / "predictor_sizes.json").write_text(text + "\n", encoding="utf-8")
    plot(rows, args.out / "predictor_sizes.png")
    print(page, file=sys.stderr)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
