"""`ModelShape`: sizes of the paper's models and of configs, and what is refused."""

import dataclasses
import json

import pytest
from arch_models import Variant, make_checkpoint
from gguf_files import write_gguf

from flashllm.convert.run import convert
from flashllm.errors import FormatError, UnsupportedModelError, UsageError
from flashllm.offload.shape import load_shape, shape_from_config

LLAMA_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def test_opt_175b_takes_the_papers_325_gib():
    shape = load_shape("opt-175b")
    assert (shape.layers, shape.hidden, shape.ffn) == (96, 12288, 49152)  # section 3
    assert shape.layer_bytes == 8 * 12288**2 + 4 * 12288 * 49152
    assert round(shape.layers * shape.layer_bytes / 2**30) == 324
    assert shape.kv_token_bytes == 4 * 12288
    assert shape.kv_token_bytes * 512 * (512 + 32) * 96 == pytest.approx(1.2 * 2**40, rel=0.03)  # section 3: 1.2 TB


@pytest.mark.parametrize(
    ("name", "billions"),
    [("opt-1.3b", 1.3), ("opt-2.7b", 2.7), ("opt-6.7b", 6.7), ("opt-13b", 13), ("opt-30b", 30), ("opt-66b", 66)],
)
def test_opts_sizes_are_their_names(name, billions):
    assert load_shape(name).model_bytes / 2 == pytest.approx(billions * 1e9, rel=0.03)


def test_gated_grouped_query_model(tmp_path):
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    for where in (folder, folder / "config.json"):
        shape = load_shape(str(where))
        assert shape.name == "tiny-llama"
        assert shape.gated
        assert len(shape.matrix_params) == 7
        assert shape.kv_dim == 1024
        assert shape.model_bytes / 2 == pytest.approx(8.03e9, rel=0.002)


def test_a_config_without_kv_heads_has_as_many_as_heads():
    config = {key: value for key, value in LLAMA_8B.items() if key != "num_key_value_heads"}
    assert shape_from_config(config, name="x").kv_heads == 32


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"model_type": "rwkv"}, UnsupportedModelError),
        ({"model_type": ["llama"]}, UnsupportedModelError),
        ({"hidden_size": None}, FormatError),
        ({"num_hidden_layers": 0}, FormatError),
        ({"num_key_value_heads": 5}, FormatError),
        ({"num_attention_heads": 0, "num_key_value_heads": None}, FormatError),
        ({"vocab_size": "many"}, FormatError),
        ({"word_embed_proj_dim": 512}, UnsupportedModelError),
    ],
)
def test_impossible_configs_are_refused(change, error):
    with pytest.raises(error, match="x"):
        shape_from_config({**LLAMA_8B, **change}, name="x")


def test_missing_size_names_its_key():
    with pytest.raises(FormatError, match="vocab_size"):
        shape_from_config({key: value for key, value in LLAMA_8B.items() if key != "vocab_size"}, name="x")


def test_known_models_and_gguf_files_are_planned_by_what_they_say(tmp_path):
    known = load_shape("Qwen3-30B-A3B")
    assert (known.layers, known.experts, known.ffn_active) == (48, 128, 8 * 768)
    hybrid = load_shape("qwen3.6-35b-a3b")
    assert (hybrid.layers, hybrid.kept_layers, hybrid.kv_token_bytes) == (40, 10, 2 * 2 * 256 * 2)
    assert hybrid.state_bytes == 30 * 4 * (32 * 128 * 128 + 3 * 8192)
    assert (hybrid.share(3).layers, hybrid.share(3).kept_layers) == (14, 4)
    with pytest.raises(UnsupportedModelError, match="per-layer embeddings"):
        load_shape("gemma-4-e4b")
    folder = make_checkpoint(tmp_path / "tiny", Variant("llama", {"hidden_act": "silu"}))
    file = write_gguf(folder, tmp_path / "tiny.gguf", tokenizer=False)
    convert(file, tmp_path / "converted")
    for each in (file, tmp_path / "converted"):
        assert load_shape(str(each)).dtype == "float32"  # which a config may not say, and rates differ by
    ours, theirs = (dataclasses.replace(load_shape(str(each)), dtype_bytes=2) for each in (file, folder))
    assert ours == dataclasses.replace(theirs, assembled=True)  # it is converted first


def test_unknown_models_and_damaged_files(tmp_path):
    with pytest.raises(UsageError, match=r"opt-175b"):
        load_shape("opt-3b")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(FormatError, match="JSON"):
        load_shape(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(FormatError, match="object"):
        load_shape(str(tmp_path))


def test_a_token_uses_few_neurons_of_a_mixture_of_experts():
    sizes = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 4, "intermediate_size": 96}
    experts = {"model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 2}
    shape = shape_from_config(experts | sizes, name="x")
    assert (shape.experts, shape.ffn, shape.ffn_active) == (8, 8 * 96, 2 * 96)
    dense = shape_from_config({"model_type": "llama"} | sizes, name="x")
    assert (dense.experts, dense.ffn_active) == (0, dense.ffn)
