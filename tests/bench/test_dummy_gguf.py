"""A dummy model as a GGUF file: the right tensors in the right kinds, and tokens that stay with their experts."""

import argparse
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import tables
from dummy_gguf import blocks, coded, config_of, embedding_walk, kinds, make, stored_nbytes, tensors
from make_synthetic_experts import locality
from scripts import document_of, run_script
from whole_model import PEER, peer_setting, touched_nbytes

from flashllm.config import RunConfig
from flashllm.convert.run import convert
from flashllm.engine.model import Model
from flashllm.format.model_dir import ModelDir

ROOT = Path(__file__).parents[2]

KINDS = gguf.GGMLQuantizationType
SMALL = {"hidden_size": 256, "vocab_size": 100, "num_attention_heads": 4}
MODELS = {
    "qwen3-30b-a3b": {"moe_intermediate_size": 256, "num_experts": 8},
    "qwen3.6-35b-a3b": {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256, "num_experts": 8},
    "glm-4.7-flash": {"moe_intermediate_size": 256, "n_routed_experts": 8, "intermediate_size": 512},
    "deepseek-v2-lite": {"moe_intermediate_size": 128, "n_routed_experts": 8, "intermediate_size": 512},
    "nemotron-3-nano": {
        "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 128,
        "n_routed_experts": 8,
        "mamba_num_heads": 8,
    },
    "gpt-oss-20b": {"intermediate_size": 256, "num_key_value_heads": 2},
    "llama-2-7b": {"intermediate_size": 512},
}
CHOICES = {"gpt-oss-20b": "mxfp4", "llama-2-7b": "tq2_0"}  # of others q4_k_m


def shapes_of(config):
    return {name: tuple(tensor.shape) for name, tensor in tensors(config).items()}


@pytest.mark.parametrize("name", MODELS)
def test_a_file_has_the_shape_and_runs_where_it_lies(tmp_path, name):
    config = config_of(name, 6 if name == "nemotron-3-nano" else 4, **SMALL, **MODELS[name])
    make(tmp_path / "m.gguf", config, CHOICES.get(name, "q4_k_m"))
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    found = {tensor.name: tuple(reversed(tensor.shape.tolist())) for tensor in reader.tensors}
    assert found == shapes_of(config)
    for tensor in reader.tensors:
        assert np.isfinite(gguf.dequantize(tensor.data, tensor.tensor_type)).all(), tensor.name
    convert(tmp_path / "m.gguf", tmp_path / "model", keep=True, in_place=True)
    with Model.open(tmp_path / "model", RunConfig(threads=1, io_threads=4)) as model:
        assert np.isfinite(model.step([(model.new_sequence(), [1, 2, 3])])).all()


def test_it_is_held_against_roofs_of_matrices_and_states(tmp_path):
    config = config_of("qwen3.6-35b-a3b", 4, **SMALL, **MODELS["qwen3.6-35b-a3b"])
    make(tmp_path / "m.gguf", config, "q4_k_m")
    quick = ["--memory", "1GB", "--engines", "flashllm", "--prompt", 12, "--tokens", 3, "--simd", "scalar"]
    document = document_of(run_script("bench/peer/whole_model.py", tmp_path / "m.gguf", *quick))
    block = ModelDir.open(tmp_path / "m.model").block
    # A token at position 13, 14 or 15, its own included.
    assert document["touched_states_bytes"] == block.mixers_read_nbytes(14, 2)
    assert document["touched_bytes"] == touched_nbytes(tmp_path / "m.gguf") + document["touched_states_bytes"]
    assert document["machine"]["used"] == "scalar"
    (run,) = document["runs"]
    assert run["roofs"]["products_ms"] == pytest.approx(1e3 * document["touched_bytes"] / run["roofs"]["memory_bps"])


def test_a_setting_of_the_peer_changes_what_it_names():
    assert peer_setting("repack,micro_batch=2048") == (
        "repack,micro_batch=2048",
        {**PEER, "repack": True, "micro_batch": 2048},
    )
    for wrong in ("", "micro_batch", "micro_batch=0", "flash_attention=no", "repack=1", "repack micro_batch=2048"):
        with pytest.raises(argparse.ArgumentTypeError, match="is none of"):
            peer_setting(wrong)


def warm_run(engine, prompt_s, token_ms, **more):
    return {
        "engine": engine,
        "runs": [
            {"name": "cold", "prompt": {"total_ms": 1.0}, "token_ms": 1.0},
            {"name": "warm", "prompt": {"total_ms": 1e3 * prompt_s}, "token_ms": token_ms},
        ],
        **more,
    }


def test_each_figure_is_held_against_the_peers_best_setting():
    small, large = ("llama.cpp", 30.0, 80.0), ("llama.cpp", 20.0, 90.0)
    ours = [warm_run("flashllm", *both) for both in ((9.0, 60.0), (11.0, 62.0))]
    killed = {"engine": "llama.cpp", "setting": "repack", "error": "killed", "runs": []}
    theirs = [warm_run(*small, setting="micro_batch=512"), warm_run(*large, setting="micro_batch=2048"), killed]
    assert tables.compared([*ours, *theirs]) == ("10.0 for 20.0 (micro_batch=2048)", "61 for 80 (micro_batch=512)")
    # The median of a setting's rounds, not its best one.
    lucky = warm_run("llama.cpp", 1.0, 1.0, setting="micro_batch=2048")
    prompt, token = tables.compared([*ours, *theirs, lucky, warm_run(*large, setting="micro_batch=2048")])
    assert (prompt, token) == ("10.0 for 20.0 (micro_batch=2048)", "61 for 80 (micro_batch=512)")
    # One setting has no name, and documents of before had none.
    assert (
        tables.compared([*ours, theirs[0]])
        == tables.compared([*ours, warm_run(*small)])
        == ("10.0 for 30.0", "61 for 80")
    )
    assert tables.compared([*ours, killed]) == ("10.0", "61")


def test_a_row_names_the_best_setting_and_the_instructions_used(tmp_path, monkeypatch):
    theirs = (warm_run("llama.cpp", *both, setting=setting) for setting, both in {"a": (3, 50), "b": (4, 40)}.items())
    document = {"rows": "q4_k", "layers": 8, "prompt": 512, "machine": {"simd": "avx512", "used": "avx2"}}
    document["runs"] = [{**run, "memory": 10**9} for run in (warm_run("flashllm", 2, 30), *theirs)]
    (tmp_path / "peer/results").mkdir(parents=True)
    (tmp_path / "peer/results/whole_m_8layers.json").write_text(json.dumps(document))
    monkeypatch.setattr(tables, "BENCH", tmp_path)
    row = "| m, Q4_K | 8 | 512 | 1 GB | 2.0 for 3.0 (a) | 30 for 40 (b) | avx2 | [JSON]"
    assert row in tables.whole_models()


def test_kinds_are_those_of_llama_cpps_quantiser():
    """As 0.3.36 of llama-cpp-python chose them for eight layers of these widths."""
    config = config_of("qwen3.6-35b-a3b", 8)
    found = kinds(shapes_of(config), 8, "q4_k_m")
    more = {name for name, kind in found.items() if kind == "Q6_K"}
    names = ("attn_qkv", "attn_v", "ffn_down_exps", "ffn_down_shexp")
    layers = {name: [i for i in range(8) if f"blk.{i}.{name}.weight" in more] for name in names}
    assert layers == {
        "attn_qkv": [0, 6],
        "attn_v": [3, 7],
        "ffn_down_exps": [0, 3, 6, 7],
        "ffn_down_shexp": [0, 3, 6, 7],
    }
    assert "output.weight" in more
    found = kinds(shapes_of(config_of("deepseek-v2-lite", 4)), 4, "q4_k_m")
    assert {found[f"blk.{i}.ffn_down_exps.weight"] for i in (1, 3)} == {"Q5_0", "Q8_0"}


def test_of_q2_k_down_matrices_have_a_bit_more():
    found = kinds(shapes_of(config_of("olmoe-1b-7b", 1)), 1, "q2_k")
    names = ("ffn_up_exps", "ffn_down_exps", "attn_q", "attn_norm")
    assert [found[f"blk.0.{name}.weight"] for name in names] == ["Q2_K", "Q3_K", "Q4_K", "F32"]


def test_of_tq2_0_embedding_and_head_have_more_bits():
    shapes = shapes_of(config_of("llama-2-7b", 1))
    found = kinds(shapes, 1, "tq2_0")
    names = ("token_embd", "output", "blk.0.ffn_down", "blk.0.attn_q", "blk.0.attn_norm")
    assert [found[f"{name}.weight"] for name in names] == ["Q4_K", "Q6_K", "TQ2_0", "TQ2_0", "F32"]
    del shapes["output.weight"]
    assert kinds(shapes, 1, "tq2_0")["token_embd.weight"] == "Q6_K"


def test_ternary_codes_are_equally_likely():
    """By the layout that ggml's own dequantiser reads: every place of a block has all three."""
    values = gguf.dequantize(blocks("TQ2_0", 0.02, np.random.default_rng(0))[:5000], KINDS["TQ2_0"])
    scale = values.max()
    for code in (-1, 0, 1):
        assert np.isclose(values, code * scale).mean(0) == pytest.approx(np.full(256, 1 / 3), abs=0.05)


@pytest.mark.parametrize(
    "kind", ["TQ2_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "BF16"]
)
def test_blocks_have_the_spread_that_is_asked_for(kind):
    stored = blocks(kind, 0.02, np.random.default_rng(0))[:5000]
    values = gguf.dequantize(stored, KINDS[kind])
    assert values.std() == pytest.approx(0.02, rel=0.2)
    assert abs(values.mean()) < 0.003


@pytest.mark.parametrize(("kind", "off"), [("Q4_K", 0.1), ("Q6_K", 0.03), ("Q8_0", 0.01), ("BF16", 0.005)])
def test_rows_are_coded(kind, off):
    rows = np.random.default_rng(0).standard_normal((4, 512)).astype(np.float32)
    stored = coded(rows, kind)
    assert stored.nbytes == stored_nbytes((4, 512), kind)
    assert (gguf.dequantize(stored, KINDS[kind]).reshape(4, 512) - rows).std() < off


@pytest.mark.parametrize(("experts", "chosen"), [(64, 8), (32, 4), (128, 8), (64, 4), (256, 8)])
def test_tokens_stay_with_their_experts(experts, chosen):
    random = np.random.default_rng(0)
    rows = np.concatenate(list(embedding_walk(300, 1024, chosen / experts, random)))
    routes = []
    for _ in range(6):
        router = random.standard_normal((experts, 1024), np.float32)
        routes.append(np.sort(np.argsort(-(rows @ router.T), axis=1)[:, :chosen], axis=1))
    again, hottest = locality(routes, experts)
    assert again == pytest.approx(0.40, abs=0.05)
    assert hottest == pytest.approx(0.37, abs=0.07)
