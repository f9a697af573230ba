"""What naming the neurons takes of a token's time (paper A, appendix B.3), by trained predictors or by gates.

    python bench/engine/predictor_share.py MODEL [MODEL ...] [--tokens 64]

Whole tokens are timed in mode sparse, one after another after a short prompt; in turn with each of them every layer
names the neurons of that token's FFN inputs, which a dense pass has recorded, and does nothing else. Both run on the
same threads; naming alone includes handing the names to Python. Give models no limit of memory, so that reads take
nothing of a token. The last line is one JSON document.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import core_testing  # noqa: F401 - the core's test build, whose layers say what they name

from flashllm.base.dtypes import WEIGHT_DTYPES
from flashllm.base.dtypes import cast as cast_dtype
from flashllm.commands.predictors.scripts import sample_text
from flashllm.config import RunConfig
from flashllm.engine.model import Model
from flashllm.generate.tokenizer import Tokenizer
from flashllm.pack.score import Inputs

PROMPT = 16  # tokens


def share(directory: Path, text: str, tokens: int, threads: int | None) -> dict[str, Any]:
    """Milliseconds of a token and of its naming, medians, and the share of the neurons that are named."""
    ids = Tokenizer.load(directory).encode(text)[: PROMPT + tokens]
    if len(ids) < PROMPT + tokens:
        raise SystemExit(f"the text has {len(ids)} tokens, fewer than {PROMPT + tokens}")
    with Model.open(directory, RunConfig(mode="dense", threads=threads)) as model, model.new_sequence() as sequence:
        seen = Inputs(layers=model.manifest.architecture.num_layers, step=1)
        model.step([(sequence, ids)], all_logits=True, observer=seen)
        wide, stored = WEIGHT_DTYPES["float32"], model.directory.dtype
    inputs = [np.ascontiguousarray(cast_dtype(seen.of(layer), wide, stored)) for layer in range(seen.layers)]
    whole, naming, named = [], [], 0
    with Model.open(directory, RunConfig(mode="sparse", threads=threads)) as model, model.new_sequence() as sequence:
        model.step([(sequence, ids[:PROMPT])])
        ffns, layout = model.parts.ffns, model.manifest.rows
        for at in range(PROMPT, len(ids)):
            began = time.perf_counter()
            model.step([(sequence, ids[at : at + 1])])
            middle = time.perf_counter()
            found = [ffn.predict(layer[at].ctypes.data) for ffn, layer in zip(ffns, inputs, strict=True)]
            naming.append(time.perf_counter() - middle)
            whole.append(middle - began)
            named += sum(map(len, found))
        count = len(ffns) * layout.d_ff * tokens
    token, part = (1e3 * statistics.median(times) for times in (whole, naming))
    return {"token_ms": token, "naming_ms": part, "share": part / token, "named": named / count}


def main(argv: list[str] | None = None) -> int:
    """Measure each model, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", metavar="MODEL", type=Path, nargs="+")
    parser.add_argument("--text", type=Path, help="default: the repository's sample")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    text = (args.text or sample_text()).read_text(encoding="utf-8")
    rows = {}
    for directory in args.models:
        rows[directory.name] = row = share(directory, text, args.tokens, args.threads)
        print(
            f"{directory.name}: {row['naming_ms']:.2f} of {row['token_ms']:.2f} ms ({row['share']:.1%}) to name "
            f"{row['named']:.1%} of the neurons",
            file=sys.stderr,
            flush=True,
        )
    document = {"benchmark": "predictor_share", "tokens": args.tokens, "threads": args.threads, "rows": rows}
    if args.out:
        args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
