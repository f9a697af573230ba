"""Write a mixture of experts of a known shape with dummy weights, streamed into our format, and a made-up trace.

    python tools/make_synthetic_experts.py OUT --shape olmoe

For measurements of reads and arithmetic, as tools/make_synthetic_model.py, whose dummy weights these are: the text
means nothing, and every record says *synthetic weights, synthetic trace*. The router runs at full cost; the trace says
which experts a token goes to.

Locality of the trace: each of the last token's experts is chosen again with probability `--stay`; the others are drawn
by popularity, p ~ Beta(5 m, 5 (1 - m)) for a mean share m of tokens, without replacement. What came of it is printed
and recorded: the share of a token's experts that the token before had too, and the share that the most frequent experts
of the whole trace make up. On Qwen3-30B-A3B 43 % and 38 % were measured (BigMoeOnEdge, docs/expert-prediction.md).
"""

import argparse
import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from activity_trace import TRACE, Stream, TraceInfo, TraceWriter, pack_bits
from make_synthetic_model import add_model_arguments, convert_dummy
from numpy.typing import NDArray

from flashllm.arch.spec import Architecture
from flashllm.base.dtypes import WEIGHT_DTYPES
from flashllm.base.files import iterate_chunks
from flashllm.format.install import install_files

SHAPES: dict[str, dict[str, Any]] = {
    "olmoe": {  # OLMoE-1B-7B
        "model_type": "olmoe",
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "vocab_size": 50304,
        "max_position_embeddings": 4096,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
    },
}
CONCENTRATION = 5.0

Routes = NDArray[np.int64]


def made_up_routes(experts: int, chosen: int, tokens: int, *, stay: float, random: np.random.Generator) -> Routes:
    """The experts [tokens, chosen] of one layer's tokens, ascending."""
    mean = chosen / experts
    popularity = random.beta(CONCENTRATION * mean, CONCENTRATION * (1 - mean), experts) + 1e-6
    routes, last = np.empty((tokens, chosen), np.int64), np.empty(0, np.int64)
    for token in range(tokens):
        kept = last[random.random(len(last)) < stay]
        weights = popularity.copy()
        weights[kept] = 0
        new = random.choice(experts, chosen - len(kept), replace=False, p=weights / weights.sum())
        last = np.sort(np.concatenate([kept, new]))
        routes[token] = last
    return routes


def locality(routes: list[Routes], experts: int) -> tuple[float, float]:
    """Shares of a token's experts that the token before had, and that the most frequent ones of all tokens are."""
    same = [np.mean([len(np.intersect1d(a, b)) for a, b in itertools.pairwise(one)]) for one in routes]
    counts = [np.sort(np.bincount(one.reshape(-1), minlength=experts))[::-1] for one in routes]
    chosen = routes[0].shape[1]
    hottest = [count[:chosen].sum() / count.sum() for count in counts]
    return float(np.mean(same) / chosen), float(np.mean(hottest))


def write_routing_trace(path: Path, architecture: Architecture, *, tokens: int, stay: float, seed: int) -> str:
    """Write the trace of a model of this architecture; what it is like."""
    experts, chosen = architecture.experts, architecture.chosen_experts
    routes = [
        made_up_routes(experts, chosen, tokens, stay=stay, random=np.random.default_rng([seed, layer]))
        for layer in range(architecture.num_layers)
    ]
    again, hottest = locality(routes, experts)
    description = (
        f"synthetic trace of routing, seed {seed}, {chosen} of {experts} experts: {again:.0%} of a token's experts are "
        f"the last token's, {hottest:.0%} are of the {chosen} most frequent"
    )
    info = TraceInfo(
        num_tokens=tokens,
        num_layers=architecture.num_layers,
        num_neurons=architecture.d_ff,
        synthetic=True,
        description=description,
    )
    masks = np.zeros((architecture.num_layers, len(Stream), architecture.d_ff), np.bool_)
    with TraceWriter(path, info) as writer:
        for token in range(tokens):
            masks[:] = False
            masks[:, [Stream.ACTIVE, Stream.FIRING], experts * architecture.expert_size :] = True  # shared
            for layer, one in enumerate(routes):
                for expert in one[token]:
                    first = int(expert) * architecture.expert_size
                    masks[layer, [Stream.ACTIVE, Stream.FIRING], first : first + architecture.expert_size] = True
            writer.append(pack_bits(masks))
        writer.finish()
    return description


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_model_arguments(parser, SHAPES, "olmoe")
    parser.add_argument("--config", type=json.loads, default={}, help="JSON object of config keys that differ")
    parser.add_argument("--tokens", type=int, default=600, help="tokens of the trace, after which it begins again")
    parser.add_argument("--stay", type=float, default=0.25, help="chance that an expert is the next token's too")
    args = parser.parse_args(argv)

    dtype = WEIGHT_DTYPES[args.dtype]
    config = {**SHAPES[args.shape], "dtype": dtype.name, "bos_token_id": 2, "eos_token_id": 2, **args.config}
    if args.layers:
        config["num_hidden_layers"] = args.layers
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        manifest = convert_dummy(folder, config, args.out, seed=args.seed, tokenizer=args.tokenizer)
        trace = folder / "trace"
        said = write_routing_trace(trace, manifest.architecture, tokens=args.tokens, stay=args.stay, seed=args.seed)
        install_files(args.out, {TRACE: iterate_chunks(trace)})
    print(f"{args.out}: {said}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
