"""Checkpoints as they were published before today's transformers: literal configs, old names, pickled weights.

Each converts to what the same weights give in the layout that the installed transformers writes.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from arch_models import VARIANTS, Variant, make_checkpoint
from safetensors.torch import load_file
from tiny_models import config_of, make_tiny_opt
from weights_of_folders import digests

from flashllm.arch.registry import block_spec
from flashllm.convert.checkpoint import pickled
from flashllm.convert.run import convert

# The first Llamas (March 2023), with a tiny model's sizes: no key-value heads, no rope, a key nobody knows any more.
LLAMA_CONFIG = """{
  "architectures": ["LLaMAForCausalLM"], "bos_token_id": 0, "eos_token_id": 1, "hidden_act": "silu", "hidden_size": 64,
  "initializer_range": 0.02, "intermediate_size": 96, "max_sequence_length": 2048, "model_type": "llama",
  "num_attention_heads": 4, "num_hidden_layers": 3, "pad_token_id": -1, "rms_norm_eps": 1e-06, "torch_dtype": "float16",
  "transformers_version": "4.27.0.dev0", "use_cache": true, "vocab_size": 300
}"""
# Long Llamas of summer 2023: "type" for today's "rope_type", theta beside it.
LONG_LLAMA_CONFIG = LLAMA_CONFIG.replace(
    '"rms_norm_eps"', '"max_position_embeddings": 160, "rope_theta": 500.0, "rope_scaling": {"type": "linear", '
    '"factor": 4.0}, "rms_norm_eps"'
)  # fmt: skip
# OPT (May 2022): tied without saying so, dropouts, a prefix.
OPT_CONFIG = """{
  "_name_or_path": "opt", "_remove_final_layer_norm": false, "activation_dropout": 0.0, "activation_function": "relu",
  "architectures": ["OPTForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 2, "do_layer_norm_before": true,
  "dropout": 0.1, "eos_token_id": 2, "ffn_dim": 256, "hidden_size": 64, "init_std": 0.02, "layerdrop": 0.0,
  "max_position_embeddings": 128, "model_type": "opt", "num_attention_heads": 2, "num_hidden_layers": 2,
  "pad_token_id": 1, "prefix": "</s>", "torch_dtype": "float16", "transformers_version": "4.19.0", "use_cache": true,
  "vocab_size": 300, "word_embed_proj_dim": 64
}"""


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch):
    monkeypatch.setattr(pickled, "ask_child", lambda function, *arguments: function(*arguments))


def _old_folder(path, config, state):
    """A folder as it was uploaded then: a config, two pickled shards, their index."""
    path.mkdir()
    (path / "config.json").write_text(config)
    names = list(state)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"pytorch_model-{number:05}-of-00002.bin"
        torch.save({name: state[name] for name in part}, path / file)
        weight_map |= dict.fromkeys(part, file)
    (path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def _assert_same(tmp_path, old, new):
    """Of weights and sizes."""
    manifests = [convert(folder, tmp_path / f"out-{number}") for number, folder in enumerate((old, new))]
    assert manifests[0].architecture == manifests[1].architecture
    assert digests(manifests[0]) == digests(manifests[1])


@pytest.mark.parametrize("config", [LLAMA_CONFIG, LONG_LLAMA_CONFIG], ids=["first", "long"])
def test_llamas_of_2023(tmp_path, config):
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    if config == LONG_LLAMA_CONFIG:
        rope = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
    variant = {"hidden_act": "silu", "num_key_value_heads": 4, "rope_parameters": rope}
    new = make_checkpoint(tmp_path / "new", Variant("llama", variant), dtype="float16")
    state = load_file(new / "model.safetensors")
    for layer in range(3):
        state[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.rand(8)
    _assert_same(tmp_path, _old_folder(tmp_path / "old", config, state), new)
    blocks = [block_spec(config_of(tmp_path / name)) for name in ("old", "new")]
    assert blocks[0].norm_epsilon == blocks[1].norm_epsilon
    assert all(layer.mixer.kv_heads == 4 for block in blocks for layer in block.layers)


def test_opts_of_2022(tmp_path):
    new = make_tiny_opt(tmp_path / "new", dtype="float16")
    state = {name.removeprefix("model."): tensor for name, tensor in load_file(new / "model.safetensors").items()}
    state["decoder.version"] = torch.tensor([1.0])
    _assert_same(tmp_path, _old_folder(tmp_path / "old", OPT_CONFIG, state), new)


# Configs as transformers 5.9.0 wrote them, the lowest version allowed, where 5.23 writes other ones. Tensors have the
# same names in both.
LOWEST = json.loads(Path(__file__).with_name("configs_of_transformers_5_9.json").read_text())


@pytest.mark.parametrize("name", LOWEST)
def test_configs_of_the_lowest_transformers(tmp_path, name):
    new = make_checkpoint(tmp_path / "new", VARIANTS[name])
    old = shutil.copytree(new, tmp_path / "old")
    written = config_of(new)
    (old / "config.json").write_text(json.dumps(LOWEST[name]))
    _assert_same(tmp_path, old, new)
    assert block_spec(LOWEST[name]) == block_spec(written)
