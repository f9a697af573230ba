"""The language model within a checkpoint that holds more: picture encoders, layers that draft.

A checkpoint that holds pictures too has the model's config under `text_config`, and its tensors under a prefix. What is
left out is said.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from flashllm.convert.checkpoint.source import Checkpoint
from flashllm.errors import FormatError
from flashllm.format.model_files import CONFIG

_TEXT_OF = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}  # by the model_type of the whole
_PREFIX = "model.language_model."
_OTHERS = {
    "model.visual.": "the picture encoder",
    "mtp.": "layers that draft tokens",
}
_DRAFTING = ("qwen3_next", *_TEXT_OF.values())  # models published with layers that draft
_BEHIND = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")  # and those whose such layers are numbered on behind their own
_MOST_BEHIND = 16
_OF_WHOLE = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype")


def text_part(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint of the language model alone, under its own model_type and names; `assumed` says what is left out.

    As it is where it holds nothing else. FormatError for a config without the text's.
    """
    config, made, companions = dict(checkpoint.config), dict(checkpoint.made), checkpoint.companions
    whole = str(config.get("model_type"))
    if whole in _TEXT_OF:
        text = config.get("text_config")
        if not isinstance(text, dict):
            raise FormatError(f"{checkpoint.path / CONFIG}: has no text_config, which {whole} models have")
        of_whole = {key: config[key] for key in _OF_WHOLE if config.get(key) is not None}
        config = {**text, **of_whole, "model_type": _TEXT_OF[whole]}
        made[CONFIG] = json.dumps(config, indent=2).encode()
        companions = tuple(path for path in companions if path.name != CONFIG)
    elif whole not in (*_DRAFTING, *_BEHIND):
        return checkpoint
    others = _OTHERS | (_behind(config) if whole in _BEHIND else {})
    tensors, files, left_out = {}, {}, Counter[str]()
    for name, info in checkpoint.tensors.items():
        other = next((prefix for prefix in others if name.startswith(prefix)), None)
        if other is not None:
            left_out[other] += 1
            continue
        mine = "model." + name.removeprefix(_PREFIX) if name.startswith(_PREFIX) else name
        if mine in tensors:
            raise FormatError(f"{checkpoint.where(name)}: the checkpoint has both {name} and {mine}")
        tensors[mine], files[mine] = info, checkpoint._files[name]
    said = [f"{others[prefix]} ({prefix}\u2026, {count} tensors)" for prefix, count in left_out.items()]
    return dataclasses.replace(
        checkpoint,
        config=MappingProxyType(config),
        tensors=MappingProxyType(tensors),
        companions=companions,
        made=MappingProxyType(made),
        assumed=f"left out: {' and '.join(said)}" if said else checkpoint.assumed,
        _files=MappingProxyType(files),
    )


def _behind(config: Mapping[str, Any]) -> dict[str, str]:
    """Prefixes of the layers behind the model's own, as many as the config says; where it says nothing, one."""
    first, count = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers", 1)
    if type(first) is not int or type(count) is not int or not 0 <= count <= _MOST_BEHIND:
        return {}
    return {f"model.layers.{layer}.": "a layer that drafts tokens" for layer in range(first, first + count)}
