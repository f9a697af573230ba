"""Write a Llama of a known shape with dummy weights, streamed into our format, and for ReLU a made-up trace.

    python tools/make_synthetic_gated.py OUT --shape llama-2-7b --layers 8 --gate resident
    python tools/make_synthetic_gated.py OUT --shape llama-2-7b --layers 8 --activation silu

For measurements of reads and arithmetic, as tools/make_synthetic_model.py, whose dummy weights and trace these are: the
text means nothing, and every record says *synthetic weights, synthetic trace*. With ReLU a tenth of the neurons is
active. Resident gates name exactly those that fire; gates in 4 bits, and predictors, name three times as many, of which
a third fires (tools/synthetic_trace.py), so that their figures are pessimistic for the former. With SiLU every neuron
is used, there is no trace, and the model runs dense. Fewer layers than the shape has are for times that are then
multiplied; whoever shows such a product says so.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from install_popularity import install_popularity
from make_synthetic_model import convert_dummy, write_predictors
from synthetic_trace import FIRING_SHARE, add_prefetch_arguments, write_synthetic_trace

from flashllm.base.dtypes import WEIGHT_DTYPES
from flashllm.base.files import iterate_chunks
from flashllm.format.install import install_files, install_predictors
from flashllm.format.model_files import TRACE
from flashllm.format.rows import CODED_ENCODINGS
from flashllm.format.trace import Trace

SHAPES: dict[str, dict[str, Any]] = {
    "llama-2-7b": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    },
}


def install_traces(out: Path, config: dict[str, Any], args: argparse.Namespace) -> None:
    """The trace to run by, and what is known of the neurons from another one of the same popularity and groups."""
    firing = 1.0 if args.gate == "resident" else FIRING_SHARE
    with tempfile.TemporaryDirectory() as name:
        for part, tokens in (("judge", args.tokens), ("learn", args.learn_tokens)):
            write_synthetic_trace(
                Path(name) / part, layers=config["num_hidden_layers"], neurons=config["intermediate_size"],
                tokens=tokens, part=part, recall=args.early_recall, precision=args.early_precision, seed=args.seed,
                firing=firing,
            )  # fmt: skip
        install_files(out, {TRACE: iterate_chunks(Path(name) / "judge")})
        with Trace(Path(name) / "learn") as learn:
            install_popularity(out, learn)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, help="directory to write; must not exist")
    parser.add_argument("--shape", choices=SHAPES, default="llama-2-7b")
    parser.add_argument("--layers", type=int, help="another number of layers than the shape has")
    parser.add_argument("--config", type=json.loads, default={}, help="JSON object of config keys that differ")
    parser.add_argument("--activation", choices=("relu", "silu"), default="relu")
    parser.add_argument("--gate", choices=("rows", "resident", "4bit"), default="rows")
    parser.add_argument("--dtype", choices=WEIGHT_DTYPES, default="bfloat16")
    parser.add_argument("--encoding", choices=CODED_ENCODINGS, help="of the neurons; by default the dtype as it is")
    parser.add_argument("--resident-encoding", choices=CODED_ENCODINGS, help="of what stays in memory")
    parser.add_argument("--tokenizer", type=Path, default=Path(__file__).parents[1] / "flashllm" / "demo")
    parser.add_argument("--tokens", type=int, default=1200, help="tokens of the trace, after which it begins again")
    parser.add_argument("--learn-tokens", type=int, default=1000, help="tokens that popularity is learned from")
    parser.add_argument("--seed", type=int, default=0)
    add_prefetch_arguments(parser)
    args = parser.parse_args(argv)
    is_sparse = args.activation == "relu"
    if not is_sparse and args.gate != "rows":
        parser.error("--gate resident and 4bit name neurons that fire; with --activation silu all do")

    dtype = WEIGHT_DTYPES[args.dtype]
    config = {"model_type": "llama", "hidden_act": args.activation, "dtype": dtype.name, **SHAPES[args.shape]}
    config |= {"bos_token_id": 1, "eos_token_id": 2, **args.config}
    if args.layers:
        config["num_hidden_layers"] = args.layers
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        manifest = convert_dummy(
            folder,
            config,
            args.out,
            seed=args.seed,
            tokenizer=args.tokenizer,
            encoding=args.encoding,
            resident_encoding=args.resident_encoding,
            gate=args.gate,
            predictors=args.gate == "4bit",
        )
        if is_sparse and args.gate == "rows":
            write_predictors(folder / "predictors", manifest, args.seed, 8, prefetch=True)
            install_predictors(args.out, folder / "predictors")
    if is_sparse:
        install_traces(args.out, config, args)
    print(f"{args.out}: {config['num_hidden_layers']} layers of {args.shape}, {args.activation}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
