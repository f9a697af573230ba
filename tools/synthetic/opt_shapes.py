"""Sizes of the OPT family, and the config.json that says them: what the tools that make dummy models share."""

from typing import Any

SHAPES = {  # layers, hidden, heads (the FFN is four times hidden)
    "opt-125m": (12, 768, 12),
    "opt-1.3b": (24, 2048, 32),
    "opt-2.7b": (32, 2560, 32),
    "opt-6.7b": (32, 4096, 32),
    "opt-30b": (48, 7168, 56),
    "opt-175b": (96, 12288, 96),
}
VOCAB, CONTEXT = 50272, 2048


def opt_config(
    layers: int, hidden: int, heads: int, *, dtype: str, vocab: int = VOCAB, context: int = CONTEXT
) -> dict[str, Any]:
    return {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "dtype": dtype,
        "hidden_size": hidden,
        "word_embed_proj_dim": hidden,
        "ffn_dim": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "activation_function": "relu",
        "do_layer_norm_before": True,
        "dropout": 0.0,
        "bos_token_id": 2,
        "eos_token_id": 2,
        "pad_token_id": 1,
    }
