"""What a config.json means: sizes, variants, tensors and their shapes, and what is refused."""

import contextlib
import copy
import dataclasses
import itertools

import numpy as np
import pytest
import torch
from arch_models import VARIANTS, full_config, give_layers, give_widths, make_config
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto import modeling_auto
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from flashllm.arch.mixers import Alibi, Attention, Rotary, StateSpace
from flashllm.arch.mixture import ExpertsSpec
from flashllm.arch.registry import (
    ARCHITECTURES,
    block_spec,
    claims,
    complete_config,
    resident_shapes,
    resolve,
    source_shapes,
    spec_of,
)
from flashllm.arch.spec import Architecture, LayerSpec
from flashllm.arch.tensors import ResidentTensor
from flashllm.convert.checkpoint.text_part import text_config
from flashllm.errors import FormatError, UnsupportedModelError

OPT = ARCHITECTURES["opt"]
TINY = {"model_type": "opt", "hidden_size": 64, "ffn_dim": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
BITNET, ROUNDED = {"model_type": "bitnet"}, {"quant_method": "bitnet", "linear_class": "autobitlinear"}
LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
LING = {  # 2.0
    "model_type": "bailing_moe",
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "use_qk_norm": True,
}


def test_an_opt_config_is_understood():
    assert resolve(TINY) == Architecture(
        model_type="opt", num_layers=2, d_model=64, d_ff=256, activation="relu", gated=False, ffn_bias=True
    )
    assert resolve({**TINY, "enable_bias": False}).ffn_bias is False
    assert resolve(TINY).sparse


def test_a_llama_config_is_understood():
    assert resolve({**LLAMA, "num_hidden_layers": 3}) == Architecture(
        model_type="llama", num_layers=3, d_model=64, d_ff=96, activation="silu", gated=True, ffn_bias=False
    )
    assert not resolve(LLAMA).sparse
    assert resolve({**LLAMA, "hidden_act": "relu", "mlp_bias": True}).ffn_bias
    assert resolve({**LLAMA, "hidden_act": "relu"}).matrices == ("up", "gate", "down")


# What people bring that transformers does not name as a language model: each is told what it is and what would help.
COMMON = (
    *("distilbert", "modernbert", "deberta-v2", "clip", "jais"),
    *("exaone", "nemotron-nas", "openelm", "internlm", "internlm2", "deepseek", "solar", "orion"),
    *("plamo2", "stablelm_epoch", "phi-msft", "minicpm", "baichuan", "qwen", "chatglm", "kimi_vl", "internvl_chat"),
)


def test_common_types_are_told_what_they_are_and_what_would_help():
    for model_type in COMMON:
        with pytest.raises(UnsupportedModelError, match=f"'{model_type}' is not supported: it is "):
            resolve({"model_type": model_type})


def default_config(model_type):
    """What transformers saves of a model of this type; its name alone where its defaults cannot be."""
    try:
        return {**CONFIG_MAPPING[model_type]().to_dict(), "model_type": model_type}
    except Exception:
        return {"model_type": model_type}


@pytest.mark.filterwarnings("ignore")  # transformers' own, of some defaults
@pytest.mark.parametrize("models", ["CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM"])
def test_every_language_model_of_transformers_runs_or_has_a_sentence_with_help(models):
    known = getattr(modeling_auto, f"MODEL_FOR_{models}_MAPPING_NAMES", {})
    assert known or models == "MULTIMODAL_LM"
    for model_type in sorted(set(known) - set(ARCHITECTURES)):
        with pytest.raises(UnsupportedModelError) as caught:
            resolve(default_config(model_type))
        said = str(caught.value).partition("; supported: ")[0]
        assert f"'{model_type}' is not supported: it is " in said
        assert any(word in said for word in ("; use ", " use ", " runs", " run", "set model_type")), said


@pytest.mark.parametrize(
    ("model_type", "told"),
    [
        ("longcat_flash", "LongCat Flash, some of whose experts give back what goes in"),
        ("dbrx", "a mixture of experts whose architecture nobody"),
        ("mamba2", "keep a state in its place"),
        ("rwkv", "keep a state in its place"),
        ("t5", "an encoder-decoder model"),
        ("whisper", "an encoder-decoder model"),
        ("bert", "an encoder, which"),
        ("llava", r"its text model \(llama\) runs when `flashllm convert`"),
        ("paligemma", "does not speak by itself"),
        ("mllama", "use its text model on its own"),
        ("apertus", "an architecture that nobody has described"),
    ],
)
def test_a_configs_keys_say_what_is_refused(model_type, told):
    with pytest.raises(UnsupportedModelError, match=f"'{model_type}' is not supported: it is .*{told}"):
        resolve(default_config(model_type))


@pytest.mark.parametrize(("name", "runs"), [("iquestcoder", "llama"), ("internlm3", "llama"), ("gpt-sw3", "gpt2")])
def test_what_is_the_same_under_another_name_runs(name, runs, tmp_path):
    """With its own defaults."""
    models = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    assert models[name] == models[runs]
    config = CONFIG_MAPPING[name]()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del expected["lm_head.weight"]
    saved, bare = (text_config({**keys, "model_type": name}, tmp_path) for keys in (config.to_dict(), {}))
    assert saved["model_type"] == runs
    assert source_shapes(saved) == expected
    assert block_spec(bare) == block_spec(saved)


# Whose defaults in transformers are no model: heads that do not divide the width, no experts for a token, no layer that
# attends.
_NO_MODELS = ("glm4_moe", "dots1", "deepseek_v2", "bamba", "granitemoehybrid")


@pytest.mark.parametrize(
    "model_type", sorted(set(ARCHITECTURES) - {"bamboo", "sparsellama", "differing", "bailing_moe", *_NO_MODELS})
)
def test_an_empty_config_means_what_transformers_makes_of_it(model_type):
    """Defaults of every model_type, and the config that transformers saves of it."""
    saved = CONFIG_MAPPING[model_type]().to_dict()
    bare = {"model_type": model_type}
    assert resolve(bare) == resolve(saved)
    assert block_spec(bare) == block_spec(saved)


def test_configs_of_the_hub_before_transformers_5():
    neox = {"model_type": "gpt_neox", "rotary_pct": 0.5, "rotary_emb_base": 500, "hidden_size": 128}
    rotary = block_spec({**neox, "num_attention_heads": 4}).layers[0].mixer.rotary
    assert rotary.dims == 16
    assert rotary.inverse_frequency[1] == pytest.approx(500 ** (-2 / 16))
    gemma3 = block_spec({"model_type": "gemma3_text", "rope_theta": 5e5, "rope_local_base_freq": 300.0})
    found = [layer.mixer.rotary.inverse_frequency[1] for layer in gemma3.layers[4:6]]
    assert found == pytest.approx([300 ** (-1 / 128), 5e5 ** (-1 / 128)])
    phi3 = {"type": "su", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    block = block_spec({"model_type": "phi3", "rope_scaling": phi3, "max_position_embeddings": 131072})
    assert block.context == 4096  # beyond, transformers computes other frequencies
    assert block.layers[0].mixer.rotary.scaling == pytest.approx((1 + np.log(32) / np.log(4096)) ** 0.5)


def test_a_released_config_of_kimi_linear_means_what_transformers_makes_of_it():
    """It counts layers from 1 on, and has most keys under other names than transformers."""
    own = {"kda_layers": [1, 2, 4, 5], "full_attn_layers": [3], "num_heads": 2, "head_dim": 16}
    released = {"num_hidden_layers": 5, "linear_attn_config": {**own, "short_conv_kernel_size": 3}}
    released |= {"num_experts": 16, "num_experts_per_token": 3, "num_shared_experts": 2, "moe_renormalize": False}
    released |= {"num_expert_group": 4, "topk_group": 2, "model_max_length": 512, "first_k_dense_replace": 2}
    block = block_spec({"model_type": "kimi_linear", **released})
    assert block == block_spec(CONFIG_MAPPING["kimi_linear"](**copy.deepcopy(released)).to_dict())
    assert [layer.mixer.kind == "attention" for layer in block.layers] == [False, False, True, False, False]
    experts = block.experts
    assert (experts.count, experts.chosen, experts.shared, block.context) == (16, 3, 2 * experts.size, 512)
    assert (experts.router.groups, experts.router.chosen_groups, experts.router.normalized) == (4, 2, False)
    with pytest.raises(FormatError, match="linear_attn_config must name each of 5 layers once"):
        resolve({"model_type": "kimi_linear", **released, "linear_attn_config": {**own, "full_attn_layers": [2]}})


@pytest.mark.parametrize(
    ("keys", "turned"), [({}, 128), ({"rotary_dim": 64}, 64), ({"rotary_dim": 64, "partial_rotary_factor": 0.25}, 32)]
)
def test_an_explicit_share_of_minimaxs_heads_is_turned(keys, turned):
    assert block_spec({"model_type": "minimax_m2", "head_dim": 128, **keys}).layers[0].mixer.rotary.dims == turned


def test_a_latent_position_keeps_one_key_and_its_rotated_part():
    assert block_spec({"model_type": "glm4_moe_lite"}).kv_nbytes_per_token(2) == 47 * (512 + 64) * 2


def test_kv_bytes():
    # keys and values, 2 layers, 2 heads of 32, two bytes
    assert block_spec({**TINY, "num_hidden_layers": 2}).kv_nbytes_per_token(2) == 2 * 2 * 2 * 32 * 2
    assert (
        block_spec({**LLAMA, "num_hidden_layers": 2, "num_key_value_heads": 1}).kv_nbytes_per_token(2)
        == 2 * 2 * 1 * 16 * 2
    )


def test_what_a_token_reads_of_the_mixers():
    """Of a window no more than its positions; of a state always all."""
    config = {**LLAMA, "model_type": "mistral", "num_hidden_layers": 2, "num_key_value_heads": 1, "sliding_window": 8}
    block = block_spec(config)
    of_one = block.kv_nbytes_per_token(2)
    assert [block.mixers_read_nbytes(n, 2) for n in (1, 8, 9, 300)] == [of_one, 8 * of_one, 8 * of_one, 8 * of_one]
    mixed = block_spec({"model_type": "qwen3_next"})
    assert mixed.mixers_read_nbytes(100, 2) == 100 * mixed.kv_nbytes_per_token(2) + mixed.state_nbytes
    assert mixed.state_nbytes > 0


# (what is added to the sum of the chosen experts' weights, whether the router multiplies in fp32), where they are not
# 0 and as the model's dtype has it.
ROUTERS = {
    **dict.fromkeys(("bailing_moe", "deepseek_v3", "dots1", "exaone_moe", "glm4_moe", "glm4_moe_lite"), (1e-20, True)),
    **dict.fromkeys(("hy_v3", "kimi_linear", "mimo_v2_flash", "nemotron_h", "solar_open"), (1e-20, True)),
    **dict.fromkeys(("deepseek_v2", "ernie4_5_moe", "hunyuan_v1_moe"), (0.0, True)),
    **dict.fromkeys(("afmoe", "mistral4"), (1e-20, False)),
    "lfm2_moe": (1e-6, False),
}


@pytest.mark.parametrize("model_type", sorted(set(ARCHITECTURES) - {"differing"}))
def test_what_no_logit_shows_of_routers(model_type):
    config = {"model_type": model_type}
    if model_type in _NO_MODELS:
        config |= make_config(VARIANTS[model_type]).to_dict()
    if model_type == "bailing_moe":
        config |= LING
    router = getattr(block_spec(config).experts, "router", None)
    wide = any(name.endswith(".wide_router.weight") for name in resident_shapes(config))
    assert (getattr(router, "epsilon", 0.0), wide) == ROUTERS.get(model_type, (0.0, False))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "unheard-of"},
            "'unheard-of' is not supported: it is an architecture that nobody.*llama, .*opt",
        ),
        ({"model_type": "x", "layer_types": ["full_attention", "conv"]}, "keep a state in its place.*; supported: "),
        ({"model_type": "x", "is_encoder_decoder": True}, "an encoder-decoder model.*use it with transformers"),
        ({"model_type": "x", "layer_types": 5, "text_config": {}, "vision_config": 7}, "for pictures"),
        ({**BITNET, "quantization_config": {"quant_method": "awq"}}, "is not of quant_method bitnet.*supported"),
        ({**BITNET, "quantization_config": "bitnet"}, "is not of quant_method bitnet"),
        ({**BITNET, "quantization_config": {**ROUNDED, "linear_class": "other"}}, "another linear_class"),
        ({**BITNET, "quantization_config": {**ROUNDED, "use_rms_norm": True}}, "use_rms_norm, a norm before every"),
        ({**BITNET, "quantization_config": {**ROUNDED, "modules_to_not_convert": []}}, "other modules_to_not_convert"),
        ({"model_type": "shieldgemma2"}, "judges pictures"),
        ({"model_type": None}, "not supported"),
        ({"model_type": ["opt"]}, "not supported"),
        ({**TINY, "activation_function": "tanh"}, "activation 'tanh' is not supported for opt; supported: relu, gelu"),
        ({**TINY, "activation_function": {}}, "is not supported"),
        ({**LLAMA, "hidden_act": "tanh"}, "activation 'tanh' is not supported for llama"),
        ({**LLAMA, "rope_scaling": {"type": "axial"}}, "rope type 'axial' is not supported"),
        ({"model_type": "mpt", "attn_config": {"clip_qkv": 6.0}}, "mpt with attn_config.clip_qkv 6.0 is not supported"),
        ({"model_type": "mpt", "logit_scale": 2.0}, "mpt with logit_scale 2.0 is not supported"),
        ({"model_type": "bloom", "apply_residual_connection_post_layernorm": True}, "bloom with apply_residual"),
        ({"model_type": "stablelm", "qk_layernorm": True}, "a norm of its own for every head"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "makes an encoder"),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "gpt2 with scale_attn_by_inverse_layer_idx"),
        ({"model_type": "bamboo", "hidden_act": "silu"}, "activation silu is not supported for bamboo"),
        ({"model_type": "bailing_moe", "score_function": "softmax"}, r"bailing_moe whose score_function .* \(Ling 1\)"),
        ({**LING, "norm_head": True}, "bailing_moe with norm_head True is not supported; False is"),
        ({**LING, "norm_softmax": True}, "bailing_moe with norm_softmax True is not supported; False is"),
        ({"model_type": "phimoe", "num_experts_per_tok": 1}, "num_experts_per_tok 1 is not supported; 2 is"),
        ({"model_type": "olmo", "clip_qkv": 8.0}, "olmo with clip_qkv 8.0 is not supported"),
        ({"model_type": "hunyuan_v1_moe", "num_experts": [4] + [8] * 31}, "num_experts that differs by layer"),
        ({"model_type": "qwen2", "layer_types": ["chunked_attention"] * 32}, "layers of type 'chunked_attention'"),
    ],
)
def test_unsupported_variants(config, message):
    with pytest.raises(UnsupportedModelError, match=message):
        resolve(config)


@pytest.mark.parametrize(
    ("config", "key", "value"),
    [
        (TINY, "num_hidden_layers", 0),
        (TINY, "num_hidden_layers", 10**6),
        (TINY, "num_hidden_layers", -1),
        (TINY, "num_hidden_layers", True),
        (TINY, "num_hidden_layers", None),
        (TINY, "hidden_size", "64"),
        (TINY, "hidden_size", 64.0),
        (TINY, "ffn_dim", 0),
        (TINY, "ffn_dim", 2**40),
        (TINY, "ffn_dim", [256]),
        (TINY, "num_attention_heads", 0),
        (TINY, "num_attention_heads", 7),
        (TINY, "max_position_embeddings", 0),
        (TINY, "word_embed_proj_dim", 0),
        (TINY, "vocab_size", "many"),
        (LLAMA, "num_key_value_heads", 3),
        (LLAMA, "num_key_value_heads", 0),
        (LLAMA, "num_attention_heads", 5),
        (LLAMA, "head_dim", 15),
        (LLAMA, "head_dim", -16),
        (LLAMA, "rms_norm_eps", None),
        (LLAMA, "rms_norm_eps", -1.0),
        (LLAMA, "rope_theta", 0),
        (LLAMA, "rope_theta", float("nan")),
        (LLAMA, "rope_scaling", 4),
        (LLAMA, "rope_scaling", {"type": "linear"}),
        (LLAMA, "rope_scaling", {"rope_type": "linear", "factor": -2.0}),
        (LLAMA, "rope_scaling", {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}),
        (
            LLAMA,
            "rope_scaling",
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
        ),
    ],
)
def test_impossible_values(config, key, value):
    with pytest.raises(FormatError, match=r"^config\.json: "):
        resolve({**config, key: value})


ODD = (None, "a", -1, 1.5, [], {}, [None] * 3, {"rope_type": "yarn"}, {"full_attention": {}})


@pytest.mark.parametrize("model_type", sorted({variant.model_type for variant in VARIANTS.values()}))
def test_any_key_may_have_an_odd_value(model_type):
    """It is a model, or a sentence that names the config."""
    variant = next(each for each in VARIANTS.values() if each.model_type == model_type)
    config = full_config(variant)
    for key, value in itertools.product(sorted({*spec_of(config).defaults, "layer_types", "rope_parameters"}), ODD):
        with contextlib.suppress(FormatError, UnsupportedModelError):
            claims({**config, key: value})


def in_checkpoints(shapes, spec, layers):
    """The same with a tensor for each expert in the place of stacks, and under the names of `spec`."""
    shapes = {
        spec.base_prefix + key.removeprefix("model.") if key.startswith("model.") else key: shape
        for key, shape in shapes.items()
    }
    for layer in range(layers):
        for new, old in spec.renamed.items():
            if new.format(i=layer) in shapes:
                shapes[old.format(i=layer)] = shapes.pop(new.format(i=layer))
        if spec.model_type == "gpt_oss":  # convert/checkpoint/mixtures/gpt_oss.py
            at = f"model.layers.{layer}.mlp.experts."
            experts, size, width = shapes.pop(at + "down_proj")
            del shapes[at + "gate_up_proj"], shapes[at + "gate_up_proj_bias"]
            shapes |= {at + part: (experts * size,) for part in ("gate_bias", "up_bias")}
            for expert in range(experts):
                shapes |= {f"{at}{expert}.{part}_proj.weight": (size, width) for part in ("gate", "up")}
                shapes[f"{at}{expert}.down_proj.weight"] = (width, size)
        if (taps := shapes.pop(f"model.layers.{layer}.linear_attn.conv1d.weight", None)) is not None:
            for part in "qkv" if spec.model_type == "olmo_hybrid" else ("",):
                at = f"model.layers.{layer}.linear_attn."
                rows = shapes[f"{at}{part}_proj.weight"][0] if part else taps[0]
                shapes[f"{at}{part}_conv1d.weight".replace("._", ".")] = (rows, *taps[1:])
        for stack, parts in spec.stacked.items():
            if stack.format(i=layer) not in shapes:  # a dense layer
                continue
            *experts, rows, columns = shapes.pop(stack.format(i=layer))
            for expert in range(*experts or [1]):
                for part in parts:
                    shapes[part.format(i=layer, e=expert)] = rows // len(parts), columns
    return shapes


@pytest.mark.parametrize("name", VARIANTS)
def test_tensors_are_those_of_the_hugging_face_model(name):
    config = make_config(VARIANTS[name])
    widths = VARIANTS[name].config.get("intermediate_size")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        if isinstance(widths, list):
            give_widths(model, widths)
        if VARIANTS[name].model_type == "differing":
            give_layers(model, {**config.to_dict(), **VARIANTS[name].config})
    expected = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del expected["lm_head.weight"]
    given = {key: value for key, value in VARIANTS[name].config.items() if key in ("intermediate_size", "kinds")}
    config = config.to_dict() | given | ({"model_type": "differing"} if "kinds" in given else {})
    for key in [key for key in expected if key.endswith("self_attn.conv1d.weight")]:  # Kimi Linear's, one in memory
        rows, *rest = expected.pop(key)
        expected |= {key.replace("conv1d", f"{part}_conv1d"): (rows // 3, *rest) for part in "qkv"}
    expected = in_checkpoints(expected, spec_of(config), len(block_spec(config).layers))
    # ERNIE's bias is a row, which counts as a vector.
    expected |= {key: shape[1:] for key, shape in expected.items() if key.endswith("correction_bias") and shape[1:]}
    assert source_shapes(config) == expected
    # Every row of every tensor is claimed exactly once.
    taken = {source: np.zeros(shape[0], int) for source, shape in expected.items()}
    for claim in claims(config).values():
        if claim.part.transposed:
            taken[claim.source] = np.zeros(expected[claim.source][1], int)
    for claim in claims(config).values():
        part = claim.part
        count = claim.rows if part.count is None else part.count
        if part.turned:
            assert count == claim.shape[1]
        else:
            assert part.repeats * count == claim.rows
        for run in range(part.repeats):
            first = part.first + run * part.step
            taken[claim.source][first : first + count] += 1
    assert all((rows == 1).all() for rows in taken.values())


def test_tensors_come_in_the_order_of_a_forward_pass():
    names = list(resident_shapes({**TINY, "word_embed_proj_dim": 32, "tie_word_embeddings": False}))
    assert names[:4] == ["embedding.weight", "positions.weight", "project_in.weight", "layers.0.attention_norm.weight"]
    assert names[-4:] == ["final_norm.weight", "final_norm.bias", "project_out.weight", "head.weight"]
    layers = [int(name.split(".")[1]) for name in names if name.startswith("layers.")]
    assert layers == sorted(layers)


def test_the_prefix_is_added_where_a_checkpoint_lacks_it():
    bare = ["decoder.embed_tokens.weight", "decoder.layers.0.fc1.weight", "decoder.version", "lm_head.weight"]
    assert OPT.with_prefix(bare) == {
        "model.decoder.embed_tokens.weight": "decoder.embed_tokens.weight",
        "model.decoder.layers.0.fc1.weight": "decoder.layers.0.fc1.weight",
        "lm_head.weight": "lm_head.weight",
    }
    full = ["model.decoder.embed_tokens.weight", "extra.weight"]
    assert OPT.with_prefix(full) == {name: name for name in full}
    old = ["model.embed_tokens.weight", "model.layers.3.self_attn.rotary_emb.inv_freq"]
    assert list(ARCHITECTURES["llama"].with_prefix(old)) == old[:1]


def test_a_tensor_with_and_without_prefix_is_an_error():
    names = ["decoder.embed_tokens.weight", "decoder.x", "model.decoder.x"]
    with pytest.raises(FormatError, match="has both"):
        OPT.with_prefix(names)


_SPACE = StateSpace(key_heads=2, value_heads=4, key_dim=8, value_dim=16, kernel=4)


def test_a_spec_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="matrices must be"):
        dataclasses.replace(OPT, matrices={"down": "a", "up": "b"})
    with pytest.raises(ValueError, match="fc1' is not a canonical name"):
        dataclasses.replace(OPT, resident=(ResidentTensor(name="layers.{i}.fc1", source="x"),))
    block = block_spec(LLAMA)
    layer, mixer = block.layers[0], block.layers[0].mixer
    wide = Rotary(inverse_frequency=(1.0,) * 9)
    rounded = {"rounded_inputs": True, "sub_norms": True}
    for change, message in (
        ({"activation": "tanh"}, "activation must be one of"),
        ({"activation": "drelu", "gated": False}, "activation drelu needs a gate"),
        ({"norm_epsilon": -1.0}, "norm_epsilon must be"),
        ({"layers": ()}, "a model has from 1 to"),
        ({"layers": (_mixture(8), _mixture(4))}, "mixtures of experts must be alike"),
        (rounded | {"layers": (layer, dataclasses.replace(layer, mixer=None))}, "inputs are rounded behind norms"),
        (rounded | {"layers": (layer, dataclasses.replace(layer, mixer=_SPACE))}, "inputs are rounded behind norms"),
        ({"logit_softcap": 0.0}, "logit_softcap must be a number above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(block, **change)
    for change, message in (
        ({"kv_heads": 3}, "3 key-value heads do not divide 4 heads"),
        ({"head_dim": 0}, "head_dim must be an integer from 1"),
        ({"rotary": wide}, "18 rotary dimensions do not fit heads of 16"),
        ({"window": 0}, "sliding window must be"),
        ({"softcap": 0.0}, "softcap must be a number above 0"),
        ({"value_norm": True}, "values are normalized where queries and keys are"),
        ({"alibi": Alibi(slopes=(0.5,))}, "1 slopes do not fit 4 heads"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(mixer, **change)
    for change, message in (
        ({"parallel": True, "norms": "both"}, "a parallel layer has its norms before"),
        ({"shared_norm": True}, "only a parallel layer shares"),
        ({"activation_threshold": -1.0}, "threshold"),
        ({"neurons": 0, "mixer": None}, "neurons must be an integer from 1"),
        ({"mixer": None, "norms": "sum"}, "its norm before the other"),
        ({"second": _SPACE, "mixer": _SPACE}, "is beside attention"),
        ({"experts": ExpertsSpec(count=8, chosen=2, size=3)}, "24 neurons of experts are not 9"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(layer, **{"neurons": 9, **change})


def _mixture(count):
    mixer = Attention(heads=1, kv_heads=1, head_dim=8, query_scale=1.0)
    return LayerSpec(mixer=mixer, neurons=3 * count, experts=ExpertsSpec(count=count, chosen=2, size=3))


def test_layers_may_differ():
    """Some are mixtures of experts and others not; dense ones may have other widths."""
    qwen = {"model_type": "qwen3_moe", "num_hidden_layers": 5, "hidden_size": 64, "moe_intermediate_size": 24}
    mixed = resolve(
        {**qwen, "num_experts": 8, "intermediate_size": 96, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    )
    assert (mixed.dense_layers, mixed.mixtures, mixed.d_ff) == ((0, 2, 3, 4), (1,), 192)
    assert mixed.widths == (96, 192, 96, 96, 96)
    tensors = resident_shapes({**qwen, "num_experts": 8, "decoder_sparse_step": 2})
    assert [name for name in tensors if "router" in name] == ["layers.1.router.weight", "layers.3.router.weight"]
    alone = resolve({**qwen, "num_experts": 8, "intermediate_size": 96, "mlp_only_layers": [0, 1, 2, 3, 4]})
    assert (alone.experts, alone.widths, alone.d_ff, alone.dense_layers) == (0, (), 96, ())
    widths = resolve({**LLAMA, "num_hidden_layers": 2, "intermediate_size": [96, 32]})
    assert (widths.widths, widths.d_ff, widths.neurons) == ((96, 32), 96, 128)
    for wrong in ([96], [96, 0], [96, 1.5], "wide"):
        with pytest.raises(FormatError, match="intermediate_size"):
            resolve({**LLAMA, "num_hidden_layers": 2, "intermediate_size": wrong})
    for wrong in ({"decoder_sparse_step": 0}, {"mlp_only_layers": "0"}, {"mlp_only_layers": ["0"]}):
        with pytest.raises(FormatError, match=next(iter(wrong))):
            resolve({**qwen, **wrong})


# Rotary frequencies

_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES = [
    {},
    {"rope_theta": 500_000.0},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    {"rope_scaling": {"type": "linear", "factor": 4.0}},
    {"rope_theta": 5e5, "rope_scaling": {**_LLAMA3, "original_max_position_embeddings": 8192}},
    {"rope_theta": 5e5, "rope_scaling": _LLAMA3, "max_position_embeddings": 4096},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 7.0}},
    {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "beta_fast": 16, "beta_slow": 2, "truncate": False}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.2}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.1}},
]


@pytest.mark.parametrize("rope", ROPES, ids=str)
def test_rotary_frequencies_are_those_of_transformers(rope):
    config = {**LLAMA, "head_dim": 128, **rope}
    theirs = LlamaConfig(**{key: copy.deepcopy(value) for key, value in config.items() if key != "model_type"})
    kind = theirs.rope_parameters["rope_type"]
    compute = LlamaRotaryEmbedding.compute_default_rope_parameters if kind == "default" else ROPE_INIT_FUNCTIONS[kind]
    frequencies, scaling = compute(theirs)
    block = block_spec(config)
    (mine,) = {layer.mixer.rotary for layer in block.layers}
    assert (mine.dims, mine.scaling) == (128, pytest.approx(scaling))
    torch.testing.assert_close(torch.tensor(mine.inverse_frequency), frequencies, rtol=1e-6, atol=0)
    # As transformers saves it today, the config means the same.
    saved = block_spec(complete_config(theirs.to_dict()))
    assert saved == block
