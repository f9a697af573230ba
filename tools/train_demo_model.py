"""Train the bundled demo model: a small OPT with sparse ReLU activations, from scratch.

Four steps, each skipped when its output already lies in the work directory: a byte-level BPE tokenizer,
token files, training (checkpointed, resumable), and an ordinary Hugging Face folder with a report beside it.
The same script runs on a CPU and on a GPU. It knows nothing of flashllm's own format; `flashllm convert`
and `predictors/train_predictor.py` make the shipped model directory out of what it writes.

Sparsity: every layer's ReLU output carries an L1 term whose weight is steered, layer by layer, so that the
share of positive activations follows a target that falls slowly to `--activity` (progressive sparsification,
as in ProSparse, Song et al. 2024).
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn import functional as F
from transformers import OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast

SPECIAL_TOKENS = ["<s>", "<pad>", "</s>", "<unk>"]  # OPT's order; </s> opens and closes every document
EOS = "</s>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that decides the weights, apart from the data itself."""

    vocab_size: int = 8192
    hidden_size: int = 256
    ffn_dim: int = 2304
    num_layers: int = 8
    num_heads: int = 4
    context: int = 512
    window: int = 256  # training length; windows start at a random position so that all of `context` is learned
    batch: int = 16
    peak_lr: float = 2e-3
    weight_decay: float = 0.1
    warmup: float = 0.02  # shares of the whole run
    decay_from: float = 0.6
    sparsify_from: float = 0.05
    sparsify_until: float = 0.5
    activity: float = 0.08
    story_share: float = 0.05
    final_story_share: float = 0.3  # from `final_from` on, so that the model ends on plain prose
    final_from: float = 0.75
    seed: int = 0


def read_documents(paths: list[Path]) -> Iterator[str]:
    """The `text` of every line of C4-schema `.jsonl.gz` files."""
    for path in paths:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)["text"]


def train_tokenizer(paths: list[Path], vocab_size: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(read_documents(paths), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{EOS} $A", special_tokens=[(EOS, SPECIAL_TOKENS.index(EOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=EOS, eos_token=EOS, pad_token="<pad>", unk_token="<unk>"
    )


def token_file(name: str, paths: list[Path], tokenizer: PreTrainedTokenizerFast, work: Path) -> np.ndarray:
    """All documents of `paths` as one uint16 stream, a </s> before each; cached in `work`."""
    path = work / f"{name}.tokens.npy"
    if not path.exists():
        streams = [np.asarray(tokenizer(text)["input_ids"], dtype=np.uint16) for text in read_documents(paths)]
        partial = path.with_suffix(".partial.npy")
        np.save(partial, np.concatenate(streams))
        partial.rename(path)
    return np.load(path, mmap_mode="r")


class WindowSampler:
    """Windows of one token stream in a seeded order without replacement; its state is one counter."""

    def __init__(self, tokens: np.ndarray, length: int, seed: int) -> None:
        self.tokens, self.length, self.seed = tokens, length, seed
        self.num_windows = (len(tokens) - 1) // length
        self.drawn = 0
        self._epoch = -1

    def draw(self) -> np.ndarray:  # [length + 1] int64
        epoch, index = divmod(self.drawn, self.num_windows)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng([self.seed, epoch]).permutation(self.num_windows)
        self.drawn += 1
        start = int(self._order[index]) * self.length
        return self.tokens[start : start + self.length + 1].astype(np.int64)


class SparsityController:
    """Steers one L1 weight a layer so that the layer's activity follows the falling target."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.weights = [0.0] * recipe.num_layers

    def target(self, progress: float) -> float:
        r = self.recipe
        ramp = (progress - r.sparsify_from) / (r.sparsify_until - r.sparsify_from)
        ramp = min(max(ramp, 0.0), 1.0)
        return r.activity + (0.5 - r.activity) * 0.5 * (1 + math.cos(math.pi * ramp))

    def update(self, activity: list[float], progress: float) -> None:
        if progress < self.recipe.sparsify_from:
            return
        target = self.target(progress)
        for layer, share in enumerate(activity):
            push = min(max(math.log(max(share, 1e-4) / target), -1.0), 1.0)
            self.weights[layer] = max(self.weights[layer], 1e-3) * math.exp(0.15 * push)


class ActivationTap:
    """Collects each layer's ReLU output during a forward pass."""

    def __init__(self, model: OPTForCausalLM) -> None:
        self.outputs: list[torch.Tensor] = []
        for layer in model.model.decoder.layers:
            layer.activation_fn.register_forward_hook(lambda _m, _i, output: self.outputs.append(output))

    def take(self) -> list[torch.Tensor]:
        outputs, self.outputs = self.outputs, []
        return outputs


def learning_rate(recipe: Recipe, progress: float) -> float:
    if progress < recipe.warmup:
        return recipe.peak_lr * max(progress, 1e-3) / recipe.warmup
    if progress < recipe.decay_from:
        return recipe.peak_lr
    return recipe.peak_lr * max(0.02, (1 - progress) / (1 - recipe.decay_from))


def build_model(recipe: Recipe) -> OPTForCausalLM:
    torch.manual_seed(recipe.seed)
    return OPTForCausalLM(
        OPTConfig(
            vocab_size=recipe.vocab_size,
            hidden_size=recipe.hidden_size,
            word_embed_proj_dim=recipe.hidden_size,
            num_hidden_layers=recipe.num_layers,
            ffn_dim=recipe.ffn_dim,
            num_attention_heads=recipe.num_heads,
            max_position_embeddings=recipe.context,
            dropout=0.0,
            attention_dropout=0.0,
            bos_token_id=SPECIAL_TOKENS.index(EOS),
            eos_token_id=SPECIAL_TOKENS.index(EOS),
            pad_token_id=SPECIAL_TOKENS.index("<pad>"),
        )
    )


def save_checkpoint(path: Path, state: dict[str, object]) -> None:
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


@torch.no_grad()
def evaluate(
    model: OPTForCausalLM, tap: ActivationTap, tokens: np.ndarray, context: int, limit: int
) -> dict[str, object]:
    """Perplexity over non-overlapping windows of `context`, and the mean share of positive FFN activations."""
    device = next(model.parameters()).device
    nll, count, activity = 0.0, 0, torch.zeros(len(model.model.decoder.layers), dtype=torch.float64)
    windows = min(limit, len(tokens) - 1) // context
    for index in range(windows):
        ids = torch.from_numpy(tokens[index * context : (index + 1) * context].astype(np.int64))[None].to(device)
        logits = model(ids, use_cache=False).logits.float()
        nll += F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum").item()
        count += context - 1
        activity += torch.tensor([(h > 0).double().mean().item() for h in tap.take()])
    shares = [round(a, 5) for a in (activity / windows).tolist()]
    return {
        "perplexity": math.exp(nll / count),
        "tokens": count,
        "activity_per_layer": shares,
        "mean_activity": float(np.mean(shares)),
    }


def train(
    recipe: Recipe, data: dict[str, np.ndarray], args: argparse.Namespace
) -> tuple[OPTForCausalLM, ActivationTap]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model(recipe).to(device)
    tap = ActivationTap(model)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() != 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=recipe.peak_lr,
        betas=(0.9, 0.95),
        fused=True,
    )
    controller = SparsityController(recipe)
    books = WindowSampler(data["books"], recipe.window, recipe.seed)
    stories = WindowSampler(data["stories"], recipe.window, recipe.seed + 1)
    step, tokens_seen, seconds_before = 0, 0, 0.0

    checkpoint = args.work / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        if state["recipe"] != asdict(recipe):
            raise SystemExit(f"{checkpoint} was made with another recipe; choose another --work or remove it")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        controller.weights = state["l1_weights"]
        books.drawn, stories.drawn = state["books_drawn"], state["stories_drawn"]
        step, tokens_seen, seconds_before = state["step"], state["tokens_seen"], state["seconds"]
        print(f"resumed at step {step}, {tokens_seen / 1e6:.1f} M tokens", flush=True)

    def checkpoint_state() -> dict[str, object]:
        return {
            "recipe": asdict(recipe),
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "l1_weights": controller.weights,
            "books_drawn": books.drawn,
            "stories_drawn": stories.drawn,
            "step": step,
            "tokens_seen": tokens_seen,
            "seconds": seconds_before + time.monotonic() - started,
        }

    started = last_saved = last_logged = time.monotonic()
    model.train()
    while True:
        seconds = seconds_before + time.monotonic() - started
        progress = max(tokens_seen / args.tokens, seconds / (60 * args.minutes) if args.minutes else 0.0)
        if progress >= 1.0:
            break
        rng = np.random.default_rng([recipe.seed, step])
        share = recipe.final_story_share if progress >= recipe.final_from else recipe.story_share
        batch = np.stack([(stories if rng.random() < share else books).draw() for _ in range(recipe.batch)])
        offset = int(rng.integers(0, recipe.context - recipe.window + 1))
        ids = torch.from_numpy(batch).to(device)
        positions = torch.arange(offset, offset + recipe.window, device=device).expand(recipe.batch, -1)

        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, progress)
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(ids[:, :-1], position_ids=positions, use_cache=False).logits
        activations = tap.take()
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        l1 = sum(w * h.float().mean() for w, h in zip(controller.weights, activations, strict=True) if w > 0)
        (loss + l1).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        tokens_seen += recipe.batch * recipe.window

        if step % 10 == 0:
            with torch.no_grad():
                activity = [(h > 0).float().mean().item() for h in activations]
            controller.update(activity, progress)
            if time.monotonic() - last_logged > 30:
                last_logged = time.monotonic()
                shares = " ".join(f"{100 * a:.0f}" for a in activity)
                print(
                    f"step {step} {tokens_seen / 1e6:.2f}M progress {progress:.3f} loss {loss.item():.3f} "
                    f"target {100 * controller.target(progress):.0f}% active % [{shares}] "
                    f"{tokens_seen / (seconds_before + time.monotonic() - started):.0f} tokens/s",
                    flush=True,
                )
        if time.monotonic() - last_saved > 300:
            last_saved = time.monotonic()
            save_checkpoint(checkpoint, checkpoint_state())
    save_checkpoint(checkpoint, checkpoint_state())
    return model.eval(), tap


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--books", type=Path, nargs="+", required=True, help="C4-schema .jsonl.gz shards to train on")
    parser.add_argument("--stories", type=Path, nargs="+", required=True, help="shards of simple stories")
    parser.add_argument("--validation", type=Path, nargs="+", required=True, help="shards the model never sees")
    parser.add_argument("--work", type=Path, required=True, help="token files and checkpoints")
    parser.add_argument("--out", type=Path, required=True, help="the Hugging Face folder to write")
    parser.add_argument("--tokens", type=float, default=30e6, help="tokens to train on")
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="stop earlier after this much training; the schedule follows"
    )
    parser.add_argument(
        "--activity", type=float, default=Recipe().activity, help="target share of positive FFN activations"
    )
    parser.add_argument("--eval-tokens", type=int, default=200_000)
    for name in ("vocab_size", "hidden_size", "ffn_dim", "num_layers", "num_heads", "context", "window", "batch"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Recipe(), name))
    args = parser.parse_args(argv)

    recipe = Recipe(**{name: getattr(args, name) for name in Recipe.__dataclass_fields__ if hasattr(args, name)})
    args.work.mkdir(parents=True, exist_ok=True)
    tokenizer_dir = args.work / "tokenizer"
    if not tokenizer_dir.exists():
        train_tokenizer(args.books + args.stories, recipe.vocab_size).save_pretrained(tokenizer_dir)
    # A folder, made above.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_dir)  # nosec B615
    data = {
        name: token_file(name, paths, tokenizer, args.work)
        for name, paths in (("books", args.books), ("stories", args.stories), ("validation", args.validation))
    }
    print({name: f"{len(tokens) / 1e6:.2f} M tokens" for name, tokens in data.items()}, flush=True)

    model, tap = train(recipe, data, args)
    model.generation_config.update(do_sample=True, temperature=0.8, top_p=0.95, repetition_penalty=1.1)
    model = model.to("cpu").to(torch.float16)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    report = evaluate(model.float(), tap, data["validation"], recipe.context, args.eval_tokens)
    report |= {"recipe": asdict(recipe), "parameters": sum(p.numel() for p in model.parameters())}
    (args.out / "training_report.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
