"""The language model within a checkpoint that holds more: picture encoders, layers that draft.

A checkpoint that holds pictures or sound too has the text model's config within its own, and its tensors under a
prefix. What is left out is said.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashllm.arch.refused import DESCRIBED
from flashllm.arch.registry import ARCHITECTURES
from flashllm.arch.spec import MAX_LAYERS
from flashllm.convert.checkpoint.source import Checkpoint
from flashllm.errors import FormatError
from flashllm.format.model_files import CONFIG

_WITHIN = ("text_config", "llm_config", "language_config")  # where the whole's config has the text's
_BESIDE = ("qwen2_vl", "qwen2_5_vl")  # wholes whose config has the text's keys beside its own
_TEXT_OF = {  # by the model_type of the whole, where the text's config says none
    **{name: f"{name}_text" for name in (*_BESIDE, "qwen3_vl", "qwen3_vl_moe", "glm4v", "glm4v_moe")},
    **{name: f"{name}_text" for name in ("qwen3_5", "qwen3_5_moe", "gemma3", "gemma3n", "gemma4")},
    "glm46v": "glm4v_text",
    "kimi_k25": "deepseek_v3",
    "mistral3": "mistral",
    "lfm2_vl": "lfm2",
}
_SAME = {  # the same under another name; positions in three dimensions are plain ones in text
    "kimi_k2": "deepseek_v3",
    "bailing_moe_v2": "bailing_moe",
    "iquestcoder": "llama",
    "internlm3": "llama",
    "gpt-sw3": "gpt2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "glm4v_text": "glm4",
    "glm4v_moe_text": "glm4_moe",
}
_QWEN2_VL = (
    {"vocab_size": 152_064, "hidden_size": 8192, "intermediate_size": 29_568, "num_hidden_layers": 80}
    | {"num_attention_heads": 64, "num_key_value_heads": 8, "max_window_layers": 80}
    | {"rope_theta": 1e6, "rms_norm_eps": 1e-5}
)
_NEWER_LLAMA = {"rms_norm_eps": 1e-5, "head_dim": 128}
_QWEN3_VL = {"rope_theta": 500_000.0, "max_position_embeddings": 128_000}
_DEFAULTS: dict[str, dict[str, Any]] = {  # other than the plain type's, by the text's name or the whole's
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen3_vl_text": _QWEN3_VL,
    "qwen3_vl_moe_text": _QWEN3_VL
    | {"num_attention_heads": 16, "num_key_value_heads": 16, "num_experts_per_tok": 4, "norm_topk_prob": True}
    | {"intermediate_size": 5632, "moe_intermediate_size": 1408},
    "glm4v_text": {"rms_norm_eps": 1e-5, "max_position_embeddings": 32_768},
    "glm4v_moe_text": {"attention_bias": True, "vocab_size": 151_424, "max_position_embeddings": 65_536},
    **{name: {"rms_norm_eps": 1e-5} for name in ("idefics3", "smolvlm")},
    "iquestcoder": _NEWER_LLAMA
    | {"vocab_size": 76_800, "hidden_size": 5120, "intermediate_size": 27_648, "num_hidden_layers": 80}
    | {"num_attention_heads": 40, "num_key_value_heads": 8, "max_position_embeddings": 131_072},
    "internlm3": _NEWER_LLAMA
    | {"vocab_size": 128_512, "intermediate_size": 10_240, "num_hidden_layers": 48, "num_key_value_heads": 2}
    | {"max_position_embeddings": 32_768},
}
_PREFIXES = {  # -> what the text's own checkpoint has
    **dict.fromkeys(("model.language_model.", "model.text_model."), "model."),
    **dict.fromkeys(("language_model.", "language."), ""),
}
_OTHERS = {
    **dict.fromkeys(("model.visual.", "visual."), "the picture encoder"),
    **dict.fromkeys(("mtp", "model.mtp"), "layers that draft tokens"),
    **dict.fromkeys(("model.vision_tower.", "vision_tower."), "the picture encoder"),
    **dict.fromkeys(
        (
            *("multi_modal_projector.", "model.multi_modal_projector.", "model.embed_vision."),
            *("mm_projector.", "model.mm_projector."),
        ),
        "what brings pictures to the model's width",
    ),
    **dict.fromkeys(("model.audio_tower.", "audio_tower."), "the sound encoder"),
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
_HEAD = "lm_head."
_OF_WHOLE = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype")


def text_part(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint of the language model alone, under its own model_type and names; `assumed` says what is left out.

    As it is where it holds nothing else, or no text model that runs. FormatError for a config without the text's, and
    for a tensor that is there twice.
    """
    config = text_config(checkpoint.config, checkpoint.path)
    model_type = config["model_type"]
    is_other = model_type != checkpoint.config.get("model_type")
    if not is_other and model_type not in (*_DRAFTING, *_BEHIND, *_SHARING):
        return checkpoint
    others = _OTHERS | (_behind(config) if model_type in _BEHIND else {})
    others |= _shared(config) if model_type in _SHARING else {}
    is_prefixed = any(name.startswith(tuple(_PREFIXES)) for name in checkpoint.tensors)
    tensors, files, left_out, first = {}, {}, Counter[str](), dict[str, str]()
    seen: set[str] = set()
    for name, info in checkpoint.tensors.items():
        prefix = next((each for each in _PREFIXES if name.startswith(each)), "")
        mine = _PREFIXES.get(prefix, "") + name.removeprefix(prefix)
        if mine in seen:
            raise FormatError(f"{checkpoint.where(name)}: the checkpoint has {mine} twice, with a prefix and without")
        seen.add(mine)
        other = next((each for each in others if mine.startswith(each)), None)
        if other is None and is_prefixed and not prefix and not name.startswith(_HEAD):
            other = name[: name.find(".", len("model.")) + 1] or name
        if other is None:
            tensors[mine], files[mine] = info, checkpoint._files[name]
            continue
        what = others.get(other, "other parts")
        left_out[what] += 1
        first.setdefault(what, other)
    said = [f"{what} ({first[what]}\u2026, {count} tensors)" for what, count in left_out.items()]
    assumed = f"left out: {' and '.join(said)}" if said else checkpoint.assumed
    return checkpoint.changed(tensors, files, config if is_other else None, assumed=assumed)


def text_config(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The config of the text alone, of a checkpoint `path` with this config: its own where there is no larger model, or
    none whose text runs. FormatError for a config without the text's."""
    whole = str(config.get("model_type"))
    said = {**_DEFAULTS.get(whole, {}), **config, "model_type": _SAME.get(whole, config.get("model_type"))}
    if whole in (*ARCHITECTURES, *DESCRIBED):  # of the latter the text does not speak by itself
        return said
    text = next((config[key] for key in _WITHIN if isinstance(config.get(key), dict)), None)
    if text is None and whole in _BESIDE:
        text = {key: value for key, value in config.items() if key not in ("model_type", "vision_config")}
    if text is None:
        if whole in _TEXT_OF:
            raise FormatError(f"{path / CONFIG}: has no text_config, which {whole} models have")
        return said
    name = str(text.get("model_type", _TEXT_OF.get(whole)))
    if _SAME.get(name, name) not in ARCHITECTURES:
        return said
    of_whole = {key: config[key] for key in _OF_WHOLE if config.get(key) is not None}
    defaults = _DEFAULTS.get(whole, {}) | _DEFAULTS.get(name, {})
    return {**defaults, **text, **of_whole, "model_type": _SAME.get(name, name)}


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
