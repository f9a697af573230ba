"""BitNet b1.58 (Ma et al., 2024, 2025): ternary weights, and inputs of 8 bits.

Llama's shape with the square of ReLU, a norm before the output projection and one over all neurons before the down
projection. Checkpoints come in forms that their `quantization_config` names (transformers, integrations/bitnet.py);
without one, weights and inputs are as they are.
"""

from enum import Enum

from flashllm.arch.family import always, decoder_block
from flashllm.arch.llama.names import BEFORE, BIASED, row
from flashllm.arch.spec import Config
from flashllm.errors import UnsupportedModelError

MODEL_TYPE = "bitnet"


class Form(Enum):
    """How a checkpoint has the matrices of the blocks."""

    WHOLE = "whole"  # as they are used, with inputs as they are
    MASTER = "master"  # whole; used rounded to three values, as all the following
    SCALED = "scaled"  # ternary, to be multiplied by a scale each
    DIVIDED = "divided"  # ternary, to be divided by a scale each


_FORMS = {
    ("autobitlinear", "online"): Form.MASTER,
    ("autobitlinear", "offline"): Form.SCALED,
    ("bitlinear", "offline"): Form.DIVIDED,
    ("bitlinear", "online"): Form.DIVIDED,
}


def form_of(config: Config) -> Form:
    """The config's meaning. UnsupportedModelError for what is not computed."""
    said = config.get("quantization_config")
    if said is None:
        return Form.WHOLE

    def refuse(what: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"bitnet whose quantization_config {what} is not supported; give microsoft/bitnet-b1.58-2B-4T's form, or "
            "the master weights with linear_class autobitlinear and quantization_mode online"
        )

    if not isinstance(said, dict) or said.get("quant_method") != "bitnet":
        raise refuse("is not of quant_method bitnet")
    kind = (said.get("linear_class", "bitlinear"), said.get("quantization_mode", "offline"))
    if kind not in _FORMS:
        raise refuse("has another linear_class or quantization_mode than transformers knows")
    if said.get("use_rms_norm"):
        raise refuse("says use_rms_norm, a norm before every product,")
    if said.get("modules_to_not_convert") not in (None, ["lm_head"]):
        raise refuse("leaves other modules_to_not_convert than the head")
    return _FORMS[kind]


BITNET = row(
    MODEL_TYPE,
    block=lambda config: decoder_block(
        config, theta=500_000.0, sub_norms=True, rounded_inputs=form_of(config) is not Form.WHOLE
    ),
    attention=BIASED,
    norms={
        **BEFORE,
        "attention_sub_norm": ("self_attn.attn_sub_norm", always),
        "ffn_sub_norm": ("mlp.ffn_sub_norm", always),
    },
)
