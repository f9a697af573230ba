"""What thresholds on the gate cost a model that is never sparse: perplexity and zeros, dense and at several shares.

Usage: python bench/quality/gate_thresholds.py CHECKPOINT CALIBRATION TEXT [--share 0.3 ...] [--gate resident|4bit]
       [--windows N] [--window TOKENS] [--out FILE.json]

CHECKPOINT is a Hugging Face folder of a gated model. Thresholds are chosen on CALIBRATION, a text in UTF-8, by
`flashllm convert --sparsify`; perplexity is that of the first N windows of TEXT (default: 8 of 1,024 tokens), every
token but a window's first, each window from an empty context. With gates in 4 bits prompts are computed sparsely, so
that neurons which the codes miss count. No times are taken. The last line of standard output is one JSON document.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from flashllm.config import RunConfig
from flashllm.convert.run import convert
from flashllm.engine.model import Model
from flashllm.format.manifest import Manifest
from flashllm.generate.tokenizer import Tokenizer
from flashllm.pack.score import Zeros, perplexity
from flashllm.pack.sparsified import convert_sparsified


def text_windows(directory: Path, text: Path, length: int, count: int) -> list[list[int]]:
    """The first `count` windows of `length` tokens."""
    ids = Tokenizer.load(directory).encode(text.read_text(encoding="utf-8"), add_special=False)
    return [ids[first : first + length] for first in range(0, len(ids) - length + 1, length)][:count]


def score(directory: Path, windows: list[list[int]]) -> dict[str, Any]:
    """Perplexity, and the share of neurons that are zero; with gates in 4 bits also that of those not named."""
    manifest = Manifest.load(directory)
    zeros = Zeros()
    with Model.open(directory, RunConfig(mode="dense")) as model:
        result: dict[str, Any] = {"perplexity": perplexity(model, windows, observer=zeros)}
    result["zeros"] = zeros.zeros / zeros.values
    if manifest.sparsity is None or manifest.resident_gate:
        return result
    with Model.open(directory, RunConfig(mode="sparse", prompts="sparse")) as model:
        model.meter.restart()
        result["perplexity_as_named"] = perplexity(model, windows)
        tokens = sum(map(len, windows))
        named = model.meter.take().active / tokens / manifest.architecture.num_layers / manifest.rows.d_ff
        result["not_named"] = 1 - named
    return result


def main(argv: list[str] | None = None) -> int:
    """Convert, score, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("calibration", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--share", type=float, nargs="+", default=[0.3, 0.5, 0.7])
    parser.add_argument("--gate", choices=("resident", "4bit"), default="resident")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    document: dict[str, Any] = {
        "checkpoint": args.checkpoint.name,
        "calibration": args.calibration.name,
        "text": args.text.name,
        "window_tokens": args.window,
        "gate": args.gate,
        "rows": [],
    }
    rows = document["rows"]
    with tempfile.TemporaryDirectory() as folder:
        dense = Path(folder) / "dense"
        convert(args.checkpoint, dense)
        windows = text_windows(dense, args.text, args.window, args.windows)
        document["windows"] = len(windows)
        rows.append({"share": 0.0, **score(dense, windows)})
        print(f"dense: perplexity {rows[0]['perplexity']:.2f}", flush=True)
        for share in args.share:
            directory = Path(folder) / str(share)
            convert_sparsified(args.checkpoint, directory, share, args.calibration, gate=args.gate)
            rows.append({"share": share, **score(directory, windows)})
            change = rows[-1]["perplexity"] / rows[0]["perplexity"] - 1
            print(
                f"{share:.0%}: {rows[-1]['zeros']:.1%} zero, {rows[-1]['perplexity']:.2f} ({change:+.1%})", flush=True
            )
            if args.out is not None:  # a share may take minutes
                args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
