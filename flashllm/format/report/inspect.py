"""A model directory in numbers, from its manifest, config and headers alone. Loads and hashes nothing."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashllm.arch.registry import resident_shapes
from flashllm.base.units import format_size
from flashllm.config import MODES
from flashllm.format.manifest import Manifest, predictor_ranks
from flashllm.format.model_dir import ModelDir
from flashllm.format.model_files import FFN, PREDICTORS, RESIDENT, checksums_tensor
from flashllm.format.popularity import describe_popularity, popularity_line
from flashllm.format.safetensors import read_header


def inspect(path: Path) -> dict[str, Any]:
    """JSON values that describe the model directory `path`. Sizes are bytes; errors as in `ModelDir.open`."""
    path = Path(path)
    model = ModelDir.open(path)
    manifest = model.manifest
    layout, architecture = manifest.rows, manifest.architecture
    tensors = read_header(path / RESIDENT).tensors
    checksums = sum(tensors[checksums_tensor(layer)].nbytes for layer in range(architecture.num_layers))
    resident = sum(info.nbytes for info in tensors.values())
    ffn = sum(each.d_ff * each.row_nbytes for each in manifest.layouts)
    ffn_values = architecture.neurons * len(layout.matrices) * layout.d_model
    resident_values = sum(math.prod(shape) for shape in resident_shapes(model.config).values())
    table = model.table
    table_values = 0 if table is None else table.rows * table.columns
    return {
        "path": str(path.absolute()),
        "architecture": manifest.to_json()["architecture"],
        "dtype": manifest.dtype,
        "resident_encoding": manifest.resident_encoding or manifest.dtype,
        "other_encodings": dict(manifest.other_encodings),
        "activations": manifest.activations or "float32",
        "source": manifest.to_json()["source"],
        "parameters": ffn_values + resident_values + table_values,
        "files": {name: entry.nbytes for name, entry in manifest.files.items()},
        "neurons": architecture.neurons,
        "total_nbytes": sum(entry.nbytes for entry in manifest.files.values()),
        "ffn_nbytes": ffn,
        "ffn_file_nbytes": manifest.files[FFN].nbytes,
        "ffn_share": ffn / (ffn + resident - checksums),
        "resident_nbytes": resident,
        "rows": {**manifest.to_json()["rows"], "layer_nbytes": layout.layer_nbytes, "encodings": layout.described},
        "stream_block_rows": manifest.stream_block_rows,
        "predictors": _predictors(path, manifest),
        "quality": manifest.to_json().get("quality"),
        "sparsity": manifest.to_json().get("sparsity"),
        "resident_gate_nbytes": manifest.resident_gate_nbytes,
        "down_scales_nbytes": manifest.planes_nbytes,
        "calibration": manifest.to_json()["calibration"],
        "popularity": describe_popularity(path, manifest),
        "modes": [mode for mode in MODES if mode == "dense" or _runs_in(manifest, mode)],
        "context": model.block.context,
        "kv_nbytes_per_token": model.kv_nbytes_per_token,
        "state_nbytes": model.block.state_nbytes,
    }


def _runs_in(manifest: Manifest, mode: str) -> bool:
    return manifest.sparse and not (mode == "oracle" and manifest.architecture.experts)


def _predictors(path: Path, manifest: Manifest) -> dict[str, Any] | None:
    if PREDICTORS not in manifest.files:
        return None
    ranks = predictor_ranks(path / PREDICTORS, manifest)
    nbytes = sum(info.nbytes for info in read_header(path / PREDICTORS).tensors.values())
    return {"ranks": ranks, "nbytes": nbytes}


def sparsity_line(sparsity: Mapping[str, Any]) -> str:
    """A line on what cuts on the gate's activation do and cost, of the values of `Sparsity`."""
    change = sparsity["perplexity"] / sparsity["dense_perplexity"] - 1
    return (
        f"{sparsity['zeros']:.0%} of the neurons are zero by thresholds on the gate; perplexity "
        f"{sparsity['dense_perplexity']:.2f} -> {sparsity['perplexity']:.2f} ({change:+.1%}) on "
        f"{sparsity['scored_tokens']} tokens of {sparsity['text']}"
    )


def _ffn_shape(architecture: Mapping[str, Any]) -> str:
    experts = architecture.get("experts", 0)
    widths, dense = architecture.get("widths"), architecture.get("dense_layers", [])
    if not experts:
        return f"d_ff {min(widths)} to {max(widths)}" if widths else f"d_ff {architecture['d_ff']}"
    shared = architecture["shared_neurons"]
    size = (architecture["d_ff"] - shared) // experts
    behind = f" and {shared} shared neurons" if shared else ""
    others = f" in all but {len(dense)} layers, which are dense" if dense else ""
    return f"{experts} experts of {size} neurons{behind}, {architecture['chosen_experts']} experts a token{others}"


def _others(facts: Mapping[str, Any]) -> str:
    """The encodings of resident matrices that differ from the others."""
    matrices: dict[str, set[str]] = {}
    for name, encoding in facts["other_encodings"].items():
        matrices.setdefault(encoding, set()).add(name.split(".")[-2])
    return "".join(f"; {', '.join(sorted(names))} {encoding}" for encoding, names in matrices.items())


def _activations(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A line where weights are multiplied by fewer than 32 bits."""
    if facts["activations"] == "float32":
        return []
    return [("activations", f"{facts['activations']} at most, a token's and, with AVX2, a prompt's")]


def quality_line(quality: Mapping[str, Any]) -> str:
    """A line on what fewer bits cost, of the values of `Quality`."""
    found, source = quality["perplexity"], quality["source_perplexity"]
    return (
        f"perplexity {found:.2f}, {found / source - 1:+.1%} against its source's {source:.2f}, "
        f"on {quality['scored_tokens']} tokens of {quality['text']}"
    )


def format_inspection(facts: dict[str, Any]) -> str:
    """The facts of `inspect` as lines for a person."""
    architecture, rows, predictors = facts["architecture"], facts["rows"], facts["predictors"]
    gate = ", gated" if architecture["gated"] else ""
    shape = f"{architecture['num_layers']} layers, d_model {architecture['d_model']}, {_ffn_shape(architecture)}"
    padding = 1 - rows["row_nbytes"] / rows["stride"]
    lines = [
        ("model", facts["path"]),
        ("architecture", f"{architecture['model_type']}, {shape}, {architecture['activation']}{gate}"),
        (
            "weights",
            f"{facts['parameters'] / 1e6:.4g} M parameters in {facts['dtype']}, from {facts['source']['name']}",
        ),
        ("on flash", f"{format_size(facts['ffn_nbytes'])} of neurons, {facts['ffn_share']:.0%} of the weights"),
        ("resident", f"{format_size(facts['resident_nbytes'])}, {facts['resident_encoding']}{_others(facts)}"),
        ("row", f"{rows['row_nbytes']} bytes every {rows['stride']} ({padding:.1%} padding), {rows['encodings']}"),
        *_activations(facts),
        ("modes", ", ".join(facts["modes"])),
        (
            "predictors",
            "none; `flashllm train` makes them" if "sparse" in facts["modes"] else "none: no neuron is zero",
        ),
        ("calibration", "none"),
        ("KV cache", f"{format_size(facts['kv_nbytes_per_token'])} a token, context {facts['context']} tokens"),
        ("memory", "`flashllm plan` says what it needs"),
    ]
    text = dict(lines)
    if facts["state_nbytes"]:
        text["KV cache"] += f"; {format_size(facts['state_nbytes'])} a sequence, the state of its other layers"
    if facts["resident_gate_nbytes"]:
        text["predictors"] = f"the gate itself, resident: exact, {format_size(facts['resident_gate_nbytes'])}"
    elif architecture.get("experts") and predictors is None:
        text["predictors"] = "the router: exact"
    elif predictors is not None:
        low, high = min(predictors["ranks"]), max(predictors["ranks"])
        ranks = f"rank {low}" if low == high else f"ranks {low} to {high}"
        ranks = ranks if high else "the gate in 4 bits"
        text["predictors"] = f"{ranks}, {format_size(predictors['nbytes'])}"
    if facts["down_scales_nbytes"]:
        text["resident"] += f", {format_size(facts['down_scales_nbytes'])} of it scales of down columns"
    if facts["quality"] is not None:
        text["quality"] = quality_line(facts["quality"])
    if facts["sparsity"] is not None:
        text["sparsity"] = sparsity_line(facts["sparsity"])
    if facts["calibration"] is not None:
        calibration = facts["calibration"]
        active = sum(calibration["mean_active"]) / facts["neurons"]
        sample = f"{calibration['tokens']} tokens of {calibration['text']}"
        text["calibration"] = f"window {calibration['window']}, {active:.1%} of the neurons active, on {sample}"
    if facts["popularity"] is not None:
        text["popularity"] = popularity_line(facts["popularity"])
    width = max(len(name) for name in text)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in text.items())
