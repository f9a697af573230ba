"""Write a Llama of a known shape with dummy weights, streamed into our format, and for ReLU a made-up trace.

    python tools/make_synthetic_gated.py OUT --shape llama-2-7b --layers 8 --gate resident
    python tools/make_synthetic_gated.py OUT --shape llama-2-7b --layers 8 --activation silu

For measurements of reads and arithmetic, as tools/make_synthetic_model.py, whose dummy weights and trace these are: the
text means nothing, and every record says *synthetic weights, synthetic trace*. With ReLU a tenth of the neurons is
active. Resident gates name exactly those that fire; gates in 4 bits, and predictors, name three times as many, of which
a third fires (tools/synthetic/trace.py), so that their figures are pessimistic for the former. With SiLU every neuron
is used, there is no trace, and the model runs dense. Fewer layers than the shape has are for times that are then
multiplied; whoever shows such a product says so.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from make_synthetic_model import (
    add_model_arguments,
    add_neuron_arguments,
    convert_dummy,
    install_traces,
    write_predictors,
)
from synthetic.trace import FIRING_SHARE

from flashllm.base.dtypes import WEIGHT_DTYPES
from flashllm.format.install import install_predictors

SHAPES: dict[str, dict[str, Any]] = {
    "llama-2-7b": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    }
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_model_arguments(parser, SHAPES, "llama-2-7b")
    add_neuron_arguments(parser)
    parser.add_argument("--config", type=json.loads, default={}, help="JSON object of config keys that differ")
    parser.add_argument("--activation", choices=("relu", "silu"), default="relu")
    parser.add_argument("--gate", choices=("rows", "resident", "4bit"), default="rows")
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
        firing = 1.0 if args.gate == "resident" else FIRING_SHARE
        install_traces(args.out, config["num_hidden_layers"], config["intermediate_size"], args, firing)
    print(f"{args.out}: {config['num_hidden_layers']} layers of {args.shape}, {args.activation}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
