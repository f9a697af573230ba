"""Common model_types that cannot be run: what each is, and what would help.

A table for the message of a refusal: one sentence for all that are refused for the same reason, and one each for those
that something else would help. Knows no config.
"""

_ANOTHER = "use another engine"
_FAMILY = "use a dense decoder of the same family, or another engine"
_TRANSFORMERS = "use it with transformers"
_PICTURES = "a model for pictures, video or sound besides text"

# What it is and what would help: the model_types.
_ALIKE = {
    "a mixture of experts whose architecture nobody has described here yet; use one that runs (OLMoE, Qwen 1.5 to 3 "
    "MoE, Mixtral, gpt-oss), a dense decoder of the same family, or another engine": """
        phimoe granitemoe granitemoeshared granitemoe_swa dbrx jetmoe ernie4_5_moe hunyuan_v1_moe hy_v3 glm4_moe
        dots1 minimax minimax_m2 minimax_m3_vl_text minimax_text_01 flex_olmo llama4_text qwen3_next qwen3_5_moe
        qwen3_5_moe_text arctic grok-1 cohere2_moe exaone_moe afmoe aria_text beam flint inkling_text inkling2_text
        kolibri1 laguna mellum mimo_v2_flash solar_open step3p5 zaya deepseek deepseek_v4 bailing_moe
        bailing_moe_v2 smallthinker minimax_m1 step3_text
        """,
    f"a mixture of experts with latent attention; {_FAMILY}": """
        deepseek_v2 deepseek_v3 deepseek_v32 kimi_k2 longcat_flash glm4_moe_lite glm_moe_dsa axk1 axk2
        dots3_note_text hy_v4 mistral4
        """,
    f"a dense decoder with latent attention; {_FAMILY}": "minicpm3 youtu",
    f"a mix of attention and layers that keep a state in its place (state-space, linear, convolutions); {_FAMILY}": """
        jamba bamba zamba zamba2 falcon_h1 granitemoehybrid nemotron_h recurrent_gemma lfm2 lfm2_moe lfm3 olmo_hybrid
        kimi_linear plamo2 bailing_hybrid qwen3_5 qwen3_5_text qwen4_exp qwen4_exp_text
        """,
    f"a state-space model, which has no attention's keys and values to keep; {_FAMILY}": """
        mamba mamba2 falcon_mamba rwkv rwkv5 rwkv6 rwkv7 xlstm
        """,
    f"an encoder-decoder model; this engine runs decoders alone; {_TRANSFORMERS}": """
        t5 mt5 umt5 t5gemma t5gemma2 bart mbart pegasus pegasus_x marian m2m_100 led longt5 byt5 fsmt blenderbot
        blenderbot-small bigbird_pegasus mvp plbart prophetnet switch_transformers nllb-moe encoder-decoder whisper
        speech_to_text speech-encoder-decoder speecht5 seamless_m4t seamless_m4t_v2 moonshine moonshine_streaming canary
        cohere_asr dia pop2piano vision-encoder-decoder florence2 pix2struct pp_formulanet udop
        """,
    f"an encoder, which generates no text; {_TRANSFORMERS}": """
        bert bert-generation roberta roberta-prelayernorm distilbert electra deberta deberta-v2 albert modernbert
        xlm-roberta xlm-roberta-xl camembert big_bird ernie megatron-bert rembert roformer xmod xlm roc_bert
        data2vec-text convbert esm esmc eurobert flaubert fnet funnel gte ibert jina_embeddings_v3 layoutlm longformer
        luke mobilebert modernvbert mpnet mra nomic_bert nystromformer perceiver squeezebert tapas yoso clip
        neomme ultrabert ultravbert
        """,
    f"{_PICTURES}; use its text model on its own, where that runs and is published as such": """
        llama4 gemma3n gemma4 gemma4_unified aya_vision cohere2_vision cohere_compass glm4v glm4v_moe glm46v glm5_next
        glm_ocr glmga kimi_vl kimi_k25 ernie4_5_vl_moe exaone4_5 hunyuan_vl hyperclovax_vision_v2 lfm2_vl lfm3_vl
        granite4_vision granite_docling minimax_m3_vl mistral_large4 molmo molmo2 minicpmv minicpmo minicpmv4_6
        minicpmv4_7 minicpm_ocr nemotron_h_omni nemo_speechlm paddleocr_vl step3p7 deepseek_ocr2
        deepseek_vl_v2 unlimited_ocr muse_glimmer muse_spark inkling_mm_model inkling2 dots3_note cosmos3_edge aria blip
        chameleon emu3 evolla git idefics kosmos-2 kosmos-2.5 moshi musicgen musicgen_melody pi0 pixtral trocr
        voxtral_realtime kyutai_speech_to_text bark csm higgs_audio_v2 phi3_v phi4mm internvl_chat h2ovl_chat dots_ocr
        NVLM_D
        """,
    "a model that makes text by filling in masks, in no order, instead of continuing it; use another engine": """
        diffusion_gemma llada llada_moe Dream sdar
        """,
    f"a decoder that computes in a way of its own; {_ANOTHER}": """
        blt cpmant doge hrm_text reformer xlnet
        """,
    "a dense decoder whose architecture nobody has described here yet; most want but a row that says how they compute "
    "(flashllm/README.md, How to add an architecture); until then use a decoder of the same family that runs, or "
    "another engine": """
        olmo hf_olmo olmo3 cohere2 cohere_compass_text exaone exaone4 glm4 ernie4_5 helium seed_oss ministral diffllama
        granite_swa hunyuan_v1_dense hyperclovax gpt_neox_japanese modernbert-decoder vaultgemma nanochat cwm orion
        internlm2 minicpm baichuan qwen ctrl openai-gpt plamo plamo3 phi3small mimo telechat
        """,
}

# A text model that runs: the models for pictures or sound that are usually built around one.
_AROUND = {
    "Llama": """
        llava llava_next llava_next_video video_llava vipllava idefics3 smolvlm mllama perception_lm janus deepseek_vl
        deepseek_vl_hybrid voxtral glmasr
        """,
    "Mistral": "idefics2 mistral3",
    "Qwen 2": """
        qwen2_vl qwen2_5_vl qwen2_5_omni qwen2_5_omni_thinker qwen2_audio audioflamingo3 musicflamingo fast_vlm got_ocr2
        internvl llava_onevision ovis2 pp_chart2table vibevoice vibevoice_asr video_llama_3
        """,
    "Qwen 3": "qwen3_vl qwen3_asr cosmos3_omni fun_asr_nano lighton_ocr moss_transcribe_diarize qianfan_ocr",
    "Qwen 3 MoE": "qwen3_vl_moe qwen3_omni_moe qwen3_omni_moe_thinker",
    "Gemma": "paligemma",
    "Granite": "granite_speech granite_speech_plus",
    "OPT": "blip-2 instructblip instructblipvideo",
    "Persimmon": "fuyu",
    "Phi 3": "phi4_multimodal",
}

# A text model that runs: the text parts of models for pictures or sound that are like it but for their positions.
_LIKE = {
    "Qwen 2": "qwen2_vl_text qwen2_5_vl_text qwen2_5_omni_text",
    "Qwen 3": "qwen3_vl_text",
    "Qwen 3 MoE": "qwen3_vl_moe_text qwen3_omni_moe_text",
}

# A model_type that runs: those that are the same under another name.
SAME = {"llama": "iquestcoder internlm3", "gpt2": "gpt-sw3"}

# A model_type that runs: those that its models had before transformers knew them.
_NEWER = {
    "falcon": "RefinedWeb RefinedWebModel",
    "phi": "phi-msft mixformer-sequential",
    "stablelm": "stablelm_epoch",
}

_OTHERS = {
    **dict.fromkeys(
        ("gemma3", "shieldgemma2"),
        "Gemma 3 with its picture encoder; the text model alone has model_type gemma3_text and runs",
    ),
    "apertus": f"a decoder whose activation, xIELU, has learned parameters; {_ANOTHER}",
    "jais": "the first Jais, with a SwiGLU of its own and distances added to its scores; Jais 2 runs",
    "gptj": "GPT-J; GPT-NeoX, Pythia, Falcon and Phi run",
    "gpt_neo": "GPT-Neo; GPT-NeoX, Pythia and GPT-2 run",
    "gpt_bigcode": "StarCoder 1; StarCoder 2 runs",
    "codegen": "CodeGen; StarCoder 2 runs",
    "xglm": "XGLM, with sinusoidal positions; OPT runs",
    "biogpt": "BioGPT; OPT, of the same shape, runs",
    "chatglm": "the first ChatGLM; GLM-4 in transformers' own format has model_type glm",
    "ministral3": "Ministral 3, a Mistral whose queries are scaled up at late positions; Mistral and Llama run",
    "internlm": "the first InternLM, a Llama with biases in its attention: set model_type to llama and "
    "attention_bias to true in its config.json",
    **dict.fromkeys(
        ("xverse", "aquila"), "a Llama with files for code of its own: set model_type to llama in its config.json"
    ),
    "nemotron-nas": "a Llama whose layers differ in width and some of which lack attention; Llama 3 runs",
    "openelm": "OpenELM, whose layers differ in heads and width; SmolLM2 and Qwen 2 and 3 have its sizes and run",
    "Yi": "a Yi with files for code of its own; a newer copy has model_type llama, which runs",
    "solar": "Solar Pro, a Llama with connections that skip layers; SOLAR 10.7B has model_type llama and runs",
    "gemma3n_text": "the text model of Gemma 3n, with embeddings for every layer; Gemma 1 to 3 run",
    **dict.fromkeys(
        ("gemma4_text", "gemma4_unified_text"), "the text model of Gemma 4, a new architecture; Gemma 1 to 3 run"
    ),
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"),
        "a draft model that reads the states of a Gemma 4 and is no model by itself; Gemma 1 to 3 run",
    ),
}


def _each(table: dict[str, str], sentence: str) -> dict[str, str]:
    """Model_type -> `sentence` with the key of its group in place of {}."""
    return {name: sentence.format(key) for key, names in table.items() for name in names.split()}


REFUSED = {
    **_each(_ALIKE, "{}"),
    **_each(_AROUND, f"{_PICTURES}; its text model, usually a {{}}, runs on its own, where it is published as such"),
    **_each(_LIKE, "the text part of a model for pictures, whose positions have three axes; {} runs"),
    **_each(SAME, "{0} under another name: set model_type to {0} in its config.json"),
    **_each(
        _NEWER,
        "a {0} in the format of before transformers knew it; a newer copy has model_type {0} and runs",
    ),
    **_OTHERS,
}
