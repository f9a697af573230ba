"""OPT (Zhang et al., 2022), every variant: opt-350m's post-norm and narrow embedding, Galactica-style missing biases.

Learned positions from row 2 on, layer norms, one key-value head a head, a plain FFN: ReLU, or Galactica's GELU.
"""

from flashllm.arch.family import bias_tensors, defaults_of, is_untied, norm_tensors, num_layers, projections, says
from flashllm.arch.mixers import Attention, check_size
from flashllm.arch.spec import MAX_CONTEXT, BlockSpec, Config, LayerSpec, known_activation
from flashllm.arch.tensors import ArchitectureSpec, ResidentTensor

_BASE = "model.decoder."
_LAYER = _BASE + "layers.{i}."
_MATRICES = {"up": _LAYER + "fc1.weight", "down": _LAYER + "fc2.weight"}
_POSITION_OFFSET = 2  # of transformers' OPTLearnedPositionalEmbedding
_EPSILON = 1e-5  # torch's: the config has no key for it


_has_bias, _has_norm_weights = says("enable_bias"), says("layer_norm_elementwise_affine")


def _has_final_norm(config: Config) -> bool:
    return bool(config["do_layer_norm_before"]) and not config["_remove_final_layer_norm"]


def _is_projected(config: Config) -> bool:
    return config["word_embed_proj_dim"] not in (None, config["hidden_size"])


def _block(config: Config) -> BlockSpec:
    d_model = check_size("hidden_size", config["hidden_size"])
    heads = check_size("num_attention_heads", config["num_attention_heads"])
    if d_model % heads:
        raise ValueError(f"{heads} heads do not divide hidden_size {d_model}")
    projected = check_size("word_embed_proj_dim", config["word_embed_proj_dim"]) if _is_projected(config) else d_model
    size = d_model // heads
    layer = LayerSpec(
        mixer=Attention(heads=heads, kv_heads=heads, head_dim=size, query_scale=size**-0.5),
        norms="input" if config["do_layer_norm_before"] else "sum",
        neurons=check_size("ffn_dim", config["ffn_dim"]),
    )
    return BlockSpec(
        d_model=d_model,
        embed_dim=projected,
        vocab_size=check_size("vocab_size", config["vocab_size"], 2**30),
        context=check_size("max_position_embeddings", config["max_position_embeddings"], MAX_CONTEXT),
        norm="layer",
        norm_epsilon=_EPSILON,
        final_norm=_has_final_norm(config),
        learned_positions=True,
        position_offset=_POSITION_OFFSET,
        activation=known_activation(config, "activation_function", {"relu": "relu", "gelu": "gelu"}),
        gated=False,
        tied_head=bool(config["tie_word_embeddings"]),
        layers=(layer,) * num_layers(config),
    )


def _norm(name: str, source: str) -> tuple[ResidentTensor, ...]:
    def when(config: Config) -> bool:
        return _has_norm_weights(config) and (name != "final_norm" or _has_final_norm(config))

    return norm_tensors(name, source, weight=when, bias=when)


OPT = ArchitectureSpec(
    model_type="opt",
    base_prefix="model.",
    matrices=_MATRICES,
    resident=(
        ResidentTensor(name="embedding.weight", source=_BASE + "embed_tokens.weight"),
        ResidentTensor(name="positions.weight", source=_BASE + "embed_positions.weight"),
        ResidentTensor(name="project_in.weight", source=_BASE + "project_in.weight", when=_is_projected),
        *_norm("layers.{i}.attention_norm", _LAYER + "self_attn_layer_norm"),
        *projections(_has_bias, _has_bias, _LAYER + "self_attn", ("q_proj", "k_proj", "v_proj", "out_proj")),
        *_norm("layers.{i}.ffn_norm", _LAYER + "final_layer_norm"),
        *bias_tensors(_MATRICES, _has_bias),
        *_norm("final_norm", _BASE + "final_layer_norm"),
        ResidentTensor(name="project_out.weight", source=_BASE + "project_out.weight", when=_is_projected),
        ResidentTensor(name="head.weight", source="lm_head.weight", when=is_untied),
    ),
    defaults=defaults_of("opt"),
    block=_block,
    ignored=("model.decoder.version",),
)
