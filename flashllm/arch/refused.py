"""Says of a model that cannot be run what it is, by the keys of its config.json, and what would help.

Models for which something else than another engine would help stand in a table.
"""

from collections.abc import Iterable, Mapping
from typing import Any

_FAMILY = "use a dense decoder of the same family, or another engine"
_TRANSFORMERS = "use it with transformers"
_STATES = ("mamba_", "ssm_", "linear_", "lru_", "conv_L", "conv_kernel", "state_size", "rwkv", "attention_hidden_size")
_STATE_LAYERS = {"linear_attention", "conv", "mamba", "recurrent"}
_SENSES = ("vision", "visual", "image", "audio", "speech", "video", "codec", "thinker", "acoustics")

# A model_type that runs: those that its models had before transformers knew them.
_NEWER = {"falcon": "RefinedWeb RefinedWebModel", "phi": "phi-msft mixformer-sequential", "stablelm": "stablelm_epoch"}

# By model_type: what it is, and what would help.
DESCRIBED = {
    **{
        name: f"a {runs} in the format of before transformers knew it; a newer copy has model_type {runs} and runs"
        for runs, names in _NEWER.items()
        for name in names.split()
    },
    "shieldgemma2": "a Gemma 3 that judges pictures; Gemma 3 itself runs",
    "paligemma": "a Gemma that answers questions about pictures, whose text model does not speak by itself; Gemma runs",
    "vibevoice": "a model for speech, whose text model does not write; Qwen2, of the same shape, runs",
    "jais": "the first Jais, with a SwiGLU of its own and distances added to its scores; Jais 2 runs",
    "xglm": "XGLM, with sinusoidal positions; OPT runs",
    "biogpt": "BioGPT; OPT, of the same shape, runs",
    "chatglm": "the first ChatGLM; GLM-4 in transformers' own format has model_type glm",
    "internlm": "the first InternLM, a Llama with biases in its attention: set model_type to llama and "
    "attention_bias to true in its config.json",
    **dict.fromkeys(
        ("xverse", "aquila"), "a Llama with files for code of its own: set model_type to llama in its config.json"
    ),
    "Yi": "a Yi with files for code of its own; a newer copy has model_type llama, which runs",
    "longcat_flash": "LongCat Flash, some of whose experts give back what goes in, with two attentions in a layer; "
    "DeepSeek V3 and Kimi K2 run",
    "solar": "Solar Pro, a Llama with connections that skip layers; SOLAR 10.7B has model_type llama and runs",
}


def describe_refused(config: Mapping[str, Any], runs: Iterable[str]) -> str:
    """The sentence, for a config whose model_type is none of those that run."""
    known = DESCRIBED.get(str(config.get("model_type")))
    if known is not None:
        return known
    parts = {name: value for name, value in config.items() if isinstance(value, Mapping)}
    if config.get("is_encoder_decoder") or {"encoder", "decoder"} <= set(parts):
        return f"an encoder-decoder model; this engine runs decoders alone; {_TRANSFORMERS}"
    if "text_config" in parts or any(sense in str(name) for name in parts for sense in _SENSES):
        of_text = str(parts.get("text_config", {}).get("model_type"))
        if of_text in set(runs):
            return f"a model for more than text; its text model ({of_text}) runs when `flashllm convert` has taken it"
        return (
            "a model for pictures, video or sound besides text; use its text model on its own, where that is published "
            "as such"
        )
    experts = any("experts" in name and value for name, value in _flat(config))
    if any(name.startswith(_STATES) and value for name, value in _flat(config)) or _STATE_LAYERS & set(_layers(config)):
        return f"a model whose layers, or some of them, keep a state in its place (state-space, linear, ...); {_FAMILY}"
    if config.get("kv_lora_rank"):
        return f"a {'mixture of experts' if experts else 'dense decoder'} with latent attention; {_FAMILY}"
    if experts:
        return (
            "a mixture of experts whose architecture nobody has described here yet; use one that runs (OLMoE, "
            "Qwen 1.5 to 3.6 MoE, Mixtral, gpt-oss), a dense decoder of the same family, or another engine"
        )
    if "type_vocab_size" in config or any("MaskedLM" in str(name) for name in _list(config.get("architectures"))):
        return f"an encoder, which generates no text; {_TRANSFORMERS}"
    return (
        "an architecture that nobody has described here yet; most decoders want but a row that says how they compute "
        "(flashllm/README.md, How to add an architecture); until then use a decoder of the same family that runs, or "
        "another engine"
    )


def _flat(config: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """Its keys and those of its parts, with their values."""
    for name, value in config.items():
        yield from ((str(key), each) for key, each in (value if isinstance(value, Mapping) else {name: value}).items())


def _layers(config: Mapping[str, Any]) -> Iterable[str]:
    kinds = config.get("layer_types") or config.get("layers_block_type")
    return (str(kind) for kind in _list(kinds))


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
