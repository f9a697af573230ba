"""The language model within a checkpoint that holds more: picture encoders, layers that draft.

A checkpoint that holds pictures too has the model's config under `text_config`, and its tensors under a prefix. What is
left out is said.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from flashllm.arch.spec import MAX_LAYERS
from flashllm.convert.checkpoint.source import Checkpoint
from flashllm.errors import FormatError
from flashllm.format.model_files import CONFIG

_TEXT_OF = {  # by the model_type of the whole
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "kimi_k25": "deepseek_v3",
    "qwen3_vl": "qwen3",  # whose positions in three dimensions are plain ones in text
    "qwen3_vl_moe": "qwen3_moe",
}
_SAYS_TEXT = {"mistral3": "mistral", "lfm2_vl": "lfm2"}  # the text's config says it; what it is where that does not
_QWEN3_VL = {"rope_theta": 500_000.0, "max_position_embeddings": 128_000}
_DEFAULTS: dict[str, dict[str, Any]] = {  # other than the plain type's
    "qwen3_vl": _QWEN3_VL,
    "qwen3_vl_moe": _QWEN3_VL
    | {"num_attention_heads": 16, "num_key_value_heads": 16, "num_experts_per_tok": 4, "norm_topk_prob": True}
    | {"intermediate_size": 5632, "moe_intermediate_size": 1408},
}
_SAME = {"kimi_k2": "deepseek_v3", "bailing_moe_v2": "bailing_moe"}  # which is the same, under the vendor's name
_PREFIXES = {"model.language_model.": "model.", "language_model.": ""}  # -> what the text's own checkpoint has
_OTHERS = {
    "model.visual.": "the picture encoder",
    **dict.fromkeys(("mtp", "model.mtp"), "layers that draft tokens"),
    **dict.fromkeys(("model.vision_tower.", "vision_tower."), "the picture encoder"),
    **dict.fromkeys(
        (
            *("multi_modal_projector.", "model.multi_modal_projector.", "model.embed_vision."),
            *("mm_projector.", "model.mm_projector."),
        ),
        "what brings pictures to the model's width",
    ),
    "model.audio_tower.": "the sound encoder",
    "model.embed_audio.": "what brings sound to the model's width",
}
_DRAFTING = (  # models published with layers that draft
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "ernie4_5_moe", "exaone_moe", "mellum", "mimo_v2_flash"),
    *("nemotron_h", "olmo_hybrid"),
)
_SHARING = ("gemma3n_text", "gemma4_text")  # and those whose last layers attend to the keys and values of others
# And those whose such layers are numbered on behind their own.
_BEHIND = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "bailing_moe", "hy_v3")
_MOST_BEHIND = 16
_OF_WHOLE = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype")


def text_part(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint of the language model alone, under its own model_type and names; `assumed` says what is left out.

    As it is where it holds nothing else. FormatError for a config without the text's.
    """
    config = dict(checkpoint.config)
    whole = str(config.get("model_type"))
    if whole in (*_TEXT_OF, *_SAYS_TEXT):
        text = config.get("text_config")
        if not isinstance(text, dict):
            raise FormatError(f"{checkpoint.path / CONFIG}: has no text_config, which {whole} models have")
        of_whole = {key: config[key] for key in _OF_WHOLE if config.get(key) is not None}
        model_type = _TEXT_OF.get(whole) or text.get("model_type", _SAYS_TEXT.get(whole))
        config = {**_DEFAULTS.get(whole, {}), **text, **of_whole, "model_type": model_type}
    elif whole in _SAME:
        whole = config["model_type"] = _SAME[whole]
    is_other = config.get("model_type") != checkpoint.config.get("model_type")
    if not is_other and whole not in (*_DRAFTING, *_BEHIND, *_SHARING):
        return checkpoint
    others = _OTHERS | (_behind(config) if config["model_type"] in _BEHIND else {})
    others |= _shared(config) if config["model_type"] in _SHARING else {}
    tensors, files, left_out, first = {}, {}, Counter[str](), dict[str, str]()
    for name, info in checkpoint.tensors.items():
        prefix = next((each for each in _PREFIXES if name.startswith(each)), "")
        mine = _PREFIXES.get(prefix, "") + name.removeprefix(prefix)
        other = next((prefix for prefix in others if mine.startswith(prefix)), None)
        if other is not None:
            left_out[others[other]] += 1
            first.setdefault(others[other], other)
            continue
        if mine in tensors:
            raise FormatError(f"{checkpoint.where(name)}: the checkpoint has both {name} and {mine}")
        tensors[mine], files[mine] = info, checkpoint._files[name]
    said = [f"{what} ({first[what]}\u2026, {count} tensors)" for what, count in left_out.items()]
    assumed = f"left out: {' and '.join(said)}" if said else checkpoint.assumed
    return checkpoint.changed(tensors, files, config if is_other else None, assumed=assumed)


def _shared(config: Mapping[str, Any]) -> dict[str, str]:
    """Prefixes of what layers that use another's keys and values have in vain: the last, as many as the config says."""
    count, sharing = config.get("num_hidden_layers"), config.get("num_kv_shared_layers", 0)
    if type(count) is not int or type(sharing) is not int or not 0 <= sharing <= count <= MAX_LAYERS:
        return {}
    return {
        f"model.layers.{layer}.self_attn.{part}": "keys and values of layers that use another's"
        for layer in range(count - sharing, count)
        for part in ("k_proj.", "v_proj.", "k_norm.")
    }


def _behind(config: Mapping[str, Any]) -> dict[str, str]:
    """Prefixes of the layers behind the model's own, as many as the config says; where it says nothing, one."""
    first, count = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers", 1)
    if type(first) is not int or type(count) is not int or not 0 <= count <= _MOST_BEHIND:
        return {}
    return {f"model.layers.{layer}.": "a layer that drafts tokens" for layer in range(first, first + count)}
