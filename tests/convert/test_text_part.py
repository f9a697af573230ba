"""The language model out of a checkpoint that holds pictures and drafting layers too: as converted on its own."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from arch_models import VARIANTS, make_checkpoint
from safetensors.torch import load_file, save_file
from tiny_models import change_config, config_of
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText
from weights_of_folders import digests, tensors_of

from flashllm.config import RunConfig
from flashllm.convert.run import convert
from flashllm.engine.model import Model
from flashllm.errors import FormatError, UnsupportedModelError
from flashllm.format.manifest import Manifest
from flashllm.offload.model_text import ModelText
from flashllm.offload.shape import load_shape

_QWEN = ("model.visual.blocks.0.attn.qkv.weight", "model.visual.merger.norm.bias", "mtp.fc.weight")
_GEMMA = ("model.vision_tower.a.weight", "model.embed_vision.b.weight", "model.audio_tower.c.weight")
# Variant: the model_type of the whole, what else that has, and how that is said.
_QWEN_SAID = (
    "left out: the picture encoder (model.visual.\u2026, 2 tensors) and layers that draft tokens (mtp\u2026, 1 tensors)"
)
_GEMMA_SAID = (
    "left out: the sound encoder (model.audio_tower.\u2026, 1 tensors) and what brings pictures to the model's width "
    "(model.embed_vision.\u2026, 1 tensors){} and the picture encoder (model.vision_tower.\u2026, 1 tensors)"
)
_MISTRAL = ("multi_modal_projector.linear_1.weight", "vision_tower.ln_pre.weight")
_MISTRAL_SAID = (
    "left out: what brings pictures to the model's width (multi_modal_projector.\u2026, 1 tensors) and the picture "
    "encoder (vision_tower.\u2026, 1 tensors)"
)
_IN_VAIN = tuple(f"model.language_model.layers.4.self_attn.{part}.weight" for part in ("k_norm", "k_proj", "v_proj"))
_IN_VAIN_SAID = " and keys and values of layers that use another's (model.layers.4.self_attn.k_norm.\u2026, 3 tensors)"
NAMES = {
    "qwen3_5": ("qwen3_5", _QWEN, _QWEN_SAID),
    "qwen3_5_moe": ("qwen3_5_moe", _QWEN, _QWEN_SAID),
    **dict.fromkeys(("mistral", "ministral3", "mistral4"), ("mistral3", _MISTRAL, _MISTRAL_SAID)),
    "gemma3": ("gemma3", _MISTRAL, _MISTRAL_SAID),
    "qwen3": ("qwen3_vl", _QWEN[:2], "left out: the picture encoder (model.visual.\u2026, 2 tensors)"),
    "qwen3_moe": ("qwen3_vl_moe", _QWEN[:2], "left out: the picture encoder (model.visual.\u2026, 2 tensors)"),
    "lfm2": ("lfm2_vl", (), None),
    "qwen2": ("qwen2_5_vl", ("visual.merger.a.bias",), "left out: the picture encoder (visual.\u2026, 1 tensors)"),
    "qwen2 window": ("qwen2_vl", ("visual.merger.a.bias",), "left out: the picture encoder (visual.\u2026, 1 tensors)"),
    "glm4": ("glm4v", _QWEN[:2], "left out: the picture encoder (model.visual.\u2026, 2 tensors)"),
    "glm4_moe": ("glm4v_moe", _QWEN[:2], "left out: the picture encoder (model.visual.\u2026, 2 tensors)"),
    "llama": (
        "smolvlm",
        ("model.connector.a.weight", "model.vision_model.b.weight"),
        "left out: other parts (model.connector.\u2026, 2 tensors)",
    ),
    "deepseek_v2": ("deepseek_vl_v2", ("image_newline",), "left out: other parts (image_newline\u2026, 1 tensors)"),
    "deepseek_v3": (
        "kimi_k25",
        ("mm_projector.proj.0.bias",),
        "left out: what brings pictures to the model's width (mm_projector.\u2026, 1 tensors)",
    ),
    "gemma3n": ("gemma3n", (*_GEMMA, *_IN_VAIN), _GEMMA_SAID.format(_IN_VAIN_SAID)),
    "gemma4": ("gemma4", _GEMMA, _GEMMA_SAID.format("")),
    "gemma4 shared keys, rows of ids": ("gemma4", (*_GEMMA, *_IN_VAIN), _GEMMA_SAID.format(_IN_VAIN_SAID)),
}


PREFIXES = {  # of the text's tensors, where others than "model.language_model."
    **dict.fromkeys(("mistral3", "gemma3", "kimi_k25"), "language_model."),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), "model."),
    "smolvlm": "model.text_model.",
    "deepseek_vl_v2": "language.",
}


def wrapped(source, path, model_type, others=_QWEN):
    """The checkpoint `source` as it is published: its config and its tensors within a larger model's."""
    path.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (path / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text())
    within = "language_config" if model_type == "deepseek_vl_v2" else "text_config"
    whole = {"model_type": model_type, within: config, "vision_config": {"depth": 2}}
    if model_type in ("qwen2_vl", "qwen2_5_vl"):  # the text's keys beside the others
        whole = config | whole
        del whole["text_config"]
    tied = config.get("tie_word_embeddings", False)
    (path / "config.json").write_text(json.dumps({**whole, "tie_word_embeddings": tied}))
    prefix = PREFIXES.get(model_type, "model.language_model.")
    tensors = {
        prefix + name if "model." not in prefix else name.replace("model.", prefix, 1): tensor
        for name, tensor in load_file(source / "model.safetensors").items()
    }
    if model_type == "qwen3_vl_moe":
        tensors = inputs_first(tensors)
    save_file(tensors | {name: torch.ones(2, 3) for name in others}, path / "model.safetensors", {"format": "pt"})
    return path


def inputs_first(tensors):
    """Experts [experts, inputs, outputs], gates before ups."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for owner in {name.partition(".experts.")[0] for name in tensors.keys() - found.keys()}:
        count = sum(name.startswith(f"{owner}.experts.") for name in tensors) // 3
        gates, ups, downs = (
            torch.stack([tensors[f"{owner}.experts.{expert}.{part}_proj.weight"].T for expert in range(count)])
            for part in ("gate", "up", "down")
        )
        found[f"{owner}.experts.gate_up_proj"] = torch.cat([gates, ups], dim=2).contiguous()
        found[f"{owner}.experts.down_proj"] = downs.contiguous()
    return found


@pytest.mark.parametrize("variant", NAMES)
def test_the_text_model_is_that_of_its_own_checkpoint(variant, variant_of, tmp_path):
    (source, alone), (model_type, others, said) = variant_of(variant), NAMES[variant]
    lines = []
    convert(wrapped(source, tmp_path / "hf", model_type, others), tmp_path / "model", say=lines.append)
    assert lines == ([] if said is None else [said])
    theirs, mine = (dict(Manifest.load(path).files) for path in (alone, tmp_path / "model"))
    for name in {*theirs, *mine} - {"config.json"}:
        assert mine[name] == theirs[name]
    assert config_of(tmp_path / "model")["model_type"] == config_of(source)["model_type"]


def test_offload_takes_the_text_of_a_larger_model(variant_of, tmp_path):
    (source, _), (whole, others, _) = variant_of("qwen3"), NAMES["qwen3"]
    path = wrapped(source, tmp_path / "hf", whole, others)
    expected = dataclasses.replace(load_shape(str(source)), name="hf")
    assert load_shape(str(path)) == ModelText.load(path).shape == expected
    text = config_of(path)["text_config"]
    del text["vocab_size"]  # as published configs leave out what is usual
    change_config(path, text_config=text)
    assert load_shape(str(path)).vocab == CONFIG_MAPPING["qwen3"]().vocab_size


_ENCODER = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
WHOLE = {  # what the picture encoder's config says
    "gemma3": _ENCODER | {"image_size": 28, "patch_size": 14},
    "qwen3_vl": {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 64}
    | {"deepstack_visual_indexes": [0]},
    "lfm2_vl": _ENCODER | {"num_patches": 4},
    "kimi_k25": _ENCODER,
    "smolvlm": _ENCODER | {"image_size": 28, "patch_size": 14},
}
WHOLE["qwen3_vl_moe"] = WHOLE["qwen3_vl"]
WHOLE["qwen2_vl"] = {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 64}
WHOLE["qwen2_5_vl"] = WHOLE["glm4v"] = WHOLE["glm4v_moe"] = WHOLE["qwen3_vl"]
_OLD_ROPE = {  # and how, as published configs have it
    "gemma3": {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 500.0},
    "qwen3_vl": {
        "rope_theta": 7e4,
        "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [4, 2, 2]},
    },
}
_OLD_ROPE["qwen3_vl_moe"] = _OLD_ROPE["qwen3_vl"]
_OLD_ROPE["qwen2_vl"] = _OLD_ROPE["qwen2_5_vl"] = {
    "rope_theta": 7e4,
    "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]},
}
_OLD_ROPE["glm4v"] = _OLD_ROPE["glm4v_moe"] = {
    "partial_rotary_factor": 0.5,
    "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]},
}


@pytest.mark.parametrize("variant", [name for name, (whole, _, _) in NAMES.items() if whole in WHOLE])
@torch.no_grad()
def test_text_alone_is_computed_as_by_the_whole(variant, variant_of, tmp_path):
    """The text's config has but what differs from the usual, as published ones do."""
    source, (whole, others, _) = variant_of(variant)[0], NAMES[variant]
    path = wrapped(source, tmp_path / "hf", whole, others)
    alone = AutoModelForCausalLM.from_pretrained(source)
    usual = CONFIG_MAPPING[whole]().text_config.to_dict()
    given = config_of(path)
    text = {key: value for key, value in config_of(source).items() if value != usual.get(key, ())}
    if whole == "smolvlm":  # of whose text the config has the type
        text["model_type"] = "llama"
    if whole in _OLD_ROPE:
        text = {key: value for key, value in text.items() if key != "rope_parameters"} | _OLD_ROPE[whole]
    tied = given["tie_word_embeddings"] = alone.config.tie_word_embeddings
    given = text | {"model_type": whole} if "text_config" not in given else given | {"text_config": text}
    (path / "config.json").write_text(json.dumps(given))
    known = CONFIG_MAPPING[whole](text_config=text, vision_config=WHOLE[whole], tie_word_embeddings=tied)
    model = AutoModelForImageTextToText.from_config(known).eval()
    part = model.model.text_model if whole == "smolvlm" else model.model.language_model
    part.load_state_dict(alone.model.state_dict())
    model.lm_head.load_state_dict(alone.lm_head.state_dict())
    convert(path, tmp_path / "model")
    ids = [5, 250, 7, 31, 90, 5, 12, 299] * 10
    expected = model(torch.tensor([ids])).logits[0].numpy()
    with Model.open(tmp_path / "model", RunConfig(mode="dense")) as run, run.new_sequence() as sequence:
        found = run.step([(sequence, ids)], all_logits=True, as_prompt=True)
    np.testing.assert_allclose(found, expected, atol=2e-4, rtol=0)  # test_contract.py's


def with_tensors(source, path, names, **config):
    """A copy of the checkpoint that has such tensors too, and whose config says so."""
    shutil.copytree(source, path)
    if config:
        change_config(path, **config)
    with tensors_of(path) as tensors:
        tensors |= {name: torch.ones(2, 3) for name in names}
    return path


@pytest.mark.parametrize(
    ("variant", "said"),
    [*((name, None) for name in ("glm4_moe", "glm4_moe_lite", "deepseek_v3", "hy_v3")), ("hy_v3", 1), ("glm4_moe", 2)],
)
def test_layers_that_draft_behind_the_models_own(variant, said, variant_of, tmp_path):
    source, alone = variant_of(variant)
    layer = f"model.layers.{config_of(source)['num_hidden_layers']}."
    config = {} if said is None else {"num_nextn_predict_layers": said}
    names = [layer + "eh_proj.weight", layer + "self_attn.o_proj.weight"]
    lines = []
    found = convert(with_tensors(source, tmp_path / "hf", names, **config), tmp_path / "model", say=lines.append)
    assert f"left out: a layer that drafts tokens ({layer}\u2026, 2 tensors)" in lines
    assert digests(found) == digests(Manifest.load(alone))


@pytest.mark.parametrize(
    ("variant", "names"),
    {
        "ernie4_5_moe": ("model.mtp_block.0.mlp.up_proj.weight", "model.mtp_emb_norm.0.weight"),
        "mimo_v2_flash": ("model.mtp.layers.0.eh_proj.weight",),
        **dict.fromkeys(("exaone_moe", "mellum", "nemotron_h", "olmo_hybrid"), ("mtp.layers.0.norm.weight",)),
        "qwen3_next": ("mtp.fc.weight", "mtp.layers.0.norm.weight"),
    }.items(),
)
def test_layers_that_draft_under_names_of_their_own(variant, names, variant_of, tmp_path):
    source, alone = variant_of(variant)
    lines = []
    found = convert(with_tensors(source, tmp_path / "hf", names), tmp_path / "model", say=lines.append)
    prefix = f"{names[0].partition('mtp')[0]}mtp"
    assert f"left out: layers that draft tokens ({prefix}\u2026, {len(names)} tensors)" in lines
    assert found.files == Manifest.load(alone).files


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        *(("deepseek_v3", "kimi_k2"), ("bailing_moe", "bailing_moe_v2")),
        *(("llama", "iquestcoder"), ("llama", "internlm3"), ("gpt2", "gpt-sw3")),
    ],
)
def test_a_vendors_name_of_the_same(variant, name, variant_of, tmp_path):
    """Kimi K2, Ling 2.0 and others open by themselves."""
    source, alone = variant_of(variant)
    found = convert(with_tensors(source, tmp_path / "hf", (), model_type=name), tmp_path / "model")
    assert config_of(tmp_path / "model") == config_of(source)
    assert digests(found) == digests(Manifest.load(alone))


def test_a_layer_beyond_those_that_draft_is_refused(variant_of, tmp_path):
    source, _ = variant_of("glm4_moe")
    name = f"model.layers.{config_of(source)['num_hidden_layers'] + 1}.x.weight"
    with pytest.raises(UnsupportedModelError, match=f"{name}: is no part of the glm4_moe model"):
        convert(with_tensors(source, tmp_path / "hf", [name]), tmp_path / "model")


def test_a_tensor_that_is_there_twice_is_refused(variant_of, tmp_path):
    path = wrapped(variant_of("qwen3_5")[0], tmp_path / "hf", "qwen3_5")
    with tensors_of(path) as tensors:
        tensors["model.norm.weight"] = tensors["model.language_model.norm.weight"].clone()
    with pytest.raises(FormatError, match=r"the checkpoint has model\.norm\.weight twice"):
        convert(path, tmp_path / "model")


def test_a_config_without_the_texts_is_refused(variant_of, tmp_path):
    source, _ = variant_of("qwen3_5")
    path = wrapped(source, tmp_path / "hf", "qwen3_5")
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3_5"}))
    with pytest.raises(FormatError, match="has no text_config, which qwen3_5 models have"):
        convert(path, tmp_path / "model")


def test_decays_in_fp32_stay_so_in_a_model_of_16_bits(tmp_path):
    path = make_checkpoint(tmp_path / "hf", VARIANTS["qwen3_next"], dtype="bfloat16")
    name = "model.layers.0.linear_attn.A_log"
    with tensors_of(path) as tensors:
        tensors[name] = torch.full_like(tensors[name], 0.1, dtype=torch.float32)  # which bfloat16 would round
    convert(path, tmp_path / "model")
    stored = load_file(tmp_path / "model" / "resident.safetensors")
    assert torch.equal(stored["layers.0.decay_log"], tensors[name])
    assert stored["layers.0.query.weight"].dtype == torch.bfloat16
    with Model.open(tmp_path / "model", RunConfig()) as model, model.new_sequence() as sequence:
        assert np.isfinite(model.step([(sequence, [5, 6, 7])])).all()


@pytest.mark.parametrize("variant", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_norms_that_have_1_added_are_refused(variant, variant_of, tmp_path):
    """As MLX writes them."""
    shutil.copytree(variant_of(variant)[0], tmp_path / "hf")
    with tensors_of(tmp_path / "hf") as tensors:
        tensors |= {name: tensor + 1 for name, tensor in tensors.items() if name.endswith("layernorm.weight")}
    with pytest.raises(UnsupportedModelError, match=r"weights are around 1, where qwen3_.*: 1 was added"):
        convert(tmp_path / "hf", tmp_path / "model")
