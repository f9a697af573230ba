"""Shared by models under Llama's names: where their tensors are, and a row with RMS norms and a gated FFN.

Knows no model_type.
"""

from typing import Any

from flashllm.arch.family import When, always, decoder, decoder_block, linear_tensors, never, says
from flashllm.arch.mixers import check_size
from flashllm.arch.tensors import ArchitectureSpec, Part, ResidentTensor

UNGATED = {"up": "mlp.up_proj", "down": "mlp.down_proj"}
GATED = {"up": "mlp.up_proj", "gate": "mlp.gate_proj", "down": "mlp.down_proj"}
BEFORE = {"attention_norm": ("input_layernorm", always), "ffn_norm": ("post_attention_layernorm", always)}
BEHIND = {
    "attention_output_norm": ("post_attention_layernorm", always),
    "ffn_output_norm": ("post_feedforward_layernorm", always),
}
AROUND = {
    "attention_norm": ("input_layernorm", always),
    "attention_output_norm": ("post_attention_layernorm", always),
    "ffn_norm": ("pre_feedforward_layernorm", always),
    "ffn_output_norm": ("post_feedforward_layernorm", always),
}
FUSED_GATE = {"up": "mlp.gate_up_proj", "gate": "mlp.gate_up_proj", "down": "mlp.down_proj"}
GATE_PARTS = {  # the gate's rows come first
    "gate": lambda config: Part(count=check_size("intermediate_size", config["intermediate_size"])),
    "up": lambda config: Part(first=config["intermediate_size"], count=config["intermediate_size"]),
}


def projections(query: When, out: When, source: str = "self_attn") -> tuple[ResidentTensor, ...]:
    """Query, key, value, out; biases of the first three, and of the last. `source`: what has them in a layer."""
    parts = (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"), ("out", "o_proj"))
    return tuple(
        tensor
        for name, part in parts
        for tensor in linear_tensors(f"layers.{{i}}.{name}", f"{source}.{part}", bias=out if name == "out" else query)
    )


BIASED = projections(says("attention_bias"), says("attention_bias"))
BARE = projections(never, never)


def row(model_type: str, **others: Any) -> ArchitectureSpec:
    """A model_type under Llama's names, RMS norms and a gated FFN, where `others` say nothing else."""
    values: dict[str, Any] = {
        "block": decoder_block,
        "matrices": GATED,
        "attention": BARE,
        "norms": BEFORE,
        "ignored": ("model.layers.*.self_attn.rotary_emb.inv_freq",),
        **others,
    }
    return decoder(model_type, **values)
