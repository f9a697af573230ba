"""Decoders under other names than Llama's: GPT-2, GPT-Neo, GPT-J, GPT-NeoX and Pythia, the first StarCoder, CodeGen,
Falcon, Persimmon, Phi-1 to Phi-2.

Most keep query, key and value in one tensor. Falcon with ReLU (ReluFalcon) and Persimmon run sparsely; the others'
neurons are never zero, unless their config says ReLU.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from flashllm.arch.alibi import falcon_alibi
from flashllm.arch.family import (
    always,
    decoder,
    decoder_block,
    equal_part,
    fused,
    fused_tensors,
    head_size,
    is_untied,
    kv_heads,
    linear_tensors,
    never,
    projections,
    says,
)
from flashllm.arch.llama.names import BEFORE, HEAD_LAYERNORMS, ONE_BEFORE, row
from flashllm.arch.mixers import check_size
from flashllm.arch.spec import BlockSpec, Config, check_usual
from flashllm.arch.tensors import ArchitectureSpec, Part, ResidentTensor
from flashllm.errors import UnsupportedModelError

_block = partial(decoder_block, norm="layer", gated=False)
_4H = {"up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h"}


def _interleaved(source: str, out: str, bias: Any) -> tuple[ResidentTensor, ...]:
    """(Query, key, value) of a head after a head, then the output projection."""
    return (*fused_tensors(source, fused, bias=bias), *linear_tensors("layers.{i}.out", out, bias=bias))


# GPT-NeoX (Black et al., 2022) and Pythia: attention and FFN side by side, each with its norm.
GPT_NEOX = decoder(
    "gpt_neox",
    block=lambda config: _block(
        config, epsilon="layer_norm_eps", rotary_share=0.25, parallel=bool(config["use_parallel_residual"])
    ),
    matrices=_4H,
    attention=_interleaved("attention.query_key_value", "attention.dense", says("attention_bias")),
    norms=BEFORE,
    norm_bias=always,
    ffn_bias=always,
    names={"base": "gpt_neox.", "embedding": "embed_in", "final_norm": "final_layer_norm"},
    aliases={"embed_out.weight": "lm_head.weight"},
    ignored=(
        "gpt_neox.layers.*.attention.bias",
        "gpt_neox.layers.*.attention.masked_bias",
        "gpt_neox.layers.*.attention.rotary_emb.inv_freq",
    ),
)

# Persimmon (Elsen et al., 2023): the square of ReLU, layer norms of queries and keys.
PERSIMMON = row(
    "persimmon",
    block=lambda config: _block(
        config, epsilon="layer_norm_eps", rotary_share=0.5, query_key_norm="head" if config["qk_layernorm"] else "none"
    ),
    matrices=_4H,
    attention=_interleaved("self_attn.query_key_value", "self_attn.dense", always),
    norm_bias=always,
    head_norms=HEAD_LAYERNORMS,
    ffn_bias=always,
    names={"final_norm": "final_layernorm"},
)

# Phi-1, 1.5 and 2 (Gunasekar et al., 2023; Javaheripi et al., 2023): attention and FFN read one norm.
PHI = row(
    "phi",
    block=lambda config: _block(
        config,
        epsilon="layer_norm_eps",
        rotary_share=0.5,
        parallel=True,
        shared_norm=True,
        query_key_norm="head" if config["qk_layernorm"] else "none",
    ),
    matrices={"up": "mlp.fc1", "down": "mlp.fc2"},
    attention=projections(always, always, names=("q_proj", "k_proj", "v_proj", "dense")),
    norms=ONE_BEFORE,
    norm_bias=always,
    head_norms=HEAD_LAYERNORMS,
    ffn_bias=always,
    names={"final_norm": "final_layernorm"},
    head_bias=always,
)


# Falcon (Almazrouei et al., 2023). 7B: one key-value head, one norm. The new decoder architecture (40B, 180B, 11B):
# groups of queries, each with its key and its value, and usually two norms. Falcon-RW adds positions to the scores.


def _falcon_kv_heads(config: Config) -> int:
    if not config["new_decoder_architecture"] and config["multi_query"]:
        return 1
    given = config.get("num_kv_heads")
    return check_size("num_kv_heads", given if given is not None else config["num_attention_heads"])


def _falcon_norms(config: Config) -> int:
    """Norms of a parallel block: two where the new architecture does not say one."""
    given = config.get("num_ln_in_parallel_attn")
    return int(given) if given is not None else 2 if config["new_decoder_architecture"] else 1


def _is_parallel(config: Config) -> bool:
    return bool(config["new_decoder_architecture"] or config["parallel_attn"])


def _has_two_norms(config: Config) -> bool:
    return bool(config["new_decoder_architecture"]) and _falcon_norms(config) == 2


def _falcon_part(part: int) -> Callable[[Config], Part]:
    def rows(config: Config) -> Part:
        heads, kv_heads = config["num_attention_heads"], _falcon_kv_heads(config)
        width, group = config["hidden_size"] // heads, heads // kv_heads
        if kv_heads == heads and not config["new_decoder_architecture"]:
            return fused(part)(config)
        first = (0, group, group + 1)[part] * width  # of a group: its queries, its key, its value
        count = (group if part == 0 else 1) * width
        return Part(first=first, count=count, step=(group + 2) * width, repeats=kv_heads)

    return rows


def _falcon(config: Config) -> BlockSpec:
    if config["new_decoder_architecture"] and not config["parallel_attn"]:
        raise UnsupportedModelError("falcon of the new decoder architecture without parallel_attn is not supported")
    traits: dict[str, Any] = {}
    if config["alibi"]:
        traits = {"positions": "none", "alibi": falcon_alibi(config["num_attention_heads"], head_size(config))}
    return _block(
        config,
        epsilon="layer_norm_epsilon",
        activation="activation",
        **traits,
        kv_heads=_falcon_kv_heads(config),
        parallel=_is_parallel(config),
        shared_norm=_is_parallel(config) and not _has_two_norms(config),
    )


FALCON = decoder(
    "falcon",
    derived=lambda config: {
        "intermediate_size": config["ffn_hidden_size"]
        if config["ffn_hidden_size"] is not None
        else 4 * check_size("hidden_size", config["hidden_size"])
    },
    block=_falcon,
    matrices=_4H,
    attention=(
        *fused_tensors("self_attention.query_key_value", _falcon_part, bias=says("bias")),
        *linear_tensors("layers.{i}.out", "self_attention.dense", bias=says("bias")),
    ),
    norms={
        "attention_norm": ("input_layernorm", lambda config: not _has_two_norms(config)),
        "attention_norm.": ("ln_attn", _has_two_norms),
        "ffn_norm": ("post_attention_layernorm", lambda config: not _has_two_norms(config)),
        "ffn_norm.": ("ln_mlp", _has_two_norms),
    },
    norm_bias=always,
    ffn_bias=says("bias"),
    names={"base": "transformer.", "embedding": "word_embeddings", "layer": "h.{i}.", "final_norm": "ln_f"},
    ignored=("transformer.h.*.self_attention.rotary_emb.inv_freq",),
)


# GPT-2 (Radford et al., 2019): learned positions; weights lie as [inputs, outputs].


def _transposed(config: Config) -> Part:
    return Part(transposed=True)


def _gpt2_keys(config: Config) -> Mapping[str, Any]:
    width = check_size("n_embd", config["n_embd"])
    return {
        "hidden_size": width,
        "num_attention_heads": config["n_head"],
        "num_hidden_layers": config["n_layer"],
        "intermediate_size": config["n_inner"] if config["n_inner"] is not None else 4 * width,
        "max_position_embeddings": config["n_positions"],
    }


def _gpt2(config: Config) -> BlockSpec:
    check_usual(config, {"scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False})
    traits: dict[str, Any] = {} if config["scale_attn_weights"] else {"query_scale": 1.0}
    return _block(config, epsilon="layer_norm_epsilon", activation="activation_function", positions="learned", **traits)


_FC = {"up": "mlp.c_fc", "down": "mlp.c_proj"}
_GPT2_NAMES: dict[str, Any] = {
    "norms": {"attention_norm": ("ln_1", always), "ffn_norm": ("ln_2", always)},
    "norm_bias": always,
    "ffn_bias": always,
    "names": {"base": "transformer.", "embedding": "wte", "positions": "wpe", "layer": "h.{i}.", "final_norm": "ln_f"},
    "ignored": ("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"),
}
GPT2 = decoder(
    "gpt2",
    derived=_gpt2_keys,
    block=_gpt2,
    matrices=_FC,
    matrix_parts={"up": _transposed, "down": _transposed},
    attention=(
        *fused_tensors("attn.c_attn", partial(equal_part, transposed=True), bias=always),
        *linear_tensors("layers.{i}.out", "attn.c_proj", bias=always, part=_transposed),
    ),
    **_GPT2_NAMES,
)

# The first StarCoder (Li et al., 2023): GPT-2, one key-value head; weights lie as [outputs, inputs].


def _bigcode_part(part: int) -> Callable[[Config], Part]:
    return lambda config: fused(part, kv_heads if config["multi_query"] else None)(config)


GPT_BIGCODE = decoder(
    "gpt_bigcode",
    derived=lambda config: {**_gpt2_keys(config), "num_key_value_heads": 1 if config["multi_query"] else None},
    block=_gpt2,
    matrices=_FC,
    attention=(
        *fused_tensors("attn.c_attn", _bigcode_part, bias=always),
        *linear_tensors("layers.{i}.out", "attn.c_proj", bias=always),
    ),
    **_GPT2_NAMES,
)


# GPT-Neo (Black et al., 2021): layers take turns with a window, queries are not scaled.


def _gpt_neo(config: Config) -> BlockSpec:
    try:
        kinds = [kind for names, times in config["attention_types"] for _ in range(times) for kind in names]
    except (TypeError, ValueError) as error:
        raise ValueError("attention_types must be a list of kinds, each with how often they come") from error
    types = [{"global": "full_attention", "local": "sliding_attention"}.get(kind, kind) for kind in kinds]
    return _block(
        {**config, "layer_types": types, "sliding_window": check_size("window_size", config["window_size"])},
        epsilon="layer_norm_epsilon",
        activation="activation_function",
        positions="learned",
        query_scale=1.0,
    )


GPT_NEO = decoder(
    "gpt_neo",
    derived=lambda config: {
        "num_attention_heads": config["num_heads"],
        "num_hidden_layers": config["num_layers"],
        "intermediate_size": config["intermediate_size"] or 4 * check_size("hidden_size", config["hidden_size"]),
    },
    block=_gpt_neo,
    matrices=_FC,
    attention=projections(never, always, "attn.attention", ("q_proj", "k_proj", "v_proj", "out_proj")),
    **{**_GPT2_NAMES, "ignored": ("transformer.h.*.attn.attention.bias", "transformer.h.*.attn.attention.masked_bias")},
)


# GPT-J (Wang and Komatsuzaki, 2021) and CodeGen (Nijkamp et al., 2022): attention and FFN read one norm, neighbours of
# the first dimensions are turned.


def _gptj(config: Config) -> BlockSpec:
    dims = check_size("rotary_dim", config["rotary_dim"])
    return _block(
        config,
        epsilon="layer_norm_epsilon",
        activation="activation_function",
        rotary_share=dims / head_size(config),
        rotary_style="interleaved",
        parallel=True,
        shared_norm=True,
    )


def _like_gptj(model_type: str, attention: tuple[ResidentTensor, ...]) -> ArchitectureSpec:
    return decoder(
        model_type,
        derived=_gpt2_keys,
        block=_gptj,
        matrices={"up": "mlp.fc_in", "down": "mlp.fc_out"},
        attention=(*attention, *linear_tensors("layers.{i}.out", "attn.out_proj")),
        head_bias=is_untied,
        **{
            **_GPT2_NAMES,
            "norms": {"attention_norm": ("ln_1", always)},
            "names": {key: name for key, name in _GPT2_NAMES["names"].items() if key != "positions"},
            "ignored": (*_GPT2_NAMES["ignored"], "transformer.h.*.attn.causal_mask"),
        },
    )


def _codegen_part(place: int) -> Callable[[Config], Part]:
    """Four times, of a quarter of the heads: queries, values, keys."""

    def rows(config: Config) -> Part:
        quarter = check_size("hidden_size", config["hidden_size"]) // 4
        return Part(first=place * quarter, count=quarter, step=3 * quarter, repeats=4)

    return rows


GPTJ = _like_gptj("gptj", projections(never, never, "attn", ("q_proj", "k_proj", "v_proj")))
CODEGEN = _like_gptj("codegen", fused_tensors("attn.qkv_proj", _codegen_part, names=("query", "value", "key")))

GPT_LIKE = (GPT_NEOX, FALCON, PERSIMMON, PHI, GPT2, GPT_BIGCODE, GPT_NEO, GPTJ, CODEGEN)
