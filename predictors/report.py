"""The page and the figures of an evaluation, from its report. Computes nothing."""

from pathlib import Path
from typing import Any

import numpy as np
from activity import BINS

from flashllm.format.popularity import popularity_line
from flashllm.format.report.inspect import sparsity_line


def markdown(report: dict[str, Any]) -> str:
    """Tables by layer, text and task, the threshold curve, and texts side by side."""
    lines = ["## Layers", "", *_layer_table(report["layers"])]
    if "layers_svd" in report:
        lines += ["", "## Layers, untrained SVD predictors of the same ranks", "", *_layer_table(report["layers_svd"])]
    lines += ["", "## Texts", ""]
    if "sparsity" in report:
        lines += [
            f"The dense model is the one with thresholds. When it was converted: {sparsity_line(report['sparsity'])}.",
            "",
        ]
    lines += ["| text | tokens | variant | perplexity | KL | same top |"]
    lines.append("| --- " * 6 + "|")
    for name, text in report["texts"].items():
        for variant, perplexity in text["perplexity"].items():
            kl, same = text["kl"].get(variant), text["same_top"].get(variant)
            rest = " | |" if kl is None else f" {kl:.5f} | {same:.2%} |"
            change = perplexity / text["perplexity"]["dense"] - 1
            lines.append(f"| {name} | {text['tokens']} | {variant} | {perplexity:.3f} ({change:+.2%}) |{rest}")
    if report["tasks"]:
        lines += ["", "## Tasks", "", "| task | items | variant | accuracy | normalised | agrees with dense |"]
        lines.append("| --- " * 6 + "|")
    for name, task in report["tasks"].items():
        for variant, accuracy in task["accuracy"].items():
            agrees = "" if variant == "dense" else f"{task['agreement'][variant]:.1%}"
            normalised = task["accuracy_normalised"][variant]
            lines.append(f"| {name} | {task['items']} | {variant} | {accuracy:.1%} | {normalised:.1%} | {agrees} |")
    if "curve" in report:
        lines += ["", f"## Thresholds (window of {report['window']} tokens; I/O by {report['io_by']})"]
        lines += ["", "| recall | predicted | flash kB/token | I/O ms/token | perplexity | KL |"]
        lines.append("| --- " * 6 + "|")
        for p in report["curve"]:
            lines.append(
                f"| {p['recall']:.2%} | {p['predicted_share']:.2%} | {p['flash_bytes_per_token'] / 1e3:.1f} | "
                f"{p['io_ms_per_token']:.3f} | {p['perplexity']:.3f} | {p['kl']:.5f} |"
            )
    if "without" in report:
        lines += ["", "## Layers left without predictors", ""]
        lines += ["| layers | computed | flash kB/token | perplexity | KL | same top |", "| --- " * 6 + "|"]
        for row in report["without"]:
            change = row["perplexity"] / row["perplexity_dense"] - 1
            lines.append(
                f"| {', '.join(map(str, row['layers'])) or 'none'} | {row['predicted_share']:.2%} | "
                f"{row['flash_bytes_per_token'] / 1e3:.1f} | {row['perplexity']:.3f} ({change:+.2%}) | "
                f"{row['kl']:.5f} | {row['same_top']:.2%} |"
            )
    for sample in report.get("samples", []):
        lines += ["", f"**{sample['prompt']}** ...", ""]
        lines += [f"- *{name}*: {text}" for name, text in sample.items() if name != "prompt"]
    share = report["predictor_bytes"] / report["model_bytes"]
    lines += ["", f"Predictors: {report['predictor_bytes'] / 1e6:.2f} MB, {share:.1%} of the model directory."]
    if report["popularity"] is not None:
        lines += ["", f"Popularity: {popularity_line(report['popularity'])}."]
    return "\n".join(lines) + "\n"


def _layer_table(layers: list[dict[str, Any]]) -> list[str]:
    keys = ("rank", "true_share", "predicted_share", "false_negative", "false_positive", "missed_energy")
    mean = {key: float(np.mean([layer[key] for layer in layers])) for key in keys}
    return [
        "| layer | rank | active | predicted | ratio | false neg. | false pos. | missed energy |",
        "| --- " * 8 + "|",
        *(_layer_row(str(index), layer) for index, layer in enumerate(layers)),
        _layer_row("mean", mean),
    ]


def _layer_row(name: str, layer: dict[str, Any]) -> str:
    ratio = layer["predicted_share"] / max(1e-9, layer["true_share"])
    return (
        f"| {name} | {layer['rank']:.0f} | {layer['true_share']:.2%} | {layer['predicted_share']:.2%} | {ratio:.2f} | "
        f"{layer['false_negative']:.2%} | {layer['false_positive']:.2%} | {layer['missed_energy']:.3%} |"
    )


def save_plots(folder: Path, report: dict[str, Any], figures: dict[str, Any]) -> None:
    """PNG files: pre-activations (figure 3a), usage over tokens (4a), co-activation (12), errors, the curve."""
    folder.mkdir(parents=True, exist_ok=True)
    layers = report["layers"]

    # 1. Figure 3a: what was predicted and what was missed, by pre-activation, all layers together.
    figure, axes = _figure()
    centres = (BINS[:-1] + BINS[1:]) / 2
    for name in ("all", "true_positive", "false_positive", "false_negative"):
        counts = np.sum([histogram[name] for histogram in figures["histograms"]], axis=0)
        axes.plot(centres, np.maximum(counts, 0.5), label=name.replace("_", " "))
    axes.set(yscale="log", xlabel="pre-activation, standard deviations of the layer", ylabel="neurons x tokens")
    axes.legend()
    figure.savefig(folder / "preactivations.png", dpi=110)

    # 2. Figure 4a: share of neurons used by n consecutive tokens.
    figure, axes = _figure()
    for layer, usage in enumerate(figures["usage"]):
        axes.plot(usage["lengths"], usage["shares"], marker=".", label=f"layer {layer}")
    axes.set(xscale="log", xlabel="consecutive tokens", ylabel="share of neurons used")
    axes.legend(fontsize="small", ncols=1 + len(layers) // 9)
    figure.savefig(folder / "usage.png", dpi=110)

    # 3. Figure 12: how often a neuron's closest friends fire with it.
    figure, axes = _figure()
    for rank in figures["friends"][0]:
        shares = [share for layer in figures["friends"] for share in layer[rank]]
        axes.hist(shares, bins=np.linspace(0, 1, 41), histtype="step", label=f"friend {rank}")
    axes.set(xlabel="share of a neuron's firings in which the friend fires", ylabel="neurons")
    axes.legend()
    figure.savefig(folder / "coactivation.png", dpi=110)

    # 4. Errors by layer.
    figure, axes = _figure()
    positions = np.arange(len(layers))
    axes.bar(positions - 0.2, [100 * layer["true_share"] for layer in layers], 0.4, label="active")
    axes.bar(positions + 0.2, [100 * layer["predicted_share"] for layer in layers], 0.4, label="predicted")
    axes.plot(positions, [100 * layer["false_negative"] for layer in layers], "k.-", label="false negatives")
    axes.set(xlabel="layer", ylabel="%")
    axes.legend()
    figure.savefig(folder / "layers.png", dpi=110)

    # 5. Density and perplexity by recall.
    if "curve" in report:
        figure, axes = _figure()
        recalls = [100 * point["recall"] for point in report["curve"]]
        axes.plot(recalls, [100 * point["predicted_share"] for point in report["curve"]], "o-", label="predicted, %")
        axes.set(xlabel="recall, %", ylabel="predicted neurons, %")
        other = axes.twinx()
        other.plot(recalls, [point["perplexity"] for point in report["curve"]], "s--", color="C1", label="perplexity")
        other.axhline(report["curve"][0]["perplexity_dense"], color="C1", lw=0.5)
        other.set_ylabel("perplexity (line: dense)")
        figure.legend(loc="upper left", bbox_to_anchor=(0.12, 0.88))
        figure.savefig(folder / "curve.png", dpi=110)


def _figure() -> tuple[Any, Any]:
    """A picture, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    return figure, figure.subplots()
