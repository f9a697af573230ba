"""What it brings that a token does not multiply the down columns of neurons that are zero: a layer of Nemotron 3 Nano's
shape with squared ReLU, in memory, whose neurons are zero by the sign of their rows.

    python bench/engine/zero_columns.py FOLDER [--dtype int4_32] [--experts 16] [--tokens 40] [--rounds 5]

Processor time of one thread, a token, medians over rounds in turn; the rest of the model is small. `dense` takes the
shared neurons alone, as a dense layer.
"""

import argparse
import json
import shutil
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from flashllm.config import RunConfig
from flashllm.convert.run import convert
from flashllm.engine.model import Model

WIDTH, SIZE, SHARED, VOCAB, CHOSEN = 2688, 1856, 3712, 512, 6
SHARES = (0.0, 0.5, 0.7, 0.9)


def neurons(count: int, share: float, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Up rows whose products with a token of ones are above 0, or below for `share` of them; down columns."""
    up = torch.randn(count, WIDTH, generator=generator).mul_(0.02)
    sign = torch.ones(count)
    sign[torch.randperm(count, generator=generator)[: round(share * count)]] = -1
    up += 0.01 * sign[:, None]
    down = torch.randn(WIDTH, count, generator=generator).mul_(0.02)
    return {"up_proj.weight": up.bfloat16(), "down_proj.weight": down.bfloat16()}


def made(folder: Path, share: float, experts: int, dtype: str) -> Path:
    """A converted model: attention that adds nothing, then a mixture, or, of no experts, a dense layer."""
    generator, at = torch.Generator().manual_seed(0), "backbone.layers."
    tensors = {
        "backbone.embeddings.weight": torch.ones(VOCAB, WIDTH),
        "lm_head.weight": torch.randn(VOCAB, WIDTH, generator=generator),
        "backbone.norm_f.weight": torch.ones(WIDTH),
        f"{at}0.norm.weight": torch.ones(WIDTH),
        f"{at}1.norm.weight": torch.ones(WIDTH),
        **{f"{at}0.mixer.{part}_proj.weight": torch.zeros(64, WIDTH) for part in "qkv"},
        f"{at}0.mixer.o_proj.weight": torch.zeros(WIDTH, 64),
    }
    mlp = f"{at}1.mixer."
    if experts:
        tensors[f"{mlp}gate.weight"] = torch.randn(experts, WIDTH, generator=generator).mul_(0.02)
        tensors[f"{mlp}gate.e_score_correction_bias"] = torch.zeros(experts)
        for expert in range(experts):
            one = neurons(SIZE, share, generator)
            tensors |= {f"{mlp}experts.{expert}.{name}": value for name, value in one.items()}
    shared = f"{mlp}shared_experts." if experts else mlp
    tensors |= {shared + name: value for name, value in neurons(SHARED, share, generator).items()}
    source = folder / "hf"
    source.mkdir(parents=True)
    save_file({name: value.bfloat16().contiguous() for name, value in tensors.items()}, source / "model.safetensors")
    config = {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "*E" if experts else "*-",
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": SHARED,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "moe_intermediate_size": SIZE,
        "moe_shared_expert_intermediate_size": SHARED,
        "n_routed_experts": experts,
        "num_experts_per_tok": CHOSEN,
        "torch_dtype": "bfloat16",
    }
    (source / "config.json").write_text(json.dumps(config))
    convert(source, folder / "model", **({} if dtype == "bfloat16" else {"encoding": dtype}))
    shutil.rmtree(source)
    return folder / "model"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", default="int4_32")
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    mode = "sparse" if args.experts else "dense"
    times: dict[float, list[float]] = {share: [] for share in SHARES}
    models = {}
    for share in SHARES:
        path = made(args.folder / f"{share}", share, args.experts, args.dtype)
        models[share] = Model.open(path, RunConfig(mode=mode, threads=1, io_threads=1, context=512))
    for round_ in range(args.rounds + 1):
        for share, model in models.items():
            with model.new_sequence() as sequence:
                model.step([(sequence, [1])])
                before = time.thread_time()
                for _ in range(args.tokens):
                    model.step([(sequence, [1])])
                if round_:
                    times[share].append((time.thread_time() - before) / args.tokens * 1e3)
    whole = statistics.median(times[0.0])
    for share, found in times.items():
        middle = statistics.median(found)
        spread = f"{min(found):.2f} to {max(found):.2f}"
        print(f"{share:.0%} zeros: {middle:.2f} ms a token ({spread}), {np.round(middle / whole, 2)} of no zeros")


if __name__ == "__main__":
    main()
