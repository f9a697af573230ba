"""Write a Hugging Face OPT checkpoint of any shape with dummy weights, shard by shard (one layer in memory).

For measurements of size, speed and memory where no trained model of that size is at hand. The weights are synthetic and
so is their sparsity: negative biases are planted so that a chosen share of neurons fires, and the up projection is low
rank plus noise, so that a predictor can learn it. Nothing it generates means anything.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path
from statistics import NormalDist

import numpy as np
import torch
from safetensors.torch import save_file
from synthetic.opt_shapes import CONTEXT, SHAPES, VOCAB, opt_config

PLANTED_RANK = 64
NOISE = 0.3  # share of a pre-activation's standard deviation that no low-rank predictor can see


def layer_tensors(layer: int, hidden: int, share: float, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """One decoder layer; its FFN input is layer-normed, so every pre-activation is close to a unit normal."""
    ffn = 4 * hidden
    prefix = f"model.decoder.layers.{layer}."

    def normal(*shape: int, scale: float) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).half()

    tensors = {}
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        tensors[f"{prefix}self_attn.{name}.weight"] = normal(hidden, hidden, scale=hidden**-0.5)
        tensors[f"{prefix}self_attn.{name}.bias"] = torch.zeros(hidden, dtype=torch.float16)
    for name in ("self_attn_layer_norm", "final_layer_norm"):
        tensors[f"{prefix}{name}.weight"] = torch.ones(hidden, dtype=torch.float16)
        tensors[f"{prefix}{name}.bias"] = torch.zeros(hidden, dtype=torch.float16)
    left = torch.randn((ffn, PLANTED_RANK), generator=generator) * PLANTED_RANK**-0.5
    right = torch.randn((PLANTED_RANK, hidden), generator=generator) * hidden**-0.5
    noise = torch.randn((ffn, hidden), generator=generator) * NOISE * hidden**-0.5
    tensors[f"{prefix}fc1.weight"] = (left @ right * (1 - NOISE**2) ** 0.5 + noise).half()
    # Neurons differ in popularity, as trained ones do; the mean share is the one asked for.
    shares = np.random.default_rng(layer).beta(share, 1 - share, size=ffn).clip(0.001, 0.9) * 0.5 + share * 0.5
    tensors[f"{prefix}fc1.bias"] = torch.tensor([NormalDist().inv_cdf(p) for p in shares]).half()
    tensors[f"{prefix}fc2.weight"] = normal(hidden, ffn, scale=ffn**-0.5)
    tensors[f"{prefix}fc2.bias"] = torch.zeros(hidden, dtype=torch.float16)
    return tensors


def outer_tensors(hidden: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {
        "model.decoder.embed_tokens.weight": torch.randn((VOCAB, hidden), generator=generator).mul_(0.5).half(),
        "model.decoder.embed_positions.weight": torch.randn((CONTEXT + 2, hidden), generator=generator)
        .mul_(0.1)
        .half(),
        "model.decoder.final_layer_norm.weight": torch.ones(hidden, dtype=torch.float16),
        "model.decoder.final_layer_norm.bias": torch.zeros(hidden, dtype=torch.float16),
    }


def write(out: Path, size: tuple[int, int, int], *, share: float = 0.05, seed: int = 0, dtype: str = "float16") -> None:
    """Write a checkpoint of so many layers, hidden numbers and heads into the new folder `out`; the config last."""
    layers, hidden, heads = size
    out.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    weight_map, total = {}, 0
    count = layers + 1
    for shard in range(count):
        tensors = outer_tensors(hidden, generator) if shard == 0 else None
        tensors = tensors or layer_tensors(shard - 1, hidden, share, generator)
        tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}
        name = f"model-{shard + 1:05d}-of-{count:05d}.safetensors"
        save_file(tensors, out / name, metadata={"format": "pt", "weights": "synthetic"})
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
        print(f"{name}", file=sys.stderr)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    (out / "config.json").write_text(json.dumps(opt_config(layers, hidden, heads, dtype=dtype), indent=1))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, help="folder to write; must not exist")
    parser.add_argument("--shape", choices=SHAPES, default="opt-1.3b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--share", type=float, default=0.05, help="share of neurons that fire")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder whose tokenizer files are copied")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    layers, hidden, heads = SHAPES[args.shape]
    write(args.out, (args.layers or layers, hidden, heads), share=args.share, seed=args.seed)
    for path in sorted(args.tokenizer.glob("token*.json")):
        shutil.copy(path, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
