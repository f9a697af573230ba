"""Quantised GGUF files of tiny models, as their publishers mix kinds; and what conversion makes of each, made once."""

import re
import shutil

import torch
from arch_models import Variant, make_checkpoint
from gguf_files import write_gguf
from safetensors.torch import save_file
from tiny_models import change_config

from flashllm.convert.checkpoint.opened import open_checkpoint
from flashllm.convert.run import convert

ENCODED_AS = {
    "Q8_0": "int8_32", "Q4_0": "int4_32", "Q4_1": "int4_32_min", "Q5_0": "int5_32", "Q5_1": "int5_32_min",
    "Q2_K": "q2_k", "Q3_K": "q3_k", "Q4_K": "q4_k", "Q5_K": "q5_k", "Q6_K": "q6_k", "MXFP4": "mxfp4", "NVFP4": "nvfp4",
    "IQ1_S": "iq1_s", "IQ1_M": "iq1_m", "IQ2_XXS": "iq2_xxs", "IQ2_XS": "iq2_s", "IQ2_S": "iq2_s",
    "IQ3_XXS": "iq3_xxs", "IQ3_S": "iq3_s", "IQ4_XS": "iq4_xs", "IQ4_NL": "iq4_nl",
    "TQ1_0": "ternary", "TQ2_0": "ternary",
}  # fmt: skip
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
WIDE |= {"num_attention_heads": 4, "num_key_value_heads": 2}
MIXTURES = {
    "olmoe": ("intermediate_size",),
    "mixtral": ("intermediate_size",),
    "qwen2_moe": ("moe_intermediate_size", "shared_expert_intermediate_size"),
    "qwen3_moe": ("moe_intermediate_size",),
    "gpt_oss": ("intermediate_size",),
    "qwen3_5_moe_text": ("moe_intermediate_size", "shared_expert_intermediate_size"),
    "minimax_m2": ("intermediate_size",),
    "nemotron_h": ("moe_intermediate_size", "moe_shared_expert_intermediate_size"),
    "deepseek_v3": ("moe_intermediate_size", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"),
}
SHARING = ("qwen2_moe", "qwen3_5_moe_text", "nemotron_h", "deepseek_v3")  # of them, those with shared experts
_NEMOTRON = {"hybrid_override_pattern": "ME*E", "mamba_num_heads": 8, "mamba_head_dim": 32}  # whole blocks
OF_FILES = ("kv_b_apart", "linear_value_heads_tiled")  # what a config says of tensors that lie otherwise


class Mix:
    """The kind of each tensor of a file: that of the first pattern which its name has."""

    def __init__(self, name, *rules):
        self.__name__, self.rules = name, rules

    def __call__(self, tensor):
        return next(kind for pattern, kind in self.rules if re.search(pattern, tensor))


# As llama.cpp's Q4_K_M: layers whose down projections differ, an embedding of its own kind.
mixed = Mix("mixed", ("token_embd", "Q8_0"), (r"blk\.0\.ffn_down", "Q6_K"), ("", "Q4_K"))
# As llama.cpp's IQ4_XS: some layers' down projections are in codes of a table, others not.
of_tables = Mix("of_tables", (r"blk\.[1-9]\.ffn_down", "IQ4_XS"), ("", "Q5_K"))
# As Unsloth's: layers differ in every matrix.
of_layers = Mix(
    "of_layers",
    *((r"blk\.0\.ffn_(up|gate)", "Q5_K"), (r"blk\.1\.ffn_(up|gate)", "Q4_K"), (r"ffn_(up|gate)", "Q6_K")),
    *((r"blk\.0\.ffn_down", "Q6_K"), ("", "Q4_K")),
)
# Ups in more bits than gates, but of one form.
of_matrices = Mix("of_matrices", (r"blk\.0\.ffn_up", "Q5_K"), ("ffn_down", "IQ4_XS"), ("", "Q4_K"))
# Some of a model is in no codes.
but_one_down = Mix("but_one_down", (r"blk\.1\.ffn_down", "F16"), ("", "Q4_K"))
but_one_layer = Mix("but_one_layer", (r"blk\.1\.ffn", "F16"), *mixed.rules)
without_downs = Mix("without_downs", ("ffn_down", "F16"), *of_layers.rules)
NOT_KEPT = {  # ups, downs with float32 for what is not kept
    of_matrices: (("q5_k", "q4_k", "q4_k"), ()),
    but_one_down: ((), ("codes4", "float32", "codes4")),
    but_one_layer: (("q4_k", "float32", "q4_k"), ("codes6", "float32", "codes4")),
    without_downs: (("q5_k", "q4_k", "q6_k"), ()),
}
# As Unsloth's of two bits: most in codebooks, each layer in another.
of_codebooks = Mix(
    "of_codebooks",
    *((r"blk\.0\.ffn_down", "Q3_K"), (r"blk\.1\.ffn_down", "IQ3_XXS"), ("ffn_down", "IQ2_S")),
    *((r"blk\.0\.ffn_(up|gate)", "IQ2_XS"), (r"blk\.1\.ffn_(up|gate)", "IQ1_M"), (r"ffn_(up|gate)", "IQ3_S")),
    ("", "Q5_K"),
)
# As Unsloth's, and as Q4_K_M of DeepSeek-V2-Lite, whose experts' width is no multiple of 256.
of_wide_shared = Mix(
    "of_wide_shared",
    *(("ffn_up_shexp", "Q5_K"), ("ffn_gate_shexp", "Q8_0"), ("ffn_down_shexp", "Q6_K")),
    *((r"blk\.[01]\.ffn_down", "Q8_0"), ("ffn_down", "Q5_0"), ("", "Q4_K")),
)
of_plain_shared = Mix("of_plain_shared", ("shexp", "F16"), ("", "Q4_K"))
experts_alone = Mix("experts_alone", ("ffn_", "MXFP4"), ("", "Q8_0"))  # as gpt-oss's files


def name_of(kind):
    """Of a parameter of a test: a kind's, or what else it is."""
    return getattr(kind, "__name__", str(kind))


def make(root, kind, model_type="llama", **sizes):
    """(GGUF file, Hugging Face folder of its dequantised weights)"""
    config = WIDE | sizes | ({"hidden_act": "silu"} if model_type == "llama" else {})
    if model_type in MIXTURES:
        config |= dict.fromkeys(MIXTURES[model_type], 256)
        config |= {"linear_value_head_dim": 128} if "qwen3_5" in model_type else {}
        config |= _NEMOTRON if model_type == "nemotron_h" else {}
        config["norm_topk_prob"] = model_type == "qwen3_moe"  # llama.cpp's rule
    source = make_checkpoint(root / "hf", Variant(model_type, config))

    def of_tensor(name):  # llama.cpp leaves routers and convolutions in fp32
        return "F32" if "ffn_gate_inp" in name or "conv1d" in name else kind if isinstance(kind, str) else kind(name)

    path = write_gguf(source, root / "model.gguf", of_tensor)
    state = {}
    with open_checkpoint(path) as checkpoint:
        for name, info in checkpoint.tensors.items():
            state[name] = torch.from_numpy(checkpoint.floats(name, 0, info.shape[0]))
        own = {key: value for key, value in checkpoint.config.items() if key in OF_FILES}
    save_file(state, source / "model.safetensors", {"format": "pt"})
    change_config(source, **own)
    return path, source


class Quantised:
    """A GGUF file, the folder of its dequantised weights, and what conversion makes of them. None is to be changed."""

    def __init__(self, root, kind, model_type):
        self.root, self._made = root, {}
        self.path, self.folder = make(root, kind, model_type)

    def kept(self, **options):
        """(directory, its manifest) of the file's own bits"""
        return self._converted(self.path, keep=True, dtype="float32", **options)

    def exact(self, **options):
        """(directory, its manifest) of the same with activations in fp32: 8 bits would hide what the weights are"""
        return self.kept(activations="float32", **options)

    def wide(self, **options):
        """The directory of the folder."""
        return self._converted(self.folder, dtype="float32", **options)[0]

    def _converted(self, source, **options):
        key = (source, *sorted(options.items()))
        if key not in self._made:
            target = self.root / f"model-{len(self._made)}"
            self._made[key] = target, convert(source, target, **options)
        return self._made[key]

    def remove(self):
        shutil.rmtree(self.root)
