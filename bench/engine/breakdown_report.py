"""A latency breakdown as a markdown table and as stacked bars like paper A's figure 1. Knows no engine."""

from pathlib import Path
from typing import Any

PARTS = {"io_ms": "I/O", "memory_ms": "memory management", "compute_ms": "compute", "other_ms": "other"}
COLOURS = ("#c44e52", "#dd8452", "#4c72b0", "#8c8c8c")


def synthetic(document: dict[str, Any]) -> str:
    """What must be said wherever the numbers stand."""
    conditions = document["conditions"]
    made_up = "synthetic" in conditions["activity"] or "synthetic" in conditions["weights"]
    return ", **synthetic weights, synthetic trace**" if made_up else ""


def markdown(document: dict[str, Any], limit: str) -> str:
    conditions, roof = document["conditions"], document["roof"]
    how = "direct I/O" if conditions["direct_io"] else "NOT direct I/O"
    capped = " by control group" if conditions["cgroup"] else ""
    columns = ["engine", "ms/token", "I/O", "memory", "compute", "other", "p95", "quartiles", "first ten", "MB/token"]
    columns += ["requests", "GB/s", "hits", "cached", "prompt, s"]
    first = ", files read through first" if conditions["read_first"] else ""
    lines = [
        f"{conditions['model']} ({conditions['model_bytes'] / 1e9:.2f} GB, {conditions['dtype']})"
        f"{synthetic(document)}; limit {limit}{capped}; prompt {conditions['prompt_tokens']}; {how}{first}",
        "",
        f"| {' | '.join(columns)} |",
        "|---" * len(columns) + "|",
    ]
    for name, engine in document["engines"].items():
        low, high = engine["quartiles_ms"]
        times = " | ".join(f"{engine[part]:.1f}" for part in ("total_ms", *PARTS, "p95_ms"))
        share = engine["cached_share"] if engine["cached_share"] is not None else engine["resident_share"]
        prompt = "" if engine["prefill_ms"] is None else f"{engine['prefill_ms'] / 1e3:.2f}"
        lines.append(
            f"| {name} | {times} | {low:.1f}–{high:.1f} | {engine['first_ten_ms']:.1f} "
            f"| {engine['bytes_read'] / 1e6:.1f} | {engine['requests']} | {engine['read_gbps']:.2f} "
            f"| {engine['hit_rate']:.1%} | {share or 0:.1%} | {prompt} |"
        )
    lines += ["", f"Roofs: memory {roof['dram_gbps']:.1f} GB/s, sequential reads {roof['sequential_gbps']:.2f} GB/s"]
    if roof["io_ms"] is not None:
        lines[-1] += (
            f", reads at the size issued {roof['read_gbps']:.2f} GB/s; flashllm's token: I/O {roof['io_ms']:.1f} ms, "
            f"compute {roof['compute_ms']:.1f} ms"
        )
    for name, engine in document["engines"].items():
        if engine.get("window_held"):
            lines.append(f"{name}: a window of {engine['window_held']:.1f} tokens held, on average over layers")
    reader = conditions["reader"]
    if reader is not None:
        lines.append(f"flashllm's reader: {reader['backend']}, {reader['depth']} at a time ({reader['source']})")
    given = {name: value for name, value in document["ratios"].items() if value is not None}
    lines.append("Ratios: " + ", ".join(f"{name} {value:.2f}" for name, value in given.items()))
    return "\n".join(lines)


def plot(document: dict[str, Any], path: Path) -> None:
    """Stacked bars: each engine's token by what its time went to."""
    from matplotlib.figure import Figure

    engines = document["engines"]
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    bottom = [0.0] * len(engines)
    for (part, label), colour in zip(PARTS.items(), COLOURS, strict=True):
        heights = [engine[part] for engine in engines.values()]
        axes.bar(list(engines), heights, bottom=bottom, label=label, color=colour, width=0.6)
        bottom = [low + high for low, high in zip(bottom, heights, strict=True)]
    for index, engine in enumerate(engines.values()):
        axes.annotate(f"{engine['total_ms']:.0f}", (index, bottom[index]), ha="center", va="bottom")
    axes.set_ylabel("ms per token (median)")
    conditions = document["conditions"]
    limit = "" if conditions["memory"] is None else f", {conditions['memory'] / 1e9:.1f} GB limit"
    axes.set_title(f"{conditions['model']}{limit}{synthetic(document).replace('*', '')}", fontsize=9)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
