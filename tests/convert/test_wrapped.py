"""Checkpoints that were saved with what wraps the model: the message names the prefix and what helps."""

import pytest
import torch
from arch_models import VARIANTS, make_checkpoint
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration
from weights_of_folders import WEIGHTS, tensors_of

from flashllm.convert.run import convert
from flashllm.errors import FormatError

COMPILED = r"begin with '_orig_mod\.', as torch\.compile names them; save .*model\._orig_mod, with save_p"
PARALLEL = r"begin with 'module\.', as DataParallel names them; save .*model\.module, with save_p"


def _compiled(model):
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize(
    ("variant", "wrap", "message"),
    [*((name, _compiled, COMPILED) for name in ("llama", "opt", "gpt2")), ("llama", torch.nn.DataParallel, PARALLEL)],
)
def test_what_torch_wraps(tmp_path, variant, wrap, message):
    folder = make_checkpoint(tmp_path / "hf", VARIANTS[variant])
    state = wrap(AutoModelForCausalLM.from_pretrained(folder)).state_dict()
    save_file({name: tensor.clone() for name, tensor in state.items()}, folder / WEIGHTS)
    with pytest.raises(FormatError, match="weight is missing from the checkpoint: the names " + message):
        convert(folder, tmp_path / "model")


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        ("base_model.model.", r"the names begin with 'base_model\.model\.', as peft names them; merge the adapter"),
        ("my_model.", r"all names begin with 'my_model\.'; take that from them"),
        ("outer.inner.", r"all names begin with 'outer\.inner\.'; take that from them"),
        ("my" * 100 + ".", r"all names begin with '(my){40}'; take that"),
    ],
)
def test_other_prefixes(tmp_path, prefix, message):
    folder = make_checkpoint(tmp_path / "hf", VARIANTS["llama"])
    tensors = load_file(folder / WEIGHTS)
    save_file({prefix + name: tensor for name, tensor in tensors.items()}, folder / WEIGHTS)
    with pytest.raises(FormatError, match=message):
        convert(folder, tmp_path / "model")


def test_the_text_part_of_a_model_for_pictures(tmp_path):
    """Its text model's config beside all of its tensors."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = LlamaConfig(**sizes, vocab_size=64)
    seen = CLIPVisionConfig(**sizes, image_size=28, patch_size=14)
    LlavaForConditionalGeneration(LlavaConfig(vision_config=seen, text_config=text)).save_pretrained(tmp_path / "hf")
    text.save_pretrained(tmp_path / "hf")
    others = sum("language_model" not in name for name in load_file(tmp_path / "hf" / WEIGHTS))
    assert others > 10
    with pytest.raises(
        FormatError, match=rf"part of a larger model, .* with '.*language_model\.', next to {others} other tensors"
    ):
        convert(tmp_path / "hf", tmp_path / "model")


def test_a_tensor_that_is_only_missing(tmp_path):
    folder = make_checkpoint(tmp_path / "hf", VARIANTS["llama"])
    for name in (
        "model.layers.0.mlp.up_proj.weight",
        "model.embed_tokens.weight",
    ):  # the first that is missing is named
        with tensors_of(folder) as tensors:
            del tensors[name]
        with pytest.raises(FormatError, match=rf"{name} is missing from the checkpoint$"):
            convert(folder, tmp_path / "model")
