"""Shared by models under Llama's names: where their tensors are, and a row with RMS norms and a gated FFN.

Knows no model_type.
"""

from typing import Any

from flashllm.arch.family import always, decoder, decoder_block, equal_part, never, projections, says
from flashllm.arch.tensors import ArchitectureSpec

UNGATED = {"up": "mlp.up_proj", "down": "mlp.down_proj"}
GATED = {"up": "mlp.up_proj", "gate": "mlp.gate_proj", "down": "mlp.down_proj"}
BEFORE = {"attention_norm": ("input_layernorm", always), "ffn_norm": ("post_attention_layernorm", always)}
ONE_BEFORE = {"attention_norm": BEFORE["attention_norm"]}  # of layers whose parts read the same
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
HEAD_LAYERNORMS = {"query_norm": "self_attn.q_layernorm", "key_norm": "self_attn.k_layernorm"}
FUSED_GATE = {"up": "mlp.gate_up_proj", "gate": "mlp.gate_up_proj", "down": "mlp.down_proj"}
GATE_PARTS = {"gate": equal_part(0, "intermediate_size"), "up": equal_part(1, "intermediate_size")}


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
