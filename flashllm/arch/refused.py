"""Common model_types that cannot be run: what each is, and what would help.

A table for the message of a refusal. Knows no config.
"""

_EXPERTS = "a mixture of experts, whose layers hold many FFNs of which a router picks a few"
_ENCODER_DECODER = "an encoder-decoder model; this engine runs decoders alone"
_ENCODER = "an encoder, which generates no text"
_STATE = "a state-space model, which has no attention's keys and values to keep"
_HYBRID = "a mix of attention and state-space layers"
_PICTURES = "a model for pictures or sound besides text"
_LATENT = "a mixture of experts with latent attention"
_NO_ROW = "a dense decoder whose architecture nobody has described here yet"

_REASONS = {
    _EXPERTS: (
        *("phimoe", "granitemoe", "granitemoeshared", "dbrx"),
        *("jetmoe", "ernie4_5_moe", "hunyuan_v1_moe", "glm4_moe", "dots1", "minimax", "minimax_m2", "flex_olmo"),
        *("switch_transformers", "nllb_moe", "llama4_text", "qwen3_next", "arctic", "grok-1"),
        *("glm_moe_dsa", "cohere2_moe", "exaone_moe", "qwen3_5_moe", "qwen3_5_moe_text", "deepseek_v4"),
    ),
    _LATENT: ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "longcat_flash", "glm4_moe_lite"),
    _ENCODER_DECODER: (
        *("t5", "mt5", "umt5", "t5gemma", "bart", "mbart", "pegasus", "marian", "m2m_100", "led", "longt5", "byt5"),
        *("blenderbot-small", "bigbird_pegasus", "mvp", "plbart", "bert-generation"),
        *("blenderbot", "prophetnet", "whisper", "speech_to_text", "encoder-decoder"),
    ),
    _ENCODER: (
        "bert",
        "roberta",
        "distilbert",
        "electra",
        "deberta",
        "deberta-v2",
        "albert",
        "modernbert",
        "xlm-roberta",
        *("xlm-roberta-xl", "camembert", "big_bird", "ernie", "megatron-bert", "rembert", "roformer", "xmod", "xlm"),
        *("roc_bert", "data2vec-text", "roberta-prelayernorm"),
    ),
    _STATE: ("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"),
    _HYBRID: (
        *(
            "jamba",
            "bamba",
            "zamba",
            "zamba2",
            "falcon_h1",
            "granitemoehybrid",
            "nemotron_h",
            "recurrent_gemma",
            "lfm2",
        ),
        *("olmo_hybrid", "kimi_linear", "lfm2_moe"),
    ),
    _PICTURES: (
        *("llava", "llava_next", "llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen2_audio", "mllama"),
        *("paligemma", "idefics", "idefics2", "idefics3", "smolvlm", "internvl", "phi4_multimodal", "llama4", "clip"),
        *("fuyu", "git", "got_ocr2", "emu3", "moshi", "musicgen", "musicgen_melody", "trocr"),
        *(
            "mistral3",
            "pixtral",
            "gemma3n",
            "gemma4",
            "gemma3n_text",
            "gemma4_text",
            "aya_vision",
            "glm4v",
            "kimi_vl",
            "blip-2",
            "kosmos-2",
        ),
    ),
    _NO_ROW: (
        *("olmo", "olmo3", "cohere2", "exaone4", "glm4", "ernie4_5", "helium", "seed_oss", "ministral", "diffllama"),
        *("hunyuan_v1_dense", "gpt_neox_japanese", "modernbert-decoder", "vaultgemma", "nanochat", "internlm3"),
        *("minicpm", "minicpm3", "baichuan", "internlm2", "qwen", "xverse", "ctrl", "openai-gpt", "xlnet", "reformer"),
    ),
}
_OTHERS = {
    "gemma3": "Gemma 3 with its picture encoder; the text model alone has model_type gemma3_text",
    "apertus": "a decoder whose activation, xIELU, has learned parameters; use another engine",
    "jais": "the first Jais, with a SwiGLU of its own and distances added to its scores; Jais 2 runs",
    "gptj": "GPT-J; GPT-NeoX, Pythia, Falcon and Phi run",
    "gpt_neo": "GPT-Neo; GPT-NeoX, Pythia and GPT-2 run",
    "gpt_bigcode": "StarCoder 1; StarCoder 2 runs",
    "codegen": "CodeGen; StarCoder 2 runs",
    "xglm": "XGLM, with sinusoidal positions; OPT runs",
    "biogpt": "BioGPT; OPT, of the same shape, runs",
    "chatglm": "the first ChatGLM; GLM-4 in transformers' own format has model_type glm",
    "RefinedWeb": "a Falcon in the format of before transformers 4.33; a newer copy has model_type falcon",
    "RefinedWebModel": "a Falcon in the format of before transformers 4.33; a newer copy has model_type falcon",
}
_ADVICE = "use a dense decoder of the same family, or another engine"
_HELP = {
    _NO_ROW: "most want but a row that says how they compute (flashllm/README.md, How to add an architecture); until "
    "then use a decoder of the same family that runs, or another engine",
    _PICTURES: "use its text model on its own, where it is published as such",
    _ENCODER: "use it with transformers",
    _ENCODER_DECODER: "use it with transformers",
}

REFUSED = {
    **{name: f"{reason}; {_HELP.get(reason, _ADVICE)}" for reason, names in _REASONS.items() for name in names},
    **_OTHERS,
}
