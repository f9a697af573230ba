"""Well-known models from configs alone: published sizes; an outline is what a conversion makes, but for weights."""

import json
import re

import pytest
import torch
from arch_models import VARIANTS, Variant, make_checkpoint
from profiles import BATCHES, profile_of
from test_fp8 import coded, in_bfloat16
from test_gpt_oss import mxfp4
from tiny_models import change_config, config_of, make_tiny_opt
from weights_of_folders import tensors_of

from flashllm.arch.registry import source_shapes
from flashllm.base.user_dirs import user_cache_dir
from flashllm.cli import main
from flashllm.commands.plan import OUTLINE_BITS, to_type
from flashllm.convert.outline import WellKnown, find_well_known, outlined, well_known, write_outline
from flashllm.convert.run import convert
from flashllm.format.manifest import Manifest
from flashllm.format.model_dir import ModelDir
from flashllm.format.safetensors import read_header
from flashllm.profile.store import device_of, save_profile

# Billions, as their makers publish them, or as their GGUF files say, where makers count encoders of pictures and sound
# or give a rounder number (layers that draft are not counted).
PUBLISHED = {
    "smollm2-135m": 0.1345, "olmoe-1b-7b": 6.92, "lfm2-8b-a1b": 8.3, "deepseek-v2-lite": 15.7, "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8, "ernie-4.5-21b-a3b": 21.8, "qwen3-30b-a3b": 30.5, "glm-4.7-flash": 29.9,
    "qwen3.6-35b-a3b": 34.7, "mixtral-8x7b": 46.7, "qwen3-next-80b-a3b": 79.7, "glm-4.5-air": 106.9, "dots.llm1": 142.8,
    "minimax-m2": 228.7, "deepseek-v3": 671.0, "llama-3.2-1b": 1.24, "llama-3.2-3b": 3.21, "llama-3.1-8b": 8.03,
    "llama-3.3-70b": 70.6, "qwen3-0.6b": 0.6, "qwen3-4b": 4.02, "qwen3-8b": 8.19, "qwen3-14b": 14.8, "qwen3-32b": 32.8,
    "mistral-7b": 7.25, "mistral-nemo-12b": 12.2, "gemma-2-2b": 2.61, "gemma-2-9b": 9.24, "gemma-2-27b": 27.2,
    "gemma-3-1b": 1.0, "gemma-3-4b": 3.88, "gemma-3-12b": 11.8, "gemma-3-27b": 27.0, "opt-1.3b": 1.32, "opt-2.7b": 2.65,
    "opt-6.7b": 6.66, "opt-13b": 12.85, "opt-30b": 29.97, "opt-66b": 65.7, "prosparse-7b": 6.74, "prosparse-13b": 13.0,
    "qwen3-coder-next": 79.7, "kimi-k2": 1026, "kimi-linear-48b-a3b": 49.1, "qwen3.5-0.8b": 0.758, "qwen3.5-2b": 1.89,
    "qwen3.5-4b": 4.21, "qwen3.5-9b": 8.96, "qwen3.6-27b": 26.9, "gemma-4-e2b": 4.65, "gemma-4-e4b": 7.5,
    "gemma-4-26b-a4b": 25.2, "gemma-4-31b": 30.7, "nemotron-3-nano": 31.6,
    "mistral-small-4-119b": 119.0, "qwen3.5-122b-a10b": 122.1, "gemma-3n-e2b": 4.46, "gemma-3n-e4b": 6.87,
    "hunyuan-a13b": 80.4, "mimo-v2-flash": 309.0, "trinity-nano": 6.12, "trinity-mini": 26.1, "glm-4.6": 352.8,
    "ling-mini-2.0": 16.26, "ling-flash-2.0": 102.9, "granite-4.0-h-small": 32.2, "granite-4.0-h-tiny": 6.94,
    "bitnet-2b-4t": 2.41, "falcon-h1-3b": 3.15,
}  # fmt: skip


def test_an_outline_needs_no_home_that_can_be_written(home):
    home.touch()
    with outlined(find_well_known("qwen3-0.6b"), 4) as path:
        assert ModelDir.open(path).manifest.architecture.num_layers == 28


def test_every_model_has_its_published_size():
    assert {one.name for one in well_known()} == set(PUBLISHED)
    for one in well_known():
        assert one.parameters / 1e9 == pytest.approx(PUBLISHED[one.name], rel=0.01), one.name


@pytest.mark.parametrize("bits", [16, 4])
def test_an_outline_has_the_sizes_and_headers_of_the_conversion(tmp_path, bits):
    source = make_tiny_opt(tmp_path / "source")
    encoding = None if bits == 16 else "int4_32"
    choices = {"dtype": "bfloat16", "encoding": encoding, "resident_encoding": encoding, "predictors": True}
    convert(source, tmp_path / "made", **choices)
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "outline").mkdir()
    write_outline(config, source_shapes(config), tmp_path / "outline", bits=bits, source_name="source")
    compare_files(tmp_path, ("ffn.safetensors", "resident.safetensors", "predictors.safetensors"))


def test_an_outline_has_a_table_of_rows_by_id(tmp_path, variant_of):
    source, _ = variant_of("gemma4 shared keys, rows of ids")
    convert(source, tmp_path / "made", dtype="bfloat16", predictors=True)
    (tmp_path / "outline").mkdir()
    write_outline(
        config_of(source), source_shapes(config_of(source)), tmp_path / "outline", bits=16, source_name="source"
    )
    compare_files(tmp_path, ("token_rows.safetensors", "resident.safetensors"))
    assert ModelDir.open(tmp_path / "outline").table == ModelDir.open(tmp_path / "made").table


def compare_files(tmp_path, names):
    """The manifests' layouts; each file in its size and with its headers, and without its bytes."""
    outline, made = (ModelDir.open(tmp_path / place).manifest for place in ("outline", "made"))
    assert (outline.rows, outline.resident_encoding, outline.dtype) == (made.rows, made.resident_encoding, made.dtype)
    assert (outline.activations, outline.checksum_rows) == (made.activations, made.checksum_rows)
    for name in names:
        assert outline.files[name].nbytes == made.files[name].nbytes, name
        headers = [read_header(tmp_path / place / name).tensors for place in ("outline", "made")]
        assert headers[0] == headers[1], name
        assert (tmp_path / "outline" / name).stat().st_blocks * 512 <= max(1 << 14, made.files[name].nbytes)


def test_an_outline_takes_no_room_and_is_gone_at_the_end(home):
    known = find_well_known("QWEN/qwen3-30b-a3b-instruct-2507")
    assert known.name == "qwen3-30b-a3b"
    with outlined(known, 4) as path:
        files = list(path.iterdir())
        assert sum(each.stat().st_size for each in files) > 17e9
        assert sum(each.stat().st_blocks * 512 for each in files) < 2e6
    assert list(user_cache_dir().iterdir()) == []
    assert find_well_known(None) is None
    assert find_well_known("nobody/knows") is None


def run(capsys, *argv):
    status = main([str(each) for each in argv])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_a_plan_of_a_model_that_is_not_here(home, tmp_path, capsys):
    store = tmp_path / "profiles.json"
    user_cache_dir().mkdir(parents=True)
    save_profile(store, device_of(user_cache_dir()), profile_of())
    status, out, err = run(capsys, "plan", "qwen3-30b-a3b", "--memory", "8GB", "--store", store)
    assert status == 0, err
    assert out.startswith("Qwen/Qwen3-30B-A3B-Instruct-2507\n")
    assert "flashllm convert Qwen/Qwen3-30B-A3B-Instruct-2507 qwen3-30b-a3b --bits 4 --resident-bits 4" in out
    assert "--context 8192" in out
    assert re.search(r"the first token of a prompt of 128: \d\.\d s of reads; `flashllm calibrate`", out)
    status, out, _ = run(capsys, "plan", "qwen3-30b-a3b", "--memory", "8GB", "--store", store, "--json")
    document = json.loads(out)
    assert document["token"]["total_s"] > 0
    # All experts of 128 tokens, but for those that the cache holds.
    assert document["prompt"]["bytes_read"] == pytest.approx(17e9 - document["neuron_cache_bytes"], rel=0.1)
    status, _, err = run(capsys, "plan", "qwen3-30b", "--memory", "8GB")
    assert status == 2


@pytest.mark.parametrize("kind", ["16 bits", "mxfp4", "fp8", "bitnet"])
def test_what_it_says_to_type_makes_what_it_planned(tmp_path, capsys, kind):
    if kind == "16 bits":
        source = make_tiny_opt(tmp_path / "source", dtype="bfloat16")
    elif kind == "mxfp4":
        wide = Variant("gpt_oss", {**VARIANTS["gpt_oss"].config, "intermediate_size": 64})
        source = make_checkpoint(tmp_path / "source", wide, dtype="bfloat16")
        mxfp4(source)
    elif kind == "bitnet":
        source = make_checkpoint(tmp_path / "source", VARIANTS["bitnet"], dtype="bfloat16")
        said = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"}
        change_config(source, quantization_config=said)
        with tensors_of(source) as state:
            for name in [name for name in state if name.endswith("_proj.weight")]:
                state[name], state[f"{name}_scale"] = state[name].sign(), torch.ones(1)
    else:
        source, _ = coded(tmp_path, (16, 16))
        in_bfloat16(source)
    known = WellKnown(name="made", hub="nobody/tiny", config=config_of(source))
    program, verb, _, _, *options = to_type(known).split()
    assert program == "flashllm"
    status, _, err = run(capsys, verb, source, tmp_path / "made", *options)
    assert status == 0, err
    assert ("are kept" in err) == (kind in ("mxfp4", "bitnet"))
    (tmp_path / "outline").mkdir()
    write_outline(known.config, known.shapes, tmp_path / "outline", bits=OUTLINE_BITS, source_name=known.hub)
    compare_files(tmp_path, ("ffn.safetensors", "resident.safetensors"))
    outline, made = (Manifest.load(tmp_path / place) for place in ("outline", "made"))
    assert outline.down_scales == made.down_scales


def test_models_that_need_least_come_first(home, tmp_path, capsys, monkeypatch):
    few = [one for one in well_known() if one.name in ("qwen3-30b-a3b", "llama-3.3-70b", "smollm2-135m")]
    monkeypatch.setattr("flashllm.convert.outline.well_known", lambda: few)
    status, out, err = run(capsys, "models", "--memory", "8GB", "--store", tmp_path / "none.json")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()[2:5]] == ["smollm2-135m", "qwen3-30b-a3b", "llama-3.3-70b"]
    assert "needs more" in out.splitlines()[4]
    assert "never run trained" in out
    assert "flashllm calibrate" in err
    user_cache_dir().mkdir(parents=True, exist_ok=True)
    save_profile(tmp_path / "profiles.json", device_of(user_cache_dir()), profile_of())
    status, out, err = run(capsys, "models", "--memory", "8GB", "--store", tmp_path / "profiles.json", "--json")
    assert {one["first_token_s"] for one in json.loads(out)["models"]} == {None}  # reads alone would say too little
    batches = dict.fromkeys(("float16", "bfloat16"), BATCHES)
    save_profile(tmp_path / "profiles.json", device_of(user_cache_dir()), profile_of(batches=batches))
    status, out, _ = run(capsys, "models", "--memory", "8GB", "--store", tmp_path / "profiles.json", "--json")
    smollm2, qwen, llama = json.loads(out)["models"]
    assert (smollm2["run_trained"], qwen["run_trained"]) == (True, False)
    assert smollm2["type"] == "flashllm chat smollm2"
    assert qwen["type"].startswith("flashllm convert Qwen/")
    assert 0 < smollm2["token_s"] < qwen["token_s"] < qwen["first_token_s"]
    assert (llama["fits"], llama["token_s"]) == (False, None)
    assert qwen["bytes"]["16"] > qwen["bytes"]["8"] > qwen["bytes"]["4"] > 17e9
