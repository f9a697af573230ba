"""Tiny random checkpoints of every architecture file and variant, as Hugging Face folders, for the contract test."""

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tiny_models import make_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig, PreTrainedConfig
from transformers.utils import logging as transformers_logging

from flashllm.convert.run import convert

VOCAB, CONTEXT, LAYERS = 300, 160, 3
_SIZES = {
    "opt": {"hidden_size": 64, "ffn_dim": 96, "num_attention_heads": 4},
    "llama": {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2},
}
_CONFIGS: dict[str, type[PreTrainedConfig]] = {"opt": OPTConfig, "llama": LlamaConfig}
_ROPE = {"rope_theta": 500.0}


@dataclass(frozen=True)
class Variant:
    """One kind of model: its model_type, and what its config says differently from the type's usual."""

    model_type: str
    config: dict[str, Any] = field(default_factory=dict)


VARIANTS = {
    "opt": Variant("opt"),
    "opt post-norm": Variant("opt", {"do_layer_norm_before": False}),
    "opt narrow embedding": Variant("opt", {"word_embed_proj_dim": 32}),
    "opt-350m": Variant("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "opt without biases": Variant("opt", {"enable_bias": False}),
    "opt without norm weights": Variant("opt", {"layer_norm_elementwise_affine": False}),
    "opt without final norm": Variant("opt", {"_remove_final_layer_norm": True}),
    "opt untied": Variant("opt", {"tie_word_embeddings": False}),
    "llama": Variant("llama", {"hidden_act": "silu"}),
    "llama relu": Variant("llama", {"hidden_act": "relu"}),
    "llama squared relu": Variant("llama", {"hidden_act": "relu2"}),
    "llama without grouped queries": Variant("llama", {"hidden_act": "relu", "num_key_value_heads": 4}),
    "llama one key-value head": Variant("llama", {"hidden_act": "relu", "num_key_value_heads": 1}),
    "llama biases": Variant("llama", {"hidden_act": "relu", "attention_bias": True, "mlp_bias": True}),
    "llama tied": Variant("llama", {"hidden_act": "relu", "tie_word_embeddings": True}),
    "llama wide heads": Variant("llama", {"hidden_act": "relu", "head_dim": 24}),
    "llama linear rope": Variant(
        "llama", {"hidden_act": "relu", "rope_parameters": {**_ROPE, "rope_type": "linear", "factor": 4.0}}
    ),
    "llama 3 rope": Variant(
        "llama",
        {
            "hidden_act": "relu",
            "rope_parameters": {
                **_ROPE,
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 40,
            },
        },
    ),
}


def make_config(variant: Variant) -> PreTrainedConfig:
    """The variant's config, as transformers completes it."""
    return _CONFIGS[variant.model_type](
        vocab_size=VOCAB,
        num_hidden_layers=LAYERS,
        max_position_embeddings=CONTEXT,
        pad_token_id=1,
        bos_token_id=2,
        eos_token_id=2,
        **{**_SIZES[variant.model_type], **copy.deepcopy(variant.config)},  # transformers completes what it is given
    )


def make_checkpoint(path: Path, variant: Variant, *, dtype: str = "float32", seed: int = 0) -> Path:
    """A random model of the variant, with a tokenizer, in the folder `path`, which is returned.

    Weights are large enough that tokens differ clearly, and about a third of the neurons of a ReLU fire.
    """
    model = AutoModelForCausalLM.from_config(make_config(variant)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_((1.0 if name.endswith("weight") else 0.0) + 0.1 * noise)
            elif name.endswith(("fc1.bias", "gate_proj.bias")):
                parameter.copy_(0.3 * noise - 0.4)
            elif name.endswith("bias"):
                parameter.copy_(0.1 * noise)
            else:
                parameter.copy_(0.8 / 64**0.5 * noise)
    model.to(getattr(torch, dtype))
    transformers_logging.disable_progress_bar()
    model.save_pretrained(path)
    make_tokenizer(VOCAB).save_pretrained(path)
    return path


def make_model(root: Path, name: str, *, dtype: str = "float32") -> tuple[Path, Path]:
    """(Hugging Face folder, model directory converted from it) of the variant of this name, made below `root`."""
    source = make_checkpoint(root / "hf", VARIANTS[name], dtype=dtype)
    convert(source, root / "model", predictors=True)
    return source, root / "model"
