"""Tiny random models as Hugging Face folders, tokenizer included, made in under a second without any network."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

SENTENCES = (
    "The little dog ran to the big tree and looked up.",
    "One day a girl found a red ball in the garden.",
    "She was happy because the sun was warm and the sky was blue.",
    "They played together until it was time to go home.",
    "The cat said: I want to see the moon tonight!",
)


def config_of(folder: Path) -> dict[str, Any]:
    """Its config.json."""
    return json.loads((folder / "config.json").read_text())


def change_config(folder: Path, **changes: Any) -> None:
    """Put these values into its config.json."""
    (folder / "config.json").write_text(json.dumps(config_of(folder) | changes))


def make_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE with OPT's special tokens (<s> 0, <pad> 1, </s> 2, <unk> 3) and OPT's leading </s>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="</s> $A", pair="</s> $A $B", special_tokens=[("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="</s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )


def make_tiny_opt(
    path: Path | str,
    *,
    num_layers: int = 2,
    d_model: int = 64,
    d_ff: int = 256,
    num_heads: int = 2,
    vocab_size: int = 300,
    context: int = 128,
    dtype: str = "float32",
    seed: int = 0,
    max_shard_size: str | int | None = None,
    fc1_bias: float | None = None,
    **config: Any,
) -> Path:
    """A random pre-norm OPT in the folder `path`, which is returned.

    Weights are large enough that tokens differ clearly; the fc1 biases lie around `fc1_bias` (by default -0.6), so that
    about a fifth of the neurons fire. `config` are further OPTConfig keys. Equal arguments give equal files.
    """
    path = Path(path)
    opt_config = OPTConfig(
        vocab_size=vocab_size,
        hidden_size=d_model,
        num_hidden_layers=num_layers,
        ffn_dim=d_ff,
        num_attention_heads=num_heads,
        max_position_embeddings=context,
        pad_token_id=1,
        bos_token_id=2,
        eos_token_id=2,
        dropout=0.0,
        **config,
    )
    model = OPTForCausalLM(opt_config).eval()
    generator = torch.Generator().manual_seed(seed)
    mean = -0.6 if fc1_bias is None else fc1_bias
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("fc1.bias"):
                parameter.copy_(mean + 0.3 * noise)
            elif "layer_norm" in name:
                parameter.copy_((1.0 if name.endswith("weight") else 0.0) + 0.1 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.1 * noise)
            else:
                parameter.copy_(0.64 / d_model**0.5 * noise)
    model.to(getattr(torch, dtype))
    shards = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    transformers_logging.disable_progress_bar()
    model.save_pretrained(path, **shards)
    make_tokenizer(vocab_size).save_pretrained(path)
    return path
