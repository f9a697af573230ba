"""What it brings that a token does not multiply the down columns of neurons that are zero: a mixture of Nemotron 3
Nano's shape with squared ReLU, in memory, whose neurons are zero by the sign of their rows.

    python bench/kernels/zero_columns.py [--dtype int4_32] [--experts 16] [--tokens 40] [--rounds 5] [--json OUT]

Processor time of one thread, a token: medians over rounds in turn, of synthetic models with 0, 50, 70 and 90 % of
zeros, made in a temporary folder. All else in them is small. The last line is one JSON document.
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from engine_runs import add_simd, finish
from safetensors.torch import save_file

from flashllm import _core
from flashllm.config import RunConfig
from flashllm.convert.run import convert
from flashllm.engine.model import Model

WIDTH, SIZE, SHARED, VOCAB, CHOSEN, HEAD = 2688, 1856, 3712, 512, 6, 64
SHARES = (0.0, 0.5, 0.7, 0.9)


def neurons(count: int, share: float) -> dict[str, torch.Tensor]:
    """Up rows whose products with a token of ones are above 0, or below for `share` of them; down columns."""
    sign = torch.where(torch.randperm(count) < round(share * count), -1.0, 1.0)
    up = 0.02 * torch.randn(count, WIDTH) + 0.01 * sign[:, None]
    return {"up_proj.weight": up, "down_proj.weight": 0.02 * torch.randn(WIDTH, count)}


def make(root: Path, share: float, args: argparse.Namespace) -> Path:
    """A converted model of two layers: attention that adds nothing, and experts."""
    torch.manual_seed(0)
    attention, mixture = (f"backbone.layers.{layer}.mixer." for layer in (0, 1))
    ones = {"backbone.embeddings": (VOCAB, WIDTH), "lm_head": (VOCAB, WIDTH), "backbone.norm_f": (WIDTH,)}
    ones |= {f"backbone.layers.{layer}.norm": (WIDTH,) for layer in (0, 1)}
    zeros = {f"{attention}{part}_proj": (HEAD, WIDTH) for part in "qkv"} | {f"{attention}o_proj": (WIDTH, HEAD)}
    tensors = {f"{name}.weight": torch.ones(shape) for name, shape in ones.items()}
    tensors |= {f"{name}.weight": torch.zeros(shape) for name, shape in zeros.items()}
    tensors[f"{mixture}gate.weight"] = 0.02 * torch.randn(args.experts, WIDTH)
    tensors[f"{mixture}gate.e_score_correction_bias"] = torch.zeros(args.experts)
    for part, count in (*((f"experts.{number}.", SIZE) for number in range(args.experts)), ("shared_experts.", SHARED)):
        tensors |= {f"{mixture}{part}{name}": value for name, value in neurons(count, share).items()}
    config = {"model_type": "nemotron_h", "hybrid_override_pattern": "*E", "torch_dtype": "bfloat16", "head_dim": HEAD}
    config |= {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_attention_heads": 1, "num_key_value_heads": 1}
    config |= {"n_routed_experts": args.experts, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": SIZE}
    config |= {"moe_shared_expert_intermediate_size": SHARED}
    (folder := root / f"{share}").mkdir()
    save_file({name: value.bfloat16() for name, value in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    convert(folder, folder / "model", **({} if args.dtype == "bfloat16" else {"encoding": args.dtype}))
    return folder / "model"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("--dtype", "int4_32"), ("--experts", 16), ("--tokens", 40), ("--rounds", 5)):
        parser.add_argument(name, type=type(default), default=default)
    parser.add_argument("--json", type=Path, help="write the document here too")
    add_simd(parser)
    args = parser.parse_args(argv)
    config = RunConfig(mode="sparse", threads=1, io_threads=1, context=args.tokens + 2, simd=args.simd)
    times: dict[float, list[float]] = {share: [] for share in SHARES}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        models = {share: stack.enter_context(Model.open(make(folder, share, args), config)) for share in SHARES}
        for share, model in (1 + args.rounds) * list(models.items()):  # the first round does not count
            with model.new_sequence() as sequence:
                model.step([(sequence, [1])])
                before = time.thread_time()
                for _ in range(args.tokens):
                    model.step([(sequence, [1])])
                times[share].append(1e3 * (time.thread_time() - before) / args.tokens)
    rows = [{"zeros": share, "ms": statistics.median(found[1:]), "each": found[1:]} for share, found in times.items()]
    for row in rows:
        print(f"{row['zeros']:.0%} zeros: {row['ms']:.2f} ms a token, {row['ms'] / rows[0]['ms']:.2f} of no zeros")
    document = {"dtype": args.dtype, "experts": args.experts, "chosen": CHOSEN, "tokens": args.tokens, "rows": rows}
    return finish({**document, "simd": _core.best_simd_level(), "used": args.simd}, args.json)


if __name__ == "__main__":
    sys.exit(main())
